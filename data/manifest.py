"""What a committed dataset is made of: facts, files, manifest. One canonical JSON document named by its own SHA-256."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self

from conf.errors import DataError
from data.refs import DatasetRef, PolicyRef, Ref, ref_from_json

FORMAT = 2
JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]
Kind = Literal["rows", "columns", "selection", "policy", "join"]


def canonical(value: Any) -> bytes:
    """JSON with one spelling for one value. Raises ValueError for NaN and infinities, TypeError for other objects."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


@dataclass(frozen=True)
class Facts:
    """What a stage knows about its output. Deterministic content only: a time would make a retry another dataset."""

    policy_versions: Mapping[str, int] = field(default_factory=dict)  # label -> response tokens it generated
    sampling: Mapping[str, JSON] = field(default_factory=dict)
    logprob_kind: str = ""  # e.g. "after_temperature"
    tokenizer_digest: str = ""
    reward_code_digest: str = ""
    config_digest: str = ""  # the executor fills it in
    dropped: Mapping[str, str] = field(default_factory=dict)  # group_id -> reason
    # group_id -> finish_reason -> response tokens of each sample that ended, of groups that the rollout dropped
    dropped_lengths: Mapping[str, Mapping[str, list[int]]] = field(default_factory=dict)
    cursor: Mapping[str, JSON] = field(default_factory=dict)  # of the source, AFTER the prompts drawn (rollout: sent)
    metrics: Mapping[str, float] = field(default_factory=dict)  # by the field's names: reward/mean, response_length/max

    def to_json(self) -> dict[str, Any]:
        """Every fact, and how many groups were dropped for each reason."""
        plain = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {**plain, "dropped_counts": dict(Counter(self.dropped.values()))}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{k: v for k, v in value.items() if k != "dropped_counts"})


def _plain(value: Any) -> Any:
    return {key: _plain(below) for key, below in value.items()} if isinstance(value, Mapping) else value


@dataclass(frozen=True)
class FileInfo:
    """One immutable Arrow file of a dataset, and the stage that wrote it."""

    kind: Literal["rows", "columns", "selection"]
    iteration: int
    stage: str
    columns: tuple[str, ...]
    sha256: str
    size: int  # bytes
    rows: int
    schema: str  # fingerprint: SHA-256 over name, type and nullability of every column
    row_keys: str  # SHA-256 over the keys of the rows this file lies beside; of a selection: of the rows it keeps

    @property
    def writer(self) -> str:
        return f"iteration {self.iteration}'s {self.stage}"


@dataclass(frozen=True)
class Manifest:
    """A committed stage output. `files` lists every file of the dataset, upstream first: one manifest reads it all.

    A selection in `files` applies to the files before it; the files after it hold the selected rows.
    """

    kind: Kind
    run: str
    iteration: int
    stage: str
    rows: int
    key: str  # the column with the row keys; empty for a policy
    row_keys: str  # SHA-256 over the key column
    files: tuple[FileInfo, ...]
    parents: tuple[Ref, ...]
    facts: Facts
    policy: PolicyRef | None = None
    digest: str = ""  # SHA-256 of `to_bytes`, not part of it; `sealed` fills it in

    @property
    def ref(self) -> Ref:
        """What passes between stages."""
        return self.policy or self.dataset

    @property
    def dataset(self) -> DatasetRef:
        versions = tuple(sorted(self.facts.policy_versions))
        return DatasetRef(self.run, self.iteration, self.stage, self.digest, self.rows, versions)

    @property
    def columns(self) -> dict[str, FileInfo]:
        """The file of each column, in the order they were written."""
        return {name: f for f in self.files if f.kind != "selection" for name in f.columns}

    def to_json(self) -> dict[str, Any]:
        facts = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "digest"}
        facts["files"] = [asdict(f) for f in self.files]
        facts["parents"] = [p.to_json() for p in self.parents]
        facts["facts"] = self.facts.to_json()
        facts["policy"] = self.policy and self.policy.to_json()
        return {"format": FORMAT, **facts}

    def to_bytes(self) -> bytes:
        return canonical(self.to_json())

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Parse a manifest. Raises DataError for anything but what `to_bytes` writes."""
        try:
            value = json.loads(data)
            found = value.pop("format")
            if found != FORMAT:
                raise DataError(f"manifest has format {found}, this Ratchet reads format {FORMAT}")
            value["files"] = tuple(FileInfo(**{**f, "columns": tuple(f["columns"])}) for f in value["files"])
            value["parents"] = tuple(ref_from_json(p) for p in value["parents"])
            value["facts"] = Facts.from_json(value["facts"])
            value["policy"] = value["policy"] and PolicyRef.from_json(value["policy"])
            manifest = cls(**value, digest=hashlib.sha256(data).hexdigest())
            canonical_data = manifest.to_bytes()
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"manifest cannot be read: {type(error).__name__}: {error}") from error
        if canonical_data != data:
            raise DataError("manifest is not in canonical form: it was not written by this store")
        return manifest

    def sealed(self) -> "Manifest":
        """The manifest with its digest. Raises DataError where its facts are not plain JSON."""
        try:
            data = self.to_bytes()
        except (ValueError, TypeError) as error:
            what = f"iteration {self.iteration}'s {self.stage}"
            raise DataError(f"facts of {what} must be plain JSON: {error}") from error
        Manifest.from_bytes(data)  # what cannot be read back is not written
        return replace(self, digest=hashlib.sha256(data).hexdigest())
