"""What runs in a reward worker: a guard that imports the functions, and below it a runner that calls them.

    run's process  <- socket ->  guard  <- socket ->  runner (forked from the guard)

The guard owns the limits on time and on the number of processes. A runner that breaks one, dies or leaves processes
behind is killed with all its descendants and forked anew, without importing again. The guard is the reaper of its
subtree, so a descendant that changes its session or outlives its parent is found too; above it a keeper does the same
for a guard that is killed. Memory and file size are limited by the kernel, which also keeps the runner from signalling
or looking into processes that are not its own (`confine`). This keeps faults apart; it is no sandbox for hostile code:
docs/security.md says what holds.

Imported without the rest of Ratchet's dependencies, so that a worker starts in a fraction of a second.
"""

import contextlib
import ctypes
import hashlib
import importlib
import inspect
import json
import math
import numbers
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.rewards import RewardInput

Reply = tuple[str, float | None, str]  # outcome, value where it is ok, what went wrong

_PDEATHSIG, _SUBREAPER, _NO_NEW_PRIVS = 1, 36, 38  # prctl(2)
_CAPABILITIES_KEPT = 0xFF  # capabilities(7) 0-7: what root needs for files, users and its own processes
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446  # system calls, the same on every architecture
_LANDLOCK_REFER, _LANDLOCK_SIGNAL = 1 << 13, 1 << 1
_REPLY_LIMIT = 1 << 16  # bytes; a reply is far smaller, whatever else arrives was written by the function
_FILE_LIMIT = 64 << 20  # bytes a reward function may write to one file
_PROCESS_LIMIT = 64  # processes of one call. RLIMIT_NPROC counts all of the user's, and root's not at all
_LOOK_S = 0.05  # between two counts of them
_ERROR_LIMIT = 500  # characters of an error kept in the dataset
_KILL_LIMIT_S = 5.0


def frame(payload: bytes) -> bytes:
    return struct.pack("!I", len(payload)) + payload


def unframe(buffer: bytes | bytearray, limit: int | None = None) -> bytes | None:
    """The payload, or None while bytes are missing. Raises ValueError for one that is said to exceed `limit`."""
    if len(buffer) < 4:
        return None
    size = int(struct.unpack_from("!I", buffer)[0])
    if limit is not None and size > limit:
        raise ValueError(size)
    return bytes(buffer[4 : 4 + size]) if len(buffer) >= 4 + size else None


def receive(channel: socket.socket) -> bytes | None:
    """Wait for one message; None when the other side is gone."""
    buffer = bytearray()
    while (payload := unframe(buffer)) is None:
        if not (part := channel.recv(1 << 16)):
            return None
        buffer += part
    return payload


def load(path: str, options: dict[str, Any]) -> tuple[Callable[..., Any], str]:
    """The function at `package.module:function` and the SHA-256 of its module's source. Raises ValueError."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"must be `package.module:function`, got `{path}`")
    try:
        module = importlib.import_module(module_name)
    except BaseException as error:
        raise ValueError(f"cannot import `{module_name}`: {describe(error)}") from error
    function = getattr(module, name, None)
    if not callable(function):
        functions = sorted(n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_"))
        raise ValueError(f"`{module_name}` has no function `{name}`; it has: {', '.join(functions)}")
    if inspect.iscoroutinefunction(function):
        raise ValueError(f"`{path}` must be a plain function, got an async one")
    try:
        inspect.signature(function).bind(None, **options)
    except TypeError as error:
        raise ValueError(f"`{path}` cannot be called with one sample and the options {options}: {error}") from error
    source = Path(module.__file__).read_bytes() if module.__file__ else b""
    return function, hashlib.sha256(source).hexdigest()


def call(function: Callable[..., Any], sample: dict[str, Any], options: dict[str, Any]) -> Reply:
    """Call the function and judge what it returns; whatever it does becomes an outcome, never a number."""
    try:
        value = function(RewardInput(**{**sample, "data": json.loads(sample["data"])}), **options)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            return "error", None, f"returned {type(value).__name__} {value!r:.100}, expected a float"
        number = float(value)
    except OverflowError as error:
        return "nonfinite", None, describe(error)
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: they cost one sample
        return "error", None, describe(error)
    return ("ok", number, "") if math.isfinite(number) else ("nonfinite", None, f"returned {number}")


def describe(error: BaseException) -> str:
    """`ValueError: what it says (file.py:12)`."""
    try:
        message = str(error)
    except Exception:
        message = "(its message cannot be printed)"
    if isinstance(error, MemoryError):
        message = message or "the call needs more than reward.memory_mb"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
    if frames[-1].filename in (__file__, importlib.__file__):
        where = ""  # raised before it reached the user's code
    return f"{type(error).__name__}: {message}"[:_ERROR_LIMIT].removesuffix(": ") + where


def children(pid: int) -> list[int]:
    """Direct children of a process, zombies included."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += map(int, file.read().split())
    return found


def descendants(pid: int) -> list[int]:
    direct = children(pid)
    return direct + [below for child in direct for below in descendants(child)]


def kill_descendants() -> None:
    """Kill and reap everything below this process."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    while (alive := descendants(os.getpid())) and time.monotonic() < deadline:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


class _TooManyProcesses(Exception):
    pass


class Guard:
    def __init__(self, channel: socket.socket, setup: dict[str, Any]) -> None:
        self.channel = channel
        self.functions: dict[str, Callable[..., Any]] = {}
        self.options = {name: function["options"] for name, function in setup["functions"].items()}
        self.timeout_s: float = setup["timeout_s"]
        self.memory: int = setup["memory_mb"] << 20
        self.runner: int | None = None
        self.pipe: socket.socket
        self.exited: int  # file descriptor that is readable once the runner has exited

    def serve(self) -> None:
        while (job := receive(self.channel)) is not None:
            self.channel.sendall(frame(json.dumps(self.answer(job)).encode()))
        self.discard()

    def answer(self, job: bytes) -> Reply:
        """Have the runner do one call within the time limit."""
        if self.runner is not None and select.select([self.exited], [], [], 0)[0]:
            self.discard()  # it died between two calls; that is no fault of the next one
        if self.runner is None:
            self.fork()
        runner = self.runner
        assert runner is not None
        try:
            reply = self.exchange(job)
        except _TooManyProcesses as error:
            reply = "error", None, f"the call had {error} processes at once, more than {_PROCESS_LIMIT}"
        except TimeoutError:
            reply = "timeout", None, f"no answer within {self.timeout_s:g} s"
        except EOFError:
            reply = "error", None, "the call " + self.ending()
        except (ValueError, TypeError):
            reply = "error", None, "the call wrote to the worker's own socket"
        else:
            left = len(children(runner)) + sum(pid != runner for pid in children(os.getpid()))
            if not left:
                return reply
            reply = "error", None, f"the call left {left} process(es) behind"
        self.discard()
        return reply

    def exchange(self, job: bytes) -> Reply:
        deadline = time.monotonic() + self.timeout_s
        self.pipe.settimeout(self.timeout_s)
        try:
            self.pipe.sendall(frame(job))
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError from None
        buffer = bytearray()
        while (payload := unframe(buffer, _REPLY_LIMIT)) is None:
            watched: list[Any] = [self.pipe, self.exited, self.channel]
            left = deadline - time.monotonic()
            ready = select.select(watched, [], [], max(0.0, min(left, _LOOK_S)))[0]
            if not ready:
                if left <= 0:
                    raise TimeoutError
                if (count := len(descendants(os.getpid()))) > _PROCESS_LIMIT:
                    raise _TooManyProcesses(count)
                continue
            if self.channel in ready:  # nothing is due from the run's process: it is gone
                self.discard()
                os._exit(0)
            part = self.pipe.recv(1 << 16) if self.pipe in ready else b""
            if not part:
                raise EOFError
            buffer += part
        outcome, value, error = json.loads(payload)
        return outcome, value, error

    def ending(self) -> str:
        """How the runner ended; it has, or is about to."""
        assert self.runner is not None
        if not select.select([self.exited], [], [], 1.0)[0]:
            return "closed the worker's own socket"
        status = os.waitstatus_to_exitcode(os.waitpid(self.runner, 0)[1])
        if status >= 0:
            return f"ended its process with exit code {status}"
        return f"ended its process with {signal.Signals(-status).name}"

    def fork(self) -> None:
        self.pipe, theirs = socket.socketpair()
        guard = os.getpid()
        self.runner = os.fork()
        if self.runner == 0:
            try:
                self.pipe.close()
                self.channel.close()
                self.run(theirs, guard)
            finally:
                os._exit(1)
        theirs.close()
        self.exited = os.pidfd_open(self.runner)

    def run(self, pipe: socket.socket, guard: int) -> None:
        """The runner: calls functions one after another, until the guard is gone."""
        os.setpgid(0, 0)
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            return
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for limit, value in (
            (resource.RLIMIT_AS, in_use + self.memory),
            (resource.RLIMIT_FSIZE, _FILE_LIMIT),
            (resource.RLIMIT_CORE, 0),
        ):
            resource.setrlimit(limit, (value, value))
        confine()
        runner = os.getpid()
        while (job := receive(pipe)) is not None:
            name, sample = json.loads(job)
            reply = call(self.functions[name], sample, self.options[name])
            if os.getpid() != runner:
                os._exit(0)  # a process the function forked came back here; it has no answer to give
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm the function left set would end a later call
            pipe.sendall(frame(json.dumps(reply).encode()))
        os._exit(0)

    def discard(self) -> None:
        """Kill the runner and everything below it."""
        if self.runner is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.runner, signal.SIGKILL)  # at once: what forks while the tree is walked is in here too
        kill_descendants()
        self.pipe.close()
        os.close(self.exited)
        self.runner = None


def confine() -> None:
    """Keep this process and its descendants away from all others; for good.

    They can neither read the memory, environment or descriptors of another process, which is where the run's keys are
    (Linux 5.19), nor signal it (Linux 6.12). Root loses what would let it lift its limits. An older kernel, or one
    without Landlock, gives less.
    """
    _prctl(_NO_NEW_PRIVS, 1)
    header, capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    _libc("capget", header, capabilities)
    for i, kept in enumerate((_CAPABILITIES_KEPT,) * 3 + (0,) * 3):  # effective, permitted, inheritable; then 32-63
        capabilities[i] &= kept
    _libc("capset", header, capabilities)
    version = landlock_version()
    if version < 2:
        return
    # Being in a Landlock domain is what shuts /proc and ptrace off. The domain itself denies nothing: of files it only
    # rules whether they may change folders, and allows that everywhere.
    scoped = _LANDLOCK_SIGNAL if version >= 6 else 0
    ruleset = _libc("syscall", _LANDLOCK_CREATE, struct.pack("=QQQ", _LANDLOCK_REFER, 0, scoped), 24, 0)
    root = os.open("/", os.O_PATH)
    _libc("syscall", _LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", _LANDLOCK_REFER, root), 0)
    _libc("syscall", _LANDLOCK_RESTRICT, ruleset, 0)
    os.close(root)
    os.close(ruleset)


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 where there is none."""
    return max(0, ctypes.CDLL(None).syscall(_LANDLOCK_CREATE, None, 0, 1))


def _prctl(option: int, value: int) -> None:
    _libc("prctl", option, value, 0, 0, 0)


def _libc(name: str, *arguments: Any) -> int:
    result = int(getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}{arguments}: {os.strerror(ctypes.get_errno())}")
    return result


def keep() -> None:
    """Fork the guard and stay behind: when it ends, however it ends, nothing of it is left. Returns in the guard."""
    _prctl(_SUBREAPER, 1)
    keeper = os.getpid()
    guard = os.fork()
    if guard == 0:
        _prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        return
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # the channel is the guard's: its end must show
    code = os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1])
    kill_descendants()
    os._exit(code if code >= 0 else 128 - code)


def main() -> None:
    keep()
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    setup = json.loads(receive(channel) or b"{}")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)  # until here, a failure of the worker itself went to the run's process
    os.close(nowhere)
    _prctl(_SUBREAPER, 1)
    guard = Guard(channel, setup)
    ready: dict[str, Any] = {"sources": {}}
    for name, function in setup["functions"].items():
        try:
            guard.functions[name], ready["sources"][name] = load(function["path"], function["options"])
            if children(os.getpid()):
                raise ValueError(f"importing `{function['path']}` must start no process, but did")
        except ValueError as error:
            ready = {"name": name, "error": str(error)}
            break
    channel.sendall(frame(json.dumps(ready).encode()))
    if "error" not in ready:
        guard.serve()
    kill_descendants()
    os._exit(0)  # what the functions imported need not be torn down, which takes a second with sympy


if __name__ == "__main__":
    main()
