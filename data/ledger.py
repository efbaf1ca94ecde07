"""The run's ledger: what was issued, trained, published and waited for. One SQLite file, one writer: the flow.

Every public method is one transaction, on disk when it returns (WAL, synchronous=FULL). Datasets and weights are
elsewhere; the ledger says which of them count.
"""

import difflib
import fcntl
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from conf.errors import DataError, RunError
from data.refs import PolicyRef

SCHEMA = 4
TABLES = """
CREATE TABLE run (
    one INTEGER PRIMARY KEY CHECK (one = 1), run TEXT NOT NULL, config_digest TEXT NOT NULL, resolved TEXT NOT NULL,
    state TEXT NOT NULL, created REAL NOT NULL
) STRICT;
CREATE TABLE versions (  -- rows are never deleted, so a number is never given twice
    number INTEGER PRIMARY KEY, key TEXT NOT NULL, state TEXT NOT NULL, content TEXT,
    parent INTEGER REFERENCES versions, optimizer_step INTEGER NOT NULL, dataset TEXT NOT NULL,
    rollback_of INTEGER REFERENCES versions
) STRICT;
CREATE UNIQUE INDEX one_live_version_a_key ON versions (key) WHERE state NOT IN ('ABANDONED', 'QUARANTINED');
CREATE TABLE leases (  -- a leased version is not deleted
    number INTEGER NOT NULL REFERENCES versions, holder TEXT NOT NULL, lasting INTEGER NOT NULL,
    PRIMARY KEY (number, holder)
) STRICT;
CREATE TABLE journal (
    id INTEGER PRIMARY KEY, number INTEGER NOT NULL REFERENCES versions, attempt INTEGER NOT NULL,
    engine TEXT NOT NULL, step TEXT NOT NULL, detail TEXT NOT NULL, at REAL NOT NULL
) STRICT;
CREATE TABLE engines (
    name TEXT PRIMARY KEY, boot TEXT NOT NULL, state TEXT NOT NULL, label TEXT NOT NULL, checksum TEXT NOT NULL
) STRICT;
CREATE TABLE groups (  -- outcome NULL: waiting
    group_id TEXT PRIMARY KEY, iteration INTEGER NOT NULL, prompt_index INTEGER NOT NULL,
    outcome TEXT CHECK (outcome = 'trained' OR outcome LIKE 'dropped/_%')
) STRICT;
CREATE INDEX groups_by_iteration ON groups (iteration);  -- or each step's check would go through the whole run
CREATE INDEX groups_by_outcome ON groups (outcome);
CREATE TABLE stages (  -- one row an attempt
    iteration INTEGER NOT NULL, node TEXT NOT NULL, state TEXT NOT NULL, started REAL NOT NULL, ended REAL NOT NULL,
    spans TEXT NOT NULL, pool TEXT NOT NULL, role TEXT NOT NULL, kind TEXT NOT NULL, spent TEXT NOT NULL,
    PRIMARY KEY (iteration, node, started)
) STRICT;
CREATE TABLE sessions (  -- one row a process that had the run
    id INTEGER PRIMARY KEY, started REAL NOT NULL, ready REAL, accounted REAL, ended REAL, seen REAL
) STRICT;
CREATE TABLE metrics (  -- value NULL: not a number
    iteration INTEGER NOT NULL, name TEXT NOT NULL, value REAL, PRIMARY KEY (iteration, name)
) STRICT;
"""

# docs/publish.md, "States"
TRANSITIONS: dict[str, tuple[str, ...]] = {
    "EXPORTING": ("SEALED", "ABANDONED"),
    "SEALED": ("PUBLISHING", "ABANDONED", "QUARANTINED"),
    "PUBLISHING": ("COMMITTED", "QUARANTINED"),
    "COMMITTED": ("RETIRED", "QUARANTINED"),
    "RETIRED": ("DELETED",),
    "DELETED": (),
    "ABANDONED": (),
    "QUARANTINED": (),  # damaged, wrong on every engine or rolled back: never tried again; its key gets a new number
}
GIVEN_UP = ("ABANDONED", "QUARANTINED")
RUNNING = "running"  # an attempt of a stage that is under way
Spending = Literal["response_tokens", "reward_calls"]  # what attempts of stages count
# COLD: alive, base weights. DIRTY: unknown or mixed weights. OUT: taken out of the pool by a publish.
ENGINE_STATES = ("COLD", "DRAINING", "PAUSED", "UPDATING", "VERIFYING", "PROBING", "READY", "DIRTY", "DEAD", "OUT")


@dataclass(frozen=True)
class RunInfo:
    run: str
    config_digest: str
    state: str  # running, or whatever finish_run was given
    created: float  # epoch seconds


@dataclass(frozen=True)
class VersionRow:
    """A policy version from the moment its number is taken."""

    run: str
    number: int
    key: str  # what made it; the same key gets the same number until the version is abandoned or quarantined
    state: str
    content: str | None  # None until sealed
    parent: int | None  # None: the starting weights
    optimizer_step: int
    dataset: str  # id of the dataset it was trained on; empty: the starting weights
    rollback_of: int | None = None  # the older version whose content it is; None: new content

    @property
    def iteration(self) -> int:
        """The iteration whose update or roll-back made it; 0: the start."""
        return int(self.key.partition("/")[0])

    @property
    def ref(self) -> PolicyRef:
        """Raises DataError for a version without content."""
        if self.content is None:
            raise DataError(f"version {self.number} has no content yet: it is {self.state}, expected SEALED or later")
        return PolicyRef(self.run, self.number, self.content, self.optimizer_step, self.dataset)


@dataclass(frozen=True)
class JournalRow:
    """One step of one attempt to publish a version on one engine (engine is empty for steps of the whole pool)."""

    number: int
    attempt: int  # grows over the whole run
    engine: str
    step: str
    detail: str
    at: float  # epoch seconds


@dataclass(frozen=True)
class EngineRow:
    name: str
    boot: str  # nonce of the process: a restarted engine is another one
    state: str
    label: str  # the last label it was proven to serve, or that it started with; empty: not asked yet
    checksum: str  # over all ranks, under that label


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


def _spans(text: str) -> tuple[Wait, ...]:
    return tuple(Wait(cause, start, end, tuple(on)) for cause, start, end, on in json.loads(text))


Row = TypeVar("Row")
_locked: set[tuple[Path, int]] = set()  # run folders whose lock this process holds; the id, for a fork has a copy


@contextmanager
def lock_run(run_dir: Path) -> Iterator[None]:
    """Hold the run for this process: `<run>/lock`, released when the process ends however it ends.

    Raises RunError naming the holder. The lock is inherited by fork (not by exec): start children by exec.
    """
    run_dir = run_dir.resolve()
    try:
        lock = open(run_dir / "lock", "a+")  # noqa: SIM115  (closed below)
    except OSError as error:
        raise RunError(f"{run_dir} must be a folder that can be written, but is not: {error.strerror}") from error
    with lock as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip()
            raise RunError(
                f"run {run_dir.name} is in use by {f'process {holder}' if holder else 'another process'}; "
                "wait for it or stop it"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        held = (run_dir, os.getpid())
        _locked.add(held)
        try:
            yield
        finally:
            _locked.discard(held)
            file.truncate(0)


def lock_holder(run_dir: Path) -> tuple[int, bool] | None:
    """(process id, whether it lives) of who took the run's lock last and did not give it back; None: nobody."""
    try:
        text = (run_dir / "lock").read_text().strip()
    except FileNotFoundError:
        return None
    return (int(text), Path(f"/proc/{text}").exists()) if text.isdigit() else None


class Ledger:
    """Opens, or creates, `<run>/ledger.sqlite`. For writing it takes the run's lock unless this process has it.

    Raises RunError where another process holds the run, DataError for a file of another schema.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._path = path
        self._close = ExitStack()
        with ExitStack() as undo:  # a failure below releases what was taken
            if read_only:
                if not path.is_file():
                    raise RunError(f"{path} does not exist: no run was started there")
                self._db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            else:
                if (path.parent.resolve(), os.getpid()) not in _locked:
                    undo.enter_context(lock_run(path.parent))
                self._db = sqlite3.connect(path, isolation_level=None)
            undo.callback(self._db.close)
            self._prepare(path, read_only)
            self._close = undo.pop_all()

    def _prepare(self, path: Path, read_only: bool) -> None:
        try:
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise DataError(f"{path} is not a ledger: {error}") from None
        tables = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if found != SCHEMA and tables:  # without tables: a run killed while it was created
            raise DataError(f"{path} has ledger schema {found}, expected {SCHEMA}: it is of another Ratchet version")
        self._db.execute("PRAGMA foreign_keys = ON")
        if read_only:
            return
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        if not tables:
            self._db.executescript(f"BEGIN;{TABLES}PRAGMA user_version = {SCHEMA};COMMIT;")

    def close(self) -> None:
        """Close the file and release the lock this object took."""
        self._close.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield self._db
            self._db.execute("COMMIT")
        except BaseException as error:
            if self._db.in_transaction:  # a full disk ends some of them by itself
                self._db.execute("ROLLBACK")
            if isinstance(error, sqlite3.IntegrityError):  # a version nobody allocated, an empty reason
                raise DataError(f"the ledger refuses it: {error}") from error
            if isinstance(error, sqlite3.Error) and error.sqlite_errorname.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
                raise RunError(f"{self._path} cannot be written: {error}; free space, then run again") from error
            raise

    def _select(self, kind: type[Row], table: str, where: str = "", values: Sequence[Any] = ()) -> list[Row]:
        names = ", ".join(f.name for f in fields(kind))  # type: ignore[arg-type]
        return [kind(*row) for row in self._db.execute(f"SELECT {names} FROM {table} {where}", values)]

    # -- the run

    def open_run(self, run: str, config_digest: str, resolved: str) -> None:
        """Start the run, or continue it: leases and attempts of an earlier process end. `resolved` is the configuration
        as YAML.

        Raises RunError where the run was started under other settings, with the lines that differ.
        """
        with self._transaction() as db:
            found = db.execute("SELECT run, config_digest, resolved FROM run").fetchone()
            if found is None:
                values = (run, config_digest, resolved, time.time())
                db.execute("INSERT INTO run VALUES (1, ?, ?, ?, 'running', ?)", values)
                return
            if found[0] != run:
                raise RunError(f"the ledger belongs to run {found[0]}, not to {run}")
            if found[1] != config_digest:
                lines = difflib.unified_diff(found[2].splitlines(), resolved.splitlines(), n=0, lineterm="")
                changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
                raise RunError(
                    f"run {run} was started with other settings (digest {found[1][:12]}, now {config_digest[:12]}): "
                    f"{'; '.join(changed[:10])}; go on with the old ones or start another run"
                )
            db.execute("UPDATE run SET state = 'running'")
            db.execute("DELETE FROM leases WHERE NOT lasting")  # whoever held them had the run's lock, as we have now
            db.execute("UPDATE stages SET state = 'failed' WHERE state = ?", (RUNNING,))  # likewise: cut off by a kill

    def damage(self) -> list[str]:
        """What SQLite finds wrong with the file itself: broken pages and indices, rows that refer to nothing."""
        found = [str(row[0]) for row in self._db.execute("PRAGMA integrity_check") if row[0] != "ok"]
        lost = self._db.execute("PRAGMA foreign_key_check").fetchall()
        return found + [
            f"row {rowid} of {table} refers to a row that {parent} lacks" for table, rowid, parent, _ in lost
        ]

    def run_info(self) -> RunInfo | None:
        """The run; None before open_run."""
        if not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            return None
        return next(iter(self._select(RunInfo, "run")), None)

    def finish_run(self, state: str) -> None:
        """Record how the run ended; opening it again sets it to running."""
        with self._transaction() as db:
            db.execute("UPDATE run SET state = ?", (state,))

    # -- versions

    def allocate_version(
        self, key: str, parent: int | None, optimizer_step: int, dataset: str, rollback_of: int | None = None
    ) -> int:
        """The number for what `key` makes: a new one, or the one that key has and has not given up.

        Raises DataError where the key's version has another parent, step or dataset, or the parent is unknown.
        """
        with self._transaction() as db:
            made_from = (parent, optimizer_step, dataset, rollback_of)
            if self.run_info() is None:
                raise RunError("the ledger holds no run yet: open_run comes first")
            found = db.execute(
                "SELECT number, parent, optimizer_step, dataset, rollback_of FROM versions "
                "WHERE key = ? AND state NOT IN (?, ?)",
                (key, *GIVEN_UP),
            ).fetchone()
            if found is None:
                (number,) = db.execute("SELECT coalesce(max(number) + 1, 0) FROM versions").fetchone()
                values = (number, key, *made_from)
                db.execute("INSERT INTO versions VALUES (?, ?, 'EXPORTING', NULL, ?, ?, ?, ?)", values)
                return number
            if found[1:] != made_from:
                raise DataError(
                    f"version {found[0]} of {key!r} has (parent, optimizer step, dataset, rollback of) {found[1:]}, "
                    f"now asked for {made_from}"
                )
            return found[0]

    def set_version(self, number: int, state: str, content: str | None = None) -> None:
        """Move a version on; SEALED brings its content. Repeating the last move changes nothing.

        Raises DataError, with both states, for a move that TRANSITIONS does not have, and for DELETED under a lease.
        """
        with self._transaction():
            self._move_version(number, state, content)

    def _move_version(self, number: int, state: str, content: str | None = None) -> None:
        row = self.version(number)
        if state not in TRANSITIONS:
            raise DataError(f"version {number}: unknown state {state!r}, expected one of {', '.join(TRANSITIONS)}")
        if state != row.state and state not in TRANSITIONS[row.state]:
            allowed = " or ".join(TRANSITIONS[row.state]) or "nothing more"
            raise DataError(f"version {number} is {row.state} and cannot become {state}; it may become {allowed}")
        if row.content is None and (state == "SEALED") != (content is not None):
            raise DataError(f"version {number}: SEALED brings the content digest, got {state} with content {content}")
        if row.content is not None and content not in (None, row.content):
            raise DataError(f"version {number} has content {row.content} for ever, got {content}")
        if state == "DELETED" and (holders := self.leases().get(number)):
            raise DataError(f"version {number} is leased by {', '.join(holders)} and cannot be deleted")
        self._db.execute(
            "UPDATE versions SET state = ?, content = coalesce(content, ?) WHERE number = ?", (state, content, number)
        )

    def version(self, number: int) -> VersionRow:
        """Raises DataError for a number never allocated."""
        rows = self._select(VersionRow, "versions, (SELECT run FROM run)", "WHERE number = ?", (number,))
        if not rows:
            (newest,) = self._db.execute("SELECT max(number) FROM versions").fetchone()
            there = "it has none" if newest is None else f"its newest is {newest}"
            raise DataError(f"version {number} is not in the ledger: {there}")
        return rows[0]

    def versions(self) -> list[VersionRow]:
        return self._select(VersionRow, "versions, (SELECT run FROM run)", "ORDER BY number")

    def live(self, policy: PolicyRef) -> PolicyRef:
        """The version that stands for `policy`: itself, or after its quarantine what the same key was sealed as again.

        That has the same content, or, where a replay is not bit by bit, one that was proven to be near enough.
        """
        key = self.version(policy.number).key
        found = [row for row in self.versions() if row.key == key and row.content and row.state not in GIVEN_UP]
        return found[-1].ref if found else policy

    def committed(self) -> PolicyRef | None:
        """The newest COMMITTED version: the only one a rollout may use."""
        newest = "WHERE state = 'COMMITTED' ORDER BY number DESC LIMIT 1"
        rows = self._select(VersionRow, "versions, (SELECT run FROM run)", newest)
        return rows[0].ref if rows else None

    def updates_between(self, first: int, newest: int) -> int:
        """Updates from one version to a newer one; a content that had to be sealed again counts once.

        Negative where `newest` is older.
        """
        if newest < first:
            return newest - first
        made = (
            "SELECT count(DISTINCT key) FROM versions WHERE number > ? AND number <= ? "
            "AND key NOT IN (SELECT key FROM versions WHERE number = ?)"
        )
        return int(self._db.execute(made, (first, newest, first)).fetchone()[0])

    def lineage(self, number: int) -> list[VersionRow]:
        """The updates that made a version's content, oldest first; a roll-back has those of the version it goes to."""
        found: list[VersionRow] = []
        row = self.version(number)
        while True:
            if row.rollback_of is not None:
                row = self.version(row.rollback_of)
            elif row.parent is not None:
                found.insert(0, row)
                row = self.version(row.parent)
            else:
                return found

    def roll_back(self, to: int) -> VersionRow:
        """Take a new number for an older version's content; iterations that have begun are over, as they are.

        Their waiting groups are dropped; versions on their way to be committed, an earlier roll-back among them, are
        given up. The version is EXPORTING: the next start of the run seals it. Raises DataError for a version that was
        never committed, or is the one the run stands on.
        """
        with self._transaction() as db:
            old = self.version(to)
            if old.state not in ("COMMITTED", "RETIRED", "DELETED"):
                raise DataError(f"version {to} is {old.state}: only a version that was committed can be rolled back to")
            rows = self.versions()
            newest = max(row.number for row in rows if row.content is not None or row.rollback_of is not None)
            if to == newest:
                raise DataError(f"version {to} is the newest: the run stands on it already")
            for row in rows:
                if row.state in ("EXPORTING", "SEALED", "PUBLISHING"):
                    self._move_version(row.number, "QUARANTINED" if row.state == "PUBLISHING" else "ABANDONED")
            (iteration,) = db.execute("SELECT coalesce(max(iteration), 0) FROM groups").fetchone()
            db.execute("UPDATE groups SET outcome = 'dropped/rolled_back' WHERE outcome IS NULL")
            number = 1 + max(row.number for row in rows)
            values = (number, f"{iteration:06d}/rollback-{number}", newest, old.optimizer_step, old.dataset, to)
            db.execute("INSERT INTO versions VALUES (?, ?, 'EXPORTING', NULL, ?, ?, ?, ?)", values)
            return self.version(number)

    def lease(self, number: int, holder: str, *, lasting: bool = False) -> None:
        """Keep a version's folder until `release`, or, unless `lasting`, until the run is opened again."""
        with self._transaction() as db:
            if (state := self.version(number).state) in ("RETIRED", "DELETED"):
                raise DataError(f"version {number} is {state} and cannot be leased by {holder}")
            db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (number, holder, int(lasting)))

    def release(self, number: int, holder: str) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM leases WHERE number = ? AND holder = ?", (number, holder))

    def leases(self) -> dict[int, list[str]]:
        """version number -> holders."""
        found: dict[int, list[str]] = {}
        for number, holder in self._db.execute("SELECT number, holder FROM leases ORDER BY number, holder"):
            found.setdefault(number, []).append(holder)
        return found

    # -- publishing

    def journal(self, number: int, attempt: int, engine: str, step: str, detail: str) -> None:
        """Write down a publish step before the next one starts."""
        with self._transaction():
            self._put_journal(number, attempt, engine, step, detail)

    def _put_journal(self, number: int, attempt: int, engine: str, step: str, detail: str) -> None:
        self._db.execute(
            "INSERT INTO journal (number, attempt, engine, step, detail, at) VALUES (?, ?, ?, ?, ?, ?)",
            (number, attempt, engine, step, detail, time.time()),
        )

    def journal_rows(self, number: int) -> list[JournalRow]:
        return self._select(JournalRow, "journal", "WHERE number = ? ORDER BY id", (number,))

    def next_attempt(self) -> int:
        """Higher than that of any journalled step: attempts grow over the whole run."""
        return int(self._db.execute("SELECT coalesce(max(attempt), 0) + 1 FROM journal").fetchone()[0])

    def updates_sent(self, engine: str) -> list[int]:
        """Versions whose update (Q4) was sent to the engine, in the order of sending."""
        sent = "SELECT number FROM journal WHERE engine = ? AND step = 'Q4' ORDER BY id"
        return [number for (number,) in self._db.execute(sent, (engine,))]

    def set_engine(self, name: str, boot: str, state: str, label: str, checksum: str) -> None:
        """Record what an engine is now, in place of what it was."""
        with self._transaction():
            self._put_engine(EngineRow(name, boot, state, label, checksum))

    def _put_engine(self, row: EngineRow) -> None:
        if row.state not in ENGINE_STATES:
            raise DataError(
                f"engine {row.name}: unknown state {row.state!r}, expected one of {', '.join(ENGINE_STATES)}"
            )
        self._db.execute("INSERT OR REPLACE INTO engines VALUES (?, ?, ?, ?, ?)", astuple(row))

    def commit_version(
        self, number: int, engines: Sequence[EngineRow], min_engines: int, attempts: Mapping[str, int]
    ) -> None:
        """The version is COMMITTED and each engine of the pool READY on it (Q11) or OUT, all at once.

        Raises DataError, and nothing changes, for an engine in another state or on another label, and with fewer than
        `min_engines` READY.
        """
        with self._transaction():
            label = self.version(number).ref.label
            if odd := [row for row in engines if row.state != "OUT" and (row.state, row.label) != ("READY", label)]:
                raise DataError(f"version {label} is committed with engines READY on it or OUT, got {odd[0]}")
            ready = sum(row.state == "READY" for row in engines)
            if ready < min_engines:
                raise DataError(f"version {label} needs {min_engines} engine(s) READY to be committed, got {ready}")
            for row in engines:
                self._put_engine(row)
                self._put_journal(number, attempts[row.name], row.name, "Q11", row.state)
            if self.version(number).state != "COMMITTED":
                self._move_version(number, "COMMITTED")

    def engines(self) -> list[EngineRow]:
        return self._select(EngineRow, "engines", "ORDER BY name")

    # -- prompt groups: issued = waiting + trained + dropped

    def issue_groups(self, iteration: int, rows: Sequence[tuple[str, int]]) -> None:
        """Count (group_id, prompt_index) as issued; issuing the same again changes nothing.

        Raises DataError for a group id issued for another iteration or prompt.
        """
        with self._transaction() as db:
            for group_id, index in rows:
                db.execute("INSERT OR IGNORE INTO groups VALUES (?, ?, ?, NULL)", (group_id, iteration, index))
                found = db.execute(
                    "SELECT iteration, prompt_index FROM groups WHERE group_id = ?", (group_id,)
                ).fetchone()
                if found != (iteration, index):
                    raise DataError(
                        f"group {group_id} was issued for (iteration, prompt) {found}, now for {(iteration, index)}"
                    )

    def settle_groups(self, outcomes: Mapping[str, str]) -> None:
        """Record the end of groups: group_id -> "trained" or "dropped/<reason>". All of them or, on an error, none.

        Raises DataError for a group never issued, another outcome than the recorded one, or no outcome at all.
        """
        with self._transaction() as db:
            for group_id, outcome in outcomes.items():
                found = db.execute("SELECT outcome FROM groups WHERE group_id = ?", (group_id,)).fetchone()
                if found is None:
                    raise DataError(f"group {group_id} was never issued and cannot be {outcome}")
                if found[0] not in (None, outcome):
                    raise DataError(f"group {group_id} is {found[0]} already and cannot become {outcome}")
                if outcome != "trained" and not outcome.startswith("dropped/"):
                    raise DataError(f"group {group_id}: expected trained or dropped/<reason>, got {outcome!r}")
                db.execute("UPDATE groups SET outcome = ? WHERE group_id = ?", (outcome, group_id))

    def group_counts(self) -> dict[str, int]:
        """issued, waiting, trained, and dropped/<reason> for each reason; issued is the sum of the others."""
        found = dict(self._db.execute("SELECT outcome, count(*) FROM groups GROUP BY outcome ORDER BY outcome"))
        waiting = found.pop(None, 0)
        return {"issued": sum(found.values()) + waiting, "waiting": waiting, "trained": 0, **found}

    def groups(self, iteration: int | None = None) -> list[tuple[str, int, str | None]]:
        """(group_id, iteration, outcome) of every issued group, or of an iteration's; outcome None: waiting."""
        where, values = ("", ()) if iteration is None else ("WHERE iteration = ?", (iteration,))
        return self._db.execute(
            f"SELECT group_id, iteration, outcome FROM groups {where} ORDER BY group_id", values
        ).fetchall()

    def waiting_groups(self) -> dict[int, list[str]]:
        """iteration -> its groups without an outcome."""
        found: dict[int, list[str]] = {}
        waiting = "SELECT iteration, group_id FROM groups WHERE outcome IS NULL ORDER BY group_id"
        for iteration, group_id in self._db.execute(waiting):
            found.setdefault(iteration, []).append(group_id)
        return found

    def issued_for(self, group_id: str) -> int | None:
        """The iteration a group was issued for; None: it never was."""
        found = self._db.execute("SELECT iteration FROM groups WHERE group_id = ?", (group_id,)).fetchone()
        return found[0] if found else None

    # -- stages and metrics

    def record_stage(self, row: StageRow) -> None:
        """Record an attempt of a stage, or its next state."""
        with self._transaction():
            self._put_stage(row)

    def record_running(self, rows: Sequence[StageRow], at: float) -> None:
        """Record the attempts that this process is at, as far as they have come, and that it was there at `at`."""
        with self._transaction():
            for row in rows:
                self._put_stage(row)
            self._mark_session("seen", at)

    def _put_stage(self, row: StageRow) -> None:
        plain = replace(row, spans=json.dumps(row.spans), spent=json.dumps(row.spent))  # type: ignore[arg-type]
        self._db.execute("INSERT OR REPLACE INTO stages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", astuple(plain))

    def stages(self, iteration: int | None = None, *, since: float | None = None) -> list[StageRow]:
        """All attempts in the order they started; only those of an iteration, or that ended after `since`."""
        where = "WHERE iteration = coalesce(?, iteration) AND (? IS NULL OR ended > ?)"
        rows = self._select(StageRow, "stages", f"{where} ORDER BY started, iteration, node", (iteration, since, since))
        return [replace(row, spans=_spans(str(row.spans)), spent=json.loads(str(row.spent))) for row in rows]

    @contextmanager
    def session(self, started: float) -> Iterator[None]:
        """This process has the run from `started` (epoch seconds) to the end of the block."""
        with self._transaction() as db:
            db.execute("INSERT INTO sessions (started) VALUES (?)", (started,))
        try:
            yield
        finally:
            with self._transaction():
                self._mark_session("ended", time.time())

    def session_ready(self, at: float) -> None:
        """Services are up and the state is recovered: iterations begin."""
        with self._transaction():
            self._mark_session("ready", at)

    def _mark_session(self, mark: Literal["ready", "accounted", "ended", "seen"], at: float) -> None:
        self._db.execute(f"UPDATE sessions SET {mark} = ? WHERE id = (SELECT max(id) FROM sessions)", (at,))

    def sessions(self) -> list[SessionRow]:
        return self._select(SessionRow, "sessions", "ORDER BY id")

    def record_metrics(self, iteration: int, values: Mapping[str, float], accounted: float | None = None) -> None:
        """Record metrics of an iteration; a name recorded before takes the new value.

        `accounted`: they account for the session's time until then. Both or, on an error, neither.
        """
        rows = [(iteration, name, float(value)) for name, value in values.items()]
        with self._transaction() as db:
            db.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?)", rows)
            if accounted is not None:
                self._mark_session("accounted", accounted)

    def metrics(self) -> dict[int, dict[str, float]]:
        """iteration -> name -> value."""
        found: dict[int, dict[str, float]] = {}
        for iteration, name, value in self._db.execute("SELECT * FROM metrics ORDER BY iteration, name"):
            found.setdefault(iteration, {})[name] = float("nan") if value is None else value
        return found
