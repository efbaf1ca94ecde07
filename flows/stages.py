"""One stage of one iteration as a Prefect task: wait for inputs, take the pool, run, commit, account.

The store decides what is finished: a stage whose reference exists is not run again and shows as Cached in Prefect.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.states import Completed
from prefect.utilities.annotations import quote

from conf.errors import RatchetError, StageError
from conf.pools import apart
from data.crash import crash_point
from data.issued import PROMPTS, issued_groups
from data.ledger import Ledger
from data.manifest import Manifest
from data.refs import DatasetRef, PolicyRef, Ref
from data.store import Store
from flows.graph import GraphNode
from flows.schedule import Window, shares
from flows.waits import REWARD, UPSTREAM, WEIGHTS, Clock
from tasks.handover import Role
from tasks.stage import Arriving, Columns, Inputs, NewPolicy, Output, Rows, Selection

if TYPE_CHECKING:
    from flows.run import Run

Needs = Mapping[str, "asyncio.Task[Ref]"]
Lease = AbstractAsyncContextManager[None]


@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False, log_prints=False)
async def _stage_task(name: str, iteration: int, body: Any) -> Any:
    """The Prefect task; `body` is quoted, so Prefect neither walks through nor hashes what it closes over."""
    ref, cached = await body()
    return Completed(name="Cached", message=f"already committed: {ref}", data=ref) if cached else ref


async def run_stage(run: "Run", node: GraphNode, iteration: int, needs: Needs) -> Ref:
    """Give the node's committed output, running the stage if it is not there yet."""
    output: list[Ref] = []  # a task that ends as Cached gives its state, not its data

    async def body() -> tuple[Ref, bool]:
        if found := run.store.find(iteration, node.name):
            run.window.began(node, iteration)
            output.append(found)
            _committed(run, node, iteration)
            return found, True
        with run.clock(iteration, node) as clock:
            clock.coming = True
            urgent = _urgent(node)
            role: Role = "publish" if urgent else node.stage.role

            def pool() -> Lease:
                shared = shares(run.experiment, node)
                return run.leases.take(node.pool, str(clock), clock, role, shared=shared, urgent=urgent)

            arriving = _arriving(run, node, iteration, needs, clock, pool)
            refs = {} if arriving else await _upstream(run, needs, clock)
            await _through(run.window, node, iteration, clock)
            async with nullcontext() if arriving else pool():
                ref = await _timed(run, node, iteration, refs, clock, arriving)
        crash_point(f"{iteration}/{node.name}/committed")
        output.append(ref)
        _committed(run, node, iteration)
        return ref, False

    await _stage_task(node.name, iteration, quote(body))
    return output[0]


def _urgent(node: GraphNode) -> bool:
    """Whether it goes before others on its pool: everything after a publish uses fresher weights."""
    return node.stage.name == "publish"


async def _through(window: Window, node: GraphNode, iteration: int, clock: Clock) -> None:
    for gate in window.gates(node, iteration):
        if not gate.future.done():
            with clock.waiting(gate.cause, gate.what):
                await asyncio.wait([gate.future])
        gate.future.result()


def _committed(run: "Run", node: GraphNode, iteration: int) -> None:
    """Bring ledger, run and schedule to what the committed output says."""
    manifest = settle(run.store, run.ledger, node, iteration)
    assert manifest is not None  # it is committed
    if node.stage.name == "update" and isinstance(manifest.ref, PolicyRef):
        run.trained = manifest.ref
    if node.name in run.window.rollouts:
        run.window.rolled(iteration, manifest, trained=run.store.find(iteration, run.window.update) is not None)


def _arriving(
    run: "Run", node: GraphNode, iteration: int, needs: Needs, clock: Clock, pool: Callable[[], Lease]
) -> Arriving | None:
    """Where the stage can begin before its input is committed: it streams, and needs one rollout, which is not over.

    A stage that needs a pool of its own does so where the engines lose nothing by it.
    """
    if not node.stage.streams or len(needs) != 1:
        return None
    ((name, rollout),) = needs.items()
    engines = run.graph[name]
    if engines.stage.name != "rollout" or rollout.done():
        return None
    beside = node.stage.role == "train" and apart(run.experiment, node.pool, engines.pool)
    if run.leases.exclusive(node.pool) and not beside:
        return None

    async def whole() -> Inputs:
        return await asyncio.to_thread(_read, run, node, await _upstream(run, needs, clock))

    stream = run.stream(iteration, name)
    waiting = partial(clock.waiting, UPSTREAM, f"for the next group of {name}", on=[name])
    return Arriving(stream, rollout, waiting, whole, pool)


async def _timed(
    run: "Run", node: GraphNode, iteration: int, refs: Mapping[str, Ref], clock: Clock, arriving: Arriving | None
) -> Ref:
    """Run the stage; its clock stops while it still has the pool. What it raises says which stage it was."""
    run.display.stage_begun(iteration, node.name)
    run.moved = time.monotonic()
    try:
        return await _produce(run, node, iteration, refs, clock, arriving)
    except RatchetError:
        raise
    except Exception as error:
        raise StageError(f"stage {clock} raised {type(error).__name__}: {error}") from error
    finally:
        clock.stop()
        run.moved = time.monotonic()
        run.display.stage_done(iteration, node.name)


async def _upstream(run: "Run", needs: Needs, clock: Clock) -> dict[str, Ref]:
    """Wait for every input, counted as a wait for weights or reward where nothing else is missing."""
    while pending := {name: task for name, task in needs.items() if not task.done()}:
        stages = [run.graph[name].stage for name in pending]
        policies, rewards = (all(s.output == "policy" for s in stages), all(s.name == "reward" for s in stages))
        cause = WEIGHTS if policies else REWARD if rewards else UPSTREAM
        with clock.waiting(cause, f"for {', '.join(pending)}", on=list(pending)):
            await asyncio.wait(pending.values(), return_when=asyncio.FIRST_COMPLETED)
    return {name: task.result() for name, task in needs.items()}


async def _produce(
    run: "Run", node: GraphNode, iteration: int, refs: Mapping[str, Ref], clock: Clock, arriving: Arriving | None
) -> Ref:
    inputs = Inputs({}, None, None, arriving) if arriving else await asyncio.to_thread(_read, run, node, refs)
    crash_point(f"{iteration}/{node.name}/begun")
    clock.coming = False
    run.window.began(node, iteration)  # whoever waits for it goes on once the stage's own work has begun
    output = await node.stage.run(inputs, run.context(iteration, node.name, clock), **node.options)
    inputs = await inputs.whole()
    crash_point(f"{iteration}/{node.name}/computed")
    began = time.time()
    ref = await asyncio.to_thread(_commit, run, node, iteration, inputs, output)
    run.measure(iteration, f"commit/{node.name}", time.time() - began)
    return ref


def _read(run: "Run", node: GraphNode, refs: Mapping[str, Ref]) -> Inputs:
    datasets = [ref for ref in refs.values() if isinstance(ref, DatasetRef)]
    if not datasets:
        return Inputs(refs, None, None)
    joined = run.store.join(datasets)
    return Inputs(refs, joined, run.store.read(joined))


def _commit(run: "Run", node: GraphNode, iteration: int, inputs: Inputs, output: Output) -> Ref:
    dropped = {**_groups_lost(inputs, output, node.name), **output.facts.dropped}
    facts = replace(output.facts, config_digest=run.config_digest, dropped=dropped)
    declared = node.stage.produces(run.experiment)
    expected = {"rows": Rows, "columns": Columns, "selection": Selection, "policy": NewPolicy}[node.stage.output]
    if not isinstance(output, expected):
        raise StageError(
            f"stage {node.name} must return {expected.__name__} (it declares output={node.stage.output!r}), "
            f"got {type(output).__name__}"
        )
    parents = list(inputs.refs.values())
    match output:
        case Rows(table):
            ref: Ref = run.store.commit_rows(
                iteration,
                node.name,
                table,
                key=declared_key(table.column_names),
                parents=parents,
                facts=facts,
                columns=declared,
            )
        case Columns(table):
            assert inputs.dataset is not None  # the graph check refuses columns without rows
            ref = run.store.commit_columns(iteration, node.name, inputs.dataset, table, facts=facts, columns=declared)
        case Selection(indices, table):
            assert inputs.dataset is not None
            ref = run.store.commit_selection(
                iteration, node.name, inputs.dataset, indices, table, facts=facts, columns=declared
            )
        case NewPolicy(policy):
            ref = run.store.commit_policy(iteration, node.name, policy, parents=parents, facts=facts)
    return ref


def _groups_lost(inputs: Inputs, output: Output, node: str) -> dict[str, str]:
    """Groups of which a selection keeps no row, each with the node's name as reason: none vanishes unrecorded."""
    if not isinstance(output, Selection) or inputs.table is None or "group_id" not in inputs.table.column_names:
        return {}
    groups = inputs.table["group_id"].to_pylist()
    return dict.fromkeys(sorted(set(groups) - {groups[i] for i in output.indices}), node)


def declared_key(columns: list[str]) -> str:
    """The row key of new rows: samples have `sample_id`, prompts `group_id`."""
    return "sample_id" if "sample_id" in columns else "group_id"


def settle(store: Store, ledger: Ledger, node: GraphNode, iteration: int) -> Manifest | None:
    """Bring the ledger to what the node's output says, if it is committed. Idempotent: a kill may have come between.

    Gives the output's manifest.
    """
    manifest = store.committed(iteration, node.name)
    if manifest is None:
        return None
    if node.stage.name in (PROMPTS, "rollout") and (prompts := store.committed(iteration, PROMPTS)):
        rollout = manifest if node.stage.name == "rollout" else None
        ledger.groups.issue(iteration, issued_groups(store, prompts, rollout))
    if manifest.facts.dropped and node.stage.reads != "trained":  # evaluation groups were never issued
        ledger.groups.settle({group: f"dropped/{reason}" for group, reason in manifest.facts.dropped.items()})
    if node.stage.name == "update":
        trained = store.read(training_dataset(store, manifest), ["group_id"])["group_id"].to_pylist()
        ledger.groups.settle(dict.fromkeys(trained, "trained"))
    return manifest


def training_dataset(store: Store, update: Manifest) -> DatasetRef:
    """The dataset a committed update was trained on, from its parents."""
    return store.join([parent for parent in update.parents if isinstance(parent, DatasetRef)])
