"""`ratchet ledger` by hand: two iterations of two groups; one is trained, one dropped, the others are in flight."""

from pathlib import Path

import pytest

from data.accounts import StageRow, Wait
from flows.cli import main
from flows.conservation import Cost, conservation
from flows.throughput import device_counts, run_devices, throughput
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
) -> None:
    run.ledger.accounts.record_stage(StageRow(iteration, node, state, start, end, waits, pool))


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
    # The second group was generated again after two answers were scored; a rollout that began anew sent no g009.
    run.score(1, discarded_calls={"i000001-g001": 6, "i000001-g009": 5})
    run.ledger.close()
    outcomes = conservation(run.folder).outcomes
    rewards = len(run.loaded.experiment.reward.functions)
    assert outcomes["waiting"].reward_calls == 2 * rewards
    assert outcomes["dropped/slow"].reward_calls == 2 * rewards + 6


def test_what_a_batch_generated_before_it_lost_its_engines_is_in_the_ledger_and_in_the_throughput(
    tmp_path: Path,
) -> None:
    run = WholeRun.start(tmp_path / "r", write_model(tmp_path / "model"))
    run.prompts(1)
    run.issue(1)
    # 11 tokens for nothing: 6 for a group that was sent again, 5 for one that was not and so was never issued.
    run.rollout(1, discarded_tokens={"i000001-g001": 6, "i000001-g009": 5})
    run.score(1)
    run.update(1)
    run.ledger.groups.settle({"i000001-g000": "trained"})
    measured = {"time/iteration": 10.0, "rollout/discarded_tokens": 11.0}
    values = throughput(run.store, run.graph, run.loaded.experiment, 1, measured)
    run.ledger.close()
    outcomes = conservation(run.folder).outcomes
    assert outcomes["trained"].response_tokens == 4  # 2 samples of 2 tokens
    assert outcomes["dropped/slow"].response_tokens == 4 + 6
    assert values["throughput/effective_tokens_per_s"] == 0.4
    assert values["throughput/generated_tokens_per_s"] == 1.9  # 4 samples of 2 tokens, and 11


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
