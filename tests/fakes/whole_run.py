"""A whole run's folder, written by the product's own store and ledger, with weights of a few hundred bytes."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from conf.load import Loaded, load
from data.accounts import StageRow
from data.checkpoints import seal_checkpoint
from data.columns import column
from data.ledger import Ledger
from data.metrics import write_metrics
from data.package import FileInfo, Package, Probe
from data.refs import DatasetRef, PolicyRef
from data.store import Facts, Store
from data.weights import seal
from flows.graph import Graph, load_graph
from tasks.engines.toy import random_weights, write_shards

GROUPS, SAMPLES = 2, 2


def declared(values: dict[str, list[Any]]) -> pa.Table:
    return pa.table(values, pa.schema([column(name).field for name in values]))


@dataclass
class WholeRun:
    """Opened for writing; each method leaves what the real run leaves at that point."""

    folder: Path
    model: Path
    loaded: Loaded
    ledger: Ledger
    store: Store

    @classmethod
    def start(cls, folder: Path, model: Path, *overrides: str) -> "WholeRun":
        """A new run with version 0 committed."""
        folder.mkdir(parents=True)
        loaded = load("conf/tiny_arithmetic.yaml", [f"model.path={model}", *overrides])
        (folder / "config.yaml").write_text(loaded.text)
        run = cls(folder, model, loaded, Ledger(folder / "ledger.sqlite"), Store(folder, folder.name))
        run.ledger.open_run(folder.name, loaded.digest, loaded.text)
        run.publish(run.seal(0, None, "").manifest.ref)
        (folder / "logs").mkdir()
        (folder / "logs" / "engine0.log").write_text("ready\n")
        return run

    @property
    def graph(self) -> Graph:
        return load_graph(self.loaded.experiment)

    def seal(self, number: int, parent: int | None, dataset: str) -> Package:
        """P0-P5 with two ranks."""
        assert self.ledger.allocate_version(f"{number:06d}/update", parent, number, dataset) == number
        package = self.stage_and_seal(number, parent, dataset)
        self.ledger.set_version(number, "SEALED", package.manifest.content)
        return package

    def stage_and_seal(self, number: int, parent: int | None, dataset: str) -> Package:
        staging = self.folder / "weights" / "staging" / f"{number:06d}"
        staging.mkdir(parents=True)
        weights = random_weights(number)
        return seal(
            staging,
            self.folder / "weights",
            write_shards(staging, weights, ranks=2),
            model=self.model,
            expected_tensors={name: (str(w.dtype), w.shape) for name, w in weights.items()},
            run=self.folder.name,
            number=number,
            parent=parent,
            optimizer_step=number,
            dataset=dataset,
            config_digest=self.loaded.digest,
            code_digest="",
            tied={},
            probe=Probe((5, 6), (-1.0,)),
            probe_tolerance=0.1,
        )

    def publish(self, policy: PolicyRef) -> None:
        for state in ("PUBLISHING", "COMMITTED"):
            self.ledger.set_version(policy.number, state)
        self.ledger.set_engine("engine0", "boot-1", "READY", policy.label, "c0ffee")

    def prompts(self, iteration: int) -> DatasetRef:
        groups = [f"i{iteration:06d}-g{g:03d}" for g in range(GROUPS)]
        first = GROUPS * (iteration - 1)
        rows = declared(
            {
                "group_id": groups,
                "prompt_index": [first + g for g in range(GROUPS)],
                "prompt_text": ["a", "b"],
                "prompt_ids": [[5, 6], [7]],
                "answer": ["1", "2"],
                "prompt_data": ["{}", "{}"],
            }
        )
        return self.store.commit_rows(iteration, "prompts", rows, key="group_id", facts=self.facts())

    def issue(self, iteration: int) -> None:
        rows = self.store.read(self.ref(iteration, "prompts"), ["group_id", "prompt_index"]).to_pydict()
        self.ledger.groups.issue(iteration, list(zip(rows["group_id"], rows["prompt_index"], strict=True)))

    def facts(self, **facts: Any) -> Facts:
        return Facts(config_digest=self.loaded.digest, **facts)

    def ref(self, iteration: int, stage: str) -> DatasetRef:
        ref = self.store.find(iteration, stage)
        assert isinstance(ref, DatasetRef)
        return ref

    def rollout(self, iteration: int, **facts: Any) -> DatasetRef:
        """Two tokens a sample, of the newest committed version."""
        policy = self.ledger.committed()
        assert policy is not None
        samples = [f"i{iteration:06d}-g{g:03d}-s{s:02d}" for g in range(GROUPS) for s in range(SAMPLES)]
        count = len(samples)
        rows = declared(
            {
                "sample_id": samples,
                "group_id": [sample[:12] for sample in samples],
                "response_ids": [[5, 6]] * count,
                "response_mask": [[True, True]] * count,
                "behavior_logprobs": [[-0.5, -0.25 * i] for i in range(count)],
                "version_spans": [[{"label": policy.label, "start": 0, "end": 2}]] * count,
                "policy_version": [policy.number] * count,
                "finish_reason": ["length"] * count,
            }
        )
        parents = [self.ref(iteration, "prompts")]
        found = self.facts(logprob_kind="temperature", **facts)
        return self.store.commit_rows(iteration, "rollout", rows, key="sample_id", parents=parents, facts=found)

    def score(self, iteration: int, groups: int = 1, **reward_facts: Any) -> DatasetRef:
        """Reward and reference beside each other, joined by advantage, which drops all but the first `groups`."""
        rollout, count = self.ref(iteration, "rollout"), GROUPS * SAMPLES
        rewards = declared({"rewards": [0.5 * i for i in range(count)]})
        reward = self.store.commit_columns(iteration, "reward", rollout, rewards, facts=self.facts(**reward_facts))
        logprobs = declared({"ref_logprobs": [[-1.0, -1.0]] * count})
        reference = self.store.commit_columns(iteration, "reference", rollout, logprobs, facts=self.facts())
        dropped = {f"i{iteration:06d}-g{g:03d}": "slow" for g in range(groups, GROUPS)}
        ref = self.store.commit_selection(
            iteration,
            "advantage",
            self.store.join([reward, reference]),
            range(SAMPLES * groups),
            declared({"advantages": [[1.0, 1.0], [-1.0, -1.0]] * groups}),
            facts=self.facts(dropped=dropped),
        )
        self.ledger.groups.settle({group: f"dropped/{reason}" for group, reason in dropped.items()})
        return ref

    def update(self, iteration: int) -> PolicyRef:
        parent = self.ledger.committed()
        assert parent is not None
        dataset = self.ref(iteration, "advantage")
        policy = self.seal(len(self.ledger.versions()), parent.number, dataset.id).manifest.ref
        return self.store.commit_policy(iteration, "update", policy, parents=[dataset], facts=self.facts())

    def iteration(self, iteration: int) -> None:
        self.prompts(iteration)
        self.issue(iteration)
        self.rollout(iteration)
        self.score(iteration)
        policy = self.update(iteration)
        self.ledger.groups.settle({f"i{iteration:06d}-g000": "trained"})
        self.publish(policy)
        self.store.commit_policy(iteration, "publish", policy, parents=[policy], facts=self.facts())
        for stage in ("prompts", "rollout", "reward", "reference", "advantage", "update", "publish", "checkpoint"):
            row = StageRow(iteration, stage, "completed", float(iteration), iteration + 0.5)
            self.ledger.accounts.record_stage(row)
        self.checkpoint(iteration)
        self.ledger.accounts.record_metrics(iteration, {"reward/mean": 0.5, "time/iteration": 1.0})
        write_metrics(self.folder / "metrics.parquet", self.ledger.accounts.metrics())

    def checkpoint(self, iteration: int) -> Path:
        """Two ranks' files; what is in them does not matter to anybody here."""
        folder = self.folder / "checkpoints" / f"{iteration:06d}"
        partial = folder.with_name(f".{folder.name}.partial")
        partial.mkdir(parents=True)
        files = []
        for rank in (0, 1):
            data = f"rank {rank} after iteration {iteration}".encode()
            path = partial / f"rank-{rank:05d}.safetensors"
            path.write_bytes(data)
            files.append(FileInfo(path.name, len(data), hashlib.sha256(data).hexdigest()))
        seal_checkpoint(partial, files, {"step": iteration, "facts": {"iteration": iteration}})
        return partial.rename(folder)
