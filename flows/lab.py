"""A run for proofs: the product's ledger, store, export, publish and rollout, on toy weights and simulated engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa

from conf.schema import Experiment, Model, Publish, Rollout
from data.columns import column
from data.ledger import Ledger
from data.package import Probe
from data.refs import PolicyRef
from data.store import Store
from tasks.engines.client import Sampling
from tasks.engines.fleet import Fleet
from tasks.engines.simulated import SimulatedEngine, SimulatedServer
from tasks.engines.toy import Weights, random_weights, score, write_shards
from tasks.publish import publish_to_engines
from tasks.rollout import generate_batch
from tasks.stage import Context, Rows
from tasks.trainer.client import Export, Trainer
from tasks.update import Exporter

PROBE_IDS = (5, 6, 7, 8, 9)
SAMPLES = 2  # of each prompt
UNUSED: Any = None  # parts of a context that no stage here looks at


@dataclass(frozen=True)
class Ranks:
    """In the place of a trainer of two ranks. The lost one died before it wrote."""

    weights: Weights
    lost_rank: int | None

    async def export(self, staging: Path, dtype: str, probe_ids: Sequence[int]) -> Export:
        receipts = write_shards(staging, self.weights, ranks=2)
        if self.lost_rank is not None:
            (file,) = receipts.pop(self.lost_rank).files
            (staging / file.path).unlink()
        probe = Probe(tuple(probe_ids), score({**random_weights(0), **self.weights}, probe_ids))
        return Export(tuple(receipts), {}, probe)


class Lab:
    """A run without a trainer, and engines without a model."""

    def __init__(self, root: Path, model: Path) -> None:
        self.root = root
        self.experiment = Experiment(
            model=Model(path=str(model)),
            rollout=Rollout(dtype="float32", samples_per_prompt=SAMPLES, max_new_tokens=4, max_failed_share=0.5),
            publish=Publish(probe_tolerance=1e-6),
        )
        self.store = Store(root, root.name)
        self.ledger = self.open_ledger(root)
        self.engines: list[SimulatedEngine] = []

    def open_ledger(self, folder: Path) -> Ledger:
        folder.mkdir(parents=True, exist_ok=True)
        ledger = Ledger(folder / "ledger.sqlite")
        ledger.open_run(self.root.name, "", "")
        return ledger

    def engine(self, ranks: int = 1) -> SimulatedEngine:
        engine = SimulatedEngine(f"engine{len(self.engines)}", SimulatedServer(random_weights(0), ranks))
        self.engines.append(engine)
        return engine

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()
        self.ledger.close()

    async def export(self, weights: Weights, lost_rank: int | None = None) -> PolicyRef:
        """P0-P5 with the shards of two ranks."""
        number = len(self.ledger.versions())
        exporter = Exporter(
            cast(Trainer, Ranks(weights, lost_rank)), self.ledger, self.experiment, self.root, "", _measure
        )
        return await exporter.seal_version(
            f"{number}",
            parent=number - 1 if number else None,
            optimizer_step=number,
            dataset="",
            probe_ids=PROBE_IDS,
        )

    async def publish(self, version: PolicyRef, *engines: SimulatedEngine, **settings: float) -> None:
        experiment = replace(self.experiment, publish=replace(self.experiment.publish, **cast(Any, settings)))
        await publish_to_engines(version, self.root / "weights", Fleet(engines), self.ledger, experiment)

    def state(self, version: PolicyRef, engine: SimulatedEngine) -> str:
        """The version, the engine, and what work it gets."""
        states = {row.name: row.state for row in self.ledger.engines()}
        served = {version.label: "serves it", "": "gets no work"}
        serves = served.get(engine.ready_label, f"serves {engine.ready_label}")
        return f"{self.ledger.version(version.number).state}; {states[engine.name]}, {serves}"

    def context(self, policy: PolicyRef, ledger: Ledger | None = None) -> Context:
        return Context(
            experiment=self.experiment,
            run_dir=self.root,
            config_digest="",
            store=self.store,
            ledger=ledger or self.ledger,
            prompts=UNUSED,
            engines=Fleet(self.engines),
            trainer=UNUSED,
            rewards=UNUSED,
            iteration=1,
            node="rollout",
            policy=policy,
            progress=lambda done, total, unit: None,
            measure=_measure,
            spend=lambda cost, group, count: None,
        )

    async def rollout(self, version: PolicyRef, *prompts: Sequence[int], ledger: Ledger | None = None) -> Rows:
        values: dict[str, list[Any]] = {
            "group_id": [f"g{i}" for i in range(len(prompts))],
            "prompt_index": list(range(len(prompts))),
            "prompt_text": ["" for _ in prompts],
            "prompt_ids": [list(ids) for ids in prompts],
            "answer": ["" for _ in prompts],
            "prompt_data": ["{}" for _ in prompts],
        }
        return await generate_batch(
            self.context(version, ledger), table_of(values), version, Sampling(4, 1.0), samples=SAMPLES
        )


def table_of(values: Mapping[str, Sequence[Any]]) -> pa.Table:
    """Declared columns."""
    return pa.table(dict(values), pa.schema([column(name).field for name in values]))


def _measure(name: str, value: float) -> None:
    pass
