"""What of a run is kept: which weight packages and checkpoints, for how long. One rule for `publish` and `ratchet gc`.

A package goes in two passes: the first makes its version RETIRED, a later one unlinks it and makes it DELETED. Kept are
the newest committed versions, every leased one (an evaluated version has a lasting lease), and what a roll-back that is
not sealed yet goes back to.
"""

import re
import shutil
from functools import partial
from pathlib import Path

from data.crash import crash_point
from data.ledger import GIVEN_UP, Ledger, VersionRow
from data.leftovers import Removal, size, unfinished
from data.weights import delete_package, find_sealed, withdraw


def expired(ledger: Ledger, keep: int) -> tuple[list[VersionRow], list[VersionRow]]:
    """(versions retired in an earlier pass, versions to retire in this one), without those that somebody leases."""
    leased = ledger.leases()
    rows = ledger.versions()
    kept = [row.number for row in rows if row.state == "COMMITTED"][-keep:]
    # A roll-back that is not sealed yet is proven against the package it goes back to.
    kept += [row.rollback_of for row in rows if row.state == "EXPORTING" and row.rollback_of is not None]
    free = [row for row in rows if row.number not in leased and row.number not in kept]
    return [row for row in free if row.state == "RETIRED"], [row for row in free if row.state == "COMMITTED"]


def overtaken(ledger: Ledger) -> list[VersionRow]:
    """Versions that will never be published, since a newer one was (schedule.publish_every), and nobody leases."""
    rows, leased = ledger.versions(), ledger.leases()
    newest = max((row.number for row in rows if row.state == "COMMITTED"), default=0)
    return [row for row in rows if row.state == "SEALED" and row.number < newest and row.number not in leased]


def retire(ledger: Ledger, weights: Path, keep: int) -> list[Path]:
    """One pass over the versions. Gives folders that have left their label, for the caller to delete.

    Safe to repeat after a crash anywhere: a folder without its name is a leftover, and a RETIRED version without a
    folder becomes DELETED in the next pass.
    """
    before, now = expired(ledger, keep)
    doomed = [_withdraw(ledger, weights / row.ref.label, row.number) for row in before]
    for row in now:
        ledger.set_version(row.number, "RETIRED")
        crash_point("retire/retired")
    for row in overtaken(ledger):
        ledger.set_version(row.number, "ABANDONED")
        folder = weights / row.ref.label
        doomed.append(withdraw(folder) if folder.exists() else None)
    return [folder for folder in doomed if folder]


def _withdraw(ledger: Ledger, folder: Path, number: int) -> Path | None:
    doomed = withdraw(folder) if folder.exists() else None
    crash_point("retire/withdrawn")
    ledger.set_version(number, "DELETED")
    crash_point("retire/deleted")
    return doomed


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete training checkpoints, oldest first: one that is being written or deleted has another name."""
    return sorted(p for p in (run_dir / "checkpoints").glob("*") if re.fullmatch(r"\d{6}", p.name))


def damaged_checkpoints(run_dir: Path) -> list[Path]:
    """Those that a start found damaged and put aside."""
    return sorted((run_dir / "checkpoints").glob("*.damaged"))


def delete_checkpoint(folder: Path) -> None:
    """Delete a training checkpoint. It leaves its name first."""
    doomed = folder.with_name(f".{folder.name}.deleting")
    folder.rename(doomed)
    crash_point("retire/checkpoint")
    shutil.rmtree(doomed)


def collect(run_dir: Path, ledger: Ledger, keep_versions: int, keep_checkpoints: int) -> list[Removal]:
    """What one pass of `ratchet gc` removes besides objects, nothing done yet. Call it with the run's lock held."""
    weights = run_dir / "weights"
    before, now = expired(ledger, keep_versions)
    going = unfinished(run_dir)
    for row in before:
        folder = weights / row.ref.label
        what = f"weights/{folder.name}: RETIRED in an earlier pass, now DELETED"
        going.append(Removal(what, size(folder), partial(_delete_version, ledger, folder, row.number)))
    for row in now:
        what = f"weights/{row.ref.label}: older than the newest {keep_versions}, now RETIRED; a later pass deletes it"
        going.append(Removal(what, 0, partial(ledger.set_version, row.number, "RETIRED")))
    leased = ledger.leases()
    for row in ledger.versions():
        given_up = find_sealed(weights, row.number) if row.state in GIVEN_UP and row.number not in leased else None
        if given_up:
            what = f"weights/{given_up.name}: its version is {row.state}"
            going.append(Removal(what, size(given_up), partial(delete_package, given_up)))
    for old in checkpoints(run_dir)[:-keep_checkpoints]:
        what = f"checkpoints/{old.name}: older than the newest {keep_checkpoints}"
        going.append(Removal(what, size(old), partial(delete_checkpoint, old)))
    for damaged in damaged_checkpoints(run_dir):
        what = f"checkpoints/{damaged.name}: put aside as damaged"
        going.append(Removal(what, size(damaged), partial(delete_checkpoint, damaged)))
    return going


def _delete_version(ledger: Ledger, folder: Path, number: int) -> None:
    if doomed := _withdraw(ledger, folder, number):
        shutil.rmtree(doomed)
