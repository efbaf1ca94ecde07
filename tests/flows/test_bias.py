"""Trained samples against issued ones: numbers worked by hand, properties, and the report of a run."""

import asyncio
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prefect import flow, get_client

from conf.schema import Bias
from flows.account import _bias, _of_bias, _show, _warn
from flows.bias import CUT, LEFT_OUT, UNKNOWN, BiasReport, Samples, compare, length_bin, read_samples
from flows.cli import main
from tasks.engines.toy import write_model
from tests.fakes.runs import Recorder
from tests.fakes.whole_run import WholeRun

NAN = math.nan


def samples(*rows: tuple[str, str, float, float, str]) -> Samples:
    groups, fates, lengths, rewards, finishes = zip(*rows, strict=True)
    return Samples(
        np.array(groups), np.array(fates), np.array(lengths, float), np.array(rewards, float), np.array(finishes)
    )


# One group trained, one dropped for its equal rewards, one of which half was too slow, one that never ended.
HAND = samples(
    ("a", "trained", 4, 1.0, "stop"),
    ("a", "trained", 8, 0.0, "stop"),
    ("b", "dropped/zero_variance", 3, 1.0, "stop"),
    ("b", "dropped/zero_variance", 4, 1.0, "stop"),
    ("c", "dropped/oversampled", 64, 0.0, "length"),
    ("c", "dropped/oversampled", NAN, NAN, ""),
    ("d", "dropped/oversampled", NAN, NAN, ""),
    ("d", "dropped/oversampled", NAN, NAN, ""),
)


def test_the_distance_is_the_largest_gap_between_the_distributions_and_adds_up_over_reasons() -> None:
    """Lengths: at 3 tokens 0/2 of the trained and 1/5 of all known are no longer; at 8 it is 2/2 and 4/5."""
    found = compare(HAND.lengths, HAND.fates)
    assert found is not None
    assert found.distance == pytest.approx(0.2)
    # At 3, where it is found first: short samples of b are missing (2/5 of 1/2), long ones of c are none there.
    assert found.parts == pytest.approx({"dropped/zero_variance": 0.2, "dropped/oversampled": 0.0})
    assert found.without == {"dropped/oversampled": 3 / 8}
    # With the three unknown ones beyond 8 tokens, only 4/8 of all are no longer than 8, but 2/2 of the trained.
    assert found.worst == pytest.approx(0.5)


def test_rewards_are_compared_over_those_that_were_scored() -> None:
    """Mean 0.5 against 0.6: at reward 0 it is 1/2 of the trained and 2/5 of all scored."""
    found = compare(HAND.rewards, HAND.fates)
    assert found is not None
    assert found.distance == pytest.approx(0.1)
    assert found.parts == pytest.approx({"dropped/zero_variance": 2 / 5 * 0.5, "dropped/oversampled": 1 / 5 * -0.5})


# Two groups of which every second response was cut at its deadline, one of them in a group that was dropped.
CUT_SHORT = samples(
    ("a", "trained", 4, 1.0, "stop"),
    ("a", "trained", 8, 0.0, "deadline"),
    ("b", "trained", 4, 1.0, "length"),
    ("b", "trained", 8, 0.0, "deadline"),
    ("c", "dropped/zero_variance", 4, 1.0, "stop"),
    ("c", "dropped/zero_variance", 8, 0.0, "deadline"),
)


def test_a_response_cut_at_its_deadline_may_have_become_any_longer() -> None:
    """At 8 tokens all trained responses have ended; of the issued ones only 3 in 6 are sure not to become longer."""
    found = compare(CUT_SHORT.lengths, CUT_SHORT.fates, CUT_SHORT.censored)
    assert found is not None
    assert (found.distance, found.worst) == pytest.approx((0.0, 0.5))
    assert found.without == {CUT: 0.5}
    report = BiasReport.of(CUT_SHORT)
    assert report.warning(Bias()) == (
        "lengths of trained samples are 0.00 to 0.50 from those of issued ones (bias.max_length 0.2; mean 6 against "
        "6): truncated/deadline accounts for 0.00 to 0.50"
    )
    assert report.metrics()["bias/unknown_length"] == 0  # they are counted as truncated/issued/deadline
    at_the_limit = samples(("a", "trained", 4, 1.0, "stop"), ("a", "trained", 8, 1.0, "length"))
    assert BiasReport.of(at_the_limit).warning(Bias()) == ""


def test_cut_and_unfinished_samples_count_together_by_hand() -> None:
    """Trained: 2, and 4 that was cut. Dropped: 4, and one that never ended. At 4 both trained ones have ended, of the
    four issued ones only two are sure to be no longer: 1 - 2/4. Below 2 only the unfinished one may lie: 1/4."""
    values, fates = np.array([2, 4, 4, NAN]), np.array(["trained", "trained", "dropped/x", "dropped/x"])
    found = compare(values, fates, np.array([False, True, False, False]))
    assert found is not None
    assert found.worst == pytest.approx(0.5)
    assert found.without == {"dropped/x": 0.25, CUT: 0.25}
    uncut = compare(values, fates)
    assert uncut is not None
    assert uncut.worst == pytest.approx(0.25)


def test_without_a_trained_sample_there_is_nothing_to_compare() -> None:
    assert compare(np.array([1.0, NAN]), np.array(["dropped/x", "trained"])) is None


FATES = st.sampled_from(["trained", "dropped/a", "dropped/b", LEFT_OUT])
ROWS = st.lists(st.tuples(FATES, st.one_of(st.integers(0, 9).map(float), st.just(NAN))), min_size=1, max_size=30)


@given(rows=ROWS, fill=st.lists(st.floats(-20, 20), min_size=30, max_size=30))
def test_what_is_unknown_may_be_anything_and_the_distance_is_never_beyond_its_worst(
    rows: list[tuple[str, float]], fill: list[float]
) -> None:
    fates, values = np.array([fate for fate, _ in rows]), np.array([value for _, value in rows])
    found = compare(values, fates)
    if found is None:
        return
    known = ~np.isnan(values)
    assert found.distance == pytest.approx(brute_force(values[known], fates[known]))
    assert math.fsum(found.parts.values()) == pytest.approx(found.distance, abs=1e-12)
    assert found.distance <= (fates[known] != "trained").mean() + 1e-12
    assert found.distance <= found.worst + 1e-12
    if (known | (fates != "trained")).all():  # the trained ones' values are theirs
        complete = np.where(known, values, fill[: len(values)])
        assert brute_force(complete, fates) <= found.worst + 1e-12


@given(rows=ROWS, more=st.lists(st.one_of(st.none(), st.integers(0, 20)), min_size=30, max_size=30))
def test_the_worst_is_the_largest_distance_of_any_lengths_that_cut_responses_may_have_had(
    rows: list[tuple[str, float]], more: list[int | None]
) -> None:
    fates, values = np.array([fate for fate, _ in rows]), np.array([value for _, value in rows])
    if not (fates[known := ~np.isnan(values)] == "trained").any():
        return
    fates, values = fates[known], values[known]
    longer = np.array([n or 0 for n in more[: len(values)]])
    censored = np.array([n is not None for n in more[: len(values)]])
    found = compare(values, fates, censored)
    assert found is not None
    assert found.worst >= found.distance

    def distance(true: np.ndarray) -> float:
        trained = values[fates == "trained"]
        return max(abs((trained <= x).mean() - (true <= x).mean()) for x in [*values, *true])

    assert distance(values + longer) <= found.worst + 1e-12
    assert max(distance(values), distance(np.where(censored, math.inf, values))) == pytest.approx(found.worst)


def brute_force(values: np.ndarray, fates: np.ndarray) -> float:
    trained = values[fates == "trained"]
    return max(abs((trained <= x).mean() - (values <= x).mean()) for x in values)


@given(length=st.integers(1, 2**20))
def test_a_bin_ends_at_a_power_of_two(length: int) -> None:
    low, _, high = length_bin(length).partition("-")
    assert int(low) <= length <= int(high or low)
    assert math.log2(int(high or low)).is_integer()


def test_bins_by_hand() -> None:
    assert [length_bin(n) for n in (0, 1, 2, 3, 4, 5, 64, 65, NAN)] == [
        "0", "1", "2", "3-4", "3-4", "5-8", "33-64", "65-128", UNKNOWN,
    ]  # fmt: skip


def test_truncation_and_dropping_are_told_by_length_and_what_never_ended_is_told_too() -> None:
    report = BiasReport.of(HAND)
    dropped, slow = "groups dropped/zero_variance", "groups dropped/oversampled"
    assert report.by_length() == [
        {"length": "3-4", "issued": 3, "trained": 1, "truncated": 0.0, slow: 0, dropped: 1},
        {"length": "5-8", "issued": 1, "trained": 1, "truncated": 0.0, slow: 0, dropped: 0},
        {"length": "33-64", "issued": 1, "trained": 0, "truncated": 1.0, slow: 1, dropped: 0},
        {"length": "unknown", "issued": 3, "trained": 0, "truncated": 0.0, slow: 1, dropped: 0},
    ]
    issued, trained = report.summary()
    assert issued == {
        "samples": "issued", "groups": 4, "count": 8, "of unknown length": 3, "truncated": "20.0%",
        "mean": "16.6", "median": "4", "p95": "52.8", "reward": "0.6",
    }  # fmt: skip
    assert (trained["count"], trained["mean"], trained["reward"], trained["truncated"]) == (2, "6", "0.5", "0.0%")
    assert report.metrics() == pytest.approx(
        {
            "bias/length": 0.2, "bias/length_worst": 0.5, "bias/reward": 0.1, "bias/reward_worst": 0.375,
            "bias/unknown_length": 3 / 8, "truncated/issued": 0.2, "truncated/issued/length": 0.2,
            "truncated/trained": 0.0,
        }
    )  # fmt: skip


def test_the_warning_says_what_is_beyond_which_limit_and_for_which_reason() -> None:
    report = BiasReport.of(HAND)
    assert report.warning(Bias(max_length=0.4, max_reward=0.9)) == (
        "lengths of trained samples are 0.20 to 0.50 from those of issued ones (bias.max_length 0.4; mean 6 against "
        "16.6): dropped/oversampled accounts for 0.00 to 0.38, dropped/zero_variance accounts for 0.20"
    )
    assert report.warning(Bias(max_length=0.5, max_reward=0.5)) == ""
    both = report.warning(Bias(max_length=0.1, max_reward=0.1))
    assert "bias.max_length 0.1" in both
    assert "bias.max_reward 0.1" in both
    assert "\n" not in both


# -- from a run's data


@pytest.fixture
def run(tmp_path: Path) -> WholeRun:
    """Three samples a prompt were asked for, two came; a third group never ended."""
    model = write_model(tmp_path / "model")
    run = WholeRun.start(tmp_path / "demo-001", model, "rollout.samples_per_prompt=3", "bias.max_length=0.6")
    run.prompts(1)
    run.issue(1)
    run.ledger.groups.issue(1, [("i000001-g002", 2)])
    run.rollout(1)
    run.score(1)
    run.update(1)
    run.ledger.groups.settle({"i000001-g000": "trained", "i000001-g002": "dropped/rollout_refused"})
    return run


def read(run: WholeRun) -> Samples | None:
    return read_samples(run.store, run.ledger, run.graph, 1, 3)


def test_every_issued_sample_of_an_iteration_has_its_fate(run: WholeRun) -> None:
    found = read(run)
    assert found is not None
    fates = dict(zip(*np.unique(found.fates, return_counts=True), strict=True))
    assert fates == {"trained": 2, LEFT_OUT: 1, "dropped/slow": 3, "dropped/rollout_refused": 3}
    assert np.isnan(found.lengths).sum() == 5  # one of each group that came, all of the one that did not
    assert sorted(found.rewards[~np.isnan(found.rewards)]) == [
        0.0,
        0.5,
        1.0,
        1.5,
    ]  # also of those dropped
    assert read_samples(run.store, run.ledger, run.graph, 2, 3) is None
    run.ledger.close()


def oversampled(folder: Path, reason: str, lengths: dict[str, list[int]]) -> BiasReport:
    """Two groups were trained, two samples of two tokens each; the rollout dropped a third one."""
    group = "i000001-g002"
    run = WholeRun.start(folder / "demo-001", write_model(folder / "model"))
    run.prompts(1)
    run.issue(1)
    run.ledger.groups.issue(1, [(group, 2)])
    run.rollout(1, dropped={group: reason}, dropped_lengths={group: lengths} if lengths else {})
    run.score(1, groups=2)
    run.update(1)
    run.ledger.groups.settle({"i000001-g000": "trained", "i000001-g001": "trained", group: f"dropped/{reason}"})
    found = read_samples(run.store, run.ledger, run.graph, 1, 2)
    run.ledger.close()
    assert found is not None
    assert len(found.groups) == 6
    return BiasReport.of(found)


def test_surplus_groups_in_order_have_their_lengths_and_say_nothing_of_rewards(tmp_path: Path) -> None:
    report = oversampled(tmp_path, "surplus", {"stop": [2], "length": [2]})
    assert report.warning(Bias()) == ""
    assert report.metrics() == {
        "bias/length": 0.0, "bias/length_worst": 0.0, "bias/reward": 0.0, "bias/reward_worst": 0.0,
        "bias/unknown_length": 0.0, "truncated/issued": 5 / 6, "truncated/issued/length": 5 / 6,
        "truncated/trained": 1.0,
    }  # fmt: skip


def test_groups_that_were_too_slow_show_by_the_lengths_that_are_known_of_them(tmp_path: Path) -> None:
    """At 2 tokens all trained samples have ended, but 4 of 6 issued ones, or of 5 where one is not known."""
    report = oversampled(tmp_path / "all", "oversampled", {"stop": [8, 9]})
    assert report.length is not None
    assert (report.length.distance, report.length.worst) == pytest.approx((1 / 3, 1 / 3))
    assert report.reward is not None
    assert (report.reward.distance, report.reward.worst) == pytest.approx((0, 1 / 3))  # nobody scored them
    assert "lengths of trained samples are 0.33 from those of issued ones" in report.warning(Bias())
    report = oversampled(tmp_path / "one", "oversampled", {"stop": [8]})
    assert report.length is not None
    assert (report.length.distance, report.length.worst) == pytest.approx((1 / 5, 1 / 3))
    assert report.length.without == pytest.approx({"dropped/oversampled": 1 / 6})


def test_the_command_prints_the_report_over_a_run_and_over_an_iteration(
    run: WholeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.ledger.close()
    for arguments in ([], ["1"]):
        with pytest.raises(SystemExit) as ended:
            main(["bias", str(run.folder), *arguments])
        assert ended.value.code == 0
        out = capsys.readouterr().out
        assert "length: Kolmogorov-Smirnov distance 0.00 to 0.56: dropped/rollout_refused accounts for" in out
        assert "warning: rewards of trained samples are 0.50 to" in out
        assert "bias.max_length" not in out  # 0.56 is within 0.6
    with pytest.raises(SystemExit) as ended:
        main(["bias", str(run.folder), "7"])
    assert ended.value.code == 1
    assert "must have iteration 7 that was trained on responses, but there is none" in capsys.readouterr().err


def test_an_iteration_warns_in_the_terminal_and_leaves_its_report_in_the_ui(run: WholeRun, prefect_api: str) -> None:
    display = Recorder()
    opened: Any = SimpleNamespace(
        store=run.store, ledger=run.ledger, graph=run.graph, experiment=run.loaded.experiment, display=display
    )

    @flow(name="bias")
    async def account() -> dict[str, float]:
        report = _bias(opened, 1)
        assert report is not None
        _warn(opened, 1, report)
        await _show(opened, [_of_bias(1, report)])
        return report.metrics()

    async def run_and_read() -> tuple[dict[str, float], Any]:
        values = await account()
        async with get_client() as client:
            found = await client.request("GET", "/artifacts/{key}/latest", path_params={"key": "bias"})
        return values, found.json()

    values, artifact = asyncio.run(run_and_read())
    assert values["bias/reward"] == 0.5
    assert '"length": "2"' in artifact["data"]
    assert "reward: Kolmogorov-Smirnov distance 0.50 to" in artifact["description"]
    assert [text for kind, text in display.events if kind == "message"] == [
        f"warning: iteration 1: {BiasReport.of(read(run)).warning(run.loaded.experiment.bias)}"  # type: ignore[arg-type]
    ]
    run.ledger.close()
