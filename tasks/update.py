"""Stage `update`: train on the iteration's samples, then export and seal the new weights (PUBLISH steps P0-P5)."""

import asyncio
import hashlib
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow as pa

from conf.errors import PublishError, StageError, TrainerError
from conf.schema import Experiment
from data.crash import crash_point
from data.ledger import Ledger
from data.model_files import model_tensors
from data.package import Package
from data.refs import PolicyRef
from data.space import check_space, package_bytes
from data.store import Facts
from data.versions import check_lag
from data.weights import find_sealed, seal
from tasks.stage import Context, Inputs, NewPolicy, stage
from tasks.trainer.client import Trainer

_ROOT = Path(__file__).parents[1]


def _consumed(experiment: Experiment) -> list[str]:
    update = experiment.update
    return [
        "group_id",
        "prompt_ids",
        "response_ids",
        "response_mask",
        "behavior_logprobs",
        "policy_version",
        "advantages",
        *(["ref_logprobs"] if update.kl.coef else []),
        *(["old_logprobs"] if update.old_logprobs == "recomputed" else []),
    ]


@stage(consumes=_consumed, output="policy", role="train")
async def update(inputs: Inputs, context: Context) -> NewPolicy:
    """ADVANTAGES x policy -> POLICY: PPO-clip with token mean and an optional KL term (formulas: tasks/losses.py).

    Running it again trains once: the trainer stores its answer, the ledger its number, the disk the sealed folder.
    Raises TrainerError, with nothing exported, for a loss or gradient that is not finite and where engine and trainer
    disagree on log-probabilities (update.max_logprob_diff); DataError for samples older than the schedule allows;
    PublishError where the export cannot be proven.
    """
    dataset, table = inputs.dataset, inputs.table
    if dataset is None or table is None or table.num_rows == 0:
        raise StageError(f"update of iteration {context.iteration}: expected samples to train on, got none")
    lag = _lag(table, context)
    number = len(context.ledger.lineage(context.policy.number)) + 1
    result = await context.trainer.update(dataset, number, lambda done, total: context.progress(done, total, "samples"))
    crash_point(f"{context.iteration}/update/trained")
    first = [*table["prompt_ids"][0].as_py(), *table["response_ids"][0].as_py()]
    exporter = Exporter(
        context.trainer, context.ledger, context.experiment, context.run_dir, context.config_digest, context.measure
    )
    policy = await exporter.seal_version(
        f"{context.iteration:06d}/update",
        parent=context.policy.number,
        optimizer_step=result.optimizer_step,
        dataset=dataset.id,
        probe_ids=first[: context.experiment.publish.probe_tokens],
    )
    return NewPolicy(policy, Facts(metrics=result.metrics | lag))


def _lag(table: pa.Table, context: Context) -> dict[str, float]:
    """Mean and maximum over the samples. Raises DataError beyond `schedule.max_lag`, and for a negative one.

    Counted in updates to the weights that the trainer holds: committed ones may be older still.
    """
    ledger, held = context.ledger, context.policy.number
    lags = {first: ledger.updates_between(first, held) for first in table["policy_version"].unique().to_pylist()}
    for first, updates in lags.items():
        again = held - first - updates  # numbers of contents that were sealed again
        check_lag(held, first, context.experiment.schedule.lag_limit + max(again, 0))
    each = [lags[first] for first in table["policy_version"].to_pylist()]
    return {"off_policy/lag_mean": sum(each) / len(each), "off_policy/lag_max": float(max(each))}


@dataclass(frozen=True)
class Exporter:
    """Brings the trainer's weights into a sealed folder below `run_dir/weights`."""

    trainer: Trainer
    ledger: Ledger
    experiment: Experiment
    run_dir: Path
    config_digest: str
    measure: Callable[[str, float], None]

    async def seal_version(
        self,
        key: str,
        *,
        parent: int | None,
        optimizer_step: int,
        dataset: str,
        probe_ids: Sequence[int],
        rollback_of: int | None = None,
    ) -> PolicyRef:
        """P0-P5 for the trainer's present weights; `key` names what made them, and the same key gives the same version.

        A folder that was sealed before a crash is used if the export gives its content again; else it keeps its number
        for ever, and these weights get a new one: replay on another number of ranks, or on a GPU, is not bit by bit.
        Any other failure abandons the version, cleans staging and is raised: the next attempt has a new number. Raises
        RunError, before a number is taken, where the disk has no room.
        """
        model, dtype = Path(self.experiment.model.path), package_dtype(self.experiment)
        check_space(self.run_dir / "weights", package_bytes(model, dtype), "weights", "publish.keep_versions")
        made_from = (key, parent, optimizer_step, dataset, rollback_of)
        number = self.ledger.allocate_version(*made_from)
        crash_point(f"publish/{number}/P0")
        left = find_sealed(self.run_dir / "weights", number)
        try:
            return await self._seal(number, probe_ids)
        except PublishError:
            if left is None:
                raise
        return await self._seal(self.ledger.allocate_version(*made_from), probe_ids)

    async def _seal(self, number: int, probe_ids: Sequence[int]) -> PolicyRef:
        staging = self.run_dir / "weights" / "staging" / f"{number:06d}"
        try:
            package = await self._export(number, staging, probe_ids)
        except (PublishError, TrainerError, OSError):
            self.ledger.set_version(number, "ABANDONED")
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, staging, ignore_errors=True)
        policy = package.manifest.ref
        crash_point(f"publish/{number}/sealed")
        if self.ledger.version(number).content is None:
            self.ledger.set_version(number, "SEALED", policy.content)
        return policy

    async def _export(self, number: int, staging: Path, probe_ids: Sequence[int]) -> Package:
        started = time.monotonic()
        row = self.ledger.version(number)
        dtype = package_dtype(self.experiment)
        model = Path(self.experiment.model.path)
        await asyncio.to_thread(_empty_folder, staging)  # of an attempt that was killed
        export = await self.trainer.export(staging, dtype, probe_ids)
        package = await asyncio.to_thread(
            seal,
            staging,
            self.run_dir / "weights",
            export.receipts,
            model=model,
            expected_tensors=model_tensors(model, dtype),
            run=row.run,
            number=number,
            parent=row.parent,
            rollback_of=row.rollback_of,
            optimizer_step=row.optimizer_step,
            dataset=row.dataset,
            config_digest=self.config_digest,
            code_digest=code_digest(),
            tied=export.tied,
            probe=export.probe,
            probe_tolerance=self.experiment.publish.probe_tolerance,
        )
        self.measure("weights/export_s", time.monotonic() - started)
        return package


def package_dtype(experiment: Experiment) -> str:
    """Precision of weight packages: `publish.dtype`, where `engine` is what the engines compute in."""
    return experiment.rollout.dtype if experiment.publish.dtype == "engine" else experiment.publish.dtype


@cache
def code_digest() -> str:
    """SHA-256 over this program's own source files: which code made a version."""
    sources = sorted(path for part in ("conf", "data", "tasks", "flows") for path in (_ROOT / part).rglob("*.py"))
    lines = [f"{path.relative_to(_ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in sources]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _empty_folder(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
