"""Leases on pools, held in the flow's process: one stage at a time on a pool that holds devices.

Rollouts may share theirs: what one no longer fills, the next one takes. A publish goes before whoever else waits, since
everything after it uses fresher weights. A pool with only the role cpu is not exclusive: its stages share the reward
workers and the event loop.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from conf.pools import co_located
from conf.schema import Pool
from flows.waits import HANDOVER, POOL, Clock
from tasks.handover import Handover, Role


@dataclass(eq=False)
class _Claim:
    """One stage's wish for a pool."""

    holder: str
    shared: bool
    granted: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # who has the pool, or who is before it


class _Lease:
    """First come, first served, but urgent claims before the others. Shared claims hold it together."""

    def __init__(self) -> None:
        self.holding: list[_Claim] = []
        self._waiting: list[_Claim] = []

    def ask(self, claim: _Claim, urgent: bool) -> None:
        if urgent:
            self._waiting.insert(0, claim)
        else:
            self._waiting.append(claim)
        self._grant()

    def before(self, claim: _Claim) -> str:
        """Who has the pool, and who waits for it and gets it before this one."""
        behind = self._waiting[: self._waiting.index(claim)]
        return f"held by {_listed(self.holding)}" + (f"; behind {_listed(behind)}" if behind else "")

    def leave(self, claim: _Claim) -> None:
        """Give the lease back, or no longer ask for it."""
        (self.holding if claim in self.holding else self._waiting).remove(claim)
        self._grant()

    def _grant(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            claim = self._waiting.pop(0)
            self.holding.append(claim)
            claim.granted = True
            claim.changed.set()
        for claim in self._waiting:
            claim.changed.set()

    def _fits(self, claim: _Claim) -> bool:
        return not self.holding or (claim.shared and all(other.shared for other in self.holding))


def _listed(claims: Sequence[_Claim]) -> str:
    return ", ".join(claim.holder for claim in claims)


class Leases:
    """`handover` changes the hands of the pool that both generates and trains, where there is one."""

    def __init__(self, pools: Mapping[str, Pool], handover: Handover | None = None) -> None:
        self._leases = {name: _Lease() for name, pool in pools.items() if set(pool.roles) & {"rollout", "train"}}
        self._co_located, self._handover = co_located(pools), handover

    def exclusive(self, pool: str) -> bool:
        """Whether the pool holds devices, so that its stages wait for each other."""
        return pool in self._leases

    @asynccontextmanager
    async def take(
        self, pool: str, holder: str, clock: Clock, role: Role = "cpu", *, shared: bool = False, urgent: bool = False
    ) -> AsyncIterator[None]:
        """Hold `pool` for the block; waiting for it is counted and shown as AwaitingPool, with who is before it now.

        A co-located pool is first brought to the stage's role, counted and shown as AwaitingHandover.
        """
        if (lease := self._leases.get(pool)) is None:
            yield
            return
        claim = _Claim(holder, shared)
        lease.ask(claim, urgent)
        try:
            if not claim.granted:
                with clock.waiting(POOL, f"{pool}: {lease.before(claim)}"):
                    while not claim.granted:
                        clock.say(f"{pool}: {lease.before(claim)}")
                        claim.changed.clear()
                        await claim.changed.wait()
            if pool == self._co_located and self._handover is not None and self._handover.changes(role):
                with clock.waiting(HANDOVER, f"{pool}: from {self._handover.state} to {role}"):
                    await self._handover.give(role)
            yield
        finally:
            lease.leave(claim)
