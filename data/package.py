"""What a weight package says of itself: receipts of the ranks, MANIFEST.json, and the digest that names its content."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from conf.errors import DataError
from data.manifest import canonical
from data.refs import PolicyRef
from data.shards import unique_keys

FORMAT = 1
MANIFEST = "MANIFEST.json"


@dataclass(frozen=True)
class FileInfo:
    path: str  # a plain file name
    size: int  # bytes
    sha256: str


@dataclass(frozen=True)
class TensorInfo:
    name: str
    dtype: str  # torch's name: bfloat16, float32, ...
    shape: tuple[int, ...]
    sha256: str  # of the tensor's bytes as they stand in the file
    file: str
    nonfinite: int  # elements that are NaN or infinite

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(**{**value, "shape": tuple(value["shape"])})


@dataclass(frozen=True)
class Receipt:
    """What one rank wrote. Produced by every trainer rank, consumed by `seal`; a rank that wrote nothing says so."""

    rank: int
    world: int
    files: tuple[FileInfo, ...]
    tensors: tuple[TensorInfo, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(
            rank=value["rank"],
            world=value["world"],
            files=tuple(FileInfo(**f) for f in value["files"]),
            tensors=tuple(TensorInfo.from_json(t) for t in value["tensors"]),
        )


@dataclass(frozen=True)
class Probe:
    """A text that trainer and engine both score. Produced by the trainer at export, consumed by Q10."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]  # nats; the trainer's log p(ids[i] | ids[:i]) for i >= 1: one fewer than ids

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        return cls(tuple(value["ids"]), tuple(value["logprobs"]))


@dataclass(frozen=True)
class Canary:
    """A few values an engine must hold after the update. Consumed by Q7."""

    tensor: str
    indices: tuple[int, ...]  # flat, all in the tensor's first row
    values: tuple[float, ...]  # as float32


@dataclass(frozen=True)
class PackageManifest:
    """MANIFEST.json."""

    run: str
    number: int
    content: str  # content_digest of the tensors
    parent: int | None  # the version it was trained from; None: the starting weights
    rollback_of: int | None  # the older version whose content this is; None: new content
    optimizer_step: int
    dataset: str  # id of the dataset it was trained on; empty: the starting weights
    config_digest: str
    code_digest: str
    files: tuple[FileInfo, ...]  # every file but MANIFEST.json
    tensors: tuple[TensorInfo, ...]
    tied: Mapping[str, str]  # name that is not stored -> the tensor it shares
    probe: Probe
    probe_tolerance: float  # nats; mean |difference| allowed
    canaries: tuple[Canary, ...]

    @property
    def ref(self) -> PolicyRef:
        return PolicyRef(self.run, self.number, self.content, self.optimizer_step, self.dataset)

    @property
    def label(self) -> str:
        return self.ref.label

    def to_bytes(self) -> bytes:
        """Canonical JSON; `digest` is the SHA-256 of all the rest."""
        body = {"format": FORMAT, **asdict(self)}
        return canonical({**body, "digest": hashlib.sha256(canonical(body)).hexdigest()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises DataError for anything but what `to_bytes` writes, or tensors and content that disagree."""
        try:
            value = json.loads(data, object_pairs_hook=unique_keys)
            if value.pop("format") != FORMAT:
                raise DataError(f"{MANIFEST}: expected format {FORMAT}")
            value.pop("digest")
            value["files"] = tuple(FileInfo(**f) for f in value["files"])
            value["tensors"] = tuple(TensorInfo.from_json(t) for t in value["tensors"])
            value["probe"] = Probe.from_json(value["probe"])
            value["canaries"] = tuple(
                Canary(c["tensor"], tuple(c["indices"]), tuple(c["values"])) for c in value["canaries"]
            )
            manifest = cls(**{f.name: value.pop(f.name) for f in fields(cls)})
            written = manifest.to_bytes()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{MANIFEST}: not a manifest: {error!r}") from error
        if written != data:
            raise DataError(f"{MANIFEST}: its digest or form is not that of its content: it was changed after sealing")
        if content_digest(manifest.tensors) != manifest.content:
            raise DataError(f"{MANIFEST}: content {manifest.content} is not the digest of its tensor list")
        return manifest


@dataclass(frozen=True)
class Package:
    """A sealed version folder that was just proven."""

    folder: Path
    manifest: PackageManifest


def content_digest(tensors: Sequence[TensorInfo]) -> str:
    """SHA-256 over the sorted (name, dtype, shape, digest): the same however the tensors are split over files."""
    return hashlib.sha256(canonical(sorted([t.name, t.dtype, t.shape, t.sha256] for t in tensors))).hexdigest()
