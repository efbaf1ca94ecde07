"""What the engines of a batch hold: proven when it opens and when it closes, and of every answer in between.

An engine holds what the ledger says was proven on it last, under the same boot, or the batch is refused. Under pin
every token comes from the batch's version; under rebuild and keep an engine may be given newer ones meanwhile, and by
the close every version that generated tokens is committed.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from conf.errors import DataError, EngineError, StageError
from data.ledger import EngineRow
from data.refs import PolicyRef
from data.versions import number_of
from tasks.engines.client import BadAnswer, Engine, Generation, Mark, Unavailable, check_bracket
from tasks.stage import Context

POLL_S = 0.05  # while a publish is under way
LEAVING = ("DEAD", "OUT")  # an engine in these states comes back as another one
COMMITTED = ("COMMITTED", "RETIRED", "DELETED")

KVPolicy = Literal["pin", "rebuild", "keep"]


class EnginesLost(StageError):
    """Engines have died, and fewer are left than the batch needs."""


class Gone(Unavailable):
    """The engine is not, or no longer, the one that was proven at the opening."""


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


class Bracket:
    """The proof of one batch. `boots` are the lives of its engines that it is about."""

    def __init__(self, context: Context, policy: PolicyRef, kv_policy: KVPolicy, engines: Sequence[Engine]) -> None:
        self.pin = kv_policy == "pin"
        self.policy = policy
        self.boots = {engine.name: engine.boot for engine in engines}
        self._node = context.node
        self._ledger = context.ledger
        self._timeout_s = context.experiment.rollout.timeout_s
        self._marks: dict[str, Mark] = {}  # at the opening
        self._repairs: dict[str, int] = {}  # failed publishes on each engine, at the opening

    # -- its two ends

    def opened(self, marks: Mapping[Engine, Mark]) -> None:
        """These engines are what the batch begins with."""
        for engine, mark in marks.items():
            self._marks[engine.name] = mark
            self._repairs[engine.name] = self._failed_publishes(engine)

    def closed(self, marks: Mapping[Engine, Mark]) -> list[Engine]:
        """The engines that have to do their work again, since a publish failed on them meanwhile.

        Raises EngineError where, under pin, an engine is not what it was at the opening.
        """
        if self.pin:
            check_bracket({e.name: self._marks[e.name] for e in marks}, {e.name: mark for e, mark in marks.items()})
        failed = {engine: self._failed_publishes(engine) for engine in marks}
        again = [engine for engine, publishes in failed.items() if publishes != self._repairs[engine.name]]
        self._repairs |= {engine.name: failed[engine] for engine in again}
        return again

    async def mark(self, engine: Engine) -> Mark:
        """What the engine holds. Raises Gone, Unavailable, and EngineError where that is not what was proven on it."""
        while True:
            row = await self._settled(engine)
            mark = await engine.mark()
            if self.pin or row == self._row(engine):  # else a publish began meanwhile
                break
        if mark.boot != self.boots[engine.name]:
            raise Gone(f"boot must be {self.boots[engine.name]}, got {mark.boot}: it was restarted")
        if (mark.label, mark.checksum) != (row.label, row.checksum):
            raise EngineError(
                f"{engine.name} must hold what was proven on it last, {row}; got {mark}: changed since its publish, so "
                "the batch is refused"
            )
        return mark

    async def committed(self, labels: Collection[str]) -> None:
        """Wait until every version that generated tokens is committed: a publish may still be on another engine.

        Raises StageError where one was given up.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while "PUBLISHING" in (states := {label: self._version_state(label) for label in labels}).values():
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass
        if odd := {label: state for label, state in states.items() if state not in COMMITTED}:
            raise StageError(
                f"{self._node}: versions that generated tokens must be committed when the batch closes, "
                f"got {', '.join(f'{label} {state}' for label, state in sorted(odd.items()))}"
            )

    def _failed_publishes(self, engine: Engine) -> int:
        """A publish that failed after Q9 let requests run on an engine that it could not prove."""
        numbers = [row.number for row in self._ledger.versions() if row.number >= self.policy.number]
        rows = [row for number in numbers for row in self._ledger.journal_rows(number)]
        return sum(row.engine == engine.name and row.detail.startswith("DIRTY") for row in rows)

    # -- in between

    async def label(self, engine: Engine) -> str:
        """The version a request is for, which names the KV it may use. Raises Gone and Unavailable."""
        if self.pin:
            return self.policy.label
        await self._settled(engine)
        return engine.ready_label

    def check_versions(self, engine: Engine, rid: str, answer: Generation) -> None:
        """Raises BadAnswer for tokens of other versions than the batch may have."""
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

    def bury(self, engine: Engine) -> None:
        """The engine is gone: DEAD, unless somebody else took it out."""
        boot, row = self.boots[engine.name], self._row(engine)
        if row and (row.boot, row.state, row.label) == (boot, "READY", engine.ready_label):
            engine.ready_label = ""
            self._ledger.set_engine(engine.name, boot, "DEAD", row.label, row.checksum)

    async def _settled(self, engine: Engine) -> EngineRow:
        """The ledger's row of the engine; under rebuild and keep after the publish that is on it. Raises Gone."""
        try:
            async with asyncio.timeout(self._timeout_s):
                while True:
                    row = self._row(engine)
                    if row is None or row.boot != self.boots[engine.name] or row.state in LEAVING:
                        raise Gone(f"it was taken out of the pool; the ledger has {row}")
                    if self.pin or engine.ready_label:
                        return row
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"{engine.name} was not READY again in {self._timeout_s:g} s") from None

    def _row(self, engine: Engine) -> EngineRow | None:
        return next((row for row in self._ledger.engines() if row.name == engine.name), None)

    def _version_state(self, label: str) -> str:
        """Empty for a label that is no version's."""
        try:
            row = self._ledger.version(number_of(label))
        except DataError:
            return ""
        return row.state if row.content and row.ref.label == label else ""
