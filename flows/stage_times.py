"""How long each stage takes: seconds, a distribution, or what a past run recorded.

All are drawn before a simulation starts, each stage's from its own seed: schedules are compared on the same times.
"""

import math
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import Protocol

import numpy as np

from conf.errors import ConfigError, RunError
from conf.load import load_experiment
from conf.schema import Experiment
from data.accounts import StageRow
from flows.graph import Graph, load_graph
from flows.pool_time import outside_stage_work, working_spans
from flows.schedule import rollouts
from flows.waits import HANDOVER

OUTSIDE = "outside stages"  # what a run spends between its stages: orchestration, accounting


class Time(Protocol):
    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` times, in seconds."""


@dataclass(frozen=True)
class Constant:
    seconds: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.full(count, self.seconds)

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return np.full(len(u), self.seconds)


@dataclass(frozen=True)
class Uniform:
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self.quantile(rng.random(count))

    def quantile(self, u: np.ndarray) -> np.ndarray:
        return self.low + (self.high - self.low) * u


@dataclass(frozen=True)
class LogNormal:
    mean: float
    sd: float

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return self.quantile(rng.random(count))

    def quantile(self, u: np.ndarray) -> np.ndarray:
        variance = math.log(1 + (self.sd / self.mean) ** 2)
        normal = NormalDist(math.log(self.mean) - variance / 2, math.sqrt(variance))
        inside = np.clip(u, 1e-12, 1 - 1e-12)  # the quantiles of 0 and 1 are infinite
        return np.exp([normal.inv_cdf(p) for p in inside])


Distribution = Constant | Uniform | LogNormal


@dataclass(frozen=True)
class Recorded:
    """The times of a run in their order, from the start again where they are too few."""

    seconds: Sequence[float]

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        return np.resize(np.asarray(self.seconds), count)


def parse_time(text: str, what: str) -> Distribution:
    """`40`, `lognormal(MEAN,SD)` or `uniform(LOW,HIGH)`, in seconds. Raises ConfigError."""
    try:
        if match := re.fullmatch(r"(lognormal|uniform)\(([^,]+),([^,]+)\)", text.replace(" ", "")):
            first, second = float(match[2]), float(match[3])
            ordered = (
                0 < first < math.inf and 0 < second < math.inf
                if match[1] == "lognormal"
                else 0 <= first <= second < math.inf
            )
            if ordered:
                return LogNormal(first, second) if match[1] == "lognormal" else Uniform(first, second)
        elif 0 <= float(text) < math.inf:
            return Constant(float(text))
    except ValueError:
        pass
    raise ConfigError(
        f"{what} must be seconds >= 0, lognormal(MEAN,SD) with both > 0, or uniform(LOW,HIGH), got {text!r}"
    )


def longest(tail: Distribution, samples: int, rng: np.random.Generator, count: int) -> np.ndarray:
    """The longest of `samples` draws, `count` times, from one draw each: the quantile of u^(1/samples)."""
    return tail.quantile(rng.random(count) ** (1 / samples))


def generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


@dataclass(frozen=True)
class PastRun:
    """What a run recorded of its finished iterations."""

    experiment: Experiment  # the settings it ran with
    times: Mapping[str, Recorded]  # node, `checkpoint` or OUTSIDE -> seconds
    iterations: int
    makespan: float  # seconds, without those between a stop and the next start
    trained: float  # samples an iteration
    hand_over: float  # seconds in which its co-located pool changed from one role to the other, mean; 0: it never did


def read_run(folder: str) -> PastRun:
    """Raises RunError where the folder holds no run with a finished iteration."""
    from flows.show import read_report  # it imports Prefect, which takes longer than a whole `ratchet plan`

    report = read_report(folder)
    if not report.history:
        raise RunError(f"{folder} must have a finished iteration to take stage times from, got none")
    experiment = load_experiment(report.folder / "config.yaml")
    last: dict[tuple[int, str], StageRow] = {}  # the last attempt counts: those before were cut off
    for row in report.stages:
        if row.iteration in report.history and row.state == "completed":
            last[row.iteration, row.node] = row
    times: dict[str, list[float]] = {}
    for (_, node), seconds in sorted(_seconds(last, load_graph(experiment)).items()):
        times.setdefault(node, []).append(seconds)
    changes = [wait.end - wait.start for row in last.values() for wait in row.spans if wait.cause == HANDOVER]
    values = report.history.values()
    outside = sum(v["time/outside_stages"] for v in values) - _hand_over_alone(report.stages, last.values())
    times[OUTSIDE] = [max(0.0, outside) / len(values)]
    trained = [v["throughput/effective_samples_per_s"] * v["time/iteration"] for v in values]
    return PastRun(
        experiment,
        {node: Recorded(found) for node, found in times.items()},
        len(values),
        sum(v["time/iteration"] for v in values),
        sum(trained) / len(trained),
        sum(changes) / len(changes) if changes else 0.0,
    )


def _seconds(rows: Mapping[tuple[int, str], StageRow], graph: Graph) -> dict[tuple[int, str], float]:
    """Working seconds of each stage after its inputs were whole, and of a rollout after the one before it.

    What a stage that streams, or a rollout in the tail of another, did before that took the run no time of its own.
    """
    needs = {node.name: [(0, need) for need in node.needs] for node in graph}
    for node in rollouts(graph):
        needs[node.name].append((-1, node.name))
    found = {}
    for (iteration, name), row in rows.items():
        before = [rows.get((iteration + back, need)) for back, need in needs.get(name, ())]
        since = max([other.ended for other in before if other], default=0.0)
        found[iteration, name] = sum(max(0.0, end - max(start, since)) for start, end in working_spans(row))
    return found


def _hand_over_alone(rows: Sequence[StageRow], counted: Iterable[StageRow]) -> float:
    """Seconds of the counted attempts' hand-overs while no stage worked: the run has them as outside its stages."""
    at_work = [replace(row, spans=tuple(wait for wait in row.spans if wait.cause != HANDOVER)) for row in counted]
    began, ended = min(row.started for row in rows), max(row.ended for row in rows)
    return outside_stage_work(rows, began, ended) - outside_stage_work([*rows, *at_work], began, ended)
