"""Training checkpoints with the real DeepSpeed: whoever wrote one, whoever reads it, and no damaged one ever."""

import json
import shutil
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from conf.errors import CheckpointError, ConfigError, TrainerError
from conf.schema import Update
from data.checkpoints import COMPLETE, read_checkpoint
from data.refs import DatasetRef
from data.store import Store
from tasks.trainer.engine import deepspeed_config
from tests.tasks.training import (
    CONTINUED,
    RUN,
    SETTINGS,
    Local,
    commit_samples,
    continue_everywhere,
    run_ranks,
    start_everywhere,
    under,
)

KINDS = ("weight", "exp_avg", "exp_avg_sq")
GROUPS = [f"{ranks}x{stage}" for ranks in (1, 2) for stage in CONTINUED]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, one_rank: None) -> Path:
    """A model of odd sizes: no parameter of 33 elements splits evenly, so that a rank's last piece is padded."""
    folder = tmp_path_factory.mktemp("odd")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=259, hidden_size=33, intermediate_size=21, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`RANKSxSTAGE/000001` and `/000002` undisturbed; `READER/WRITER/same` and `/after` of who continues from whom."""
    folder = tmp_path_factory.mktemp("runs") / RUN
    refs = [commit_samples(Store(folder, RUN), iteration, seed=iteration) for iteration in (1, 2)]
    (folder / "refs.json").write_text(json.dumps([ref.to_json() for ref in refs]))
    start_everywhere(folder, model)
    run_ranks(folder, model, *GROUPS)
    continue_everywhere(folder, model, GROUPS)
    return folder


def whole(folder: Path) -> dict[str, np.ndarray]:
    """A checkpoint's flat parameters and moments, read without the product's reader: `weight/NAME` and so on."""
    pieces: dict[str, list[tuple[int, np.ndarray]]] = defaultdict(list)
    for path in folder.glob("*.safetensors"):
        for key, piece in load_file(path).items():
            name, start = key.rsplit("/", 1)
            pieces[name].append((int(start), piece))
    return {
        name: np.concatenate([piece for _, piece in sorted(own, key=lambda p: p[0])]) for name, own in pieces.items()
    }


def bits(folder: Path) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in whole(folder).items()}


def change(before: dict[str, np.ndarray], after: dict[str, np.ndarray], kind: str) -> float:
    return float(sum(np.square(after[n] - before[n]).sum() for n in before if n.startswith(f"{kind}/"))) ** 0.5


def test_a_checkpoint_holds_every_parameter_with_its_moments(folder: Path, model: Path) -> None:
    expected = {name: p.numel() for name, p in LlamaForCausalLM.from_pretrained(model).named_parameters()}
    for group in GROUPS:
        sizes = {name: len(values) for name, values in whole(folder / group / "000001").items()}
        assert sizes == {f"{kind}/{name}": size for name, size in expected.items() for kind in KINDS}
    assert len(read_checkpoint(folder / "2x0" / "000001").files) == 2  # each rank its share


@pytest.mark.parametrize("reader", GROUPS)
@pytest.mark.parametrize("writer", GROUPS)
def test_any_group_continues_from_any_other(folder: Path, writer: str, reader: str) -> None:
    begun, ended = folder / writer / "000001", folder / writer / "000002"
    same, after = folder / reader / writer / "same", folder / reader / writer / "after"
    assert bits(same) == bits(begun)
    state, undisturbed = read_checkpoint(after).state, read_checkpoint(ended).state
    assert (state["step"], state["last"]["number"]) == (undisturbed["step"], 2) == (8, 2)
    metrics = state["last"]["answer"]["metrics"]
    assert metrics == pytest.approx(undisturbed["last"]["answer"]["metrics"], rel=1e-3, abs=1e-4)
    assert metrics["actor/lr"] == undisturbed["last"]["answer"]["metrics"]["actor/lr"]
    if reader == writer:
        assert bits(after) == bits(ended)
        assert metrics == undisturbed["last"]["answer"]["metrics"]
        assert [f.sha256 for f in read_checkpoint(after).files] == [f.sha256 for f in read_checkpoint(ended).files]
    for kind in KINDS:  # sums over ranks are rounded in another order: seen is 1e-6 of what the update changed
        found = whole(after)
        assert change(whole(ended), found, kind) < 1e-4 * change(whole(begun), found, kind)


def test_the_optimizers_step_count_is_restored(folder: Path, model: Path) -> None:
    """Adam corrects by it: beside a moment of the second step, the count of the first would make steps too long."""
    for stage in CONTINUED:
        trainer = Local(folder, model, under(stage))
        trainer.restore(folder / "2x2" / "000001")
        optimizer = trainer.service.learner.engine.optimizer
        states = (optimizer if stage == 0 else optimizer.optimizer).state.values()
        assert {int(state["step"]) for state in states} == {4}
        assert trainer.service.learner.step == 4


def test_a_checkpoint_before_the_first_update_is_the_start(folder: Path, model: Path, tmp_path: Path) -> None:
    refs = [DatasetRef.from_json(ref) for ref in json.loads((folder / "refs.json").read_text())]
    for stage in CONTINUED:
        trainer = Local(folder, model, under(stage))
        trainer.checkpoint(tmp_path / f"zero{stage}" / "000000", {})
        trainer.update(refs[1], 1)
        trainer.restore(tmp_path / f"zero{stage}" / "000000")
        for number, ref in enumerate(refs, start=1):
            trainer.update(ref, number)
        trainer.checkpoint(tmp_path / f"zero{stage}" / "000002", {})
        assert bits(tmp_path / f"zero{stage}" / "000002") == bits(folder / f"1x{stage}" / "000002")


# ------------------------------------------------------------------ what is refused


@pytest.fixture(scope="module")
def victim(folder: Path, model: Path) -> Local:
    trainer = Local(folder, model, SETTINGS)
    trainer.restore(folder / "1x0" / "000002")
    return trainer


def refused(victim: Local, folder: Path, match: str, kind: type[TrainerError] = CheckpointError) -> None:
    """The checkpoint is refused as one, and the trainer still is where it was."""
    before = victim.weights()
    with pytest.raises(TrainerError, match=match) as caught:
        victim.restore(folder)
    assert caught.type is kind
    assert victim.service.learner.step == 8
    assert all(torch.equal(weight, before[name]) for name, weight in victim.weights().items())


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_flipped_bit_in_any_file_is_refused(
    victim: Local, folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    copy = tmp_path / "000001"
    if not copy.exists():
        shutil.copytree(folder / "2x2" / "000001", copy)
    path = data.draw(st.sampled_from(sorted(copy.iterdir())))
    content = path.read_bytes()
    place, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    try:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit]) + content[place + 1 :])
        refused(victim, copy, r"^checkpoint .*000001")
    finally:
        path.write_bytes(content)


@given(data=st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_cut_short_or_lengthened_is_refused(
    victim: Local, folder: Path, tmp_path: Path, data: st.DataObject
) -> None:
    copy = tmp_path / "000001"
    if not copy.exists():
        shutil.copytree(folder / "2x2" / "000001", copy)
    path = data.draw(st.sampled_from(sorted(copy.iterdir())))
    content = path.read_bytes()
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    try:
        path.write_bytes(data.draw(st.sampled_from([cut, content + b" "])))
        refused(victim, copy, r"^checkpoint .*000001")
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda folder: (folder / COMPLETE).unlink(), "is incomplete: expected a file COMPLETE"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "must be [0-9]+ bytes, found no such file"),
        (lambda folder: (folder / "extra.bin").write_bytes(b""), "extra.bin must be no such file, found 0 bytes"),
        (lambda folder: (folder / "state").mkdir(), "expected regular files only, found state"),
        (lambda folder: (folder / "link").symlink_to("/etc/passwd"), "expected regular files only, found link"),
        (lambda folder: shutil.rmtree(folder), "is incomplete: expected a file COMPLETE"),
    ],
)
def test_a_checkpoint_is_a_closed_world(
    victim: Local, folder: Path, tmp_path: Path, damage: object, match: str
) -> None:
    copy = tmp_path / "000001"
    shutil.copytree(folder / "2x2" / "000001", copy)
    damage(copy)  # type: ignore[operator]
    refused(victim, copy, match)


def test_files_of_two_checkpoints_do_not_mix(victim: Local, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "000001"
    shutil.copytree(folder / "2x2" / "000001", copy)
    (name,) = (path.name for path in copy.glob("state-00001-*"))
    shutil.copy(folder / "2x2" / "000002" / name, copy / name)
    refused(victim, copy, f"{name} must have SHA-256")


def test_a_checkpoint_of_another_model_is_refused(
    victim: Local, folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    Local(folder, tiny_model, SETTINGS).checkpoint(tmp_path / "000001", {})
    """And is no bad one, which would be put aside."""
    refused(victim, tmp_path / "000001", "is of another model than model.path: .*model.layers.1", TrainerError)


def test_an_interrupted_checkpoint_is_written_anew_and_a_complete_one_left_alone(victim: Local, tmp_path: Path) -> None:
    partial = tmp_path / ".000002.partial"
    partial.mkdir()
    (partial / "state-00001-of-00001.safetensors").write_bytes(b"half")
    victim.checkpoint(tmp_path / "000002", {"cursor": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["000002"]
    victim.checkpoint(tmp_path / "000002", {"cursor": 2})
    assert read_checkpoint(tmp_path / "000002").state["facts"] == {"cursor": 1}


@pytest.mark.parametrize("where", ["weight", "exp_avg_sq"])
def test_what_is_not_finite_is_never_kept(folder: Path, model: Path, tmp_path: Path, where: str) -> None:
    trainer = Local(folder, model, SETTINGS)
    trainer.restore(folder / "1x0" / "000001")
    norm = trainer.service.learner.policy.lm.model.norm.weight
    with torch.no_grad():
        (norm if where == "weight" else trainer.service.learner.engine.optimizer.state[norm][where])[2] = np.inf
    with pytest.raises(
        TrainerError, match=rf"{where}/model\.norm\.weight/0 must be finite, found 1 values that are not"
    ):
        trainer.checkpoint(tmp_path / "000001", {})
    assert not (tmp_path / "000001").exists()


@pytest.mark.parametrize(
    "option", [{"fp16": {"enabled": True}}, {"bf16": {"enabled": True}}, {"optimizer": {"params": {"amsgrad": True}}}]
)
def test_what_a_checkpoint_does_not_hold_cannot_be_switched_on(option: dict[str, dict[str, object]]) -> None:
    with pytest.raises(ConfigError, match=r"update\.deepspeed\..* must not be set"):
        deepspeed_config(Update(deepspeed=option))
