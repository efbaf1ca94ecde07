"""The rows of a run written by hand, and what the planner makes of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from conf.load import load
from conf.schema import Experiment, Node
from data.accounts import SessionRow, StageRow, Wait
from flows.forecast import Forecast, costs_of
from flows.past_run import PastRun, past_run
from flows.stage_times import Recorded
from flows.steps import Took
from tests.fakes.stages import paced

RATIO = "update.correction.kind=ratio"
ONE_OFF = ("schedule.kind=one_step_off", RATIO)
LAG_2 = ("schedule.kind=async", "schedule.max_lag=2", RATIO)
SYNC = ("schedule.kind=sync",)
CO_LOCATED = ("pools.train=null", "pools.rollout.roles=[rollout,train]")
STREAMED = {
    **paced(),
    "rollout": Node("tests.fakes.streaming:rollout", "rollout", ["prompts"]),
    "reference": Node("tests.fakes.streaming:reference", "train", ["rollout"]),
    "update": Node("tests.fakes.stages:update", "train", ["reward", "reference"]),
}


def settings(*overrides: str, nodes: Mapping[str, Node] | None = None) -> Experiment:
    return replace(
        load("conf/smollm2_arithmetic.yaml", ["evaluate.every=0", *overrides]).experiment, graph=nodes or paced()
    )


def row(iteration: int, node: str, started: float, ended: float, *waits: tuple[str, float, float]) -> StageRow:
    return StageRow(iteration, node, "completed", started, ended, tuple(Wait(*wait) for wait in waits))


def at_once(iteration: int, at: float, *nodes: str) -> list[StageRow]:
    """Stages that take no time."""
    return [row(iteration, node, at, at) for node in nodes]


def recorded(
    experiment: Experiment,
    rows: Sequence[StageRow],
    seconds: Sequence[float],
    *sessions: SessionRow,
    metrics: Mapping[str, float] | None = None,
) -> PastRun:
    """seconds: of each finished iteration. Without sessions: one, that was ready at 0."""
    history = {
        number: {"time/iteration": time, "throughput/effective_samples_per_s": 64 / time, **(metrics or {})}
        for number, time in enumerate(seconds, 1)
    }
    rows = sorted(rows, key=lambda row: row.started)
    return past_run(experiment, history, rows, sessions or [SessionRow(-5, 0, sum(seconds))])


def forecast(past: PastRun, *overrides: str) -> Forecast:
    """Of the run under its own settings, or under others."""
    experiment = past.experiment
    if overrides:
        experiment = settings(*overrides, nodes=experiment.graph)
    return Forecast(experiment, costs_of(experiment, past, {}, None, None))


def predicted(past: PastRun, *overrides: str) -> float:
    f = forecast(past, *overrides)
    return f.case(f.declared, f.experiment.schedule, past.iterations).result.makespan


def took(past: PastRun, node: str) -> list[Took]:
    time = past.times[node]
    assert isinstance(time, Recorded)
    return list(time.took)
