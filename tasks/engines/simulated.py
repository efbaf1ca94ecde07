"""An SGLang server inside this process, for proofs about publishing: no model, no port, no waiting.

It reads real packages into real memory and computes from it. The client in front of it is the product's own; only the
wire is missing. It has the traps of SGLang 0.5.23:

- a package with tensors missing is a success, and the missing ones keep their old values;
- the label is whatever the caller said;
- KV stays in the prefix cache, per `extra_key` and prefix, until it is flushed, whatever weights made it;
- with a request running a flush fails, and an update writes the weights but answers 400 under the old label;
- one of several ranks may keep its old weights and nobody says so (`keeps_old`), and a tensor's values are those of
  rank 0 alone;
- a command goes on when its caller stopped waiting;
- a damaged file kills it, and after a restart it has the base weights, under a label of its boot.

    server = SimulatedServer(random_weights(0), ranks=2)
    engine = SimulatedEngine("engine0", server)

What no real server tells is in `served`: by request id, which weights each token and each position of its KV came from.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from tasks.engines.client import Engine
from tasks.engines.toy import CONTEXT, EOS, VOCABULARY, Weights, kv_of, next_logprobs, score

POLL_S = 0.001


@dataclass
class _Request:
    """A generation under way. Each token has the label the server told for it."""

    prompt: list[int]
    kv: np.ndarray  # of the prompt and the tokens so far, as the weights of each moment made it
    kv_by: list[str]  # for each of them `held` of those weights
    cached: int
    aborted: bool = False
    overwritten: bool = False  # the weights were written while it ran
    made_by: list[str] = field(default_factory=list)  # for each token `held` of the weights that made it
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def spans(self) -> list[dict[str, Any]]:
        cuts = [i for i, label in enumerate(self.labels) if i == 0 or label != self.labels[i - 1]]
        return [
            {"version": self.labels[start], "start": start, "end": end}
            for start, end in zip(cuts, [*cuts[1:], len(self.ids)], strict=False)  # no cuts: no spans
        ]

    def reason(self) -> str:
        if self.aborted:
            return "abort"
        return "stop" if self.ids[-1] == EOS else "length"


def held(ranks: list[dict[str, np.ndarray]]) -> str:
    """One name for what all ranks hold: equal names, equal weights."""
    digest = hashlib.sha256()
    for rank in ranks:
        for name in sorted(rank):
            digest.update(rank[name].tobytes())
    return digest.hexdigest()[:12]


class SimulatedServer:
    """`calls` holds the path of every request that came. `hung`: running requests neither go on nor end."""

    def __init__(self, base: Weights, ranks: int = 1) -> None:
        self.base = base
        self.rank_count = ranks
        self.keeps_old: set[int] = set()
        self.hung = False
        self.calls: list[str] = []
        self.lives = 0
        self.served: dict[str, _Request] = {}
        self._work: set[asyncio.Task[httpx.Response]] = set()
        self.restart()

    def restart(self) -> None:
        self.alive = True
        self.lives += 1
        self.boot = self.label = self._span_label = f"boot-{self.lives:016x}"
        self.path = "base"
        self.ranks = self.shares(self.base)
        self.held = held(self.ranks)  # names what is in the memory of all ranks
        self.paused = False
        self.running: dict[str, _Request] = {}
        self.cache: dict[str, list[_Request]] = {}  # extra_key -> whose prompt's KV is kept

    @property
    def updates(self) -> int:
        """Weight updates that were asked for."""
        return self.calls.count("/update_weights_from_disk")

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """What all ranks together compute with; each rank holds some rows."""
        return {name: np.concatenate([rank[name] for rank in self.ranks]) for name in self.ranks[0]}

    def shares(self, weights: Weights) -> list[dict[str, np.ndarray]]:
        """What each rank must hold of these weights."""
        split = {name: np.array_split(value, self.rank_count) for name, value in weights.items()}
        return [{name: parts[rank] for name, parts in split.items()} for rank in range(self.rank_count)]

    # -- the wire

    async def answer(self, request: httpx.Request) -> httpx.Response:
        return await self.call(request.url.path, json.loads(request.content or b"{}"))

    async def call(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Whoever hangs up ends a generation, nothing else."""
        self.calls.append(path)
        work = asyncio.create_task(self._answer(path, body))
        self._work.add(work)
        work.add_done_callback(self._finished)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if path == "/generate":
                work.cancel()
            raise

    def _finished(self, work: asyncio.Task[httpx.Response]) -> None:
        self._work.discard(work)
        if not work.cancelled():
            work.exception()  # taken note of, for the caller may be gone

    async def _answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if not self.alive:
            raise httpx.ConnectError("nobody listens")
        match path:
            case "/generate":
                return await self._generate(body)
            case "/pause_generation":
                return await self._pause()
            case "/update_weights_from_disk":
                return self._update(body)
            case "/flush_cache":
                if self.running:
                    return httpx.Response(400, text="Timed out waiting for idle state.")
                self.cache.clear()
                return httpx.Response(200, text="Cache flushed.")
            case "/continue_generation":
                self.paused = False
                return httpx.Response(200, json={"status": "ok"})
            case "/weights_checker":
                return httpx.Response(200, json={"ranks": [self._checksums(rank) for rank in range(self.rank_count)]})
            case "/get_weights_by_name":
                return self._first_rows(body)
            case "/model_info":
                return httpx.Response(200, json={"weight_version": self.label, "model_path": self.path})
            case "/server_info":
                return httpx.Response(200, json={"weight_version": self.boot})
            case "/v1/loads":
                load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
                return httpx.Response(200, json={"loads": [load]})
            case "/ready":
                return httpx.Response(503 if self.paused else 200)
        return httpx.Response(404)

    async def _until(self, condition: Callable[[], bool]) -> None:
        life = self.lives
        while not condition():
            await asyncio.sleep(POLL_S)
            if (self.lives, self.alive) != (life, True):
                raise httpx.ReadError("connection reset")

    # -- commands

    async def _pause(self) -> httpx.Response:
        """Mode abort: every request gets its tokens so far, and only then the pause is answered."""
        self.paused = True
        for request in self.running.values():
            request.aborted = True
        await self._until(lambda: not self.running)
        return httpx.Response(200, json={"status": "ok"})

    def _update(self, body: dict[str, Any]) -> httpx.Response:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if not files:
            return httpx.Response(400, json={"success": False, "message": "Failed to update weights: no such folder."})
        try:
            new = {name: value for file in files for name, value in load_file(file).items()}
        except SafetensorError:
            self.alive = False
            raise httpx.ReadError("connection reset") from None
        self._write([{} if rank in self.keeps_old else share for rank, share in enumerate(self.shares(new))])
        self._span_label = body["weight_version"]
        if body["flush_cache"]:
            if self.running:
                message = "Weights were updated, but the cache was not flushed because requests are still running."
                return httpx.Response(400, json={"success": False, "message": message})
            self.cache.clear()
        self.label, self.path = body["weight_version"], body["model_path"]
        return httpx.Response(200, json={"success": True})

    def _write(self, shares: list[dict[str, np.ndarray]]) -> None:
        """Over what each rank holds, under whoever reads it."""
        for rank, share in zip(self.ranks, shares, strict=True):
            rank |= share
        self.held = held(self.ranks)
        for request in self.running.values():
            request.overwritten = True

    def _checksums(self, rank: int) -> dict[str, Any]:
        sums = {name: hashlib.sha256(value.tobytes()).hexdigest()[:16] for name, value in self.ranks[rank].items()}
        return {"checksums": sums, "parallelism_info": [{"rank": rank, "size": self.rank_count}]}

    def _first_rows(self, body: dict[str, Any]) -> httpx.Response:
        if body["name"] not in self.ranks[0]:
            return httpx.Response(400, json={"error": {"message": "Get parameter by name failed"}})
        return httpx.Response(200, json=self.ranks[0][body["name"]][: body["truncate_size"]].astype(float).tolist())

    # -- generation

    async def _generate(self, body: dict[str, Any]) -> httpx.Response:
        rid, prompt, sampling = body["rid"], body["input_ids"], body["sampling_params"]
        scored = body.get("logprob_start_len", -1) == 0  # computed anew: the cache keeps no log-probabilities
        await self._until(lambda: not self.paused)
        request = self._prefill("" if scored else body["extra_key"], prompt, look=not scored)
        inputs = [None, *score(self.weights, prompt, request.kv)] if scored else []
        running = self.running
        running[rid] = self.served[rid] = request
        try:
            await self._decode(request, rid, sampling["max_new_tokens"], sampling["temperature"])
        finally:
            del running[rid]
        meta = {
            "id": rid,
            "finish_reason": {"type": request.reason()},
            "completion_tokens": len(request.ids),
            "cached_tokens": request.cached,
            "num_retractions": 0,
            "weight_versions": request.spans(),
            "input_token_logprobs": [[value, token, None] for value, token in zip(inputs, prompt, strict=False)],
            "output_token_logprobs": [[p, i, None] for p, i in zip(request.logprobs, request.ids, strict=True)],
        }
        return httpx.Response(200, json={"output_ids": request.ids, "meta_info": meta})

    def _prefill(self, key: str, prompt: list[int], look: bool) -> _Request:
        """The prompt's KV, as far as possible from the cache if it may `look`; at least the last token is computed."""
        cached = 0
        known: _Request | None = None
        for other in (entries := self.cache.setdefault(key, []) if look else []):
            pairs = zip(other.prompt, prompt, strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(other.prompt))
            if min(same, len(prompt) - 1) > cached:
                cached, known = min(same, len(prompt) - 1), other
        kv, kv_by = kv_of(self.weights, prompt[cached:]), [self.held] * (len(prompt) - cached)
        if known:
            kv, kv_by = np.concatenate([known.kv[:cached], kv]), [*known.kv_by[:cached], *kv_by]
        request = _Request(prompt, kv, kv_by, cached)
        entries.append(request)
        return request

    async def _decode(self, request: _Request, rid: str, tokens: int, temperature: float) -> None:
        random = np.random.default_rng(list(rid.encode()))
        while len(request.ids) < tokens and request.ids[-1:] != [EOS]:
            await self._until(lambda: not self.hung and (request.aborted or not self.paused))
            if request.aborted:
                return
            logprobs = next_logprobs(self.weights, request.kv, temperature or 1.0)
            token = int(random.choice(VOCABULARY, p=np.exp(logprobs)) if temperature else logprobs.argmax())
            request.ids.append(token)
            request.logprobs.append(float(logprobs[token]))
            request.labels.append(self._span_label)
            request.made_by.append(self.held)
            request.kv = np.concatenate([request.kv, kv_of(self.weights, [token])])
            request.kv_by.append(self.held)
            await asyncio.sleep(0)


class SimulatedEngine(Engine):
    """The product's client of the server's present boot."""

    def __init__(self, name: str, server: SimulatedServer) -> None:
        super().__init__(name, "http://simulated", vocab_size=VOCABULARY, context_length=CONTEXT, boot=server.boot)
        self.server = server
        self._http = httpx.AsyncClient(base_url=self.url, transport=httpx.MockTransport(server.answer))
