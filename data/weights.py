"""Weight packages: the folder of one policy version, complete, proven and read-only. Knows files, not models: no torch.

`seal` is P2-P5 of docs/publish.md, `verify` is Q0. A folder `weights/000042-3f9a1c0b7d21/` holds the trainer's
safetensors files, their index, config.json, tokenizer files and MANIFEST.json, and nothing else.
"""

import ctypes
import errno
import hashlib
import json
import math
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conf.errors import DataError, PublishError
from data.crash import crash_point
from data.manifest import canonical
from data.model_files import copy_model_files
from data.objects import sync_folder
from data.package import (
    MANIFEST,
    Canary,
    FileInfo,
    Package,
    PackageManifest,
    Probe,
    Receipt,
    TensorInfo,
    content_digest,
)
from data.shards import WIDTHS, Entry, read_header, read_values

INDEX = "model.safetensors.index.json"
DELETING = ".deleting-"  # begins the name of a folder that is being deleted
CANARIES = 4  # tensors, and elements of each

Expected = Mapping[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape


def seal(
    staging: Path,
    weights_dir: Path,
    receipts: Sequence[Receipt],
    *,
    model: Path,
    expected_tensors: Expected,
    run: str,
    number: int,
    parent: int | None,
    optimizer_step: int,
    dataset: str,
    config_digest: str,
    code_digest: str,
    tied: Mapping[str, str],
    probe: Probe,
    probe_tolerance: float,
    rollback_of: int | None = None,
) -> Package:
    """Steps P2-P5: what the ranks staged becomes weights_dir/<label>; config and tokenizer come from `model`.

    `staging` and `weights_dir` are on one filesystem. Sealing the same again gives the sealed folder. Raises
    PublishError and leaves `staging` for the caller to clean: the version is then to be abandoned.
    """
    with _step("P2", staging, number):
        _check_receipts(receipts, {name: value for name, value in expected_tensors.items() if name not in tied})
        shards = [file for receipt in receipts for file in receipt.files]
        tensors = sorted((t for receipt in receipts for t in receipt.tensors), key=lambda t: t.name)
        _check_closed(staging, {f.path for f in shards})
    with _step("P3", staging, number):
        _check_probe(probe)
        places = _check_headers(staging, tensors, shards)
        copied = copy_model_files(model, staging, _main_dtype(tensors))
        _check_tied(tied, tensors, json.loads((staging / "config.json").read_bytes()))
        (staging / INDEX).write_bytes(canonical(_index(tensors)))
        others = [_describe(staging / name) for name in (*copied, INDEX)]
        manifest = PackageManifest(
            run=run,
            number=number,
            content=content_digest(tensors),
            parent=parent,
            rollback_of=rollback_of,
            optimizer_step=optimizer_step,
            dataset=dataset,
            config_digest=config_digest,
            code_digest=code_digest,
            files=tuple(sorted([*shards, *others], key=lambda file: file.path)),
            tensors=tuple(tensors),
            tied=dict(tied),
            probe=probe,
            probe_tolerance=probe_tolerance,
            canaries=_canaries(staging, tensors, places),
        )
        (staging / MANIFEST).write_bytes(manifest.to_bytes())
        _sync(staging)
    with _step("P4", staging, number):
        _check_folder(staging, tensor_bytes=True)
    with _step("P5", staging, number):
        return _move(staging, weights_dir, manifest)


def verify(folder: Path, every_tensor: bool = False) -> Package:
    """Step Q0: the folder is exactly what was sealed under its name. Raises PublishError with step Q0.

    The manifest agrees with itself and with the folder's name; no file, link or folder besides its list; sizes,
    SHA-256, safetensors headers and index agree with it. `every_tensor` also hashes each tensor by itself, so that the
    content in the ledger proves them, whoever wrote the manifest.
    """
    with _step("Q0", folder):
        manifest = _check_folder(folder, tensor_bytes=every_tensor)
        if folder.name != manifest.label:
            raise DataError(f"{folder}: its manifest is of version {manifest.label}")
        return Package(folder, manifest)


def find_sealed(weights_dir: Path, number: int) -> Path | None:
    """The sealed folder of a version, if there is one: after a crash the ledger may not know of it yet."""
    found = sorted(weights_dir.glob(f"{number:06d}-*"))
    if len(found) > 1:
        raise PublishError("Q0", f"version {number} must have one folder, found {', '.join(p.name for p in found)}")
    return found[0] if found else None


def withdraw(folder: Path) -> Path:
    """Take a sealed folder's name away, so half a version is never found under a label; gives what is to be deleted."""
    doomed = folder.with_name(f"{DELETING}{folder.name}")
    folder.rename(doomed)
    doomed.chmod(0o755)
    sync_folder(doomed.parent)
    return doomed


def delete_package(folder: Path) -> None:
    """Delete a sealed folder."""
    shutil.rmtree(withdraw(folder))


@contextmanager
def _step(step: str, folder: Path, number: int | None = None) -> Iterator[None]:
    """What goes wrong inside is a failure of this publish step; `number` is the version where it is being made."""
    if number is not None:
        crash_point(f"publish/{number}/{step}")
    try:
        yield
    except ValueError as error:  # DataError is one
        raise PublishError(step, str(error)) from error
    except OSError as error:
        raise PublishError(step, f"{folder}: {error}") from error


def _check_receipts(receipts: Sequence[Receipt], expected: Expected) -> None:
    worlds = {receipt.world for receipt in receipts}
    ranks = sorted(receipt.rank for receipt in receipts)
    if len(worlds) != 1 or ranks != list(range(*worlds)):
        raise DataError(f"expected one receipt of each of {sorted(worlds)} ranks, found ranks {ranks}")
    tensors = [t for receipt in receipts for t in receipt.tensors]
    files = [f.path for receipt in receipts for f in receipt.files]
    for what, names in (("tensor", [t.name for t in tensors]), ("file", files)):
        if doubled := sorted(name for name, count in Counter(names).items() if count > 1):
            raise DataError(
                f"{what} {doubled[0]} must be written by one rank, {names.count(doubled[0])} receipts have it"
            )
    if odd := [name for name in files if Path(name).name != name or not name.endswith(".safetensors")]:
        raise DataError(f"ranks write *.safetensors files in the staging folder itself, found {odd}")
    found = {t.name: (t.dtype, t.shape) for t in tensors}
    if missing := sorted(set(expected) - set(found)):
        raise DataError(f"{len(missing)} of {len(expected)} tensors are missing, first {missing[0]}")
    if extra := sorted(set(found) - set(expected)):
        raise DataError(f"{len(extra)} tensors are not the model's, first {extra[0]}")
    for name, value in found.items():
        if value != expected[name]:
            raise DataError(f"tensor {name}: expected {expected[name]}, found {value}")
    for t in tensors:
        if t.nonfinite:
            raise DataError(f"tensor {t.name}: expected 0 values that are not finite, found {t.nonfinite}")
    if lost := sorted({t.file for t in tensors} - set(files)):
        raise DataError(f"tensors lie in {lost[0]}, which no receipt has")


def _check_probe(probe: Probe) -> None:
    expected, found = len(probe.ids) - 1, [p for p in probe.logprobs if math.isfinite(p)]
    if expected < 1 or not len(probe.logprobs) == len(found) == expected:
        raise DataError(
            f"probe of {expected + 1} ids: expected {expected} finite log-probabilities, got {probe.logprobs}"
        )


def _check_tied(tied: Mapping[str, str], tensors: Sequence[TensorInfo], config: Mapping[str, Any]) -> None:
    stored = {t.name for t in tensors}
    for name, target in tied.items():
        if name in stored or target not in stored:
            raise DataError(f"tied tensor {name} must not be stored and {target} must be")
    if tied and config.get("tie_word_embeddings") is False:
        raise DataError(f"{', '.join(tied)}: not stored as tied, but config.json has tie_word_embeddings false")


def _check_closed(folder: Path, names: set[str]) -> None:
    """Closed world: these regular files and nothing else."""
    found = {entry.name: entry.is_file(follow_symlinks=False) for entry in os.scandir(folder)}
    for name, regular in sorted(found.items()):
        if not regular:
            raise DataError(f"{folder.name}/{name}: expected a regular file, found a link, folder or device")
        if name not in names:
            raise DataError(f"{folder.name}/{name}: not in the list of this version's files")
    if missing := sorted(names - set(found)):
        raise DataError(f"{folder.name}/{missing[0]}: missing")


def _check_folder(folder: Path, tensor_bytes: bool = False) -> PackageManifest:
    """Everything on disk against the manifest on disk; `tensor_bytes` also hashes each tensor by itself."""
    if folder.is_symlink() or not folder.is_dir():
        raise DataError(f"{folder}: expected a folder")
    if not (folder / MANIFEST).is_file():
        raise DataError(f"{folder.name}/{MANIFEST}: missing")
    try:
        manifest = PackageManifest.from_bytes((folder / MANIFEST).read_bytes())
    except DataError as error:
        raise DataError(f"{folder.name}/{error}") from error
    _check_closed(folder, {MANIFEST, *(f.path for f in manifest.files)})
    with ThreadPoolExecutor() as pool:  # hashing releases the interpreter's lock
        for expected, found in zip(
            manifest.files, pool.map(lambda f: _describe(folder / f.path), manifest.files), strict=True
        ):
            if expected.size != found.size:
                raise DataError(f"{folder.name}/{found.path}: expected {expected.size} bytes, found {found.size}")
            if expected != found:
                raise DataError(f"{folder.name}/{found.path}: expected SHA-256 {expected.sha256}, found {found.sha256}")
        shards = [f for f in manifest.files if f.path.endswith(".safetensors")]
        places = _check_headers(folder, manifest.tensors, shards)
        if tensor_bytes:
            digests = pool.map(lambda t: _tensor_digest(folder / t.file, places[t.name]), manifest.tensors)
            for tensor, digest in zip(manifest.tensors, digests, strict=True):
                if tensor.sha256 != digest:
                    raise DataError(f"tensor {tensor.name}: expected SHA-256 {tensor.sha256}, found {digest}")
    if (folder / INDEX).read_bytes() != canonical(_index(manifest.tensors)):
        raise DataError(f"{folder.name}/{INDEX}: disagrees with the manifest's tensors")
    if damaged := [t for t in manifest.tensors if t.nonfinite]:
        raise DataError(f"tensor {damaged[0].name}: {damaged[0].nonfinite} values are not finite")
    return manifest


def _check_headers(folder: Path, tensors: Sequence[TensorInfo], shards: Sequence[FileInfo]) -> dict[str, Entry]:
    """Where each tensor lies. The files hold the listed tensors, each once, and no other."""
    found = [(name, f.path, entry) for f in shards for name, entry in read_header(folder / f.path).items()]
    listed = Counter((t.name, t.file, t.dtype, t.shape) for t in tensors)
    stored = Counter((name, file, entry.dtype, entry.shape) for name, file, entry in found)
    if absent := sorted(listed - stored):
        raise DataError(f"{folder.name}: tensor {absent[0]} is listed, the files do not hold it so")
    if extra := sorted(stored - listed):
        raise DataError(f"{folder.name}: the files hold tensor {extra[0]}, the list does not have it so")
    return {name: entry for name, _, entry in found}


def _index(tensors: Sequence[TensorInfo]) -> dict[str, Any]:
    """The file transformers and SGLang look tensors up in."""
    size = sum(math.prod(t.shape) * WIDTHS[t.dtype] for t in tensors)
    return {"metadata": {"total_size": size}, "weight_map": {t.name: t.file for t in tensors}}


def _describe(path: Path) -> FileInfo:
    with open(path, "rb") as file:
        return FileInfo(path.name, path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


def _tensor_digest(path: Path, entry: Entry) -> str:
    with (
        open(path, "rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data,
        memoryview(data) as whole,
        whole[entry.start : entry.end] as tensor,
    ):
        return hashlib.sha256(tensor).hexdigest()


def _main_dtype(tensors: Sequence[TensorInfo]) -> str:
    """The dtype of most elements, for config.json."""
    sizes: Counter[str] = Counter()
    for t in tensors:
        sizes[t.dtype] += math.prod(t.shape)
    return sizes.most_common(1)[0][0]


def _canaries(folder: Path, tensors: Sequence[TensorInfo], places: Mapping[str, Entry]) -> tuple[Canary, ...]:
    """Elements of the first rows of tensors spread over the model: what an engine can be asked for by name."""
    matrices = [t for t in tensors if len(t.shape) == 2 and t.dtype in ("float32", "bfloat16", "float16")]
    found = []
    for t in matrices[:: max(1, math.ceil(len(matrices) / CANARIES))]:
        indices = sorted({i * (t.shape[1] - 1) // (CANARIES - 1) for i in range(CANARIES)})
        found.append(Canary(t.name, tuple(indices), read_values(folder / t.file, places[t.name], indices)))
    return tuple(found)


def _sync(folder: Path) -> None:
    """Every file of the folder on disk and read-only."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fchmod(file.fileno(), 0o444)
            os.fsync(file.fileno())
    sync_folder(folder)


def _move(staging: Path, weights_dir: Path, manifest: PackageManifest) -> Package:
    """P5: give the folder its label. A number has one folder for ever."""
    target = weights_dir / manifest.label
    known = find_sealed(weights_dir, manifest.number)
    if known is not None:
        if known.name != manifest.label or verify(known).manifest != manifest:
            raise DataError(f"version {manifest.number} is sealed already as {known.name}, now as {manifest.label}")
        shutil.rmtree(staging)
        return Package(known, manifest)
    _rename_new(staging, target)
    target.chmod(0o555)
    sync_folder(target)
    sync_folder(weights_dir)
    return Package(target, manifest)


def _rename_new(source: Path, target: Path) -> None:
    """Rename a folder, never over another one: os.rename would silently replace an empty folder."""
    libc = ctypes.CDLL(None, use_errno=True)
    at_cwd, noreplace = -100, 1
    if libc.renameat2(at_cwd, os.fsencode(source), at_cwd, os.fsencode(target), noreplace) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(target))
    target.mkdir()  # this filesystem cannot refuse by itself (NFS): the empty folder is the claim
    source.rename(target)
