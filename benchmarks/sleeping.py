"""Stages that sleep, for benchmarks.planner: they stream, have a tail, and take another time in each iteration."""

import asyncio
import zlib
from typing import Any

import pyarrow as pa

from tasks.evaluate import evaluate as evaluate_stage
from tasks.publish import publish as publish_stage
from tasks.stage import Columns, Context, Group, Inputs, NewPolicy, Rows, stage
from tests.fakes import stages

SPREAD = 0.2  # of the seconds, either way


def seconds_of(seconds: float, context: Context) -> float:
    """The same for a stage of an iteration in every run."""
    place = zlib.crc32(f"{context.iteration}/{context.node}".encode()) / 2**32
    return seconds * (1 + SPREAD * (2 * place - 1))


def _samples(groups: list[str]) -> pa.Table:
    pairs = [(f"{group}-s{i}", group) for group in groups for i in range(2)]
    return stages.table({"sample_id": [sample for sample, _ in pairs], "group_id": [group for _, group in pairs]})


@stage(consumes=["group_id"], produces=["sample_id", "group_id"], output="rows", role="rollout", reads="current")
async def rollout(inputs: Inputs, context: Context, *, seconds: float, tail: float = 0.0) -> Rows:
    """Its groups come one after another; in its last `tail` seconds it leaves the engines room."""
    assert inputs.table is not None
    assert context.stream is not None
    groups = inputs.table["group_id"].to_pylist()
    each = seconds_of(seconds, context) / len(groups)
    for group in groups:
        if group == groups[-1]:
            await asyncio.sleep(each - tail)
            if tail:
                context.stream.tail.set()
            await asyncio.sleep(tail)
        else:
            await asyncio.sleep(each)
        context.stream.put(Group(group, lambda group=group: _samples([group])))  # type: ignore[misc]
    return Rows(_samples(groups))


async def _scored(inputs: Inputs, context: Context, seconds: float) -> pa.Table:
    """Sleeps for each group of the rollout, as early as it is there."""
    done: set[str] = set()
    if arriving := inputs.arriving:
        while found := await arriving.batch():
            async with arriving.pool():
                await asyncio.sleep(seconds_of(seconds, context) * len(found) / 2)
            done.update(group.id for group in found)
    whole = await inputs.whole()
    assert whole.table is not None
    left = set(whole.table["group_id"].to_pylist()) - done
    if left:
        async with arriving.pool() if arriving else asyncio.Lock():
            await asyncio.sleep(seconds_of(seconds, context) * len(left) / 2)
    return whole.table


@stage(consumes=["sample_id"], produces=["response_text"], streams=True)
async def reward(inputs: Inputs, context: Context, *, seconds: float) -> Columns:
    table = await _scored(inputs, context, seconds)
    return Columns(stages.table({"response_text": [""] * table.num_rows}))


@stage(consumes=["sample_id"], produces=["finish_reason"], role="train", streams=True)
async def reference(inputs: Inputs, context: Context, *, seconds: float) -> Columns:
    table = await _scored(inputs, context, seconds)
    return Columns(stages.table({"finish_reason": ["stop"] * table.num_rows}))


@stage(consumes=["sample_id"], output="policy", role="train")
async def update(inputs: Inputs, context: Context, *, seconds: float) -> NewPolicy:
    return await stages.update.run(inputs, context, seconds=seconds_of(seconds, context))


@stage(output="policy", role="rollout", reads="trained", every=publish_stage.every)
async def publish(inputs: Inputs, context: Context, *, seconds: float) -> NewPolicy:
    await asyncio.sleep(seconds_of(seconds, context))
    return await stages.publish.run(inputs, context)


@stage(produces=["sample_id", "group_id"], output="rows", role="rollout", reads="trained", every=evaluate_stage.every)
async def evaluate(inputs: Inputs, context: Context, *, seconds: float) -> Rows:
    await asyncio.sleep(seconds_of(seconds, context))
    return Rows(_samples([f"eval-{context.iteration}"]))


class Trainer:
    """Writes checkpoints, in no other way than by sleeping."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def checkpoint(self, folder: Any, facts: Any) -> None:
        await asyncio.sleep(self.seconds)
        folder.mkdir()


class Handover:
    """Between serving and training, in no other way than by sleeping."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.state = seconds, "SERVING"

    def changes(self, role: str) -> bool:
        return role != "cpu" and self.state != ("TRAINING" if role == "train" else "SERVING")

    async def give(self, role: str) -> None:
        await asyncio.sleep(self.seconds)
        self.state = "TRAINING" if role == "train" else "SERVING"
