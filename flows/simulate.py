"""The schedule of a run before it runs: the declared graph on the declared pools, simulated event by event (SimPy).

The rules are the executor's (flows/schedule.py, flows/rollout_queue.py, flows/pools.py). A stage starts when its inputs
are there, what it follows on in the batch before has ended, and its pool is free; a pool serves one stage at a time,
first come, first served, but a publish before the others. Engines of a pool are alike, so a batch is one event however
many there are; its time is given for all of them together.

*Lag* is the number of updates between the weights a group was generated with and those it trains. The newest
*committed* version is never ahead of the trainer's, so the lag that the ledger measures is never more.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import simpy

from conf.schema import Schedule

FULL_QUEUE, HAND_OVER, NOTHING_LEFT = "full queue", "hand-over", "nothing left"  # causes that are no stage's name


def every_batch(batch: int) -> bool:
    return True


@dataclass(frozen=True)
class Step:
    """A node of the graph, as far as time is concerned. Steps come in topological order."""

    name: str
    needs: tuple[str, ...]
    pool: str
    does: Literal["", "rollout", "update", "publish"] = ""  # rollout: reads the policy; at most one step of each
    role: Literal["", "rollout", "train"] = ""  # a pool hands over between the two; "": either will do
    due: Callable[[int], bool] = every_batch  # the batches in which it runs, counted from 1
    follows: tuple[str, ...] = ()  # steps of the batch before that end first; an update's is always the update
    closing: bool = False  # it needs those of `needs` that run in the batch; other steps do not run without all of them


@dataclass(slots=True, eq=False)
class Slot:
    """A stage of a batch, in the unit of the durations."""

    batch: int
    step: Step
    ready: float = -1.0  # everything it needs is there, but for its pool
    start: float = -1.0
    end: float = -1.0
    hand_over: float = 0.0  # just before `start`: its pool changed from another role
    by: "Slot | None" = None  # what made it ready
    link: Literal["end", "start", "queue"] = "end"  # of `by`; queue: it took a batch out of the full queue
    missing: int = 0

    @property
    def node(self) -> str:
        return self.step.name

    @property
    def pool(self) -> str:
        return self.step.pool


@dataclass(frozen=True)
class PoolTime:
    """Where a pool's time went; working, hand_over and all of idle add up to the makespan."""

    working: float
    hand_over: float
    idle: Mapping[str, float]  # cause: the stage waited for, or one of FULL_QUEUE, HAND_OVER, NOTHING_LEFT


@dataclass(frozen=True)
class Simulated:
    slots: Sequence[Slot]  # in order of their start
    makespan: float
    pools: Mapping[str, PoolTime]  # those that serve one stage at a time
    lag: Mapping[int, int]  # lag -> groups trained with it
    queue_mean: float  # groups generated and not yet in an update, over time
    queue_max: int


def simulate(
    steps: Sequence[Step],
    durations: Mapping[str, Sequence[float]],
    batches: int,
    schedule: Schedule,
    *,
    shared: Collection[str] = (),
    groups: int = 1,
    issued: int = 0,
    tokens: int = 0,
    hand_over: float = 0.0,
) -> Simulated:
    """Run `batches` batches of `groups` groups through the steps.

    durations: step -> time of each batch, >= 0. shared: pools that serve any number of stages at a time.
    issued: groups for which a rollout reserves room in the queue until it has ended; 0: `groups`.
    tokens: response tokens of a batch in the queue, at most.
    hand_over: time a pool takes to change from one role to another.
    """
    room = _Room(schedule, groups, issued or groups, tokens)
    return _Simulation(steps, durations, batches, schedule, shared, groups, room, hand_over).run()


def lower_bound(
    steps: Sequence[Step],
    durations: Mapping[str, Sequence[float]],
    batches: int,
    schedule: Schedule,
    *,
    shared: Collection[str] = (),
) -> tuple[float, str]:
    """(time that no order of the stages can beat on these pools, why): a pool's work, or a batch's longest path."""
    work: dict[str, float] = {}
    longest = 0.0
    for batch in range(1, batches + 1):
        ends: dict[str, float] = {}
        for step in _due(steps, batch, batches, schedule):
            ends[step.name] = (
                max([ends[n] for n in step.needs if n in ends], default=0.0) + durations[step.name][batch - 1]
            )
            if step.pool not in shared:
                work[step.pool] = work.get(step.pool, 0.0) + durations[step.name][batch - 1]
        longest = max([longest, *ends.values()])
    bounds = [(time, f"the work of pool {pool}") for pool, time in work.items()]
    return max([(longest, "the longest way through one batch"), *bounds])


def _publishes(batch: int, batches: int, schedule: Schedule) -> bool:
    return batch % schedule.publish_every == 0 or batch == batches


def _due(steps: Sequence[Step], batch: int, batches: int, schedule: Schedule) -> list[Step]:
    """The steps that run in a batch: without those that skip it and whatever needs them."""
    found: dict[str, Step] = {}
    for step in steps:
        skips = step.does == "publish" and not _publishes(batch, batches, schedule)
        if not skips and step.due(batch) and (step.closing or all(need in found for need in step.needs)):
            found[step.name] = step
    return list(found.values())


class _Room:
    """The queue: a rollout reserves room for its whole batch, and the batch that is trained next always gets in."""

    def __init__(self, schedule: Schedule, groups: int, issued: int, tokens: int) -> None:
        self.groups, self.issued, self.tokens = groups, issued, tokens
        self.limit_groups = schedule.queue_groups or schedule.most_groups(issued)
        self.limit_tokens = schedule.queue_tokens or math.inf
        self.held: dict[int, int] = {}  # batch -> groups

    def reserve(self, batch: int) -> bool:
        """Whether the batch got in."""
        groups, tokens = sum(self.held.values()) + self.issued, (len(self.held) + 1) * self.tokens
        if self.held and (groups > self.limit_groups or tokens > self.limit_tokens):
            return False
        self.held[batch] = self.issued
        return True

    def generated(self, batch: int) -> None:
        self.held[batch] = self.groups

    def take(self, batch: int) -> None:
        self.held.pop(batch)


@dataclass(eq=False)
class _Pool:
    name: str
    waiting: list[tuple[bool, int, Slot]] = field(default_factory=list)  # heap: a publish, then by their coming
    asleep: simpy.Event | None = None
    role: str = ""  # it is ready for
    served: list[Slot] = field(default_factory=list)


class _Simulation:
    def __init__(
        self,
        steps: Sequence[Step],
        durations: Mapping[str, Sequence[float]],
        batches: int,
        schedule: Schedule,
        shared: Collection[str],
        groups: int,
        room: _Room,
        hand_over: float,
    ) -> None:
        self.steps, self.durations, self.batches, self.schedule = steps, durations, batches, schedule
        self.groups, self.room, self.hand_over = groups, room, hand_over
        self.env = simpy.Environment()
        self.coming = count()
        self.dependents = {step.name: [s.name for s in steps if step.name in s.needs] for step in steps}
        self.follows = {step.name: {*step.follows, *([step.name] * (step.does == "update"))} for step in steps}
        self.followers = {step.name: [s.name for s in steps if step.name in self.follows[s.name]] for step in steps}
        self.pools = {step.pool: _Pool(step.pool) for step in steps if step.pool not in shared}
        self.does = {step.does for step in steps}
        self.slots: list[Slot] = []
        self.open: dict[int, dict[str, Slot]] = {}  # batch -> its slots by step, until all have ended
        self.unfinished: dict[int, int] = {}  # batch -> stages
        self.committed = 0  # the update whose weights the engines have
        self.rolled = 0  # the last rollout that ended
        self.versions: dict[int, int] = {}  # batch -> version that generated it
        self.lag: Counter[int] = Counter()
        self.held: Slot | None = None  # a rollout that waits for the one before it, for weights or for room
        self.depth = self.depth_max = 0
        self.depth_time = self.depth_since = 0.0

    def run(self) -> Simulated:
        for pool in self.pools.values():
            self.env.process(self._serve(pool))
        one_by_one = not self.schedule.ahead or "rollout" in self.does
        for batch in range(1, 1 + (min(1, self.batches) if one_by_one else self.batches)):
            self._open(batch, None)
        self.env.run()
        assert not self.unfinished, f"batches {list(self.unfinished)} never ended"
        makespan = max((slot.end for slot in self.slots), default=0.0)
        return Simulated(
            self.slots,
            makespan,
            {pool.name: _pool_time(pool.served, makespan) for pool in self.pools.values()},
            dict(sorted(self.lag.items())),
            self.depth_time / makespan if makespan else 0.0,
            self.depth_max,
        )

    def _open(self, batch: int, by: Slot | None, link: Literal["end", "start"] = "end") -> None:
        """Let a batch begin: in `sync` when the one before has ended, else when its rollout has started."""
        if batch > self.batches:
            return
        slots = {s.name: Slot(batch, s) for s in _due(self.steps, batch, self.batches, self.schedule)}
        before = {name: slot for name, slot in self.open.get(batch - 1, {}).items() if slot.end < 0}
        self.open[batch], self.unfinished[batch] = slots, len(slots)
        for slot in slots.values():
            slot.missing = sum(need in slots for need in slot.step.needs)
            slot.missing += sum(name in before for name in self.follows[slot.node])
        for slot in slots.values():
            if not slot.missing:
                self._ready(slot, by, link)

    def _ready(self, slot: Slot, by: Slot | None, link: Literal["end", "start"]) -> None:
        slot.ready, slot.by, slot.link = self.env.now, by, link
        if slot.step.does == "rollout":
            self.held = slot
            self._admit(by, link)
        else:
            self._submit(slot)

    def _admit(self, by: Slot | None, link: Literal["end", "start", "queue"]) -> None:
        """Let the rollout that is held go on if the one before has ended, its lag is kept and its batch has room."""
        if (slot := self.held) is None or self.rolled < slot.batch - 1:
            return
        if "update" in self.does and self.committed < slot.batch - 1 - self.schedule.lag_limit:
            return
        if "update" in self.does and not self.room.reserve(slot.batch):
            return
        self.held = None
        slot.ready, slot.by, slot.link = self.env.now, by, link
        self._submit(slot)

    def _submit(self, slot: Slot) -> None:
        pool = self.pools.get(slot.pool)
        if pool is None:
            self._start(slot)
            done = self.env.timeout(self._duration(slot))
            done.callbacks.append(lambda _: self._finish(slot))
            return
        heapq.heappush(pool.waiting, (slot.step.does != "publish", next(self.coming), slot))
        if pool.asleep is not None:
            pool.asleep.succeed()
            pool.asleep = None

    def _serve(self, pool: _Pool) -> Generator[simpy.Event]:
        while True:
            if not pool.waiting:
                pool.asleep = self.env.event()
                yield pool.asleep
            yield self.env.timeout(0)  # what becomes ready at this very moment takes part in the choice
            slot = heapq.heappop(pool.waiting)[-1]
            role = slot.step.role or pool.role
            if pool.role not in ("", role) and self.hand_over:
                slot.hand_over = self.hand_over
                yield self.env.timeout(self.hand_over)
            pool.role = role
            pool.served.append(slot)
            self._start(slot)
            yield self.env.timeout(self._duration(slot))
            self._finish(slot)

    def _duration(self, slot: Slot) -> float:
        return self.durations[slot.node][slot.batch - 1]

    def _start(self, slot: Slot) -> None:
        slot.start = self.env.now
        self.slots.append(slot)
        if slot.step.does == "rollout":
            self.versions[slot.batch] = self.committed
            if self.schedule.ahead:
                self._open(slot.batch + 1, slot, "start")
        elif slot.step.does == "update" and slot.batch in self.versions:
            self.lag[slot.batch - 1 - self.versions.pop(slot.batch)] += self.groups
            self._deepen(-self.groups)
            self.room.take(slot.batch)
            self._admit(slot, "queue")

    def _finish(self, slot: Slot) -> None:
        slot.end = self.env.now
        batch, does = slot.batch, slot.step.does
        if does == "rollout":
            self.rolled = batch
            self._deepen(self.groups)
            self.room.generated(batch)
            self._admit(slot, "end")
        if does == "publish" or (
            does == "update" and "publish" not in self.does and _publishes(batch, self.batches, self.schedule)
        ):
            self.committed = batch
            self._admit(slot, "end")
        for name in self.followers[slot.node]:
            if (following := self.open.get(batch + 1, {}).get(name)) is not None:
                self._supply(following, slot)
        for name in self.dependents[slot.node]:
            if name in self.open[batch]:
                self._supply(self.open[batch][name], slot)
        self.unfinished[batch] -= 1
        if not self.unfinished[batch]:
            del self.unfinished[batch], self.open[batch]
            if not self.schedule.ahead:
                self._open(batch + 1, slot)

    def _supply(self, slot: Slot, by: Slot) -> None:
        slot.missing -= 1
        if not slot.missing:
            self._ready(slot, by, "end")

    def _deepen(self, groups: int) -> None:
        self.depth_time += self.depth * (self.env.now - self.depth_since)
        self.depth_since = self.env.now
        self.depth += groups
        self.depth_max = max(self.depth_max, self.depth)


def _pool_time(served: Sequence[Slot], makespan: float) -> PoolTime:
    """Each moment before a slot that its pool did not work has one cause: what that slot's start hung on just then."""
    idle: dict[str, float] = {}
    free = 0.0
    for slot in served:
        for cause, time in _waited_for(slot, free):
            idle[cause] = idle.get(cause, 0.0) + time
        free = slot.end
    if makespan > free:
        idle[NOTHING_LEFT] = makespan - free
    working = sum(slot.end - slot.start for slot in served)
    return PoolTime(working, sum(slot.hand_over for slot in served), dict(sorted(idle.items(), key=lambda i: -i[1])))


def _waited_for(slot: Slot, since: float) -> Iterator[tuple[str, float]]:
    """(cause, time) from the slot's readiness back to `since`, along what made it ready, what made that ready, ..."""
    while slot.ready > since and slot.by is not None:
        by = slot.by
        if slot.link == "queue":
            yield FULL_QUEUE, slot.ready - since
            return
        if slot.link == "end":
            yield by.node, by.end - max(since, by.start)
        for cause, start, end in (
            (HAND_OVER, by.start - by.hand_over, by.start),
            (f"pool {by.pool}", by.ready, by.start - by.hand_over),
        ):
            if end > since and end > start:
                yield cause, end - max(since, start)
        slot = by
