"""Devices are claimed for a run: by a lock on the machine and by limits of a real Prefect server."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.exceptions import ObjectNotFound

from conf.errors import ConfigError, RunError
from conf.load import load
from conf.schema import Experiment
from data.ledger import RUNNING, Ledger, StageRow
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
                assert [row.state for row in ledger.stages()] == ["completed"]  # before anything starts

        goes_on, stopped = run_folder(tmp_path, "b"), run_folder(tmp_path, "c")
        async with AsyncExitStack() as stack:
            ledgers = [Ledger(folder / "ledger.sqlite") for folder in (goes_on, stopped)]
            for ledger in ledgers:
                stack.callback(ledger.close)
            async with claimed(experiment(tmp_path, 8), run_folder(tmp_path, "a"), said.append):
                interrupted = asyncio.create_task(claim(ledgers[1], stopped))
                await eventually(told)
                assert [row.state for row in ledgers[1].stages()] == [RUNNING]  # from when it begins
                interrupted.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await interrupted
                said.clear()
                waiting = asyncio.create_task(claim(ledgers[0], goes_on))
                await eventually(told)
            await waiting
            for ledger, state in zip(ledgers, ("completed", "failed"), strict=True):
                (row,) = ledger.stages()
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
    with ledger.session(time.time()):
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
            return ledger.stages()
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
        with ledger.session(time.time()):
            async with own_devices(experiment(tmp_path, 10), folder, Clocks(ledger), lambda text: None):
                ledger.session_ready(time.time())
        (row,), (killed, second) = ledger.stages(), ledger.sessions()
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
            assert ledger.stages() == []
        assert ledger.stages() == []
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


# -- the renewal, with a server that fails on demand

LEASES = [UUID(int=number) for number in range(1, 4)]


def status(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://prefect")
    return httpx.HTTPStatusError(str(code), request=request, response=httpx.Response(code, request=request))


class FakeClient:
    """Prefect's. Answers each renewal and each take after the first as told: None is a success, and a set has the
    names of the limits that there are. The renewal after the last told sets `over` and has no answer."""

    def __init__(self, renewals: Sequence[Exception | None], takes: Sequence[Exception | set[str] | None] = ()) -> None:
        self.renewals, self.takes, self.calls = [*renewals], [None, *takes], list[str]()
        self.leases, self.over = iter(LEASES), asyncio.Event()

    async def __aenter__(self) -> "FakeClient":
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def read_global_concurrency_limit_by_name(self, name: str) -> None: ...

    async def increment_concurrency_slots_with_lease(self, names: list[str], **_: Any) -> httpx.Response:
        self.calls.append("take")
        answer = self.takes.pop(0)
        if isinstance(answer, Exception):
            raise answer
        limits = [{"id": str(UUID(int=0)), "name": name, "limit": 1} for name in (names if answer is None else answer)]
        return httpx.Response(200, json={"lease_id": str(next(self.leases)), "limits": limits})

    async def renew_concurrency_lease(self, lease_id: UUID, lease_duration: float) -> None:
        self.calls.append(f"renew {lease_id.int}")
        if not self.renewals:
            self.over.set()
            await asyncio.Event().wait()
        if error := self.renewals.pop(0):
            raise error

    async def release_concurrency_slots_with_lease(self, lease_id: UUID) -> None:
        self.calls.append(f"release {lease_id.int}")


AWAY = httpx.ConnectError("away")


@pytest.mark.parametrize(
    ("renewals", "takes", "calls"),
    [
        ([AWAY, None], [], ["renew 1", "renew 1"]),
        ([status(503), None], [], ["renew 1", "renew 1"]),
        ([status(404), None], [None], ["renew 1", "take", "renew 2"]),
        ([status(410), None], [None], ["renew 1", "take", "renew 2"]),
        ([ObjectNotFound(status(404)), None], [None], ["renew 1", "take", "renew 2"]),
        ([status(408), status(429), None], [], ["renew 1"] * 3),
        ([status(410), None], [AWAY, None], ["renew 1", "take", "take", "renew 2"]),
        ([status(410), None], [status(500), None], ["renew 1", "take", "take", "renew 2"]),
    ],
    ids=["away", "503", "404", "410", "not found", "408 429", "away when it is taken", "500 when it is taken"],
)
def test_a_lease_is_kept_through_what_fails_and_taken_again_only_where_it_is_gone(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    renewals: list[Exception | None],
    takes: list[Exception | None],
    calls: list[str],
) -> None:
    monkeypatch.setattr(devices, "RENEW_S", 0)

    async def main() -> None:
        client, folder = FakeClient(renewals, takes), run_folder(tmp_path, "a")
        monkeypatch.setattr(devices, "get_client", lambda: client)
        async with claimed(experiment(tmp_path, 0), folder, lambda text: None):
            await client.over.wait()
            last = 2 if None in takes else 1
            assert client.calls == ["take", *calls, f"renew {last}"]
            assert recall(folder, SLOTS) == [str(LEASES[last - 1])]
        assert client.calls[-1] == f"release {last}"
        assert recall(folder, SLOTS) == []

    asyncio.run(main())


REFUSALS = {401: "set a key that it takes", 403: "set a key that it takes", 422: "is the server of the version"}


@pytest.mark.parametrize("code", REFUSALS)
@pytest.mark.parametrize("asked", ["renew", "take", "take again", "make"])
def test_what_the_server_refuses_ends_the_run_by_name_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, asked: str
) -> None:
    monkeypatch.setattr(devices, "RENEW_S", 0)
    client = FakeClient(*(([status(410)], [status(code)]) if asked == "take again" else ([status(code)], [])))
    if asked == "take":
        client.takes = [status(code)]

    async def refuse(name: str) -> None:
        raise status(code)

    if asked == "make":
        monkeypatch.setattr(client, "read_global_concurrency_limit_by_name", refuse)
    monkeypatch.setattr(devices, "get_client", lambda: client)

    async def main() -> None:
        async with claimed(experiment(tmp_path, 0), run_folder(tmp_path, "a"), lambda text: None):
            await asyncio.Event().wait()

    with pytest.raises(RunError, match=rf"the Prefect server refuses POST /\w*: {code} .*; {REFUSALS[code]}"):
        asyncio.run(main())


def test_a_server_that_is_away_while_a_run_waits_for_its_devices_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        client, said = FakeClient([]), list[str]()
        client.takes = [status(423), AWAY, AWAY, status(423), None]
        monkeypatch.setattr(devices, "get_client", lambda: client)
        async with claimed(experiment(tmp_path, 0), run_folder(tmp_path, "a"), said.append):
            assert client.calls == ["take"] * 5
        what = f"waiting for {limit_name('cpu:0')}: "
        assert [text.removeprefix(what)[:28] for text in said] == [
            "another run on this Prefect ", "Prefect gives no answer (awa", "another run on this Prefect ",
        ]  # fmt: skip

    asyncio.run(main())


def test_a_run_whose_limits_were_deleted_meanwhile_ends_with_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "RENEW_S", 0)

    async def main() -> None:
        client = FakeClient([status(410)], [set()])
        monkeypatch.setattr(devices, "get_client", lambda: client)
        async with claimed(experiment(tmp_path, 0), run_folder(tmp_path, "a"), lambda text: None):
            await asyncio.Event().wait()

    with pytest.raises(RunError, match=f"limits {limit_name('cpu:0')} must exist, but were deleted: start again"):
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
