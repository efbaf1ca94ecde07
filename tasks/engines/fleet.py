"""The engines of a run: which are in service, and how one that failed is started anew."""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import overload

from conf.errors import EngineError
from tasks.engines.client import Engine
from tasks.engines.commands import Gate

Restart = Callable[[Engine], Awaitable[Engine]]  # gives a client of the engine's next life; raises EngineError


class Unrestartable(EngineError):
    """Nobody here can give the engine a new life."""


class Fleet(Sequence[Engine]):
    """The engines in service, in the order of their start.

    `restarts` says by name how an engine is started anew. A restarted engine is a new one: another client, another
    boot, base weights, READY for nothing.
    """

    def __init__(self, engines: Iterable[Engine], restarts: Mapping[str, Restart] | None = None) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._restarts = dict(restarts or {})
        self._out: list[Engine] = []  # taken out; only their connections are left

    @overload
    def __getitem__(self, index: int) -> Engine: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Engine]: ...
    def __getitem__(self, index: int | slice) -> Engine | Sequence[Engine]:
        return list(self._engines.values())[index]

    def __len__(self) -> int:
        return len(self._engines)

    @property
    def restartable(self) -> bool:
        """Whether an engine can have another life, here or by whoever runs it."""
        return bool(self._restarts)

    async def restart(self, engine: Engine) -> Engine:
        """End the engine's life and begin another. Raises Unrestartable; EngineError where it did not start."""
        engine.ready_label = ""
        restart = self._restarts.get(engine.name)
        if restart is None:
            raise Unrestartable(f"{engine.name} cannot be restarted from here")
        new = await restart(engine)
        new.gate = Gate(new.boot, after=engine.gate)
        self._engines[engine.name] = new
        await engine.close()
        return new

    def take_out(self, engine: Engine) -> None:
        """Give it no work any more, for as long as this process runs."""
        engine.ready_label = ""
        self._engines.pop(engine.name, None)
        self._out.append(engine)

    async def close(self) -> None:
        for engine in [*self._engines.values(), *self._out]:
            await engine.close()
