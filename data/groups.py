"""Prompt groups in the ledger: issued = waiting + trained + dropped. Each ends in one outcome (docs/ledger.md)."""

from collections.abc import Mapping, Sequence

from conf.errors import DataError
from data.ledger_file import LedgerFile


class Groups:
    """The groups of a run, at `Ledger.groups`."""

    def __init__(self, file: LedgerFile) -> None:
        self._file = file
        self._db = file.connection

    def issue(self, iteration: int, rows: Sequence[tuple[str, int]]) -> None:
        """Count (group_id, prompt_index) as issued; issuing the same again changes nothing.

        Raises DataError for a group id issued for another iteration or prompt.
        """
        with self._file.transaction() as db:
            for group_id, index in rows:
                db.execute("INSERT OR IGNORE INTO groups VALUES (?, ?, ?, NULL)", (group_id, iteration, index))
                found = db.execute(
                    "SELECT iteration, prompt_index FROM groups WHERE group_id = ?", (group_id,)
                ).fetchone()
                if found != (iteration, index):
                    raise DataError(
                        f"group {group_id} was issued for (iteration, prompt) {found}, now for {(iteration, index)}"
                    )

    def settle(self, outcomes: Mapping[str, str]) -> None:
        """Record the end of groups: group_id -> "trained" or "dropped/<reason>". All of them or, on an error, none.

        Raises DataError for a group never issued, another outcome than the recorded one, or no outcome at all.
        """
        with self._file.transaction() as db:
            for group_id, outcome in outcomes.items():
                found = db.execute("SELECT outcome FROM groups WHERE group_id = ?", (group_id,)).fetchone()
                if found is None:
                    raise DataError(f"group {group_id} was never issued and cannot be {outcome}")
                if found[0] not in (None, outcome):
                    raise DataError(f"group {group_id} is {found[0]} already and cannot become {outcome}")
                if outcome != "trained" and not outcome.startswith("dropped/"):
                    raise DataError(f"group {group_id}: expected trained or dropped/<reason>, got {outcome!r}")
                db.execute("UPDATE groups SET outcome = ? WHERE group_id = ?", (outcome, group_id))

    def counts(self) -> dict[str, int]:
        """issued, waiting, trained, and dropped/<reason> for each reason; issued is the sum of the others."""
        found = dict(self._db.execute("SELECT outcome, count(*) FROM groups GROUP BY outcome ORDER BY outcome"))
        waiting = found.pop(None, 0)
        return {"issued": sum(found.values()) + waiting, "waiting": waiting, "trained": 0, **found}

    def rows(self, iteration: int | None = None) -> list[tuple[str, int, str | None]]:
        """(group_id, iteration, outcome) of every issued group, or of an iteration's; outcome None: waiting."""
        where, values = ("", ()) if iteration is None else ("WHERE iteration = ?", (iteration,))
        return self._db.execute(
            f"SELECT group_id, iteration, outcome FROM groups {where} ORDER BY group_id", values
        ).fetchall()

    def waiting(self) -> dict[int, list[str]]:
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
