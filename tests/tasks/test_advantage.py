"""Advantages: numbers worked by hand, an independent reference, and what happens to groups that cannot be compared."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import StageError
from conf.schema import Advantage, Experiment
from data.columns import column
from tasks.advantage import advantage, group_advantages_grpo, group_advantages_rloo, spread, zero_variance_groups
from tasks.stage import Inputs, Selection


def grpo(rewards: list[float], groups: str, *, normalize_std: bool = True, epsilon: float = 1e-6) -> list[float]:
    values = group_advantages_grpo(np.array(rewards), list(groups), normalize_std=normalize_std, epsilon=epsilon)
    return values.tolist()


def rloo(rewards: list[float], groups: str) -> list[float]:
    return group_advantages_rloo(np.array(rewards), list(groups)).tolist()


def test_grpo_divides_the_distance_to_the_mean_by_the_sample_deviation() -> None:
    # mean 2, squares 1 + 0 + 1, divided by n - 1 = 2: deviation 1; epsilon 1 makes the divisor 2
    assert grpo([1.0, 2.0, 3.0], "aaa", epsilon=1.0) == [-0.5, 0.0, 0.5]


def test_dr_grpo_is_the_distance_to_the_mean() -> None:
    assert grpo([0.0, 1.0, 0.0, 1.0, 1.0, 3.0], "aaaabb", normalize_std=False) == [-0.5, 0.5, -0.5, 0.5, -1.0, 1.0]


def test_rloo_is_the_distance_to_the_mean_of_the_others() -> None:
    # 4 - (1 + 1) / 2 = 3; 1 - (4 + 1) / 2 = -1.5
    assert rloo([4.0, 1.0, 1.0], "aaa") == [3.0, -1.5, -1.5]


def test_groups_of_different_size_do_not_touch_each_other() -> None:
    rewards = [1.0, 7.0, 0.0, 5.0, 9.0]
    assert rloo(rewards, "abaab") == [1.0 - 2.5, -2.0, 0.0 - 3.0, 5.0 - 0.5, 2.0]


@pytest.mark.parametrize("reward", [0.0, 0.1, 0.7 + 0.3, -1e308, 1e-320])
def test_equal_rewards_give_exactly_zero_and_are_counted(reward: float) -> None:
    rewards = [reward] * 3 + [0.0, 1.0]
    assert grpo(rewards, "aaabb")[:3] == [0.0] * 3
    assert rloo(rewards, "aaabb")[:3] == [0.0] * 3
    assert zero_variance_groups(np.array(rewards), list("aaabb")) == 1


def test_rewards_near_the_largest_float_do_not_overflow() -> None:
    assert grpo([1e308, -1e308], "aa") == pytest.approx([0.5**0.5, -(0.5**0.5)])
    assert grpo([1e308, 1e308, 0.0], "aaa") == pytest.approx(grpo([1.0, 1.0, 0.0], "aaa", epsilon=1e-300))
    assert rloo([8e307, 0.0], "aa") == [8e307, -8e307]


def groups_of(rewards: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    return st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=5)


@settings(deadline=None)
@given(groups_of(st.integers(-80, 80).map(lambda eighths: eighths / 8)))
def test_grpo_and_rloo_agree_with_a_direct_reference(groups: list[list[float]]) -> None:
    names = [str(g) for g, members in enumerate(groups) for _ in members]
    rewards = np.array([r for members in groups for r in members])
    expected_grpo, expected_rloo = [], []
    for members in groups:
        r = torch.tensor(members, dtype=torch.float64)
        equal = len(set(members)) == 1
        expected_grpo += (torch.zeros_like(r) if equal else (r - r.mean()) / (r.std() + 1e-6)).tolist()
        expected_rloo += [r[i].item() - (r.sum() - r[i]).item() / (len(r) - 1) for i in range(len(r))]
    actual = group_advantages_grpo(rewards, names, normalize_std=True, epsilon=1e-6)
    np.testing.assert_allclose(actual, expected_grpo, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(group_advantages_rloo(rewards, names), expected_rloo, rtol=1e-12, atol=1e-12)


@settings(deadline=None)
@given(groups_of(st.floats(allow_nan=False, allow_infinity=False)), st.randoms(use_true_random=False))
def test_the_order_of_rows_changes_no_bit(groups: list[list[float]], shuffler: random.Random) -> None:
    names = [str(g) for g, members in enumerate(groups) for _ in members]
    rewards = np.array([r for members in groups for r in members])
    order = list(range(len(rewards)))
    shuffler.shuffle(order)
    shuffled = [names[i] for i in order]
    for estimate in (
        lambda r, g: group_advantages_grpo(r, g, normalize_std=True, epsilon=1e-6),
        lambda r, g: group_advantages_grpo(r, g, normalize_std=False, epsilon=1e-6),
        group_advantages_rloo,
    ):
        assert estimate(rewards, names)[order].tolist() == estimate(rewards[order], shuffled).tolist()


def test_an_advantage_stands_at_each_generated_token_and_is_zero_at_the_others() -> None:
    mask = pa.chunked_array([[[True, False, True]], [[], [True]]], pa.list_(pa.bool_()))
    tokens = spread(np.array([0.5, 3.0, -1.0]), mask)
    assert tokens.type == column("advantages").type
    assert tokens.to_pylist() == [[0.5, 0.0, 0.5], [], [-1.0]]


def run(rows: list[tuple[str, float | None, str]], **changes: Any) -> Selection:
    table = pa.table(
        {
            "group_id": [group for group, _, _ in rows],
            "sample_id": [f"{group}-{i:02d}" for i, (group, _, _) in enumerate(rows)],
            "rewards": pa.array([r for _, r, _ in rows], pa.float64()),
            "reward_outcome": [outcome for _, _, outcome in rows],
            "response_mask": pa.array([[True] * (i % 3 + 1) for i in range(len(rows))], pa.list_(pa.bool_())),
        }
    )
    context = SimpleNamespace(experiment=Experiment(advantage=Advantage(**changes)))
    output = asyncio.run(advantage.run(Inputs(refs={}, dataset=None, table=table), context))
    assert isinstance(output, Selection)
    return output


def test_a_group_with_a_failed_member_is_dropped_with_its_reason_and_the_rest_is_kept_in_order() -> None:
    rows = [("a", 0.0, "ok"), ("b", 1.0, "ok"), ("c", 1.0, "ok"), ("d", 1.0, "ok")]
    rows += [("a", 1.0, "ok"), ("b", None, "timeout"), ("c", None, "error"), ("d", None, "nonfinite")]
    output = run(rows, estimator="rloo")
    assert output.indices == [0, 4]
    assert output.facts.dropped == {"b": "reward_timeout", "c": "reward_error", "d": "reward_nonfinite"}
    assert output.table is not None
    assert output.table.schema == pa.schema([column("advantages").field])
    assert output.table["advantages"].to_pylist() == [[-1.0], [1.0, 1.0]]


def test_a_group_of_which_an_earlier_stage_left_one_member_is_dropped() -> None:
    output = run([("a", 0.0, "ok"), ("a", 1.0, "ok"), ("b", 1.0, "ok")])
    assert output.facts.dropped == {"b": "group_of_one"}


def test_the_metrics_are_of_the_kept_rows() -> None:
    output = run([("a", 1.0, "ok"), ("a", 1.0, "ok"), ("b", 0.0, "ok"), ("b", 1.0, "ok"), ("c", None, "error")])
    assert output.facts.metrics == {"groups/zero_variance": 1.0}


def test_when_no_group_is_left_the_stage_fails_with_the_reasons() -> None:
    rows = [("a", None, "timeout"), ("a", 1.0, "ok"), ("b", None, "error"), ("b", 1.0, "ok"), ("c", 1.0, "ok")]
    with pytest.raises(StageError, match="of 3: 1 x group_of_one, 1 x reward_error, 1 x reward_timeout"):
        run(rows)


@pytest.mark.parametrize("reward", [1e39, 1.7e308])
def test_an_advantage_beyond_float32_is_refused_with_its_sample(reward: float) -> None:
    with pytest.raises(StageError, match=r"the advantage of sample a-0[01] must fit float32"):
        run([("a", reward, "ok"), ("a", -reward, "ok")], estimator="rloo")
