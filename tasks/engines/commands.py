"""The fence before an engine: one command at a time, none that is older than what the engine has been asked already."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from conf.errors import EngineError


class Stale(EngineError):
    """The command is older than one the engine has seen, or meant for an earlier boot; it changed nothing."""


@dataclass(frozen=True)
class Fence:
    """What a command belongs to. Attempts grow over the whole run, so that of two the higher one is the newer; two that
    began at the same moment have the same one, and there the newer version counts."""

    run: str
    number: int  # of the version
    attempt: int
    boot: str  # the life of the server that it is meant for


class Gate:
    """Belongs to one life of one engine; `after` is the gate of the life before it."""

    def __init__(self, boot: str, after: "Gate | None" = None) -> None:
        self.boot = boot
        self._highest: tuple[int, int] = after._highest if after else (0, 0)  # attempt, version
        self._run: str = after._run if after else ""
        self._answers: dict[str, Any] = {}  # of the present attempt, by step
        self._lock = asyncio.Lock()

    def claim(self, fence: Fence, step: str) -> None:
        """The engine is this attempt's. Raises Stale where another run, a newer attempt or another boot has it."""
        if fence.boot != self.boot:
            raise Stale(f"{step} of version {fence.number} is for boot {fence.boot}, the engine is {self.boot}")
        if self._run not in ("", fence.run):
            raise Stale(f"{step} of version {fence.number} is of run {fence.run}, the engine serves {self._run}")
        mine = (fence.attempt, fence.number)
        if mine < self._highest:
            attempt, number = self._highest
            raise Stale(
                f"{step} of version {fence.number} is late: it is of attempt {fence.attempt}, "
                f"the engine has seen attempt {attempt} at version {number}"
            )
        if mine > self._highest:
            self._run, self._highest = fence.run, mine
            self._answers.clear()

    async def send(self, fence: Fence, step: str, command: Callable[[], Awaitable[Any]]) -> Any:
        """Give the command's answer; for a step that this attempt has had answered, that answer again.

        Raises Stale as `claim`, without sending. A caller that is cancelled frees the engine although the server may
        yet carry the command out: the journal has it, and an installation begins by waiting for an update that was
        left so.
        """
        async with self._lock:
            self.claim(fence, step)
            if step not in self._answers:
                self._answers[step] = await command()
            return self._answers[step]
