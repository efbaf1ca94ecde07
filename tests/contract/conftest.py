"""A server that tests may kill, beside the session's shared one, which they may not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.engines.server import SGLangServer
from tests.engines_fixture import make_server


@pytest.fixture(scope="session")
def mortal(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Not started yet. Whoever kills it leaves it dead: the next `living` is its next life."""
    server = make_server("mortal", tiny_model, tmp_path_factory.mktemp("logs") / "mortal.log")
    yield server
    asyncio.run(server.stop())


def living(server: SGLangServer) -> SGLangServer:
    """The server, started where it is not running."""

    async def start() -> None:
        await server.stop()
        await (await server.start(300)).close()

    if not server.alive:
        asyncio.run(start())
    return server
