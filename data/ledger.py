"""The run's ledger: what was issued, trained, published and waited for. One SQLite file, one writer: the flow.

`Ledger` itself has the run and its policy versions, up to the moment every engine serves them (docs/publish.md): what
the stages ask and tell. What the flow writes down beside it, in the same file, are two objects of their own: `groups`
(data/groups.py) and `accounts` (data/accounts.py). Every public method is one transaction, on disk when it returns.
Datasets and weights are elsewhere; the ledger says which of them count.
"""

import difflib
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from conf.errors import DataError, RunError
from data.accounts import RUNNING, Accounts
from data.groups import Groups
from data.ledger_file import LedgerFile
from data.refs import PolicyRef

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


class Ledger:
    """Opens, or creates, `<run>/ledger.sqlite`. For writing it takes the run's lock unless this process has it.

    Raises RunError where another process holds the run, DataError for a file of another schema.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self._file = LedgerFile(path, read_only)
        self._db = self._file.connection
        self.groups = Groups(self._file)  # what became of every prompt group
        self.accounts = Accounts(self._file)  # attempts of stages, sessions, metrics

    def close(self) -> None:
        """Close the file and release the lock this object took."""
        self._file.close()

    # -- the run

    def open_run(self, run: str, config_digest: str, resolved: str) -> None:
        """Start the run, or continue it: leases and attempts of an earlier process end. `resolved` is the configuration
        as YAML.

        Raises RunError where the run was started under other settings, with the lines that differ.
        """
        with self._file.transaction() as db:
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
        """What is wrong with the file itself; nothing where it is whole."""
        return self._file.damage()

    def run_info(self) -> RunInfo | None:
        """The run; None before open_run."""
        if not self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
            return None
        return next(iter(self._file.select(RunInfo, "run")), None)

    def finish_run(self, state: str) -> None:
        """Record how the run ended; opening it again sets it to running."""
        with self._file.transaction() as db:
            db.execute("UPDATE run SET state = ?", (state,))

    # -- versions

    def allocate_version(
        self, key: str, parent: int | None, optimizer_step: int, dataset: str, rollback_of: int | None = None
    ) -> int:
        """The number for what `key` makes: a new one, or the one that key has and has not given up.

        Raises DataError where the key's version has another parent, step or dataset, or the parent is unknown.
        """
        with self._file.transaction() as db:
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
        with self._file.transaction():
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
        rows = self._file.select(VersionRow, "versions, (SELECT run FROM run)", "WHERE number = ?", (number,))
        if not rows:
            (newest,) = self._db.execute("SELECT max(number) FROM versions").fetchone()
            there = "it has none" if newest is None else f"its newest is {newest}"
            raise DataError(f"version {number} is not in the ledger: {there}")
        return rows[0]

    def versions(self) -> list[VersionRow]:
        return self._file.select(VersionRow, "versions, (SELECT run FROM run)", "ORDER BY number")

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
        rows = self._file.select(VersionRow, "versions, (SELECT run FROM run)", newest)
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
        with self._file.transaction() as db:
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
        with self._file.transaction() as db:
            if (state := self.version(number).state) in ("RETIRED", "DELETED"):
                raise DataError(f"version {number} is {state} and cannot be leased by {holder}")
            db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (number, holder, int(lasting)))

    def release(self, number: int, holder: str) -> None:
        with self._file.transaction() as db:
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
        with self._file.transaction():
            self._put_journal(number, attempt, engine, step, detail)

    def _put_journal(self, number: int, attempt: int, engine: str, step: str, detail: str) -> None:
        self._db.execute(
            "INSERT INTO journal (number, attempt, engine, step, detail, at) VALUES (?, ?, ?, ?, ?, ?)",
            (number, attempt, engine, step, detail, time.time()),
        )

    def journal_rows(self, number: int) -> list[JournalRow]:
        return self._file.select(JournalRow, "journal", "WHERE number = ? ORDER BY id", (number,))

    def next_attempt(self) -> int:
        """Higher than that of any journalled step: attempts grow over the whole run."""
        return int(self._db.execute("SELECT coalesce(max(attempt), 0) + 1 FROM journal").fetchone()[0])

    def updates_sent(self, engine: str) -> list[int]:
        """Versions whose update (Q4) was sent to the engine, in the order of sending."""
        sent = "SELECT number FROM journal WHERE engine = ? AND step = 'Q4' ORDER BY id"
        return [number for (number,) in self._db.execute(sent, (engine,))]

    def set_engine(self, name: str, boot: str, state: str, label: str, checksum: str) -> None:
        """Record what an engine is now, in place of what it was."""
        with self._file.transaction():
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
        with self._file.transaction():
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
        return self._file.select(EngineRow, "engines", "ORDER BY name")
