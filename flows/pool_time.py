"""Where each second of each pool went: one cause each, so that the causes of a pool add up to wall time.

Everything follows from the ledger's rows: attempts of stages with their waits, and the sessions of the processes that
had the run. A pool at which a stage is at work has that work as its cause. Otherwise it is what the stage that goes on
next at this pool waits for, followed from stage to stage to where it began: the update waits for advantages, those for
rewards, so the pool idles for `reward`. Stages that are under way are rows as far as they have come.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from data.accounts import SessionRow, StageRow, Wait
from flows.waits import HANDOVER, POOL, QUEUE, REWARD, UPSTREAM, WEIGHTS

WORKING, PUBLISH, STARTING, FAILED = "working", "publish", "starting", "failed"
HAND_OVER = "hand-over"
CLAIM = "claim"  # the attempt of iteration 0, at no pool of its own, that waits for devices which another run has
SCHEDULE = "schedule"  # stages are at work elsewhere, and none waits that would go on here
OTHER = "other"  # no stage of any pool is at work and none waits here: accounting, orchestration, stopping
WAITS = {UPSTREAM: "data", WEIGHTS: "weights", REWARD: "reward", POOL: "pool", QUEUE: "queue", HANDOVER: HAND_OVER}
BUSY = (PUBLISH, WORKING, HAND_OVER, FAILED, STARTING)  # of several at once, the first counts
CAUSES = (WORKING, PUBLISH, HAND_OVER, FAILED, STARTING, "data", "weights", "reward", "pool", "queue", SCHEDULE, OTHER)


class Span(NamedTuple):
    start: float  # epoch seconds
    end: float
    cause: str


class Period(NamedTuple):
    start: float  # epoch seconds
    end: float


def working_spans(row: StageRow) -> list[Period]:
    """The times in which the attempt does not wait, in order."""
    found, reach = [], row.started
    for wait in row.spans:
        found.append(Period(reach, min(wait.start, row.ended)))
        reach = max(reach, wait.end)
    return [span for span in [*found, Period(reach, row.ended)] if span.end > span.start]


def working_seconds(row: StageRow) -> float:
    return sum(end - start for start, end in working_spans(row))


def shared_seconds(rows: Sequence[StageRow]) -> list[float]:
    """Each attempt's part of its pool's seconds, in the order of the rows.

    A second in which several attempts work at a pool is divided equally among them, so that those of a pool add up to
    the seconds in which at least one of them worked.
    """
    changes: dict[str, list[tuple[float, int, int]]] = {}
    for index, row in enumerate(rows):
        for start, end in working_spans(row):
            changes.setdefault(row.pool, []).extend([(start, 1, index), (end, -1, index)])
    seconds = [0.0] * len(rows)
    for pool in changes.values():
        at_work: list[int] = []
        reach = 0.0
        for at, step, index in sorted(pool):
            for working in at_work:
                seconds[working] += (at - reach) / len(at_work)
            reach = at
            (at_work.append if step > 0 else at_work.remove)(index)
    return seconds


def outside_stage_work(rows: Iterable[StageRow], began: float, ended: float) -> float:
    """Seconds of [began, ended] in which no stage of any iteration worked."""
    worked = _union(span for row in rows for span in working_spans(row))
    return (ended - began) - sum(max(0.0, min(end, ended) - max(start, began)) for start, end in worked)


def _union(spans: Iterable[Period]) -> list[Period]:
    found: list[Period] = []
    for start, end in sorted(spans):
        if found and start <= found[-1].end:
            found[-1] = Period(found[-1].start, max(found[-1].end, end))
        else:
            found.append(Period(start, end))
    return found


def pool_seconds(
    rows: Sequence[StageRow], pools: Collection[str], periods: Iterable[Period]
) -> dict[str, dict[str, float]]:
    """pool -> cause -> seconds of the periods; for each pool they add up to the periods' length."""
    found: dict[str, dict[str, float]] = {pool: {} for pool in pools}
    for period in periods:
        timeline = _Timeline(rows, *period)
        for pool, seconds in found.items():
            for start, end, cause in timeline.cut(pool):
                seconds[cause] = seconds.get(cause, 0.0) + end - start
    return {pool: {cause: seconds[cause] for cause in CAUSES if cause in seconds} for pool, seconds in found.items()}


def partition(rows: Iterable[StageRow], pool: str, began: float, ended: float) -> list[Span]:
    """[began, ended] of a pool cut into spans, without gap or overlap, each with one of CAUSES.

    rows: the attempts of all pools, as far as they touch [began, ended]; those of the pool "" are at every pool.
    """
    return _Timeline(rows, began, ended).cut(pool)


class _Attempt:
    """A row, with what it takes to ask it about a moment."""

    def __init__(self, row: StageRow) -> None:
        self.row = row
        self.work = working_spans(row)
        self.kind = FAILED if row.state == FAILED and row.kind != STARTING else row.kind

    def wait(self, at: float) -> Wait | None:
        last = bisect_right(self.row.spans, at, key=_start) - 1
        return self.row.spans[last] if last >= 0 and self.row.spans[last].end > at else None

    def goes_on(self, at: float) -> float:
        """When it works next; where it never does, when its last wait ends."""
        later = bisect_right(self.work, at, key=_start)
        return self.work[later].start if later < len(self.work) else self.row.spans[-1].end


def _start(span: Wait | Period) -> float:
    return span.start


class _Timeline:
    """The attempts at all pools that touch [began, ended]."""

    def __init__(self, rows: Iterable[StageRow], began: float, ended: float) -> None:
        self._began, self._ended = began, ended
        touching = (row for row in rows if row.started < ended and row.ended > began)
        self._attempts = [_Attempt(row) for row in sorted(touching, key=lambda row: row.started)]
        self._of_node: dict[tuple[int, str], list[_Attempt]] = {}
        for attempt in self._attempts:
            self._of_node.setdefault((attempt.row.iteration, attempt.row.node), []).append(attempt)
        self._worked = _union(span for attempt in self._attempts for span in attempt.work)
        waits = {at for attempt in self._attempts for wait in attempt.row.spans for at in (wait.start, wait.end)}
        self._edges = sorted(waits | {at for a in self._attempts for at in (a.row.started, a.row.ended)})

    def cut(self, pool: str) -> list[Span]:
        here = [attempt for attempt in self._attempts if attempt.row.pool in ("", pool)]
        coming, under_way = deque(here), list[_Attempt]()
        spans: list[Span] = []
        for start, end, cause in self._busy(here):
            if cause:
                spans.append(Span(start, end, cause))
                continue
            between = self._edges[bisect_right(self._edges, start) : bisect_left(self._edges, end)]
            for left, right in pairwise([start, *between, end]):
                while coming and coming[0].row.started <= left:
                    under_way.append(coming.popleft())
                under_way = [attempt for attempt in under_way if attempt.row.ended > left]
                spans.append(Span(left, right, self._idle(under_way, left)))
        return _joined(spans)

    def _busy(self, here: Iterable[_Attempt]) -> Iterator[tuple[float, float, str]]:
        """[began, ended] cut where what is at the pool changes; the cause is empty where nothing is."""
        changes: list[tuple[float, str, int]] = []
        for attempt in here:
            spans = [(attempt.kind, span.start, span.end) for span in attempt.work]
            spans += [(HAND_OVER, wait.start, wait.end) for wait in attempt.row.spans if wait.cause == HANDOVER]
            for cause, start, end in spans:
                start, end = max(start, self._began), min(end, self._ended)
                if start < end:
                    changes += [(start, cause, 1), (end, cause, -1)]
        count = dict.fromkeys(BUSY, 0)
        reach = self._began
        for at, cause, step in [*sorted(changes), (self._ended, "", 0)]:
            if at > reach:
                yield reach, at, next((name for name in BUSY if count[name]), "")
                reach = at
            if cause:
                count[cause] += step

    def _idle(self, under_way: Iterable[_Attempt], at: float) -> str:
        """What the one of them that goes on first waits for at this moment."""
        waiting = [attempt for attempt in under_way if attempt.wait(at)]
        if waiting:
            return self._origin(min(waiting, key=lambda a: (a.goes_on(at), a.row.iteration, a.row.started)), at)
        last = bisect_right(self._worked, at, key=_start) - 1
        return SCHEDULE if last >= 0 and self._worked[last].end > at else OTHER

    def _origin(self, attempt: _Attempt, at: float) -> str:
        """What the stage waits for, or what that waits for, and so on.

        Where a policy waits for data in its turn, it is still the policy that the pool waits for; a reward, a pool or a
        hand-over at the end of the chain is what to do something about.
        """
        causes: list[str] = []
        seen: list[_Attempt] = []
        following: _Attempt | None = attempt
        while following is not None and following not in seen and (wait := following.wait(at)):
            seen.append(following)
            causes.append(WAITS.get(wait.cause, SCHEDULE))
            needed = [a for node in wait.on for a in self._of_node.get((attempt.row.iteration, node), ())]
            current = [a for a in needed if a.row.started <= at < a.row.ended]
            following = max(current, key=lambda a: a.row.ended, default=None)
        return "weights" if causes[-1] == "data" and "weights" in causes else causes[-1]


def _joined(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for span in spans:
        if found and found[-1].cause == span.cause:
            found[-1] = found[-1]._replace(end=span.end)
        else:
            found.append(span)
    return found


# -- sessions


def session_ends(sessions: Sequence[SessionRow], rows: Sequence[StageRow], now: float | None = None) -> list[float]:
    """When each process ended: as recorded; the last one, where it is under way, `now`; else its last known moment."""
    found = []
    for session, following in zip_longest(sessions, sessions[1:]):
        if session.ended is not None:
            found.append(session.ended)
        elif following is None and now is not None:
            found.append(now)
        else:
            until = following.started if following else float("inf")
            ends = [row.ended for row in rows if session.started <= row.started < until]
            known = (session.started, session.ready or 0.0, session.accounted or 0.0, session.seen or 0.0)
            found.append(min(until, max([*known, *ends])))
    return found


def run_seconds(
    sessions: Sequence[SessionRow], rows: Sequence[StageRow], pools: Collection[str]
) -> dict[str, dict[str, float]]:
    """pool -> cause -> seconds over the whole run: the time of all its processes, without that between them.

    A process starts until it is ready, but for the time in which another run had its devices: that is a wait for them.
    """
    ends = session_ends(sessions, rows)
    periods = [Period(session.started, end) for session, end in zip(sessions, ends, strict=True)]
    claims = [wait for row in rows if row.node == CLAIM and not row.pool for wait in row.spans]
    starts = []
    for session, end in zip(sessions, ends, strict=True):
        ready = min(session.ready or end, end)
        waits = tuple(wait for wait in claims if session.started <= wait.start < ready)
        starts.append(StageRow(0, STARTING, "completed", session.started, ready, waits, kind=STARTING))
    return pool_seconds([*starts, *rows], pools, periods)


def unaccounted(sessions: Sequence[SessionRow], rows: Sequence[StageRow], now: float) -> list[Period]:
    """The time of iterations, without that of starting, since the last accounting, in this process or one before."""
    last = max((i for i, session in enumerate(sessions) if session.accounted), default=0)
    begins = [session.accounted or session.ready for session in sessions[last:]]
    ends = session_ends(sessions, rows, now)[last:]
    return [Period(begin, end) for begin, end in zip(begins, ends, strict=True) if begin and end > begin]
