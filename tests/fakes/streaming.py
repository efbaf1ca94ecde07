"""Fake stages: a `rollout` that only comes to its end if another stage beside it judges its groups."""

from data.refs import DatasetRef
from tasks.stage import Columns, Context, Group, Inputs, Rows, stage
from tests.fakes.stages import table

EVENTS: list[str] = []


def _rows(group: str) -> dict[str, list[str]]:
    return {"sample_id": [f"{group}-s{i}" for i in range(2)], "group_id": [group] * 2}


@stage(consumes=["group_id"], produces=["sample_id", "group_id"], output="rows", role="rollout", reads="current")
async def rollout(inputs: Inputs, context: Context) -> Rows:
    """Generates the next group when the one before it was judged."""
    assert inputs.table is not None
    stream = context.stream
    assert stream is not None
    rows: dict[str, list[str]] = {"sample_id": [], "group_id": []}
    for group in inputs.table["group_id"].to_pylist():
        own = _rows(group)
        rows = {name: [*rows[name], *own[name]] for name in rows}
        EVENTS.append(f"generated {group}")
        stream.put(Group(group, lambda own=own: table(own)))  # type: ignore[misc]
        while stream.verdict(group) is None:
            await stream.judged.wait()
            stream.judged.clear()
    return Rows(table(rows))


@stage(consumes=["sample_id"], produces=["response_text"], streams=True)
async def reward(inputs: Inputs, context: Context) -> Columns:
    if arriving := inputs.arriving:
        while (group := await arriving.next()) is not None:
            assert group.read()["sample_id"].to_pylist() == _rows(group.id)["sample_id"]
            EVENTS.append(f"scored {group.id}")
            arriving.judge(group, "")
    whole = await inputs.whole()
    assert isinstance(whole.dataset, DatasetRef)
    assert whole.table is not None
    EVENTS.append(f"whole {whole.dataset.stage}")
    return Columns(table({"response_text": [""] * whole.table.num_rows}))


@stage(consumes=["sample_id"], produces=["finish_reason"], role="train", streams=True)
async def reference(inputs: Inputs, context: Context) -> Columns:
    """Takes what has come, and the trainer only for that."""
    if arriving := inputs.arriving:
        while groups := await arriving.batch():
            async with arriving.pool():
                EVENTS.append(f"computed {' '.join(group.id for group in groups)}")
            for group in groups:
                arriving.judge(group, "")
    whole = await inputs.whole()
    assert whole.table is not None
    EVENTS.append(f"whole {whole.table.num_rows}")
    return Columns(table({"finish_reason": ["stop"] * whole.table.num_rows}))


@stage(consumes=["sample_id"], produces=["response_text"], streams=True)
async def fails(inputs: Inputs, context: Context) -> Columns:
    assert inputs.arriving
    await inputs.arriving.next()
    raise ValueError("this stage fails")
