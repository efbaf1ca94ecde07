"""The attempts of stages that are under way, each a row of the ledger that is kept up to date: a kill loses little."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from data.accounts import RUNNING
from data.ledger import Ledger
from flows.waits import Clock
from tasks.together import all_or_first_error

WRITE_S = 2.0  # so much of a process that is killed is not known
GLANCE_S = 0.005  # from one look at the attempts to the next


class Clocks:
    """Those of this process, by their clocks."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._running = ledger, set[Clock]()

    def __iter__(self) -> Iterator[Clock]:
        return iter(self._running)

    @contextmanager
    def timed(self, clock: Clock) -> Iterator[Clock]:
        """The block is the attempt: its end is in the ledger, as completed, or as failed where the block raises."""
        self._running.add(clock)
        state = "failed"
        try:
            yield clock
            state = "completed"
        finally:
            clock.stop()
            self._ledger.accounts.record_stage(clock.row(state))
            self._running.discard(clock)

    async def give_way(self) -> None:
        """Wait until no stage is about to begin: one that has all it waited for, and needs the loop for a moment.

        At most a second: there may always be one.
        """
        for _ in range(round(1 / GLANCE_S)):
            await asyncio.sleep(GLANCE_S)
            if not any(clock.coming and not clock.under_way for clock in self):
                return

    def write(self) -> None:
        """Put into the ledger how far each has come, and that this process is there."""
        at = time.time()
        self._ledger.accounts.record_running([clock.row(RUNNING, at) for clock in self], at)

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Write them again and again for the block, which ends where the ledger cannot be written."""
        async with all_or_first_error() as tasks:
            writing = tasks.create_task(self._keep_writing())
            yield
            writing.cancel()

    async def _keep_writing(self) -> None:
        while True:
            self.write()
            await asyncio.sleep(WRITE_S)
