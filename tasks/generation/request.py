"""A request for a sample: how it is asked, cut off and gone on with, and what of its answer counts.

What the engine cuts off (an update under way, no memory left) is asked for again whole under pin. Under rebuild and
keep it is sent again with the tokens it has, and the budget that is left: two requests, one response.
"""

import asyncio
import logging
import secrets
from collections import Counter
from dataclasses import dataclass, replace

from conf.errors import EngineError
from data.accounts import Spend
from tasks.engines.client import Aborted, Engine, Generation, Sampling, Span
from tasks.generation.bracket import Bracket

BACKOFF_S, LONGEST_BACKOFF_S = 0.5, 8.0  # wait before the first retry, doubled for each further one
ABORTS, ABORT_AGAIN_S = 5, 1.0  # times an engine is asked to cut a request off, and how long each time is waited

log = logging.getLogger(__name__)


@dataclass
class Flight:
    """A sample under way."""

    group_id: str
    sample_id: str
    prompt_ids: list[int]
    engine: Engine
    so_far: Generation | None = None  # what its requests have given, to go on from
    rid: str = ""  # of its newest request; empty: none was sent
    cut: str = ""  # why the batch itself has it cut off: deadline, or the reason its group is dropped
    task: asyncio.Task[None] | None = None

    async def abort(self) -> bool:
        """Have the engine cut it off, and wait for what it has. False: it did not, so the request was given up.

        An engine does not find a request that it has not queued yet, so it is asked again.
        """
        assert self.task is not None
        for _ in range(ABORTS):
            if self.rid:  # the empty one is the beginning of all
                try:
                    await self.engine.abort(self.rid)
                except EngineError as error:
                    log.warning("request %s was not aborted: %s", self.rid, error)
            await asyncio.wait({self.task}, timeout=ABORT_AGAIN_S)
            if self.task.done():
                return True
        self.task.cancel()
        return False


class Requests:
    """The requests of one batch, and what they cost."""

    def __init__(self, sampling: Sampling, timeout_s: float, bracket: Bracket, spend: Spend) -> None:
        self.tries: Counter[str] = Counter()  # requests sent, by sample id
        self.aborted = 0  # by the engine
        self.reprefilled_tokens = 0
        self._sampling = sampling
        self._timeout_s = timeout_s
        self._bracket = bracket
        self._spend = spend
        self._nonce = secrets.token_hex(3)  # a rid of a killed run may still be running on an external engine

    async def ask(self, flight: Flight) -> Generation:
        """One try, from the tokens so far. The answer begins with them, and takes their place in the flight; it ends
        with `abort` if it was cut off.

        Raises what Engine.generate does, and BadAnswer for tokens of other versions than the batch may have.
        """
        engine, so_far = flight.engine, flight.so_far
        given = so_far.ids if so_far else ()
        sent = [*flight.prompt_ids, *given]
        label = await self._bracket.label(engine)
        tries = self.tries[flight.sample_id] = self.tries[flight.sample_id] + 1
        # Fixed width: SGLang aborts requests by a prefix of their id.
        rid = flight.rid = f"{flight.sample_id}-{self._nonce}-t{tries:04d}"
        try:
            answer = await engine.generate(
                rid=rid,
                prompt_ids=sent,
                sampling=replace(self._sampling, max_new_tokens=self._sampling.max_new_tokens - len(given)),
                extra_key=label,
                timeout_s=self._timeout_s,
            )
            self._spend("response_tokens", flight.group_id, len(answer.ids))
        except Aborted as error:
            self._spend("response_tokens", flight.group_id, len(error.partial.ids))
            if flight.cut:
                answer = error.partial
            else:
                self.aborted += 1
                answer = without_last(error.partial)
                if self._bracket.pin or not answer.ids:
                    raise
        self.reprefilled_tokens += reprefilled(answer, len(sent), again=tries > 1)
        if so_far:
            answer = joined(so_far, answer)
        if answer.ids:  # cut off before its first token it has none
            self._bracket.check_versions(engine, rid, answer)
        flight.so_far = answer
        return answer


async def back_off(failures: int) -> None:
    """The wait before a retry, after so many failures before the last one."""
    await asyncio.sleep(min(BACKOFF_S * 2**failures, LONGEST_BACKOFF_S))


def without_last(partial: Generation) -> Generation:
    """The last token is left out: SGLang looks for an abort before it looks for the end, so it may be the end.

    It is drawn again with the same probabilities, since whether a request is cut off does not depend on its tokens.
    """
    length = max(len(partial.ids) - 1, 0)
    spans = tuple(Span(s.label, s.start, min(s.end, length)) for s in partial.spans if s.start < length)
    return replace(partial, ids=partial.ids[:length], logprobs=partial.logprobs[:length], spans=spans)


def joined(first: Generation, rest: Generation) -> Generation:
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
