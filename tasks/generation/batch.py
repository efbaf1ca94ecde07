"""One batch: the requests of all its groups over all its engines, and what becomes of a group when one goes wrong.

A sample that fails after its retries costs its group, not the batch. An engine that is gone costs its groups a second
time elsewhere: nothing it said can be proven any more. A sample past its deadline is cut off.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import pyarrow as pa

from conf.errors import EngineError, StageError
from data.refs import PolicyRef
from tasks.engines.client import Engine, Generation, Mark, Refused, Sampling, Unavailable
from tasks.generation.bracket import Bracket, EnginesLost, Gone, KVPolicy
from tasks.generation.groups import REASONS, Groups, PromptGroup, Wanted
from tasks.generation.request import Flight, Requests, back_off
from tasks.generation.samples import sample_table
from tasks.stage import Context, Group

ERRORS_SHOWN = 3

log = logging.getLogger(__name__)


class Batch:
    """Up to `max_in_flight` requests at a time: open, then generate, which is run and close.

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
        self.prompts = prompts
        self.wanted = wanted
        self.groups = Groups(prompts, samples, wanted)
        self.bracket = Bracket(context, policy, kv_policy, engines)
        self.requests = Requests(sampling, self.settings.timeout_s, self.bracket, context.spend)
        self.load = dict.fromkeys(engines, 0)  # requests in flight on those that are left
        self.asking = {engine: asyncio.Lock() for engine in engines}  # one question at a time whether it is there
        self.gone: list[str] = []  # engines lost, and why
        self.waiting: deque[tuple[PromptGroup, int]] = deque()
        self.wake = wanted.stream.judged  # a request ended, or a group was judged
        self.done = 0
        self.deadlines = 0  # samples that reached theirs
        self.errors: list[str] = []

    def metrics(self) -> dict[str, float]:
        found = self.groups.metrics()
        if self.wanted.deadline_s:
            found["rollout/deadline_rate"] = self.deadlines / (len(self.groups.sent) * self.groups.size)
        return found

    # -- the bracket around it

    async def open(self) -> None:
        """Prove what every engine holds. Raises EngineError where it is not what was published."""
        self.bracket.opened(await self._prove(list(self.load)))

    async def close(self) -> bool:
        """Prove it again of every engine whose responses are kept. False: some groups have to be generated again.

        Raises EngineError where weights or label are not what was published, StageError where a version that
        generated tokens was never committed.
        """
        used = list({group.engine: None for group in self.groups.alive if group.engine})
        for engine in self.bracket.closed(await self._prove(used)):
            self._send_again(engine)
        if self.waiting:
            return False
        answers = [answer for group in self.groups.alive for answer in group.samples.values()]
        await self.bracket.committed({span.label for answer in answers for span in answer.spans})
        return True

    async def _prove(self, engines: Sequence[Engine]) -> dict[Engine, Mark]:
        """What each holds, as the ledger says it was proven. Engines that are gone are left out, their groups wait."""
        found = await asyncio.gather(*(self.bracket.mark(engine) for engine in engines), return_exceptions=True)
        marks = {}
        for engine, mark in zip(engines, found, strict=True):
            if isinstance(mark, Unavailable):
                self._lose(engine, mark)
            elif isinstance(mark, BaseException):
                raise mark
            else:
                marks[engine] = mark
        return marks

    # -- its requests

    async def generate(self) -> None:
        """Run and close, until no group is sent back. Raises what they do."""
        await self.run()
        while not await self.close():
            await self.run()

    async def run(self) -> None:
        """Send prompts until the wanted groups are there, or no prompt is left.

        Raises StageError once too many have failed.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for group in self.groups.send_next():
                        self._queue(group)
                    while self.waiting and len(running) < self.settings.max_in_flight:
                        group, member = self.waiting.popleft()
                        if not group.failed:
                            self._start(tasks, running, group, member)
                    if not self.waiting and not self.groups.may_send_more:
                        self.wanted.stream.tail.set()
                    enough = self.groups.enough
                    for group in self.groups.open if enough else ():
                        if len(group.samples) < self.groups.size:
                            self._cut_off(tasks, group, "oversampled")
                    if not running and not self.waiting and (enough or not self.groups.open):
                        break
                    await self.wake.wait()
                    self.wake.clear()
        except BaseExceptionGroup as errors:  # a task group wraps even a single error
            raise errors.exceptions[0] from None
        if not self.groups.alive:
            raise self._stop()

    def _queue(self, group: PromptGroup) -> None:
        self.waiting.extend((group, member) for member in range(self.groups.size))

    def _unqueue(self, group: PromptGroup) -> None:
        self.waiting = deque(item for item in self.waiting if item[0] is not group)

    def _start(
        self, tasks: asyncio.TaskGroup, running: set[asyncio.Task[None]], group: PromptGroup, member: int
    ) -> None:
        if group.engine is None:
            group.engine = min(self.load, key=lambda engine: (not engine.ready_label, self.load[engine]))
        engine = group.engine
        flight = group.flights[member] = Flight(group.id, group.sample_id(member), group.prompt_ids, engine)
        task = flight.task = tasks.create_task(self._sample(group, flight, member))
        timer = tasks.create_task(self._end_at_deadline(group, flight)) if self.wanted.deadline_s else None

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

    async def _sample(self, group: PromptGroup, flight: Flight, member: int) -> None:
        failures = 0
        engine = flight.engine
        while not flight.cut:
            try:
                answer = await self.requests.ask(flight)
                if answer.finish_reason != "abort":
                    return self._take(group, member, answer)
            except EngineError as error:
                if group.failed:  # and cut off: nobody needs to know whether the engine is there
                    break
                log.warning("%s, failure %d: %s", flight.sample_id, failures + 1, error)
                async with self.asking[engine]:  # who finds it gone cancels those that wait to ask
                    if isinstance(error, Gone) or not await self._is_there(engine):
                        return self._lose(engine, error)
                if isinstance(error, Refused) or failures == self.settings.retries:
                    return self._fail(group, error)
                await back_off(failures)
                failures += 1
        return self._cut_short(group, flight, member)

    def _take(self, group: PromptGroup, member: int, answer: Generation) -> None:
        group.samples[member] = answer
        if group.failed:  # it came to its end while it was cut off: `_drop` has counted it
            return
        self._progress(1)
        if len(group.samples) == self.groups.size:
            complete = replace(group, samples=dict(group.samples), flights={})  # what comes later must not change it
            model = self.context.experiment.model.path
            read = partial(sample_table, self.prompts, [complete], self.bracket.boots, model)
            self.wanted.stream.put(Group(group.id, read))

    # -- requests that the batch itself cuts off

    def _cut_short(self, group: PromptGroup, flight: Flight, member: int) -> None:
        if group.failed:
            return
        so_far = flight.so_far
        if so_far and so_far.ids and self.wanted.on_deadline == "truncate":
            self._take(group, member, replace(so_far, finish_reason="deadline"))
        else:
            self._miss_deadline(group, flight)

    async def _end_at_deadline(self, group: PromptGroup, flight: Flight) -> None:
        await deadline(self.wanted.deadline_s)
        if not flight.cut and not group.failed:
            self.deadlines += 1
            flight.cut = "deadline"
            if not await flight.abort() and not group.failed:
                self._miss_deadline(group, flight)

    def _miss_deadline(self, group: PromptGroup, flight: Flight) -> None:
        self.errors.append(f"{flight.sample_id} took more than {self.wanted.deadline_s:g} s")
        self._drop(group, "deadline")
        group.cancel()

    def _cut_off(self, tasks: asyncio.TaskGroup, group: PromptGroup, reason: str) -> None:
        """Drop the group; what its requests have cost so far is asked of the engine."""
        self._drop(group, reason)
        for flight in group.flights.values():
            flight.cut = flight.cut or reason
            tasks.create_task(flight.abort())

    # -- engines that are gone, groups that are lost

    async def _is_there(self, engine: Engine) -> bool:
        """Whether it is still the server that was proven at the opening, and gets work."""
        bracket = self.bracket
        for attempt in range(self.settings.retries + 1):
            if attempt:
                await back_off(attempt - 1)
            if bracket.pin and engine.ready_label != bracket.policy.label:
                break
            try:
                return await engine.current_boot() == bracket.boots[engine.name]
            except EngineError as error:
                log.warning("%s of boot %s: %s", engine.name, bracket.boots[engine.name], error)
        return False

    def _lose(self, engine: Engine, why: EngineError) -> None:
        """The engine is gone, and its groups go to others. Raises EnginesLost if too few are left."""
        del self.load[engine]
        self.gone.append(f"{engine.name} of {self.bracket.boots[engine.name]}: {why}")
        self.bracket.bury(engine)
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
        for group in self.groups.alive:
            if group.engine is engine:
                group.cancel()
                group.engine = None
                self.wanted.stream.take_back(group.id)
                self._progress(-len(group.samples))
                group.samples.clear()
                self._unqueue(group)
                self._queue(group)

    def _fail(self, group: PromptGroup, error: EngineError) -> None:
        self.errors.append(str(error))
        self._drop(group, next(reason for kind, reason in REASONS.items() if isinstance(error, kind)))
        group.cancel()
        if self.groups.lost > self.settings.max_failed_share * len(self.groups.sent):
            raise self._stop()

    def _drop(self, group: PromptGroup, reason: str) -> None:
        group.failed = reason
        self.wanted.stream.take_back(group.id)
        self._unqueue(group)
        self._progress(self.groups.size - len(group.samples))

    def _progress(self, samples: int) -> None:
        self.done += samples
        self.context.progress(self.done, len(self.groups.sent) * self.groups.size, "samples")

    def _stop(self) -> StageError:
        lost = self.groups.lost or sum(bool(group.failed) for group in self.groups.sent)
        return StageError(
            f"{self.context.node} of iteration {self.context.iteration} lost {lost} of {len(self.groups.sent)} groups, "
            f"rollout.max_failed_share allows {self.settings.max_failed_share:.0%}; "
            f"first errors: {' | '.join(self.errors[:ERRORS_SHOWN])}"
        )


async def deadline(seconds: float) -> None:
    """Until a sample that was just sent has had so much time."""
    await asyncio.sleep(seconds)
