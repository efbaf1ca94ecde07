"""The planner's simulation: schedules worked by hand, and rules that hold for any graph and schedule."""

import math
from dataclasses import replace
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.schema import Schedule
from flows.simulate import FULL_QUEUE, NOTHING_LEFT, OUTSIDE, PoolTime, Simulated, lower_bound, simulate
from flows.steps import Step, Took

SYNC, ONE_OFF = Schedule(), Schedule("one_step_off")
PIPELINE = [
    Step("rollout", (), "gpus", "rollout"),
    Step("process", ("rollout",), "cpu"),
    Step("train", ("process",), "trainer", "update"),
]
RTP = [
    Step("rollout", (), "engines", "rollout", "rollout"),
    Step("update", ("rollout",), "trainer", "update", "train"),
    Step("publish", ("update",), "engines", "publish", "rollout"),
]


def constant(batches: int, **seconds: float) -> dict[str, list[float]]:
    return {name: [value] * batches for name, value in seconds.items()}


def times(result: Simulated, node: str) -> list[tuple[int, float, float]]:
    return [(slot.batch, slot.start, slot.end) for slot in result.slots if slot.node == node]


# -- worked by hand


def test_three_batches_take_270_in_step_and_170_where_nothing_waits_for_weights() -> None:
    durations = constant(3, rollout=40, process=20, train=30)
    assert simulate(PIPELINE, durations, 3, SYNC).makespan == 270
    ahead = simulate(PIPELINE, durations, 3, Schedule("async", max_lag=2))
    assert ahead.makespan == 170
    assert times(ahead, "rollout") == [(1, 0, 40), (2, 40, 80), (3, 80, 120)]
    assert times(ahead, "train") == [(1, 60, 90), (2, 100, 130), (3, 140, 170)]
    assert ahead.lag == {0: 1, 1: 1, 2: 1}


def test_one_step_off_is_180_because_the_third_rollout_waits_for_the_first_update() -> None:
    result = simulate(PIPELINE, constant(3, rollout=40, process=20, train=30), 3, ONE_OFF)
    assert times(result, "rollout") == [(1, 0, 40), (2, 40, 80), (3, 90, 130)]
    assert (result.makespan, result.lag) == (180, {0: 1, 1: 2})


def test_one_pool_for_all_gives_the_serial_time_under_every_schedule() -> None:
    steps = [replace(step, pool="all") for step in PIPELINE]
    for schedule in (SYNC, ONE_OFF, Schedule("async", max_lag=2)):
        assert simulate(steps, constant(3, rollout=40, process=20, train=30), 3, schedule).makespan == 270


def test_independent_stages_of_a_batch_overlap_on_their_own_pools() -> None:
    steps = [
        Step("rollout", (), "a", "rollout"),
        Step("reward", ("rollout",), "b"),
        Step("reference", ("rollout",), "c"),
        Step("update", ("reward", "reference"), "c", "update"),
    ]
    assert simulate(steps, constant(1, rollout=10, reward=5, reference=7, update=3), 1, SYNC).makespan == 20


def test_a_publish_waits_for_the_batch_under_way_and_goes_before_the_next() -> None:
    result = simulate(RTP, constant(3, rollout=10, update=8, publish=1), 3, ONE_OFF)
    assert times(result, "rollout") == [(1, 0, 10), (2, 10, 20), (3, 21, 31)]
    assert times(result, "update") == [(1, 10, 18), (2, 20, 28), (3, 31, 39)]
    assert times(result, "publish") == [(1, 20, 21), (2, 31, 32), (3, 39, 40)]
    assert result.lag == {0: 1, 1: 2}


def test_what_becomes_ready_as_its_pool_gets_free_takes_its_turn_by_age() -> None:
    result = simulate(RTP, constant(3, rollout=10, update=10, publish=1), 3, Schedule("async", max_lag=2))
    assert times(result, "publish")[0] == (1, 20, 21)  # rollout 2 and update 1 end at 20
    assert times(result, "rollout")[2] == (3, 21, 31)


def test_publishing_every_second_update_leaves_rollouts_on_older_weights() -> None:
    result = simulate(RTP, constant(4, rollout=10, update=2, publish=1), 4, Schedule("async", 1, publish_every=2))
    assert [batch for batch, *_ in times(result, "publish")] == [2, 4]
    # batches 1 and 2 have version 0, 3 and 4 version 2, which comes at 23: updates 1, 2, 3, 4 find 0, 1, 0, 1 behind
    assert times(result, "rollout") == [(1, 0, 10), (2, 10, 20), (3, 23, 33), (4, 33, 43)]
    assert result.lag == {0: 2, 1: 2}


def test_the_last_batch_publishes_whatever_the_interval() -> None:
    durations = constant(5, rollout=10, update=2, publish=1)
    result = simulate(RTP, durations, 5, Schedule("async", max_lag=1, publish_every=2))
    assert [batch for batch, *_ in times(result, "publish")] == [2, 4, 5]


QUEUED = [Step("rollout", (), "engines", "rollout"), Step("update", ("rollout",), "trainer", "update")]


def test_a_full_queue_holds_the_next_rollout_until_its_whole_batch_has_room() -> None:
    schedule = Schedule("async", max_lag=9, queue_groups=25)  # the half that is left is room for no batch
    result = simulate(QUEUED, constant(4, rollout=10, update=25), 4, schedule, groups=10)
    # batch 1 leaves at 10, 2 at 35, 3 at 60: batch 3 gets in beside 2 at 20, batch 4 beside 3 at 35
    assert times(result, "rollout") == [(1, 0, 10), (2, 10, 20), (3, 20, 30), (4, 35, 45)]
    assert times(result, "update") == [(1, 10, 35), (2, 35, 60), (3, 60, 85), (4, 85, 110)]
    assert result.pools["engines"] == PoolTime(40, 0, {NOTHING_LEFT: 65, FULL_QUEUE: 5})
    assert result.queue_max == 20
    assert result.queue_mean == pytest.approx((10 * 10 + 20 * 5 + 10 * 10 + 20 * 15 + 10 * 25) / 110)


def test_a_queue_is_bounded_in_tokens_too() -> None:
    schedule = Schedule("async", max_lag=9, queue_tokens=500)
    durations = constant(3, rollout=10, update=25)
    assert times(simulate(QUEUED, durations, 3, schedule, tokens=250), "rollout")[2] == (3, 20, 30)
    assert times(simulate(QUEUED, durations, 3, schedule, tokens=251), "rollout")[2] == (3, 35, 45)


def test_a_rollout_reserves_room_for_all_it_may_issue_and_keeps_what_it_generated() -> None:
    schedule = Schedule("async", max_lag=9, queue_groups=30)
    result = simulate(QUEUED, constant(4, rollout=10, update=40), 4, schedule, groups=10, issued=20)
    # beside the 10 of batch 2 there is room for the 20 of batch 3, beside those of 2 and 3 for no more
    assert times(result, "rollout") == [(1, 0, 10), (2, 10, 20), (3, 20, 30), (4, 50, 60)]


def test_the_batch_trained_next_always_gets_into_the_queue() -> None:
    schedule = Schedule("async", max_lag=9, queue_groups=1, queue_tokens=1)
    result = simulate(QUEUED, constant(2, rollout=10, update=5), 2, schedule, groups=10, tokens=10)
    assert times(result, "rollout") == [(1, 0, 10), (2, 10, 20)]


def test_a_pool_serves_in_the_order_of_asking_and_the_next_rollout_asks_first() -> None:
    steps = [
        Step("rollout", (), "all", "rollout"),
        Step("reference", ("rollout",), "all"),
        Step("update", ("reference",), "all", "update"),
    ]
    result = simulate(steps, constant(2, rollout=10, reference=1, update=5), 2, ONE_OFF)
    assert [(slot.batch, slot.node) for slot in result.slots] == [
        (1, "rollout"), (2, "rollout"), (1, "reference"), (2, "reference"), (1, "update"), (2, "update"),
    ]  # fmt: skip


def test_a_step_waits_for_what_it_follows_on_in_the_batch_before() -> None:
    steps = [*RTP, Step("evaluate", ("publish",), "cpu")]
    durations = constant(3, rollout=10, update=2, publish=1, evaluate=30)
    ahead = Schedule("async", max_lag=2)
    assert times(simulate(steps, durations, 3, ahead), "publish")[1] == (2, 31, 32)
    steps[2] = replace(steps[2], follows=("publish", "evaluate"))
    result = simulate(steps, durations, 3, ahead)  # the first evaluation is from 21 to 51
    assert times(result, "publish")[1:] == [(2, 51, 52), (3, 82, 83)]


def test_every_idle_second_has_the_cause_that_the_next_stage_hung_on() -> None:
    pools = simulate(PIPELINE, constant(3, rollout=40, process=20, train=30), 3, SYNC).pools
    assert pools["gpus"] == PoolTime(120, 0, {"train": 60, NOTHING_LEFT: 50, "process": 40})
    assert pools["trainer"] == PoolTime(90, 0, {"rollout": 120, "process": 60})


def test_a_pool_that_changes_its_role_pays_the_hand_over() -> None:
    steps = [replace(step, pool="all") for step in RTP]
    result = simulate(steps, constant(2, rollout=10, update=5, publish=1), 2, SYNC, hand_over=2)
    assert times(result, "update") == [(1, 12, 17), (2, 32, 37)]  # rollout 2 from 20 to 30, with no change before it
    assert result.makespan == 40
    assert result.pools["all"] == PoolTime(32, 8, {})


def test_a_cpu_stage_in_a_pool_of_devices_changes_no_role() -> None:
    steps = [RTP[0], Step("reward", ("rollout",), "engines"), replace(RTP[1], needs=("reward",), pool="engines")]
    result = simulate(steps, constant(1, rollout=10, reward=1, update=5), 1, SYNC, hand_over=2)
    assert times(result, "reward") == [(1, 10, 11)]
    assert times(result, "update") == [(1, 13, 18)]
    assert result.pools["engines"] == PoolTime(16, 2, {})


def test_a_stage_runs_where_it_is_due_and_another_one_waits_for_it_there() -> None:
    steps = [
        *RTP[:2],
        Step("checkpoint", ("update",), "trainer", due=lambda batch: batch == 1),
        replace(RTP[2], after="checkpoint"),
        Step("evaluate", ("publish",), "engines", due=lambda batch: batch == 2),
    ]
    durations = constant(2, rollout=10, update=5, checkpoint=2, publish=1, evaluate=3)
    result = simulate(steps, durations, 2, SYNC)
    assert times(result, "publish") == [(1, 17, 18), (2, 33, 34)]
    assert times(result, "evaluate") == [(2, 34, 37)]


def test_in_step_the_next_batch_opens_as_the_update_starts_and_its_rollout_waits_for_what_it_follows_on() -> None:
    steps = [
        Step("prompts", (), "cpu"),
        replace(RTP[0], needs=("prompts",), follows=("prompts", "rollout", "update", "publish", "evaluate")),
        *RTP[1:],
        Step("evaluate", ("publish",), "cpu"),
    ]
    result = simulate(steps, constant(2, prompts=1, rollout=10, update=5, publish=1, evaluate=3), 2, SYNC)
    assert times(result, "prompts") == [(1, 0, 1), (2, 11, 12)]
    assert times(result, "rollout") == [(1, 1, 11), (2, 20, 30)]


# -- what a stage takes beside its work


def took(batches: int, **steps: Took | float) -> dict[str, list[Took | float]]:
    return {name: [value] * batches for name, value in steps.items()}


def test_a_stage_asks_for_its_pool_when_what_comes_before_that_is_over() -> None:
    late = took(2, rollout=10, update=Took(8, dispatch=3), publish=Took(1, dispatch=2))
    result = simulate(RTP, late, 2, ONE_OFF)
    assert times(result, "update") == [(1, 13, 21), (2, 24, 32)]  # 20 + 3, 21 + 3
    assert times(result, "publish") == [(1, 23, 24), (2, 34, 35)]
    assert result.pools["trainer"] == PoolTime(16, 0, {"rollout": 10, OUTSIDE: 6, NOTHING_LEFT: 3})
    assert result.pools["engines"] == PoolTime(22, 0, {"update": 9, OUTSIDE: 4})  # 20 to 23, and 24 to 34


def test_a_stage_that_had_to_wait_for_its_pool_wakes_some_time_after_that_is_free() -> None:
    steps = [replace(step, pool="all") for step in PIPELINE]
    sleepy = took(2, rollout=10, process=Took(2, wake=1), train=Took(5, wake=1))
    result = simulate(steps, sleepy, 2, Schedule("async", max_lag=2))
    assert times(result, "rollout") == [(1, 0, 10), (2, 10, 20)]
    assert times(result, "process") == [(1, 21, 23), (2, 24, 26)]
    assert times(result, "train") == [(1, 27, 32), (2, 32, 37)]  # the second asks as the first ends
    assert result.pools["all"] == PoolTime(34, 0, {OUTSIDE: 3})


def test_a_publish_that_shares_the_engines_goes_beside_the_rollout_under_way() -> None:
    steps = [replace(step, shares=step.does != "update") for step in RTP]
    result = simulate(steps, constant(3, rollout=10, update=4, publish=3), 3, ONE_OFF)
    assert times(result, "publish") == [(1, 14, 17), (2, 24, 27), (3, 34, 37)]
    assert times(result, "rollout")[2] == (3, 20, 30)  # and not 23, where the publish waited for rollout 2
    assert result.pools["engines"] == PoolTime(33, 0, {"update": 4})


def test_a_rollout_begins_in_the_tail_of_another_unless_a_publish_waits_for_the_engines() -> None:
    steps = [replace(step, shares=step.does == "rollout") for step in RTP]
    tailed = took(3, rollout=Took(10, tail=4), update=1.5, publish=1)
    result = simulate(steps, tailed, 3, Schedule("async", max_lag=2))
    # The publish of 1 comes at 11.5 and waits for rollout 2; rollout 3 may begin at 12, but waits behind it.
    assert times(result, "rollout") == [(1, 0, 10), (2, 6, 16), (3, 17, 27)]
    assert times(result, "publish") == [(1, 16, 17), (2, 27, 28), (3, 28.5, 29.5)]
    assert simulate(steps, tailed, 3, SYNC).makespan == 3 * (10 + 1.5 + 1)
    assert result.pools["engines"].working == 10 + 6 + 1 + 10 + 1 + 1  # the tail's seconds count once


STREAMED = [
    Step("rollout", (), "engines", "rollout", "rollout"),
    Step("reward", ("rollout",), "cpu"),
    Step("reference", ("rollout",), "trainer", "", "train"),
    Step("update", ("reward", "reference"), "trainer", "update", "train"),
]


def test_what_a_stage_does_beside_its_rollout_takes_the_trainer_from_the_update_before() -> None:
    times_of = took(3, rollout=10, reward=7, reference=Took(2, early=((5, 4),)), update=6)
    result = simulate(STREAMED, times_of, 3, Schedule("async", max_lag=2), shared=["cpu"])
    # Update 1 is ready at 17 and waits until 19 for what the reference of 2 began at 15.
    assert times(result, "update") == [(1, 19, 25), (2, 31, 37), (3, 39, 45)]
    assert times(result, "reference") == [(1, 10, 12), (2, 25, 27), (3, 37, 39)]  # their ends
    assert result.pools["trainer"].working == 3 * (4 + 2 + 6)
    assert lower_bound(STREAMED, times_of, 3, SYNC, shared=["cpu"]) == (36, "the work of pool trainer")


def test_a_stage_whose_work_was_all_early_needs_no_pool_at_the_end() -> None:
    times_of = took(2, rollout=10, reward=0, reference=Took(0, dispatch=1, early=((5, 4),)), update=30)
    result = simulate(STREAMED, times_of, 2, Schedule("async", max_lag=2), shared=["cpu"])
    # In batch 2 it asks for the trainer at 15 and has it from 41 to 45: it is over then, and its input long whole.
    assert times(result, "reference") == [(1, 11, 11), (2, 46, 46)]
    assert times(result, "update") == [(1, 11, 41), (2, 46, 76)]


def test_a_generated_batch_takes_the_tokens_it_has_from_the_queue() -> None:
    schedule = Schedule("async", max_lag=9, queue_tokens=500)
    short = took(3, rollout=Took(10, tokens=100), update=25)
    assert times(simulate(QUEUED, short, 3, schedule, tokens=400), "rollout")[2] == (3, 20, 30)  # 400 + 100
    assert times(simulate(QUEUED, short, 3, schedule, tokens=401), "rollout")[2] == (3, 35, 45)


def test_after_a_stop_nothing_begins_before_what_had_ended_until_then() -> None:
    stopped = {(1, "rollout"): 0, (1, "update"): 0, (2, "rollout"): 0, (2, "update"): 0, (3, "rollout"): 1}
    durations = constant(3, rollout=10, update=6, publish=0)
    result = simulate(RTP, durations, 3, ONE_OFF, stretches={**stopped, (3, "update"): 1})
    assert times(result, "rollout")[2] == (3, 26, 36)  # it had begun at 20, and was cut off
    assert (result.makespan, simulate(RTP, durations, 3, ONE_OFF).makespan) == (42, 36)


# -- rules for any graph


@st.composite
def systems(draw: st.DrawFn) -> SimpleNamespace:
    """A graph with a rollout, an update after it and perhaps a publish; pools, times in whole seconds, a schedule."""
    count = draw(st.integers(2, 6))
    update = draw(st.integers(1, count - 1))
    publish = draw(st.booleans())
    steps: list[Step] = []
    for i in range(count):
        earlier = st.sampled_from(range(i)) if i else st.nothing()
        needs = set(draw(st.lists(earlier, unique=True, max_size=3))) if i else set()
        if i == update:
            needs.add(0)  # the update trains on the rollout
        does = "rollout" if i == 0 else "update" if i == update else ""
        role = draw(st.sampled_from(["rollout", "train", ""]))
        steps.append(Step(str(i), tuple(map(str, sorted(needs))), draw(st.sampled_from("abs")), does, role))  # type: ignore[arg-type]
    if publish:
        steps.append(Step("p", (str(update),), draw(st.sampled_from("abs")), "publish", "rollout"))
    batches, groups = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    sharing = [s.does in ("rollout", "publish") and draw(st.booleans()) for s in steps]
    steps = [replace(s, shares=True, role="rollout") if both else s for s, both in zip(steps, sharing, strict=True)]
    small = st.integers(0, 3).map(float)

    def one(step: Step) -> Took:
        beside = step.needs == ("0",) and step.pool != steps[0].pool
        early = draw(st.lists(st.tuples(small, small), max_size=2)) if beside else []
        return Took(float(draw(st.integers(0, 5))), draw(small), draw(small), tuple(early), draw(small))

    durations = {s.name: [one(s) for _ in range(batches)] for s in steps}
    schedule = draw(schedules(groups))
    if not schedule.ahead:
        steps[0] = replace(steps[0], follows=tuple(s.name for s in steps))
    return SimpleNamespace(
        steps=steps, durations=durations, batches=batches, groups=groups, schedule=schedule,
        hand_over=float(draw(st.integers(0, 2))),
    )  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn, groups: int) -> Schedule:
    kind = draw(st.sampled_from(["sync", "one_step_off", "async"]))
    queue = draw(st.just(0) | st.integers(groups, 3 * groups))
    if kind != "async":
        return Schedule(kind, queue_groups=queue)  # type: ignore[arg-type]
    limit = draw(st.integers(1, 4))
    return Schedule("async", limit, draw(st.integers(1, limit + 1)), queue)


def run(s: SimpleNamespace) -> Simulated:
    return simulate(
        s.steps, s.durations, s.batches, s.schedule, shared="s", groups=s.groups, hand_over=s.hand_over
    )  # fmt: skip


@given(systems())
def test_no_stage_starts_before_its_inputs_and_no_pool_serves_two_at_a_time(s: SimpleNamespace) -> None:
    result = run(s)
    slots = {(slot.batch, slot.node): slot for slot in result.slots}
    assert len(slots) == len(result.slots)
    for slot in result.slots:
        assert all(slots[slot.batch, need].end <= slot.ready <= slot.start for need in slot.step.needs)
        waits = slot.step.does == "rollout" and not s.schedule.ahead
        assert not waits or all(o.end <= slot.start for o in result.slots if o.batch == slot.batch - 1)
        assert slot.end - slot.start == slot.took.work
    for pool in "ab":
        own = [slot for slot in result.slots if slot.pool == pool and (slot.took.work or not slot.took.early)]
        for before, after in combinations(own, 2):
            together = before.step.shares and after.step.shares
            assert together or before.end <= after.start - after.hand_over
    for before, after in pairwise([slot for slot in result.slots if slot.step.does == "rollout"]):
        tail = before.took.tail if s.schedule.ahead else 0.0
        assert before.start + max(0.0, before.took.work - tail) <= after.start
    assert set(slots) == {
        (batch, step.name)
        for batch in range(1, s.batches + 1)
        for step in s.steps
        if step.does != "publish" or batch % s.schedule.publish_every == 0 or batch == s.batches
    }


@given(systems())
def test_lag_and_queue_keep_their_limits_and_every_group_is_trained(s: SimpleNamespace) -> None:
    result = run(s)
    assert all(0 <= lag <= s.schedule.lag_limit for lag in result.lag)
    assert sum(result.lag.values()) == s.groups * s.batches
    assert result.queue_mean <= result.queue_max <= (s.schedule.queue_groups or math.inf)
    updates = [slot.batch for slot in result.slots if slot.step.does == "update"]
    assert updates == sorted(updates)


@given(systems())
def test_the_makespan_is_never_below_the_bound_and_each_pools_time_adds_up_to_it(s: SimpleNamespace) -> None:
    result = run(s)
    assert result.makespan >= lower_bound(s.steps, s.durations, s.batches, s.schedule, shared="s")[0] - 1e-9
    for time in result.pools.values():
        assert min([time.working, time.hand_over, *time.idle.values()]) >= 0
        assert time.working + time.hand_over + sum(time.idle.values()) == pytest.approx(result.makespan)


@given(systems())
def test_the_same_system_gives_the_same_schedule(s: SimpleNamespace) -> None:
    def seen(result: Simulated) -> list[Any]:
        return [(slot.batch, slot.node, slot.start, slot.end) for slot in result.slots]

    assert seen(run(s)) == seen(run(s))


chains = st.lists(st.integers(0, 9).map(float), min_size=2, max_size=5)


def chain(count: int) -> list[Step]:
    """Each stage on a pool of its own, the first a rollout, the last an update."""
    kinds = {0: "rollout", count - 1: "update"}
    return [Step(str(i), (str(i - 1),) if i else (), str(i), kinds.get(i, "")) for i in range(count)]  # type: ignore[arg-type]


@given(chains, st.integers(1, 6))
def test_sync_is_the_sum(seconds: list[float], batches: int) -> None:
    durations = {str(i): [time] * batches for i, time in enumerate(seconds)}
    assert simulate(chain(len(seconds)), durations, batches, SYNC).makespan == batches * sum(seconds)


@given(chains, st.integers(1, 6), st.integers(2, 5), st.integers(1, 4), st.data())
def test_more_engines_are_never_slower(
    seconds: list[float], batches: int, engines: int, groups: int, data: st.DataObject
) -> None:
    schedule = data.draw(schedules(groups))
    durations = {str(i): [time] * batches for i, time in enumerate(seconds)}
    faster = {**durations, "0": [seconds[0] / engines] * batches}
    steps = chain(len(seconds))
    slow, fast = (simulate(steps, d, batches, schedule, groups=groups).makespan for d in (durations, faster))
    assert fast <= slow + 1e-9
