"""Reward functions that misbehave on demand. `act` does what the sample's response says."""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tasks.rewards import RewardInput


def act(sample: RewardInput) -> Any:
    return globals()[sample.response](sample)


def good(sample: RewardInput) -> float:
    return 0.5


def hangs(sample: RewardInput) -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        try:
            time.sleep(1)
        except BaseException:
            continue


def raises(sample: RewardInput) -> float:
    raise LookupError("no such word: Zürich")


def raises_without_text(sample: RewardInput) -> float:
    raise Unprintable


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def exits(sample: RewardInput) -> float:
    sys.exit(3)


def exits_at_once(sample: RewardInput) -> float:
    os._exit(3)


def segfaults(sample: RewardInput) -> float:
    ctypes.string_at(0)
    return 1.0


def allocates(sample: RewardInput) -> float:
    return float(len(bytearray(10 << 30)))


def prints(sample: RewardInput) -> float:
    line = "x" * (1 << 20)
    for _ in range(1024):
        print(line)
        sys.stderr.write(line)
    return 0.5


def fills_the_disk(sample: RewardInput) -> float:
    with open("/tmp/ratchet-test-too-large", "wb") as file:
        Path(file.name).unlink()
        for _ in range(65):
            file.write(bytes(1 << 20))
    return 1.0


def forks(sample: RewardInput) -> float:
    if os.fork() == 0:
        time.sleep(600)
    return 0.5


def forks_and_both_return(sample: RewardInput) -> float:
    os.fork()
    return 0.5


def starts_a_daemon(sample: RewardInput) -> float:
    if (child := os.fork()) == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    return 0.5


def forks_without_end(sample: RewardInput) -> float:
    for _ in range(12):  # 4,096 processes, if nobody stops it
        os.fork()
        time.sleep(0.02)
    time.sleep(600)
    return 1.0


def forks_new_sessions_without_end(sample: RewardInput) -> float:
    for _ in range(10):
        if os.fork() == 0:
            os.setsid()
        time.sleep(0.02)
    time.sleep(600)
    return 1.0


def hops_from_process_to_process(sample: RewardInput) -> float:
    """Always another process, in a session of its own, whose parent is gone: no list of them is ever up to date."""
    if os.fork() == 0:
        for _ in range(20_000):
            os.setsid()
            if os.fork():
                os._exit(0)
        time.sleep(600)
    return 0.5


def leaves_a_daemon_and_kills_the_guard(sample: RewardInput) -> float:
    starts_a_daemon(sample)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return 1.0


def signals_the_run(sample: RewardInput) -> float:
    os.kill(int(os.environ["RUN"]), 0)
    return 1.0


def waits_for_its_process(sample: RewardInput) -> float:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return 0.5


def kills_the_guard(sample: RewardInput) -> float:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    return 1.0


def writes_to_every_descriptor(sample: RewardInput) -> float:
    for descriptor in range(3, 20):
        try:
            os.write(descriptor, b"\xff" * 100)
        except OSError:
            continue
    return 1.0


def lifts_its_limits(sample: RewardInput) -> float:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return 1.0


def keeps_rights(sample: RewardInput) -> float:
    """Of capabilities(7) those above 7, in use or to be had, and whether a set-user-id program would give more."""
    status = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines())
    capabilities = sum(int(status[name], 16) & ~0xFF for name in ("CapEff", "CapPrm", "CapInh"))
    return float(capabilities + (status["NoNewPrivs"] != "1"))


def looks_around(sample: RewardInput) -> float:
    """How many memories, environments and descriptors of other processes, its guard's among them, can be read."""
    others = [
        path for path in Path("/proc").glob("[0-9]*") if int(path.name) != os.getpid() and _shows(path, "cmdline")
    ]
    return float(sum(_shows(path, what) for path in others for what in ("environ", "mem", "fd")))


def _shows(process: Path, what: str) -> bool:
    """A kernel thread and a process that has ended show nothing."""
    try:
        if what == "fd":
            return bool([os.readlink(descriptor) for descriptor in (process / what).iterdir()])
        with (process / what).open("rb") as file:
            return what == "mem" or bool(file.read(1))
    except OSError:
        return False


def moves_a_file_between_folders(sample: RewardInput) -> float:
    """Allowed: a filter that forbids it by mistake would break honest functions."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("a", "b"):
            Path(folder, name).mkdir()
        Path(folder, "a", "file").touch()
        Path(folder, "a", "file").rename(Path(folder, "b", "file"))
        os.link(Path(folder, "b", "file"), Path(folder, "a", "file"))
    return 0.5


def runs_a_program(sample: RewardInput) -> float:
    command = [sys.executable, "-c", "import time; print(6 * 7, flush=True); time.sleep(600)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as program:
        assert program.stdout
        answer = program.stdout.readline()
        os.killpg(program.pid, signal.SIGKILL)
    return float(answer) / 84


def closes_every_descriptor(sample: RewardInput) -> float:
    os.closerange(0, 100)
    return 1.0


def leaves_an_alarm(sample: RewardInput) -> float:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    return 0.5


def changes_its_data(sample: RewardInput) -> float:
    sample.data["seen"] = sample.data.get("seen", 0) + 1
    return float(sample.data["seen"])


def none(sample: RewardInput) -> Any:
    return None


def text(sample: RewardInput) -> Any:
    return "1.0"


def boolean(sample: RewardInput) -> Any:
    return True


def several(sample: RewardInput) -> Any:
    return [1.0, 0.0]


def whole(sample: RewardInput) -> Any:
    return 2


def numpy_number(sample: RewardInput) -> Any:
    return np.float32(0.25)


def huge(sample: RewardInput) -> float:
    return 1e308


def nan(sample: RewardInput) -> float:
    return float("nan")


def infinite(sample: RewardInput) -> float:
    return -float("inf")


def beyond_float(sample: RewardInput) -> Any:
    return 10**400


def half(sample: RewardInput) -> float:
    return 0.5


def length(sample: RewardInput, *, per_token: float) -> float:
    return per_token * sample.tokens


def secret_in_environment(sample: RewardInput) -> float:
    return float("RATCHET_TEST_KEY" in os.environ)


def open_files(sample: RewardInput) -> float:
    """How many of the worker's descriptors are regular files."""
    paths = [
        os.readlink(f"/proc/self/fd/{d}") for d in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{d}")
    ]
    return float(sum(os.path.isfile(path) for path in paths))


async def asynchronous(sample: RewardInput) -> float:
    return 1.0
