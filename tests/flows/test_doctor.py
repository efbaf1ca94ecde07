"""`ratchet doctor` against a real Prefect server and a run that was really killed."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from uuid import UUID

import pytest
from prefect import get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import FlowRun
from rich.console import Console

from conf.errors import RunError
from data.run_lock import lock_run
from flows import doctor as module
from flows.doctor import FLOW_RUN, SLOTS, doctor, forget, processes, recall, remember

ROOT = Path(__file__).parents[2]

# A run whose second iteration hangs in a stage, with a slot of a limit taken, as a run takes its devices.
HANGING = """
import asyncio, sys, uuid
from pathlib import Path
from prefect import flow, task, get_client
from prefect.cache_policies import NO_CACHE
from data.ledger import Ledger
from data.run_lock import lock_run
from flows.doctor import SLOTS, remember, remember_flow_run
folder, limit = Path(sys.argv[1]), sys.argv[2]

@task(name="stage", task_run_name="{name}", cache_policy=NO_CACHE, persist_result=False)
async def stage(name):
    if name == "update":
        (folder / "hangs").touch()
        await asyncio.sleep(3600)

@flow(name="iteration", flow_run_name="iteration-{number:06d}", persist_result=False)
async def iteration(number):
    await stage("rollout")
    if number == 2:
        await stage("update")

@flow(name="rl-run", flow_run_name="doctor-test", persist_result=False)
async def run():
    remember_flow_run(folder)
    async with get_client() as client:
        taken = await client.increment_concurrency_slots_with_lease([limit], 1, "concurrency", 600)
        remember(folder, SLOTS, taken.json()["lease_id"])
    for number in (1, 2):
        await iteration(number)

with lock_run(folder):
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.open_run(folder.name, "", "")
    asyncio.run(run())
"""


@pytest.fixture
def killed(prefect_api: str, tmp_path: Path) -> Path:
    """The folder of a run that was killed with -9 in the stage `update` of iteration 2."""
    folder = tmp_path / "demo-001"
    folder.mkdir()
    asyncio.run(_create_limit(tmp_path.name))
    command = [sys.executable, "-c", HANGING, str(folder), _limit(tmp_path.name)]
    environment = {**os.environ, "PREFECT_API_URL": prefect_api, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        while not (folder / "hangs").exists():
            assert process.poll() is None
        asyncio.run(_until_known(folder))
        process.kill()
        assert process.wait() == -signal.SIGKILL
    (folder / "hangs").unlink()
    return folder


def _limit(name: str) -> str:
    return f"devices-{name}".replace("_", "-")


async def _create_limit(name: str) -> None:
    async with get_client() as client:
        await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=_limit(name), limit=1))


async def _until_known(folder: Path) -> None:
    """Task runs reach the server late, as events: `rollout` has ended, `update` goes on."""
    async with get_client() as client:
        known: set[str] = set()
        while "update" not in known or "rollout" in known:
            await asyncio.sleep(0.1)
            lines = [finding.what.split() for finding in await module.runs(folder, client)]
            known = {line[2] for line in lines}


def state(folder: Path) -> dict[str, str]:
    """Names of everything the doctor would repair, and the flow runs' states."""

    async def read() -> dict[str, str]:
        async with get_client() as client:
            parent = await client.read_flow_run(UUID(recall(folder, FLOW_RUN)[0]))
            runs: list[FlowRun] = [parent, *await module._children(client, [parent.id])]
            found = {run.name: str(run.state_name) for run in runs}
            limit = await client.read_global_concurrency_limit_by_name(_limit(folder.parent.name))
            return {**found, "slots": str(limit.active_slots)}

    return asyncio.run(read())


def examine(folder: Path, capsys: pytest.CaptureFixture[str], *, dry_run: bool = False) -> tuple[int, list[str]]:
    code = doctor(str(folder), Console(highlight=False, soft_wrap=True), dry_run=dry_run)
    return code, capsys.readouterr().out.splitlines()


def test_what_a_killed_run_left_in_prefect_is_crashed_and_its_slot_is_free(
    killed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {"doctor-test": "Running", "iteration-000001": "Completed", "iteration-000002": "Running", "slots": "1"}
    assert state(killed) == before

    code, planned = examine(killed, capsys, dry_run=True)
    assert state(killed) == before
    assert code == 1
    assert planned[-1] == f"{killed}: 5 thing(s) left to do"

    code, lines = examine(killed, capsys)
    assert (code, lines[-1]) == (0, f"{killed}: nothing left to do")
    assert [line.split(" (")[0] for line in lines[:-1]] == [
        f"concurrency slots of lease {lines[0].split()[4].rstrip(':')}: released",
        "task run iteration-1 of doctor-test",
        "task run update of iteration-000002",
        "flow run iteration-000002",
        "flow run doctor-test",
    ]
    assert all(line.endswith("is Running: set to Crashed") for line in lines[1:-1])
    assert state(killed) == {
        "doctor-test": "Crashed", "iteration-000001": "Completed", "iteration-000002": "Crashed", "slots": "0",
    }  # fmt: skip
    assert recall(killed, SLOTS) == []

    assert examine(killed, capsys) == (0, [f"{killed}: nothing left to do"])


def test_the_process_that_was_killed_is_named(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    holder = (killed / "lock").read_text().strip()
    _, lines = examine(killed, capsys, dry_run=True)
    assert lines[0] == f"process {holder} had the run and was killed: its lock is free"


def test_flow_runs_of_others_are_left_alone(killed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = killed.parent / "other-001"
    killed.rename(others)
    killed.mkdir()
    for name in ("ledger.sqlite", "lock"):
        (killed / name).write_bytes((others / name).read_bytes())
    assert examine(killed, capsys)[0] == 0
    assert state(others)["doctor-test"] == "Running"
    examine(others, capsys)


# -- without Prefect


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "ledger.sqlite").touch()
    return tmp_path


def test_a_run_that_goes_on_is_refused(folder: Path) -> None:
    code = "import sys; from pathlib import Path; from data.run_lock import lock_run\n"
    code += "with lock_run(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with pytest.raises(RunError, match=f"in use by process {process.pid}"):
            doctor(str(folder), Console(), dry_run=False)
        process.communicate()


def test_a_process_that_outlived_the_run_is_named_and_left_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "logs").mkdir()
    with (folder / "logs" / "engine0.log").open("w") as log:
        process = subprocess.Popen(["sleep", "3600"], stdout=log)
    try:
        code, lines = examine(folder, capsys)
        assert code == 1
        assert lines[0].startswith(f"process {process.pid} (sleep 3600) has {folder}/logs/engine0.log open: left alone")
        assert lines[0].endswith(f"kill {process.pid}")
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
    assert list(processes(folder)) == []


def test_a_server_that_does_not_answer_is_one_line(folder: Path) -> None:
    from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    remember(folder, FLOW_RUN, "0d5b9a3e-0000-4000-8000-000000000000")
    url = "http://127.0.0.1:9/api"
    refusal = pytest.raises(RunError, match=f"the Prefect server at {url} does not answer")
    with temporary_settings({PREFECT_API_URL: url, PREFECT_CLIENT_MAX_RETRIES: 0}), refusal:
        doctor(str(folder), Console(), dry_run=True)


def test_what_is_remembered_is_recalled_once_until_it_is_forgotten(folder: Path) -> None:
    with lock_run(folder):
        for identity in ("a", "b", "a", ""):
            remember(folder, SLOTS, identity)
        remember(folder, FLOW_RUN, "c")
    assert (recall(folder, SLOTS), recall(folder, FLOW_RUN)) == (["a", "b"], ["c"])
    forget(folder, SLOTS, "a")
    assert (recall(folder, SLOTS), recall(folder, FLOW_RUN)) == (["b"], ["c"])
