"""Client of one SGLang server: generation with token ids and log-probabilities, and the commands publishing needs.

SGLang has two keys: `api_key` for /generate, /model_info, /server_info and /v1/loads, `admin_key` for what changes
the server. /server_info answers with both keys in it: nothing of it leaves this file but what is named here.
"""

import asyncio
import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from conf.errors import EngineError
from tasks.engines.answer import (
    Aborted,
    BadAnswer,
    Generation,
    NoAnswer,
    Refused,
    Sampling,
    Span,
    Unavailable,
    parse_generation,
    parse_logprobs,
)
from tasks.engines.commands import Gate

__all__ = [
    "Aborted",
    "BadAnswer",
    "Engine",
    "Generation",
    "Mark",
    "ModelInfo",
    "NoAnswer",
    "Refused",
    "Sampling",
    "Span",
    "Unavailable",
    "boot_of",
    "check_bracket",
    "digest_of",
]

FLUSH_POLL_S = 0.05
QUICK_S = 30.0  # deadline of a question; while a batch is computed, the server's event loop answers late
Checksums = list[dict[str, str]]  # one {tensor: checksum} a rank


@dataclass(frozen=True)
class ModelInfo:
    label: str
    path: str


@dataclass(frozen=True)
class Mark:
    """What an engine held at one moment; equal marks around a batch prove that the batch had one set of weights."""

    boot: str
    label: str
    checksum: str  # digest_of every rank's tensors, as they are in memory


class Engine:
    """One SGLang server, managed or external.

    `ready_label` is the version it is READY for. It gets no other work: `generate` refuses any other `extra_key`.
    Only tasks.publish (and a test that stands in for it) sets it.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        vocab_size: int,
        context_length: int,
        boot: str,
        api_key: str = "",
        admin_key: str = "",
    ) -> None:
        self.name = name
        self.session = 0  # of the server's processes, where they are this run's
        self.url = url.rstrip("/")
        self.boot = boot
        self.gate = Gate(boot)
        self.ready_label = ""
        self.vocab_size = vocab_size
        self.context_length = context_length
        self._keys = [key for key in (api_key, admin_key) if key]
        self._user = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._admin = {"Authorization": f"Bearer {admin_key}"} if admin_key else self._user
        # All requests of a batch are in flight at once. Proxies of the environment do not apply to engines.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        self._http = httpx.AsyncClient(base_url=self.url, limits=limits, trust_env=False)

    async def close(self) -> None:
        await self._http.aclose()

    # -- generation

    async def generate(
        self, *, rid: str, prompt_ids: Sequence[int], sampling: Sampling, extra_key: str, timeout_s: float
    ) -> Generation:
        """One response. `extra_key` is the version's label: KV of another version is never taken for this one.

        `rid` must be new at each try and of fixed width (SGLang aborts by prefix of a rid). Raises Refused (never
        send it again), Unavailable (another try may pass; also where the engine is not READY for this version),
        BadAnswer, and Aborted with the tokens so far.
        """
        if extra_key != self.ready_label:
            raise Unavailable(
                f"{self.name} is READY for {self.ready_label or 'no version'}, request {rid} is for {extra_key}"
            )
        return await self.generate_unready(
            rid=rid, prompt_ids=prompt_ids, sampling=sampling, extra_key=extra_key, timeout_s=timeout_s
        )

    async def generate_unready(
        self, *, rid: str, prompt_ids: Sequence[int], sampling: Sampling, extra_key: str, timeout_s: float
    ) -> Generation:
        """`generate` for the publisher, whose probe comes before READY."""
        answer = await self._complete(rid, prompt_ids, sampling, extra_key, timeout_s, {})
        try:
            return parse_generation(answer, self.vocab_size, len(prompt_ids), sampling.max_new_tokens)
        except BadAnswer as error:
            message = f"{self.name} answered request {rid} wrongly: {error}"
            if isinstance(error, Aborted):
                raise Aborted(message, error.partial) from None
            raise BadAnswer(message) from error.__cause__

    async def abort(self, rid: str) -> None:
        """Cut the request off: its `generate` raises Aborted with the tokens so far. An unknown one is no error.

        SGLang takes `rid` for the beginning of one, so it must be whole, and never empty.
        """
        response = await self._send("POST", "/abort_request", {"rid": rid}, self._admin, QUICK_S)
        self._check_status(response, "/abort_request")

    async def prompt_logprobs(self, ids: Sequence[int], *, rid: str, extra_key: str, timeout_s: float) -> list[float]:
        """log p(ids[i] | ids[:i]) at temperature 1, for i >= 1: one value fewer than ids. Raises as `generate`."""
        sampling = Sampling(max_new_tokens=1, temperature=1.0)
        answer = await self._complete(rid, ids, sampling, extra_key, timeout_s, {"logprob_start_len": 0})
        with self._expecting(f"request {rid}"):
            return list(parse_logprobs(answer["meta_info"]["input_token_logprobs"][1:], ids[1:]))

    async def _complete(
        self,
        rid: str,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        extra_key: str,
        timeout_s: float,
        more: Mapping[str, Any],
    ) -> Any:
        """The answer to this very request: one to an earlier try, or to a batch that is closed, has another rid."""
        self._check_request(rid, prompt_ids, sampling.max_new_tokens)
        body = {
            "rid": rid,
            "input_ids": list(prompt_ids),
            "sampling_params": sampling.to_sglang(),
            "return_logprob": True,
            "extra_key": extra_key,
            **more,
        }
        answer = await self._json("POST", "/generate", body, self._user, timeout_s, f"request {rid}")
        with self._expecting(f"request {rid}"):
            if (found := answer["meta_info"]["id"]) != rid:
                raise BadAnswer(f"{self.name} answered request {found} in the place of {rid}")
        return answer

    def _check_request(self, rid: str, ids: Sequence[int], max_new_tokens: int) -> None:
        """What SGLang answers with 400, and the one thing that kills it: a token id outside the vocabulary."""
        if not ids:
            raise Refused(f"request {rid}: the prompt has no tokens")
        outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if outside is not None:
            raise Refused(f"request {rid}: token id {outside} is outside the vocabulary [0, {self.vocab_size})")
        if len(ids) + max_new_tokens > self.context_length:
            raise Refused(
                f"request {rid}: {len(ids)} prompt tokens + {max_new_tokens} new tokens exceed the context length "
                f"{self.context_length}"
            )

    # -- questions

    async def model_info(self) -> ModelInfo:
        """The label and folder of the newest update."""
        answer = await self._json("GET", "/model_info", None, self._user, QUICK_S)
        with self._expecting("/model_info"):
            return ModelInfo(str(answer["weight_version"]), str(answer["model_path"]))

    async def server_info(self) -> Mapping[str, Any]:
        """The server's options (both keys among them) and its load."""
        found: Mapping[str, Any] = await self._json("GET", "/server_info", None, self._user, QUICK_S)
        return found

    async def current_boot(self) -> str:
        """The boot of the server that answers now; `boot` is that of the server this client was made for."""
        answer = await self.server_info()
        with self._expecting("/server_info"):
            return boot_of(answer)

    async def ready(self) -> bool:
        """False while paused."""
        return (await self._send("GET", "/ready", None, {}, QUICK_S)).status_code == 200

    async def running_requests(self) -> int:
        """Requests that run or wait."""
        answer = await self._json("GET", "/v1/loads", None, self._user, QUICK_S)
        with self._expecting("/v1/loads"):
            return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in answer["loads"])

    async def checksums(self, timeout_s: float = QUICK_S) -> Checksums:
        """For each rank the checksum of every tensor in its memory. Raises BadAnswer unless every rank answered."""
        answer = await self._json("POST", "/weights_checker", {"action": "checksum"}, self._admin, timeout_s)
        with self._expecting("/weights_checker"):
            ranks = {place["rank"]: rank for rank in answer["ranks"] for place in rank["parallelism_info"]}
            size = max(place["size"] for rank in answer["ranks"] for place in rank["parallelism_info"])
            if sorted(ranks) != list(range(size)) or len(ranks) != len(answer["ranks"]):
                raise BadAnswer(f"{self.name}: expected a checksum of each of {size} ranks, got {sorted(ranks)}")
            return [dict(ranks[number]["checksums"]) for number in sorted(ranks)]

    async def first_row(self, name: str, count: int, timeout_s: float = QUICK_S) -> list[float]:
        """The first values of a tensor by its Hugging Face name: of its first row, or the first `count` of a vector.

        Only SGLang's Llama and its relatives can answer. Raises Refused where the name is unknown.
        """
        body = {"name": name, "truncate_size": count}
        rows = await self._json("POST", "/get_weights_by_name", body, self._admin, timeout_s)
        with self._expecting("/get_weights_by_name"):
            return [float(x) for x in (rows[0] if isinstance(rows[0], list) else rows)]

    async def mark(self) -> Mark:
        """What the engine holds now: boot, label and checksum, read from it."""
        boot, model, sums = await asyncio.gather(self.current_boot(), self.model_info(), self.checksums())
        return Mark(boot, model.label, digest_of(sums))

    # -- commands; one at a time

    async def pause(self, mode: Literal["abort", "retract", "in_place"], timeout_s: float) -> None:
        await self._json("POST", "/pause_generation", {"mode": mode}, self._admin, timeout_s)

    async def resume(self, timeout_s: float) -> None:
        await self._json("POST", "/continue_generation", {}, self._admin, timeout_s)

    async def flush_cache(self, timeout_s: float) -> None:
        """Drop all KV. Success proves that no request runs; Refused: one still does after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            # The server's own `?timeout=` looks again only when its sleeping scheduler wakes up, up to a second later.
            response = await self._send("POST", "/flush_cache", None, self._admin, QUICK_S)
            if response.status_code != 400 or time.monotonic() > deadline:
                return self._check_status(response, "/flush_cache")
            await asyncio.sleep(FLUSH_POLL_S)

    async def freeze_gc(self) -> None:
        """Python's collector passes over all that the server holds now. It may do so again."""
        self._check_status(await self._send("POST", "/freeze_gc", None, self._admin, QUICK_S), "/freeze_gc")

    async def update_weights(self, path: str, label: str, timeout_s: float, *, flush: bool = True) -> None:
        """Load the folder over the weights in memory, and drop all KV. Never send it twice at once.

        Raises Refused (400: the weights may be half written, or new under the old label), NoAnswer (unknown, it may
        still be applied), Unavailable (unknown).
        """
        body = {"model_path": path, "weight_version": label, "flush_cache": flush}
        answer = await self._json("POST", "/update_weights_from_disk", body, self._admin, timeout_s)
        if answer.get("success") is not True:
            raise BadAnswer(f"{self.name}: update to {label} was answered 200 without success: {answer}")

    async def release_memory(self, timeout_s: float) -> None:
        """Give a GPU's memory for weights and KV back. The engine must be idle, or it dies; a CPU engine always does.

        Weights are undefined from here on, until the next update.
        """
        await self._send_memory("/release_memory_occupation", timeout_s)

    async def resume_memory(self, timeout_s: float) -> None:
        """Take that memory again. Never ask it of an engine that has not released it: it dies."""
        await self._send_memory("/resume_memory_occupation", timeout_s)

    async def _send_memory(self, path: str, timeout_s: float) -> None:
        body = {"tags": ["weights", "kv_cache"]}
        self._check_status(await self._send("POST", path, body, self._admin, timeout_s), path)

    # -- transport

    @contextmanager
    def _expecting(self, what: str) -> Iterator[None]:
        """A part that is missing, or of the wrong type, is a BadAnswer."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise BadAnswer(f"{self.name}: a part of the answer of {what} is missing or wrong: {error!r}") from error

    async def _json(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float, what: str = ""
    ) -> Any:
        response = await self._send(method, path, body, headers, timeout_s, what)
        self._check_status(response, what or path)
        try:
            answer = response.json()
        except ValueError:
            raise BadAnswer(f"{self.name}: {what or path} answered 200 with invalid JSON") from None
        if not isinstance(answer, dict | list) or not answer:
            raise BadAnswer(f"{self.name}: {what or path} answered 200 with {self._shown(response)[:100]!r}")
        return answer

    async def _send(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], timeout_s: float, what: str = ""
    ) -> httpx.Response:
        if self._http.is_closed:
            raise Unavailable(f"{self.name}: {what or path} was not sent, the life of boot {self.boot} is over")
        # httpx's own timeout counts from byte to byte: a body that trickles would never end.
        try:
            async with asyncio.timeout(timeout_s):
                return await self._http.request(method, path, json=body, headers=dict(headers), timeout=None)
        except TimeoutError:
            raise NoAnswer(f"{self.name}: {what or path} had no answer in {timeout_s:g} s") from None
        except httpx.ConnectError as error:  # it was not sent
            raise Unavailable(f"{self.name}: {what or path} failed: {error or type(error).__name__}") from error
        except httpx.HTTPError as error:
            raise NoAnswer(f"{self.name}: {what or path} failed: {error or type(error).__name__}") from error

    def _shown(self, response: httpx.Response) -> str:
        """The body as an error may show it: a server can repeat the keys, /server_info always does."""
        text = response.text
        for key in self._keys:
            text = text.replace(key, "***")
        return text

    def _check_status(self, response: httpx.Response, what: str) -> None:
        status = response.status_code
        if status == 200:
            return
        message = f"{self.name}: {what} was answered {status}: {self._shown(response)[:500].strip()}"
        if 400 <= status < 500 and status not in (408, 429):
            hint = " (the key is another server's)" if status in (401, 403) else ""
            raise Refused(message + hint)
        raise Unavailable(message)


def boot_of(server_info: Mapping[str, Any]) -> str:
    """What names one life of a server: the label it was started with, `boot-<nonce>`.

    An external server started without such a label is known by how long its parts took to start, in nanoseconds.
    """
    label = str(server_info["weight_version"])
    if label.startswith("boot-"):
        return label
    started = json.dumps(server_info.get("startup_time"), sort_keys=True)
    return f"{label}-{hashlib.sha256(started.encode()).hexdigest()[:12]}"


def digest_of(checksums: Checksums) -> str:
    """The checksums of an engine as one string: a digest for each rank, in order, separated by blanks."""
    return " ".join(hashlib.sha256(json.dumps(rank, sort_keys=True).encode()).hexdigest()[:32] for rank in checksums)


def check_bracket(before: Mapping[str, Mark], after: Mapping[str, Mark]) -> None:
    """Every engine's mark by name, before and after a batch.

    Raises EngineError, with both marks, where an engine's boot, label or checksum changed in between.
    """
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            raise EngineError(
                f"{name} changed while the batch was open, so the batch is refused: "
                f"before {before.get(name)}, after {after.get(name)}"
            )
