"""The lock of a run: one process has it. Who has it may write its ledger and delete what nothing needs any more."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from conf.errors import RunError

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


def holds_run(run_dir: Path) -> bool:
    """Whether this process has the run's lock."""
    return (run_dir.resolve(), os.getpid()) in _locked


def lock_holder(run_dir: Path) -> tuple[int, bool] | None:
    """(process id, whether it lives) of who took the run's lock last and did not give it back; None: nobody."""
    try:
        text = (run_dir / "lock").read_text().strip()
    except FileNotFoundError:
        return None
    return (int(text), Path(f"/proc/{text}").exists()) if text.isdigit() else None
