"""The Prefect server of a run: the user's own where one is configured, else a child process on SQLite."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

import httpx
import prefect
from prefect.client.orchestration import get_client

from conf.errors import RunError

HOME = Path("runs/.prefect")  # database and logs of the managed server
START_SECONDS = 120.0
MOST_RESTARTS = 3
FIRST_RETRY_S = 0.1
RETRY_AFTER = "ratchet.retry_after"  # seconds, in the extensions of a request that was refused

# `python -m prefect` that the kernel kills when its parent ends (PR_SET_PDEATHSIG), so that a killed run leaves no
# server behind. In the child's own code: nothing may run between fork and exec while torch's threads live.
LAUNCH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.executable, [sys.executable, "-m", "prefect", *sys.argv[2:]])
"""

# Measured: without the recorder settings a burst of tasks held a flow's end for 34 s,
# and in-memory leases stay taken over a restart.
SETTINGS = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",  # cut to whole seconds: 0.5 is a busy loop
    "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
}


def own_server() -> str:
    """URL of the server that PREFECT_API_URL or the active Prefect profile names; empty where none does."""
    from prefect.settings import PREFECT_API_URL

    return str(PREFECT_API_URL.value() or "")


@contextmanager
def prefect_server(say: Callable[[str], None] = lambda text: None) -> Iterator[str]:
    """Give the URL of a running API, and point this process's Prefect at it for the block.

    Takes the server that PREFECT_API_URL or the active Prefect profile names; without one starts a server and stops it,
    and starts it again, on the same port and database, if it ends in between. Raises RunError where it does not answer.
    """
    from prefect.logging.handlers import APILogHandler
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if configured := own_server():
        with _answering(configured):
            with get_client(sync_client=True) as client:
                if error := client.api_healthcheck():
                    raise error
            yield configured
        return
    say(f"starting a Prefect server ({HOME}) ...")
    port = _free_port()
    server, url = _start(port)
    servers, stopping = [server], Event()
    try:
        _wait(server, url)
        keeper = Thread(target=_keep, args=(servers, port, stopping, say), daemon=True)
        keeper.start()
        with temporary_settings({PREFECT_API_URL: url}), _answering(url):
            try:
                yield url
            finally:
                APILogHandler().flush()  # before the server goes
                stopping.set()
                keeper.join()
    finally:
        stopping.set()  # also where Ctrl-C came in the middle of the above
        _stop(servers[-1])


@contextmanager
def _answering(url: str) -> Iterator[None]:
    """What fails inside because the server is away, or refuses, is one RunError."""
    try:
        yield
    except httpx.HTTPStatusError as error:
        raise refused(error) from error
    except httpx.TransportError as error:  # engines' and the trainer's have types of their own
        raise RunError(
            f"the Prefect server at {url} does not answer: {error or type(error).__name__}; "
            "once it does, the same command goes on"
        ) from error


def may_pass(error: httpx.HTTPError) -> bool:
    """Whether asking again can mend it: no answer came, or one that says nothing of what was asked."""
    if not isinstance(error, httpx.HTTPStatusError):
        return True
    code = error.response.status_code
    return code >= 500 or code in (httpx.codes.REQUEST_TIMEOUT, httpx.codes.TOO_MANY_REQUESTS)


def refused(error: httpx.HTTPStatusError) -> RunError:
    """What the server answered, and what to do about it."""
    answer, request = error.response, error.request
    if may_pass(error):
        remedy = "once it does not"
    elif answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
        remedy = "set a key that it takes (PREFECT_API_KEY, or PREFECT_API_AUTH_STRING); then"
    else:
        remedy = f"is the server of the version that runs here, Prefect {prefect.__version__}? Once it is,"
    return RunError(
        f"the Prefect server refuses {request.method} {request.url.path}: {answer.status_code} {answer.reason_phrase} "
        f"{answer.text[:200]}; {remedy} the same command goes on"
    )


def _keep(servers: list[subprocess.Popen[bytes]], port: int, stopping: Event, say: Callable[[str], None]) -> None:
    """Start the server again when it ends, at most MOST_RESTARTS times; at last stop it."""
    while not stopping.wait(0.5):
        if servers[-1].poll() is not None and len(servers) <= MOST_RESTARTS:
            say(f"warning: the Prefect server ended with code {servers[-1].returncode}; starting it again")
            servers.append(_start(port)[0])
    _stop(servers[-1])  # here: the kernel kills it when the thread that started it ends


def retry_soon() -> None:
    """Let this flow's client send again after 0.1 s, 0.4 s, ... what the server was too busy to take, not after 2 s.

    On SQLite a transaction that reads before it writes is refused (503) at once where another write came between, as
    when a subflow is created while task runs are recorded: seen in one subflow of six where stages take no time
    (https://github.com/PrefectHQ/prefect/issues/18934). Prefect has no setting for the first pause; it keeps to a
    server's `Retry-After`, which its own server does not send.
    """
    hooks = get_client()._client.event_hooks["response"]  # semi-internal: pinned by a test
    if _say_when not in hooks:
        hooks.append(_say_when)


async def _say_when(response: httpx.Response) -> None:
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE and "Retry-After" not in response.headers:
        seconds = response.request.extensions.get(RETRY_AFTER, FIRST_RETRY_S)
        response.headers["Retry-After"] = str(seconds)
        response.request.extensions[RETRY_AFTER] = 4 * seconds


async def until_up() -> None:
    """Wait until the Prefect API answers. Raises RunError after START_SECONDS."""
    deadline = time.monotonic() + START_SECONDS
    async with get_client() as client:
        while error := await client.api_healthcheck():
            if time.monotonic() > deadline:
                raise RunError(
                    f"Prefect does not answer at {client.api_url} since {START_SECONDS:.0f} s ({error}); "
                    "once it does, the same command continues"
                )
            await asyncio.sleep(0.5)


class Outages:
    """Those of a server at one and the same place: waited for, but no more of them than it is started again."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._count = say, 0

    async def over(self, error: httpx.TransportError) -> None:
        """Wait until the server that gave this error answers again. Raises the error where it was one too many."""
        self._count += 1
        if self._count > MOST_RESTARTS:
            raise error
        self._say(f"warning: Prefect is away ({error}); waiting for it")
        await until_up()


def serve_ui(port: int) -> int:
    """Serve the UI in the foreground until Ctrl-C; gives the exit code."""
    server, url = _start(port)
    try:
        _wait(server, url)
        print(f"Prefect UI: {url.removesuffix('/api')}   (Ctrl-C stops it)", flush=True)
        return server.wait()
    except KeyboardInterrupt:
        return 0
    finally:
        _stop(server)


def _start(port: int) -> tuple[subprocess.Popen[bytes], str]:
    HOME.mkdir(parents=True, exist_ok=True)
    url = f"http://127.0.0.1:{port}/api"
    command = [sys.executable, "-c", LAUNCH, str(os.getpid()), "server", "start"]
    with open(HOME / "server.log", "ab") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, **SETTINGS, "PREFECT_HOME": str(HOME.resolve()), "PREFECT_API_URL": url},
        )  # fmt: skip
    return server, url


def _wait(server: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RunError(f"the Prefect server ended with code {server.returncode} at start; see {HOME}/server.log")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RunError(f"the Prefect server did not answer at {url} within {START_SECONDS:.0f} s; see {HOME}/server.log")


def _stop(server: subprocess.Popen[bytes]) -> None:
    # SQLite is consistent after SIGKILL; SIGTERM first lets it write what it holds.
    for sig, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(server.pid, sig)
            server.wait(seconds)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
        else:
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
