"""What nothing needs any more in a run's folder: what a killed process left, and objects that nothing refers to.

Whoever holds the run's lock may remove both. Unfinished files go at once: nothing can refer to them. An object goes in
two passes: the first writes its name on the tombstones, a later one that still finds it without a reference unlinks it.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conf.errors import DataError
from data.crash import crash_point
from data.ledger import Ledger
from data.store import Store
from data.weights import DELETING

TOMBSTONES = "tombstones.json"


@dataclass(frozen=True)
class Removal:
    """One thing that goes."""

    what: str
    bytes: int  # freed by `do`
    do: Callable[[], object]


def leftovers(run_dir: Path) -> list[Path]:
    """Unfinished files and folders. If no process has the run, the one that made them was killed."""
    found = sorted(run_dir.glob("*.tmp"))
    for name, pattern in (
        ("data", "*.tmp"),
        ("data/staging", "*"),
        ("weights/staging", "*"),
        ("weights", f"{DELETING}*"),
        ("checkpoints", ".*"),  # `.000005.partial`, and those being deleted
    ):
        folder = run_dir / name
        # What lies behind a link is not of this run, whatever it is.
        if not folder.is_symlink() and not folder.parent.is_symlink():
            found += sorted(folder.glob(pattern))
    return found


def unfinished(run_dir: Path) -> list[Removal]:
    """The removal of each leftover."""
    return [
        Removal(f"{path.relative_to(run_dir)}: unfinished, of a process that was killed", size(path), _delete(path))
        for path in leftovers(run_dir)
    ]


def unreferenced(run_dir: Path, ledger: Ledger) -> list[Removal]:
    """One pass over the objects. Raises DataError where a manifest is damaged: what it refers to is not known then."""
    folder, info = run_dir / "data" / "objects", ledger.run_info()
    if info is None or not folder.is_dir():
        return []
    # The dataset a version was trained on may be a join that no stage has for a parent.
    used = Store(run_dir, info.run).referenced([row.dataset for row in ledger.versions() if row.dataset])
    lost = {path.name: path for path in sorted(folder.iterdir()) if path.name not in used}
    marked = _marked(run_dir) & lost.keys()
    going = [
        Removal(f"data/objects/{name}: nothing refers to it", size(lost[name]), _delete(lost[name]))
        for name in sorted(marked)
    ]
    new = sorted(lost.keys() - marked)
    if new or _marked(run_dir):
        what = f"data/objects: nothing refers to {len(new)} more; a later pass deletes them"
        going.append(Removal(what, 0, lambda: _mark(run_dir, new)))
    return going


def clean_up(run_dir: Path, ledger: Ledger) -> str:
    """At the start of a run: remove what a killed process left. Gives a line about it; empty if there was nothing.

    Call it with the run's lock held.
    """
    going = unfinished(run_dir)
    try:
        going += unreferenced(run_dir, ledger)
        trouble = ""
    except DataError as error:  # of an old iteration, perhaps: the run may still go on
        trouble = f"; unreferenced data was not looked for: {error} (see: ratchet fsck {run_dir})"
    for removal in going:
        removal.do()
        crash_point("clean/removed")
    freed = sum(removal.bytes for removal in going)
    gone = f"removed what a killed process left ({freed:,} bytes)" if freed else ""
    return f"{gone}{trouble}".removeprefix("; ")


def size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder; 0 for what is not there, or goes meanwhile.

    A link counts as itself.
    """
    try:
        if path.is_symlink() or not path.is_dir():
            return path.lstat().st_size
        return sum(size(entry) for entry in path.iterdir())
    except FileNotFoundError:
        return 0


def _delete(path: Path) -> Callable[[], object]:
    def delete() -> None:
        if path.is_symlink() or not path.is_dir():
            path.unlink()
            return
        path.chmod(0o755)  # a sealed folder is read-only
        shutil.rmtree(path)

    return delete


def _marked(run_dir: Path) -> set[str]:
    try:
        return set(json.loads((run_dir / "data" / TOMBSTONES).read_bytes()))
    except (OSError, ValueError, TypeError):  # none yet, or cut by a crash: then nothing is marked
        return set()


def _mark(run_dir: Path, names: list[str]) -> None:
    path = run_dir / "data" / TOMBSTONES
    staged = path.with_suffix(".tmp")
    staged.write_text(json.dumps(names))
    os.replace(staged, path)
