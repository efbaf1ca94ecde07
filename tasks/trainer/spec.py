"""What the rank processes are told at their start, as one JSON file."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from conf.schema import KL, Correction, Update


@dataclass(frozen=True)
class Spec:
    run_dir: str
    run: str
    model: str  # folder of the starting model
    device: str
    seed: int
    temperature: float  # of the rollout: its log-probabilities are after temperature
    update: Update

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Spec":
        value = json.loads(path.read_text())
        update = value["update"]
        parts = {"kl": KL(**update["kl"]), "correction": Correction(**update["correction"])}
        update = Update(**{**update, **parts})
        return cls(**{**value, "update": update})
