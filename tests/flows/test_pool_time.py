"""Each second of each pool has one cause: by hand, then for any rows against a look at every second."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.accounts import RUNNING, SessionRow, StageRow, Wait
from flows.pool_time import (
    BUSY,
    CAUSES,
    Period,
    outside_stage_work,
    partition,
    pool_seconds,
    run_seconds,
    session_ends,
    shared_seconds,
    unaccounted,
    working_seconds,
    working_spans,
)
from flows.waits import HANDOVER, POOL, QUEUE, REWARD, UPSTREAM, WEIGHTS

DATA = "data"


def row(
    node: str, pool: str, started: float, ended: float, *waits: Wait, iteration: int = 1, **changes: str
) -> StageRow:
    kind = "publish" if node == "publish" else "working"
    return StageRow(iteration, node, **{"state": "completed", "kind": kind, **changes}, started=started, ended=ended,
                    spans=waits, pool=pool)  # fmt: skip


def upstream(start: float, end: float, *on: str) -> Wait:
    return Wait(UPSTREAM, start, end, on)


def cut(rows: list[StageRow], pool: str, began: float, ended: float) -> list[tuple[float, float, str]]:
    return [tuple(span) for span in partition(rows, pool, began, ended)]


# A synchronous iteration of GRPO; the reward is the slower of the two scores.
SYNC = [
    row("prompts", "cpu", 0, 1),
    row("rollout", "rollout", 0, 11, upstream(0, 1, "prompts")),
    row("reward", "cpu", 0, 18, upstream(0, 11, "rollout")),
    row("reference", "train", 0, 15, upstream(0, 11, "rollout")),
    row("advantage", "cpu", 0, 19, upstream(0, 15, "reward", "reference"), Wait(REWARD, 15, 18, ("reward",))),
    row("update", "train", 0, 30, upstream(0, 19, "advantage")),
    row("publish", "rollout", 0, 32, Wait(WEIGHTS, 0, 30, ("update",))),
]


def test_a_synchronous_iteration() -> None:
    assert cut(SYNC, "rollout", 0, 33) == [
        (0, 1, DATA), (1, 11, "working"), (11, 15, "weights"), (15, 18, "reward"), (18, 30, "weights"),
        (30, 32, "publish"), (32, 33, "other"),
    ]  # fmt: skip
    assert cut(SYNC, "train", 0, 33) == [
        (0, 11, DATA), (11, 15, "working"), (15, 18, "reward"), (18, 19, DATA), (19, 30, "working"),
        (30, 32, "schedule"), (32, 33, "other"),
    ]  # fmt: skip
    assert cut(SYNC, "cpu", 0, 33) == [
        (0, 1, "working"), (1, 11, DATA), (11, 19, "working"), (19, 32, "schedule"), (32, 33, "other"),
    ]  # fmt: skip
    assert outside_stage_work(SYNC, 0, 33) == 1


def overlapped(*rollouts: tuple[float, float, Wait], updates: list[float]) -> list[StageRow]:
    """R=4, P=2, T=3 (0.4, 0.2 and 0.3 s): the batches' processing is a reward stage, on a pool of its own."""
    rows = []
    for k, ((start, end, wait), began) in enumerate(zip(rollouts, updates, strict=True), 1):
        rows += [
            row("rollout", "rollout", 0, end, *([wait] if start else []), iteration=k),
            row("reward", "cpu", 0, end + 2, upstream(0, end, "rollout"), iteration=k),
            row("update", "train", 0, began + 3, Wait(REWARD, 0, began, ("reward",)), iteration=k),
        ]
    return rows


def test_the_worked_example_overlapped_takes_17() -> None:
    taken = [(4 * k, 4 * k + 4, Wait(POOL, 0, 4 * k)) for k in range(3)]
    rows = overlapped(*taken, updates=[6, 10, 14])
    assert cut(rows, "train", 0, 17) == [
        (0, 4, DATA), (4, 6, "reward"), (6, 9, "working"), (9, 10, "reward"), (10, 13, "working"),
        (13, 14, "reward"), (14, 17, "working"),
    ]  # fmt: skip
    assert cut(rows, "rollout", 0, 17) == [(0, 12, "working"), (12, 17, "schedule")]
    assert pool_seconds(rows, ["rollout", "cpu", "train"], [Period(0, 17)]) == {
        "rollout": {"working": 12, "schedule": 5},
        "cpu": {"working": 6, DATA: 8, "schedule": 3},
        "train": {"working": 9, DATA: 4, "reward": 4},
    }


def test_the_worked_example_one_step_off_takes_18_for_the_third_rollout_waits_for_the_first_update() -> None:
    taken = [(0, 4, Wait(POOL, 0, 0)), (4, 8, Wait(POOL, 0, 4)), (9, 13, Wait(WEIGHTS, 0, 9))]
    rows = overlapped(*taken, updates=[6, 10, 15])
    assert pool_seconds(rows, ["rollout", "train"], [Period(0, 18)]) == {
        "rollout": {"working": 12, "weights": 1, "schedule": 5},
        "train": {"working": 9, DATA: 4, "reward": 5},
    }


def test_a_pool_idles_for_what_stands_at_the_end_of_the_chain() -> None:
    idle = [row("update", "train", 0, 20, upstream(0, 10, "advantage"))]
    chain = [*idle, row("advantage", "cpu", 0, 10, upstream(0, 9, "rollout"))]
    assert cut(chain, "train", 0, 10) == [(0, 10, DATA)]
    waits = Wait(WEIGHTS, 0, 3), Wait(POOL, 3, 5), Wait(HANDOVER, 5, 6), Wait(QUEUE, 6, 7)
    assert cut([*chain, row("rollout", "rollout", 0, 9, *waits)], "train", 0, 10) == [
        (0, 3, "weights"), (3, 5, "pool"), (5, 6, "hand-over"), (6, 7, "queue"), (7, 10, DATA),
    ]  # fmt: skip
    other = [row("rollout", "rollout", 0, 9, *waits, iteration=2)]
    assert cut([*chain, *other], "train", 0, 10) == [(0, 10, DATA)]  # what another iteration's rollout waits for


def test_the_chain_goes_along_the_attempt_that_was_under_way_then() -> None:
    rows = [
        row("update", "train", 0, 12, upstream(0, 9, "rollout")),
        row("rollout", "rollout", 0, 5, Wait(WEIGHTS, 0, 5), state="failed"),
        row("rollout", "rollout", 6, 9),
    ]
    assert cut(rows, "train", 0, 9) == [(0, 5, "weights"), (5, 9, DATA)]


def test_of_several_stages_that_wait_the_one_that_goes_on_first_says_for_what() -> None:
    first = row("checkpoint", "train", 4, 9, Wait(WEIGHTS, 4, 8))
    later = row("update", "train", 0, 20, upstream(0, 10, "advantage"))
    assert cut([later, first], "train", 0, 20) == [
        (0, 4, DATA), (4, 8, "weights"), (8, 9, "working"), (9, 10, DATA), (10, 20, "working"),
    ]  # fmt: skip


def test_a_stage_that_streams_works_and_waits_by_turns() -> None:
    reward = row("reward", "cpu", 0, 8, upstream(0, 3, "rollout"), upstream(4, 6, "rollout"))
    assert working_spans(reward) == [(3, 4), (6, 8)]
    assert working_seconds(reward) == 3
    assert cut([reward, row("rollout", "rollout", 0, 6)], "cpu", 0, 8) == [
        (0, 3, DATA), (3, 4, "working"), (4, 6, DATA), (6, 8, "working"),
    ]  # fmt: skip


def test_a_second_at_which_several_work_at_a_pool_is_divided_among_them() -> None:
    first, second = row("rollout", "rollout", 0, 10), row("rollout", "rollout", 2, 10, iteration=2)
    assert shared_seconds([first, second]) == [6, 4]
    assert shared_seconds([second, row("update", "train", 0, 10), first]) == [4, 10, 6]
    publish = row(
        "publish", "rollout", 0, 9, Wait(WEIGHTS, 0, 5), Wait(POOL, 6, 8)
    )  # works from 5 to 6 and from 8 to 9
    assert shared_seconds([first, publish]) == [9, 1]
    assert shared_seconds([]) == []


def test_rollouts_share_their_pool_and_a_publish_counts_before_them() -> None:
    rows = [
        row("rollout", "rollout", 0, 5),
        row("rollout", "rollout", 2, 12, iteration=2),
        row("publish", "rollout", 1, 9, Wait(WEIGHTS, 1, 4), Wait(POOL, 4, 8)),
    ]
    assert cut(rows, "rollout", 0, 12) == [(0, 8, "working"), (8, 9, "publish"), (9, 12, "working")]


def test_a_hand_over_and_a_failed_attempt_have_causes_of_their_own() -> None:
    rows = [
        row("rollout", "all", 0, 5),
        row("update", "all", 0, 10, upstream(0, 5, "rollout"), Wait(HANDOVER, 5, 7)),
        row("publish", "all", 10, 12, state="failed"),
        row("restore", "all", 12, 13, state="failed", kind="starting"),
    ]
    assert cut(rows, "all", 0, 13) == [
        (0, 5, "working"), (5, 7, "hand-over"), (7, 10, "working"), (10, 12, "failed"), (12, 13, "starting"),
    ]  # fmt: skip


def test_a_stage_that_was_cut_off_while_it_waited_says_what_its_pool_idled_for() -> None:
    rows = [row("rollout", "rollout", 0, 6), row("update", "train", 1, 6, upstream(1, 6, "rollout"), state="failed")]
    assert cut(rows, "train", 0, 7) == [(0, 1, "schedule"), (1, 6, DATA), (6, 7, "other")]


def test_a_stage_that_is_under_way_counts_as_far_as_it_has_come() -> None:
    rows = [
        row("rollout", "rollout", 2, 9, Wait(POOL, 2, 3), state=RUNNING),
        row("reward", "cpu", 2, 9, upstream(2, 9, "rollout"), state=RUNNING),
    ]
    assert cut(rows, "rollout", 0, 9) == [(0, 2, "other"), (2, 3, "pool"), (3, 9, "working")]
    assert cut(rows, "cpu", 0, 9) == [(0, 2, "other"), (2, 3, "pool"), (3, 9, DATA)]


# A run that was killed in its first update; the second process publishes again and goes on.
SESSIONS = [SessionRow(0, ready=10), SessionRow(100, ready=115, accounted=128, ended=130)]
RESUMED = [
    row("publish", "rollout", 8, 10, iteration=0),
    row("rollout", "rollout", 10, 20),
    row("restore", "train", 105, 110, iteration=0, kind="starting"),
    row("publish", "rollout", 110, 114, iteration=0),
    row("update", "train", 115, 125),
    row("publish", "rollout", 115, 127, Wait(WEIGHTS, 115, 125, ("update",))),
]


def test_a_resumed_run_is_the_time_of_its_processes_without_that_between_them() -> None:
    assert run_seconds(SESSIONS, RESUMED, ["rollout", "train"]) == {
        "rollout": {"publish": 8, "working": 10, "starting": 8 + 10 + 1, "weights": 10, "other": 3},
        "train": {"working": 10, "starting": 10 + 15, "schedule": 10 + 2, "other": 3},
    }


def test_what_another_run_held_up_is_a_wait_for_the_pool_and_not_the_start() -> None:
    sessions = [SessionRow(0, ready=50, ended=60), SessionRow(100, ended=130)]  # the second was stopped while it waited
    rows = [
        row("claim", "", 2, 42, Wait(POOL, 2, 42), iteration=0, kind="starting"),
        row("restore", "train", 44, 46, iteration=0, kind="starting"),
        row("publish", "rollout", 46, 49, iteration=0),
        row("update", "train", 50, 60),
        row("claim", "", 101, 130, Wait(POOL, 101, 130), iteration=0, kind="starting", state="failed"),
    ]
    assert run_seconds(sessions, rows, ["rollout", "train"]) == {
        "rollout": {"publish": 3, "starting": 2 + 8 - 3 + 1, "pool": 40 + 29, "schedule": 10},
        "train": {"working": 10, "starting": 2 + 8 + 1, "pool": 40 + 29},
    }


def test_a_run_killed_while_another_had_its_devices_has_waited_for_the_pool_until_the_kill() -> None:
    """Twice: the claim's row was written last at 41, a moment before the kill; the second time nothing waited."""
    sessions = [SessionRow(0, seen=41), SessionRow(100, seen=104), SessionRow(200, ready=206, ended=210)]
    rows = [
        row("claim", "", 2, 41, Wait(POOL, 2, 41), iteration=0, kind="starting", state="failed"),
        row("restore", "train", 202, 205, iteration=0, kind="starting"),
        row("update", "train", 206, 210),
    ]
    assert run_seconds(sessions, rows, ["train"]) == {"train": {"working": 4, "starting": 2 + 4 + 6, "pool": 39}}


def test_a_killed_process_ends_with_the_last_that_is_known_of_it() -> None:
    assert session_ends(SESSIONS, RESUMED) == [20, 130]
    assert session_ends(SESSIONS[:1], RESUMED) == [127]
    assert session_ends(SESSIONS[:1], [], now=17) == [17]
    assert session_ends([SessionRow(5, ready=6, accounted=8), SessionRow(9)], []) == [8, 9]
    assert session_ends([SessionRow(5, ready=6, seen=8), SessionRow(9, seen=12)], []) == [8, 12]


def test_what_is_not_accounted_for_is_the_time_of_iterations_since_the_last_accounting() -> None:
    first, second = SESSIONS
    now = SessionRow(100, ready=115)
    assert unaccounted([first], RESUMED, 25) == [(10, 25)]
    assert unaccounted([first, now], RESUMED, 140) == [(10, 20), (115, 140)]
    assert unaccounted([SessionRow(0, ready=10, accounted=12), now], RESUMED, 140) == [(12, 20), (115, 140)]
    assert unaccounted([first, second], RESUMED, 130) == [(128, 130)]
    assert unaccounted([SessionRow(0), now], [], 140) == [(115, 140)]  # killed before it was ready


def test_where_time_went_is_read_without_prefect() -> None:
    code = "import sys, flows.pool_time; sys.exit('prefect' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- any rows

NODES, POOLS = ["a", "b", "c", "d"], ["x", "y"]
KINDS = ["working", "publish", "starting"]


@st.composite
def attempts(draw: st.DrawFn) -> StageRow:
    """Whole seconds; between two of its moments it works or waits."""
    moments = sorted(draw(st.sets(st.integers(0, 30), min_size=2, max_size=7)))
    waits = []
    for start, end in pairwise(moments):
        cause = draw(st.sampled_from(["", UPSTREAM, WEIGHTS, REWARD, POOL, QUEUE, HANDOVER, "AwaitingRoom"]))
        if cause:
            waits.append(Wait(cause, start, end, tuple(draw(st.lists(st.sampled_from(NODES), max_size=2)))))
    return StageRow(
        draw(st.integers(1, 2)),
        draw(st.sampled_from(NODES)),
        draw(st.sampled_from(["completed", "failed", RUNNING])),
        moments[0],
        moments[-1],
        tuple(waits),
        draw(st.sampled_from(POOLS)),
        "rollout",
        draw(st.sampled_from(KINDS)),
    )


@given(st.lists(attempts(), max_size=8))
def test_the_seconds_of_a_pools_attempts_add_up_to_those_in_which_one_worked(rows: list[StageRow]) -> None:
    seconds = shared_seconds(rows)
    for pool in POOLS:
        here = [index for index, row in enumerate(rows) if row.pool == pool]
        moments = {
            at for index in here for span in working_spans(rows[index]) for at in range(int(span.start), int(span.end))
        }
        assert sum(seconds[index] for index in here) == pytest.approx(len(moments))
        assert all(0 <= seconds[index] <= working_seconds(rows[index]) + 1e-9 for index in here)


def at_work(row: StageRow, at: float) -> str:
    """What the attempt does at this moment, by looking at all its waits; empty: it is not there, or idle."""
    if not row.started <= at < row.ended:
        return ""
    causes = [wait.cause for wait in row.spans if wait.start <= at < wait.end]
    if causes:
        return "hand-over" if causes == [HANDOVER] else ""
    return "failed" if row.state == "failed" and row.kind != "starting" else row.kind


@given(st.lists(attempts(), max_size=8), st.integers(0, 30), st.integers(1, 10))
def test_every_second_has_one_cause_and_they_add_up(rows: list[StageRow], began: int, length: int) -> None:
    ended = began + length
    for pool in POOLS:
        spans = partition(rows, pool, began, ended)
        assert spans[0].start == began
        assert spans[-1].end == ended
        assert all(left.end == right.start and left.cause != right.cause for left, right in pairwise(spans))
        assert all(span.start < span.end and span.cause in CAUSES for span in spans)
        (seconds,) = pool_seconds(rows, [pool], [Period(began, ended)]).values()
        assert sum(seconds.values()) == length


@given(st.lists(attempts(), max_size=8), st.integers(0, 25))
def test_a_second_in_which_a_stage_of_the_pool_works_is_that_and_no_other_is(rows: list[StageRow], began: int) -> None:
    ended = began + 8
    here = {pool: [row for row in rows if row.pool == pool] for pool in POOLS}
    for pool in POOLS:
        for span in partition(rows, pool, began, ended):
            for second in range(int(span.start), int(span.end)):
                kinds = {at_work(row, second + 0.5) for row in here[pool]} - {""}
                if kinds:
                    assert span.cause == next(name for name in BUSY if name in kinds)
                else:
                    assert span.cause not in ("publish", "working", "failed", "starting")
                worked = any(at_work(row, second + 0.5) not in ("", "hand-over") for row in rows)
                assert span.cause != "other" or not worked
                assert span.cause != "schedule" or worked or any("AwaitingRoom" in row.waits for row in rows)
