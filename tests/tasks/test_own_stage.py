"""The example of a stage of one's own keeps the stage contract."""

import asyncio
from types import SimpleNamespace

import pyarrow as pa
import pytest

from conf.errors import StageError
from conf.schema import Experiment
from tasks.stage import Inputs, Selection, Stage
from tests.own_stage import drop_short


def run(lengths: list[int], min_tokens: int) -> Selection:
    responses = pa.array([list(range(n)) for n in lengths], pa.list_(pa.int32()))
    table = pa.table({"group_id": ["a", "a", "b", "b", "c", "c"], "response_ids": responses})
    inputs = Inputs(refs={}, dataset=None, table=table)
    output = asyncio.run(drop_short.run(inputs, SimpleNamespace(), min_tokens=min_tokens))
    assert isinstance(output, Selection)
    return output


def test_its_declaration_is_a_cpu_stage_that_selects_and_adds_no_column() -> None:
    assert isinstance(drop_short, Stage)
    assert (drop_short.name, drop_short.output, drop_short.role) == ("drop_short", "selection", "cpu")
    assert drop_short.consumes(Experiment()) == ("group_id", "response_ids")
    assert drop_short.produces(Experiment()) == ()


def test_a_group_with_a_short_response_is_dropped_with_its_reason() -> None:
    output = run([5, 5, 1, 9, 2, 2], min_tokens=2)
    assert output.indices == [0, 1, 4, 5]
    assert output.facts.dropped == {"b": "short"}


def test_when_every_group_is_short_the_stage_fails() -> None:
    with pytest.raises(StageError, match="fewer than min_tokens = 6"):
        run([5, 5, 1, 9, 2, 2], min_tokens=6)
