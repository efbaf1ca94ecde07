"""Stage `filter`: the rule on numbers worked by hand, and what it does where too few groups pass."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import StageError
from conf.schema import Experiment, GroupSampling, Prompts
from tasks.filter import dropped_groups, filter, select_groups
from tasks.stage import Inputs, Selection

Groups = dict[str, list[float | None]]  # rewards by group; None: the reward timed out


def scored(groups: Groups) -> pa.Table:
    rows = [(group, reward) for group, rewards in groups.items() for reward in rewards]
    return pa.table(
        {
            "group_id": [group for group, _ in rows],
            "rewards": pa.array([reward for _, reward in rows], pa.float64()),
            "reward_outcome": ["timeout" if reward is None else "ok" for _, reward in rows],
        }
    )


MIXED: Groups = {
    "a": [0.0, 1.0],
    "b": [1.0, 1.0],  # solved by all
    "c": [0.0, -0.0],  # by none
    "d": [0.0, None],
    "e": [0.3, 0.1 + 0.2],  # not equal: advantage's own comparison is exact too
    "f": [1.0],
    "g": [2.0, 1.0],
}
DROPPED = {"b": "zero_variance", "c": "zero_variance", "d": "reward_timeout", "f": "group_of_one"}


def run(groups: Groups, needed: int, on_exhausted: Any = "fail") -> Selection:
    experiment = Experiment(
        prompts=Prompts(per_iteration=needed),
        sampling=GroupSampling(filter="zero_variance", on_exhausted=on_exhausted),
    )
    context: Any = SimpleNamespace(experiment=experiment, node="filter", iteration=3)
    running: Any = filter.run(Inputs({}, None, scored(groups)), context)
    output = asyncio.run(running)
    assert isinstance(output, Selection)
    return output


def test_a_group_that_is_incomplete_or_all_equal_does_not_pass() -> None:
    assert dropped_groups(scored(MIXED)) == DROPPED


def test_the_first_that_pass_are_kept_in_the_order_of_the_prompts_and_the_others_named() -> None:
    output = run(MIXED, needed=2)
    assert output.indices == [0, 1, 8, 9]  # a and e
    assert output.facts.dropped == {**DROPPED, "g": "surplus"}
    assert output.facts.metrics == {"sampling/pass_rate": pytest.approx(3 / 7)}


def test_exactly_as_many_as_needed_leave_no_surplus() -> None:
    assert run(MIXED, needed=3).facts.dropped == DROPPED


def test_too_few_stop_the_run_with_the_reasons() -> None:
    with pytest.raises(
        StageError,
        match=r"^filter of iteration 3 needs 4 groups \(prompts.per_iteration\), 3 of 7 passed \(1 x group_of_one, "
        r"1 x reward_timeout, 2 x zero_variance\), .*sampling.max_rounds 4 .*train_fewer trains those$",
    ):
        run(MIXED, needed=4)


def test_too_few_are_trained_where_that_is_declared() -> None:
    output = run(MIXED, needed=4, on_exhausted="train_fewer")
    assert output.indices == [0, 1, 8, 9, 11, 12]
    assert output.facts.dropped == DROPPED


@pytest.mark.parametrize("on_exhausted", ["fail", "train_fewer"])
def test_a_filter_that_nothing_passes_stops_the_run_whatever_is_declared(on_exhausted: str) -> None:
    with pytest.raises(StageError, match=r"needs 1 groups .*, 0 of 2 passed \(2 x zero_variance\)"):
        run({"a": [1.0, 1.0], "b": [0.0, 0.0]}, 1, on_exhausted)


rewards = st.sampled_from([0.0, 0.5, 1.0, None])


@given(st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=1, max_size=8), st.integers(1, 9), st.randoms())
def test_every_group_is_kept_or_has_a_reason_whatever_the_order_of_the_rows(
    groups: list[list[float | None]], needed: int, random: Any
) -> None:
    table = scored({f"g{i}": values for i, values in enumerate(groups)})
    kept, dropped = select_groups(table, needed)
    assert kept.isdisjoint(dropped)
    assert kept | dropped.keys() == {f"g{i}" for i in range(len(groups))}
    assert len(kept) == min(needed, sum(reason == "surplus" for reason in dropped.values()) + len(kept))
    for group in kept:
        values = groups[int(group[1:])]
        assert None not in values
        assert len(set(values)) > 1
    rows = random.sample(range(table.num_rows), table.num_rows)
    assert dropped_groups(table.take(rows)) == dropped_groups(table)
