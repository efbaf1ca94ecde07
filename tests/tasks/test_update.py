"""Stages `update`, `reference` and `old_logprobs` with the real DeepSpeed in this process: one version an update."""

import asyncio
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from conf.errors import DataError, PublishError, StageError, TrainerError
from conf.schema import KL, Experiment, Publish, Rollout, Schedule, Update
from data.ledger import Ledger
from data.store import Store
from data.weights import verify
from tasks.reference import old_logprobs, reference
from tasks.stage import Columns, Context, Inputs, NewPolicy, Stage
from tasks.trainer.client import Trainer
from tasks.update import Exporter, _lag, package_dtype, update
from tests.fakes.context import make_world
from tests.tasks.training import InProcess, commit_samples

SETTINGS = Update(learning_rate=1e-3, precision="fp32", max_logprob_diff=10.0, zero_stage=1)


@pytest.fixture(scope="module")
def model(tiny_model: Path, one_rank: None) -> Path:
    """The starting model, with this process ready to train it."""
    return tiny_model


class Bench:
    """A stage context over a real store and ledger, a trainer in this process, and one dataset to train on."""

    def __init__(self, folder: Path, model: Path, settings: Update = SETTINGS) -> None:
        self.world = make_world(
            folder, model, [], node="update", update=settings, publish=Publish(probe_tokens=5, dtype="float32"),
            rollout=Rollout(temperature=0.8),
        )  # fmt: skip
        self.trainer = InProcess(folder, model, settings)
        self.context: Context = replace(self.world.context, trainer=cast(Trainer, self.trainer))
        self.store: Store = self.context.store
        self.ledger: Ledger = self.world.ledger
        ref = commit_samples(self.store, 1)
        self.inputs = Inputs({"advantage": ref}, ref, self.store.read(ref))

    def run(self, stage: Stage) -> Any:
        return asyncio.run(stage.run(self.inputs, self.context))

    def staged(self) -> list[Path]:
        return list((self.context.run_dir / "weights" / "staging").glob("*"))


@pytest.fixture
def bench(tmp_path: Path, model: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, model)
    yield made
    made.ledger.close()


def test_an_update_seals_one_proven_version(bench: Bench) -> None:
    output = bench.run(update)
    assert isinstance(output, NewPolicy)
    assert (output.policy.number, output.policy.optimizer_step) == (1, 1)
    assert output.policy.dataset == bench.inputs.dataset.id  # type: ignore[union-attr]
    package = verify(bench.context.run_dir / "weights" / output.policy.label)
    assert package.manifest.ref == output.policy
    assert package.manifest.parent == bench.context.policy.number
    first = bench.inputs.table.slice(0, 1).to_pylist()[0]  # type: ignore[union-attr]
    assert package.manifest.probe.ids == tuple([*first["prompt_ids"], *first["response_ids"]][:5])
    assert bench.ledger.version(1).state == "SEALED"
    assert bench.ledger.version(1).ref == output.policy
    assert output.facts.metrics["actor/grad_norm"] > 0
    assert bench.world.measured["weights/export_s"] > 0
    assert bench.staged() == []


def test_the_same_update_again_is_the_same_version(bench: Bench) -> None:
    first, weights = bench.run(update), bench.trainer.local.weights()
    again = bench.run(update)
    assert again == first
    assert bench.trainer.exports == 2  # the second one proves that the sealed folder holds the trainer's weights
    assert all(torch.equal(weight, weights[name]) for name, weight in bench.trainer.local.weights().items())


def test_a_version_sealed_before_a_crash_is_proven_and_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Crash(BaseException):
        pass

    def crash(*arguments: Any) -> None:
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(bench.ledger, "set_version", crash)
        with pytest.raises(Crash):
            bench.run(update)
    assert bench.ledger.version(1).state == "EXPORTING"
    output = bench.run(update)
    assert bench.trainer.exports == 2  # the second one proves that the sealed folder holds the trainer's weights
    assert output.policy.number == 1
    assert bench.ledger.version(1).ref == output.policy


@pytest.mark.parametrize("known", [False, True])
def test_weights_that_a_replay_gives_otherwise_get_another_number_than_those_sealed_before_a_crash(
    bench: Bench, known: bool
) -> None:
    """`known`: whether the ledger heard of the seal. A number means one content for ever."""
    first = bench.run(update)
    if not known:
        database = sqlite3.connect(bench.context.run_dir / "ledger.sqlite")
        with database:
            database.execute("UPDATE versions SET state = 'EXPORTING', content = NULL WHERE number = 1")
        database.close()
    with torch.no_grad():
        bench.trainer.local.service.learner.policy.lm.model.norm.weight[3] += 1e-6
    again = bench.run(update)
    assert (first.policy.number, again.policy.number) == (1, 2)
    assert again.policy.content != first.policy.content
    assert [(row.number, row.state) for row in bench.ledger.versions()][1:] == [(1, "ABANDONED"), (2, "SEALED")]
    for output in (first, again):
        assert verify(bench.context.run_dir / "weights" / output.policy.label).manifest.ref == output.policy
    assert bench.run(update) == again


def test_what_a_killed_export_left_in_staging_is_cleaned(bench: Bench) -> None:
    left = bench.context.run_dir / "weights" / "staging" / "000001" / "model-00001-of-00002.safetensors"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    assert bench.run(update).policy.number == 1


def test_weights_that_are_not_finite_are_abandoned_and_the_number_is_not_used_again(bench: Bench) -> None:
    asyncio.run(bench.trainer.update(bench.inputs.dataset, 1, lambda done, total: None))  # type: ignore[arg-type]
    norm = bench.trainer.local.service.learner.policy.lm.model.norm.weight
    with torch.no_grad():
        kept, norm[3] = norm[3].clone(), float("inf")
    with pytest.raises(PublishError, match=r"P2.*model\.norm\.weight: expected 0 values that are not finite, found 1"):
        bench.run(update)
    assert bench.ledger.version(1).state == "ABANDONED"
    assert bench.staged() == []
    with torch.no_grad():
        norm[3] = kept
    assert bench.run(update).policy.number == 2


def test_an_update_that_is_refused_takes_no_version(tmp_path: Path, model: Path) -> None:
    bench = Bench(tmp_path, model, replace(SETTINGS, max_logprob_diff=0.1))
    with pytest.raises(TrainerError, match=r"engine and trainer differ by"):
        bench.run(update)
    assert [row.number for row in bench.ledger.versions()] == [0]
    bench.ledger.close()


def later(bench: Bench, versions: int) -> Context:
    """The context where the trainer holds a version that is so many updates newer than that of the samples."""
    for n in range(1, versions + 1):
        number = bench.ledger.allocate_version(f"{n:06d}/earlier", None, n, "")  # no update that this trainer lacks
        bench.ledger.set_version(number, "SEALED", f"{n:064d}")
    return replace(bench.context, policy=bench.ledger.version(versions).ref)


def test_the_lag_of_the_samples_is_counted_to_what_the_trainer_holds_and_reported(bench: Bench) -> None:
    schedule = Schedule(kind="async", max_lag=2)
    context = later(bench, 2)
    bench.context = replace(context, experiment=replace(context.experiment, schedule=schedule))
    assert (lag := _lag(bench.inputs.table, bench.context)) == {"off_policy/lag_mean": 2.0, "off_policy/lag_max": 2.0}
    assert lag.items() <= bench.run(update).facts.metrics.items()


def test_samples_older_than_the_schedule_allows_are_refused_and_nothing_is_trained(bench: Bench) -> None:
    bench.context = later(bench, 1)
    with pytest.raises(DataError, match=r"lag must be <= 0, got 1: generated by version 0"):
        bench.run(update)
    assert bench.trainer.exports == 0


def test_no_samples_at_all_is_an_error_with_the_iteration(bench: Bench) -> None:
    assert bench.inputs.table is not None
    bench.inputs = replace(bench.inputs, table=bench.inputs.table.slice(0, 0))
    with pytest.raises(StageError, match="update of iteration 1: expected samples"):
        bench.run(update)


def test_the_starting_weights_are_sealed_as_version_0(tmp_path: Path, model: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.open_run("test", "digest", "resolved")
    experiment = Experiment(publish=Publish(dtype="float32"))
    experiment = replace(experiment, model=replace(experiment.model, path=str(model)))
    trainer = InProcess(tmp_path, model, SETTINGS)
    exporter = Exporter(cast(Trainer, trainer), ledger, experiment, tmp_path, "digest", lambda name, value: None)
    policy = asyncio.run(exporter.seal_version("start", parent=None, optimizer_step=0, dataset="", probe_ids=[1, 2, 3]))
    assert (policy.number, policy.dataset) == (0, "")
    assert verify(tmp_path / "weights" / policy.label).manifest.parent is None
    ledger.close()


def test_packages_have_the_engines_precision_unless_another_is_set() -> None:
    assert package_dtype(Experiment(rollout=Rollout(dtype="float16"))) == "float16"
    assert package_dtype(Experiment(rollout=Rollout(dtype="float16"), publish=Publish(dtype="float32"))) == "float32"


def test_the_update_reads_only_columns_that_its_settings_use() -> None:
    plain = set(update.consumes(Experiment()))
    assert {"behavior_logprobs", "advantages"} <= plain
    recomputed = Update(old_logprobs="recomputed", kl=KL(coef=0.1))
    assert set(update.consumes(Experiment(update=recomputed))) - plain == {"old_logprobs", "ref_logprobs"}


@pytest.mark.parametrize(
    ("stage", "name", "label"),
    [(reference, "ref_logprobs", "reference-"), (old_logprobs, "old_logprobs", "000000-3f9a1c0b7d21")],
)
def test_log_probabilities_become_a_column_beside_the_rollout(
    bench: Bench, stage: Stage, name: str, label: str
) -> None:
    ref = bench.store.commit_rows(
        2, "rollout", bench.store.read(bench.inputs.dataset).drop_columns(["old_logprobs", "ref_logprobs"]),  # type: ignore[arg-type]
        key="sample_id", facts=bench.store.manifest(bench.inputs.dataset).facts,  # type: ignore[arg-type]
    )  # fmt: skip
    bench.inputs = Inputs({"rollout": ref}, ref, bench.store.read(ref))
    output = bench.run(stage)
    assert isinstance(output, Columns)
    committed = bench.store.commit_columns(2, stage.name, ref, output.table, facts=output.facts)
    values = bench.store.read(committed, [name])[name].to_pylist()
    assert np.concatenate(values).max() < 0
    assert str(output.facts.sampling["model"]).startswith(label)
    assert output.facts.logprob_kind == "after_temperature"
