"""The devices of a run are its own for as long as it lasts, so that two runs never share one by accident.

Two claims, since neither is enough alone:

- A lock file on the machine, which the kernel gives back when its process ends, however it ends. It keeps apart runs
  that have a Prefect server each, as `ratchet run` without PREFECT_API_URL has.
- A Prefect global concurrency limit for each device, all taken at once under one lease. It keeps apart runs that share
  a server but no /tmp, as containers on one host, and shows in the UI which devices are taken.

Without devices (a CPU whose pools name no cores) nothing is claimed.
"""

import asyncio
import fcntl
import os
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from uuid import UUID

import httpx
from prefect import runtime
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from prefect.client.schemas.objects import ConcurrencyLeaseHolder
from prefect.client.schemas.responses import ConcurrencyLimitWithLeaseResponse
from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

from conf.errors import RunError
from conf.pools import pool_devices
from conf.schema import Experiment
from flows.doctor import SLOTS, forget, recall, remember
from flows.prefect_server import may_pass, refused
from tasks.devices import on_machine
from tasks.together import all_or_first_error

LOCKS = Path("/tmp/ratchet-devices")  # of every user, whatever TMPDIR each has
RETRY_S = 1.0
LEASE_S = 60.0  # the shortest that Prefect gives
RENEW_S = 20.0

Say = Callable[[str], None]


def devices_of_run(experiment: Experiment) -> list[str]:
    """What a run of it claims, in one order for every run: GPUs by what the machine calls them."""
    own = {
        on_machine(device)
        for name, devices in pool_devices(experiment).items()
        for device in devices
        if "train" in (roles := experiment.pools[name].roles) or ("rollout" in roles and not experiment.rollout.urls)
    }
    return sorted(own)


@asynccontextmanager
async def claimed(experiment: Experiment, folder: Path, say: Say) -> AsyncIterator[None]:
    """Hold the run's devices for the block. Waits for those that another run has, and says which; Ctrl-C ends that.

    Raises RunError, and ends the block, where they can no longer be held.
    """
    devices = devices_of_run(experiment)
    async with AsyncExitStack() as stack:
        if devices:
            await stack.enter_async_context(_locked(devices, folder, say))
            await stack.enter_async_context(_limited(devices, folder, say))
        yield


# -- the lock files


@asynccontextmanager
async def _locked(devices: Sequence[str], folder: Path, say: Say) -> AsyncIterator[None]:
    files = [_open(LOCKS / device.replace(":", "-")) for device in devices]
    try:
        said = ""
        while (busy := _lock_all(files)) is not None:
            holder = os.pread(files[busy], 1000, 0).decode(errors="replace").strip() or "another run"
            if (message := f"waiting for {devices[busy]}: {holder} has it") != said:
                say(message)
                said = message
            await asyncio.sleep(RETRY_S)
        for file in files:
            _write(file, f"run {folder.resolve()} (process {os.getpid()})\n")
        yield
    finally:
        for file in files:
            os.close(file)


def _open(path: Path) -> int:
    """The device's lock, for every user to take. Not to be led elsewhere: a link is refused."""
    try:
        if not LOCKS.exists():
            LOCKS.mkdir(exist_ok=True)
            LOCKS.chmod(0o1777)
        with suppress(FileNotFoundError):  # with O_CREAT, another user's file in such a folder may not be opened
            return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        os.fchmod(file, 0o666)
    except OSError as error:
        raise RunError(f"{path} must be a file that can be locked, but is not: {error.strerror}") from error
    return file


def _lock_all(files: Sequence[int]) -> int | None:
    """Lock all, or none and give the index of one that is taken."""
    for index, file in enumerate(files):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for held in files[:index]:
                fcntl.flock(held, fcntl.LOCK_UN)
            return index
    return None


def _write(file: int, text: str) -> None:
    os.ftruncate(file, 0)
    os.pwrite(file, text.encode(), 0)


# -- Prefect's limits


def limit_name(device: str) -> str:
    """`ratchet-<host>-cuda-0`"""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"ratchet-{host}-{device.replace(':', '-')}"


@asynccontextmanager
async def _limited(devices: Sequence[str], folder: Path, say: Say) -> AsyncIterator[None]:
    names = [limit_name(device) for device in devices]
    async with get_client() as client:
        with _refusals_named():
            for left in recall(folder, SLOTS):  # by this run's process before, which was killed
                await _give_back(client, folder, left)
            for name in names:
                await _make(client, name)
        holding = _Holding(client, folder, names, say)
        await holding.take()
        try:
            async with all_or_first_error() as tasks:  # what ends the renewal ends the block
                renewing = tasks.create_task(holding.renew())
                yield
                renewing.cancel()
        finally:
            with suppress(httpx.HTTPError):  # Prefect is away: the lease ends by itself
                await _give_back(client, folder, holding.lease)


class _Holding:
    """One lease on a slot of each limit."""

    def __init__(self, client: PrefectClient, folder: Path, names: Sequence[str], say: Say) -> None:
        self.client, self.folder, self.names, self.say = client, folder, list(names), say
        self.lease = ""

    async def take(self) -> None:
        """Wait until all slots are free, and take them at once. Raises RunError where the server refuses that."""
        said = ""
        while True:
            try:
                with _refusals_named():
                    if await self._taken():
                        return
                why = (
                    "another run on this Prefect server has one of them (prefect gcl ls); "
                    f"what a killed run had is free after {LEASE_S:.0f} s"
                )
            except httpx.HTTPError as error:
                why = f"Prefect gives no answer ({error or type(error).__name__})"
            if (message := f"waiting for {', '.join(self.names)}: {why}") != said:
                self.say(message)
                said = message
            await asyncio.sleep(RETRY_S)

    async def renew(self) -> None:
        """Keep the lease, for ever. One that has ended, while Prefect was away, is taken anew.

        Raises RunError where a limit was deleted, or the server refuses.
        """
        while True:
            await asyncio.sleep(RENEW_S)
            with suppress(httpx.HTTPError), _refusals_named():  # no answer: asked again
                if not await self._renewed():
                    await self.take()

    async def _renewed(self) -> bool:
        """False: the server has no such lease."""
        try:
            await self.client.renew_concurrency_lease(UUID(self.lease), lease_duration=LEASE_S)
        except httpx.HTTPStatusError as error:
            if error.response.status_code not in (httpx.codes.NOT_FOUND, httpx.codes.GONE):
                raise
        except ObjectNotFound:
            pass
        else:
            return True
        forget(self.folder, SLOTS, self.lease)
        return False

    async def _taken(self) -> bool:
        run = runtime.flow_run.id
        holder = ConcurrencyLeaseHolder(type="flow_run", id=UUID(str(run))) if run else None
        try:
            response = await self.client.increment_concurrency_slots_with_lease(
                self.names, slots=1, mode="concurrency", lease_duration=LEASE_S, holder=holder
            )
        except httpx.HTTPStatusError as error:
            if error.response.status_code == httpx.codes.LOCKED:
                return False
            raise
        answer = ConcurrencyLimitWithLeaseResponse.model_validate(response.json())
        if missing := set(self.names) - {limit.name for limit in answer.limits}:
            raise RunError(f"Prefect's limits {', '.join(sorted(missing))} must exist, but were deleted: start again")
        self.lease = str(answer.lease_id)
        remember(self.folder, SLOTS, self.lease)
        return True


@contextmanager
def _refusals_named() -> Iterator[None]:
    """An answer that asking again cannot mend ends the run, with what to do."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        if may_pass(error):
            raise
        raise refused(error) from error


async def _make(client: PrefectClient, name: str) -> None:
    try:
        await client.read_global_concurrency_limit_by_name(name)
    except ObjectNotFound:
        with suppress(ObjectAlreadyExists):  # by another run, just now
            await client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=name, limit=1))


async def _give_back(client: PrefectClient, folder: Path, lease: str) -> None:
    await client.release_concurrency_slots_with_lease(UUID(lease))  # of a lease that has ended: nothing
    forget(folder, SLOTS, lease)
