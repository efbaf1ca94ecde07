"""The trainer as the run sees it: a DeepSpeed process group that takes one command at a time."""

import asyncio
import contextlib
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa

from conf.errors import CheckpointError, TrainerError
from conf.pools import pool_devices, pool_with
from conf.schema import Experiment
from data.files import map_table, write_table
from data.package import Probe, Receipt
from data.refs import DatasetRef
from tasks.devices import device_environment
from tasks.trainer.spec import Spec

Progress = Callable[[int, int], None]  # (samples done, samples in all) on rank 0

_ROOT = Path(__file__).parents[2]
_STOP_SECONDS = 3.0  # between SIGTERM and SIGKILL
_MAX_LINE = 1 << 28  # bytes; the receipts of a large model are one line
_LOG_LINES = 15
_SECRET = re.compile("KEY|TOKEN|SECRET|PASSW|CREDENTIAL|AUTH", re.IGNORECASE)
_LOGIN = re.compile("://[^/@]*:[^/@]*@")  # a URL's user and password


@dataclass(frozen=True)
class Status:
    update: int  # number of the last update applied; 0: none
    dataset: str  # id of the dataset it was applied on
    optimizer_step: int


@dataclass(frozen=True)
class UpdateResult:
    metrics: dict[str, float]  # by the field's names; equal for equal inputs
    optimizer_step: int  # after the update
    seconds: dict[str, float]  # read, train: as they were when it was applied


@dataclass(frozen=True)
class Export:
    receipts: tuple[Receipt, ...]  # one from each rank
    tied: dict[str, str]  # name that is not stored -> the stored tensor it shares
    probe: Probe


@dataclass(frozen=True)
class Logprobs:
    table: pa.Table  # column `logprobs`, list<float32>, the given rows in their order, after temperature
    model: str  # content digest of the reference; empty for the policy


class Trainer:
    """`ranks` processes, started by `start`; commands are serialized.

    Call `start` in a thread that lives as long as the trainer: the kernel kills the ranks when that thread ends. A rank
    that dies, or a command past its deadline, fails the command with TrainerError and takes the whole group down;
    `start` then gives a new one, which knows nothing until `restore`.
    """

    def __init__(self, experiment: Experiment, run_dir: Path, run: str) -> None:
        name = pool_with(experiment.pools, "train")
        pool, devices = experiment.pools[name], pool_devices(experiment)[name]
        self.ranks = pool.ranks
        self._devices = devices[: self.ranks] if experiment.model.device == "cuda" else devices
        cores = len(devices) or len(os.sched_getaffinity(0))
        self._threads = pool.threads or max(1, cores // self.ranks)
        self._update = experiment.update
        if experiment.schedule.ahead:
            # The behaviour policy may be older than the trainer's: how far the two are apart is then also what the
            # updates between have learned. Each publish's probe compares engine and trainer at the same weights.
            self._update = replace(experiment.update, max_logprob_diff=math.inf)
        self._withheld = {experiment.rollout.api_key_env, experiment.rollout.admin_key_env}
        self._logs = [run_dir / "logs" / f"trainer-rank{rank}.log" for rank in range(self.ranks)]
        self._spec = Spec(
            run_dir=str(run_dir.resolve()),
            run=run,
            model=str(Path(experiment.model.path).resolve()),
            device=experiment.model.device,
            seed=experiment.seed,
            temperature=experiment.rollout.temperature,
            update=self._update,
        )
        self._processes: list[asyncio.subprocess.Process] = []
        self._ends: list[asyncio.Task[int]] = []
        self._folder: Path | None = None
        self._lock = asyncio.Lock()
        self._commands = 0

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.returncode is None for process in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    async def start(self) -> None:
        """Start the ranks and wait until the model is loaded. Raises TrainerError."""
        if self._processes:
            raise TrainerError("the trainer is started already: stop it first")
        # A short path: a socket's may have 107 characters.
        self._folder = Path(tempfile.mkdtemp(prefix="ratchet-"))
        self._spec.write(self._folder / "spec.json")
        try:
            for rank in range(self.ranks):
                self._processes.append(await self._spawn(rank, self._folder))
            self._ends = [asyncio.create_task(process.wait()) for process in self._processes]
            async with asyncio.timeout(self._update.start_timeout_s):
                self._reader, self._writer = await self._or_death("start", self._connect(self._folder / "socket"))
        except TimeoutError:
            limit = f"{self._update.start_timeout_s:.0f} s (update.start_timeout_s)"
            message = f"the trainer must be ready within {limit}, but is not{self._log_tail(0)}"
            await self.stop()
            raise TrainerError(message) from None
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End every rank, within seconds, and remove the socket's folder. Does nothing where nothing runs."""
        for kind, seconds in ((signal.SIGTERM, _STOP_SECONDS), (signal.SIGKILL, None)):
            for process in self._processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, kind)
            running = [end for end in self._ends if not end.done()]
            if running:
                await asyncio.wait(running, timeout=seconds)
        for process in self._processes[len(self._ends) :]:  # `start` was cancelled in between
            await process.wait()
        self._processes, self._ends = [], []
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    async def status(self) -> Status:
        return Status(**await self._command("status"))

    async def logprobs(
        self, rows: DatasetRef | pa.Table, model: Literal["policy", "reference"], progress: Progress
    ) -> Logprobs:
        """Log-probabilities of every response token of a dataset, or of rows that are in none yet.

        A table must have group_id, prompt_ids and response_ids.
        """
        if isinstance(rows, DatasetRef):
            answer = await self._command("logprobs", progress, dataset=rows.to_json(), model=model)
        else:
            async with self._rows(rows) as file:
                answer = await self._command("logprobs", progress, file=str(file), model=model)
        path = Path(answer["path"])
        table = map_table(path)
        path.unlink()
        return Logprobs(table, answer["digest"])

    async def update(self, dataset: DatasetRef, number: int, progress: Progress) -> UpdateResult:
        """Apply update `number` on a dataset; the same again gives the stored answer.

        Raises TrainerError for any other number than the last one's successor; and, without a change of the weights,
        for a loss or gradient that is not finite and for log-probabilities too far from the engine's
        (update.max_logprob_diff).
        """
        return UpdateResult(**await self._command("update", progress, dataset=dataset.to_json(), number=number))

    async def export(self, staging: Path, dtype: str, probe_ids: Sequence[int]) -> Export:
        """Write the policy into `staging` as `dtype` (float32, bfloat16, float16), fsynced; PUBLISH steps P1 and P2."""
        answer = await self._command("export", staging=str(staging.resolve()), dtype=dtype, probe_ids=list(probe_ids))
        receipts = tuple(Receipt.from_json(receipt) for receipt in answer["receipts"])
        return Export(receipts, answer["tied"], Probe.from_json(answer["probe"]))

    async def checkpoint(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write a checkpoint, complete under its name or not there. `facts` are the run's own, and JSON."""
        await self._command("checkpoint", folder=str(folder.resolve()), facts=dict(facts))

    async def restore(self, folder: Path) -> dict[str, Any]:
        """Continue from a checkpoint of this model, written by any number of ranks; gives its facts.

        Raises, with the trainer as it was, CheckpointError if it is incomplete or damaged, TrainerError if it is of
        another model.
        """
        return await self._command("restore", folder=str(folder.resolve()))

    async def offload(self) -> dict[str, int]:
        """Take everything off the devices; gives the bytes by GPU (none on a CPU). Again: does nothing more.

        Until `reload`, every command that computes is refused.
        """
        return self._by_device(await self._command("offload"))

    async def reload(self) -> None:
        """Bring everything back, bit by bit as it was. Does nothing where nothing is offloaded."""
        await self._command("reload")

    async def memory(self) -> dict[str, int]:
        """Free bytes of each GPU that a rank has, as the driver counts them; nothing on a CPU."""
        return self._by_device(await self._command("memory"))

    @asynccontextmanager
    async def _rows(self, table: pa.Table) -> AsyncIterator[Path]:
        """The table as a file in the private folder, while the block runs."""
        if self._folder is None:
            raise TrainerError(f"logprobs: the trainer does not run{self._log_tail(0)}")
        handle, name = tempfile.mkstemp(suffix=".arrow", dir=self._folder)
        os.close(handle)
        try:
            await asyncio.to_thread(write_table, table, table.schema, Path(name))
            yield Path(name)
        finally:
            Path(name).unlink(missing_ok=True)

    def _by_device(self, ranks: Sequence[int]) -> dict[str, int]:
        return dict(zip(self._devices, ranks, strict=True)) if self._spec.device == "cuda" else {}

    async def _spawn(self, rank: int, folder: Path) -> asyncio.subprocess.Process:
        environment = rank_environment(rank, self.ranks, self._threads, self._spec.device, self._devices)
        log = self._logs[rank]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open(
            "ab"
        ) as output:  # a file, not the parent's pipe: a child that holds it would hide the parent's end
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "tasks.trainer.server",
                str(folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={name: value for name, value in environment.items() if name not in self._withheld},
            )

    @staticmethod
    async def _connect(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(path, limit=_MAX_LINE)
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.05)

    async def _command(self, command: str, progress: Progress | None = None, **arguments: Any) -> Any:
        async with self._lock:
            if not self.alive:
                raise TrainerError(f"{command}: the trainer does not run{self._log_tail(0)}")
            self._commands += 1
            line = json.dumps({"id": self._commands, "command": command, "arguments": arguments})
            self._writer.write(line.encode() + b"\n")
            try:
                async with asyncio.timeout(self._update.timeout_s):
                    answer = await self._or_death(command, self._answer(self._commands, progress))
            except TimeoutError:
                message = (
                    f"{command}: expected an answer within {self._update.timeout_s:.0f} s (update.timeout_s), got "
                    f"none; the trainer was stopped{self._log_tail(0)}"
                )
                await self.stop()
                raise TrainerError(message) from None
        if "error" in answer:
            raise (CheckpointError if answer["kind"] == CheckpointError.__name__ else TrainerError)(answer["error"])
        return answer["result"]

    async def _answer(self, number: int, progress: Progress | None) -> dict[str, Any]:
        while line := await self._reader.readline():
            answer = json.loads(line)
            if answer["id"] != number:
                continue  # of a command whose caller was cancelled
            if "progress" not in answer:
                return answer
            if progress is not None:
                progress(*answer["progress"])
        await asyncio.Event().wait()  # rank 0 has closed: its end tells why
        raise AssertionError

    async def _or_death(self, command: str, work: Any) -> Any:
        """The outcome of `work`, or at once the TrainerError of a rank that ended before it."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task, *self._ends], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
        finally:
            task.cancel()
        ended = [(end.result(), rank) for rank, end in enumerate(self._ends) if end.done()]
        code, rank = min(ended)  # a signal first: the others only lost their peer
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        message = f"{command}: rank {rank} of {self.ranks} ended with {how}{self._log_tail(rank)}"
        await self.stop()
        raise TrainerError(message)

    def _log_tail(self, rank: int) -> str:
        path = self._logs[rank]
        lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:] if path.is_file() else []
        return f"; log {path}, last lines:\n" + "\n".join(f"    {line}" for line in lines)


def rank_environment(rank: int, ranks: int, threads: int, device: str, devices: Sequence[str] = ()) -> dict[str, str]:
    """The environment of a rank process. What speeds up a CPU gives way to what is set outside."""
    speed = {
        # glibc gives large blocks back to the system, which clears them again at the next step: without these two, a
        # fifth of an update's time (benchmarks/trainer.py). mimalloc was no faster.
        "MALLOC_MMAP_MAX_": "0",
        "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
        # Threads that wait by spinning took 25 s of CPU instead of 8 where others needed the cores too.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    own = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "RATCHET_PARENT": str(os.getpid()),
        "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",  # a log that ends where the process did
        "OMP_NUM_THREADS": str(threads),
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "DO_NOT_TRACK": "1",
        **device_environment(devices),
    }
    outside = without_secrets(os.environ)
    if device == "cuda":
        return {**outside, **own}
    return {**speed, **outside, **own, "DS_ACCELERATOR": "cpu"}


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables whose name does not look like a secret's and whose value has no password in a URL.

    A process that loads models and compiles code needs none. `NCCL_IB_PKEY` and its like are settings.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith("NCCL_") or not (_SECRET.search(name) or _LOGIN.search(value))
    }
