"""The schedule of a run before it runs: the declared graph on the declared pools, simulated event by event (SimPy).

The rules are the executor's (flows/schedule.py, flows/rollout_queue.py, flows/pools.py). A stage starts when its inputs
are there, what it follows on in the batch before has ended, and its pool is free; a pool serves one stage at a time,
first come, first served, but a publish before the others, and together those that share it. Engines of a pool are
alike, so a batch is one event however many there are; its time is given for all of them together.

*Lag* is the number of updates between the weights a group was generated with and those it trains. The newest
*committed* version is never ahead of the trainer's, so the lag that the ledger measures is never more.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from types import MappingProxyType

import simpy

from conf.schema import Schedule
from flows.schedule import fresh_enough
from flows.steps import Slot, Step, Took, due, opens, publishes

# Causes that are no stage's name. Outside stages: orchestration, accounting.
FULL_QUEUE, HAND_OVER, NOTHING_LEFT, OUTSIDE = "full queue", "hand-over", "nothing left", "outside stages"


@dataclass(frozen=True)
class PoolTime:
    """Where a pool's time went; working, hand_over and all of idle add up to the makespan."""

    working: float
    hand_over: float
    idle: Mapping[str, float]  # cause: the stage waited for, or what is none


@dataclass(frozen=True)
class Simulated:
    slots: Sequence[Slot]  # in order of their start
    makespan: float
    pools: Mapping[str, PoolTime]  # those that serve one stage at a time
    lag: Mapping[int, int]  # lag -> groups trained with it
    queue_mean: float  # groups generated and not yet in an update, over time
    queue_max: int


Times = Mapping[str, Sequence[Took | float]]  # step -> of each batch; a number is work and nothing else, >= 0


def simulate(
    steps: Sequence[Step],
    times: Times,
    batches: int,
    schedule: Schedule,
    *,
    shared: Collection[str] = (),
    groups: int = 1,
    issued: int = 0,
    tokens: int = 0,
    hand_over: float = 0.0,
    stretches: Mapping[tuple[int, str], int] = MappingProxyType({}),
) -> Simulated:
    """Run `batches` batches of `groups` groups through the steps.

    shared: pools that serve any number of stages at a time.
    issued: groups for which a rollout reserves room in the queue until it has ended; 0: `groups`.
    tokens: response tokens of a batch in the queue, at most.
    hand_over: time a pool takes to change from one role to another.
    stretches: (batch, step) -> number; a stretch begins when nothing goes on in the one before: the run stopped there.
    """
    room = _Room(schedule, groups, issued or groups, tokens)
    return _Simulation(steps, _whole(times), batches, schedule, shared, groups, room, hand_over, stretches).run()


def _whole(times: Times) -> dict[str, list[Took]]:
    return {name: [one if isinstance(one, Took) else Took(one) for one in row] for name, row in times.items()}


def lower_bound(
    steps: Sequence[Step],
    times: Times,
    batches: int,
    schedule: Schedule,
    *,
    shared: Collection[str] = (),
) -> tuple[float, str]:
    """(time that no order of the stages can beat on these pools, why): a pool's work, or a batch's longest path."""
    took = _whole(times)
    work: dict[str, float] = {}
    longest = 0.0
    for batch in range(1, batches + 1):
        ends: dict[str, float] = {}
        for step in due(steps, batch, batches, schedule):
            own = took[step.name][batch - 1]
            ends[step.name] = max([ends[n] for n in step.needs if n in ends], default=0.0) + own.work
            if step.pool not in shared:
                early = sum(seconds for _, seconds in own.early)
                work[step.pool] = work.get(step.pool, 0.0) + early + _alone(step, own, schedule)
        longest = max([longest, *ends.values()])
    bounds = [(time, f"the work of pool {pool}") for pool, time in work.items()]
    return max([(longest, "the longest way through one batch"), *bounds])


def _alone(step: Step, took: Took, schedule: Schedule) -> float:
    """What it works at its pool without the others that share it, at least."""
    if not step.shares:
        return took.work
    tail = took.tail if schedule.ahead else 0.0
    return max(0.0, took.work - tail) if step.does == "rollout" else 0.0


class _Room:
    """The queue: a rollout reserves room for its whole batch, and the batch that is trained next always gets in."""

    def __init__(self, schedule: Schedule, groups: int, issued: int, tokens: int) -> None:
        self.groups, self.issued, self.tokens = groups, issued, tokens
        self.limit_groups = schedule.queue_groups or schedule.most_groups(issued)
        self.limit_tokens = schedule.queue_tokens or math.inf
        self.held: dict[int, tuple[int, int]] = {}  # batch -> groups, tokens

    def reserve(self, batch: int) -> bool:
        """Whether the batch got in."""
        groups, tokens = self.issued, self.tokens
        for held in self.held.values():
            groups, tokens = groups + held[0], tokens + held[1]
        if self.held and (groups > self.limit_groups or tokens > self.limit_tokens):
            return False
        self.held[batch] = self.issued, self.tokens
        return True

    def generated(self, batch: int, tokens: int | None) -> None:
        self.held[batch] = self.groups, self.tokens if tokens is None else tokens

    def take(self, batch: int) -> None:
        self.held.pop(batch)


@dataclass(eq=False)
class _Pool:
    name: str
    waiting: list[tuple[bool, int, Slot]] = field(default_factory=list)  # heap: a publish, then by their coming
    holding: list[Slot] = field(default_factory=list)
    looking: bool = False  # for whom to serve next, at the end of this moment
    role: str = ""  # it is ready for
    served: list[Slot] = field(default_factory=list)


class _Simulation:
    def __init__(
        self,
        steps: Sequence[Step],
        took: Mapping[str, Sequence[Took]],
        batches: int,
        schedule: Schedule,
        shared: Collection[str],
        groups: int,
        room: _Room,
        hand_over: float,
        stretches: Mapping[tuple[int, str], int],
    ) -> None:
        self.steps, self.took, self.batches, self.schedule = steps, took, batches, schedule
        self.groups, self.room, self.hand_over = groups, room, hand_over
        self.env = simpy.Environment()
        self.coming = count()
        self.needs = {step.name: {*step.needs, *([step.after] if step.after else [])} for step in steps}
        self.dependents = {step.name: [s.name for s in steps if step.name in self.needs[s.name]] for step in steps}
        self.follows = {step.name: {*step.follows, *([step.name] * (step.does == "update"))} for step in steps}
        self.followers = {step.name: [s.name for s in steps if step.name in self.follows[s.name]] for step in steps}
        self.pools = {step.pool: _Pool(step.pool) for step in steps if step.pool not in shared}
        self.does = {step.does for step in steps}
        self.opens = opens(self.does, schedule)
        self.slots: list[Slot] = []
        self.open: dict[int, dict[str, Slot]] = {}  # batch -> its slots by step, until all have ended
        self.unfinished: dict[int, int] = {}  # batch -> stages
        self.committed = 0  # the update whose weights the engines have
        self.rolled = 0  # the last rollout that has ended, or come to its tail
        self.versions: dict[int, int] = {}  # batch -> version that generated it
        self.lag: Counter[int] = Counter()
        self.held: Slot | None = None  # a rollout that waits for the one before it, for weights or for room
        self.depth = self.depth_max = 0
        self.depth_time = self.depth_since = 0.0
        self.stretches, self.stretch = stretches, 0
        self.stopped: list[Slot] = []  # ready, but of a stretch that has not begun

    def run(self) -> Simulated:
        self._open(1, None)
        self.env.run()
        while self.stopped:
            self.stretch += 1
            stopped, self.stopped = self.stopped, []
            for slot in stopped:
                self._dispatch(slot)
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

    def _after(self, time: float, then: Callable[[], None]) -> None:
        self.env.timeout(time).callbacks.append(lambda _: then())

    def _open(self, batch: int, by: Slot | None) -> None:
        """Let a batch begin: when the rollout of the one before has started, in `sync` its update."""
        if batch > self.batches:
            return
        steps = due(self.steps, batch, self.batches, self.schedule)
        slots = {s.name: Slot(batch, s, self.took[s.name][batch - 1]) for s in steps}
        before = {name: slot for name, slot in self.open.get(batch - 1, {}).items() if slot.end < 0}
        self.open[batch], self.unfinished[batch] = slots, len(slots)
        for slot in slots.values():
            slot.missing = sum(need in slots for need in self.needs[slot.node]) + len(slot.took.early)
            slot.missing += sum(name in before for name in self.follows[slot.node])
        for slot in slots.values():
            if not slot.missing:
                self._ready(slot, by)

    def _ready(self, slot: Slot, by: Slot | None) -> None:
        slot.ready, slot.by = self.env.now, by
        if slot.step.does == "rollout":
            self.held = slot
            self._admit(by)
        else:
            self._dispatch(slot)

    def _admit(self, by: Slot | None, *, queued: bool = False) -> None:
        """Let the rollout that is held go on if the one before has ended, its lag is kept and its batch has room."""
        if (slot := self.held) is None or self.rolled < slot.batch - 1:
            return
        if "update" in self.does and self.committed < fresh_enough(self.schedule, slot.batch):
            return
        if "update" in self.does and not self.room.reserve(slot.batch):
            return
        self.held = None
        slot.ready, slot.by, slot.queued = self.env.now, by, queued
        self._dispatch(slot)

    def _dispatch(self, slot: Slot) -> None:
        if self.stretches.get((slot.batch, slot.node), 0) > self.stretch:
            self.stopped.append(slot)
        elif slot.took.dispatch:
            self._after(slot.took.dispatch, partial(self._ask, slot))
        else:
            self._ask(slot)

    def _ask(self, slot: Slot) -> None:
        slot.asked = self.env.now
        pool = self.pools.get(slot.pool)
        if pool is None or (slot.took.early and not slot.took.work):  # there is nothing left for it to do there
            self._start(slot)
            return
        heapq.heappush(pool.waiting, (slot.step.does != "publish", next(self.coming), slot))
        self._look(pool)

    def _look(self, pool: _Pool) -> None:
        """Serve the next ones. What becomes ready at this very moment takes part in the choice."""
        if not pool.looking:
            pool.looking = True
            self._after(0, partial(self._serve, pool))

    def _serve(self, pool: _Pool) -> None:
        pool.looking = False
        while pool.waiting:
            slot = pool.waiting[0][-1]
            if pool.holding and not (slot.step.shares and all(other.step.shares for other in pool.holding)):
                return
            heapq.heappop(pool.waiting)
            pool.holding.append(slot)
            pool.served.append(slot)
            role = slot.step.role or pool.role
            if pool.role not in ("", role):
                slot.hand_over = self.hand_over
            pool.role = role
            wake = slot.took.wake if slot.asked < self.env.now else 0.0
            if wake or slot.hand_over:
                self._after(wake + slot.hand_over, partial(self._start, slot))
            else:
                self._start(slot)

    def _start(self, slot: Slot) -> None:
        slot.start = self.env.now
        self._after(slot.took.work, partial(self._end, slot))
        if slot.part:
            return
        self.slots.append(slot)
        batch, does = slot.batch, slot.step.does
        if does == "rollout":
            self.versions[batch] = self.committed
            for name in self.dependents[slot.node]:
                if reader := self.open[batch].get(name):
                    self._early(reader, 1)
            if self.schedule.ahead and slot.took.tail:
                self._after(max(0.0, slot.took.work - slot.took.tail), partial(self._leave_room, slot))
        elif does == "update" and batch in self.versions:
            self.lag[batch - 1 - self.versions.pop(batch)] += self.groups
            self._deepen(-self.groups)
            self.room.take(batch)
            self._admit(slot, queued=True)
        if does == self.opens:
            self._open(batch + 1, slot)

    def _early(self, reader: Slot, number: int) -> None:
        """Let the next part come of a stage that begins beside its rollout."""
        if number > len(reader.took.early):
            return
        (needed,) = reader.step.needs
        rollout = self.open[reader.batch][needed]
        since, seconds = reader.took.early[number - 1]
        part = Slot(reader.batch, reader.step, Took(seconds), by=rollout, part=number)

        def come() -> None:
            part.ready = self.env.now
            self._ask(part)

        self._after(max(0.0, rollout.start + since - self.env.now), come)

    def _leave_room(self, rollout: Slot) -> None:
        """Let the next rollout begin where this one is in its tail, or has ended."""
        self.rolled = max(self.rolled, rollout.batch)
        self._admit(rollout)

    def _end(self, slot: Slot) -> None:
        slot.end = self.env.now
        if (pool := self.pools.get(slot.pool)) is not None and slot in pool.holding:
            pool.holding.remove(slot)
            self._look(pool)
        batch, does, slots = slot.batch, slot.step.does, self.open[slot.batch]
        if slot.part:
            self._early(slots[slot.node], slot.part + 1)
            self._supply(slots[slot.node], slot)
            return
        if does == "rollout":
            self._deepen(self.groups)
            self.room.generated(batch, slot.took.tokens)
            self._leave_room(slot)
        if does == "publish" or (
            does == "update" and "publish" not in self.does and publishes(batch, self.batches, self.schedule)
        ):
            self.committed = max(self.committed, batch)
            self._admit(slot)
        for name in self.followers[slot.node]:
            if (following := self.open.get(batch + 1, {}).get(name)) is not None:
                self._supply(following, slot)
        for name in self.dependents[slot.node]:
            if name in slots:
                self._supply(slots[name], slot)
        self.unfinished[batch] -= 1
        if not self.unfinished[batch]:
            del self.unfinished[batch], self.open[batch]

    def _supply(self, slot: Slot, by: Slot) -> None:
        slot.missing -= 1
        if not slot.missing:
            self._ready(slot, by)

    def _deepen(self, groups: int) -> None:
        self.depth_time += self.depth * (self.env.now - self.depth_since)
        self.depth_since = self.env.now
        self.depth += groups
        self.depth_max = max(self.depth_max, self.depth)


def _pool_time(served: Sequence[Slot], makespan: float) -> PoolTime:
    """Each moment before a slot that its pool did not work has one cause: what that slot's start hung on just then."""
    idle: dict[str, float] = {}
    working = free = 0.0
    for slot in served:
        for cause, time in _waited_for(slot, free):
            idle[cause] = idle.get(cause, 0.0) + time
        working += max(0.0, slot.end - max(free, slot.start))  # a rollout in the tail of another: once
        free = max(free, slot.end)
    if makespan > free:
        idle[NOTHING_LEFT] = makespan - free
    return PoolTime(working, sum(slot.hand_over for slot in served), dict(sorted(idle.items(), key=lambda i: -i[1])))


def _waited_for(slot: Slot, since: float) -> Iterator[tuple[str, float]]:
    """(cause, time) from the slot's asking back to `since`, along what made it ready, what made that ready, ..."""
    served = slot.start - slot.hand_over
    if served > max(since, slot.ready):  # its pool was free by `since`: it had yet to ask for it, or to wake up
        yield OUTSIDE, served - max(since, slot.ready)
    while slot.ready > since and slot.by is not None:
        by = slot.by
        if slot.queued:
            yield FULL_QUEUE, slot.ready - since
            return
        for cause, start, end in (
            (by.node, by.start, slot.ready),
            (HAND_OVER, by.start - by.hand_over, by.start),
            (f"pool {by.pool}", by.asked, by.start - by.hand_over),
            (OUTSIDE, by.ready, by.asked),
        ):
            if end > since and end > start:
                yield cause, end - max(since, start)
        slot = by
