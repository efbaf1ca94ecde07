"""A co-located pool between serving and training: who has the devices, and in which order they change hands.

             drain        flush        release        reload
    SERVING -----> DRAINED ----> FLUSHED -----> RELEASED ----> TRAINING
       ^ prove                                  |  ^             |
    RESUMED <-----------------------------------+  +-------------+
                          resume                       offload

In RELEASED nobody has the devices. An engine in RESUMED has its memory again, but no work: only a publish, which proves
what is in its memory, gives it work, and that is SERVING. Before RELEASED a hand-over can still turn back (resume). A
step that has begun is ended, also where the run is cancelled; one that fails leaves BROKEN, out of which only services
started anew lead, and those begin SERVING.

On a GPU the memory that is given back is measured at the device, and waited for. On a CPU there is none to give back:
there an engine is RELEASED when its processes are seen to idle. That needs the pause `abort`: under the others SGLang's
scheduler polls without a rest, and `--sleep-on-idle` does nothing (0.5.23).
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, Protocol

from conf.errors import EngineError, HandoverError
from conf.schema import Experiment
from data.ledger import Ledger
from tasks.devices import cpu_seconds
from tasks.engines.client import Engine
from tasks.engines.install import FLUSH_S, POLL_S
from tasks.together import all_or_first_error

SERVING, DRAINED, FLUSHED, RELEASED = "SERVING", "DRAINED", "FLUSHED", "RELEASED"
TRAINING, RESUMED, BROKEN = "TRAINING", "RESUMED", "BROKEN"

Role = Literal["rollout", "publish", "train", "cpu"]  # publish: as rollout, but it proves the engines itself
Step = Literal["drain", "flush", "release", "reload", "offload", "resume", "prove"]

STEPS: Mapping[Step, tuple[frozenset[str], str]] = {  # from which states, to which
    "drain": (frozenset({SERVING, RESUMED}), DRAINED),
    "flush": (frozenset({DRAINED}), FLUSHED),
    "release": (frozenset({FLUSHED}), RELEASED),
    "reload": (frozenset({RELEASED}), TRAINING),
    "offload": (frozenset({TRAINING}), RELEASED),
    "resume": (frozenset({DRAINED, FLUSHED, RELEASED}), RESUMED),
    "prove": (frozenset({RESUMED}), SERVING),
}
TO_TRAINING: Mapping[str, Step] = {
    SERVING: "drain", RESUMED: "drain", DRAINED: "flush", FLUSHED: "release", RELEASED: "reload",
}  # fmt: skip
TO_SERVING: Mapping[str, Step] = {
    TRAINING: "offload", RELEASED: "resume", FLUSHED: "resume", DRAINED: "resume", RESUMED: "prove",
}  # fmt: skip

MEMORY_S = 60.0  # for memory that was given back to be seen free; the driver needs milliseconds
IDLE_S = 0.25  # over which an engine's CPU time is measured
IDLE_SHARE = 0.25  # of one core; asleep it takes 0.01, polling 1
BUSY_S = 30.0  # for it to fall asleep


class OffloadingTrainer(Protocol):
    """What is asked of `tasks.trainer.client.Trainer` here."""

    async def offload(self) -> dict[str, int]: ...
    async def reload(self) -> None: ...
    async def memory(self) -> dict[str, int]: ...


class Handover:
    """Begins SERVING, with the trainer offloaded (`trainer_bytes` by GPU) and engines without a version."""

    def __init__(
        self,
        engines: Sequence[Engine],
        trainer: OffloadingTrainer,
        trainer_bytes: Mapping[str, int],
        ledger: Ledger,
        experiment: Experiment,
        prove: Callable[[], Awaitable[object]],
    ) -> None:
        """`prove` publishes the newest committed version: it proves each engine by checksum or installs it again."""
        self.state = SERVING
        self._engines = engines
        self._trainer = trainer
        self._trainer_bytes = dict(trainer_bytes)
        self._engine_bytes: dict[str, int] = {}
        self._ledger = ledger
        self._settings = experiment.publish
        self._gpu = experiment.model.device == "cuda"
        self._publish = prove
        self._failure = ""
        self._lock = asyncio.Lock()

    def changes(self, role: Role) -> bool:
        """Whether the pool must change hands, or an engine be proven, before a stage of this role may run."""
        settled = {"rollout": {SERVING}, "publish": {SERVING, RESUMED}, "train": {TRAINING}}
        return role != "cpu" and self.state not in settled[role]

    async def give(self, role: Role) -> None:
        """Bring the pool to where a stage of this role may run. Raises HandoverError; whatever a step raises."""
        async with self._lock:
            while self.changes(role):
                path = TO_TRAINING if role == "train" else TO_SERVING
                await self.step(path.get(self.state, "drain"))

    async def to_training(self) -> None:
        """Afterwards the engines have no work, no KV and no GPU memory, and the trainer's state is on the devices."""
        await self.give("train")

    async def to_serving(self) -> None:
        """Afterwards the trainer's state is on the host, and every engine is proven to hold the committed version."""
        await self.give("rollout")

    async def step(self, name: Step) -> None:
        """One move. Raises HandoverError, with nothing done, where the state does not allow it."""
        allowed, then = STEPS[name]
        if self.state == BROKEN:
            raise HandoverError(f"{name} is refused, because a hand-over failed ({self._failure}): start the run again")
        if self.state not in allowed:
            raise HandoverError(f"{name} must begin in {' or '.join(sorted(allowed))}, but the pool is {self.state}")
        steps: Mapping[Step, Callable[[], Awaitable[None]]] = {
            "drain": self._drain,
            "flush": self._flush,
            "release": self._release,
            "reload": self._trainer.reload,
            "offload": self._offload,
            "resume": self._resume,
            "prove": self._prove,
        }
        work = asyncio.ensure_future(self._whole(name, steps[name], then))
        try:
            # Never left in the middle: a command that nobody waits for may come when the devices are somebody else's.
            await asyncio.shield(work)
        except asyncio.CancelledError:
            await asyncio.gather(work, return_exceptions=True)
            raise

    async def _whole(self, name: Step, work: Callable[[], Awaitable[None]], then: str) -> None:
        try:
            await work()
        except BaseException as error:
            self.state, self._failure = BROKEN, f"{name}: {error}"
            raise
        self.state = then

    # -- the steps

    async def _each(self, command: Callable[[Engine], Awaitable[None]]) -> None:
        async with all_or_first_error() as group:
            for engine in self._engines:
                group.create_task(command(engine))  # type: ignore[arg-type]

    async def _drain(self) -> None:
        """No engine has work or gets any: what still runs after `publish.drain_timeout_s` is aborted."""
        for engine in self._engines:
            engine.ready_label = ""
        await self._each(self._drain_one)

    async def _drain_one(self, engine: Engine) -> None:
        deadline = time.monotonic() + self._settings.drain_timeout_s
        while await engine.running_requests() and time.monotonic() < deadline:
            await asyncio.sleep(POLL_S)
        await engine.pause("abort", self._settings.timeout_s)

    async def _flush(self) -> None:
        """Success proves that no request runs."""
        await self._each(lambda engine: engine.flush_cache(FLUSH_S))

    async def _release(self) -> None:
        if not self._gpu:
            await self._each(self._idle)
            return
        rows = {row.name: row for row in self._ledger.engines()}
        for engine in self._engines:
            if (row := rows.get(engine.name)) and row.boot == engine.boot:  # from here on it holds no version
                self._ledger.set_engine(row.name, row.boot, "PAUSED", row.label, row.checksum)
        before = await self._trainer.memory()
        await self._each(lambda engine: engine.release_memory(self._settings.timeout_s))
        after = await self._free(self._trainer_bytes, "the trainer's reload")
        self._engine_bytes = {device: after[device] - before[device] for device in after}

    async def _offload(self) -> None:
        self._trainer_bytes = await self._trainer.offload()
        await self._free(self._engine_bytes, "the engines to resume")

    async def _resume(self) -> None:
        if self._gpu and self.state == RELEASED:
            await self._each(lambda engine: engine.resume_memory(self._settings.timeout_s))
        await self._each(lambda engine: engine.resume(self._settings.timeout_s))

    async def _prove(self) -> None:
        if not all(engine.ready_label for engine in self._engines):  # else the publish stage has done it
            await self._publish()
        if unproven := [engine.name for engine in self._engines if not engine.ready_label]:
            raise EngineError(f"{', '.join(unproven)}: expected to be proven by a publish, but is READY for no version")

    # -- what is measured

    async def _free(self, needed: Mapping[str, int], what: str) -> dict[str, int]:
        """Wait until so many bytes are free on each GPU; gives what is."""
        deadline = time.monotonic() + MEMORY_S
        while True:
            free = await self._trainer.memory()
            short = [device for device, wanted in needed.items() if free[device] < wanted]
            if not short:
                return free
            if time.monotonic() > deadline:
                device = short[0]
                raise HandoverError(
                    f"{device}: {what} needs {_gib(needed[device])} free, found {_gib(free[device])} after "
                    f"{MEMORY_S:g} s; is another process on it (nvidia-smi), or pools.<name>.memory_share too large?"
                )
            await asyncio.sleep(POLL_S)

    async def _idle(self, engine: Engine) -> None:
        """Wait until the engine's processes leave the cores alone. Of an external one only its requests are known."""
        if running := await engine.running_requests():
            raise EngineError(f"{engine.name}: expected no request to run after the flush, found {running}")
        deadline = time.monotonic() + BUSY_S
        while engine.session:
            began, used = time.monotonic(), cpu_seconds(engine.session)
            await asyncio.sleep(IDLE_S)
            share = (cpu_seconds(engine.session) - used) / (time.monotonic() - began)
            if share <= IDLE_SHARE:
                return
            if began > deadline:
                raise EngineError(
                    f"{engine.name}: expected its processes to take at most {IDLE_SHARE:.0%} of a core while the "
                    f"trainer has the cores, found {share:.0%} after {BUSY_S:g} s"
                )


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
