"""`ratchet run` as a process of its own, whose whole tree can be found, looked at and proven gone.

Every process that descends from a launch has its TMPDIR, or a folder below it: reward workers and SGLang get little
else of the environment. So what is left is found in /proc, also where its parent is gone and its session is its own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RATCHET = "from flows.cli import main; main()"
PATIENCE_S = 900.0  # for what takes seconds on an idle machine


@dataclass(frozen=True)
class Place:
    """A folder to run in (`runs/` appears there) and the environment of what runs."""

    folder: Path
    environment: Mapping[str, str]

    def experiment(self, name: str, text: str) -> Path:
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return path


class Launch:
    """A running or ended command with everything it started."""

    def __init__(self, process: "subprocess.Popen[bytes]", tmp: str, log: Path) -> None:
        self.process = process
        self.began = time.monotonic()
        self._marker = f"TMPDIR={tmp}".encode()
        self._log = log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def tree(self) -> dict[int, str]:
        """The command lines of all living processes of this launch, by process id."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._marker in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # it has ended, or is not ours
                continue
        return found

    def wait(self, seconds: float = PATIENCE_S) -> int:
        return self.process.wait(seconds)

    def until(self, condition: Callable[[], object], what: str, seconds: float = PATIENCE_S) -> float:
        """Wait for a condition; gives the seconds it took. Fails where the command ends before."""
        began = time.monotonic()
        while not condition():
            waited = time.monotonic() - began
            assert self.process.poll() is None, f"ended before {what}:\n{self.output}"
            assert waited < seconds, f"{what}: not within {seconds:.0f} s:\n{self.output}"
            time.sleep(0.02)
        return time.monotonic() - began

    def until_gone(self, seconds: float = 30.0) -> float:
        """Wait until no process of the launch is left; gives the seconds it took."""
        began = time.monotonic()
        while left := self.tree():
            assert time.monotonic() - began < seconds, f"still alive after {seconds:.0f} s: {left}"
            time.sleep(0.05)
        return time.monotonic() - began


@contextmanager
def launched(place: Place, *command: str, **environment: str) -> Iterator[Launch]:
    """Start a command in the place; when the block is left, whatever is still alive of it is killed."""
    tmp = tempfile.mkdtemp(prefix="e2e-", dir="/tmp")  # short: SGLang's and the trainer's sockets lie in it
    log = place.folder / f"output-{Path(tmp).name}.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=place.folder,
            env={**place.environment, **environment, "TMPDIR": tmp},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A suite in a script's background has SIGINT ignored, and would pass that on.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
        )
    launch = Launch(process, tmp, log)
    try:
        yield launch
    finally:
        while left := launch.tree():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            process.poll()
        process.wait()
        shutil.rmtree(tmp, ignore_errors=True)


def ratchet(place: Place, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a short command of `ratchet` to its end."""
    return subprocess.run(
        [sys.executable, "-c", RATCHET, *arguments],
        cwd=place.folder,
        env={**place.environment, **environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def stage_committed(folder: Path, iteration: int, node: str) -> bool:
    return (folder / "data" / "stages" / f"{iteration:06d}" / f"{node}.json").exists()
