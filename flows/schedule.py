"""Schedules: what a stage of one iteration waits for in others, where they overlap.

A batch is the prompts of its iteration, so updates train in the order of the prompts whatever ends first. A rollout
begins when the one before it leaves the engines free, when the weights are fresh enough that its data cannot be older
than `schedule.max_lag` updates when they are trained, and when the queue has room. So the lag limit holds by
construction, nothing has to be thrown away for its age, and the update checks it once more.
"""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from conf.schema import Experiment, Schedule
from data.issued import PROMPTS
from data.refs import DatasetRef, Ref
from data.store import Store
from flows.graph import Graph, GraphNode
from flows.rollout_queue import Queue
from flows.waits import POOL, QUEUE, UPSTREAM, WEIGHTS


@dataclass(frozen=True)
class Gate:
    """What a stage waits for outside its own iteration, before it asks for its pool."""

    cause: str
    what: str
    future: asyncio.Future


def rollouts(graph: Graph) -> list[GraphNode]:
    """The nodes that generate what the update trains on."""
    before = graph.ancestors(graph.of_stage("update")[0].name)
    return [node for node in graph if node.name in before and node.stage.role == "rollout"]


def follows(graph: Graph, node: GraphNode, experiment: Experiment) -> list[str]:
    """Nodes of the iteration before that end first: what follows from the same prompts, trainer or engines."""
    if node.stage.role == "train" and node.stage.reads == "current":
        return [graph.of_stage("update")[0].name]  # the trainer must hold the policy that is the ratio's denominator
    if node.stage.name == "publish":
        return [other.name for other in graph if other.stage.reads == "trained"]  # itself among them
    if node.name == PROMPTS:
        refills = experiment.sampling.refills  # then the rollout decides how many of them it sends
        return [PROMPTS, *(other.name for other in rollouts(graph) if refills)]
    return [node.name] if node.stage.name == "update" else []


def shares(experiment: Experiment, node: GraphNode) -> bool:
    """Whether the stage may be on its pool beside others that may: one rollout in the tail of another.

    Under rebuild and keep also a publish: there it need not wait until the engines are drained.
    """
    crossing = experiment.rollout.kv_policy != "pin"
    return node.stage.name == "rollout" or (node.stage.name == "publish" and crossing)


def fresh_enough(schedule: Schedule, number: int) -> int:
    """The iteration without whose publish the iteration's batch might be too old when it is trained; < 1: none."""
    return math.ceil((number - 1 - schedule.lag_limit) / schedule.publish_every) * schedule.publish_every


@dataclass
class Iteration:
    """An iteration under way: its stages, and what later ones wait for."""

    number: int
    rolling: asyncio.Future[None]  # its rollout was let in: the next iteration may begin
    tail: asyncio.Future[None]  # its rollout leaves engines idle, or has ended: the next rollout may begin
    stages: dict[str, asyncio.Task[Ref]] = field(default_factory=dict)
    tails: list[asyncio.Task[None]] = field(default_factory=list)
    checkpoint: asyncio.Task[None] | None = None
    ended: asyncio.Task[None] | None = None


class Window:
    """The iterations under way, and the gates between them."""

    def __init__(self, experiment: Experiment, graph: Graph) -> None:
        schedule = experiment.schedule
        self.batch = experiment.sampling.candidates(experiment.prompts.per_iteration)  # groups at most
        self.experiment, self.graph = experiment, graph
        self.rollouts = {node.name for node in rollouts(graph)}
        self.update = graph.of_stage("update")[0].name
        self.publish = graph.of_stage("publish")[0].name
        self.iterations: dict[int, Iteration] = {}
        self.queue = Queue(schedule.queue_groups or schedule.most_groups(self.batch), schedule.queue_tokens or math.inf)

    def open(self, number: int) -> Iteration:
        loop = asyncio.get_running_loop()
        opened = self.iterations[number] = Iteration(number, loop.create_future(), loop.create_future())
        return opened

    def close(self, number: int) -> None:
        """The iteration before it has served; it is accounted for."""
        self.iterations.pop(number - 1, None)

    def gates(self, node: GraphNode, number: int) -> Iterator[Gate]:
        """In the order in which they are to be waited for: each is asked for when the one before it is through."""
        before = self.iterations.get(number - 1)
        if node.name in self.rollouts:
            if before:
                yield Gate(POOL, f"rollout of iteration {number - 1} fills the engines", before.tail)
            yield from self._fresh(number)
            rollout = self.experiment.rollout
            tokens = self.batch * rollout.samples_per_prompt * rollout.max_new_tokens
            yield Gate(QUEUE, "the queue is full", self.queue.reserve(number, self.batch, tokens))
        if before is None:
            return
        for name in follows(self.graph, node, self.experiment):
            if name in before.stages:
                yield Gate(UPSTREAM, f"{name} of iteration {number - 1}", before.stages[name])
        if node.name == self.update and before.checkpoint:
            yield Gate(UPSTREAM, f"checkpoint of iteration {number - 1}", before.checkpoint)

    def _fresh(self, number: int) -> Iterator[Gate]:
        needed = fresh_enough(self.experiment.schedule, number)
        if (opened := self.iterations.get(needed)) and self.publish in opened.stages:
            yield Gate(WEIGHTS, f"{self.publish} of iteration {needed}", opened.stages[self.publish])

    def began(self, node: GraphNode, number: int) -> None:
        """The stage has its pool, or its output was there already."""
        if node.name in self.rollouts:
            _done(self.iterations[number].rolling)
        if node.name == self.update:
            self.queue.take(number)
            _done(self.iterations[number].rolling)

    def ended(self, node: GraphNode, number: int, store: Store) -> None:
        """The stage's output is committed."""
        if node.name not in self.rollouts:
            return
        _done(self.iterations[number].tail)
        manifest = store.committed(number, node.name)
        if manifest and isinstance(manifest.ref, DatasetRef) and not store.find(number, self.update):
            groups = manifest.rows // self.experiment.rollout.samples_per_prompt  # it commits whole groups only
            self.queue.generated(number, groups, sum(manifest.facts.policy_versions.values()))


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
