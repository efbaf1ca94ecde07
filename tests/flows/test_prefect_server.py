"""A Prefect server that is away, and one that ended and was started again."""

import asyncio
import ctypes
import signal
import subprocess
import threading
from uuid import UUID

import httpx
import pytest
from prefect import flow, get_client, runtime
from prefect.settings import PREFECT_API_URL, temporary_settings

from conf.errors import RunError
from flows import prefect_server

URL = "http://127.0.0.1:9/api"


def test_a_server_that_is_away_is_one_line_at_the_start_and_later() -> None:
    refusal = f"the Prefect server at {URL} does not answer: "
    with temporary_settings({PREFECT_API_URL: URL}), pytest.raises(RunError, match=refusal):
        prefect_server.prefect_server().__enter__()
    with pytest.raises(RunError, match=refusal), prefect_server._answering(URL):
        raise httpx.ConnectError("refused")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (401, "set a key that it takes"),
        (403, "set a key"),
        (422, "is the server of the version"),
        (500, "once it does"),
    ],
)
def test_a_server_that_refuses_is_one_line_with_what_to_do(code: int, remedy: str) -> None:
    request = httpx.Request("POST", "http://prefect/api/flows")
    answer = httpx.Response(code, request=request, text="why")
    with (
        pytest.raises(RunError, match=rf"^the Prefect server refuses POST /api/flows: {code} [\w ]+ why; {remedy}"),
        prefect_server._answering(URL),
    ):
        raise httpx.HTTPStatusError("no", request=request, response=answer)


def test_a_server_that_was_started_again_is_asked_to_end_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel kills it when the thread that started it ends."""
    started = threading.Event()

    def die_with_thread() -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)

    def start(port: int = 0) -> tuple[subprocess.Popen[bytes], str]:
        server = subprocess.Popen(["sleep", "600"], start_new_session=True, preexec_fn=die_with_thread)
        started.set()
        return server, ""

    monkeypatch.setattr(prefect_server, "_start", start)
    servers, stopping = [subprocess.Popen(["false"])], threading.Event()
    keeper = threading.Thread(target=prefect_server._keep, args=(servers, 0, stopping, lambda text: None))
    keeper.start()
    assert started.wait(60)
    stopping.set()
    keeper.join()
    assert [server.returncode for server in servers] == [1, -signal.SIGTERM]


def test_what_the_server_is_too_busy_to_take_is_sent_again_soon(
    prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pins the way to the client's hooks, and that its pauses keep to what is said there."""
    refusals, pauses = [503, 503, 503], list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    @flow
    async def asking() -> str:
        prefect_server.retry_soon()
        prefect_server.retry_soon()  # a run whose server was away comes by again
        client = get_client()
        send = client._client._transport.handle_async_request

        async def busy(request: httpx.Request) -> httpx.Response:
            return httpx.Response(refusals.pop(), request=request) if refusals else await send(request)

        with monkeypatch.context() as patch:
            patch.setattr(client._client._transport, "handle_async_request", busy)
            patch.setattr("prefect.client.base.anyio.sleep", pause)
            return (await client.read_flow_run(UUID(str(runtime.flow_run.id)))).state_name or ""

    assert asyncio.run(asking()) == "Running"
    assert len(pauses) == 3
    assert all(least <= pause <= 1.2 * least for least, pause in zip((0.1, 0.4, 1.6), pauses, strict=True)), pauses
