"""What a run continues from: the trainer's last checkpoint plus the recorded updates, and the newest committed weights.

Training is repeated from the recorded datasets, never from new rollouts, so the same weights come out.
"""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.utilities.annotations import quote

from conf.errors import CheckpointError, PublishError, RunError
from data.checkpoints import read_checkpoint
from data.crash import crash_point
from data.ledger import GIVEN_UP, VersionRow
from data.package import content_digest
from data.prompts import encode_prompts, load_tokenizer
from data.refs import PolicyRef
from data.retention import checkpoints, delete_checkpoint
from data.space import check_space, checkpoint_bytes
from data.weights import verify
from flows.graph import CHECKPOINT
from flows.pool_time import STARTING
from flows.stages import training_dataset
from tasks.publish import Quarantined, publish_to_engines
from tasks.trainer.client import Export
from tasks.update import Exporter, package_dtype

if TYPE_CHECKING:
    from flows.opening import Run

START_KEY = "000000/start"  # what made version 0, in the ledger


async def recover(run: "Run") -> None:
    """Bring trainer and engines to the version the run stands on; for a new run, version 0: the starting weights.

    That version's package need not be there or be sound: what the trainer holds is proven to be its content, and is
    sealed again under a new number where the old one was quarantined.
    """
    head = _head(run)
    async with _at_start(run, "update", name="restore", kind=STARTING):
        if head is not None:
            await _restore_trainer(run, head)
        run.trained = await _sealed(run, head)
    crash_point("start/sealed")
    try:
        await _publish(run, _to_serve(run, head))
    except Quarantined as error:
        run.display.message(f"warning: {error}")
        async with _at_start(run, "update", name="restore", kind=STARTING):
            run.trained = await _sealed(run, head)
        await _publish(run, run.trained)


@asynccontextmanager
async def _at_start(
    run: "Run", stage: Literal["update", "publish"], *, name: str = "", kind: str = ""
) -> AsyncIterator[None]:
    """The stage's pool, brought to its role where it is co-located; the block is an attempt of iteration 0."""
    node = run.graph.of_stage(stage)[0]
    with run.clock(0, node, name=name, kind=kind) as clock:
        async with run.leases.take(node.pool, "the start of the run", clock, "train" if stage == "update" else stage):
            yield


def _to_serve(run: "Run", head: VersionRow | None) -> PolicyRef:
    """What the engines are to hold: the head, or an older version that has a stage to come.

    Where iterations overlap, updates may have gone on before a version was published or evaluated. Publishing the head
    would leave those stages with a version that is no longer the newest.
    """
    assert run.trained is not None  # it is sealed
    update = run.graph.of_stage("update")[0].name
    for number in range(run.remaining().start, head.iteration if head else 0):
        made = run.store.find(number, update)
        to_come = [n for n in run.due(number) if n.stage.reads == "trained" and not run.store.find(number, n.name)]
        if to_come and isinstance(made, PolicyRef):
            policy = run.ledger.live(made)
            if run.ledger.version(policy.number).state not in GIVEN_UP:
                return policy
    return run.trained


def _head(run: "Run") -> VersionRow | None:
    """The version the run stands on: of its newest committed update, roll-back or start. None: it has none yet."""
    update = run.graph.of_stage("update")[0].name
    for row in reversed(run.ledger.versions()):
        # An update that was sealed but not committed by its stage runs again. A number without content is one whose
        # sealing was cut short, unless it is a roll-back: that was asked for and stands.
        sealed = row.content is not None
        if row.rollback_of is not None or (
            sealed and (row.key == START_KEY or run.store.committed(row.iteration, update))
        ):
            return row
    return None


async def _sealed(run: "Run", head: VersionRow | None) -> PolicyRef:
    """The head as a sealed version that may be published. Seals what the trainer holds where there is none."""
    if head is not None and head.content is not None:
        policy = run.ledger.live(head.ref)
        if run.ledger.version(policy.number).state not in GIVEN_UP:
            return policy
    experiment, trainer = run.experiment, run.services.trainer
    exporter = Exporter(trainer, run.ledger, experiment, run.folder, run.config_digest, lambda name, value: None)
    if head is None:  # like any other version, so that the first rollout's tokens have proven weights
        return await exporter.seal_version(
            START_KEY, parent=None, optimizer_step=0, dataset="", probe_ids=_probe_ids(run)
        )
    for row in run.ledger.versions():  # made from the number that is lost; their stages have not ended and run again
        if row.number > head.number and row.key != head.key and row.state in ("EXPORTING", "SEALED"):
            run.ledger.set_version(row.number, "ABANDONED")
    policy = await exporter.seal_version(
        head.key,
        parent=head.parent,
        optimizer_step=head.optimizer_step,
        dataset=head.dataset,
        probe_ids=_probe_ids(run),
        rollback_of=head.rollback_of,
    )
    run.display.message(f"sealed {policy.label} with the content of version {_source(run, head).number}")
    return policy


def _source(run: "Run", row: VersionRow) -> VersionRow:
    """The version whose package has the row's content: of a roll-back without one of its own, where it goes back to."""
    while row.rollback_of is not None and (row.content is None or row.state in GIVEN_UP):
        row = run.ledger.version(row.rollback_of)
    return row


def _probe_ids(run: "Run") -> list[int]:
    experiment = run.experiment
    prompts, _ = run.services.prompts.take(run.services.prompts.start(), 1)
    tokenizer = load_tokenizer(experiment.model.path)
    ids = encode_prompts(tokenizer, prompts, experiment.prompts.system, experiment.prompts.max_tokens)[0]
    return ids[: experiment.publish.probe_tokens]


async def _publish(run: "Run", policy: PolicyRef) -> None:
    run.display.message(f"publishing {policy.label} to {len(run.services.engines)} engine(s)")
    async with _at_start(run, "publish"):
        await publish_to_engines(
            policy, run.folder / "weights", run.services.engines, run.ledger, run.experiment,
            lambda done, total, unit: run.display.stage_progress(0, "publish", done, total, unit),
        )  # fmt: skip


async def _restore_trainer(run: "Run", head: VersionRow) -> None:
    """Load the newest checkpoint on the way to the head, apply the recorded updates after it, and prove the result."""
    update = run.graph.of_stage("update")[0].name
    updates = run.ledger.lineage(head.number)
    iterations = [row.iteration for row in updates]
    checkpoint = await _restore_newest(run, iterations)
    done = iterations.index(int(checkpoint.name)) + 1 if checkpoint else 0
    for number, row in enumerate(updates[done:], done + 1):
        run.display.message(f"replaying the update of iteration {row.iteration} from its recorded dataset")
        manifest = run.store.committed(row.iteration, update)
        if manifest is None:
            raise RunError(f"version {row.number} was made by the update of iteration {row.iteration}, which is lost")
        dataset = training_dataset(run.store, manifest)
        result = await run.services.trainer.update(dataset, number, lambda done, total: None)
        if result.optimizer_step != row.optimizer_step:
            raise RunError(
                f"replay of iteration {row.iteration} must end at optimizer step {row.optimizer_step}, got "
                f"{result.optimizer_step}: the checkpoint {checkpoint or '(none)'} is not of this run"
            )
    await _prove_restored(run, _source(run, head))


async def _restore_newest(run: "Run", iterations: Sequence[int]) -> Path | None:
    """Restore the newest checkpoint of these iterations that can be; None where there is none.

    A bad one is named and put aside.
    """
    while found := [path for path in checkpoints(run.folder) if int(path.name) in iterations]:
        newest = found.pop()
        try:
            facts = read_checkpoint(newest).state["facts"]
            found_in, expected = (facts["policy"]["run"], facts["iteration"]), (run.store.run, int(newest.name))
            if found_in != expected:
                raise CheckpointError(f"checkpoint {newest} must be of (run, iteration) {expected}, is of {found_in}")
            await run.services.trainer.restore(newest)
        except CheckpointError as error:
            then = f"restoring {found[-1].name}" if found else "none is left: replaying from the start"
            run.display.message(f"warning: {error}; {then}")
            aside = newest.with_name(f"{newest.name}.damaged")
            await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
            newest.rename(aside)
            continue
        return newest
    return None


async def _prove_restored(run: "Run", row: VersionRow) -> None:
    """The trainer holds what the version was sealed from.

    Bit by bit; where arithmetic does not repeat (a GPU, another number of threads), within the tolerance that engines
    get too, and the run says so. Raises RunError beyond it.
    """
    export = await _exported(run, _probe_ids(run))
    found = content_digest([tensor for receipt in export.receipts for tensor in receipt.tensors])
    if found == row.content:
        run.display.message(f"the trainer is at {row.ref.label} again, bit by bit")
        return
    what = f"the restored trainer has the weights {found[:12]}, version {row.ref.label} was sealed from others"
    try:
        manifest = (await asyncio.to_thread(verify, run.folder / "weights" / row.ref.label)).manifest
    except PublishError as error:
        raise RunError(f"{what}, and how far they are apart cannot be told: {error}") from error
    export = await _exported(run, manifest.probe.ids)
    pairs = list(zip(export.probe.logprobs, manifest.probe.logprobs, strict=True))
    difference = sum(abs(a - b) for a, b in pairs) / len(pairs)
    if not difference <= manifest.probe_tolerance:
        raise RunError(
            f"{what}: mean |difference| of log-probabilities on its probe must be at most "
            f"{manifest.probe_tolerance:g}, got {difference:.4g}; was {run.experiment.model.path} changed?"
        )
    run.display.message(f"warning: {what}, {difference:.2g} apart in log-probabilities: replay was inexact")


async def _exported(run: "Run", probe_ids: Sequence[int]) -> Export:
    """What an export of the trainer's weights says of them; the files themselves are not kept."""
    staging = run.folder / "weights" / "staging" / "restored"
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed here
    staging.mkdir(parents=True)
    export = await run.services.trainer.export(staging, package_dtype(run.experiment), probe_ids)
    shutil.rmtree(staging)
    return export


async def checkpoint_if_due(run: "Run", iteration: int) -> None:
    """Write a training checkpoint every `update.checkpoint_every` iterations; keep the newest few."""
    folder = run.folder / "checkpoints" / f"{iteration:06d}"
    if iteration % run.experiment.update.checkpoint_every or folder.exists():
        return
    node = run.graph.of_stage("update")[0]
    if run.store.find(iteration + 1, node.name):  # the trainer was restored to where that left it
        return
    with run.clock(iteration, node, name=CHECKPOINT) as clock:
        async with run.leases.take(node.pool, f"{CHECKPOINT} of iteration {iteration}", clock, "train"):
            await _checkpoint(quote((run, folder)))
            clock.stop()
    for old in checkpoints(run.folder)[: -run.experiment.update.keep_checkpoints]:
        await asyncio.to_thread(delete_checkpoint, old)


@task(name=CHECKPOINT, task_run_name=CHECKPOINT, cache_policy=NO_CACHE, persist_result=False)
async def _checkpoint(what: Any) -> None:
    run, folder = what
    iteration = int(folder.name)
    prompts = run.store.committed(iteration, "prompts")
    assert prompts is not None  # the iteration has ended
    folder.parent.mkdir(exist_ok=True)
    needed = checkpoint_bytes(Path(run.experiment.model.path))
    check_space(folder.parent, needed, "checkpoints", "update.keep_checkpoints")
    rollouts = [run.store.committed(iteration, node.name) for node in run.graph.of_stage("rollout")]
    cursor = next((found.facts.cursor for found in rollouts if found and found.facts.cursor), prompts.facts.cursor)
    facts = {"iteration": iteration, "cursor": dict(cursor), "policy": run.held().to_json()}
    await run.services.trainer.checkpoint(folder, facts)
