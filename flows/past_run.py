"""What a past run's stages took: so that its own schedule gives its makespan again, and no other one is misled by it.

What a stage recorded is divided by the rules that the simulation applies (flows/steps.py): what it took once everything
it waits for was there is its own, and the rest is the schedule's doing, which a simulation finds anew:

- `work`: what it worked since then. `early`: what a stage that streams had the trainer for before its rollout ended;
  at the reward workers that takes nobody's place and does not count.
- `dispatch`: what passed until it asked for its pool: Prefect ends one task and starts another, the ledger is written.
- a rollout took all of its time, also where it began in the `tail` of the one before.
- a wait for a pool, or for room in the queue, counts for nothing, and a hand-over is the pool's.

Then there is time in which nothing could run: before the first stage and after the last. Where the run was stopped and
continued, that and all work that was lost are what the stop cost.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from conf.errors import RunError
from conf.load import load_experiment
from conf.schema import Experiment
from data.accounts import SessionRow, StageRow, Wait
from flows.graph import CHECKPOINT, load_graph
from flows.pool_time import Period, session_ends, working_spans
from flows.schedule import fresh_enough
from flows.stage_times import Recorded
from flows.steps import Step, Took, due, opens, steps_of
from flows.waits import HANDOVER, POOL, QUEUE, REWARD, UPSTREAM, WEIGHTS


@dataclass(frozen=True)
class AsItWent:
    """A run with its stops, and with what it had begun beyond its finished iterations as the last of them ended."""

    times: Mapping[str, Recorded]
    batches: int  # finished and begun
    stretches: Mapping[tuple[int, str], int]  # (batch, node) -> number of the stretch without a stop in which it ran
    idle: float  # seconds in which no stage could run, and those of attempts that were lost


@dataclass(frozen=True)
class PastRun:
    """What a run recorded of its finished iterations. A batch is an iteration, counted from 1 without gaps."""

    experiment: Experiment  # the settings it ran with
    times: Mapping[str, Recorded]  # by node, also `checkpoint`
    iterations: int
    makespan: float  # seconds, without those between a stop and the next start
    trained: float  # samples an iteration
    hand_over: float  # seconds in which its co-located pool changed from one role to the other, mean; 0: it never did
    outside: float  # seconds before its first stage and after its last one
    as_it_went: AsItWent | None  # None: it did not stop, and had begun nothing else


def read_run(folder: str) -> PastRun:
    """Raises RunError where the folder holds no run with a finished iteration."""
    from flows.show import read_report  # it imports Prefect, which takes longer than a whole `ratchet plan`

    report = read_report(folder)
    if not report.history:
        raise RunError(f"{folder} must have a finished iteration to take stage times from, got none")
    return past_run(load_experiment(report.folder / "config.yaml"), report.history, report.stages, report.sessions)


def past_run(
    experiment: Experiment,
    history: Mapping[int, Mapping[str, float]],
    rows: Sequence[StageRow],
    sessions: Sequence[SessionRow],
) -> PastRun:
    """history: metrics of the finished iterations."""
    stretches = _stretches(sessions, rows)
    finished = sorted(history)
    begun = {row.iteration for row in rows if row.iteration > finished[-1] and row.started < stretches[-1].end}
    batches = {number: batch for batch, number in enumerate([*finished, *sorted(begun)], 1)}
    counted: dict[tuple[int, str], StageRow] = {}  # the last attempt counts: those before were cut off
    for row in rows:
        if row.state == "completed" and row.iteration in batches and row.started < stretches[-1].end:
            counted[batches[row.iteration], row.node] = row
    reading = _Reading(experiment, counted, stretches)
    outside, stopped = reading.idle(len(finished))

    def times(count: int) -> dict[str, Recorded]:
        found: dict[str, list[Took]] = {}
        for number, batch in list(batches.items())[:count]:
            for step in due(list(reading.steps.values()), batch, count, experiment.schedule):
                took = reading.took(batch, step) if (batch, step.name) in counted else Took(0.0)  # it has no row
                tokens = _generated(history.get(number, {}), step.name)
                found.setdefault(step.name, []).append(replace(took, tokens=tokens))
        return {node: Recorded(took) for node, took in found.items() if any(node == name for _, name in counted)}

    changes = [wait.end - wait.start for row in counted.values() for wait in row.spans if wait.cause == HANDOVER]
    values = history.values()
    trained = [v["throughput/effective_samples_per_s"] * v["time/iteration"] for v in values]
    straight = len(stretches) == 1 and not begun
    places = {place: reading.stretch(row) for place, row in counted.items()}
    return PastRun(
        experiment,
        times(len(finished)),
        len(finished),
        sum(v["time/iteration"] for v in values),
        sum(trained) / len(trained),
        sum(changes) / len(changes) if changes else 0.0,
        outside,
        None if straight else AsItWent(times(len(batches)), len(batches), places, outside + stopped),
    )


def _stretches(sessions: Sequence[SessionRow], rows: Sequence[StageRow]) -> list[Period]:
    """The time until the last accounting, in pieces without a stop: a failed attempt ends all that is under way."""
    found: list[Period] = []
    last = max(i for i, session in enumerate(sessions) if session.accounted)
    for i, (session, ended) in enumerate(zip(sessions, session_ends(sessions, rows), strict=True)):
        if i > last or session.ready is None:
            continue
        ready, end = session.ready, (session.accounted or ended) if i == last else ended
        failed = {row.ended for row in rows if row.state == "failed" and ready < row.ended < end}
        found += [Period(*piece) for piece in pairwise([ready, *sorted(failed), end])]
    return found


class _Reading:
    """Rows by batch and node, and what each of them waited for."""

    def __init__(
        self, experiment: Experiment, rows: Mapping[tuple[int, str], StageRow], stretches: Sequence[Period]
    ) -> None:
        graph = load_graph(experiment)
        steps = steps_of(graph, experiment, checkpoints=any(node == CHECKPOINT for _, node in rows))
        self.schedule, self.rows, self.stretches = experiment.schedule, rows, stretches
        self.steps = {step.name: step for step in steps}
        does = {step.does: step.name for step in self.steps.values()}
        self.rolling, self.publish = does.get("rollout"), does["publish"]
        self.opens = does[opens(does, self.schedule)]
        self.at: dict[str, list[str]] = {}  # pool -> steps
        for step in self.steps.values():
            self.at.setdefault(step.pool, []).append(step.name)
        self.beside = {node.name for node in graph if node.stage.streams and node.stage.role == "train"}
        self.began: dict[int, float] = {}  # stretch -> when its first stage started
        for row in rows.values():
            number = self.stretch(row)
            self.began[number] = min(row.started, self.began.get(number, row.started))

    def stretch(self, row: StageRow) -> int:
        return bisect_right(self.stretches, row.started, key=lambda stretch: stretch.start) - 1

    def took(self, batch: int, step: Step) -> Took:
        row = self.rows[batch, step.name]
        since, gate = self._since(batch, step, row), self._gate(batch, step, row)
        work, dispatch, early = 0.0, max(0.0, row.started - since), []
        for wait in row.spans:
            if wait is gate or wait.cause in (UPSTREAM, WEIGHTS, REWARD):
                dispatch += max(0.0, wait.end - max(wait.start, since))
        rollout = self.rows.get((batch, step.needs[0])) if step.name in self.beside else None
        began, reach = _began(rollout) if rollout else since, since
        for turn in self._turns(batch, step, row):
            if turn.held and began <= turn.asked < since:
                early.append((turn.asked - began, turn.end - turn.start))
                reach = max(reach, turn.end)
            elif turn.held:
                work += max(0.0, turn.end - max(turn.start, reach))
            else:
                dispatch += max(0.0, turn.end - max(turn.start, reach))
        tail = self._tail(batch, row) if step.name == self.rolling else 0.0
        return Took(work, dispatch, self._wake(batch, step, row, gate), tuple(early), tail)

    def _since(self, batch: int, step: Step, row: StageRow) -> float:
        """When everything was there that it waits for, but for its pool."""
        places = [(batch, need) for need in (*step.needs, step.after)] + [(batch - 1, name) for name in step.follows]
        ends = [self.began[number]] if (number := self.stretch(row)) else []
        if step.name == self.rolling:
            places.append((fresh_enough(self.schedule, batch), self.publish))
            ends += [wait.end for wait in row.spans if wait.cause == QUEUE]
            if before := self.rows.get((batch - 1, step.name)):
                ends.append(min(before.ended, self._passed(batch, step, row)))
        elif not step.needs and (opening := self.rows.get((batch - 1, self.opens))):
            ends.append(_began(opening))
        ends += [ended for place in places if (ended := self._ended(*place))]
        return max(ends, default=row.started)

    def _ended(self, batch: int, name: str) -> float:
        """Of a stage without a row: when its inputs were there. 0: nothing is known."""
        if row := self.rows.get((batch, name)):
            return row.ended
        needs = self.steps[name].needs if name in self.steps else ()
        return max([self._ended(batch, need) for need in needs], default=0.0)

    def _gate(self, batch: int, step: Step, row: StageRow) -> Wait | None:
        """The wait for the rollout before, or for a checkpoint: the first for a pool, from a time when that worked."""
        place = (batch - 1, step.name) if step.name == self.rolling else (batch, step.after)
        until = self.rows[place].ended if place in self.rows else 0.0
        return next((wait for wait in row.spans if wait.cause == POOL and wait.start < until), None)

    def _passed(self, batch: int, step: Step, row: StageRow) -> float:
        """When a rollout no longer waited for the one before it."""
        if gate := self._gate(batch, step, row):
            return gate.end
        return max([row.started, *(wait.end for wait in row.spans if wait.cause == UPSTREAM)])

    def _turns(self, batch: int, step: Step, row: StageRow) -> Iterator["_Turn"]:
        """Each time that the attempt worked; one that streams takes its pool for that and leaves it again.

        Where another attempt worked there as it began, it had not: it was on its way to the pool, or done with it.
        """
        before = {wait.end: wait for wait in row.spans if wait.cause == POOL}
        for start, end in working_spans(row):
            asked = before[start].start if start in before else start
            others = self._others(batch, step) if step.name in self.beside and start not in before else ()
            yield _Turn(asked, start, end, not any(other.start <= start < other.end for other in others))

    def _others(self, batch: int, step: Step) -> Iterator[Period]:
        """When other attempts worked at the step's pool, of all batches that may be under way together."""
        reach = self.schedule.lag_limit + self.schedule.publish_every
        for near in range(batch - reach, batch + reach + 1):
            for name in self.at[step.pool]:
                if (row := self.rows.get((near, name))) and (near, name) != (batch, step.name):
                    yield from working_spans(row)[0 if name in self.beside else -1 :]

    def _wake(self, batch: int, step: Step, row: StageRow, gate: Wait | None) -> float:
        """How long it went on waiting for its pool after that was free."""
        for wait in reversed(row.spans):
            if wait.cause == POOL and wait is not gate:
                served = [min(p.end, wait.end) for p in self._others(batch, step) if p.start < wait.end]
                return wait.end - max([wait.start, *served])
        return 0.0

    def _tail(self, batch: int, row: StageRow) -> float:
        """How long before its end the rollout let the next one begin."""
        after = self.rows.get((batch + 1, row.node)) if self.schedule.ahead else None
        return max(0.0, row.ended - self._passed(batch + 1, self.steps[row.node], after)) if after else 0.0

    def idle(self, finished: int) -> tuple[float, float]:
        """Seconds outside stages (before the first and after the last, before and after stops); finished: batches."""
        edges, stopped = 0.0, 0.0
        first, last = min(self.began), len(self.stretches) - 1
        for number, stretch in enumerate(self.stretches):
            ends = [
                row.ended
                for (batch, _), row in self.rows.items()
                if self.stretch(row) == number and (batch <= finished or number < last)
            ]
            if not ends:
                stopped += stretch.end - stretch.start
                continue
            opening, closing = self.began[number] - stretch.start, stretch.end - max(ends)
            edges += opening * (number == first) + closing * (number == last)
            stopped += opening * (number != first) + closing * (number != last)
        return edges, stopped


def _began(rollout: StageRow) -> float:
    """When it had its pool: it works from then to its end."""
    return rollout.spans[-1].end if rollout.spans else rollout.started


class _Turn(NamedTuple):
    asked: float  # for its pool
    start: float
    end: float
    held: bool  # it had its pool


def _generated(values: Mapping[str, float], rollout: str) -> int | None:
    """Response tokens of the rollout's rows in an iteration's metrics."""
    if (rate := values.get("throughput/generated_tokens_per_s")) is None:
        return None
    return round(rate * values["time/iteration"] - values.get(f"{rollout}/discarded_tokens", 0.0))
