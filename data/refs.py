"""What passes between stages and through Prefect: small references, never tables."""

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class DatasetRef:
    """A committed dataset: a few hundred bytes that name it and prove its content.

    Produced by every stage that writes rows, columns or a selection; consumed by the stages that need it.
    """

    run: str
    iteration: int
    stage: str
    digest: str  # SHA-256 of the manifest, which holds the digest of every file
    rows: int
    versions: tuple[str, ...] = ()  # labels of the policy versions its tokens come from; empty: no tokens

    @property
    def id(self) -> str:
        return f"{self.run}/{self.iteration:06d}/{self.stage}@{self.digest[:12]}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "dataset", **asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        fields = {k: v for k, v in value.items() if k != "kind"}
        return cls(**{**fields, "versions": tuple(fields["versions"])})


@dataclass(frozen=True)
class PolicyRef:
    """A policy version: a number that only grows plus the digest of its content.

    Produced by `update` (sealed) and by `publish` (committed); consumed by whoever generates or evaluates.
    """

    run: str
    number: int
    content: str  # SHA-256 over the canonical list of tensors: name, dtype, shape, digest of the bytes
    optimizer_step: int
    dataset: str = ""  # id of the dataset it was trained on; empty: the starting weights

    @property
    def label(self) -> str:
        """What engines are told, and what every token's span carries: `000042-3f9a1c0b7d21`."""
        return f"{self.number:06d}-{self.content[:12]}"

    def to_json(self) -> dict[str, Any]:
        return {"kind": "policy", **asdict(self)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        return cls(**{k: v for k, v in value.items() if k != "kind"})


Ref = DatasetRef | PolicyRef


def ref_from_json(value: dict[str, Any]) -> Ref:
    return (PolicyRef if value["kind"] == "policy" else DatasetRef).from_json(value)
