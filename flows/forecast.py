"""What an experiment would take on its pools under a schedule, and what would be faster on as many devices."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from conf.errors import ConfigError
from conf.pools import devices_used
from conf.schema import Experiment, Schedule
from flows.graph import CHECKPOINT, Graph, load_graph
from flows.past_run import PastRun
from flows.simulate import FULL_QUEUE, HAND_OVER, NOTHING_LEFT, OUTSIDE, Simulated, lower_bound, simulate
from flows.stage_times import Constant, Distribution, Recorded, Time, generator, longest
from flows.steps import Step, Took, steps_of

COMPARED = 200  # iterations at most of each alternative
SPLITS = 9  # divisions of the devices at most
MAX_LAG = 4  # of the async alternatives where the schedule declares none
SAME = 1.05  # a smaller gain is no reason for another layout or for more lag


@dataclass(frozen=True)
class Costs:
    """What a stage takes, and on how many devices it took that."""

    times: Mapping[str, Time]  # node or `checkpoint` -> of an iteration; the others take none
    rollout_devices: int
    train_devices: int
    samples: float  # trained in an iteration
    tail: Distribution | None = None  # seconds of one response: a batch takes no less than its longest
    hand_over: float = 0.0  # seconds in which a pool changes from one role to the other
    outside: float = 0.0  # seconds of a run before its first stage and after its last one


@dataclass(frozen=True)
class Layout:
    """Which devices the stages run on."""

    devices: Mapping[str, int]  # pool -> devices; a pool without serves any number of stages at a time
    pools: Mapping[str, str]  # node -> pool, where it is not the declared one
    rollout_devices: int
    train_devices: int

    @property
    def total(self) -> int:
        return sum(self.devices.values())

    def __str__(self) -> str:
        if len(self.devices) == 1:
            return f"co-located on {self.total}"
        return f"{self.rollout_devices} for rollout, {self.train_devices} for training"


@dataclass(frozen=True)
class Case:
    """One way to run the experiment, simulated."""

    layout: Layout
    schedule: Schedule
    result: Simulated
    bound: tuple[float, str]
    samples_per_s: float

    @property
    def worked(self) -> float:
        """Device seconds in which stages work."""
        return sum(time.working * self.layout.devices[pool] for pool, time in self.result.pools.items())

    @property
    def busy(self) -> float:
        """Share of all device seconds in which stages work."""
        return self.worked / (self.layout.total * self.result.makespan)

    @property
    def lag_mean(self) -> float:
        groups = sum(self.result.lag.values())
        return sum(lag * count for lag, count in self.result.lag.items()) / groups if groups else 0.0

    @property
    def largest_idle(self) -> tuple[str, str, float]:
        """(pool, cause, share of the makespan) by device seconds."""
        found = [
            (time * self.layout.devices[pool], pool, cause, time / self.result.makespan)
            for pool, times in self.result.pools.items()
            for cause, time in times.idle.items()
        ]
        return max(found, default=(0.0, "", "", 0.0))[1:]


class Forecast:
    """An experiment with the costs of its stages: simulates it on any layout under any schedule."""

    def __init__(self, experiment: Experiment, costs: Costs) -> None:
        self.experiment, self.costs = experiment, costs
        self.graph = load_graph(experiment)
        self.declared = _declared(self.graph, experiment)

    def case(self, layout: Layout, schedule: Schedule, iterations: int) -> Case:
        result, bound, why = self._simulated(layout, schedule, iterations)
        outside = self.costs.outside
        pools = {
            name: replace(
                time, idle={**time.idle, **({OUTSIDE: time.idle.get(OUTSIDE, 0.0) + outside} if outside else {})}
            )
            for name, time in result.pools.items()
        }
        result = replace(result, makespan=result.makespan + outside, pools=pools)
        return Case(
            layout,
            schedule,
            result,
            (bound + outside, why),
            self.costs.samples * iterations / max(result.makespan, 1e-9),
        )

    def _simulated(
        self,
        layout: Layout,
        schedule: Schedule,
        iterations: int,
        stretches: Mapping[tuple[int, str], int] = MappingProxyType({}),
    ) -> tuple[Simulated, float, str]:
        experiment = replace(self.experiment, iterations=iterations, schedule=schedule)
        checkpoints = CHECKPOINT in self.costs.times
        steps = list(steps_of(self.graph, experiment, checkpoints=checkpoints, pools=layout.pools))
        times = {step.name: self._times(step, steps, layout, iterations) for step in steps}
        shared = {step.pool for step in steps} - layout.devices.keys()
        groups, rollout = self.experiment.prompts.per_iteration, self.experiment.rollout
        issued = self.experiment.sampling.candidates(groups)
        result = simulate(
            steps, times, iterations, schedule,
            shared=shared, groups=groups, issued=issued,
            tokens=issued * rollout.samples_per_prompt * rollout.max_new_tokens,
            hand_over=self.costs.hand_over, stretches=stretches,
        )  # fmt: skip
        return result, *lower_bound(steps, times, iterations, schedule, shared=shared)

    def beyond(self, past: PastRun) -> float:
        """Seconds of the makespan of the run whose settings these are that its finished iterations did not need.

        Those of its stops, with the work done again and the overlap lost, and of what it had begun beside them.
        """
        if (went := past.as_it_went) is None:
            return 0.0
        costs = replace(self.costs, times={**self.costs.times, **went.times})
        schedule, count = self.experiment.schedule, past.iterations
        whole, _, _ = self._simulated(self.declared, schedule, count)
        real, _, _ = Forecast(self.experiment, costs)._simulated(self.declared, schedule, went.batches, went.stretches)
        ended = max(slot.end for slot in real.slots if slot.batch <= count)
        return ended + went.idle - whole.makespan - self.costs.outside

    def alternatives(self, schedule: Schedule) -> list[Case]:
        """The best layout of as many devices for each schedule; first what is declared, over as many iterations."""
        iterations = min(self.experiment.iterations, COMPARED)
        total = self.declared.total
        cases = [self.case(self.declared, schedule, iterations)]
        cases.append(self.case(_co_located(self.graph, total), Schedule(), iterations))
        layouts = [_separate(self.graph, n, total - n) for n in _splits(self.declared, total)]
        for other in _schedules(schedule, self.experiment.evaluate.every) if layouts else []:
            cases.append(max((self.case(layout, other, iterations) for layout in layouts), key=_speed))  # noqa: PERF401
        return cases

    def _times(self, step: Step, steps: Sequence[Step], layout: Layout, iterations: int) -> list[Took]:
        """What the step takes in each iteration, on the layout's devices; nothing where it does not run."""
        time = self.costs.times.get(step.name, Constant(0.0))
        due = [step.due(batch) for batch in range(1, iterations + 1)]
        drawn = iter(_drawn(time, generator(self.experiment.seed, step.name), sum(due)))
        took = [next(drawn) if runs else Took(0.0) for runs in due]
        rollout = self.costs.rollout_devices / layout.rollout_devices
        own = self.costs.train_devices / layout.train_devices if step.role == "train" else 1.0
        if step.role == "rollout" and step.does != "publish":
            own = rollout
        beside = step.pool not in {other.pool for other in steps if other.does == "rollout"}
        took = [_scaled(one, own, rollout, beside=beside) for one in took]
        if step.does == "rollout" and self.costs.tail is not None:
            samples = self.experiment.prompts.per_iteration * self.experiment.rollout.samples_per_prompt
            rng = generator(self.experiment.seed, "tail")
            least = longest(self.costs.tail, samples, rng, iterations).tolist()
            took = [replace(one, work=max(one.work, seconds)) for one, seconds in zip(took, least, strict=True)]
        return took


def _drawn(time: Time, rng: np.random.Generator, count: int) -> list[Took]:
    if isinstance(time, Recorded):
        return time.first(count)
    return [Took(seconds) for seconds in time.draw(rng, count).tolist()]


def _scaled(took: Took, own: float, rollout: float, *, beside: bool) -> Took:
    """The same on other devices; what was early comes with the rest where the rollout has the pool."""
    early = tuple((rollout * since, own * seconds) for since, seconds in took.early)
    late = 0.0 if beside else sum(seconds for _, seconds in early)
    return replace(took, work=own * took.work + late, early=early if beside else (), tail=own * took.tail)


def _speed(case: Case) -> float:
    return case.samples_per_s


def _declared(graph: Graph, experiment: Experiment) -> Layout:
    used = {name: devices_used(pool, experiment) for name, pool in experiment.pools.items() if name in _pools(graph)}
    rollout, train = (sum(pair[i] for pair in used.values()) for i in (0, 1))
    return Layout({name: max(pair) for name, pair in used.items() if max(pair)}, {}, rollout, train)


def _pools(graph: Graph) -> set[str]:
    return {node.pool for node in graph}


def _co_located(graph: Graph, total: int) -> Layout:
    pools = {node.name: "all" if node.stage.role != "cpu" else "cpu" for node in graph}
    return Layout({"all": total}, pools, total, total)


def _separate(graph: Graph, rollout: int, train: int) -> Layout:
    pools = {node.name: node.stage.role for node in graph}
    return Layout({"rollout": rollout, "train": train}, pools, rollout, train)


def _splits(declared: Layout, total: int) -> list[int]:
    """Numbers of rollout devices to try: all where they are few, else evenly spread ones and the declared one."""
    spread = {round(total * i / SPLITS) for i in range(1, SPLITS)} if total > SPLITS else set(range(1, total))
    return sorted((spread | {declared.rollout_devices}) & set(range(1, total)))


def _schedules(declared: Schedule, evaluate_every: int) -> list[Schedule]:
    """In step, one step off, and async with the declared lag and queue at several publish intervals."""
    limit = declared.lag_limit if declared.kind == "async" else MAX_LAG
    tried = {1, 2, 4, 8, declared.publish_every}
    intervals = sorted(n for n in tried if n <= limit + 1 and evaluate_every % n == 0)
    ahead = [replace(declared, kind="async", max_lag=limit, publish_every=every) for every in intervals]
    return [Schedule(), replace(declared, kind="one_step_off", max_lag=0, publish_every=1), *ahead]


def schedule_text(schedule: Schedule) -> str:
    """`async, lag <= 4, publish every 2, queue 16 groups`"""
    parts: list[str] = [schedule.kind]
    if schedule.kind == "async":
        parts += [f"lag <= {schedule.max_lag}", f"publish every {schedule.publish_every}"]
    if schedule.ahead:
        bounds = (schedule.queue_groups, "groups"), (schedule.queue_tokens, "tokens")
        parts += [f"queue {count} {unit}" for count, unit in bounds if count]
    return ", ".join(parts)


def recommend(cases: Sequence[Case]) -> str:
    """One sentence: the fastest case within the lag the declared one allows; a second one where more lag gives more."""
    declared, *others = cases
    allowed = [case for case in cases if case.schedule.lag_limit <= declared.schedule.lag_limit]
    best, fastest = _simplest(allowed), _simplest(others)
    what = f"Recommended: {best.layout}, {schedule_text(best.schedule)}: {_rate(best)}"
    if best is declared:
        text = f"Recommended: as declared, {_rate(best)}: nothing else within its lag gains {SAME - 1:.0%}."
    elif best.samples_per_s < declared.samples_per_s * SAME:
        text = f"{what}, within {SAME - 1:.0%} of the declared, at lag <= {best.schedule.lag_limit}."
    else:
        pool, cause, share = declared.largest_idle
        text = f"{what}, {_ratio(best, declared)} times the declared, "
        if best.busy / declared.busy >= declared.worked / best.worked:
            text += f"because devices work {best.busy:.0%} of the time instead of {declared.busy:.0%}"
            text += f" ({pool} now idles {share:.0%}: {waits(cause)})." if share >= 0.01 else "."
        else:
            text += f"because the stages take {best.worked:,.4g} device seconds instead of {declared.worked:,.4g}."
    if fastest.samples_per_s >= best.samples_per_s * SAME:
        schedule = schedule_text(fastest.schedule)
        text += (
            f" If lag up to {fastest.schedule.lag_limit} is accepted, with a correction for off-policy data: "
            f"{fastest.layout}, {schedule}: {_rate(fastest)}, {_ratio(fastest, best)} times that."
        )
    return text


def _simplest(cases: Sequence[Case]) -> Case:
    """The one with the least lag, and of those the first, among all that are as fast as the fastest or nearly so."""
    top = max(map(_speed, cases))
    return min((case for case in cases if case.samples_per_s * SAME > top), key=lambda case: case.schedule.lag_limit)


def _rate(case: Case) -> str:
    return f"{case.samples_per_s:.3g} samples/s"


def _ratio(case: Case, other: Case) -> str:
    return f"{case.samples_per_s / other.samples_per_s:.2f}"


def waits(cause: str) -> str:
    return cause if cause in (FULL_QUEUE, HAND_OVER, NOTHING_LEFT, OUTSIDE) else f"waits for {cause}"


def check_comparable(experiment: Experiment, past: PastRun) -> None:
    """Raises ConfigError where the run's stage times are those of another amount of work."""
    for name, now, then in (
        ("samples an iteration", _samples(experiment), _samples(past.experiment)),
        ("rollout.max_new_tokens", experiment.rollout.max_new_tokens, past.experiment.rollout.max_new_tokens),
        ("model.path", experiment.model.path, past.experiment.model.path),
    ):
        if now != then:
            raise ConfigError(f"--from must name a run with the same {name}, expected {now}, got {then}: give --time")


def _samples(experiment: Experiment) -> int:
    return experiment.prompts.per_iteration * experiment.rollout.samples_per_prompt


def costs_of(
    experiment: Experiment,
    past: PastRun | None,
    times: Mapping[str, Time],
    tail: Distribution | None,
    hand_over: float | None,
) -> Costs:
    """The run's times, each replaced where one is given. They hold for the run's devices, without one the experiment's.

    hand_over: seconds; None: the run's, or none.

    Raises ConfigError where the run did another amount of work.
    """
    if past is not None:
        check_comparable(experiment, past)
        experiment = past.experiment
    layout = _declared(load_graph(experiment), experiment)
    return Costs(
        {**(past.times if past else {}), **times},
        layout.rollout_devices,
        layout.train_devices,
        past.trained if past else _samples(experiment),
        tail,
        (past.hand_over if past else 0.0) if hand_over is None else hand_over,
        past.outside if past else 0.0,
    )
