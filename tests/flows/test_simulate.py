"""The planner: schedules worked by hand, rules that hold for any graph and schedule, and a past run predicted."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import flow

from conf.errors import ConfigError
from conf.load import load
from conf.schema import Schedule
from data.accounts import StageRow, Wait
from data.ledger import Ledger
from flows.cli import main
from flows.forecast import Case, Costs, Forecast, Layout, costs_of, recommend, schedule_text
from flows.run import RUN, _iterations
from flows.simulate import FULL_QUEUE, NOTHING_LEFT, PoolTime, Simulated, Step, lower_bound, simulate
from flows.stage_times import (
    OUTSIDE,
    Constant,
    LogNormal,
    PastRun,
    Recorded,
    Uniform,
    generator,
    longest,
    parse_time,
    read_run,
)
from tests.fakes.runs import noop_run
from tests.fakes.stages import paced

ASYNC = ("schedule.kind=async", "update.correction.kind=ratio")
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


def test_a_stage_that_skips_batches_and_what_needs_it_run_in_the_others() -> None:
    steps = [*RTP, Step("evaluate", ("publish",), "engines", due=lambda batch: batch % 2 == 0),
             Step("after", ("evaluate", "update"), "x", closing=True)]  # fmt: skip
    durations = constant(2, rollout=10, update=5, publish=1, evaluate=3, after=2)
    result = simulate(steps, durations, 2, SYNC)
    assert times(result, "evaluate") == [(2, 33, 36)]  # batch 2 from 17, the end of `after`
    assert times(result, "after") == [(1, 15, 17), (2, 36, 38)]


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
    durations = {s.name: [float(draw(st.integers(0, 5))) for _ in range(batches)] for s in steps}
    return SimpleNamespace(
        steps=steps, durations=durations, batches=batches, groups=groups, schedule=draw(schedules(groups)),
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
        assert all(slots[slot.batch, need].end <= slot.start for need in slot.step.needs)
        assert s.schedule.ahead or all(o.end <= slot.start for o in result.slots if o.batch == slot.batch - 1)
        assert slot.end - slot.start == s.durations[slot.node][slot.batch - 1]
    for pool in "ab":
        own = [slot for slot in result.slots if slot.pool == pool]
        assert all(before.end <= after.start - after.hand_over for before, after in pairwise(own))
    for before, after in pairwise([slot for slot in result.slots if slot.step.does == "rollout"]):
        assert before.end <= after.start
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


# -- times


@pytest.mark.parametrize(
    ("text", "time"),
    [("40", Constant(40)), ("lognormal(40, 10)", LogNormal(40, 10)), ("uniform(0,2.5)", Uniform(0, 2.5))],
)
def test_times_are_seconds_or_a_distribution(text: str, time: Any) -> None:
    assert parse_time(text, "--time rollout") == time


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "nan", "inf", "lognormal(1)", "lognormal(0,1)", "uniform(3,2)", "gauss(1,2)"]
)
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--time rollout must be seconds >= 0, lognormal"):
        parse_time(text, "--time rollout")


def test_draws_have_the_declared_mean_and_repeat_with_their_seed() -> None:
    for time, mean, sd in ((LogNormal(40, 10), 40, 10), (Uniform(20, 50), 35, 30 / math.sqrt(12))):
        drawn = time.draw(generator(1, "rollout"), 20_000)
        assert drawn.mean() == pytest.approx(mean, rel=0.02)
        assert drawn.std() == pytest.approx(sd, rel=0.05)
        assert (drawn == time.draw(generator(1, "rollout"), 20_000)).all()
        assert (drawn != time.draw(generator(1, "update"), 20_000)).any()
    assert Recorded([1, 2, 3]).draw(generator(1, "x"), 5).tolist() == [1, 2, 3, 1, 2]


def test_the_longest_of_many_is_drawn_as_if_all_were() -> None:
    one_by_one = LogNormal(8, 6).draw(generator(1, "a"), 64 * 4000).reshape(4000, 64).max(1)
    at_once = longest(LogNormal(8, 6), 64, generator(1, "b"), 4000)
    assert np.quantile(at_once, [0.1, 0.5, 0.9]) == pytest.approx(np.quantile(one_by_one, [0.1, 0.5, 0.9]), rel=0.05)


# -- an experiment


def experiment(*overrides: str) -> Any:
    return load("conf/smollm2_arithmetic.yaml", ["evaluate.every=0", "iterations=50", *overrides]).experiment


def forecast(*overrides: str, tail: Any = None, hand_over: float = 0.0, **seconds: float) -> Forecast:
    e = experiment(*overrides)
    return Forecast(e, costs_of(e, None, {n: Constant(s) for n, s in seconds.items()}, tail, hand_over))


def test_stages_take_less_on_more_devices_and_a_rollout_never_less_than_its_longest_response() -> None:
    f = forecast("pools.rollout.engines=2", "pools.train.ranks=2", rollout=40, reference=10, update=20, publish=1)
    assert f.declared.total == 4
    more = Layout({"rollout": 4, "train": 1}, {}, 4, 1)
    assert f.case(f.declared, SYNC, 50).result.makespan == 50 * (40 + 10 + 20 + 1)
    assert f.case(more, SYNC, 50).result.makespan == 50 * (20 + 20 + 40 + 1)
    tailed = Forecast(f.experiment, replace(f.costs, tail=Constant(35)))
    assert tailed.case(f.declared, SYNC, 50).result.makespan == 50 * (40 + 10 + 20 + 1)
    assert tailed.case(more, SYNC, 50).result.makespan == 50 * (35 + 20 + 40 + 1)


def test_effective_samples_count_over_all_devices() -> None:
    case = (f := forecast(rollout=40, reference=10, update=30)).case(f.declared, SYNC, 50)
    assert case.samples_per_s == 64 / 80
    assert case.busy == 0.5  # two devices, one of which works at a time


def test_engines_of_several_devices_count_as_such() -> None:
    f = forecast("rollout.sglang={tp_size: 4}", "pools.rollout.engines=2", rollout=1, reference=1, update=1)
    assert f.declared.devices == {"rollout": 8, "train": 1}


def test_every_alternative_uses_as_many_devices() -> None:
    f = forecast("pools.rollout.engines=6", "pools.train.ranks=10", rollout=40, reference=10, update=30)
    cases = f.alternatives(ONE_OFF)
    assert {case.layout.total for case in cases} == {16}
    assert [schedule_text(case.schedule) for case in cases[1:]] == [
        "sync", "sync", "one_step_off", *(f"async, lag <= 4, publish every {n}" for n in (1, 2, 4))
    ]  # fmt: skip


def test_the_recommendation_stays_within_the_declared_lag_and_says_what_more_would_give() -> None:
    f = forecast("pools.rollout.engines=4", "pools.train.ranks=4", hand_over=10, rollout=40, update=30, reference=10)
    text = recommend(f.alternatives(SYNC))
    # co-located 20 + 10 + 5 + 15 + 10 = 60 s an iteration; declared 80 s, each pool half idle
    expected = (
        "Recommended: co-located on 8, sync: 1.07 samples/s, 1.33 times the declared, because devices work 67% of the "
        "time instead of 50% (train now idles 50%: waits for rollout)."
    )
    assert text[: len(expected)] == expected
    assert "If lag up to 1 is accepted, with a correction for off-policy data: 4 for rollout, 4 for training" in text


def test_where_rarer_publishes_make_the_difference_the_recommendation_says_so() -> None:
    f = forecast("iterations=100", hand_over=60, rollout=10, update=10, reference=1, publish=8)
    text = recommend(f.alternatives(Schedule("async", max_lag=3)))
    assert "publish every 2: " in text
    # 100 x (10 + 10 + 1) and 8 for each publish, 50 instead of 100; every 4 would gain less than 5% more
    assert text.endswith("because the stages take 2,500 device seconds instead of 2,900.")


def test_what_is_declared_is_recommended_where_nothing_is_faster() -> None:
    f = forecast(hand_over=60, rollout=40, update=30, reference=10)
    text = recommend(f.alternatives(ONE_OFF))  # 64 x 50 samples in 50 x 40 + 40 s
    assert text == "Recommended: as declared, 1.57 samples/s: nothing else within its lag gains 5%."


def test_less_lag_is_recommended_where_it_costs_no_time() -> None:
    f = forecast(rollout=40, update=30, reference=10)  # handing over takes no time: co-located never idles
    text = recommend(f.alternatives(ONE_OFF))
    assert text == "Recommended: co-located on 2, sync: 1.6 samples/s, within 5% of the declared, at lag <= 0."


# -- a past run


@flow(name="recorded-run")
async def recorded_run(folder: str, overrides: list[str]) -> None:
    with noop_run(Path(folder), paced(0.4, 0.1, 0.4), 4, overrides) as run:
        (Path(folder) / "config.yaml").write_text(run.loaded.text)
        RUN.set(run)
        await _iterations(run)


@pytest.fixture(scope="module", params=[[], [*ASYNC, "schedule.max_lag=2"]], ids=["sync", "async"])
def recorded(request: pytest.FixtureRequest, prefect_api: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four iterations of stages that sleep, on a real Prefect server."""
    folder = tmp_path_factory.mktemp("runs") / "noop-001"
    asyncio.run(recorded_run(str(folder), request.param))
    return folder


def test_a_run_is_predicted_from_what_it_recorded(recorded: Path) -> None:
    """In step within a tenth. Ahead not above it: what Prefect takes to start a stage is in no row."""
    past = read_run(str(recorded))
    e = replace(past.experiment, iterations=past.iterations)
    f = Forecast(e, costs_of(e, past, {}, None, 0.0))
    predicted = f.case(f.declared, e.schedule, 4)
    assert past.iterations == 4
    assert predicted.result.makespan <= 1.1 * past.makespan
    assert predicted.samples_per_s == pytest.approx(16 / predicted.result.makespan)  # 4 samples an iteration
    if not e.schedule.ahead:
        assert predicted.result.makespan >= 0.9 * past.makespan
    else:
        assert predicted.result.makespan < f.case(f.declared, SYNC, 4).result.makespan


Row = tuple[int, str, str, float, float, Mapping[str, float]]


def write_run(
    folder: Path, rows: Sequence[Row | StageRow], times: Sequence[tuple[float, float]] = ((50, 1), (50, 1)), *over: str
) -> Path:
    """A run with these stage rows. times: seconds of each iteration, and those of them that are outside stages."""
    folder.mkdir()
    small = ["evaluate.every=0", "iterations=9", "update.checkpoint_every=2"]
    loaded = load("conf/smollm2_arithmetic.yaml", [*small, *over])
    (folder / "config.yaml").write_text(loaded.text)
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.open_run(folder.name, loaded.digest, loaded.text)
    for row in rows:
        if not isinstance(row, StageRow):
            number, node, state, started, ended, waits = row
            reach, spans = started, []
            for cause, seconds in waits.items():
                spans.append(Wait(cause, reach, reach := reach + seconds))
            row = StageRow(number, node, state, started, ended, tuple(spans))
        ledger.accounts.record_stage(row)
    for number, (seconds, outside) in enumerate(times, 1):
        rate = 64 / seconds
        ledger.accounts.record_metrics(
            number,
            {
                "time/iteration": seconds,
                "time/outside_stages": outside,
                "throughput/effective_samples_per_s": rate,
            },
        )
    ledger.close()
    return folder


ROWS = [
    (1, "rollout", "failed", 0.0, 20.0, {}),
    (1, "rollout", "completed", 100.0, 120.0, {}),
    (1, "reward", "failed", 120.0, 130.0, {}),  # the next attempt was committed, but killed before it had a row
    (1, "reference", "completed", 100.0, 125.0, {"AwaitingUpstream": 20.0}),
    (1, "update", "completed", 100.0, 149.0, {"AwaitingUpstream": 25.0}),
    (2, "rollout", "completed", 150.0, 175.0, {}),
    (2, "reference", "completed", 150.0, 180.0, {"AwaitingUpstream": 24.0, "AwaitingPool": 1.0}),
    (2, "update", "completed", 150.0, 195.0, {"AwaitingUpstream": 30.0}),
    (2, "checkpoint", "completed", 195.0, 199.0, {}),
    (3, "rollout", "completed", 200.0, 220.0, {}),
]


def test_a_runs_times_are_the_work_of_its_finished_iterations(tmp_path: Path) -> None:
    past = read_run(str(write_run(tmp_path / "r", ROWS)))
    assert seconds_of(past) == {
        "rollout": [20, 25], "reference": [5, 5], "update": [24, 15], "checkpoint": [4], OUTSIDE: [1]
    }  # fmt: skip
    assert (past.iterations, past.makespan, past.trained) == (2, 100, 64)


def test_the_runs_own_makespan_comes_out_of_its_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = str(write_run(tmp_path / "r", ROWS))
    with pytest.raises(SystemExit) as done:
        main(["plan", "--simulate", "--from", folder])
    printed = capsys.readouterr().out
    assert done.value.code == 0
    assert "makespan           100.0 s; recorded 100.0 s (+0.0%)" in printed
    assert max(map(len, printed.splitlines())) <= 80
    with pytest.raises(SystemExit):
        main(["plan", "--simulate", "--from", folder, "pools.rollout.engines=5", "--time", "update=8"])
    # rollouts take 20 / 5 and 25 / 5 s, updates 8 s: 4 + 5 + 8 + 1 and 5 + 5 + 8 + 4 + 1
    assert "makespan           41.0 s; recorded 100.0 s (-59.0%)" in capsys.readouterr().out


def seconds_of(past: PastRun) -> dict[str, list[float]]:
    return {node: list(time.seconds) for node, time in past.times.items()}


def printed_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as done:
        main(["plan", "--simulate", *arguments])
    printed = capsys.readouterr()
    assert done.value.code == 0, printed.err
    return printed.out


OVERLAPPING = [  # one step off, on two pools: 190 s and then 3 s of accounting
    (1, "rollout", "completed", 0.0, 40.0, {}),
    (1, "reference", "completed", 0.0, 60.0, {"AwaitingUpstream": 40.0}),
    (1, "update", "completed", 0.0, 90.0, {"AwaitingUpstream": 60.0}),
    (2, "rollout", "completed", 35.0, 80.0, {}),  # from 35 on in the tail of the first
    StageRow(2, "reward", "completed", 35.0, 81.0, (Wait("AwaitingReward", 35, 50), Wait("AwaitingReward", 51, 80))),
    (2, "reference", "completed", 35.0, 110.0, {"AwaitingUpstream": 45.0, "AwaitingPool": 10.0}),
    (2, "update", "completed", 35.0, 140.0, {"AwaitingUpstream": 75.0}),
    (3, "rollout", "completed", 40.0, 130.0, {"AwaitingPool": 40.0, "AwaitingWeights": 10.0}),
    (3, "reference", "completed", 40.0, 160.0, {"AwaitingUpstream": 90.0, "AwaitingPool": 10.0}),
    (3, "update", "completed", 40.0, 190.0, {"AwaitingUpstream": 120.0}),
]  # fmt: skip
ONE_STEP_OFF = ("schedule.kind=one_step_off", "update.correction.kind=ratio")


def test_the_times_of_a_run_whose_stages_overlap_predict_it_and_its_serial_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_run(tmp_path / "r", OVERLAPPING, [(90, 0), (50, 0), (53, 3)], *ONE_STEP_OFF))
    assert seconds_of(past := read_run(folder)) == {
        "rollout": [40, 40, 40], "reward": [1], "reference": [20, 20, 20], "update": [30, 30, 30], OUTSIDE: [1]
    }  # fmt: skip
    assert (past.makespan, past.trained, past.hand_over) == (193, 64, 0)
    assert (
        "3 iterations simulated, one_step_off\n  makespan           193.0 s; recorded 193.0 s (+0.0%)"
        in printed_plan(capsys, "--from", folder)
    )
    serial = printed_plan(capsys, "--from", folder, "schedule.kind=sync", "update.correction.kind=none")
    assert "3 iterations simulated, sync\n  makespan           273.0 s; " in serial


CO_LOCATED = ("pools.train=null", "pools.rollout.roles=[rollout,train]")
HANDED_OVER = [  # 50 s of which 8 change hands, and 1 s outside stages
    (1, "rollout", "completed", 0.0, 20.0, {}),
    (1, "reference", "completed", 20.0, 28.0, {"AwaitingHandover": 3.0}),
    (1, "update", "completed", 20.0, 43.0, {"AwaitingUpstream": 8.0}),
    (1, "publish", "completed", 20.0, 50.0, {"AwaitingUpstream": 23.0, "AwaitingHandover": 5.0}),
    (2, "rollout", "completed", 51.0, 71.0, {}),
    (2, "reference", "completed", 71.0, 79.0, {"AwaitingHandover": 3.0}),
    (2, "update", "completed", 71.0, 94.0, {"AwaitingUpstream": 8.0}),
    (2, "publish", "completed", 71.0, 101.0, {"AwaitingUpstream": 23.0, "AwaitingHandover": 5.0}),
]


def test_a_co_located_run_gives_the_seconds_of_its_hand_overs_and_counts_them_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(write_run(tmp_path / "r", HANDED_OVER, [(51, 9), (51, 9)], *CO_LOCATED))
    past = read_run(folder)
    assert (past.hand_over, seconds_of(past)[OUTSIDE]) == (4, [1])
    assert "makespan           102.0 s; recorded 102.0 s (+0.0%)" in printed_plan(capsys, "--from", folder)
    assert "makespan           86.0 s; " in printed_plan(capsys, "--from", folder, "--hand-over", "0")


def test_the_experiments_own_schedule_is_simulated_and_another_one_by_override(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    plan = [
        "conf/smollm2_arithmetic.yaml",
        "iterations=3",
        "--time=rollout=40",
        "--time=reference=20",
        "--time=update=30",
    ]
    assert "3 iterations simulated, sync\n  makespan           270.0 s" in printed_plan(capsys, *plan)
    assert "simulated, one_step_off\n  makespan           190.0 s" in printed_plan(capsys, *plan, *ONE_STEP_OFF)
    queued = (*ASYNC, "schedule.max_lag=2", "schedule.queue_groups=8")
    ahead = printed_plan(capsys, *plan, *queued)
    assert "simulated, async, lag <= 2, publish every 1, queue 8 groups\n" in ahead


def test_a_run_of_other_work_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(write_run(tmp_path / "r", ROWS))
    for override, found in (
        ("rollout.samples_per_prompt=4", "the same samples an iteration, expected 32, got 64: give --time"),
        ("rollout.max_new_tokens=64", "the same rollout.max_new_tokens, expected 64, got 12"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", "--simulate", "--from", folder, override])
        assert found in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--simulate"], "needs the time of rollout, reference, update: --from RUN takes them from a past run"),
        (["--simulate", "--time", "rolout=1"], "--time must name a node of the graph"),
        (["--simulate", "--time", "rollout"], "--time must be written as NODE=TIME, got 'rollout'"),
        (
            ["--simulate", *(f"--time={node}=0" for node in ("rollout", "reference", "update"))],
            "--time must give a stage more than 0 seconds",
        ),
        (["--simulate", "--hand-over", "nan"], "--hand-over must be seconds >= 0, got nan"),
        (["--time", "rollout=1"], "--time needs --simulate"),
        (["--simulate", "--from", "no/such"], "no/such must be the folder of a run"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as done:
        main(["plan", "conf/smollm2_arithmetic.yaml", *arguments])
    assert done.value.code == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_case_says_where_most_device_time_is_idle() -> None:
    f = forecast("pools.rollout.engines=1", "pools.train.ranks=3", rollout=40, reference=10, update=30)
    case: Case = f.case(f.declared, SYNC, 50)
    assert case.largest_idle == ("train", "rollout", 0.5)  # 3 devices for 40 s of each 80
    assert isinstance(f.costs, Costs)
