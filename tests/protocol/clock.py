"""An event loop in which time passes only when nobody has anything left to do: a deadline of an hour costs nothing."""

import asyncio
from collections.abc import Callable
from typing import Any

TURN_S = 1e-6


class Clock(asyncio.BaseEventLoop):
    """Without sockets, signals and threads. What is ready runs in the order it became so: every run is the same."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._clock_resolution = 1e-9
        self._selector = self

    def time(self) -> float:
        return self.now

    monotonic = time  # in the place of the module `time`

    def select(self, timeout: float | None) -> list[Any]:
        self.now += timeout or TURN_S
        return []

    def _process_events(self, events: list[Any]) -> None: ...

    def run_while(self, condition: Callable[[], bool]) -> None:
        """One turn of the loop after another while it holds and there is anything to do."""
        asyncio._set_running_loop(self)
        try:
            while condition():
                if not self._ready and not self._scheduled:
                    return
                self._run_once()
        finally:
            asyncio._set_running_loop(None)


async def inline(work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In the place of asyncio.to_thread: others have their turn first, then it is done at once."""
    await asyncio.sleep(0)
    return work(*args, **kwargs)


class InlinePool:
    """In the place of a ThreadPoolExecutor."""

    def __enter__(self) -> "InlinePool":
        return self

    def __exit__(self, *error: object) -> None: ...

    def map(self, work: Callable[..., Any], *items: Any) -> Any:
        return map(work, *items)
