"""The file of a run's ledger: its tables, how it is opened, and what a transaction is.

A transaction is on disk when it ends (WAL, synchronous=FULL).
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import DataError, RunError
from data.run_lock import holds_run, lock_run

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

Row = TypeVar("Row")


class LedgerFile:
    """The open file. `Ledger` says what opening takes and raises; `connection` is for reading."""

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._path = path
        self._close = ExitStack()
        with ExitStack() as undo:  # a failure below releases what was taken
            if read_only:
                if not path.is_file():
                    raise RunError(f"{path} does not exist: no run was started there")
                self.connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            else:
                if not holds_run(path.parent):
                    undo.enter_context(lock_run(path.parent))
                self.connection = sqlite3.connect(path, isolation_level=None)
            undo.callback(self.connection.close)
            self._prepare(read_only)
            self._close = undo.pop_all()

    def _prepare(self, read_only: bool) -> None:
        try:
            (found,) = self.connection.execute("PRAGMA user_version").fetchone()
        except sqlite3.DatabaseError as error:
            raise DataError(f"{self._path} is not a ledger: {error}") from None
        tables = self.connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]
        if found != SCHEMA and tables:  # without tables: a run killed while it was created
            raise DataError(
                f"{self._path} has ledger schema {found}, expected {SCHEMA}: it is of another Ratchet version"
            )
        self.connection.execute("PRAGMA foreign_keys = ON")
        if read_only:
            return
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        if not tables:
            self.connection.executescript(f"BEGIN;{TABLES}PRAGMA user_version = {SCHEMA};COMMIT;")

    def close(self) -> None:
        """Close the file and release the lock this object took."""
        self._close.close()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block or, on an error, nothing. Raises DataError for what the tables refuse, RunError where the
        disk is full."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:  # a full disk ends some of them by itself
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.IntegrityError):  # a version nobody allocated, an empty reason
                raise DataError(f"the ledger refuses it: {error}") from error
            if isinstance(error, sqlite3.Error) and error.sqlite_errorname.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
                raise RunError(f"{self._path} cannot be written: {error}; free space, then run again") from error
            raise

    def select(self, kind: type[Row], table: str, where: str = "", values: Sequence[Any] = ()) -> list[Row]:
        """Rows of a table as objects of a dataclass whose fields are columns of it."""
        names = ", ".join(f.name for f in fields(kind))  # type: ignore[arg-type]
        return [kind(*row) for row in self.connection.execute(f"SELECT {names} FROM {table} {where}", values)]

    def damage(self) -> list[str]:
        """What SQLite finds wrong with the file itself: broken pages and indices, rows that refer to nothing."""
        found = [str(row[0]) for row in self.connection.execute("PRAGMA integrity_check") if row[0] != "ok"]
        lost = self.connection.execute("PRAGMA foreign_key_check").fetchall()
        return found + [
            f"row {rowid} of {table} refers to a row that {parent} lacks" for table, rowid, parent, _ in lost
        ]
