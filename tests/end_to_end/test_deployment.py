"""prefect.yaml as it is in the repository, on a real Prefect server, run by a real process worker."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from prefect import get_client
from prefect.client.schemas.objects import FlowRun

from data.ledger import Ledger
from tests.end_to_end.launches import PATIENCE_S, ROOT, Launch, Place, launched, stage_committed

pytestmark = pytest.mark.timeout(1800)


def prefect(place: Place, *arguments: str) -> str:
    """Run a command of Prefect in the checkout, as the README says; gives what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", *arguments],
        cwd=ROOT,
        env=place.environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def worker(external: Place) -> Iterator[Launch]:
    """The deployment is registered and a worker looks for its runs each second."""
    prefect(external, "work-pool", "create", "--type", "process", "local")
    prefect(external, "deploy", "--all")
    elsewhere = replace(external, environment={**external.environment, "PREFECT_WORKER_QUERY_SECONDS": "1"})
    command = ("-m", "prefect", "worker", "start", "--pool", "local", "--install-policy", "never")
    with launched(elsewhere, *command) as launch:
        yield launch


def start_run(place: Place, experiment: str, run: str, iterations: int) -> str:
    """Ask for a run with the command of the README; gives the flow run's id."""
    overrides = json.dumps([f"runs_dir={place.folder}/deployed"])
    file = f"{place.folder}/{experiment}.yaml"
    given = (f"experiment={file}", f"overrides={overrides}", f"iterations={iterations}", f"run={run}")
    parameters = [word for parameter in given for word in ("-p", parameter)]
    printed = prefect(place, "deployment", "run", "rl-run/nightly", *parameters)
    return printed.partition("UUID: ")[2].split()[0]


def flow_run(identity: str) -> FlowRun:
    async def read() -> FlowRun:
        async with get_client() as client:
            return await client.read_flow_run(identity)  # type: ignore[arg-type]

    return asyncio.run(read())


def ask(method: str, path: str, body: Any = None) -> Any:
    async def send() -> Any:
        async with get_client() as client:
            return (await client._client.request(method, path, json=body)).json()

    return asyncio.run(send())


def until_final(worker: Launch, identity: str) -> FlowRun:
    worker.until(lambda: (state := flow_run(identity).state) and state.is_final(), "the flow run has ended")
    return flow_run(identity)


def test_a_worker_runs_the_deployment_to_its_end(external: Place, worker: Launch) -> None:
    identity = start_run(external, "small", "first", iterations=1)
    run = until_final(worker, identity)
    assert run.state_name == "Completed", worker.output

    folder = external.folder / "deployed" / "first"
    assert stage_committed(folder, 1, "evaluate")
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        info = ledger.run_info()
        assert info is not None
        assert info.state == "finished"
        assert [(v.number, v.state) for v in ledger.versions()] == [(0, "COMMITTED"), (1, "COMMITTED")]
    finally:
        ledger.close()

    iterations = ask("POST", "/flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [identity]}}})
    assert [child["name"] for child in iterations] == ["iteration-000001"]
    artifacts = ask(
        "POST", "/artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [child["id"] for child in iterations]}}}
    )
    tables = {artifact["key"]: json.loads(artifact["data"]) for artifact in artifacts}
    assert {row["name"] for row in tables["pool-seconds"]} == {"cpu", "rollout", "train"}
    assert {row["stage"] for row in tables["stage-waits"]} >= {"rollout", "reward", "reference", "update", "publish"}
    assert {row["metric"] for row in tables["metrics"]} >= {"reward/mean", "time/rollout", "mismatch/logprob_abs_diff"}


def test_the_schedule_is_registered(worker: Launch) -> None:
    deployment = ask("GET", "/deployments/name/rl-run/nightly")
    assert [(s["active"], s["schedule"]["cron"]) for s in deployment["schedules"]] == [(True, "0 2 * * *")]
    assert deployment["concurrency_limit"] == 1 or deployment["global_concurrency_limit"]["limit"] == 1


def test_a_cancelled_run_leaves_no_process_and_frees_the_run(external: Place, worker: Launch) -> None:
    folder = external.folder / "deployed" / "second"
    idle = set(worker.tree())
    identity = start_run(external, "slow", "second", iterations=1000)
    worker.until(lambda: stage_committed(folder, 1, "prompts"), "the second run is in its rollout")
    started = set(worker.tree()) - idle
    assert len(started) >= 3  # the flow, the trainer, the reward workers
    began = time.monotonic()
    prefect(external, "flow-run", "cancel", identity)
    run = until_final(worker, identity)
    worker.until(lambda: not started & set(worker.tree()), "the cancelled run's processes are gone", 120)
    print(f"cancelled: the last process was gone after {time.monotonic() - began:.1f} s")
    assert run.state_name in ("Cancelled", "Cancelling"), run.state
    Ledger(folder / "ledger.sqlite").close()  # takes the run's lock: nobody holds it


def test_the_worker_leaves_nothing_when_it_ends(external: Place, worker: Launch) -> None:
    worker.process.terminate()
    worker.wait(120)
    worker.until_gone(60)
