"""Stages that do nothing, with the real contract: for the flow's own tests and benchmarks.

`seconds` makes one sleep; `PACE` holds what a stage of one iteration awaits inside, by (iteration, stage).
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa

from conf.schema import Node
from data.columns import column
from data.refs import DatasetRef, PolicyRef
from tasks.publish import publish as publish_stage
from tasks.stage import Columns, Context, Inputs, NewPolicy, Output, Rows, Selection, stage

PACE: dict[tuple[int, str], Callable[[Context], Awaitable[object]]] = {}
PROMPTS = ["group_id", "prompt_index", "prompt_text", "answer"]


def table(values: Mapping[str, Sequence[object]]) -> pa.Table:
    """Columns of the declared types."""
    schema = pa.schema([column(name).field for name in values])
    return pa.table([pa.array(values[name], schema.field(name).type) for name in values], schema=schema)


async def _pace(context: Context, name: str, seconds: float) -> None:
    await asyncio.sleep(seconds)
    if wait := PACE.get((context.iteration, name)):
        await wait(context)


@stage(produces=PROMPTS, output="rows")
async def prompts(inputs: Inputs, context: Context) -> Rows:
    await _pace(context, "prompts", 0.0)
    groups = [f"i{context.iteration:06d}-g{g:03d}" for g in range(2)]
    first = 2 * (context.iteration - 1)
    return Rows(
        table(
            {"group_id": groups, "prompt_index": [first, first + 1], "prompt_text": ["a", "b"], "answer": ["1", "2"]},
        )
    )


@stage(consumes=["group_id"], produces=["sample_id", "group_id"], output="rows", role="rollout", reads="current")
async def rollout(inputs: Inputs, context: Context, *, seconds: float = 0.0) -> Rows:
    assert inputs.table is not None
    await _pace(context, "rollout", seconds)
    groups = inputs.table["group_id"].to_pylist() * 2
    return Rows(table({"sample_id": [f"{g}-s{i}" for i, g in enumerate(groups)], "group_id": groups}))


@stage(consumes=["sample_id"], produces=["response_text"])
async def reward(inputs: Inputs, context: Context, *, seconds: float = 0.0) -> Columns:
    assert inputs.table is not None
    await _pace(context, "reward", seconds)
    return Columns(table({"response_text": [""] * inputs.table.num_rows}))


@stage(consumes=["sample_id"], produces=["response_text"])
async def issues_a_stray(inputs: Inputs, context: Context) -> Output:
    """A group that no prompt drew."""
    context.ledger.groups.issue(context.iteration, [("stray", 99)])
    return await reward.run(inputs, context)


@stage(consumes=["sample_id"], produces=["finish_reason"], role="train")
async def reference(inputs: Inputs, context: Context) -> Columns:
    assert inputs.table is not None
    return Columns(table({"finish_reason": ["stop"] * inputs.table.num_rows}))


@stage(consumes=["response_text", "finish_reason"], output="selection")
async def advantage(inputs: Inputs, context: Context) -> Selection:
    assert inputs.table is not None
    return Selection(range(inputs.table.num_rows))


@stage(consumes=["sample_id"], output="policy", role="train")
async def update(inputs: Inputs, context: Context, *, seconds: float = 0.0) -> NewPolicy:
    assert isinstance(inputs.dataset, DatasetRef)
    await _pace(context, "update", seconds)
    number = context.ledger.allocate_version(
        f"{context.iteration:06d}/update", context.policy.number, context.iteration, inputs.dataset.id
    )
    content = hashlib.sha256(str(number).encode()).hexdigest()
    if context.ledger.version(number).state == "EXPORTING":
        context.ledger.set_version(number, "SEALED", content)
    return NewPolicy(PolicyRef(context.store.run, number, content, context.iteration, inputs.dataset.id))


@stage(output="policy", role="rollout", reads="trained", every=publish_stage.every)
async def publish(inputs: Inputs, context: Context) -> NewPolicy:
    await _pace(context, "publish", 0.0)
    policy = inputs.policy()
    commit_version(context.ledger, policy.number)
    return NewPolicy(policy)


@stage(consumes=["sample_id"], produces=["response_text"])
async def fails(inputs: Inputs, context: Context) -> Columns:
    raise ValueError("this stage fails")


@stage(consumes=["sample_id"], produces=["finish_reason"])
async def aside(inputs: Inputs, context: Context) -> Columns:
    """Nothing needs it."""
    assert inputs.table is not None
    await _pace(context, "aside", 0.0)
    return Columns(table({"finish_reason": ["stop"] * inputs.table.num_rows}))


@stage(consumes=["sample_id"])
async def sleeps(inputs: Inputs, context: Context) -> Columns:
    await asyncio.sleep(3600)
    raise AssertionError("unreachable")


slow_reward = replace(sleeps, name="reward", produces=reward.produces)


def paced(rollout: float = 0.0, reward: float = 0.0, update: float = 0.0) -> dict[str, Node]:
    """The shortest graph, with stages of these seconds."""
    return {
        "rollout": Node("tests.fakes.stages:rollout", "rollout", ["prompts"], {"seconds": rollout}),
        "reward": Node("tests.fakes.stages:reward", "cpu", ["rollout"], {"seconds": reward}),
        "update": Node("tests.fakes.stages:update", "train", ["reward"], {"seconds": update}),
        "publish": Node("tests.fakes.stages:publish", "rollout", ["update"]),
    }


def commit_version(ledger: object, number: int) -> None:
    for state in ("PUBLISHING", "COMMITTED"):
        ledger.set_version(number, state)  # type: ignore[attr-defined]


GRAPH = {
    "rollout": Node("tests.fakes.stages:rollout", "rollout", ["prompts"]),
    "reward": Node("tests.fakes.stages:reward", "cpu", ["rollout"]),
    "reference": Node("tests.fakes.stages:reference", "train", ["rollout"]),
    "advantage": Node("tests.fakes.stages:advantage", "cpu", ["reward", "reference"]),
    "update": Node("tests.fakes.stages:update", "train", ["advantage"]),
    "publish": Node("tests.fakes.stages:publish", "rollout", ["update"]),
}
