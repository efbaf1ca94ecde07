"""Where the seconds of an iteration went, by hand-worked numbers."""

from data.accounts import StageRow, Wait
from flows.account import pool_table, stage_waits
from flows.display import LineTable
from flows.pool_time import outside_stage_work, working_seconds


def row(node: str, started: float, ended: float, *waits: Wait) -> StageRow:
    return StageRow(1, node, "completed", started, ended, waits)


STAGES = [
    row("rollout", 0, 10),
    row("reward", 0, 12, Wait("AwaitingUpstream", 0, 10)),  # works from 10 to 12
    row("reference", 0, 15, Wait("AwaitingUpstream", 0, 10), Wait("AwaitingPool", 10, 11)),  # works from 11 to 15
    row("update", 0, 30, Wait("AwaitingUpstream", 0, 16)),  # works from 16 to 30
]


def test_a_stage_works_for_what_its_waits_leave() -> None:
    assert [working_seconds(r) for r in STAGES] == [10, 2, 4, 14]


def test_time_in_which_no_stage_works_is_counted_once() -> None:
    assert outside_stage_work(STAGES, 0, 31) == 2  # 15 to 16, and 30 to 31
    assert outside_stage_work([], 0, 5) == 5
    assert outside_stage_work([row("rollout", 2, 4)], 3, 10) == 6  # what was before the iteration does not count


def test_the_waits_table_has_a_row_a_stage_and_a_column_a_cause() -> None:
    assert stage_waits(STAGES)[2] == {
        "stage": "reference",
        "state": "completed",
        "working": 4.0,
        "AwaitingPool": 1.0,
        "AwaitingUpstream": 10.0,
    }
    assert stage_waits(STAGES)[0]["AwaitingPool"] == 0.0


def test_the_pools_table_has_a_row_a_pool_that_adds_up_to_wall_time() -> None:
    pools = {"rollout": {"working": 10.0, "weights": 20.0}, "train": {"working": 18.0, "data": 12.0}}
    assert pool_table(pools, 30.0)[1] == {
        "name": "train", "working": 18.0, "data": 12.0, "weights": 0.0, "sum": 30.0, "wall": 30.0
    }  # fmt: skip
    assert list(pool_table(pools, 30.0)[0]) == ["name", "working", "data", "weights", "sum", "wall"]


def test_a_line_fits_80_columns_and_stands_under_its_header() -> None:
    table = LineTable(
        10,
        [("prompts", "cpu"), ("rollout", "rollout"), ("reward", "cpu"), ("reference", "train"), ("advantage", "cpu"),
         ("update", "train"), ("publish", "rollout"), ("evaluate", "rollout")],
    )  # fmt: skip
    values = {
        "reward/mean": 0.123, "response_length/mean": 15.25, "off_policy/lag_max": 0.0, "time/rollout": 6.04,
        "time/reference": 1.9, "time/update": 100.0, "time/publish": 1.0, "time/prompts": 0.1, "time/reward": 0.2,
        "time/iteration": 109.6, "time/outside_stages": 0.04,
    }  # fmt: skip
    line = table.line(3, values)
    assert line == " 3/10  0.123   15   0     6.0       1.9  100.0     1.0        -   0.3  0.0  110s"
    assert len(table.header) == len(line) == 80
