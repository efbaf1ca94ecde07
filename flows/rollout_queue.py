"""The queue between rollouts and updates: groups that were issued and that no update has taken yet.

It is bounded in groups and in tokens. A rollout reserves room for its whole batch before it issues anything, so nothing
is ever dropped for lack of room (back-pressure). The batch that is trained next always gets in, since room is made
only by training it: whatever is bound is bound for those behind it.
"""

import asyncio
import math
from dataclasses import dataclass


@dataclass
class _Batch:
    groups: int
    tokens: int  # response tokens: what was generated, before that what may be
    entered: asyncio.Future[None]


class Queue:
    """Batches in the order of their iterations."""

    def __init__(self, groups: float = math.inf, tokens: float = math.inf) -> None:
        self.limit_groups, self.limit_tokens = groups, tokens
        self._batches: dict[int, _Batch] = {}  # by iteration

    @property
    def groups(self) -> int:
        return sum(batch.groups for batch in self._batches.values() if batch.entered.done())

    @property
    def tokens(self) -> int:
        return sum(batch.tokens for batch in self._batches.values() if batch.entered.done())

    def reserve(self, iteration: int, groups: int, tokens: int) -> asyncio.Future[None]:
        """Ask for room for an iteration's batch of at most `tokens`; done when it has it.

        Asking again changes nothing.
        """
        if found := self._batches.get(iteration):
            return found.entered
        entered = asyncio.get_running_loop().create_future()
        self._batches[iteration] = _Batch(groups, tokens, entered)
        self._admit()
        return entered

    def generated(self, iteration: int, groups: int, tokens: int) -> None:
        """What the iteration's rollout has come to. Enters also a batch that an earlier process generated."""
        if (batch := self._batches.get(iteration)) is None:
            batch = self._batches[iteration] = _Batch(groups, tokens, asyncio.get_running_loop().create_future())
        batch.groups, batch.tokens = groups, tokens
        if not batch.entered.done():
            batch.entered.set_result(None)
        self._admit()

    def take(self, iteration: int) -> None:
        """An update has taken the batch. Taking it again changes nothing."""
        self._batches.pop(iteration, None)
        self._admit()

    def _admit(self) -> None:
        """Let batches in by their order: one that waits holds up those behind it."""
        groups, tokens = self.groups, self.tokens
        for place, iteration in enumerate(sorted(self._batches)):
            batch = self._batches[iteration]
            if batch.entered.done():
                continue
            groups, tokens = groups + batch.groups, tokens + batch.tokens
            if place and (groups > self.limit_groups or tokens > self.limit_tokens):
                return
            batch.entered.set_result(None)
