"""One engine's way to a version: steps Q1-Q10 of docs/publish.md, and what follows when one of them fails.

One command at a time, each journalled before it is sent and fenced. A failure leaves the engine DIRTY, without work,
until it is proven again:

1. An engine that still answers under the same boot is given the version once more.
2. An update without an answer may yet be applied, so it is waited for and never sent again to the same boot. One that
   a publisher sent before it died is waited for in the same way, also where another version is published now.
3. Anything else, and a second failure, restarts the engine, after a pause that doubles.
4. One that cannot be restarted, was restarted too often, or holds the version wrongly from a fresh start, is OUT.
"""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import astuple, replace
from typing import Any, Literal

from conf.errors import EngineError, PublishError, RatchetError
from conf.schema import Experiment
from data.crash import crash_point
from data.ledger import EngineRow, Ledger
from data.package import Package
from data.versions import LABEL
from tasks.engines.checksums import expected_checksums, readable_by_name
from tasks.engines.client import Checksums, Engine, NoAnswer, Refused, Sampling, Span, digest_of
from tasks.engines.commands import Fence, Stale
from tasks.engines.fleet import Fleet, Unrestartable

STEPS = 11  # Q1-Q11
FLUSH_S = 30.0  # an aborted request is gone in 1 s
LATE_S = 30.0  # an update that the server has not even begun so long after its deadline is taken for lost
POLL_S = 0.05
NO_ANSWER = "DIRTY, no answer"  # how the journal says that an update may yet come
CANARY_ELEMENTS = 1 << 24  # SGLang makes a Python list of the whole tensor before it cuts out what was asked for
CONVERTED_TOLERANCE = 2**-7  # relative; one rounding to bfloat16
PAUSE: Mapping[str, Literal["abort", "retract", "in_place"]] = {
    "pin": "abort",
    "rebuild": "retract",
    "keep": "in_place",
}


class Mismatch(PublishError):
    """The engine holds or says something else than the version it was given (Q6-Q10)."""


class Target:
    """The version that several engines are brought to, and what its installations share."""

    def __init__(
        self, package: Package, ledger: Ledger, experiment: Experiment, progress: Callable[[int], None]
    ) -> None:
        self.package = package
        self.manifest = package.manifest
        self.label = package.manifest.label
        self.path = str(package.folder.resolve())
        self.ledger = ledger
        self.settings = experiment.publish
        self.dtype = experiment.rollout.dtype
        self.pause = PAUSE[experiment.rollout.kv_policy]
        self.rows = {row.name: row for row in ledger.engines()}
        # Where the checksums cannot be computed, the first engine's stand for the version.
        self.recorded = next(
            (r.checksum for r in self.rows.values() if (r.state, r.label) == ("READY", self.label)), ""
        )
        # Hashing goes on while the engines drain and load.
        device = experiment.model.device
        self._expected = asyncio.create_task(asyncio.to_thread(expected_checksums, package, device, self.dtype))
        self._progress = progress
        self._reached: dict[str, int] = {}

    async def expected(self) -> dict[str, str] | None:
        return await self._expected

    async def close(self) -> None:
        """Wait for the hashing, also where nobody needed it."""
        await asyncio.wait([self._expected])

    def reached(self, engine: str, steps: int) -> None:
        self._reached[engine] = steps
        self._progress(sum(self._reached.values()))


class Install:
    """Brings one engine of a fleet to a target. `row` is then READY on it, still without work, or OUT with `error`."""

    def __init__(self, engine: Engine, fleet: Fleet, target: Target) -> None:
        self.engine = engine
        self.fleet = fleet
        self.target = target
        self.row: EngineRow | None = None
        self.error: PublishError | None = None  # the last failure; None once it is READY
        self.attempt = 0
        self.restarts = 0
        self.install_s = 0.0  # Q1-Q5: drain, pause, load
        self.verify_s = 0.0  # Q6-Q10
        self._step = "Q1"
        self._before = ""  # checksum of what it held before its first update here; empty: what was proven last
        self._known = self._row_of(target.rows.get(engine.name))
        self._serving = self._known if self._known and self._known.state == "READY" else None  # until anything fails

    async def run(self) -> None:
        """Raises Stale where a newer publish has taken the engine; every other failure ends as OUT."""
        applied, tries = await self._left_over(), 0
        while True:
            self.attempt = self.target.ledger.next_attempt()
            try:
                checksum = await self._bring(applied)
            except Stale:
                raise
            except RatchetError as error:
                self.claim()  # else it failed because another publish has the engine, and keeps it
                self._failed(error)
            else:
                self.error = None
                self.row = EngineRow(self.engine.name, self.engine.boot, "READY", self.target.label, checksum)
                return
            tries, applied = tries + 1, False
            if self._unanswered():
                if applied := await self._applied(self.target.label):
                    continue
            elif tries == 1 and not self._wrong_from_the_start() and await self._answers():
                continue
            if not await self._restart():
                self.row = EngineRow(self.engine.name, self.engine.boot, "OUT", *self._proven())
                return
            tries = 0

    # -- after a failure

    def _failed(self, error: RatchetError) -> None:
        """DIRTY: nothing is known of the engine but what it is asked now."""
        if not isinstance(error, PublishError):
            wrapped = PublishError(self._step, f"{self.target.label}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self.error = error
        self._serving = None
        self.engine.ready_label = ""
        self._record("DIRTY")
        self.target.ledger.journal(*self._place(), f"{NO_ANSWER if self._unanswered() else 'DIRTY'}: {error}")

    def _unanswered(self) -> bool:
        """The update was sent, and may yet come."""
        return self._step == "Q4" and self.error is not None and isinstance(self.error.__cause__, NoAnswer)

    async def _answers(self) -> bool:
        """The barrier: what is in its memory can be read, and it is the life we know."""
        try:
            return (await self.engine.mark()).boot == self.engine.boot
        except EngineError:
            return False

    async def _left_over(self) -> bool:
        """Whether this version's update, sent to this life by a publisher that ended without an answer, was applied.

        Another version's is waited for too: two updates are never under way at once.
        """
        ledger, known = self.target.ledger, self._known
        sent = ledger.updates_sent(self.engine.name)
        if not sent or known is None or known.state not in ("UPDATING", "DIRTY"):
            return False
        *_, last = (row for row in ledger.journal_rows(sent[-1]) if row.engine == self.engine.name)
        if known.state == "DIRTY" and not last.detail.startswith(NO_ANSWER):
            return False
        return await self._applied(ledger.version(sent[-1]).ref.label) and sent[-1] == self.target.manifest.number

    async def _applied(self, label: str) -> bool:
        """Whether an update that was not answered has come and shows its label.

        A scheduler takes one command at a time, so its checksums come after a load that is under way.
        """
        settings = self.target.settings
        try:
            await self.engine.checksums(settings.timeout_s)
            if await self.engine.current_boot() != self.engine.boot:
                return False
            deadline = time.monotonic() + min(LATE_S, settings.timeout_s)  # it may still be on its way
            while (await self.engine.model_info()).label != label:
                if time.monotonic() > deadline:
                    return False
                await asyncio.sleep(POLL_S)
        except EngineError:
            return False
        return True

    def _wrong_from_the_start(self) -> bool:
        """A fresh engine holds the version wrongly too: neither another try nor another life would help."""
        return self.restarts > 0 and isinstance(self.error, Mismatch)

    async def _restart(self) -> bool:
        """A new life for the engine, COLD. False: there is none to be had, or it would not help."""
        settings = self.target.settings
        while self.restarts < settings.max_restarts and not self._wrong_from_the_start():
            await asyncio.sleep(settings.restart_backoff_s * 2**self.restarts)
            self.claim()
            try:
                self.engine = await self.fleet.restart(self.engine)
            except Unrestartable as error:
                self._note(str(error))
                return False
            except EngineError as error:
                self.restarts += 1
                self._note(f"restart {self.restarts}: {error}")
                self._record("DEAD")
            else:
                self.restarts += 1
                self._known = None
                self._before = ""
                self._record("COLD")
                return True
        return False

    def _note(self, what: str) -> None:
        assert self.error is not None  # only a failure leads here
        self.error.add_note(what)
        self.target.ledger.journal(*self._place(), what)

    # -- records

    def _row_of(self, row: EngineRow | None) -> EngineRow | None:
        """What the ledger knows of this life."""
        return row if row and row.boot == self.engine.boot else None

    def _proven(self) -> tuple[str, str]:
        """Label and checksum proven last, or of a new life's base: an engine in between has the old ones."""
        return (self._known.label, self._known.checksum) if self._known else ("", "")

    def _record(self, state: str) -> None:
        self._known = EngineRow(self.engine.name, self.engine.boot, state, *self._proven())
        self.target.ledger.set_engine(*astuple(self._known))

    def _place(self) -> tuple[int, int, str, str]:
        return self.target.manifest.number, self.attempt, self.engine.name, self._step

    def _begin(self, step: str, state: str) -> None:
        self._step = step
        self.claim()
        if self._known is None or state != self._known.state:
            self._record(state)
        self.target.ledger.journal(*self._place(), state)
        crash_point(f"publish/{self.target.manifest.number}/{step}")
        self.target.reached(self.engine.name, int(step[1:]))

    @property
    def _fence(self) -> Fence:
        manifest = self.target.manifest
        return Fence(manifest.run, manifest.number, self.attempt, self.engine.boot)

    def claim(self) -> None:
        """Raises Stale where a newer publish has taken the engine: then nothing of it may be changed any more."""
        self.engine.gate.claim(self._fence, self._step)

    async def _send(self, command: Callable[[], Awaitable[Any]]) -> Any:
        return await self.engine.gate.send(self._fence, self._step, command)

    def _mismatch(self, what: str, expected: object, found: object) -> Mismatch:
        return Mismatch(self._step, self._differs(what, expected, found))

    def _taken(self, what: str, expected: object, found: object) -> PublishError:
        """Somebody else has had the engine: that says nothing about the version."""
        return PublishError(self._step, self._differs(what, expected, found))

    def _differs(self, what: str, expected: object, found: object) -> str:
        return f"{self.engine.name}, {self.target.label}: {what}: expected {expected}, found {found}"

    # -- the steps

    async def _bring(self, applied: bool) -> str:
        """Q1-Q10; gives the digest of what is in the engine's memory. `applied`: the update has come."""
        if await self._still_ready():
            self.target.reached(self.engine.name, STEPS)
            assert self._known is not None  # or it would not be ready
            return self._known.checksum
        began = time.monotonic()
        self.claim()
        self.engine.ready_label = ""
        if not applied:
            await self._drain()
            await self._update()
        if self.target.pause == "abort":
            self._begin("Q5", "UPDATING")
            await self._send(lambda: self.engine.flush_cache(FLUSH_S))
        self.install_s = time.monotonic() - began
        checksum = await self._verify()
        await self._probe()
        self._agree(checksum)
        self.target.recorded = checksum
        self.verify_s = time.monotonic() - began - self.install_s
        return checksum

    async def _still_ready(self) -> bool:
        """READY on this version by the ledger, and still so by what is in its memory now."""
        known = self._known
        if not known or (known.state, known.label) != ("READY", self.target.label):
            return False
        mark = await self.engine.mark()
        if (mark.boot, mark.label, mark.checksum) != (known.boot, known.label, known.checksum):
            return False
        return await self.engine.ready()

    async def _drain(self) -> None:
        engine, settings = self.engine, self.target.settings
        self._begin("Q1", "DRAINING")
        self._begin("Q2", "DRAINING")
        if self.target.pause == "abort":  # `pin`: running requests end under their weights
            deadline = time.monotonic() + settings.drain_timeout_s
            while await engine.running_requests() and time.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
        await self._send(lambda: self._quiet())

    async def _quiet(self) -> None:
        await self.engine.pause(self.target.pause, self.target.settings.timeout_s)
        if self.target.pause == "abort":
            await self.engine.flush_cache(FLUSH_S)  # its success proves that no reader is left

    async def _update(self) -> None:
        engine, target = self.engine, self.target
        self._begin("Q3", "PAUSED")
        if (boot := await engine.current_boot()) != engine.boot:
            raise self._taken("boot", engine.boot, f"{boot}: it was restarted")
        label = (await engine.model_info()).label
        if self._known and self._known.label and label not in (allowed := self._labels(self._known)):
            raise self._taken("label before the update", " or ".join(sorted(allowed)), f"{label}: somebody else set it")
        await self._check_unchanged()
        await self._look(label)
        self._begin("Q4", "UPDATING")
        await self._send(
            lambda: engine.update_weights(
                target.path, target.label, target.settings.timeout_s, flush=target.pause != "in_place"
            )
        )

    async def _check_unchanged(self) -> None:
        """Where requests go on over the update, what they have so far needs its closing bracket here."""
        if self._serving and self.target.pause != "abort":
            found = digest_of(await self.engine.checksums(self.target.settings.timeout_s))
            if found != self._serving.checksum:
                raise self._taken("checksum before the update", self._serving.checksum, found)

    async def _look(self, label: str) -> None:
        """What is in memory before the update, so that a rank that keeps it is found.

        Asked where it is not what was proven last: in a new life, and after updates that were not proven.
        """
        known, ledger = self._known, self.target.ledger
        assert known is not None  # Q1 wrote it
        sent = [ledger.version(number).ref for number in ledger.updates_sent(known.name)]
        if known.label and (not sent or sent[-1].label == known.label):
            return
        found = digest_of(await self.engine.checksums(self.target.settings.timeout_s))
        if not known.label and not LABEL.fullmatch(label):  # else it was published to, but not by this ledger
            self._known = replace(known, label=label, checksum=found)
            self._record(known.state)
        contents = {self._content(policy.label) for policy in sent} | {self._content(label)}
        if self._content(self.target.label) not in contents:  # else a rank may hold it already
            self._before = found

    def _content(self, label: str) -> str:
        """Digits of the content under a label. A life that has only its own has the starting weights."""
        if LABEL.fullmatch(label):
            return label.partition("-")[2]
        return next((row.content[:12] for row in self.target.ledger.versions() if row.content), "")

    def _labels(self, known: EngineRow) -> set[str]:
        """What we may have set: the label it serves, or, once anything has failed, those of the attempts since."""
        if self._serving:
            return {self._serving.label}
        ledger = self.target.ledger
        return {known.label, *(ledger.version(number).ref.label for number in ledger.updates_sent(known.name))}

    async def _verify(self) -> str:
        """Q6-Q8. Gives the digest of what is in the engine's memory."""
        engine, target = self.engine, self.target
        self._begin("Q6", "VERIFYING")
        sums = await engine.checksums(target.settings.timeout_s)
        checksum = digest_of(sums)
        expected = await target.expected() if len(sums) == 1 else None
        self._check_sums(sums, checksum, expected)
        self._begin("Q7", "VERIFYING")
        if expected is None:  # else every value is proven already
            await self._check_canaries()
        self._begin("Q8", "VERIFYING")
        info = await engine.model_info()
        if info.label != target.label:
            raise self._mismatch("label", target.label, info.label)
        if info.path != target.path:
            raise self._mismatch("model path", target.path, info.path)
        return checksum

    def _check_sums(self, sums: Checksums, checksum: str, expected: dict[str, str] | None) -> None:
        known, target = self._known, self.target
        if expected is not None:
            wrong = [n for n in sorted({*expected, *sums[0]}) if expected.get(n) != sums[0].get(n)]
            if wrong:
                what = (
                    f"{len(wrong)} of {len(expected)} tensors in memory are not the package's; checksum of {wrong[0]}"
                )
                raise self._mismatch(
                    what, expected.get(wrong[0], "no such tensor"), sums[0].get(wrong[0], "no such tensor")
                )
        self._agree(checksum)
        if expected is not None:
            return  # every tensor is the package's, whatever was there: another package may hold the same tensors
        held, under = [self._before], known.label if known else ""
        if known and under and self._content(under) != self._content(target.label):
            held.append(known.checksum)
        elif known and LABEL.fullmatch(under) and checksum != known.checksum:
            raise self._mismatch(f"checksum over all ranks, as of {under}", known.checksum, checksum)
        for before in held:
            for rank, (old, new) in enumerate(zip(before.split(), checksum.split(), strict=False)):
                if old == new:
                    raise self._mismatch(
                        f"checksum of rank {rank}", f"another one than before ({under})", f"{new}: it kept it"
                    )

    def _agree(self, checksum: str) -> None:
        """Engines of one topology hold the same: the first that passed all steps stands for the version."""
        if self.target.recorded and checksum != self.target.recorded:
            raise self._mismatch(
                "checksum over all ranks, as on the engine proven first", self.target.recorded, checksum
            )

    async def _check_canaries(self) -> None:
        manifest = self.target.manifest
        if not readable_by_name(self.target.package):
            return  # this architecture cannot be asked; checksum and probe stand alone
        tensors = {t.name: t for t in manifest.tensors}
        for canary in manifest.canaries:
            if math.prod(tensors[canary.tensor].shape) > CANARY_ELEMENTS:
                continue
            tolerance = 0.0 if tensors[canary.tensor].dtype == self.target.dtype else CONVERTED_TOLERANCE
            try:
                row = await self.engine.first_row(canary.tensor, 1, self.target.settings.timeout_s)
            except Refused as error:
                raise Mismatch(self._step, f"{self.engine.name} has no tensor {canary.tensor}: {error}") from error
            found = [row[i] for i in canary.indices if i < len(row)]
            if len(found) != len(canary.values) or not all(
                math.isclose(a, b, rel_tol=tolerance) for a, b in zip(found, canary.values, strict=True)
            ):
                raise self._mismatch(f"{canary.tensor}{list(canary.indices)}", list(canary.values), found)

    async def _probe(self) -> None:
        engine, target, manifest = self.engine, self.target, self.target.manifest
        timeout_s, ids = target.settings.timeout_s, manifest.probe.ids
        self._begin("Q9", "PROBING")
        await self._send(lambda: engine.resume(timeout_s))
        if not await engine.ready():
            raise self._mismatch("/ready after continue", 200, 503)
        self._begin("Q10", "PROBING")
        rid = f"probe-{manifest.number:06d}-{self.attempt:04d}"
        got = await engine.generate_unready(
            rid=f"{rid}-g", prompt_ids=ids, sampling=Sampling(1, 0.0), extra_key=target.label, timeout_s=timeout_s
        )
        if got.spans != (Span(target.label, 0, len(got.ids)),):
            raise self._mismatch("version spans", f"all tokens under {target.label}", got.spans)
        if got.cached_tokens:
            raise self._mismatch(
                "cached tokens of the first request", 0, f"{got.cached_tokens}: old KV was not flushed"
            )
        found = await engine.prompt_logprobs(ids, rid=f"{rid}-p", extra_key=target.label, timeout_s=timeout_s)
        pairs = list(zip(found, manifest.probe.logprobs, strict=True))
        difference = sum(abs(a - b) for a, b in pairs) / len(pairs)
        if not difference <= manifest.probe_tolerance:
            raise self._mismatch(
                "mean |log-probability of engine - of trainer| on the probe",
                f"at most {manifest.probe_tolerance:g}",
                f"{difference:.4g}",
            )
