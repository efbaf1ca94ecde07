"""What an experiment would take: times, layouts, what is recommended, and the command `ratchet plan --simulate`."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conf.errors import ConfigError
from conf.load import load
from conf.schema import Schedule
from flows.cli import main
from flows.forecast import Case, Costs, Forecast, Layout, costs_of, recommend, schedule_text
from flows.stage_times import Constant, LogNormal, Recorded, Uniform, generator, longest, parse_time
from flows.steps import Took

SYNC, ONE_OFF = Schedule(), Schedule("one_step_off")
ASYNC = ("schedule.kind=async", "update.correction.kind=ratio")
ONE_STEP_OFF = ("schedule.kind=one_step_off", "update.correction.kind=ratio")


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
    took = [Took(1), Took(2), Took(3)]
    assert Recorded(took).first(5) == [*took, *took[:2]]


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


# -- the command


def printed_plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as done:
        main(["plan", "--simulate", *arguments])
    printed = capsys.readouterr()
    assert done.value.code == 0, printed.err
    return printed.out


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
