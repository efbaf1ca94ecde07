"""Small rollouts for the tests of the store."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from data.columns import COLUMNS

V1, V2 = "000001-0123456789ab", "000002-ba9876543210"


def rollout(changes: Mapping[str, list[Any]] | None = None) -> pa.Table:
    """Two groups of two; responses of 2, 1, 3 and 1 tokens; the third ran across an update."""
    rows: dict[str, list[Any]] = {
        "sample_id": ["g1-0", "g1-1", "g2-0", "g2-1"],
        "group_id": ["g1", "g1", "g2", "g2"],
        "response_ids": [[5, 6], [7], [8, 9, 10], [11]],
        "response_mask": [[True, True], [True], [True, True, False], [True]],
        "behavior_logprobs": [[-0.5, -1.0], [0.0], [-2.0, -0.25, -3.0], [-0.125]],
        "version_spans": [
            [{"label": V1, "start": 0, "end": 2}],
            [{"label": V1, "start": 0, "end": 1}],
            [{"label": V1, "start": 0, "end": 1}, {"label": V2, "start": 1, "end": 3}],
            [{"label": V2, "start": 0, "end": 1}],
        ],
        "policy_version": [1, 1, 1, 2],
        "finish_reason": ["stop", "length", "stop", "stop"],
        "response_text": ["a", "b", "é", ""],
        **(changes or {}),
    }
    return table(rows)


def table(rows: Mapping[str, list[Any]]) -> pa.Table:
    return pa.table(dict(rows), schema=pa.schema([COLUMNS[name].field for name in rows]))


def rewards(values: list[float | None]) -> pa.Table:
    return table({"rewards": values})
