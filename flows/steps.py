"""What a run is made of as far as time is concerned: its steps by the executor's rules, and what each took.

The planner simulates it (flows/simulate.py), and reads a past run by it (flows/past_run.py).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Literal

from conf.schema import Experiment, Schedule
from flows.graph import CHECKPOINT, Graph
from flows.schedule import follows, rollouts, shares


def every_batch(batch: int) -> bool:
    return True


@dataclass(frozen=True)
class Step:
    """A node of the graph, or the checkpoints, as far as time is concerned. Steps come in topological order."""

    name: str
    needs: tuple[str, ...]
    pool: str
    does: Literal["", "rollout", "update", "publish"] = ""  # rollout: reads the policy; at most one step of each
    role: Literal["", "rollout", "train"] = ""  # a pool hands over between the two; "": either will do
    due: Callable[[int], bool] = every_batch  # the batches in which it runs, counted from 1
    follows: tuple[str, ...] = ()  # steps of the batch before that end first; an update's is always the update
    after: str = ""  # a step of the batch that ends first where it runs; without those of `needs` the step does not run
    shares: bool = False  # its pool serves it together with others that share


@dataclass(frozen=True)
class Took:
    """What a stage of a batch takes of its own, whatever the schedule."""

    work: float  # on its pool, once its inputs are whole
    dispatch: float = 0.0  # from when everything is there, but for its pool, until it asks for that
    wake: float = 0.0  # from when its pool is free until it has it, where it had to wait
    early: tuple[tuple[float, float], ...] = ()  # on its pool while its rollout runs: (since that began, how long)
    tail: float = 0.0  # of a rollout: before its end, when the next one may begin
    tokens: int | None = None  # of a rollout: generated; None: as many as may be


@dataclass(slots=True, eq=False)
class Slot:
    """A stage of a batch, or a part of it that runs early, in the unit of the times."""

    batch: int
    step: Step
    took: Took
    ready: float = -1.0  # everything it needs is there, but for its pool
    asked: float = -1.0  # for its pool
    start: float = -1.0
    end: float = -1.0
    hand_over: float = 0.0  # just before `start`: its pool changed from another role
    by: "Slot | None" = None  # what made it ready, by its end or on its way
    queued: bool = False  # `by` took a batch out of the full queue
    missing: int = 0
    part: int = 0  # the number of an early one, from 1

    @property
    def node(self) -> str:
        return self.step.name

    @property
    def pool(self) -> str:
        return self.step.pool


def publishes(batch: int, batches: int, schedule: Schedule) -> bool:
    return batch % schedule.publish_every == 0 or batch == batches


def opens(does: Collection[str], schedule: Schedule) -> Literal["rollout", "update"]:
    """What lets the next batch begin as it starts, of what the steps do."""
    return "rollout" if schedule.ahead and "rollout" in does else "update"


def due(steps: Sequence[Step], batch: int, batches: int, schedule: Schedule) -> list[Step]:
    """The steps that run in a batch: without those that skip it and whatever needs them."""
    found: dict[str, Step] = {}
    for step in steps:
        skips = step.does == "publish" and not publishes(batch, batches, schedule)
        if not skips and step.due(batch) and all(need in found for need in step.needs):
            found[step.name] = step
    return list(found.values())


def steps_of(
    graph: Graph, experiment: Experiment, *, checkpoints: bool, pools: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Step]:
    """As the executor runs the experiment's graph under its schedule.

    pools: node -> pool, where it is not the declared one.
    """
    rolling = rollouts(graph)[:1]
    update = graph.of_stage("update")[0]
    pool, every = pools.get(update.name, update.pool), experiment.update.checkpoint_every
    for node in graph:
        does = "rollout" if node in rolling else node.stage.name
        own = pools.get(node.name, node.pool)
        before = follows(graph, node, experiment)
        if node is update and checkpoints:
            before.append(CHECKPOINT)
        yield Step(
            node.name,
            node.needs,
            own,
            does if does in ("rollout", "update", "publish") else "",  # type: ignore[arg-type]
            node.stage.role if node.stage.role != "cpu" else "",
            partial(node.stage.every, experiment),
            tuple(before),
            CHECKPOINT if checkpoints and does == "publish" and own == pool else "",
            shares=shares(experiment, node),
        )
        if node is update and checkpoints:
            yield Step(CHECKPOINT, (update.name,), pool, "", "train", lambda batch: batch % every == 0)
