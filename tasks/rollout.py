"""Rollout: samples for every prompt, from engines that hold proven policy versions. Token ids in, never text.

Prompts are sent in their order, as many as are needed to get the groups that `sampling` asks for: a group that failed,
or that the reward stage finds not worth training (`sampling.filter`), has the next prompt sent in its place.

A response is accepted only whole, with its log-probabilities, from an engine that held before and after the batch what
the ledger says was proven on it, under the same boot. A sample that fails after its retries costs its group, not the
batch. An engine that is gone costs its groups a second time elsewhere: nothing it said can be proven any more.

`rollout.kv_policy` says what a version that is published in mid-batch does to the responses under way:

    pin      nothing: a response has exactly one version, the batch's. What the engine cuts off is asked for again.
    rebuild  the engine computes the KV of prompt and response so far anew and goes on under the new weights: a span
             for each version. What it cuts off is sent again with the tokens it has, and the budget that is left.
    keep     the same, but the KV stays that of the old weights: no token after the update has true log-probabilities.
"""

import asyncio
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import DataError, EngineError, StageError
from conf.schema import GroupSampling
from data.columns import column
from data.ledger import EngineRow
from data.prompts import load_tokenizer, tokenizer_digest
from data.refs import PolicyRef
from data.rows import tokens_per_version
from data.store import Facts
from data.versions import check_lag, number_of
from tasks.engines.client import (
    Aborted,
    BadAnswer,
    Engine,
    Generation,
    Mark,
    Refused,
    Sampling,
    Span,
    Unavailable,
    check_bracket,
)
from tasks.prompts import COLUMNS as PROMPT_COLUMNS
from tasks.prompts import cursor_after
from tasks.publish import publish_to_engines
from tasks.stage import Context, Group, GroupStream, Inputs, Rows, stage

SAMPLE_COLUMNS = (
    "sample_id",
    "response_ids",
    "response_mask",
    "behavior_logprobs",
    "version_spans",
    "policy_version",
    "finish_reason",
    "response_text",
    "engine",
    "cached_tokens",
)
REASONS = {Refused: "rollout_refused", Unavailable: "rollout_unavailable", BadAnswer: "rollout_bad_answer"}
BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0  # wait before the first retry, doubled for each further one
POLL_S = 0.05  # while a publish is under way
ABORTS, ABORT_AGAIN_S = 5, 1.0  # times an engine is asked to cut a request off, and how long each time is waited
ERRORS_SHOWN = 3
LEAVING = ("DEAD", "OUT")  # an engine in these states comes back as another one
COMMITTED = ("COMMITTED", "RETIRED", "DELETED")

KVPolicy = Literal["pin", "rebuild", "keep"]

log = logging.getLogger(__name__)


class EnginesLost(StageError):
    """Engines have died, and fewer are left than the batch needs."""


@dataclass(frozen=True)
class Wanted:
    """Which groups a batch starts, waits for and keeps; by default every group of every prompt, whatever it takes."""

    groups: int  # complete ones; with a filter, such as pass it
    sampling: GroupSampling = field(default_factory=GroupSampling)
    stream: GroupStream = field(default_factory=GroupStream)
    deadline_s: float = 0.0  # of one sample; 0: none
    on_deadline: Literal["truncate", "drop_group"] = "truncate"

    @property
    def filtered(self) -> bool:
        return self.sampling.filter != "none"


@stage(
    consumes=PROMPT_COLUMNS,
    produces=(*PROMPT_COLUMNS, *SAMPLE_COLUMNS),
    output="rows",
    role="rollout",
    reads="current",
)
async def rollout(inputs: Inputs, context: Context) -> Rows:
    """PROMPTS x policy -> SAMPLES: `samples_per_prompt` responses for each prompt, under the iteration's policy.

    With `sampling`, of as many prompts as it takes to get `prompts.per_iteration` groups, and of no more than came in.
    Refuses the batch (StageError, EngineError, DataError): fewer engines than `publish.min_engines`, too many groups
    lost, an engine that changed meanwhile, a policy that is not the newest committed one.
    """
    assert inputs.table is not None  # the graph check refuses a stage whose columns nobody gives
    settings, groups = context.experiment.rollout, context.experiment.sampling
    sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_p, settings.top_k)
    chosen = groups.filter != "none" or groups.oversample > 1
    wanted = Wanted(
        context.experiment.prompts.per_iteration if chosen else inputs.table.num_rows,
        groups,
        context.stream or GroupStream(),
        settings.sample_deadline_s,
        settings.on_deadline,
    )
    return await generate_batch(
        context, inputs.table, context.policy, sampling, settings.samples_per_prompt, settings.kv_policy, wanted
    )


async def generate_batch(
    context: Context,
    prompts: pa.Table,
    policy: PolicyRef,
    sampling: Sampling,
    samples: int,
    kv_policy: KVPolicy = "pin",
    wanted: Wanted | None = None,
) -> Rows:
    """`samples` responses for each prompt that is sent: complete groups only, in the order of the prompts.

    All under `policy` (pin), or each begun under it or under a version committed since (rebuild, keep). Where too many
    engines are gone, they are restarted and get the newest committed version, and the batch is generated once more from
    the beginning: under that version; with pin only if it is `policy` still, else StageError.
    """
    rest = (sampling, samples, kv_policy, wanted or Wanted(prompts.num_rows))
    try:
        return await _generate(context, prompts, policy, *rest)
    except EnginesLost as error:
        newest = context.ledger.committed()
        if newest is None or not context.engines.restartable:
            raise
        log.warning("%s; restarting engines", error)
    weights = context.run_dir / "weights"
    await publish_to_engines(newest, weights, context.engines, context.ledger, context.experiment, context.progress)
    if kv_policy != "pin":  # no response is kept of the first try, so none has to have begun under its version
        policy = context.ledger.committed() or newest
    return await _generate(context, prompts, policy, *rest)


async def _generate(
    context: Context,
    prompts: pa.Table,
    policy: PolicyRef,
    sampling: Sampling,
    samples: int,
    kv_policy: KVPolicy,
    wanted: Wanted,
) -> Rows:
    engines = engines_for(context, policy, kv_policy)
    _check_newest(context, policy)
    batch = _Batch(context, prompts, policy, sampling, engines, samples, kv_policy, wanted)
    await batch.open()
    began = time.monotonic()
    await batch.run()
    while not await batch.close():
        await batch.run()
    seconds = time.monotonic() - began
    newest = _check_newest(context, policy, crossing=kv_policy != "pin")
    kept = [group for group in batch.groups if not group.failed]
    if not wanted.filtered:  # else stage filter chooses among those that pass
        for group in kept[wanted.groups :]:
            group.failed = "surplus"
        kept = kept[: wanted.groups]
    table = await asyncio.to_thread(_table, prompts, kept, batch.boots, context.experiment.model.path)
    versions = tokens_per_version(table)
    context.measure(f"{context.node}/tokens_per_s", sum(versions.values()) / seconds)
    context.measure(f"{context.node}/retries", sum(tries - 1 for tries in batch.tries.values()))
    context.measure(f"{context.node}/aborted", batch.aborted)
    context.measure(f"{context.node}/reprefilled_tokens", batch.reprefilled_tokens)
    facts = Facts(
        policy_versions=versions,
        sampling={**asdict(sampling), "samples_per_prompt": samples, "kv_policy": kv_policy},
        logprob_kind="after_temperature",
        tokenizer_digest=tokenizer_digest(Path(context.experiment.model.path)),
        dropped={group.id: group.failed for group in batch.groups if group.failed},
        dropped_lengths={group.id: lengths for group in batch.groups if group.failed and (lengths := group.lengths)},
        cursor=cursor_after(context, len(batch.groups)) if wanted.sampling.refills else {},
        metrics={**_metrics(table, newest), **batch.metrics()},
    )
    return Rows(table, facts)


def engines_for(context: Context, policy: PolicyRef, kv_policy: KVPolicy = "pin") -> list[Engine]:
    """The engines that get work: those READY on the policy; under rebuild and keep also those an update is on.

    Raises StageError with fewer than `publish.min_engines`.
    """
    rows = {row.name: row for row in context.ledger.engines()}
    if kv_policy == "pin":
        found = [engine for engine in context.engines if engine.ready_label == policy.label]
    else:
        found = [e for e in context.engines if e.name in rows and rows[e.name].state not in LEAVING]
    needed = context.experiment.publish.min_engines
    if len(found) < needed:
        states = [
            f"{e.name} is {rows[e.name].state} on {rows[e.name].label or 'no label'}"
            if e.name in rows
            else f"{e.name} is unknown to the ledger"
            for e in context.engines
        ]
        lost = any(e.name in rows and rows[e.name].state == "DEAD" for e in context.engines)
        raise (EnginesLost if lost else StageError)(
            f"{context.node} needs {'an engine' if needed == 1 else f'{needed} engines'} READY on {policy.label} "
            f"(publish.min_engines), got {len(found) or 'none'}: {'; '.join(states) or 'no engines'}"
        )
    return found


def _check_newest(context: Context, policy: PolicyRef, crossing: bool = False) -> int:
    """The number of the newest committed version: synchronous, so the policy's own, at admission and at the end alike.

    `crossing`: at the end it may be newer, by the versions that were published in mid-batch.
    """
    newest = context.ledger.committed()
    if newest is None:
        raise StageError(f"{context.node} needs a committed policy version, the ledger has none: publish one first")
    check_lag(newest.number, policy.number, limit=max(newest.number - policy.number, 0) if crossing else 0)
    return newest.number


@dataclass
class _Flight:
    """A sample under way."""

    engine: Engine
    rid: str = ""  # of its newest request; empty: none was sent
    cut: str = ""  # why the batch itself has it cut off: deadline, or the reason its group is dropped
    task: asyncio.Task[None] | None = None


@dataclass
class _Group:
    row: int  # of the prompt
    id: str
    prompt_ids: list[int]
    engine: Engine | None = None  # all members go to one, which has their prompt in its prefix cache
    samples: dict[int, Generation] = field(default_factory=dict)  # by member
    flights: dict[int, _Flight] = field(default_factory=dict)  # members under way
    failed: str = ""  # the reason it is dropped

    def sample_id(self, member: int) -> str:
        return f"{self.id}-s{member:02d}"

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Response tokens of the members that ended, by finish_reason."""
        found: dict[str, list[int]] = {}
        for _, answer in sorted(self.samples.items()):
            found.setdefault(answer.finish_reason, []).append(len(answer.ids))
        return found

    def cancel(self) -> None:
        """Whatever comes for the members under way comes too late. The task that found out goes on."""
        for flight in self.flights.values():
            if flight.task and flight.task is not asyncio.current_task():
                flight.task.cancel()


def _groups(prompts: pa.Table) -> Iterator[_Group]:
    ids, tokens = prompts["group_id"].to_pylist(), prompts["prompt_ids"].to_pylist()
    for row, (group_id, prompt_ids) in enumerate(zip(ids, tokens, strict=True)):
        yield _Group(row, group_id, prompt_ids)


class _Batch:
    """The requests of one batch, up to `max_in_flight` at a time over all engines: open, run, close.

    `close` may send groups back to `run`: those of an engine that is gone, or whose publish failed in mid-batch.
    """

    def __init__(
        self,
        context: Context,
        prompts: pa.Table,
        policy: PolicyRef,
        sampling: Sampling,
        engines: Sequence[Engine],
        samples: int,
        kv_policy: KVPolicy,
        wanted: Wanted,
    ) -> None:
        self.context = context
        self.settings = context.experiment.rollout
        self.policy = policy
        self.sampling = sampling
        self.prompts = prompts
        self.candidates = deque(_groups(prompts))  # not sent yet
        self.groups: list[_Group] = []  # sent
        self.samples = samples
        self.wanted = wanted
        self.pin = kv_policy == "pin"
        self.load = dict.fromkeys(engines, 0)  # requests in flight on those that are left
        self.boots = {engine.name: engine.boot for engine in engines}
        self.asking = {engine: asyncio.Lock() for engine in engines}  # one question at a time whether it is there
        self.gone: list[str] = []  # engines lost, and why
        self.marks: dict[str, Mark] = {}  # at the opening
        self.repairs: dict[str, int] = {}  # failed publishes on each engine, at the opening
        self.waiting: deque[tuple[_Group, int]] = deque()
        self.wake = wanted.stream.judged  # a request ended, or a group was judged
        self.nonce = secrets.token_hex(3)  # a rid of a killed run may still be running on an external engine
        self.tries: Counter[str] = Counter()  # requests sent, by sample id
        self.done = 0
        self.aborted = 0
        self.reprefilled_tokens = 0
        self.deadlines = 0  # samples that reached theirs
        self.errors: list[str] = []
        for group in self.candidates:
            wanted.stream.take_back(group.id)  # of a batch that lost its engines

    # -- which groups

    def _passed(self, group: _Group) -> bool:
        complete = not group.failed and len(group.samples) == self.samples
        return complete and (not self.wanted.filtered or self.wanted.stream.verdict(group.id) == "")

    def _open(self) -> list[_Group]:
        """Sent, and it is not known yet whether they will be among those wanted."""
        judged = self.wanted.stream.verdict if self.wanted.filtered else (lambda group_id: None)
        return [g for g in self.groups if not g.failed and not self._passed(g) and not judged(g.id)]

    def _missing(self) -> int:
        return max(self.wanted.groups - sum(map(self._passed, self.groups)), 0)

    def _send_prompts(self) -> None:
        """The next ones, as long as too few groups are under way for those that are missing."""
        more = self.wanted.sampling.started(self._missing()) - len(self._open())
        for _ in range(min(more, len(self.candidates))):
            group = self.candidates.popleft()
            self.groups.append(group)
            self.waiting.extend((group, member) for member in range(self.samples))

    def _is_enough(self) -> bool:
        """Whether to stop although groups are open."""
        return self.wanted.sampling.keep == "fastest" and not self._missing()

    def metrics(self) -> dict[str, float]:
        found = {}
        if self.wanted.deadline_s:
            found["rollout/deadline_rate"] = self.deadlines / (len(self.groups) * self.samples)
        if self.wanted.filtered or self.wanted.sampling.oversample > 1:
            found["sampling/groups_sent"] = float(len(self.groups))
        return found

    # -- the bracket

    async def open(self) -> None:
        """Prove what every engine holds. Raises EngineError where it is not what was published."""
        for engine, mark in (await self._prove(list(self.load))).items():
            self.marks[engine.name] = mark
            self.repairs[engine.name] = self._failed_publishes(engine)

    async def close(self) -> bool:
        """Prove it again of every engine whose responses are kept. False: some groups have to be generated again.

        Raises EngineError where weights or label are not what was published, StageError where a version that
        generated tokens was never committed.
        """
        used = list({group.engine: None for group in self.groups if group.engine and not group.failed})
        marks = await self._prove(used)
        if self.pin:
            check_bracket({e.name: self.marks[e.name] for e in marks}, {e.name: mark for e, mark in marks.items()})
        for engine in marks:
            if self._failed_publishes(engine) != self.repairs[engine.name]:
                self.repairs[engine.name] = self._failed_publishes(engine)
                self._send_again(engine)
        if self.waiting:
            return False
        await self._committed()
        return True

    async def _prove(self, engines: Sequence[Engine]) -> dict[Engine, Mark]:
        """What each holds, as the ledger says it was proven. Engines that are gone are left out, their groups wait."""
        found = await asyncio.gather(*(self._mark(engine) for engine in engines), return_exceptions=True)
        marks = {}
        for engine, mark in zip(engines, found, strict=True):
            if isinstance(mark, Unavailable | _Gone):
                self._lose(engine, mark)
            elif isinstance(mark, BaseException):
                raise mark
            else:
                marks[engine] = mark
        return marks

    async def _mark(self, engine: Engine) -> Mark:
        """Raises _Gone, Unavailable, and EngineError for an engine that holds something else."""
        while True:
            row = await self._settled(engine)
            mark = await engine.mark()
            if self.pin or row == self._row(engine):  # else a publish began meanwhile
                break
        if mark.boot != self.boots[engine.name]:
            raise _Gone(f"boot must be {self.boots[engine.name]}, got {mark.boot}: it was restarted")
        if (mark.label, mark.checksum) != (row.label, row.checksum):
            raise EngineError(
                f"{engine.name} must hold what was proven on it last, {row}; got {mark}: changed since its publish, so "
                "the batch is refused"
            )
        return mark

    async def _settled(self, engine: Engine) -> EngineRow:
        """The ledger's row of the engine; under rebuild and keep after the publish that is on it. Raises _Gone."""
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                while True:
                    row = self._row(engine)
                    if row is None or row.boot != self.boots[engine.name] or row.state in LEAVING:
                        raise _Gone(f"it was taken out of the pool; the ledger has {row}")
                    if self.pin or engine.ready_label:
                        return row
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"{engine.name} was not READY again in {self.settings.timeout_s:g} s") from None

    def _row(self, engine: Engine) -> EngineRow | None:
        return next((row for row in self.context.ledger.engines() if row.name == engine.name), None)

    def _failed_publishes(self, engine: Engine) -> int:
        """A publish that failed after Q9 let requests run on an engine that it could not prove."""
        ledger = self.context.ledger
        numbers = [row.number for row in ledger.versions() if row.number >= self.policy.number]
        rows = [row for number in numbers for row in ledger.journal_rows(number)]
        return sum(row.engine == engine.name and row.detail.startswith("DIRTY") for row in rows)

    async def _committed(self) -> None:
        """Wait until every version that generated tokens is committed: a publish may still be on another engine."""
        kept = [group for group in self.groups if not group.failed]
        labels = {span.label for group in kept for answer in group.samples.values() for span in answer.spans}
        try:
            async with asyncio.timeout(self.settings.timeout_s):
                while "PUBLISHING" in (states := {label: self._version_state(label) for label in labels}).values():
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass
        if odd := {label: state for label, state in states.items() if state not in COMMITTED}:
            raise StageError(
                f"{self.context.node}: versions that generated tokens must be committed when the batch closes, "
                f"got {', '.join(f'{label} {state}' for label, state in sorted(odd.items()))}"
            )

    def _version_state(self, label: str) -> str:
        """Empty for a label that is no version's."""
        try:
            row = self.context.ledger.version(number_of(label))
        except DataError:
            return ""
        return row.state if row.content and row.ref.label == label else ""

    # -- requests

    async def run(self) -> None:
        """Send prompts until the wanted groups are there, or no prompt is left.

        Raises StageError once too many have failed.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    self._send_prompts()
                    while self.waiting and len(running) < self.settings.max_in_flight:
                        group, member = self.waiting.popleft()
                        if not group.failed:
                            self._start(tasks, running, group, member)
                    if not self.waiting and not (self.candidates and self._missing()):
                        self.wanted.stream.tail.set()
                    enough = self._is_enough()
                    for group in self._open() if enough else ():
                        if len(group.samples) < self.samples:
                            self._cut_off(tasks, group, "oversampled")
                    if not running and not self.waiting and (enough or not self._open()):
                        break
                    await self.wake.wait()
                    self.wake.clear()
        except BaseExceptionGroup as errors:  # a task group wraps even a single error
            raise errors.exceptions[0] from None
        if all(group.failed for group in self.groups):
            raise self._stop()

    def _start(self, tasks: asyncio.TaskGroup, running: set[asyncio.Task[None]], group: _Group, member: int) -> None:
        if group.engine is None:
            group.engine = min(self.load, key=lambda engine: (not engine.ready_label, self.load[engine]))
        engine = group.engine
        flight = group.flights[member] = _Flight(engine)
        task = flight.task = tasks.create_task(self._sample(group, flight, member))
        timer = tasks.create_task(self._end_at_deadline(group, flight, member)) if self.wanted.deadline_s else None

        def ended(task: asyncio.Task[None]) -> None:
            running.discard(task)
            if group.flights.get(member) is flight:
                del group.flights[member]
            if timer:
                timer.cancel()
            if engine in self.load:
                self.load[engine] -= 1
            self.wake.set()

        running.add(task)
        self.load[engine] += 1
        task.add_done_callback(ended)

    async def _sample(self, group: _Group, flight: _Flight, member: int) -> None:
        so_far, failures = None, 0
        engine = flight.engine
        while not flight.cut:
            try:
                answer = await self._ask(group, flight, member, so_far)
                if answer.finish_reason != "abort":
                    return self._take(group, member, answer)
                so_far = answer
            except EngineError as error:
                if group.failed:  # and cut off: nobody needs to know whether the engine is there
                    break
                log.warning("%s, failure %d: %s", group.sample_id(member), failures + 1, error)
                async with self.asking[engine]:  # who finds it gone cancels those that wait to ask
                    if isinstance(error, _Gone) or not await self._is_there(engine):
                        return self._lose(engine, error)
                if isinstance(error, Refused) or failures == self.settings.retries:
                    return self._fail(group, error)
                await _back_off(failures)
                failures += 1
        return self._cut_short(group, member, so_far)

    def _take(self, group: _Group, member: int, answer: Generation) -> None:
        group.samples[member] = answer
        if group.failed:  # it came to its end while it was cut off: `_drop` has counted it
            return
        self._progress(1)
        if len(group.samples) == self.samples:
            complete = replace(group, samples=dict(group.samples), flights={})  # what comes later must not change it
            model = self.context.experiment.model.path
            read = partial(_table, self.prompts, [complete], self.boots, model)
            self.wanted.stream.put(Group(group.id, read))

    # -- requests that the batch itself cuts off

    def _cut_short(self, group: _Group, member: int, so_far: Generation | None) -> None:
        if so_far and so_far.ids and not group.failed and self.wanted.on_deadline == "truncate":
            return self._take(group, member, replace(so_far, finish_reason="deadline"))
        if not group.failed:
            self._miss_deadline(group, member)
        return None

    async def _end_at_deadline(self, group: _Group, flight: _Flight, member: int) -> None:
        await deadline(self.wanted.deadline_s)
        if not flight.cut and not group.failed:
            self.deadlines += 1
            flight.cut = "deadline"
            if not await self._abort(flight) and not group.failed:
                self._miss_deadline(group, member)

    def _miss_deadline(self, group: _Group, member: int) -> None:
        self.errors.append(f"{group.sample_id(member)} took more than {self.wanted.deadline_s:g} s")
        self._drop(group, "deadline")
        group.cancel()

    def _cut_off(self, tasks: asyncio.TaskGroup, group: _Group, reason: str) -> None:
        """Drop the group; what its requests have cost so far is asked of the engine."""
        self._drop(group, reason)
        for flight in group.flights.values():
            flight.cut = flight.cut or reason
            tasks.create_task(self._abort(flight))

    async def _abort(self, flight: _Flight) -> bool:
        """Have the engine cut a request off, and wait for what it has. False: it did not, so the request was given up.

        An engine does not find a request that it has not queued yet, so it is asked again.
        """
        assert flight.task is not None
        for _ in range(ABORTS):
            if flight.rid:  # the empty one is the beginning of all
                try:
                    await flight.engine.abort(flight.rid)
                except EngineError as error:
                    log.warning("request %s was not aborted: %s", flight.rid, error)
            await asyncio.wait({flight.task}, timeout=ABORT_AGAIN_S)
            if flight.task.done():
                return True
        flight.task.cancel()
        return False

    async def _ask(self, group: _Group, flight: _Flight, member: int, so_far: Generation | None) -> Generation:
        """One try, from the tokens so far. The answer begins with them; it ends with `abort` if it was cut off."""
        sample, engine = group.sample_id(member), flight.engine
        given = so_far.ids if so_far else ()
        sent = [*group.prompt_ids, *given]
        label = await self._label(engine)
        self.tries[sample] += 1
        # Fixed width: SGLang aborts requests by a prefix of their id.
        rid = flight.rid = f"{sample}-{self.nonce}-t{self.tries[sample]:04d}"
        try:
            answer = await engine.generate(
                rid=rid,
                prompt_ids=sent,
                sampling=replace(self.sampling, max_new_tokens=self.sampling.max_new_tokens - len(given)),
                extra_key=label,
                timeout_s=self.settings.timeout_s,
            )
            self.context.spend("response_tokens", group.id, len(answer.ids))
        except Aborted as error:
            self.context.spend("response_tokens", group.id, len(error.partial.ids))
            if flight.cut:
                answer = error.partial
            else:
                self.aborted += 1
                answer = _without_last(error.partial)
                if self.pin or not answer.ids:
                    raise
        self.reprefilled_tokens += reprefilled(answer, len(sent), again=self.tries[sample] > 1)
        if so_far:
            answer = _joined(so_far, answer)
        if answer.ids:  # cut off before its first token it has none
            self._check_versions(engine, rid, answer)
        return answer

    async def _label(self, engine: Engine) -> str:
        """The version a request is for, which names the KV it may use."""
        if self.pin:
            return self.policy.label
        await self._settled(engine)
        return engine.ready_label

    def _check_versions(self, engine: Engine, rid: str, answer: Generation) -> None:
        labels = [span.label for span in answer.spans]
        if self.pin:
            expected = f"every token must come from {self.policy.label} (rollout.kv_policy: pin)"
            right = set(labels) == {self.policy.label}
        else:
            expected = f"tokens must come from {self.policy.label} or published versions after it, in their order"
            right = all(self._version_state(label) in ("PUBLISHING", *COMMITTED) for label in labels)
            numbers = [number_of(label) for label in labels] if right else []
            right = right and numbers == sorted(set(numbers)) and numbers[0] >= self.policy.number
        if not right:
            raise BadAnswer(
                f"engine {engine.name}, request {rid}: {expected}, got {', '.join(labels) or 'no label'}: "
                "unknown or mixed version"
            )

    # -- engines that are gone, groups that are lost

    async def _is_there(self, engine: Engine) -> bool:
        """Whether it is still the server that was proven at the opening, and gets work."""
        for attempt in range(self.settings.retries + 1):
            if attempt:
                await _back_off(attempt - 1)
            if self.pin and engine.ready_label != self.policy.label:
                break
            try:
                return await engine.current_boot() == self.boots[engine.name]
            except EngineError as error:
                log.warning("%s of boot %s: %s", engine.name, self.boots[engine.name], error)
        return False

    def _lose(self, engine: Engine, why: EngineError) -> None:
        """The engine is gone: DEAD, unless somebody else took it out. Raises StageError if too few are left."""
        boot = self.boots[engine.name]
        del self.load[engine]
        self.gone.append(f"{engine.name} of {boot}: {why}")
        row = self._row(engine)
        if row and (row.boot, row.state, row.label) == (boot, "READY", engine.ready_label):
            engine.ready_label = ""
            self.context.ledger.set_engine(engine.name, boot, "DEAD", row.label, row.checksum)
        needed = self.context.experiment.publish.min_engines
        if len(self.load) < needed:
            left = ", ".join(engine.name for engine in self.load) or "none"
            raise EnginesLost(
                f"{self.context.node} of iteration {self.context.iteration} must have {needed} engine(s) "
                f"(publish.min_engines), left are {left}; gone: {' | '.join(self.gone)}"
            )
        log.warning("%s is gone, its groups go to the engines left: %s", engine.name, why)
        self._send_again(engine)

    def _send_again(self, engine: Engine) -> None:
        """Every group of the engine, whole: what it answered cannot be proven."""
        for group in self.groups:
            if group.engine is engine and not group.failed:
                group.cancel()
                group.engine = None
                self.wanted.stream.take_back(group.id)
                self._progress(-len(group.samples))
                group.samples.clear()
                self.waiting = deque(item for item in self.waiting if item[0] is not group)
                self.waiting.extend((group, member) for member in range(self.samples))

    def _fail(self, group: _Group, error: EngineError) -> None:
        self.errors.append(str(error))
        self._drop(group, next(reason for kind, reason in REASONS.items() if isinstance(error, kind)))
        group.cancel()
        if self._lost() > self.settings.max_failed_share * len(self.groups):
            raise self._stop()

    def _drop(self, group: _Group, reason: str) -> None:
        group.failed = reason
        self.wanted.stream.take_back(group.id)
        self.waiting = deque(item for item in self.waiting if item[0] is not group)
        self._progress(self.samples - len(group.samples))

    def _lost(self) -> int:
        """Groups that failed, rather than being too many or too slow."""
        return sum(group.failed in REASONS.values() for group in self.groups)

    def _progress(self, samples: int) -> None:
        self.done += samples
        self.context.progress(self.done, len(self.groups) * self.samples, "samples")

    def _stop(self) -> StageError:
        lost = self._lost() or sum(bool(group.failed) for group in self.groups)
        return StageError(
            f"{self.context.node} of iteration {self.context.iteration} lost {lost} of {len(self.groups)} groups, "
            f"rollout.max_failed_share allows {self.settings.max_failed_share:.0%}; "
            f"first errors: {' | '.join(self.errors[:ERRORS_SHOWN])}"
        )


class _Gone(Unavailable):
    """The engine is not, or no longer, the one that was proven at the opening."""


async def deadline(seconds: float) -> None:
    """Until a sample that was just sent has had so much time."""
    await asyncio.sleep(seconds)


async def _back_off(failures: int) -> None:
    await asyncio.sleep(min(BACKOFF_S * 2**failures, LONGEST_BACKOFF_S))


def _without_last(partial: Generation) -> Generation:
    """The last token is left out: SGLang looks for an abort before it looks for the end, so it may be the end.

    It is drawn again with the same probabilities, since whether a request is cut off does not depend on its tokens.
    """
    length = max(len(partial.ids) - 1, 0)
    spans = tuple(Span(s.label, s.start, min(s.end, length)) for s in partial.spans if s.start < length)
    return replace(partial, ids=partial.ids[:length], logprobs=partial.logprobs[:length], spans=spans)


def _joined(first: Generation, rest: Generation) -> Generation:
    """One response of two requests; the second was sent the first one's tokens after the prompt."""
    spans = [*first.spans]
    for span in rest.spans:
        start = span.start + len(first.ids)
        if spans[-1].label == span.label:
            start = spans.pop().start
        spans.append(Span(span.label, start, span.end + len(first.ids)))
    return Generation(
        ids=first.ids + rest.ids,
        logprobs=first.logprobs + rest.logprobs,
        spans=tuple(spans),
        finish_reason=rest.finish_reason,
        cached_tokens=first.cached_tokens,
        retractions=first.retractions + rest.retractions,
    )


def reprefilled(answer: Generation, sent: int, again: bool) -> int:
    """Tokens whose KV was computed a second time for this answer to `sent` tokens; `again`: they were sent before.

    A retraction at an update costs what was there at its span's start. Of another one (memory ran out) the place is
    not told: it counts for the tokens sent alone.
    """
    updates = [span.start for span in answer.spans[1:]][: answer.retractions]
    retracted = sum(updates) + answer.retractions * sent
    return retracted + (max(sent - answer.cached_tokens, 0) if again else 0)


def _table(prompts: pa.Table, groups: Sequence[_Group], boots: Mapping[str, str], model: str) -> pa.Table:
    """One row a sample, in the order of prompts and members; the prompt columns are repeated for each member."""
    members = [(group, member) for group in groups for member in sorted(group.samples)]
    generations = [group.samples[member] for group, member in members]
    ids = [g.ids for g in generations]
    values: dict[str, list] = {
        "sample_id": [group.sample_id(member) for group, member in members],
        "response_ids": ids,
        "response_mask": [[True] * len(own) for own in ids],
        "behavior_logprobs": [g.logprobs for g in generations],
        "version_spans": [[asdict(span) for span in g.spans] for g in generations],
        "policy_version": [number_of(g.spans[0].label) for g in generations],
        "finish_reason": [g.finish_reason for g in generations],
        "response_text": load_tokenizer(model).batch_decode([list(own) for own in ids], skip_special_tokens=True),
        "engine": [f"{group.engine.name}/{boots[group.engine.name]}" for group, _ in members if group.engine],
        "cached_tokens": [g.cached_tokens for g in generations],
    }
    carried = prompts.select(PROMPT_COLUMNS).take(pa.array([group.row for group, _ in members], pa.int64()))
    columns = [pa.array(values[name], column(name).type) for name in SAMPLE_COLUMNS]
    return pa.table([*carried.columns, *columns], names=[*PROMPT_COLUMNS, *SAMPLE_COLUMNS])


def _metrics(table: pa.Table, newest: int) -> dict[str, float]:
    lengths = pc.list_value_length(table["response_ids"])
    prompt_tokens = pc.sum(pc.list_value_length(table["prompt_ids"])).as_py()
    truncated = pc.sum(pc.equal(table["finish_reason"], "length")).as_py()
    lags = pc.subtract(newest, table["policy_version"])
    return {
        "response_length/mean": pc.mean(lengths).as_py(),
        "response_length/max": float(pc.max(lengths).as_py()),
        "rollout/truncated_rate": truncated / table.num_rows,
        "rollout/cached_prompt_share": pc.sum(table["cached_tokens"]).as_py() / prompt_tokens,
        "rollout/lag_mean": pc.mean(lags).as_py(),
        "rollout/lag_max": float(pc.max(lags).as_py()),
    }
