"""The trainer with the real DeepSpeed on a tiny model: what an update is, and that nothing else changes it."""

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from conf.errors import ConfigError, TrainerError
from conf.schema import KL, Correction, Schedule, Update
from data.model_files import model_tensors
from data.package import Receipt, content_digest
from data.refs import DatasetRef
from data.store import Store
from tasks.trainer import batches
from tasks.trainer.client import Status, Trainer, rank_environment
from tasks.trainer.engine import deepspeed_config, learning_rate
from tasks.trainer.spec import Spec
from tests.tasks.training import ROOT, RUN, SETTINGS, Local, commit_samples, experiment, quiet, run_ranks

SIMPLE = Update(learning_rate=1e-2, precision="fp32", max_logprob_diff=10.0)


@pytest.fixture(scope="module")
def model(tiny_model: Path, one_rank: None) -> Path:
    """The starting model, with this process ready to train it."""
    return tiny_model


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs") / RUN


@pytest.fixture(scope="module")
def refs(run_dir: Path) -> list[DatasetRef]:
    return [commit_samples(Store(run_dir, RUN), iteration, seed=iteration) for iteration in (1, 2)]


@dataclass(frozen=True)
class Trained:
    weights: dict[str, Tensor]
    norms: list[float]  # mean gradient norm of each update; AdamW itself would not show a wrong scale


def plain_training(model: Path, store: Store, refs: list[DatasetRef], update: Update) -> Trained:
    """The same updates in plain PyTorch: one sample and one token at a time, formulas written out again."""
    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=0.0, weight_decay=update.weight_decay)
    step, norms = 0, []
    for number, ref in enumerate(refs, start=1):
        total = 0.0
        rows = store.read(ref).to_pylist()
        samples = batches.Samples.from_table(store.read(ref), [])
        for epoch in range(update.epochs):
            for part in batches.mini_batches(samples, update.mini_batches, seed=0, number=number, epoch=epoch):
                chosen = [rows[i] for i in part]
                tokens = sum(sum(row["response_mask"]) for row in chosen)
                optimizer.zero_grad()
                sum(plain_loss(lm, row, update) for row in chosen).div(tokens).backward()
                total += float(torch.nn.utils.clip_grad_norm_(lm.parameters(), update.max_grad_norm))
                step += 1
                optimizer.param_groups[0]["lr"] = update.learning_rate * min(1, step / update.warmup_steps)
                optimizer.step()
        norms.append(total / (update.epochs * update.mini_batches))
    return Trained({name: p.detach() for name, p in lm.named_parameters()}, norms)


def plain_loss(lm: Any, row: dict[str, Any], update: Update) -> Tensor:
    """Sum of the loss over one sample's trained tokens."""
    ids = torch.tensor(row["prompt_ids"] + row["response_ids"])
    logprobs = (lm(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)
    total = torch.zeros(())
    weights = plain_weights(row, update.correction)
    for j, token in enumerate(row["response_ids"]):
        if not row["response_mask"][j]:
            continue
        live = logprobs[len(row["prompt_ids"]) + j - 1, token]
        advantage, reference = row["advantages"][j], row["ref_logprobs"][j]
        ratio = torch.exp(live - row["old_logprobs"][j])
        held = torch.clamp(ratio, 1 - update.clip_ratio, 1 + update.clip_ratio_high)
        total = total - weights[j] * torch.min(ratio * advantage, held * advantage)
        total = total + update.kl.coef * (torch.exp(reference - live) - (reference - live) - 1)
    return total


def plain_weights(row: dict[str, Any], correction: Correction) -> list[float]:
    """The correction's weight of each token of one sample."""
    logs = [old - engine for old, engine in zip(row["old_logprobs"], row["behavior_logprobs"], strict=True)]
    if correction.kind == "none":
        return [1.0] * len(logs)
    if correction.level == "sequence":
        logs = [sum(value for value, trained in zip(logs, row["response_mask"], strict=True) if trained)] * len(logs)
    weights = [math.exp(value) for value in logs]
    if correction.kind == "tis":
        return [min(w, correction.high) for w in weights]
    return [w if correction.low <= w <= correction.high else 0.0 for w in weights]


def assert_trained_alike(found: dict[str, Tensor], expected: dict[str, Tensor], start: Path) -> None:
    """The difference is below 1% of what training changed: AdamW blows up rounding where a gradient is almost 0."""
    assert found.keys() == expected.keys()
    before = load_file(start / "model.safetensors")
    difference = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    change = sum(float((before[name] - expected[name]).square().sum()) for name in expected)
    assert difference**0.5 < 0.01 * change**0.5


def assert_equal_weights(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def expected(model: Path, run_dir: Path, refs: list[DatasetRef]) -> Trained:
    return plain_training(model, Store(run_dir, RUN), refs, SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 10_000},
        {"share_prefix_tokens": 0},
        {"zero_stage": 2},
    ],
)
def test_updates_equal_plain_pytorch_however_they_are_batched(
    model: Path, run_dir: Path, refs: list[DatasetRef], expected: Trained, changes: dict[str, Any]
) -> None:
    trainer = Local(run_dir, model, replace(SETTINGS, **changes))
    answers = [trainer.update(ref, number) for number, ref in enumerate(refs, start=1)]
    assert_trained_alike(trainer.weights(), expected.weights, model)
    assert [answer["metrics"]["actor/grad_norm"] for answer in answers] == pytest.approx(expected.norms, rel=1e-3)


@pytest.mark.parametrize(
    "correction",
    [
        Correction("tis", "token", high=1.2),
        Correction("tis", "sequence", high=1.5),
        Correction("mis", "token", low=0.7, high=1.5),
        Correction("mis", "sequence", low=0.5, high=2.0),
    ],
)
def test_corrections_for_off_policy_tokens_equal_plain_pytorch(
    model: Path, run_dir: Path, refs: list[DatasetRef], correction: Correction
) -> None:
    settings = replace(SETTINGS, correction=correction)
    expected = plain_training(model, Store(run_dir, RUN), refs, settings)
    trainer = Local(run_dir, model, settings)
    answers = [trainer.update(ref, number) for number, ref in enumerate(refs, start=1)]
    assert_trained_alike(trainer.weights(), expected.weights, model)
    metrics = answers[0]["metrics"]
    weights = [
        plain_weights(row, correction)[j]
        for row in Store(run_dir, RUN).read(refs[0]).to_pylist()
        for j, trained in enumerate(row["response_mask"])
        if trained
    ]
    assert metrics["rollout_correction/is_mean"] == pytest.approx(np.mean(weights), rel=1e-5)
    zero = np.mean([w == 0 for w in weights])
    assert metrics["rollout_correction/masked_fraction"] == pytest.approx(zero, abs=1e-6)
    assert (zero > 0) == (correction.kind == "mis")


def test_groups_without_advantage_are_skipped_and_change_nothing(
    model: Path, run_dir: Path, refs: list[DatasetRef]
) -> None:
    settings = replace(SETTINGS, kl=KL(coef=0.0))
    expected = plain_training(model, Store(run_dir, RUN), refs, settings)
    trainer = Local(run_dir, model, settings)
    answers = [trainer.update(ref, number) for number, ref in enumerate(refs, start=1)]
    assert_trained_alike(trainer.weights(), expected.weights, model)
    metrics = answers[0]["metrics"]
    assert metrics["actor/grad_norm"] == pytest.approx(expected.norms[0], rel=1e-3)
    assert (metrics["actor/samples"], metrics["actor/samples_computed"]) == (24, 18)  # a group of 3 in each pass


def all_zero(rows: dict[str, list[Any]]) -> None:
    rows["advantages"] = [[0.0] * len(own) for own in rows["advantages"]]


def test_an_update_without_any_advantage_still_measures_and_steps_with_a_zero_gradient(
    model: Path, run_dir: Path
) -> None:
    ref = commit_samples(Store(run_dir, RUN), 11, all_zero)
    trainer = Local(run_dir, model, replace(SIMPLE, weight_decay=0.5))
    before = trainer.weights()
    metrics = trainer.update(ref, 1)["metrics"]
    assert metrics["actor/grad_norm"] == 0.0
    assert metrics["mismatch/logprob_abs_diff"] > 0
    for name, weight in trainer.weights().items():
        torch.testing.assert_close(weight, before[name] * (1 - 1e-2 * 0.5))


def test_mismatch_is_measured_against_the_engine_before_any_weight_changed(
    model: Path, run_dir: Path, refs: list[DatasetRef]
) -> None:
    trainer = Local(run_dir, model, replace(SIMPLE, epochs=3, kl=KL(coef=0.1)))
    logprobs, _ = trainer.logprobs(refs[0], "policy")
    rows = Store(run_dir, RUN).read(refs[0]).to_pylist()
    differences = [
        abs(a - b)
        for own, row in zip(logprobs, rows, strict=True)
        for a, b, trained in zip(own, row["behavior_logprobs"], row["response_mask"], strict=True)
        if trained
    ]
    metrics = trainer.update(refs[0], 1)["metrics"]
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(np.mean(differences), rel=1e-5)
    assert 0 < metrics["mismatch/ess"] <= 1


def test_the_ratio_is_1_where_the_engine_agrees_exactly(model: Path, run_dir: Path, refs: list[DatasetRef]) -> None:
    trainer = Local(run_dir, model, SIMPLE)
    logprobs, _ = trainer.logprobs(refs[0], "policy")
    ref = commit_samples(
        Store(run_dir, RUN), 12, lambda rows: rows.update(behavior_logprobs=logprobs), seed=refs[0].iteration
    )
    metrics = trainer.update(ref, 1)["metrics"]
    assert metrics["mismatch/logprob_abs_diff"] == pytest.approx(0, abs=1e-5)
    assert metrics["mismatch/ess"] == pytest.approx(1, abs=1e-6)
    assert metrics["actor/ratio_max"] == pytest.approx(1, abs=1e-4)
    assert metrics["actor/clipfrac"] == 0


# ------------------------------------------------------------------ idempotence and refusals


def test_the_same_update_again_gives_the_stored_answer_and_trains_once(
    model: Path, run_dir: Path, refs: list[DatasetRef]
) -> None:
    trainer = Local(run_dir, model, SIMPLE)
    answer = trainer.update(refs[0], 1)
    weights = trainer.weights()
    assert trainer.update(refs[0], 1) == answer
    assert_equal_weights(trainer.weights(), weights)
    with pytest.raises(TrainerError, match=r"update 3 .* must follow update 2, but the last one applied is 1"):
        trainer.update(refs[1], 3)
    with pytest.raises(TrainerError, match="update 1 on run/000002"):
        trainer.update(refs[1], 1)


def test_engine_and_trainer_too_far_apart_is_refused_before_the_weights_change(
    model: Path, run_dir: Path, refs: list[DatasetRef], tmp_path: Path
) -> None:
    trainer = Local(run_dir, model, replace(SIMPLE, max_logprob_diff=0.25))
    before = trainer.weights()
    with pytest.raises(TrainerError, match=r"engine and trainer differ by \d\.\d+ .*allowed are 0\.25"):
        trainer.update(refs[0], 1)
    assert_equal_weights(trainer.weights(), before)
    with pytest.raises(TrainerError, match="export is refused, because an update failed"):
        trainer.export(tmp_path / "staging")


@pytest.mark.parametrize(("kind", "limit"), [("sync", 10.0), ("one_step_off", math.inf), ("async", math.inf)])
def test_where_updates_lie_between_engine_and_trainer_may_be_apart(
    model: Path, tmp_path: Path, kind: Any, limit: float
) -> None:
    settings = replace(experiment(model, SIMPLE), schedule=Schedule(kind=kind))
    Trainer(settings, tmp_path, RUN)._spec.write(tmp_path / "spec.json")
    assert Spec.read(tmp_path / "spec.json").update == replace(SIMPLE, max_logprob_diff=limit)


@pytest.mark.parametrize("zero_stage", [0, 2])
@pytest.mark.parametrize("advantage", [math.nan, 3e38])
def test_a_loss_or_gradient_that_is_not_finite_changes_nothing(
    model: Path, run_dir: Path, zero_stage: int, advantage: float, tmp_path: Path
) -> None:
    def change(rows: dict[str, list[Any]]) -> None:
        rows["advantages"][0] = [advantage] * len(rows["advantages"][0])

    ref = commit_samples(Store(tmp_path, RUN), 1, change)
    trainer = Local(tmp_path, model, replace(SIMPLE, zero_stage=zero_stage))
    before = trainer.weights()
    with pytest.raises(TrainerError, match="must be finite"):
        trainer.update(ref, 1)
    assert_equal_weights(trainer.weights(), before)


def test_weights_that_are_not_finite_already_stop_the_update_and_are_not_exported(
    model: Path, run_dir: Path, refs: list[DatasetRef], tmp_path: Path
) -> None:
    trainer = Local(run_dir, model, SIMPLE)
    with torch.no_grad():
        trainer.service.learner.policy.lm.model.norm.weight[3] = math.nan
    with pytest.raises(TrainerError, match="update 1, optimizer step 1: the loss and its parts must be finite, got"):
        trainer.update(refs[0], 1)
    with pytest.raises(TrainerError, match="export is refused, because an update failed"):
        trainer.export(tmp_path / "staging")
    with pytest.raises(TrainerError, match="checkpoint is refused, because an update failed"):
        trainer.checkpoint(tmp_path / "000001", {})


def test_an_option_that_ratchet_sets_cannot_be_passed_to_deepspeed() -> None:
    passed = {"zero_optimization": {"overlap_comm": True}, "wall_clock_breakdown": True}
    merged = deepspeed_config(Update(zero_stage=2, deepspeed=passed))
    assert merged["zero_optimization"] == {"stage": 2, "overlap_comm": True}
    assert merged["wall_clock_breakdown"] is True
    with pytest.raises(ConfigError, match=r"update\.deepspeed\.zero_optimization\.stage must not be set"):
        deepspeed_config(Update(deepspeed={"zero_optimization": {"stage": 3}}))


def test_the_learning_rate_warms_up_linearly_and_stays() -> None:
    rates = [learning_rate(Update(learning_rate=4.0, warmup_steps=4), step) for step in range(6)]
    assert rates == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0]
    assert learning_rate(Update(learning_rate=4.0), 0) == 4.0


# ------------------------------------------------------------------ export, reference, checkpoint


def test_an_export_is_the_policy_under_hugging_face_names(
    model: Path, run_dir: Path, refs: list[DatasetRef], tmp_path: Path
) -> None:
    trainer = Local(run_dir, model, SIMPLE)
    trainer.update(refs[0], 1)
    answer = trainer.export(tmp_path / "export")
    (shard,) = (tmp_path / "export").iterdir()
    shard.rename(tmp_path / "export" / "model.safetensors")
    (tmp_path / "export" / "config.json").write_bytes((model / "config.json").read_bytes())
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32)
    assert_equal_weights(dict(lm.named_parameters()), trainer.weights())
    assert answer["tied"] == {"lm_head.weight": "model.embed_tokens.weight"}
    logprobs = lm(input_ids=torch.tensor([[1, 2, 3]])).logits[0].log_softmax(-1)
    assert answer["probe"]["ids"] == [1, 2, 3]
    assert answer["probe"]["logprobs"] == pytest.approx([logprobs[0, 2].item(), logprobs[1, 3].item()], abs=1e-5)


def test_a_receipt_counts_values_that_overflow_in_the_packages_precision(
    model: Path, run_dir: Path, tmp_path: Path
) -> None:
    trainer = Local(run_dir, model, SIMPLE)
    with torch.no_grad():
        trainer.service.learner.policy.lm.model.norm.weight[:3] = torch.tensor([1e6, -1e6, math.nan])
    (receipt,) = trainer.export(tmp_path / "export", "float16")["receipts"]
    assert {t["name"]: t["nonfinite"] for t in receipt["tensors"] if t["nonfinite"]} == {"model.norm.weight": 3}


def test_the_reference_is_the_starting_model_whatever_was_trained(
    model: Path, run_dir: Path, refs: list[DatasetRef], tmp_path: Path
) -> None:
    trainer = Local(run_dir, model, SIMPLE)
    start, _ = trainer.logprobs(refs[0], "policy")
    (receipt,) = trainer.export(tmp_path / "export")["receipts"]
    trainer.update(refs[0], 1)
    policy, _ = trainer.logprobs(refs[0], "policy")
    reference, digest = trainer.logprobs(refs[0], "reference")
    assert reference == start != policy
    assert digest == content_digest(Receipt.from_json(receipt).tensors)


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_restored_trainer_continues_bit_for_bit(
    model: Path, run_dir: Path, refs: list[DatasetRef], tmp_path: Path, zero_stage: int
) -> None:
    settings = replace(SETTINGS, zero_stage=zero_stage)
    trainer = Local(run_dir, model, settings)
    first = trainer.update(refs[0], 1)
    trainer.checkpoint(tmp_path / "000001", {"cursor": [3, 4]})
    second = trainer.update(refs[1], 2)

    restored = Local(run_dir, model, settings)
    assert restored.restore(tmp_path / "000001") == {"cursor": [3, 4]}
    assert restored.update(refs[0], 1) == first  # the stored answer
    assert restored.update(refs[1], 2)["metrics"] == second["metrics"]
    assert_equal_weights(restored.weights(), trainer.weights())


# ------------------------------------------------------------------ several ranks


@pytest.fixture(scope="module")
def two_ranks(model: Path, run_dir: Path, refs: list[DatasetRef]) -> Path:
    """The same two updates by two ranks, under each ZeRO stage (tests/tasks/training.py)."""
    (run_dir / "refs.json").write_text(json.dumps([ref.to_json() for ref in refs]))
    run_ranks(run_dir, model)
    return run_dir


def exported(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_under_any_zero_stage_do_what_one_rank_does(
    two_ranks: Path, model: Path, run_dir: Path, refs: list[DatasetRef], expected: Trained, stage: int
) -> None:
    folder = two_ranks / f"zero{stage}"
    assert len(list((folder / "export").glob("*.safetensors"))) == 2
    assert_trained_alike(exported(folder / "export"), expected.weights, model)
    single = Local(run_dir, model, SETTINGS)
    answers = [single.update(ref, number) for number, ref in enumerate(refs, start=1)]
    answer = json.loads((folder / "answer.json").read_text())
    assert answer["metrics"] == pytest.approx(answers[1]["metrics"], rel=1e-3, abs=1e-4)
    for found, own in zip(answer["logprobs"], single.logprobs(refs[0], "policy")[0], strict=True):
        assert found == pytest.approx(own, abs=1e-3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_continue_from_a_checkpoint_bit_for_bit(two_ranks: Path, stage: int) -> None:
    folder = two_ranks / f"zero{stage}"
    assert_equal_weights(exported(folder / "restored"), exported(folder / "export"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_offloaded_trainer_leaves_nothing_on_the_device_and_comes_back_bit_for_bit(
    two_ranks: Path, model: Path, stage: int
) -> None:
    """That it trains on as if it had stayed is shown by the tests before."""
    moved = json.loads((two_ranks / f"zero{stage}" / "answer.json").read_text())["moved"]
    parameters = sum(math.prod(shape) for _, shape in model_tensors(model, "float32").values())
    assert (moved["left"], moved["same"]) == (0, True)
    assert moved["taken"] >= 4 * 3 * parameters / 2  # weights and two moments in float32, by two ranks where divided


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_alone_changes_nothing_and_is_not_exported(
    two_ranks: Path, stage: int
) -> None:
    folder = two_ranks / f"zero{stage}"
    _, update, export = json.loads((folder / "answer.json").read_text())["errors"]
    assert "the gradient's norm must be finite" in update
    assert "export is refused, because an update failed" in export
    assert not list((folder / "refused").glob("*"))
    assert_equal_weights(exported(folder / "unchanged"), exported(folder / "restored"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_export_that_fails_on_one_rank_fails_on_all_at_once(two_ranks: Path, stage: int) -> None:
    error = json.loads((two_ranks / f"zero{stage}" / "answer.json").read_text())["errors"][0]
    assert error.startswith("rank 1: FileExistsError")


# ------------------------------------------------------------------ the process group


@asynccontextmanager
async def started(run_dir: Path, model: Path, update: Update, ranks: int) -> AsyncIterator[Trainer]:
    settings = experiment(model, update, ranks)
    settings = replace(settings, rollout=replace(settings.rollout, admin_key_env="ENGINE_ADMIN"))
    trainer = Trainer(settings, run_dir, RUN)
    try:
        await trainer.start()
        yield trainer
    finally:
        await trainer.stop()


def gone(pids: list[int], seconds: float = 10.0) -> bool:
    """Whether the processes end within that time."""
    end = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_rank_gets_what_it_needs_and_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"LD_LIBRARY_PATH": "/lib", "NCCL_IB_PKEY": "1", "RATCHET_CRASH_POINT": "trainer/1/step.before/0"}
    secret = {
        "SGLANG_API_KEY": "s3cret", "SGLANG_ADMIN_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "wandb_api_key": "s3cret",
        "AWS_SECRET_ACCESS_KEY": "s3cret", "DB_PASSWORD": "s3cret", "PGPASSWD": "s3cret", "GIT_AUTH": "s3cret",
        "PREFECT_API_DATABASE_CONNECTION_URL": "postgresql://user:s3cret@host/db",
    }  # fmt: skip
    for name, value in {**kept, **secret}.items():
        monkeypatch.setenv(name, value)
    for device in ("cpu", "cuda"):
        environment = rank_environment(1, 2, 3, device)
        assert kept.items() <= environment.items()
        assert environment["TOKENIZERS_PARALLELISM"] == "false"
        assert [name for name, value in environment.items() if "s3cret" in value] == []


def test_a_group_of_processes_takes_commands_and_a_dead_rank_fails_the_pending_one(
    model: Path, run_dir: Path, refs: list[DatasetRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "s3cret")
    monkeypatch.setenv("ENGINE_ADMIN", "s3cret")

    async def scenario() -> None:
        progress: list[tuple[int, int]] = []
        async with started(run_dir, model, replace(SIMPLE, zero_stage=2, epochs=40), ranks=2) as trainer:
            assert not [pid for pid in trainer.pids if b"s3cret" in Path(f"/proc/{pid}/environ").read_bytes()]
            assert (await trainer.status()).update == 0
            reference = await trainer.logprobs(refs[0], "reference", quiet)
            policy = await trainer.logprobs(refs[0], "policy", quiet)
            assert reference.table.equals(policy.table)
            lengths = Store(run_dir, RUN).read(refs[0])["response_ids"].to_pylist()
            assert [len(own) for own in policy.table["logprobs"].to_pylist()] == [len(own) for own in lengths]
            assert len(reference.model) == 64
            with pytest.raises(TrainerError, match="must follow update 4"):
                await trainer.update(refs[0], 5, quiet)
            for _ in range(2):
                assert await trainer.offload() == {}  # on a CPU there is no memory to give back
            with pytest.raises(TrainerError, match="logprobs is refused: the trainer is offloaded, its device is the"):
                await trainer.logprobs(refs[0], "policy", quiet)
            assert (await trainer.status(), await trainer.memory()) == (Status(0, "", 0), {})
            await trainer.reload()
            (tmp_path / "staging").mkdir()
            export = await trainer.export(tmp_path / "staging", "bfloat16", [1, 2, 3])
            assert [receipt.rank for receipt in export.receipts] == [0, 1]
            assert content_digest([t for receipt in export.receipts for t in receipt.tensors])
            assert {t.dtype for receipt in export.receipts for t in receipt.tensors} == {"bfloat16"}

            def kill_a_rank(done: int, total: int) -> None:
                if not progress:
                    os.kill(trainer.pids[1], signal.SIGKILL)
                progress.append((done, total))

            pids = trainer.pids
            with pytest.raises(TrainerError, match=r"update: rank 1 of 2 ended with signal SIGKILL; log .*rank1\.log"):
                await trainer.update(refs[0], 1, kill_a_rank)
            assert progress
            assert not trainer.alive
            assert gone(pids)
            with pytest.raises(TrainerError, match="status: the trainer does not run"):
                await trainer.status()

    asyncio.run(scenario())


def test_a_model_that_cannot_be_loaded_is_named_with_the_log(run_dir: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        with pytest.raises(
            TrainerError, match=r"start: rank 0 of 1 ended with exit code 1; log(.|\n)*model\.path must be"
        ):
            async with started(run_dir, tmp_path, SIMPLE, ranks=1):
                pass

    asyncio.run(scenario())


_PARENT = """
import asyncio, sys
from pathlib import Path
from conf.schema import Experiment, Model
from tasks.trainer.client import Trainer, rank_environment

async def main():
    trainer = Trainer(Experiment(model=Model(path=sys.argv[2])), Path(sys.argv[1]), "run")
    starting = asyncio.create_task(trainer.start())
    while not trainer.pids:
        await asyncio.sleep(0.01)
    print(*trainer.pids, flush=True)
    await starting
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.mark.parametrize("ready", [False, True])
def test_ranks_die_with_the_process_that_started_them(model: Path, run_dir: Path, ready: bool) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(run_dir), str(model)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert not ready or parent.stdout.readline() == "ready\n"
        parent.kill()
    assert pids
    assert gone(pids)
