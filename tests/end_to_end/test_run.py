"""An undisturbed run of two iterations with its own SGLang, DeepSpeed and Prefect, and what it leaves behind."""

import re
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest

from conf.load import load
from data.ledger import Ledger
from data.metrics import read_metrics
from data.refs import DatasetRef, PolicyRef
from data.store import Store
from flows.graph import load_graph
from flows.pool_time import run_seconds, working_seconds
from flows.stages import training_dataset
from tests.end_to_end.conftest import ITERATIONS, Finished
from tests.end_to_end.launches import ratchet
from tests.listening import beyond_this_machine

NODES = ("prompts", "rollout", "drop_short", "reward", "reference", "advantage", "update", "publish", "evaluate")
pytestmark = pytest.mark.timeout(1800)
MIN_TOKENS = 5  # of drop_short, in the experiment

METRICS = {
    *("reward/mean", "reward/std", "reward/letters/mean", "response_length/mean", "response_length/max"),
    *("rollout/truncated_rate", "rollout/tokens_per_s", "off_policy/lag_mean", "off_policy/lag_max"),
    *("actor/approx_kl", "actor/clipfrac", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/samples"),
    *("mismatch/logprob_abs_diff", "mismatch/k3_kl", "mismatch/ess", "weights/bytes", "weights/export_s"),
    *("weights/install_s", "weights/verify_s", "groups/issued", "groups/trained", "groups/waiting"),
    *("groups/in_flight", "bias/length", "bias/length_worst", "bias/reward", "bias/unknown_length", "truncated/issued"),
    *("throughput/effective_samples_per_device_s", "throughput/effective_tokens_per_s"),
    *("throughput/generated_tokens_per_s", "truncated/trained"),
    *("throughput/effective_samples_per_s", "time/iteration", "time/outside_stages", "wait/AwaitingUpstream"),
    *(f"time/{node}" for node in NODES),
    *("busy/rollout", "busy/train", "busy/cpu", "idle/rollout/publish", "idle/rollout/weights", "idle/train/data"),
}


@pytest.fixture
def ledger(finished: Finished) -> Iterator[Ledger]:
    opened = Ledger(finished.folder / "ledger.sqlite", read_only=True)
    yield opened
    opened.close()


@pytest.fixture
def store(finished: Finished) -> Store:
    return Store(finished.folder, finished.folder.name)


def dataset(store: Store, iteration: int, node: str) -> DatasetRef:
    ref = store.find(iteration, node)
    assert isinstance(ref, DatasetRef)
    return ref


def table(store: Store, iteration: int, node: str) -> pa.Table:
    return store.read(dataset(store, iteration, node))


def test_it_prints_a_line_per_iteration_the_reward_curve_the_times_and_where_things_are(finished: Finished) -> None:
    lines = finished.output.splitlines()
    assert [line.split()[0] for line in lines if re.match(r" *\d+/\d+ ", line)] == ["1/2", "2/2"]
    header = next(line for line in lines if line.startswith(" iter"))
    assert header.split()[:4] == ["iter", "reward", "len", "lag"]
    assert max(len(line) for line in lines if re.match(r" *\d+/\d+ ", line)) <= 80
    for expected in ("reward", "where the time went", "time of each pool"):
        assert expected in lines
    assert "runs/small-001/data (Arrow), runs/small-001/metrics.parquet" in finished.output
    assert "ratchet ui" in finished.output


def test_show_prints_the_same_again(finished: Finished) -> None:
    shown = ratchet(finished.place, "show", "runs/small-001")
    assert shown.returncode == 0, shown.stderr
    printed = finished.output[finished.output.index(" iter") :]
    assert shown.stdout.strip() == printed[: printed.index("Prefect UI later")].strip()


def test_every_stage_is_committed_and_every_dataset_can_be_read(finished: Finished, store: Store) -> None:
    loaded = load(str(finished.folder / "config.yaml"))
    assert [node.name for node in load_graph(loaded.experiment)] == list(NODES)
    for iteration in range(1, ITERATIONS + 1):
        for node in NODES:
            ref = store.find(iteration, node)
            assert ref is not None
            if isinstance(ref, DatasetRef):
                assert store.read(ref).num_rows == ref.rows > 0
    assert table(store, 1, "rollout").num_rows == 16


def test_versions_0_1_2_are_committed_each_trained_from_the_one_before(store: Store, ledger: Ledger) -> None:
    rows = ledger.versions()
    found = [(row.number, row.state, row.parent, row.optimizer_step) for row in rows]
    assert found == [(0, "COMMITTED", None, 0), (1, "COMMITTED", 0, 1), (2, "COMMITTED", 1, 2)]
    assert len({row.content for row in rows}) == 3
    assert [row.dataset for row in rows] == ["", *(dataset(store, i, "advantage").id for i in (1, 2))]
    assert ledger.committed() == store.find(2, "publish") == store.find(2, "update")


def test_every_issued_group_was_trained_or_dropped_with_its_reason(store: Store, ledger: Ledger) -> None:
    short = set()
    for iteration in (1, 2):
        rows = table(store, iteration, "rollout").to_pylist()
        short |= {row["group_id"] for row in rows if len(row["response_ids"]) < MIN_TOKENS}
    dropped = {"dropped/short": len(short)} if short else {}
    assert ledger.groups.counts() == {"issued": 8, "waiting": 0, "trained": 8 - len(short), **dropped}


def test_the_metrics_file_has_the_fields_names_for_every_iteration(finished: Finished) -> None:
    history = read_metrics(finished.folder / "metrics.parquet")
    assert sorted(history) == [1, 2]
    for values in history.values():
        assert set(values) >= METRICS
        assert values["off_policy/lag_max"] == 0
        assert values["mismatch/logprob_abs_diff"] < 1e-3  # both compute in float32
        assert values["actor/grad_norm"] > 0
        assert values["time/iteration"] >= values["time/rollout"] > 0


def test_each_second_of_each_pool_has_one_cause_and_they_add_up_to_wall_time(ledger: Ledger) -> None:
    (session,), rows, metrics = ledger.accounts.sessions(), ledger.accounts.stages(), ledger.accounts.metrics()
    assert session.ended is not None
    pools = run_seconds([session], rows, {row.pool for row in rows})
    assert set(pools) == {"cpu", "rollout", "train"}
    for seconds in pools.values():
        assert sum(seconds.values()) == pytest.approx(session.ended - session.started, rel=0.01)
        assert "failed" not in seconds
    assert set(pools["rollout"]) >= {"starting", "working", "publish", "data", "weights", "other"}
    assert set(pools["train"]) >= {"starting", "working", "data", "schedule", "other"}
    for pool in ("rollout", "train"):  # these serve one stage at a time
        worked = sum(working_seconds(row) for row in rows if row.pool == pool and row.kind == "working")
        assert pools[pool]["working"] == pytest.approx(worked, rel=0.01)
    for values in metrics.values():
        for pool in pools:
            idle = sum(seconds for name, seconds in values.items() if name.startswith(f"idle/{pool}/"))
            assert values[f"busy/{pool}"] + idle == pytest.approx(values["time/iteration"], rel=0.01)


def test_the_behavior_log_probabilities_that_were_trained_on_are_the_rollouts_own_file(store: Store) -> None:
    for iteration in (1, 2):
        update = store.committed(iteration, "update")
        assert update is not None
        trained = training_dataset(store, update)
        written = store.manifest(dataset(store, iteration, "rollout")).columns["behavior_logprobs"]
        assert store.manifest(trained).columns["behavior_logprobs"] == written
        rollout = {row["sample_id"]: row["behavior_logprobs"] for row in table(store, iteration, "rollout").to_pylist()}
        for row in store.read(trained, ["sample_id", "behavior_logprobs"]).to_pylist():
            assert row["behavior_logprobs"] == rollout[row["sample_id"]]


def test_rollouts_carry_the_version_before_the_update_and_evaluations_the_one_after(store: Store) -> None:
    for iteration in (1, 2):
        new = store.find(iteration, "update")
        assert isinstance(new, PolicyRef)
        assert new.number == iteration
        assert set(table(store, iteration, "rollout")["policy_version"].to_pylist()) == {iteration - 1}
        evaluation = table(store, iteration, "evaluate")
        assert set(evaluation["policy_version"].to_pylist()) == {iteration}
        labels = {span["label"] for spans in evaluation["version_spans"].to_pylist() for span in spans}
        assert labels == {new.label}
        assert dataset(store, iteration, "evaluate").versions == (new.label,)


def test_evaluations_use_the_same_prompts_each_time_and_none_that_is_trained_on(store: Store) -> None:
    held_out = [table(store, i, "evaluate")["prompt_index"].to_pylist() for i in (1, 2)]
    trained = [table(store, i, "prompts")["prompt_index"].to_pylist() for i in (1, 2)]
    assert held_out[0] == held_out[1]
    assert Counter(trained[0] + trained[1] + held_out[0]).most_common(1)[0][1] == 1


def test_no_process_of_the_run_can_be_reached_from_another_machine_or_by_another_user(finished: Finished) -> None:
    assert beyond_this_machine(finished.doors) == set()
    assert {at for kind, at in finished.doors if kind == "unix"} - {"gone"} == {"0o700"}
    assert {"tcp"} <= {kind for kind, _ in finished.doors}


def test_the_keys_are_in_no_file_that_the_run_left_and_on_no_command_line(finished: Finished) -> None:
    assert len(finished.keys) >= 2
    assert any("tasks.engines.launch" in command for command in finished.commands)
    secrets = [key.encode() for key in finished.keys]
    files = [path for path in finished.place.folder.rglob("*") if path.is_file()]
    assert {"server.log", "engine0.log", "trainer-rank0.log", "prefect.db", "flow.log"} <= {path.name for path in files}
    assert not [path for path in files if any(key in path.read_bytes() for key in secrets)]
    assert not [command for command in finished.commands for key in finished.keys if key in command]


def test_nothing_that_it_started_is_left(finished: Finished) -> None:
    kinds = ("tasks.engines.launch", "tasks.trainer.server", "tasks.rewards.child", "prefect server start")
    for kind in kinds:
        assert any(kind in command for command in finished.commands), kind
    assert finished.seconds_to_gone < 5
