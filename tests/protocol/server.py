"""A simulated server that misbehaves on demand, and a wire to it that a dead process cannot use any more."""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from safetensors.numpy import load_file

from tasks.engines.simulated import SimulatedEngine, SimulatedServer
from tasks.engines.toy import Weights

UPDATE, PAUSE, FLUSH, CONTINUE = (
    "/update_weights_from_disk",
    "/pause_generation",
    "/flush_cache",
    "/continue_generation",
)
GENERATE, SUMS, INFO, SERVER, READY = "/generate", "/weights_checker", "/model_info", "/server_info", "/ready"
ANYWHERE = (
    "unheard",  # it never comes, and no answer either
    "unanswered",  # it is done, no answer comes
    "reset",  # the connection is reset; nothing was done
    "reset_after",
    "error",  # 500, nothing was done
    "dies",
    "dies_after",
    "restarts",
    "restarts_after",
)
OF_UPDATE = (
    "late",  # not answered in time, done when the machine says so
    "refused",  # 400, nothing was done
    "half",  # 400 with some tensors new on some ranks
    "unflushed",  # 400 with new weights under the old label, old KV kept
    "kept",  # 200, and the last rank has kept its old weights
    "lies",  # 200, label and path are new, the weights are not
    "dies_half",
)
FAULTS = {
    UPDATE: (*OF_UPDATE, *OF_UPDATE, "kept", "kept", *ANYWHERE),
    PAUSE: ANYWHERE,
    FLUSH: (*ANYWHERE, "refused"),
    CONTINUE: (*ANYWHERE, "ignored"),  # ignored: 200, and it stays paused
    GENERATE: ANYWHERE,
    SUMS: ANYWHERE,
    INFO: ANYWHERE,
    SERVER: ANYWHERE,
    READY: ANYWHERE,
}


class FaultyServer(SimulatedServer):
    """`faults` holds for each path what goes wrong with the next requests for it, in order."""

    def __init__(self, base: Weights, ranks: int, number: int = 0) -> None:
        self.faults: dict[str, list[str]] = {}
        self.late: list[dict[str, Any]] = []  # updates that nobody waits for any more
        self.answered_sums: str = ""  # `held` when it was last asked for checksums, in this life
        self.on_write: Callable[[FaultyServer], None] = lambda server: None
        self.injected: Counter[str] = Counter()
        self.came_late = False  # in this life
        super().__init__(base, ranks)
        self.lives = 1000 * number  # no two servers have the same boot
        self.restart()

    def restart(self) -> None:
        super().restart()
        self.late.clear()
        self.answered_sums = ""
        self.came_late = False

    def crash(self) -> None:
        self.alive = False
        self.late.clear()

    def deliver_late(self, half: bool = False) -> None:
        """What timed out is done now, or only `half` of it under the old label."""
        while self.alive and self.late:
            self.came_late = True
            body = self.late.pop(0)
            if half:
                self._write_half(body)
            else:
                super()._update(body)

    async def _answer(self, path: str, body: dict[str, Any]) -> httpx.Response:
        if not self.alive:
            raise httpx.ConnectError("nobody listens")
        if waiting := self.faults.get(path):
            kind = waiting.pop(0)
            self.injected[f"{path} {kind}"] += 1
            return await self._misbehave(kind, path, body)
        if path == SUMS:
            self.answered_sums = self.held
        return await super()._answer(path, body)

    async def _misbehave(self, kind: str, path: str, body: dict[str, Any]) -> httpx.Response:
        if kind in ("unanswered", "reset_after", "dies_after", "restarts_after"):
            await super()._answer(path, body)
        elif kind == "late":
            self.late.append(body)
        elif kind in ("half", "dies_half"):
            self._write_half(body)
        elif kind == "kept":
            self.keeps_old = {self.rank_count - 1}
            try:
                return await super()._answer(path, body)
            finally:
                self.keeps_old = set()
        elif kind == "unflushed":
            label, model, cache = self.label, self.path, dict(self.cache)
            await super()._answer(path, body)
            self.label, self.path, self.cache = label, model, cache
        elif kind == "lies":
            self.label, self.path, self._span_label = body["weight_version"], body["model_path"], body["weight_version"]
            self.cache.clear()
            return httpx.Response(200, json={"success": True})
        match kind:
            case "unheard" | "unanswered" | "late":
                await self._until(lambda: False)
            case "dies" | "dies_after" | "dies_half":
                self.crash()
            case "restarts" | "restarts_after":
                self.restart()
            case "error":
                return httpx.Response(500, text="injected")
            case "refused" | "half" | "unflushed":
                return httpx.Response(400, json={"success": False, "message": "injected"})
            case "ignored":
                return httpx.Response(200, json={"status": "ok"})
        raise httpx.ReadError("connection reset")

    def _write_half(self, body: dict[str, Any]) -> None:
        files = sorted(Path(body["model_path"]).glob("*.safetensors"))
        if files:  # the first shard, on all ranks but the last
            some = self.shares(load_file(files[0]))
            self._write([*some[: max(1, self.rank_count - 1)], *[{}] * (self.rank_count > 1)])

    def _write(self, shares: list[dict[str, Any]]) -> None:
        self.on_write(self)
        super()._write(shares)


class Wire:
    """The connection of one client, which lives as long as the process that made it."""

    def __init__(self, server: FaultyServer, process: Any) -> None:
        self.server = server
        self.process = process
        self.is_closed = False

    async def request(self, method: str, path: str, *, json: Any, headers: Any, timeout: Any) -> httpx.Response:
        if self.is_closed:
            raise RuntimeError("Cannot send a request, as the client has been closed.")  # as httpx does
        if not self.process.alive:
            await asyncio.Event().wait()
        self.process.requests += 1
        return await self.server.call(path, json or {})

    async def aclose(self) -> None:
        self.is_closed = True


class FaultyEngine(SimulatedEngine):
    """The product's client of the server's present boot, for one process."""

    def __init__(self, name: str, server: FaultyServer, process: Any) -> None:
        super(SimulatedEngine, self).__init__(
            name, "http://simulated", vocab_size=64, context_length=512, boot=server.boot
        )
        self.server = server
        self._http = Wire(server, process)  # type: ignore[assignment]
