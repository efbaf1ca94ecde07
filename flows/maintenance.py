"""`ratchet fsck` and `ratchet gc`: what they print around `data.fsck` and `data.retention`."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from conf.errors import DataError
from conf.load import load_experiment
from data.crash import crash_point
from data.fsck import Finding, fsck
from data.ledger import Ledger
from data.leftovers import Removal, unreferenced
from data.retention import collect
from data.run_lock import lock_run
from flows.show import run_folder


def check_run(run: str, console: Console) -> int:
    """Print every finding and a summary; 1 where there is a problem."""
    findings = _look(run_folder(run), console)
    for finding in findings:
        console.print(str(finding), markup=False)
    problems = sum(finding.problem for finding in findings)
    console.print(f"{run}: {problems or 'no'} problem(s), {len(findings) - problems} note(s)", markup=False)
    return 1 if problems else 0


def _look(folder: Path, console: Console) -> list[Finding]:
    columns = (TextColumn("checking"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        return fsck(folder, lambda done, total: bar.update(task, completed=done, total=total))


def collect_garbage(run: str, console: Console, *, dry_run: bool) -> int:
    """Print and, unless `dry_run`, remove what the run no longer needs; 1 where data objects could not be looked at.

    Raises RunError where a process has the run.
    """
    folder = run_folder(run)
    settings = load_experiment(folder / "config.yaml")
    with lock_run(folder):
        ledger = Ledger(folder / "ledger.sqlite")
        try:
            going = collect(folder, ledger, settings.publish.keep_versions, settings.update.keep_checkpoints)
            trouble = ""
            try:
                going += unreferenced(folder, ledger)
            except DataError as error:
                trouble = f"data objects are left alone: {error}; see: ratchet fsck {run}"
            for removal in going:
                _remove(removal, console, dry_run)
        finally:
            ledger.close()
    if trouble:
        console.print(trouble, markup=False)
    freed = sum(removal.bytes for removal in going)
    console.print(f"{run}: {'would free' if dry_run else 'freed'} {freed:,} bytes", markup=False)
    return 1 if trouble else 0


def _remove(removal: Removal, console: Console, dry_run: bool) -> None:
    if not dry_run:
        removal.do()
        crash_point("gc/removed")
    console.print(f"{removal.bytes:>15,} bytes  {removal.what}", markup=False)
