"""Schedules: what a stage of one iteration waits for in others, where they overlap.

A batch is the prompts of its iteration, so updates train in the order of the prompts whatever ends first. In step, a
rollout begins when the iteration before it has ended, but for its accounts. Ahead, it begins when the one before it
leaves the engines free, when the weights are fresh enough that its data cannot be older than `schedule.max_lag` updates
when they are trained, and when the queue has room. So the lag limit holds by construction, nothing has to be thrown
away for its age, and the update checks it once more.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from conf.errors import RatchetError
from conf.pools import co_located
from conf.schema import Experiment, Schedule
from data.issued import PROMPTS
from data.manifest import Manifest
from data.refs import DatasetRef, Ref
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
    if node.stage.reads == "current" and not experiment.schedule.ahead:
        return [other.name for other in graph]
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


def _future() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


@dataclass
class Iteration:
    """An iteration under way: its stages, and what later ones wait for."""

    rolling: asyncio.Future[None] = field(default_factory=_future)  # its rollout is at work
    training: asyncio.Future[None] = field(default_factory=_future)  # its update is at work
    # Its rollout leaves engines idle, or has ended: the next rollout may begin.
    tail: asyncio.Future[None] = field(default_factory=_future)
    ended: asyncio.Future[None] = field(default_factory=_future)  # it is accounted for
    failed: asyncio.Future[None] = field(default_factory=_future)  # one of its stages has
    over: asyncio.Future[None] = field(default_factory=_future)  # nothing of it is under way any more
    stages: dict[str, asyncio.Task[Ref]] = field(default_factory=dict)
    checkpoint: asyncio.Task[None] | None = None


class Window:
    """The iterations under way, and the gates between them."""

    def __init__(self, experiment: Experiment, graph: Graph) -> None:
        schedule = experiment.schedule
        self.batch = experiment.sampling.candidates(experiment.prompts.per_iteration)  # groups at most
        self.experiment, self.graph = experiment, graph
        self.rollouts = {node.name for node in rollouts(graph)}
        self.update = graph.of_stage("update")[0].name
        self.publish = graph.of_stage("publish")[0].name
        self.co_located = bool(co_located(experiment.pools))
        self.iterations: dict[int, Iteration] = {}
        self.queue = Queue(schedule.queue_groups or schedule.most_groups(self.batch), schedule.queue_tokens or math.inf)

    def open(self, number: int) -> Iteration:
        """The iteration, which is under way from the first time it is asked for."""
        return self.iterations.setdefault(number, Iteration())

    @asynccontextmanager
    async def under_way(self, number: int) -> AsyncIterator[Iteration]:
        """The block is the iteration: what those beside it wait for happens, however it ends.

        Where it fails, those before it come to their end first: they need nothing of it.
        """
        opened = self.open(number)
        try:
            yield opened
            _done(opened.ended)
            self.iterations.pop(number - 1, None)  # it has served
        except RatchetError:
            _done(opened.failed)
            if before := self.iterations.get(number - 1):
                await before.over  # not `ended`: it may have failed too, and be what failed here
            raise
        finally:
            _done(opened.over)

    async def next_begins(self, number: int) -> None:
        """Wait until the iteration after it may open: once its rollout is at work; in step, its update."""
        opened = self.open(number)
        await (opened.rolling if self.experiment.schedule.ahead else opened.training)

    async def in_order(self, number: int) -> None:
        """Wait until the iteration before it is accounted for, and the next one's rollout is not held up by that."""
        if before := self.iterations.get(number - 1):
            await before.ended
        if after := self.iterations.get(number + 1):
            await asyncio.wait([after.rolling, after.failed, after.over], return_when=asyncio.FIRST_COMPLETED)

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
        checkpoint = self.iterations[number].checkpoint
        if node.name == self.publish and self.co_located and checkpoint:  # or the pool would change hands twice more
            yield Gate(POOL, f"checkpoint of iteration {number}", checkpoint)
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
        """The stage has its pool and its inputs, or its output was there already."""
        opened = self.iterations[number]
        if node.name in self.rollouts:
            _done(opened.rolling)
        if node.name == self.update:
            _done(opened.rolling)  # a rollout that was committed before says nothing
            _done(opened.training)
            self.queue.take(number)

    def in_its_tail(self, number: int) -> None:
        """The iteration's rollout has nothing left to send."""
        _done(self.iterations[number].tail)

    def rolled(self, number: int, rollout: Manifest, trained: bool) -> None:
        """A rollout of the iteration is committed; `trained`: so is its update."""
        self.in_its_tail(number)
        if not trained and isinstance(rollout.ref, DatasetRef):
            groups = rollout.rows // self.experiment.rollout.samples_per_prompt  # it commits whole groups only
            self.queue.generated(number, groups, sum(rollout.facts.policy_versions.values()))


def _done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
