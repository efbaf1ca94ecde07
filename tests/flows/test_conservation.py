"""`ratchet ledger` by hand: two iterations of two groups; one is trained, one dropped, the others are in flight."""

from pathlib import Path

import pytest

from data.accounts import RUNNING, StageRow, Wait
from flows.cli import main
from flows.conservation import Cost, conservation
from flows.throughput import device_counts, discarded, run_devices, throughput
from tasks.engines.toy import write_model
from tests.fakes.whole_run import WholeRun


def worked(
    run: WholeRun,
    iteration: int,
    node: str,
    pool: str,
    start: float,
    end: float,
    *waits: Wait,
    state: str = "completed",
    **spent: dict[str, int],
) -> None:
    run.ledger.accounts.record_stage(StageRow(iteration, node, state, start, end, waits, pool, spent=spent))


@pytest.fixture
def run(tmp_path: Path) -> WholeRun:
    run = WholeRun.start(tmp_path / "demo-001", write_model(tmp_path / "model"), "pools.rollout.engines=3")
    run.prompts(1)
    run.issue(1)
    run.rollout(1)
    run.score(1)
    run.update(1)
    run.ledger.groups.settle({"i000001-g000": "trained"})
    worked(run, 1, "rollout", "rollout", 10.0, 14.0)
    worked(run, 1, "reward", "cpu", 14.0, 20.0)  # no device
    worked(run, 1, "update", "train", 15.0, 16.0, state="failed")
    worked(run, 1, "update", "train", 20.0, 23.0, Wait("AwaitingUpstream", 20.0, 21.0))
    worked(run, 1, "publish", "rollout", 23.0, 24.0)  # for no group
    run.prompts(2)
    run.issue(2)
    return run


def test_every_group_is_counted_once_with_what_it_cost(run: WholeRun) -> None:
    run.ledger.accounts.record_metrics(1, {"time/iteration": 15.0})
    found = conservation(run.folder)
    rewards = len(run.loaded.experiment.reward.functions)
    assert found.unbalanced == []
    assert found.outcomes == {
        "trained": Cost(1, 2, 2, 4, 2 * rewards, 6.0, 3.0),  # half of 4 s on 3 engines; all of 1 + 2 s on a rank
        "dropped/slow": Cost(1, 2, 1, 4, 2 * rewards, 6.0, 0.0),
        "waiting": Cost(),
        "in flight": Cost(2, 0, 3, 0, 0, 0.0, 0.0),
    }
    assert found.total == Cost(4, 4, 6, 8, 4 * rewards, 12.0, 3.0)
    assert found.device_s == 15.0 * 4
    run.rollout(2)
    after = conservation(run.folder).outcomes
    assert (after["in flight"].groups, after["waiting"].groups, after["waiting"].response_tokens) == (0, 2, 8)
    run.ledger.close()


def test_a_second_of_a_device_counts_once_where_rollouts_overlap(tmp_path: Path) -> None:
    run = WholeRun.start(tmp_path / "r", write_model(tmp_path / "model"), "pools.rollout.engines=3")
    for number, start in ((1, 0.0), (2, 2.0)):
        run.prompts(number)
        run.issue(number)
        worked(run, number, "rollout", "rollout", start, 10.0)
    run.rollout(1)
    run.ledger.close()
    outcomes = conservation(run.folder).outcomes
    # 0-2 is the first's, 2-10 half of each: 6 s and 4 s on 3 engines, not 10 s and 8 s.
    assert (outcomes["waiting"].rollout_device_s, outcomes["in flight"].rollout_device_s) == (18.0, 12.0)


def test_calls_on_answers_that_no_row_holds_count_for_their_group(tmp_path: Path) -> None:
    run = WholeRun.start(tmp_path / "r", write_model(tmp_path / "model"))
    run.prompts(1)
    run.issue(1)
    run.rollout(1)
    run.score(1)
    rewards = len(run.loaded.experiment.reward.functions)
    first, second, third = ("i000001-g000", "i000001-g001", "i000001-g009")
    # The second group was generated again after two answers were scored; a rollout that began anew sent no g009.
    worked(run, 1, "reward", "cpu", 0, 1, reward_calls={first: 2 * rewards, second: 2 * rewards + 6, third: 5})
    worked(run, 1, "rollout", "rollout", 0, 1, response_tokens={first: 4, second: 7})
    run.ledger.close()
    outcomes = conservation(run.folder).outcomes
    assert (outcomes["waiting"].reward_calls, outcomes["waiting"].response_tokens) == (2 * rewards, 4)
    assert (outcomes["dropped/slow"].reward_calls, outcomes["dropped/slow"].response_tokens) == (2 * rewards + 6, 7)
    assert outcomes["not issued"] == Cost(reward_calls=5)


def test_what_an_attempt_took_that_failed_or_was_killed_counts_with_what_the_last_one_took(tmp_path: Path) -> None:
    """A rollout of 4 tokens a group, and a reward, each at the third attempt."""
    run = WholeRun.start(tmp_path / "r", write_model(tmp_path / "model"))
    run.prompts(1)
    run.issue(1)
    first, second, third = ("i000001-g000", "i000001-g001", "i000001-g002")
    worked(run, 1, "rollout", "rollout", 0, 2, state="failed", response_tokens={first: 4, third: 2})
    worked(run, 1, "rollout", "rollout", 3, 4, state=RUNNING, response_tokens={second: 1})
    before = conservation(run.folder).outcomes
    assert (before["in flight"].groups, before["in flight"].response_tokens) == (2, 5)
    assert before["not issued"].response_tokens == 2  # as far as is known: the next one may send it again
    worked(run, 1, "rollout", "rollout", 5, 9, response_tokens={first: 4, second: 4})
    run.rollout(1)
    worked(run, 1, "reward", "cpu", 9, 10, state="failed", reward_calls={first: 3})
    worked(run, 1, "reward", "cpu", 11, 12, state="failed", reward_calls={first: 1, second: 2})
    worked(run, 1, "reward", "cpu", 13, 14, reward_calls={first: 4, second: 4})
    run.score(1)
    run.update(1)
    run.ledger.groups.settle({first: "trained"})
    found = conservation(run.folder)
    trained, dropped = found.outcomes["trained"], found.outcomes["dropped/slow"]
    assert (trained.response_tokens, trained.reward_calls) == (4 + 4, 3 + 1 + 4)
    assert (dropped.response_tokens, dropped.reward_calls) == (1 + 4, 2 + 4)
    assert (found.total.groups, found.total.response_tokens, found.total.reward_calls) == (2, 15, 14)
    assert found.total.rollout_device_s == pytest.approx(2 + 1 + 4)
    assert found.outcomes["not issued"].rollout_device_s == pytest.approx(7 * 2 / 15)
    measured = discarded(run.store, run.graph, run.loaded.experiment, 1, run.ledger.accounts.stages())
    calls = 14 - 4 * len(run.loaded.experiment.reward.functions)  # those on the four rows
    assert measured == {"rollout/discarded_tokens": 15 - 8, "reward/discarded_calls": calls}
    assert throughput(run.store, run.graph, run.loaded.experiment, 1, {"time/iteration": 10.0} | measured) == {
        "throughput/effective_samples_per_s": 0.2,
        "throughput/effective_tokens_per_s": 0.4,
        "throughput/generated_tokens_per_s": 1.5,  # 8 tokens in rows, and 7 that no row holds
        "throughput/effective_samples_per_device_s": 0.1,
    }
    run.ledger.close()


def test_an_update_that_trained_nothing_has_taken_its_seconds_all_the_same(tmp_path: Path) -> None:
    run = WholeRun.start(tmp_path / "r", write_model(tmp_path / "model"))
    run.prompts(1)
    run.issue(1)
    run.rollout(1)
    run.score(1)
    worked(run, 1, "update", "train", 20.0, 24.0, state="failed")
    run.ledger.close()
    outcomes = conservation(run.folder).outcomes
    assert {name: cost.train_device_s for name, cost in outcomes.items() if cost.groups} == {
        "waiting": 2.0, "dropped/slow": 2.0
    }  # fmt: skip


def test_the_command_prints_the_balance_and_says_where_there_is_none(
    run: WholeRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run.ledger.accounts.record_metrics(1, {"time/iteration": 15.0})
    run.ledger.close()
    with pytest.raises(SystemExit) as ended:
        main(["ledger", str(run.folder)])
    lines = capsys.readouterr().out.splitlines()
    assert ended.value.code == 0
    assert lines[-3:] == [
        "issued 4 = dropped/slow 1 + in flight 2 + trained 1 + waiting 0",
        "device seconds that went into trained groups: 60.0%",
        "of all devices' 60.0 s in ended iterations: 15.0%",
    ]
    (run.folder / "data/stages/000001/prompts.json").unlink()
    with pytest.raises(SystemExit) as ended:
        main(["ledger", str(run.folder)])
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert "group i000001-g000 of iteration 1: unknown: in the ledger (trained), but no prompt drew it" in out
    assert "2 group(s) not balanced; `ratchet fsck" in out


def test_throughput_counts_what_was_dropped_and_thrown_away_and_every_device(run: WholeRun) -> None:
    graph, experiment = run.graph, run.loaded.experiment
    measured = {"time/iteration": 10.0, "rollout/discarded_tokens": 3.0}
    assert throughput(run.store, graph, experiment, 1, measured) == {
        "throughput/effective_samples_per_s": 0.2,  # 2 samples of the group that was trained
        "throughput/effective_tokens_per_s": 0.4,  # of 2 tokens each
        "throughput/generated_tokens_per_s": 1.1,  # 4 samples of 2 tokens, and 3 tokens thrown away
        "throughput/effective_samples_per_device_s": 0.05,  # 3 engines, 1 rank
    }
    run.ledger.close()


def test_devices_that_engines_and_trainer_share_count_once(tmp_path: Path) -> None:
    pools = "pools={all: {roles: [rollout, train], engines: 2, ranks: 3}, rollout: null, train: null}"
    graph = "graph={extends: grpo, " + ", ".join(
        f"{name}: {{pool: all}}" for name in ("rollout", "reference", "update", "publish", "evaluate")
    )
    run = WholeRun.start(
        tmp_path / "r", write_model(tmp_path / "model"), pools, graph + "}", "rollout.sglang={tp_size: 2}"
    )
    assert device_counts(run.loaded.experiment) == {"all": 4, "cpu": 0}
    assert run_devices(run.loaded.experiment, run.graph) == 4
    run.ledger.close()
