"""`ratchet doctor`: what a killed run left in Prefect and among the processes of this machine, named and repaired.

Prefect leaves the flow and task runs of a killed process Running for ever and its concurrency slots taken until their
lease ends. Which of them belong to a run stands in the run's `prefect.txt`, so nobody else's are ever touched.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterId,
    FlowRunFilterParentFlowRunId,
    TaskRunFilter,
    TaskRunFilterState,
    TaskRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType, TaskRun
from prefect.exceptions import ObjectNotFound
from prefect.states import Crashed
from rich.console import Console

from data.run_lock import lock_holder, lock_run
from flows.prefect_server import prefect_server
from flows.show import run_folder

FLOW_RUN, SLOTS = "flow-run", "slots"
UNDER_WAY = (StateType.RUNNING, StateType.PENDING, StateType.CANCELLING)
PAGE = 200  # the server's limit of rows in an answer


@dataclass(frozen=True)
class Finding:
    """One line; `repair` is None where a person has to decide."""

    what: str
    done: str
    repair: Callable[[], Awaitable[object]] | None = None


def remember(folder: Path, kind: str, identity: str) -> None:
    """Note what of Prefect belongs to the run: a flow run, or the lease of concurrency slots it holds."""
    if identity and identity not in recall(folder, kind):
        with (folder / "prefect.txt").open("a") as file:
            file.write(f"{kind} {identity}\n")


def forget(folder: Path, kind: str, identity: str) -> None:
    """It was given back."""
    path = folder / "prefect.txt"
    kept = [line for line in path.read_text().splitlines() if line != f"{kind} {identity}"]
    staged = path.with_suffix(".tmp")
    staged.write_text("".join(f"{line}\n" for line in kept))
    os.replace(staged, path)


def remember_flow_run(folder: Path) -> None:
    """The flow run this code runs in, if it runs in one."""
    remember(folder, FLOW_RUN, str(runtime.flow_run.id or ""))


def recall(folder: Path, kind: str) -> list[str]:
    """What was remembered, oldest first."""
    try:
        lines = (folder / "prefect.txt").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [line.split()[1] for line in lines if line.startswith(f"{kind} ")]


def doctor(run: str, console: Console, *, dry_run: bool) -> int:
    """Print each finding and, unless `dry_run`, repair what is safe; 1 where something is left to do.

    Raises RunError where a living process has the run, or Prefect's server does not answer.
    """
    folder = run_folder(run)
    holder = lock_holder(folder)
    with lock_run(folder):
        if holder:
            console.print(f"process {holder[0]} had the run and was killed: its lock is free", markup=False)
        left = 0
        for finding in processes(folder):
            left += 1
            console.print(f"{finding.what}: {finding.done}", markup=False)
        if recall(folder, FLOW_RUN) or recall(folder, SLOTS):
            with prefect_server(console.print):
                left += asyncio.run(_repair(folder, console, dry_run))
    console.print(f"{run}: {f'{left} thing(s) left to do' if left else 'nothing left to do'}", markup=False)
    return 1 if left else 0


async def _repair(folder: Path, console: Console, dry_run: bool) -> int:
    left = 0
    async with get_client() as client:
        for finding in [*await slots(folder, client), *await runs(folder, client)]:
            if finding.repair and not dry_run:
                await finding.repair()
            left += dry_run
            console.print(f"{finding.what}: {'would be ' if dry_run else ''}{finding.done}", markup=False)
    return left


async def runs(folder: Path, client: PrefectClient) -> list[Finding]:
    """Flow runs of the run, their iterations and their stages that Prefect takes for under way. Nobody has the run.

    An iteration is also a task run of the flow run it is part of.
    """
    found = [run for identity in recall(folder, FLOW_RUN) if (run := await _flow_run(client, UUID(identity)))]
    found += await _children(client, [run.id for run in found])
    state: State[None] = Crashed(message="its process was killed (ratchet doctor)")
    findings = []
    for run in found:
        for task in await _tasks(client, run.id):
            what = f"task run {task.name} of {run.name} ({task.id}) is {task.state_name}"
            repair = partial(client.set_task_run_state, task.id, state, force=True)
            findings.append(Finding(what, "set to Crashed", repair))
    for run in reversed(found):  # an iteration before the run it is part of
        if run.state_type in UNDER_WAY:
            what = f"flow run {run.name} ({run.id}) is {run.state_name}"
            repair = partial(client.set_flow_run_state, run.id, state, force=True)
            findings.append(Finding(what, "set to Crashed", repair))
    return findings


async def slots(folder: Path, client: PrefectClient) -> list[Finding]:
    """Leases of concurrency slots that the run took and did not give back."""
    return [
        Finding(f"concurrency slots of lease {lease}", "released", partial(_release, folder, client, lease))
        for lease in recall(folder, SLOTS)
    ]


async def _release(folder: Path, client: PrefectClient, lease: str) -> None:
    await client.release_concurrency_slots_with_lease(UUID(lease))  # of a lease that has ended: nothing
    forget(folder, SLOTS, lease)


def processes(folder: Path) -> Iterator[Finding]:
    """Living processes that have a file of the run open, other than this one: they outlived it."""
    root = f"{folder.resolve()}/"
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda path: int(path.name)):
        if process.name == str(os.getpid()):
            continue
        try:
            opened = {os.readlink(link) for link in (process / "fd").iterdir()}
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:  # it has ended, or is another user's
            continue
        if held := sorted(path for path in opened if path.startswith(root)):
            what = f"process {process.name} ({command[:80]}) has {held[0]} open"
            yield Finding(what, f"left alone; if it is of this run, stop it: kill {process.name}")


async def _flow_run(client: PrefectClient, identity: UUID) -> FlowRun | None:
    try:
        return await client.read_flow_run(identity)
    except ObjectNotFound:  # of another server's database, or deleted
        return None


async def _children(client: PrefectClient, parents: list[UUID]) -> list[FlowRun]:
    found: list[FlowRun] = []
    while parents:
        wanted = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=parents))
        page = await client.read_flow_runs(flow_run_filter=wanted, limit=PAGE, offset=len(found))
        found += page
        if len(page) < PAGE:
            break
    return found


async def _tasks(client: PrefectClient, flow_run: UUID) -> list[TaskRun]:
    return await client.read_task_runs(
        flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run])),
        task_run_filter=TaskRunFilter(state=TaskRunFilterState(type=TaskRunFilterStateType(any_=list(UNDER_WAY)))),
        limit=PAGE,
    )
