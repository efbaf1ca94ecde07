"""Fixtures shared by the whole suite. Servers start once a session."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines_fixture import sglang_server, tiny_model, tiny_tensors  # noqa: F401

os.environ.setdefault("DO_NOT_TRACK", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API of a real Prefect server, started as `ratchet run` starts it; this process's Prefect uses it."""
    from flows import prefect_server

    home = tmp_path_factory.mktemp("prefect")
    patch = pytest.MonkeyPatch()
    patch.setattr(prefect_server, "HOME", Path(home))
    patch.delenv("PREFECT_API_URL", raising=False)
    try:
        with prefect_server.prefect_server() as url:
            yield url
    finally:
        patch.undo()
