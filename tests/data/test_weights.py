"""Weight packages: complete or not sealed; sealed and unchanged or refused, whatever was done to the files."""

import ctypes
import errno
import hashlib
import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conf.errors import DataError, PublishError
from data import weights
from data.model_files import copy_model_files, model_tensors, tokenizer_digest
from data.package import MANIFEST, FileInfo, Package, PackageManifest, Probe, Receipt, TensorInfo, content_digest
from data.shards import read_header
from data.weights import INDEX, delete_package, find_sealed, seal, verify

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]  # name -> safetensors dtype, shape, bytes

NAMES = {"F32": "float32", "BF16": "bfloat16"}
EMBED = struct.pack("<6f", 0.0, 1.0, 2.0, 3.0, 4.0, 5.0)  # 2 x 3
NORM = struct.pack("<3f", 1.0, 1.0, 1.0)
SHARDS: list[Tensors] = [
    {"embed": ("F32", (2, 3), EMBED)},
    {"layer.q": ("F32", (3, 2), EMBED[::-1]), "norm": ("F32", (3,), NORM)},
]
EXPECTED = {"embed": ("float32", (2, 3)), "layer.q": ("float32", (3, 2)), "norm": ("float32", (3,))}
FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
PROBE = Probe((5, 6, 7), (-0.5, -1.25))


def safetensors(tensors: Tensors) -> bytes:
    header, data = {}, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def stage(root: Path, shards: list[Tensors] = SHARDS) -> tuple[Path, list[Receipt]]:
    """What the ranks wrote, one shard each, and their receipts."""
    staging = root / "weights" / "staging" / "attempt"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    receipts = []
    for rank, (file, tensors) in enumerate(zip(FILES, shards, strict=False)):
        data = safetensors(tensors)
        (staging / file).write_bytes(data)
        infos = tuple(
            TensorInfo(name, NAMES[dtype], shape, sha(raw), file, 0) for name, (dtype, shape, raw) in tensors.items()
        )
        receipts.append(Receipt(rank, len(shards), (FileInfo(file, len(data), sha(data)),), infos))
    return staging, receipts


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"torch_dtype": "float64", "hidden_size": 3, "tie_word_embeddings": true}')
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_text(f"{{}} {name}")
    for name in ("modeling_evil.py", "tokenizer.py", "pytorch_model.bin", "README.md", "training_args.json"):
        (folder / name).write_text("not for engines")
    return folder


def sealed(root: Path, staging: Path, receipts: list[Receipt], **changes: Any) -> Package:
    facts: dict[str, Any] = {
        "model": root / "model",
        "expected_tensors": EXPECTED,
        "run": "demo",
        "number": 7,
        "parent": 6,
        "optimizer_step": 7,
        "dataset": "demo/000007/advantage@0123456789ab",
        "config_digest": "c0ffee",
        "code_digest": "decaf",
        "tied": {},
        "probe": PROBE,
        "probe_tolerance": 0.25,
    }
    return seal(staging, root / "weights", receipts, **{**facts, **changes})


@pytest.fixture
def package(tmp_path: Path, model: Path) -> Package:
    return sealed(tmp_path, *stage(tmp_path))


# -- what sealing makes


def test_a_package_holds_the_shards_index_manifest_config_and_tokenizer_only(package: Package, tmp_path: Path) -> None:
    copied = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(package.folder)) == sorted([MANIFEST, INDEX, *FILES, *copied])
    assert package.folder.parent == tmp_path / "weights"
    assert package.folder.name == package.manifest.label == f"000007-{package.manifest.content[:12]}"
    assert not (tmp_path / "weights" / "staging" / "attempt").exists()
    assert json.loads((package.folder / "config.json").read_text()) == {
        "torch_dtype": "float32",
        "dtype": "float32",
        "hidden_size": 3,
        "tie_word_embeddings": True,
    }
    assert json.loads((package.folder / INDEX).read_text()) == {
        "metadata": {"total_size": 4 * (6 + 6 + 3)},
        "weight_map": {"embed": FILES[0], "layer.q": FILES[1], "norm": FILES[1]},
    }
    assert tokenizer_digest(package.folder) == tokenizer_digest(tmp_path / "model")


def test_a_sealed_folder_is_read_only(package: Package) -> None:
    modes = {path.stat().st_mode & 0o777 for path in package.folder.iterdir()}
    assert (modes, package.folder.stat().st_mode & 0o777) == ({0o444}, 0o555)


def test_verify_gives_back_what_was_sealed(package: Package) -> None:
    found = verify(package.folder)
    assert found == package
    manifest = found.manifest
    assert (manifest.parent, manifest.rollback_of, manifest.probe, manifest.probe_tolerance) == (6, None, PROBE, 0.25)
    assert manifest.ref.label == package.folder.name
    assert manifest.ref.dataset == "demo/000007/advantage@0123456789ab"


def test_the_manifest_is_canonical_json(package: Package) -> None:
    data = (package.folder / MANIFEST).read_bytes()
    value = json.loads(data)
    assert data == json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    assert PackageManifest.from_bytes(data) == package.manifest


def test_canaries_are_values_of_first_rows(package: Package) -> None:
    q = struct.unpack("<6f", EMBED[::-1])
    assert [(c.tensor, c.indices, c.values) for c in package.manifest.canaries] == [
        ("embed", (0, 1, 2), (0.0, 1.0, 2.0)),
        ("layer.q", (0, 1), q[:2]),
    ]


def test_bfloat16_canaries_and_config_follow_the_package(tmp_path: Path, model: Path) -> None:
    raw = struct.pack("<4H", 0x3F80, 0xBFC0, 0x0000, 0x4049)  # 1, -1.5, 0, 3.140625
    staging, receipts = stage(tmp_path, [{"embed": ("BF16", (1, 4), raw)}])
    package = sealed(tmp_path, staging, receipts, expected_tensors={"embed": ("bfloat16", (1, 4))})
    assert package.manifest.canaries[0].values == (1.0, -1.5, 0.0, 3.140625)
    assert json.loads((package.folder / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_content_does_not_depend_on_the_split_over_files() -> None:
    one = [TensorInfo(n, "float32", (1,), sha(n.encode()), "a.safetensors", 0) for n in "xy"]
    two = [replace(t, file=f"{t.name}.safetensors") for t in reversed(one)]
    assert content_digest(one) == content_digest(two)
    by_hand = f'[["x","float32",[1],"{sha(b"x")}"],["y","float32",[1],"{sha(b"y")}"]]'
    assert content_digest(one) == sha(by_hand.encode())
    for change in ({"name": "z"}, {"dtype": "bfloat16"}, {"shape": (1, 1)}, {"sha256": sha(b"z")}):
        assert content_digest([replace(one[0], **change), one[1]]) != content_digest(one)


def test_receipts_and_probes_survive_json() -> None:
    receipt = Receipt(
        1, 2, (FileInfo("a.safetensors", 3, "d"),), (TensorInfo("x", "float32", (2, 3), "d", "a.safetensors", 0),)
    )
    assert Receipt.from_json(json.loads(json.dumps(receipt.to_json()))) == receipt
    assert Probe.from_json(json.loads(json.dumps(PROBE.to_json()))) == PROBE


def test_a_rank_that_wrote_nothing_still_reports(tmp_path: Path, model: Path) -> None:
    staging, receipts = stage(tmp_path)
    all_in_rank_0 = Receipt(0, 2, receipts[0].files + receipts[1].files, receipts[0].tensors + receipts[1].tensors)
    assert verify(sealed(tmp_path, staging, [Receipt(1, 2, (), ()), all_in_rank_0]).folder).manifest.number == 7


def test_a_tied_head_is_not_stored(tmp_path: Path, model: Path) -> None:
    expected = {**EXPECTED, "head": ("float32", (2, 3))}
    package = sealed(tmp_path, *stage(tmp_path), expected_tensors=expected, tied={"head": "embed"})
    assert package.manifest.tied == {"head": "embed"}
    assert "head" not in {t.name for t in package.manifest.tensors}


# -- what is not sealed


def drop_rank(receipts: list[Receipt]) -> list[Receipt]:
    return receipts[:1]


def double_rank(receipts: list[Receipt]) -> list[Receipt]:
    return [*receipts, receipts[0]]


def other_world(receipts: list[Receipt]) -> list[Receipt]:
    return [receipts[0], replace(receipts[1], world=3)]


def double_tensor(receipts: list[Receipt]) -> list[Receipt]:
    return [receipts[0], replace(receipts[1], tensors=receipts[1].tensors + receipts[0].tensors)]


def change_tensor(**changes: Any) -> Callable[[list[Receipt]], list[Receipt]]:
    def change(receipts: list[Receipt]) -> list[Receipt]:
        return [replace(receipts[0], tensors=(replace(receipts[0].tensors[0], **changes),)), receipts[1]]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda receipts: [], "expected one receipt of each of .* ranks, found ranks"),
        (drop_rank, r"expected one receipt of each of \[2\] ranks, found ranks \[0\]"),
        (double_rank, r"expected one receipt of each of \[2\] ranks, found ranks \[0, 0, 1\]"),
        (other_world, r"expected one receipt of each of \[2, 3\] ranks"),
        (double_tensor, "tensor embed must be written by one rank, 2 receipts have it"),
        (lambda r: [replace(r[0], tensors=()), r[1]], "1 of 3 tensors are missing, first embed"),
        (change_tensor(name="embedding"), "1 of 3 tensors are missing, first embed"),
        (change_tensor(dtype="bfloat16"), r"tensor embed: expected \('float32', \(2, 3\)\), found \('bfloat16'"),
        (change_tensor(shape=(3, 2)), r"tensor embed: expected .*\(2, 3\)\), found .*\(3, 2\)"),
        (change_tensor(nonfinite=2), "tensor embed: expected 0 values that are not finite, found 2"),
        (change_tensor(file="x.safetensors"), "tensors lie in x.safetensors, which no receipt has"),
        (lambda r: [replace(r[0], files=(FileInfo("../x.safetensors", 1, ""),)), r[1]], "in the staging folder itself"),
    ],
)
def test_receipts_that_are_incomplete_or_disagree_are_refused(
    tmp_path: Path, model: Path, change: Callable[[list[Receipt]], list[Receipt]], message: str
) -> None:
    staging, receipts = stage(tmp_path)
    with pytest.raises(PublishError, match=f"publish step P2: .*{message}"):
        sealed(tmp_path, staging, change(receipts))
    assert find_sealed(tmp_path / "weights", 7) is None


def test_a_tensor_the_model_does_not_have_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(PublishError, match="P2: 1 tensors are not the model's, first norm"):
        sealed(tmp_path, *stage(tmp_path), expected_tensors={k: v for k, v in EXPECTED.items() if k != "norm"})


@pytest.mark.parametrize("name", ["extra.bin", "model-00003-of-00002.safetensors", "config.json"])
def test_a_file_that_no_receipt_has_is_refused(tmp_path: Path, model: Path, name: str) -> None:
    staging, receipts = stage(tmp_path)
    (staging / name).write_bytes(b"{}")
    with pytest.raises(PublishError, match=f"P2: attempt/{name}: not in the list"):
        sealed(tmp_path, staging, receipts)


def test_a_tied_head_without_what_it_is_tied_to_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(PublishError, match="P3: tied tensor head must not be stored and body must be"):
        sealed(tmp_path, *stage(tmp_path), tied={"head": "body"})
    (model / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(PublishError, match=r"P3: head: not stored as tied, but config.json has"):
        sealed(tmp_path, *stage(tmp_path), tied={"head": "embed"})


@pytest.mark.parametrize("probe", [Probe((5,), ()), Probe((5, 6), (-1.0, -1.0)), Probe((5, 6), (float("nan"),))])
def test_a_probe_without_its_log_probabilities_is_refused(tmp_path: Path, model: Path, probe: Probe) -> None:
    with pytest.raises(PublishError, match="P3: probe of"):
        sealed(tmp_path, *stage(tmp_path), probe=probe)


def flip_bit(path: Path) -> None:
    """Of the last byte: within a tensor."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(keep: Callable[[int], int]) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, keep(path.stat().st_size))


def rewrite(tensors: Tensors) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(safetensors(tensors))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut by one byte": truncate(lambda size: size - 1),
    "cut by half": truncate(lambda size: size // 2),
    "empty": truncate(lambda size: 0),
    "one byte more": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "one bit flipped": flip_bit,
    "tensor missing": rewrite({}),
    "tensor renamed": rewrite({"embedding": ("F32", (2, 3), EMBED)}),
    "other dtype": rewrite({"embed": ("BF16", (2, 6), EMBED)}),
    "other shape": rewrite({"embed": ("F32", (3, 2), EMBED)}),
    "tensor doubled": rewrite({"embed": ("F32", (2, 3), EMBED), "norm": ("F32", (3,), NORM)}),
    "gone": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_shard_damaged_in_staging_is_not_sealed(tmp_path: Path, model: Path, damage: str) -> None:
    staging, receipts = stage(tmp_path)
    DAMAGE[damage](staging / FILES[0])
    with pytest.raises(PublishError, match=r"publish step P[234]"):
        sealed(tmp_path, staging, receipts)
    assert find_sealed(tmp_path / "weights", 7) is None


def test_a_tensor_whose_digest_the_rank_got_wrong_is_not_sealed(tmp_path: Path, model: Path) -> None:
    staging, receipts = stage(tmp_path)
    with pytest.raises(PublishError, match=f"P4: tensor embed: expected SHA-256 {'0' * 64}, found {sha(EMBED)}"):
        sealed(tmp_path, staging, change_tensor(sha256="0" * 64)(receipts))


def test_swapped_shards_are_not_sealed(tmp_path: Path, model: Path) -> None:
    staging, receipts = stage(tmp_path)
    swap(staging)
    with pytest.raises(PublishError, match=r"P3: attempt: tensor .* is listed, the files do not hold it so"):
        sealed(tmp_path, staging, receipts)


def test_a_write_that_fails_is_a_failure_of_its_step(tmp_path: Path, model: Path) -> None:
    staging, receipts = stage(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400, limit[1]))  # bytes of a file: enough for all but the manifest
    try:
        with pytest.raises(PublishError, match=r"publish step P3: .*attempt: .*File too large"):
            sealed(tmp_path, staging, receipts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert find_sealed(tmp_path / "weights", 7) is None


# -- numbers


def test_sealing_the_same_again_gives_the_sealed_folder(tmp_path: Path, package: Package) -> None:
    staging, receipts = stage(tmp_path)
    assert sealed(tmp_path, staging, receipts) == package
    assert not staging.exists()


def test_a_number_has_one_content_for_ever(tmp_path: Path, package: Package) -> None:
    other: list[Tensors] = [{"embed": ("F32", (2, 3), EMBED[::-1])}, SHARDS[1]]
    with pytest.raises(PublishError, match=f"P5: version 7 is sealed already as {package.folder.name}, now as 000007-"):
        sealed(tmp_path, *stage(tmp_path, other))
    assert verify(package.folder) == package


def test_older_content_comes_back_under_a_new_number(tmp_path: Path, package: Package) -> None:
    rollback = sealed(tmp_path, *stage(tmp_path), number=9, parent=8, rollback_of=7)
    assert rollback.manifest.content == package.manifest.content
    assert rollback.folder.name == f"000009-{package.manifest.content[:12]}"
    assert verify(rollback.folder).manifest.rollback_of == 7


def test_an_empty_folder_in_the_way_is_not_replaced(tmp_path: Path, package: Package) -> None:
    delete_package(package.folder)
    package.folder.mkdir()
    with pytest.raises(PublishError, match=f"{package.folder.name}/{MANIFEST}: missing"):
        sealed(tmp_path, *stage(tmp_path))
    assert list(package.folder.iterdir()) == []


@pytest.mark.parametrize("code", [0, errno.EINVAL])
def test_a_folder_that_appears_at_the_last_moment_is_not_replaced(
    tmp_path: Path, package: Package, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(weights, "find_sealed", lambda *_: None)
    if code:  # a filesystem without RENAME_NOREPLACE
        monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(renameat2=lambda *_: -1))
        monkeypatch.setattr(ctypes, "get_errno", lambda: code)
    delete_package(package.folder)
    package.folder.mkdir()
    staging, receipts = stage(tmp_path)
    with pytest.raises(PublishError, match=r"publish step P5: .*File exists"):
        sealed(tmp_path, staging, receipts)
    assert list(package.folder.iterdir()) == []
    package.folder.rmdir()
    assert sealed(tmp_path, *stage(tmp_path)) == verify(package.folder) == package


def test_a_deleted_package_is_gone(tmp_path: Path, package: Package) -> None:
    assert find_sealed(tmp_path / "weights", 7) == package.folder
    delete_package(package.folder)
    assert find_sealed(tmp_path / "weights", 7) is None
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["staging"]


# -- Q0


def swap(folder: Path) -> None:
    first, second = (folder / name for name in FILES)
    a, b = first.read_bytes(), second.read_bytes()
    first.write_bytes(b)
    second.write_bytes(a)


def link(path: Path) -> None:
    """The same bytes, but from outside the folder."""
    outside = path.parent.parent / "outside"
    path.rename(outside)
    path.symlink_to(outside)


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))

    return change


TAMPER: dict[str, tuple[Callable[[Path], object], str]] = {
    "extra .bin": (lambda f: (f / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin: not in the list"),
    "extra .py": (lambda f: (f / "modeling.py").write_text("x"), "modeling.py: not in the list"),
    "extra folder": (lambda f: (f / "sub").mkdir(), "sub: expected a regular file"),
    "shard is a link": (lambda f: link(f / FILES[0]), f"{FILES[0]}: expected a regular file"),
    "manifest is a link": (lambda f: link(f / MANIFEST), f"{MANIFEST}: expected a regular file"),
    "extra pipe": (lambda f: os.mkfifo(f / "pipe"), "pipe: expected a regular file"),
    "shards swapped": (swap, "expected .* bytes, found"),
    "config changed": (edit("config.json", '"hidden_size": 3', '"hidden_size": 4'), "config.json: expected SHA-256"),
    "index changed": (edit(INDEX, FILES[0], FILES[1]), f"{INDEX}: expected SHA-256"),
    "tokenizer gone": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: missing"),
    "manifest gone": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST}: missing"),
    "manifest: other parent": (edit(MANIFEST, '"parent":6', '"parent":5'), "it was changed after sealing"),
    "manifest: spaces": (edit(MANIFEST, '"parent":6', '"parent": 6'), "it was changed after sealing"),
    "manifest: key twice": (edit(MANIFEST, '"parent":6', '"parent":6,"parent":6'), "'parent' stands there twice"),
    "manifest: not JSON": (lambda f: truncate(lambda size: size - 1)(f / MANIFEST), "not a manifest"),
    "manifest: empty": (lambda f: truncate(lambda size: 0)(f / MANIFEST), "not a manifest"),
}


@pytest.mark.parametrize("what", TAMPER)
def test_a_folder_that_was_touched_is_refused(package: Package, what: str) -> None:
    change, message = TAMPER[what]
    unlock(package.folder)
    change(package.folder)
    with pytest.raises(PublishError, match=f"publish step Q0: .*{message}"):
        verify(package.folder)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_shard_damaged_after_sealing_is_refused(package: Package, damage: str) -> None:
    unlock(package.folder)
    DAMAGE[damage](package.folder / FILES[0])
    with pytest.raises(PublishError, match=rf"publish step Q0: {package.folder.name}/{FILES[0]}: (expected|missing)"):
        verify(package.folder)


def test_no_flipped_bit_of_any_file_is_accepted(package: Package) -> None:
    unlock(package.folder)
    for path in sorted(package.folder.iterdir()):
        whole = path.read_bytes()
        for at in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            with pytest.raises(PublishError, match="publish step Q0"):
                verify(package.folder)
        path.write_bytes(whole)
    assert verify(package.folder) == package


def test_a_folder_under_another_name_is_refused(package: Package) -> None:
    other = package.folder.with_name("000008-" + package.manifest.content[:12])
    shutil.copytree(package.folder, other)
    with pytest.raises(PublishError, match=f"its manifest is of version {package.folder.name}"):
        verify(other)
    link_ = package.folder.with_name("link")
    link_.symlink_to(package.folder)
    for path in (link_, package.folder / MANIFEST, package.folder.with_name("none")):
        with pytest.raises(PublishError, match="expected a folder"):
            verify(path)


def reseal(package: Package, **changes: Any) -> None:
    """A manifest that agrees with itself and its files, written by someone who is wrong."""
    unlock(package.folder)
    files = [f for f in package.manifest.files if f.path not in (MANIFEST, INDEX)]
    manifest = replace(package.manifest, **changes)
    present = tuple(
        FileInfo(f.path, len(data), sha(data)) for f in files for data in [(package.folder / f.path).read_bytes()]
    )
    index = next(f for f in package.manifest.files if f.path == INDEX)
    manifest = replace(manifest, files=tuple(sorted((*present, index), key=lambda f: f.path)))
    (package.folder / MANIFEST).write_bytes(manifest.to_bytes())


def test_headers_that_disagree_with_a_consistent_manifest_are_refused(package: Package) -> None:
    unlock(package.folder)
    DAMAGE["tensor doubled"](package.folder / FILES[0])
    reseal(package)
    with pytest.raises(PublishError, match=r"Q0: .*the files hold tensor .*norm"):
        verify(package.folder)


def test_a_content_that_is_not_the_tensors_is_refused(package: Package) -> None:
    reseal(package, content="0" * 64)
    with pytest.raises(PublishError, match=r"Q0: .*content 0000.* is not the digest of its tensor list"):
        verify(package.folder)


def test_a_sealed_count_of_non_finite_values_is_refused(package: Package) -> None:
    first, *others = package.manifest.tensors
    reseal(package, tensors=(replace(first, nonfinite=1), *others))
    with pytest.raises(PublishError, match="Q0: tensor embed: 1 values are not finite"):
        verify(package.folder)


def unlock(folder: Path) -> None:
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


# -- safetensors and model folders


def test_headers_agree_with_the_safetensors_library(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": np.zeros((2, 3), np.float32), "b": np.ones(4, np.int64)}, tmp_path / "x.safetensors", {"k": "v"})
    found = read_header(tmp_path / "x.safetensors")
    assert {name: (e.dtype, e.shape) for name, e in found.items()} == {"a": ("float32", (2, 3)), "b": ("int64", (4,))}
    data = (tmp_path / "x.safetensors").read_bytes()
    assert np.frombuffer(data[found["b"].start : found["b"].end], np.int64).tolist() == [1, 1, 1, 1]


def raw_header(text: str, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text.encode() + data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "expected a safetensors header"),
        (struct.pack("<Q", 1 << 60) + b"{}", "expected a safetensors header"),
        (raw_header("[]"), "not a safetensors header"),
        (raw_header('{"a": {"dtype": "F32", "shape": [1]}}'), "not a safetensors header"),
        (raw_header('{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}', b"1234"), "F99"),
        (raw_header('{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}', b"1234"), "needs 8 bytes, has 4"),
        (raw_header('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}', b"12"), "must begin at byte"),
        (raw_header('{"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}', b"12"), "its tensors end at byte"),
        (raw_header('{"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "a": {}}'), "'a' stands there twice"),
    ],
)
def test_a_file_that_is_not_exactly_its_tensors_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(DataError, match=message):
        read_header(tmp_path / "x.safetensors")


def test_a_model_folder_says_what_its_packages_must_hold(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="found none"):
        model_tensors(tmp_path, "bfloat16")
    (tmp_path / "a.safetensors").write_bytes(safetensors({"w": ("F32", (2, 3), EMBED)}))
    (tmp_path / "b.safetensors").write_bytes(safetensors({"n": ("I32", (1,), b"1234")}))
    assert model_tensors(tmp_path, "bfloat16") == {"w": ("bfloat16", (2, 3)), "n": ("int32", (1,))}


def test_files_of_a_model_cache_that_are_links_become_files(tmp_path: Path, model: Path) -> None:
    blob = tmp_path / "blob"
    (model / "tokenizer.json").rename(blob)
    (model / "tokenizer.json").symlink_to(blob)
    target = tmp_path / "target"
    target.mkdir()
    assert "tokenizer.json" in copy_model_files(model, target, "float32")
    assert not (target / "tokenizer.json").is_symlink()
    assert (target / "tokenizer.json").read_bytes() == blob.read_bytes()
