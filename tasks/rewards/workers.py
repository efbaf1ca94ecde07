"""The worker processes that call reward functions: a service of the run that outlives stages and iterations."""

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from conf.errors import ConfigError, StageError
from conf.schema import Reward
from tasks.rewards.child import frame, receive, unframe

START_TIMEOUT_S = 120.0  # importing a module with torch takes half a minute on a busy machine
_GRACE_S = 15.0  # beyond a call's limit: the guard may need 5 s to kill a tree; after this it is broken itself
_PATIENCE_S = 6.0  # for a guard to clean up after its channel was closed
_MAX_RESTARTS = 10  # of guards over a run. Guards outlive their runners, so one that dies was killed on purpose
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "TMPDIR", "LD_LIBRARY_PATH")  # no keys or tokens


@dataclass(frozen=True)
class Outcome:
    """What one call of one reward function came to; `value` is None unless `outcome` is ok."""

    outcome: str  # ok, timeout, error or nonfinite
    value: float | None
    error: str


Result = dict[str, Outcome]  # of one sample, by function


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    sources: dict[str, str]  # SHA-256 of each function's source file, as imported
    usable: bool = True
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def exchange(self, message: bytes) -> Any:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self.channel, frame(message))
        buffer = bytearray()
        while (payload := unframe(buffer)) is None:
            if not (part := await loop.sock_recv(self.channel, 1 << 16)):
                raise EOFError
            buffer += part
        return json.loads(payload)

    def stop(self, patience_s: float) -> None:
        """Let the guard clean up, which it does when the channel closes; kill it if it does not."""
        self.channel.close()
        _reap(self.process, patience_s)


class RewardWorkers:
    """`reward.workers` processes, started at the first use. Scores samples; a faulty call costs its own sample only."""

    def __init__(self, settings: Reward) -> None:
        self.settings = settings
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()
        self._restarts = 0

    @property
    def digest(self) -> str:
        """SHA-256 over each function's path, options and source file. The workers must have been started."""
        sources = self._workers[0].sources
        functions = {
            name: {"path": function.path, "options": dict(function.options), "source": sources[name]}
            for name, function in self.settings.functions.items()
        }
        return hashlib.sha256(json.dumps(functions, sort_keys=True).encode()).hexdigest()

    async def start(self) -> None:
        """Start the workers, side by side. Raises ConfigError where a function cannot be loaded."""
        async with self._starting:
            if self._workers:
                return
            spawned = [asyncio.to_thread(_spawn, self.settings) for _ in range(self.settings.workers)]
            started = await asyncio.gather(*spawned, return_exceptions=True)
            failures = [s for s in started if isinstance(s, BaseException)]
            workers = [s for s in started if isinstance(s, _Worker)]
            if failures:
                for worker in workers:
                    worker.stop(_PATIENCE_S)
                raise failures[0]
            self._workers = workers

    async def stop(self) -> None:
        workers, self._workers = self._workers, []
        await asyncio.gather(*(asyncio.to_thread(worker.stop, _PATIENCE_S) for worker in workers))

    async def score(
        self,
        samples: Sequence[Mapping[str, Any]],
        ids: Sequence[str],
        progress: Callable[[int], None],
        *,
        total: int = 0,
        failed: Sequence[str] = (),
        called: Callable[[int], None] = lambda index: None,
    ) -> list[Result]:
        """Call every function on every sample; one mapping by function name for each sample, in the samples' order.

        A sample has RewardInput's fields, `data` as JSON text. Raises StageError as soon as more samples have failed
        than `reward.max_failed_share`, or `reward.on_failure: fail`, allows. `total` and `failed` are of the batch that
        these samples are part of: its size, and the failures in it so far (`failure`). `called` hears of each call when
        it begins, by the sample's index.
        """
        await self.start()
        names = list(self.settings.functions)
        results: list[Result] = [{} for _ in samples]
        new: dict[int, str] = {}
        total = total or len(samples)
        allowed = 0.0 if self.settings.on_failure == "fail" else self.settings.max_failed_share * total
        calls = iter([(index, name) for index in range(len(samples)) for name in names])
        done = 0

        def too_many() -> bool:
            return len(failed) + len(new) > allowed

        async def work(slot: int) -> None:
            nonlocal done
            for index, name in calls:
                result = await self._call(slot, name, samples[index], partial(called, index))
                results[index][name] = result
                if found := failure(ids[index], {name: result}):
                    new.setdefault(index, found)
                    if too_many():
                        return
                if len(results[index]) == len(names):
                    done += 1
                    progress(done)
                if too_many():  # another worker's sample: the outcome is known, so spare the rest
                    return

        await _all(work(slot) for slot in range(len(self._workers)))
        if too_many():
            raise StageError(_too_many([*failed, *(new[index] for index in sorted(new))], total, self.settings))
        return [{name: result[name] for name in names} for result in results]

    async def _call(self, slot: int, name: str, sample: Mapping[str, Any], began: Callable[[], None]) -> Outcome:
        async with self._workers[slot].lock:
            worker = await self._replaced(slot, name)
            began()
            try:
                async with asyncio.timeout(self.settings.timeout_s + _GRACE_S):
                    return Outcome(*await worker.exchange(json.dumps([name, sample]).encode()))
            except BaseException as error:
                worker.usable = False  # cancelled in mid-call, its answer would be taken for the next one's
                worker.channel.close()
                if not isinstance(error, TimeoutError | OSError | EOFError):
                    raise
                what = "did not answer" if isinstance(error, TimeoutError) else "was ended from within the call"
                return Outcome("error", None, f"the worker {what} and was replaced")

    async def _replaced(self, slot: int, name: str) -> _Worker:
        """The slot's worker; a new one where a call has made it unusable."""
        worker = self._workers[slot]
        if worker.usable:
            return worker
        self._restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise StageError(f"reward workers had to be replaced more than {_MAX_RESTARTS} times, last before {name}")
        await asyncio.to_thread(worker.stop, _PATIENCE_S)
        fresh = await asyncio.to_thread(_spawn, self.settings)
        if fresh.sources != worker.sources:
            fresh.stop(_PATIENCE_S)
            raise StageError("the source of a reward function changed while the run was going on: start it again")
        worker.process, worker.channel, worker.usable = fresh.process, fresh.channel, True
        return worker


def check_rewards(settings: Reward) -> None:
    """Import every reward function in a worker process, and stop it. Raises ConfigError with the field at fault."""
    _spawn(settings).stop(_PATIENCE_S)


def _reap(process: subprocess.Popen[bytes], patience_s: float) -> None:
    try:
        process.wait(patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


async def _all(coroutines: Any) -> None:
    """Run together; the first exception cancels the others and is raised itself, not in a group."""
    tasks = [asyncio.ensure_future(c) for c in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def failure(sample: str, result: Result) -> str:
    """What went wrong with a sample, first; empty where all is ok."""
    wrong = ((name, outcome) for name, outcome in result.items() if outcome.outcome != "ok")
    return next((f"{sample} {name}: {outcome.outcome}: {outcome.error}" for name, outcome in wrong), "")


def _too_many(failed: Sequence[str], total: int, settings: Reward) -> str:
    limit = (
        "reward.on_failure is `fail`"
        if settings.on_failure == "fail"
        else f"reward.max_failed_share allows {settings.max_failed_share:g} of them"
    )
    first = "; ".join(failed[:3])
    return f"the reward of {len(failed)} of {total} samples failed, and {limit}. First: {first}"


def _spawn(settings: Reward) -> _Worker:
    """Start a worker and wait until it has imported every function. Blocks. Raises ConfigError."""
    if not settings.functions:
        raise ConfigError("reward.functions must name at least one function, got none")
    ours, theirs = socket.socketpair()
    environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    environment |= {
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),  # resolves what the run resolves
        "PYTHONHASHSEED": "0",  # the order of a set must not change a reward
        "OMP_NUM_THREADS": "1",  # parallelism comes from the number of workers
    }
    with tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(
            # -P: a module of the worker's folder must not hide the package of the same name (reasoning_gym)
            [sys.executable, "-P", "-m", "tasks.rewards.child", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,  # Ctrl-C is the run's to handle
            # No parent-death signal: it fires when the starting *thread* ends. The guard watches the channel instead.
        )
        theirs.close()
        try:
            reply = _handshake(ours, settings)
        except OSError:
            reply = None
        if reply is None or "error" in reply:
            ours.close()
            _reap(process, _PATIENCE_S)
            stderr.seek(0)
            raise ConfigError(_refusal(reply, process.returncode, stderr.read().decode(errors="replace")))
    ours.setblocking(False)
    return _Worker(process, ours, reply["sources"])


def _handshake(channel: socket.socket, settings: Reward) -> dict[str, Any] | None:
    setup = {
        "functions": {n: {"path": f.path, "options": dict(f.options)} for n, f in settings.functions.items()},
        "timeout_s": settings.timeout_s,
        "memory_mb": settings.memory_mb,
    }
    channel.settimeout(START_TIMEOUT_S)
    channel.sendall(frame(json.dumps(setup).encode()))
    payload = receive(channel)
    return None if payload is None else json.loads(payload)


def _refusal(reply: Mapping[str, Any] | None, code: int, stderr: str) -> str:
    if reply is not None:
        return f"reward.functions.{reply['name']}.path: {reply['error']}"
    last = stderr.strip().splitlines()[-1:] or [f"nothing was printed, exit code {code}"]
    return f"a reward worker did not get ready within {START_TIMEOUT_S:g} s or died while importing: {last[0]}"
