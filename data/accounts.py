"""What the time of a run went into, in the ledger: attempts of stages, sessions, and the metrics of each iteration."""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace
from typing import Literal, NamedTuple

from data.ledger_file import LedgerFile

RUNNING = "running"  # an attempt of a stage that is under way
Spending = Literal["response_tokens", "reward_calls"]  # what attempts of stages count
Spend = Callable[[Spending, str, int], None]  # (cost, group_id, count), at once when it is spent


class Wait(NamedTuple):
    """A time in which an attempt of a stage waited."""

    cause: str
    start: float  # epoch seconds
    end: float
    on: tuple[str, ...] = ()  # nodes of the same iteration whose output was not there, where it waited for that


@dataclass(frozen=True)
class StageRow:
    """One attempt of a stage. The same start time is the same attempt. Iteration 0: before the first, in recovery."""

    iteration: int
    node: str
    state: str  # completed, failed or RUNNING
    started: float  # epoch seconds
    ended: float  # epoch seconds; of one that is RUNNING: as far as is known of it
    spans: tuple[Wait, ...] = ()  # in order, none over another; what is left of the attempt is work
    pool: str = ""
    role: str = ""  # of the stage
    kind: str = "working"  # what its work is: working, publish or starting
    # Spending -> group_id -> how many it took; its output may hold fewer, or not exist
    spent: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    @property
    def waits(self) -> dict[str, float]:
        """cause -> seconds."""
        found: dict[str, float] = {}
        for wait in self.spans:
            found[wait.cause] = found.get(wait.cause, 0.0) + wait.end - wait.start
        return found


@dataclass(frozen=True)
class SessionRow:
    """A process that had the run. Times are epoch seconds; what it did not come to is None."""

    started: float
    ready: float | None = None  # services are up and the state is recovered: iterations begin
    accounted: float | None = None  # when its last iteration was accounted for
    ended: float | None = None  # None: under way, or killed
    seen: float | None = None  # when it was last known to be there


class Accounts:
    """The accounts of a run, at `Ledger.accounts`."""

    def __init__(self, file: LedgerFile) -> None:
        self._file = file
        self._db = file.connection

    def record_stage(self, row: StageRow) -> None:
        """Record an attempt of a stage, or its next state."""
        with self._file.transaction():
            self._put_stage(row)

    def record_running(self, rows: Sequence[StageRow], at: float) -> None:
        """Record the attempts that this process is at, as far as they have come, and that it was there at `at`."""
        with self._file.transaction():
            for row in rows:
                self._put_stage(row)
            self._mark_session("seen", at)

    def _put_stage(self, row: StageRow) -> None:
        plain = replace(row, spans=json.dumps(row.spans), spent=json.dumps(row.spent))  # type: ignore[arg-type]
        self._db.execute("INSERT OR REPLACE INTO stages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(plain))

    def stages(self, iteration: int | None = None, *, since: float | None = None) -> list[StageRow]:
        """All attempts in the order they started; only those of an iteration, or that ended after `since`."""
        where = "WHERE iteration = coalesce(?, iteration) AND (? IS NULL OR ended > ?)"
        rows = self._file.select(
            StageRow, "stages", f"{where} ORDER BY started, iteration, node", (iteration, since, since)
        )
        return [replace(row, spans=_spans(str(row.spans)), spent=json.loads(str(row.spent))) for row in rows]

    @contextmanager
    def session(self, started: float) -> Iterator[None]:
        """This process has the run from `started` (epoch seconds) to the end of the block."""
        with self._file.transaction() as db:
            db.execute("INSERT INTO sessions (started) VALUES (?)", (started,))
        try:
            yield
        finally:
            with self._file.transaction():
                self._mark_session("ended", time.time())

    def session_ready(self, at: float) -> None:
        """Services are up and the state is recovered: iterations begin."""
        with self._file.transaction():
            self._mark_session("ready", at)

    def _mark_session(self, mark: Literal["ready", "accounted", "ended", "seen"], at: float) -> None:
        self._db.execute(f"UPDATE sessions SET {mark} = ? WHERE id = (SELECT max(id) FROM sessions)", (at,))

    def sessions(self) -> list[SessionRow]:
        return self._file.select(SessionRow, "sessions", "ORDER BY id")

    def record_metrics(self, iteration: int, values: Mapping[str, float], accounted: float | None = None) -> None:
        """Record metrics of an iteration; a name recorded before takes the new value.

        `accounted`: they account for the session's time until then. Both or, on an error, neither.
        """
        rows = [(iteration, name, float(value)) for name, value in values.items()]
        with self._file.transaction() as db:
            db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)
            if accounted is not None:
                self._mark_session("accounted", accounted)

    def metrics(self) -> dict[int, dict[str, float]]:
        """iteration -> name -> value."""
        found: dict[int, dict[str, float]] = {}
        for iteration, name, value in self._db.execute("SELECT * FROM metrics ORDER BY iteration, name"):
            found.setdefault(iteration, {})[name] = float("nan") if value is None else value
        return found


def _spans(text: str) -> tuple[Wait, ...]:
    return tuple(Wait(cause, start, end, tuple(on)) for cause, start, end, on in json.loads(text))
