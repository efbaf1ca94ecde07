"""The lease on a run's devices, with a Prefect server that fails on demand."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
from prefect.exceptions import ObjectNotFound

from conf.errors import RunError
from conf.schema import Experiment
from flows import devices
from flows.devices import claimed, limit_name
from flows.doctor import SLOTS, recall
from tests.conf.experiments import load_with


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(devices, "RETRY_S", 0)
    monkeypatch.setattr(devices, "RENEW_S", 0)
    monkeypatch.setattr(devices, "LOCKS", tmp_path / "locks")


def one_core(folder: Path) -> Experiment:
    return load_with(folder, "pools.train.devices=['cpu:0']").experiment


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
    async def main() -> None:
        client, folder = FakeClient(renewals, takes), tmp_path
        monkeypatch.setattr(devices, "get_client", lambda: client)
        async with claimed(one_core(tmp_path), folder, lambda text: None):
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
    client = FakeClient(*(([status(410)], [status(code)]) if asked == "take again" else ([status(code)], [])))
    if asked == "take":
        client.takes = [status(code)]

    async def refuse(name: str) -> None:
        raise status(code)

    if asked == "make":
        monkeypatch.setattr(client, "read_global_concurrency_limit_by_name", refuse)
    monkeypatch.setattr(devices, "get_client", lambda: client)

    async def main() -> None:
        async with claimed(one_core(tmp_path), tmp_path, lambda text: None):
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
        async with claimed(one_core(tmp_path), tmp_path, said.append):
            assert client.calls == ["take"] * 5
        what = f"waiting for {limit_name('cpu:0')}: "
        assert [text.removeprefix(what)[:28] for text in said] == [
            "another run on this Prefect ", "Prefect gives no answer (awa", "another run on this Prefect ",
        ]  # fmt: skip

    asyncio.run(main())


def test_a_run_whose_limits_were_deleted_meanwhile_ends_with_that_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        client = FakeClient([status(410)], [set()])
        monkeypatch.setattr(devices, "get_client", lambda: client)
        async with claimed(one_core(tmp_path), tmp_path, lambda text: None):
            await asyncio.Event().wait()

    with pytest.raises(RunError, match=f"limits {limit_name('cpu:0')} must exist, but were deleted: start again"):
        asyncio.run(main())
