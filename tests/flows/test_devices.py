"""Devices are claimed for a run: by a lock on the machine and by limits of a real Prefect server."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client

from conf.errors import ConfigError, RunError
from conf.load import load
from conf.schema import Experiment
from data.accounts import RUNNING, StageRow
from data.ledger import Ledger
from flows import devices, preflight
from flows.clocks import Clocks
from flows.devices import claimed, devices_of_run, limit_name
from flows.doctor import SLOTS, recall, remember
from flows.opening import own_devices
from flows.pool_time import CLAIM, STARTING, run_seconds
from flows.waits import POOL
from tests.conf.experiments import load_with

pytestmark = pytest.mark.usefixtures("prefect_api")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "RETRY_S", 0.05)
    monkeypatch.setattr(devices, "LOCKS", tmp_path / "locks")


def experiment(folder: Path, *cores: int) -> Experiment:
    listed = ", ".join(f"'cpu:{core}'" for core in cores)
    return load_with(folder, f"pools.train.devices=[{listed}]").experiment


def run_folder(root: Path, name: str) -> Path:
    folder = root / name
    folder.mkdir(exist_ok=True)
    return folder


async def slots(*cores: int) -> list[int]:
    async with get_client() as client:
        limits = [await client.read_global_concurrency_limit_by_name(limit_name(f"cpu:{core}")) for core in cores]
    return [limit.active_slots for limit in limits]


async def eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    while not await condition():
        await asyncio.sleep(0.05)


def test_a_run_has_all_its_devices_for_the_block_and_gives_them_back(tmp_path: Path) -> None:
    async def main() -> None:
        folder, said = run_folder(tmp_path, "a"), list[str]()
        for _ in range(2):
            async with claimed(experiment(tmp_path, 1, 0), folder, said.append):
                assert await slots(0, 1) == [1, 1]
                assert len(recall(folder, SLOTS)) == 1  # for `ratchet doctor`, should the run be killed
                holder = f"run {folder.resolve()} (process {os.getpid()})\n"
                assert (devices.LOCKS / "cpu-0").read_text() == holder
            assert await slots(0, 1) == [0, 0]
            assert recall(folder, SLOTS) == []
        assert said == []

    asyncio.run(main())


def test_a_second_run_that_wants_one_of_them_waits_and_says_for_whom(tmp_path: Path) -> None:
    async def main() -> None:
        order: list[str] = []
        first, second = run_folder(tmp_path, "a"), run_folder(tmp_path, "b")

        async def other() -> None:
            async with claimed(experiment(tmp_path, 2, 3), second, order.append):
                order.append("second")

        async with claimed(experiment(tmp_path, 1, 2), first, order.append):
            waiting = asyncio.create_task(other())

            async def told() -> bool:
                return bool(order)

            await eventually(told)
            order.append("first ends")
        await waiting
        assert order == [
            f"waiting for cpu:2: run {first.resolve()} (process {os.getpid()}) has it", "first ends", "second",
        ]  # fmt: skip

    asyncio.run(main())


def test_the_wait_for_another_runs_devices_is_in_the_ledger(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []

        async def told() -> bool:
            return bool(said)

        async def claim(ledger: Ledger, folder: Path) -> None:
            async with own_devices(experiment(tmp_path, 8), folder, Clocks(ledger), said.append):
                assert [row.state for row in ledger.accounts.stages()] == ["completed"]  # before anything starts

        goes_on, stopped = run_folder(tmp_path, "b"), run_folder(tmp_path, "c")
        async with AsyncExitStack() as stack:
            ledgers = [Ledger(folder / "ledger.sqlite") for folder in (goes_on, stopped)]
            for ledger in ledgers:
                stack.callback(ledger.close)
            async with claimed(experiment(tmp_path, 8), run_folder(tmp_path, "a"), said.append):
                interrupted = asyncio.create_task(claim(ledgers[1], stopped))
                await eventually(told)
                assert [row.state for row in ledgers[1].accounts.stages()] == [RUNNING]  # from when it begins
                interrupted.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await interrupted
                said.clear()
                waiting = asyncio.create_task(claim(ledgers[0], goes_on))
                await eventually(told)
            await waiting
            for ledger, state in zip(ledgers, ("completed", "failed"), strict=True):
                (row,) = ledger.accounts.stages()
                assert (row.iteration, row.node, row.pool, row.kind, row.state) == (0, CLAIM, "", STARTING, state)
                assert [wait.cause for wait in row.spans] == [POOL]

    asyncio.run(main())


WAIT = """
import asyncio, sys, time
from pathlib import Path
from data.ledger import Ledger
from flows import clocks, devices
from flows.opening import own_devices
from tests.conf.experiments import load_with

async def main(folder):
    experiment = load_with(folder.parent, "pools.train.devices=['cpu:10']").experiment
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.open_run(folder.name, "digest", "")
    with ledger.accounts.session(time.time()):
        held = clocks.Clocks(ledger)
        async with held.kept(), own_devices(experiment, folder, held, print):
            raise AssertionError("another has them")

clocks.WRITE_S, devices.RETRY_S, devices.LOCKS = 0.05, 0.05, Path(sys.argv[2])
asyncio.run(main(Path(sys.argv[1])))
"""


def test_a_run_that_is_killed_while_another_has_its_devices_has_its_wait_in_the_ledger(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, "b")

    def rows() -> list[StageRow]:
        ledger = Ledger(folder / "ledger.sqlite", read_only=True)
        try:
            return ledger.accounts.stages()
        finally:
            ledger.close()

    async def main() -> None:
        async with claimed(experiment(tmp_path, 10), run_folder(tmp_path, "a"), lambda text: None):
            waits = subprocess.Popen(
                [sys.executable, "-c", WAIT, str(folder), str(devices.LOCKS)], stdout=subprocess.PIPE, text=True
            )
            with waits:
                assert waits.stdout is not None
                assert waits.stdout.readline().startswith("waiting for cpu:10: run ")
                (first,) = await asyncio.to_thread(rows)
                while (last := rows()[0].ended) < first.ended + 0.5:  # ten times as long as between two writes
                    await asyncio.sleep(0.01)
                waits.kill()
        ledger = Ledger(folder / "ledger.sqlite")
        ledger.open_run(folder.name, "digest", "")
        with ledger.accounts.session(time.time()):
            async with own_devices(experiment(tmp_path, 10), folder, Clocks(ledger), lambda text: None):
                ledger.accounts.session_ready(time.time())
        (row,), (killed, second) = ledger.accounts.stages(), ledger.accounts.sessions()
        ledger.close()
        assert (row.node, row.state, row.kind) == (CLAIM, "failed", STARTING)
        assert (killed.ended, killed.seen) == (None, row.ended)
        assert row.ended >= last
        (seconds,) = run_seconds([killed, second], [row], ["train"]).values()
        assert second.ended is not None
        assert sum(seconds.values()) == pytest.approx(row.ended - killed.started + second.ended - second.started)
        assert seconds["pool"] == pytest.approx(row.ended - row.started, rel=0.01)
        assert set(seconds) <= {"pool", "starting", "other"}

    asyncio.run(main())


def test_devices_that_are_free_leave_no_wait(tmp_path: Path) -> None:
    async def main() -> None:
        folder = run_folder(tmp_path, "a")
        ledger = Ledger(folder / "ledger.sqlite")
        async with own_devices(experiment(tmp_path, 9), folder, Clocks(ledger), lambda text: None):
            assert ledger.accounts.stages() == []
        assert ledger.accounts.stages() == []
        ledger.close()

    asyncio.run(main())


def test_whoever_waits_holds_nothing_and_can_be_interrupted(tmp_path: Path) -> None:
    async def main() -> None:
        said: list[str] = []
        async with claimed(experiment(tmp_path, 2), run_folder(tmp_path, "a"), said.append):

            async def other() -> None:
                async with claimed(experiment(tmp_path, 1, 2), run_folder(tmp_path, "b"), said.append):
                    raise AssertionError("it must wait")

            waiting = asyncio.create_task(other())

            async def told() -> bool:
                return bool(said)

            await eventually(told)
            async with claimed(experiment(tmp_path, 1), run_folder(tmp_path, "c"), said.append):
                pass  # cpu:1 is free
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting

    asyncio.run(main())


HOLD = """
import sys
from pathlib import Path
from flows import devices
devices.LOCKS = Path(sys.argv[1])
file = devices._open(devices.LOCKS / "cpu-4")
assert devices._lock_all([file]) is None
devices._write(file, "run elsewhere (process 1)")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    """And it holds between runs whose Prefect servers know nothing of each other: only the file is shared here."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(devices.LOCKS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"

    async def main() -> None:
        said: list[str] = []

        async def other() -> None:
            async with claimed(experiment(tmp_path, 4), run_folder(tmp_path, "a"), said.append):
                assert said == ["waiting for cpu:4: run elsewhere (process 1) has it"]

        waiting = asyncio.create_task(other())

        async def told() -> bool:
            return bool(said)

        await eventually(told)
        holder.kill()
        await waiting

    with holder:
        asyncio.run(main())


def test_a_slot_that_another_holds_on_the_same_server_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that share a Prefect server and no file system."""

    async def main() -> None:
        said: list[str] = []
        async with claimed(experiment(tmp_path, 5), run_folder(tmp_path, "a"), said.append):
            monkeypatch.setattr(devices, "LOCKS", tmp_path / "elsewhere")

            async def other() -> None:
                async with claimed(experiment(tmp_path, 5), run_folder(tmp_path, "b"), said.append):
                    assert await slots(5) == [1]

            waiting = asyncio.create_task(other())

            async def told() -> bool:
                return bool(said)

            await eventually(told)
        await waiting
        (message,) = said
        assert message.startswith(f"waiting for {limit_name('cpu:5')}: another run on this Prefect server has one")

    asyncio.run(main())


def test_a_killed_runs_lease_is_given_back_when_the_run_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        folder = run_folder(tmp_path, "a")
        async with claimed(experiment(tmp_path, 6), folder, lambda text: None):
            pass
        async with get_client() as client:
            name = limit_name("cpu:6")
            response = await client.increment_concurrency_slots_with_lease([name], 1, "concurrency", 300)
        remember(folder, SLOTS, response.json()["lease_id"])
        said: list[str] = []
        async with claimed(experiment(tmp_path, 6), folder, said.append):
            assert await slots(6) == [1]
        assert (said, await slots(6)) == ([], [0])

    asyncio.run(main())


def test_a_lease_that_has_ended_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "RENEW_S", 0.05)

    async def main() -> None:
        folder = run_folder(tmp_path, "a")
        async with claimed(experiment(tmp_path, 7), folder, lambda text: None):
            (lease,) = recall(folder, SLOTS)
            async with get_client() as client:
                await client.release_concurrency_slots_with_lease(lease)  # type: ignore[arg-type]

            async def another() -> bool:
                return recall(folder, SLOTS) not in ([], [lease])

            await eventually(another)
            assert await slots(7) == [1]
        assert await slots(7) == [0]

    asyncio.run(main())


def test_a_run_without_devices_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "get_client", lambda: pytest.fail("Prefect was asked"))

    async def main() -> None:
        async with claimed(load_with(tmp_path).experiment, tmp_path, lambda text: None):
            assert not devices.LOCKS.exists()

    asyncio.run(main())


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    devices.LOCKS.mkdir()
    (tmp_path / "victim").write_text("kept")
    (devices.LOCKS / "cpu-0").symlink_to(tmp_path / "victim")

    async def main() -> None:
        async with claimed(experiment(tmp_path, 0), run_folder(tmp_path, "a"), lambda text: None):
            pass

    with pytest.raises(RunError, match="cpu-0 must be a file that can be locked, but is not"):
        asyncio.run(main())
    assert (tmp_path / "victim").read_text() == "kept"


@pytest.mark.parametrize(
    ("overrides", "claims"),
    [
        ([], ["cuda:0", "cuda:1"]),
        (["pools.train.ranks=2"], ["cuda:0", "cuda:1", "cuda:2"]),
        (["rollout.urls=['http://a']"], ["cuda:0"]),
        (["pools.train=null", "pools.rollout={roles: [train, rollout], devices: ['cuda:3']}"], ["cuda:3"]),
        (["rollout.urls=['http://a']", "pools.rollout.devices=['cuda:3']"], ["cuda:0"]),
    ],
)
def test_on_gpus_a_run_claims_what_it_uses_named_or_not_in_one_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], claims: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices_of_run(load_with(tmp_path, "model.device=cuda", *overrides).experiment) == claims


def test_runs_that_see_other_gpus_claim_them_by_the_machines_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    e = load_with(tmp_path, "model.device=cuda").experiment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert devices_of_run(e) == ["cuda:1", "cuda:3"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pools.train.devices=['cpu:0', 'cpu:7']"], r"devices\[1\] must be cores that this process may use \(cpu:0, "),
        (
            ["pools.train.threads=1", "model.device=cuda"],
            r"override 'model\.device=cuda': model\.device is cuda, so pool rollout needs 1 of the GPUs that this "
            "process sees beside those of other pools, got none",
        ),
    ],
)
def test_devices_that_this_machine_lacks_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: list[str], message: str
) -> None:
    here: dict[str, Any] = {"cpu": ({0, 1}, "cores that this process may use")}
    real = preflight._devices_here
    monkeypatch.setattr(preflight, "_devices_here", lambda kind: here.get(kind) or real(kind))
    with pytest.raises(ConfigError, match=message):
        preflight.preflight(load("conf/tiny_arithmetic.yaml", overrides))
