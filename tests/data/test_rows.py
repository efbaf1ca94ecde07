import cProfile
import pstats
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import DataError
from data.columns import Column
from data.rows import check_rollout, check_unique, declare, tokens_per_version
from tests.data.rollouts import V1, V2, rollout


def span(label: str, start: int, end: int) -> dict[str, Any]:
    return {"label": label, "start": start, "end": end}


def with_spans(third: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {"version_spans": [[span(V1, 0, 2)], [span(V1, 0, 1)], third, [span(V2, 0, 1)]]}


def test_a_correct_rollout_passes_whole_sliced_or_in_chunks() -> None:
    table = rollout()
    check_rollout(table)
    check_rollout(table, samples_per_prompt=2)
    check_rollout(table.slice(2))
    check_rollout(pa.concat_tables([table.slice(0, 1), table.slice(1)]))
    check_rollout(table.slice(0, 0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sample_id": ["g1-0", "g1-0", "g2-0", "g2-1"]}, "sample_id must be unique.*'g1-0'"),
        ({"group_id": ["g1", "g2", "g2", "g2"]}, "group g1 is incomplete: expected 3 samples, got 1"),
        ({"finish_reason": ["stop", "length", "abort", "stop"]}, "sample g2-0: finish_reason.*'abort'"),
        ({"response_mask": [[True], [True], [True] * 3, [True]]}, "sample g1-0: response_mask.*response_ids, 2, got 1"),
        (
            {"behavior_logprobs": [[-0.5, -1.0], [0.0, -1.0], [-2.0, -0.25, -3.0], [-0.125]]},
            "sample g1-1: behavior_logprobs must be as long as response_ids, 1, got 2",
        ),
        (
            {"behavior_logprobs": [[-0.5, -1.0], [0.0], [-2.0, float("nan"), -3.0], [-0.125]]},
            r"sample g2-0: behavior_logprobs\[1\] must be finite and <= 0, got nan",
        ),
        (
            {"behavior_logprobs": [[-0.5, -1.0], [0.0], [-2.0, -1.0, float("-inf")], [-0.125]]},
            r"sample g2-0: behavior_logprobs\[2\].*got -inf",
        ),
        (
            {"behavior_logprobs": [[-0.5, -1.0], [0.0], [-2.0, -1.0, -1.0], [0.125]]},
            r"sample g2-1: behavior_logprobs\[0\].*got 0.125",
        ),
        (
            {
                "response_ids": [[5, 6], [], [8, 9, 10], [11]],
                "response_mask": [[True, True], [], [True] * 3, [True]],
                "behavior_logprobs": [[-0.5, -1.0], [], [-2.0, -0.25, -3.0], [-0.125]],
            },
            "sample g1-1: the response must have at least one token",
        ),
        (with_spans([]), "sample g2-0: version_spans must cover the response, got no span"),
        (with_spans([span(V1, 0, 1), span(V2, 1, 2)]), r"sample g2-0.*partition 0\.\.3.*1\.\.2"),
        (with_spans([span(V1, 0, 1), span(V2, 2, 3)]), "sample g2-0.*partition"),
        (with_spans([span(V1, 0, 2), span(V2, 1, 3)]), "sample g2-0.*partition"),
        (with_spans([span(V1, 1, 3)]), "sample g2-0.*partition"),
        (with_spans([span(V1, 0, 0), span(V1, 0, 3)]), "sample g2-0.*partition"),
        (with_spans([span(V1, 1, 3), span(V1, 0, 1)]), "sample g2-0.*partition"),
        (with_spans([span(V2, 0, 1), span(V1, 1, 3)]), f"sample g2-0: policy_version.*{V2}, got 1"),
        (with_spans([span(V1, 0, 1), span(V2, 1, 2), span(V1, 2, 3)]), f"sample g2-0: .* grow, got {V1}, {V2}, {V1}"),
        (with_spans([span(V1, 0, 1), span(V1, 1, 3)]), f"sample g2-0: .* grow, got {V1}, {V1}"),
        (with_spans([span("000001-ffffffffffff", 0, 3)]), f"one label for each version, got {V1}, 000001-f+, {V2}"),
        (with_spans([span("boot-77", 0, 3)]), "expected the label of a version.*'boot-77'"),
        ({"policy_version": [1, 2, 1, 2]}, f"sample g1-1: policy_version.*{V1}, got 2"),
    ],
)
def test_a_rollout_that_breaks_its_contract_is_refused_by_sample(changes: dict[str, list[Any]], message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_rollout(rollout(changes))


def test_groups_must_have_the_declared_size_and_dropped_groups_no_rows() -> None:
    with pytest.raises(DataError, match="group g1 is incomplete: expected 3 samples, got 2"):
        check_rollout(rollout(), samples_per_prompt=3)
    with pytest.raises(DataError, match="group g2 is declared dropped"):
        check_rollout(rollout(), dropped={"g2": "timeout"})
    check_rollout(rollout().slice(0, 2), samples_per_prompt=2, dropped={"g2": "timeout"})


def test_a_rollout_without_a_column_names_it() -> None:
    with pytest.raises(DataError, match="missing version_spans"):
        check_rollout(rollout().drop_columns(["version_spans"]))


def test_tokens_are_counted_per_version() -> None:
    assert tokens_per_version(rollout()) == {V1: 4, V2: 3}
    assert tokens_per_version(rollout().slice(2)) == {V1: 1, V2: 3}
    assert tokens_per_version(rollout().slice(0, 0)) == {}


@pytest.mark.parametrize(
    ("column", "message"),
    [
        ({"rewards": pa.array([1.0], pa.float32())}, "column rewards must be double, got float"),
        ({"invented": pa.array([1.0])}, "column invented is not declared"),
        ({"policy_version": pa.array([None], pa.int64())}, "policy_version must not hold nulls"),
        ({"response_ids": pa.array([[1, None]], pa.list_(pa.int32()))}, "response_ids must not hold nulls, in lists"),
        ({"version_spans": pa.array([[{"label": None}]], rollout()["version_spans"].type)}, "version_spans must not"),
        ({"response_ids": pa.array([[1]], pa.large_list(pa.int32()))}, "response_ids must be list"),
        ({}, "one column or more"),
    ],
)
def test_only_declared_columns_of_the_exact_type_are_accepted(column: dict[str, pa.Array], message: str) -> None:
    with pytest.raises(DataError, match=message):
        declare(pa.table(column))


def test_a_users_column_is_accepted_but_cannot_redeclare_one_of_ours() -> None:
    own = Column("length_bucket", pa.int32(), "N", "", "mine", "")
    assert declare(pa.table({"length_bucket": pa.array([1], pa.int32())}), [own]).schema.names == ["length_bucket"]
    ours = Column("behavior_logprobs", pa.float64(), "N", "", "mine", "")
    with pytest.raises(DataError, match="behavior_logprobs must be list"):
        declare(pa.table({"behavior_logprobs": [0.5]}), [ours])


def test_a_row_key_must_be_a_string_column_and_unique() -> None:
    with pytest.raises(DataError, match="group_id must be unique, found 2 keys"):
        check_unique(rollout(), "group_id")
    with pytest.raises(DataError, match="row key policy_version must be a string"):
        check_unique(rollout(), "policy_version")


def test_no_check_loops_over_tokens_in_python() -> None:
    """Ten million tokens: a Python loop would take seconds of CPU, the checks take hundredths."""
    samples, tokens = 10_000, 1000
    offsets = pa.array(np.arange(samples + 1, dtype=np.int32) * tokens)
    table = rollout().take(np.zeros(samples, np.int64))
    ids = [str(i) for i in range(samples)]
    large = {
        "sample_id": pa.array(ids),
        "response_ids": pa.ListArray.from_arrays(offsets, pa.array(np.zeros(samples * tokens, np.int32))),
        "response_mask": pa.ListArray.from_arrays(offsets, pa.repeat(True, samples * tokens)),
        "behavior_logprobs": pa.ListArray.from_arrays(offsets, pa.array(np.zeros(samples * tokens, np.float32))),
        "version_spans": pa.array([[span(V1, 0, tokens)]] * samples, table.schema.field("version_spans").type),
    }
    for name, values in large.items():
        table = table.set_column(table.schema.get_field_index(name), table.schema.field(name), values)
    calls = _python_calls(lambda: check_rollout(table))
    assert calls < 2000


def _python_calls(work: Callable[[], object]) -> int:
    profile = cProfile.Profile()
    profile.runcall(work)
    return pstats.Stats(profile).total_calls
