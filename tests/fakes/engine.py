"""A fake SGLang 0.5.23: a real HTTP server on loopback, for faults only. The main path is tested against the real one.

It keeps the rules of the real server that the product relies on: keys, pausing, flushing, spans over the output tokens,
one checksum per rank and tensor, and its weak points: a package with tensors missing is accepted, a truncated file or a
token outside the vocabulary kills it. As on a GPU its memory can be released, after which its weights are undefined;
whatever needs that memory then, or a release while a request runs, kills it. What it says is a pure function of its
weights (`toy_logprob`). Misbehaviour is injected per route from `tests.fakes.faults`, one behaviour each.

    async with FakeEngine() as fake:
        fake.inject("/generate", faults.status(503), times=2)
"""

import asyncio
import hashlib
import secrets
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from tests.fakes.toy_model import BASE, EOS, Tensor, Weights, content_of, read_weights, toy_logprob

ADMIN = {
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/update_weights_from_disk",
    "/weights_checker",
    "/get_weights_by_name",
    "/abort_request",
    "/release_memory_occupation",
    "/resume_memory_occupation",
}
OPEN = {"/ready", "/health"}
NEED_MEMORY = {"/generate", "/update_weights_from_disk", "/weights_checker", "/get_weights_by_name"}
UNDEFINED = Tensor("F32", (2, 2), bytes(16))  # what weights are after their memory was released


@dataclass
class Call:
    """One request on its way to its handler; a behaviour may look, change the answer, or never let it through."""

    engine: "FakeEngine"
    request: web.Request
    body: dict[str, Any]
    handler: Callable[[dict[str, Any]], Awaitable[web.Response]]

    async def proceed(self) -> web.Response:
        return await self.handler(self.body)


Behaviour = Callable[[Call], Awaitable[web.StreamResponse]]


@dataclass
class Fault:
    behaviour: Behaviour
    times: int | None  # requests it still hits; None: all
    only: Callable[[dict[str, Any]], bool]


@dataclass
class Running:
    """A request in generation: its output so far, each token with its log-probability and its weights' label."""

    rid: str
    aborted: bool = False
    retractions: int = 0
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)

    def spans(self, label: str) -> list[dict[str, Any]]:
        spans: list[dict[str, Any]] = []
        for i, own in enumerate(self.labels):
            if spans and spans[-1]["version"] == own:
                spans[-1]["end"] = i + 1
            else:
                spans.append({"version": own, "start": i, "end": i + 1})
        return spans or [{"version": label, "start": 0, "end": 0}]


class FakeEngine:
    """`calls` logs (route, body) of all that arrived. `hold_at = n` stops requests after n tokens until `release()`."""

    def __init__(
        self,
        weights: Weights = BASE,
        *,
        label: str = "",
        ranks: int = 1,
        response_tokens: int = 4,
        vocab_size: int = 1000,
        context_length: int = 2048,
        api_key: str = "",
        admin_key: str = "",
    ) -> None:
        self.base = weights
        self.rank_count = ranks
        self.response_tokens = response_tokens
        self.vocab_size = vocab_size
        self.context_length = context_length
        self.api_key = api_key
        self.admin_key = admin_key
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.faults: dict[str, list[Fault]] = defaultdict(list)
        self.hold_at: int | None = None
        self.most_running = 0
        self.port = 0
        self.changed = asyncio.Condition()
        self._reset(label)

    def _reset(self, label: str = "") -> None:
        """The state of a server that has just started: base weights under a label nobody publishes."""
        self.boot = f"boot-{secrets.token_hex(8)}"
        self.label = self.span_label = label or self.boot
        self.path = "base"
        self.ranks = [dict(self.base) for _ in range(self.rank_count)]
        self.paused = ""  # the mode of the pause; empty: running
        self.released = False
        self.running: dict[str, Running] = {}
        self.cache: dict[str, list[tuple[tuple[int, ...], str]]] = defaultdict(list)  # key: (prefix, its KV's content)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return bool(self.runner.sites)

    def routed(self, route: str) -> list[dict[str, Any]]:
        return [body for path, body in self.calls if path == route]

    def inject(
        self,
        route: str,
        behaviour: Behaviour,
        *,
        times: int | None = 1,
        only: Callable[[dict[str, Any]], bool] = lambda body: True,
    ) -> None:
        """The next `times` requests (None: all) to `route` whose body satisfies `only` meet this behaviour."""
        self.faults[route].append(Fault(behaviour, times, only))

    # life

    async def __aenter__(self) -> Self:
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{route:.*}", self._serve)
        self.runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self.runner.setup()
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.die()
        await self.runner.cleanup()

    async def _listen(self) -> None:
        site = web.TCPSite(self.runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def die(self) -> None:
        """What kill -9 looks like from outside: nobody listens, and every connection is reset."""
        for site in list(self.runner.sites):
            await site.stop()
        self._drop_connections()

    async def restart(self) -> None:
        """Back at once on the same port: connections reset, another boot, the base weights."""
        self._reset()
        if not self.alive:
            await self._listen()
        self._drop_connections()

    def _drop_connections(self) -> None:
        for connection in list(self.runner.server.connections if self.runner.server else ()):
            if connection.transport is not None:
                connection.transport.abort()

    async def release(self) -> None:
        self.hold_at = None
        await self._notify()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    # serving

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        route = request.path
        handler = getattr(self, f"_on{route.replace('/', '_')}", None)
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        if not self._allowed(route, request.headers.get("Authorization", "")):
            return web.json_response({"error": "Unauthorized"}, status=401)
        body = {**request.query, **(await request.json() if request.can_read_body else {})}
        self.calls.append((route, body))
        if self.released and route in NEED_MEMORY:
            await self.die()
        call = Call(self, request, body, handler)
        for fault in self.faults[route]:
            if fault.times != 0 and fault.only(body):
                fault.times = None if fault.times is None else fault.times - 1
                return await fault.behaviour(call)
        return await call.proceed()

    def _allowed(self, route: str, header: str) -> bool:
        """With both keys set, the admin key is no good for the normal routes, nor the other way round."""
        if route in OPEN:
            return True
        key = self.admin_key or self.api_key if route in ADMIN else self.api_key
        return not key or secrets.compare_digest(header, f"Bearer {key}")

    async def _on_ready(self, body: dict[str, Any]) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    _on_health = _on_ready

    async def _on_model_info(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"model_path": self.path, "weight_version": self.label, "is_generation": True})

    async def _on_server_info(self, body: dict[str, Any]) -> web.Response:
        return web.json_response(
            {
                "weight_version": self.boot,  # the launch argument; /model_info has the present one
                "version": "0.5.23",
                "api_key": self.api_key,
                "admin_api_key": self.admin_key,
                "context_length": self.context_length,
                "tp_size": self.rank_count,
                "internal_states": [{"last_gen_throughput": 0.0}],
            }
        )

    async def _on_v1_loads(self, body: dict[str, Any]) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        return web.json_response({"version": "0.5.23", "loads": [load]})

    async def _on_pause_generation(self, body: dict[str, Any]) -> web.Response:
        self.paused = body.get("mode", "abort")
        for running in self.running.values():
            running.aborted |= self.paused == "abort"
            running.retractions += self.paused == "retract"
        await self._notify()
        while self.paused == "abort" and self.running:
            await asyncio.sleep(0)
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _on_continue_generation(self, body: dict[str, Any]) -> web.Response:
        self.paused = ""
        await self._notify()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _on_release_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        if self.running or self.released:
            await self.die()
        self.released = True
        self.cache.clear()
        self.ranks = [dict.fromkeys(rank, UNDEFINED) for rank in self.ranks]
        return web.Response()

    async def _on_resume_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        if not self.released:
            await self.die()
        self.released = False
        return web.Response()

    async def _on_abort_request(self, body: dict[str, Any]) -> web.Response:
        for running in self.running.values():  # by prefix, as the real scheduler does
            running.aborted |= bool(body.get("abort_all")) or running.rid.startswith(body["rid"])
        await self._notify()
        return web.Response()

    async def _on_flush_cache(self, body: dict[str, Any]) -> web.Response:
        if self.running:
            return web.Response(status=400, text="Timed out waiting for idle state.\n")
        self.cache.clear()
        return web.Response(text="Cache flushed.\n")

    async def _on_update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        def answer(success: bool, message: str) -> web.Response:
            content = {"success": success, "message": message, "num_paused_requests": 0}
            return web.json_response(content, status=200 if success else 400)

        try:
            new = read_weights(Path(body["model_path"]))
        except FileNotFoundError as error:
            return answer(False, f"Failed to update weights: {error}.")
        except ValueError:
            await self.die()
            return answer(False, "never arrives")
        self.ranks = [{**rank, **new} for rank in self.ranks]
        label = body.get("weight_version") or self.label
        self.span_label = label
        if body.get("flush_cache", True):
            if self.running and self.paused != "retract":
                return answer(
                    False,
                    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
                    "Retract or finish them, then call /flush_cache.",
                )
            self.cache.clear()
        self.label, self.path = label, body["model_path"]
        return answer(True, f"Succeeded to update model weights. Weight version updated to {label}.")

    async def _on_weights_checker(self, body: dict[str, Any]) -> web.Response:
        ranks: list[dict[str, Any]] = []
        for number, rank in enumerate(self.ranks):
            sums = {name: tensor.checksum for name, tensor in rank.items()}
            place: dict[str, Any] = {"role": "target", "tp_rank": number, "tp_size": self.rank_count, "rank": number}
            place |= {"dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1, "size": self.rank_count}
            ranks.append({"checksums": sums, "per_gpu_checksum": content_of(rank), "parallelism_info": [place]})
        whole = hashlib.sha256("".join(rank["per_gpu_checksum"] for rank in ranks).encode()).hexdigest()
        return web.json_response({"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": whole})

    async def _on_get_weights_by_name(self, body: dict[str, Any]) -> web.Response:
        tensor = self.ranks[0].get(body["name"])
        if tensor is None:
            return web.json_response({"error": {"message": "Get parameter by name failed"}}, status=400)
        return web.json_response(tensor.values().astype(float).tolist()[: body.get("truncate_size", 100)])

    # generation

    async def _on_generate(self, body: dict[str, Any]) -> web.Response:
        prompt, params, rid = body["input_ids"], body["sampling_params"], body["rid"]
        if refusal := self._refusal(rid, prompt, params):
            return web.json_response({"error": {"message": refusal}}, status=400)
        if max(prompt) >= self.vocab_size:
            await self.die()
        await self._wait(lambda: not self.paused)
        running = self.running[rid] = Running(rid)
        self.most_running = max(self.most_running, len(self.running))
        try:
            key = body.get("extra_key") or ""
            cached, kv = self._take_prefix(key, prompt)
            answer = await self._run(running, prompt, params, key, kv)
            return web.json_response(self._answer(running, body, cached, answer))
        finally:
            del self.running[rid]

    def _refusal(self, rid: str, prompt: list[int], params: dict[str, Any]) -> str:
        if rid in self.running:
            return f"Duplicate request ID detected: {rid}"
        if not prompt:
            return "input_ids cannot be empty."
        if len(prompt) + params["max_new_tokens"] > self.context_length:
            return f"Requested token count exceeds the model's maximum context length of {self.context_length} tokens."
        return ""

    def _take_prefix(self, key: str, prompt: list[int]) -> tuple[int, str]:
        """Tokens found in the prefix cache, and the content that the KV of this prompt was computed with."""
        content = content_of(*self.ranks)
        best, kv = 0, content
        for prefix, owner in self.cache[key]:
            common = next((i for i, (a, b) in enumerate(zip(prefix, prompt, strict=False)) if a != b), None)
            length = min(len(prefix), len(prompt) - 1) if common is None else min(common, len(prompt) - 1)
            if length > best:
                best, kv = length, owner
        self.cache[key].append((tuple(prompt), content))
        return best, kv

    async def _run(self, running: Running, prompt: list[int], params: dict[str, Any], key: str, kv: str) -> str:
        """Gives the content behind its KV. A retracted request looks for its prefix again, under its old key."""
        total = min(params["max_new_tokens"], self.response_tokens)
        seed = "" if params.get("temperature", 1.0) == 0 else running.rid
        retractions = 0
        while len(running.ids) < total:
            await self._wait(lambda: running.aborted or not (self.paused or self._held(running)))
            if running.aborted:
                break
            if running.retractions > retractions:
                retractions, (_, kv) = running.retractions, self._take_prefix(key, [*prompt, *running.ids])
            done = len(running.ids)
            token = EOS if done + 1 == self.response_tokens else self._pick(prompt, running.ids, seed)
            running.ids.append(token)
            running.logprobs.append(self._logprob([*prompt, *running.ids[:-1]], token, kv))
            running.labels.append(self.span_label)
        return kv

    def _held(self, running: Running) -> bool:
        return self.hold_at is not None and len(running.ids) >= self.hold_at

    def _pick(self, prompt: list[int], ids: list[int], seed: str) -> int:
        digest = hashlib.sha256(f"{content_of(*self.ranks)}|{prompt}|{ids}|{seed}".encode()).digest()
        return EOS + 1 + int.from_bytes(digest[:4], "little") % (self.vocab_size - EOS - 1)

    def _logprob(self, prefix: list[int], token: int, kv: str) -> float:
        """KV of other weights mixes in."""
        content = content_of(*self.ranks)
        return toy_logprob(content if kv == content else content + kv, prefix, token)

    def _answer(self, running: Running, body: dict[str, Any], cached: int, kv: str) -> dict[str, Any]:
        prompt, ids = body["input_ids"], running.ids
        spans = running.spans(self.span_label)
        if running.aborted:
            reason: dict[str, Any] = {"type": "abort", "message": "Aborted by AbortReq"}
        elif ids and ids[-1] == EOS:
            reason = {"type": "stop", "matched": EOS}
        else:
            reason = {"type": "length", "length": len(ids)}
        meta = {
            "id": running.rid,
            "finish_reason": reason,
            "prompt_tokens": len(prompt),
            "completion_tokens": len(ids),
            "cached_tokens": cached,
            "num_retractions": running.retractions,
            "weight_version": spans[-1]["version"],
            "weight_versions": spans,
        }
        if body.get("return_logprob"):
            first = body.get("logprob_start_len", -1)
            scored = range(first, len(prompt)) if first >= 0 else ()
            meta["input_token_logprobs"] = [
                [self._logprob(prompt[:i], prompt[i], kv) if i else None, prompt[i], None] for i in scored
            ]
            meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(running.logprobs, ids, strict=True)]
            meta["output_token_logprobs_length"] = len(ids)
        return {"text": "", "output_ids": list(ids), "meta_info": meta}

    async def _wait(self, condition: Callable[[], bool]) -> None:
        if not condition():
            async with self.changed:
                await self.changed.wait_for(condition)
