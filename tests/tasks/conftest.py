"""Fixtures shared by the tests of tasks: models, this process as a group of one rank, rollouts that do not wait."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.generation import request
from tasks.models import make_tiny_model
from tests.fakes.context import save_tokenizer


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", say=lambda _: None)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For fake engines: a folder with a tokenizer of words and no weights."""
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return folder


@pytest.fixture
def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "BACKOFF_S", 0.0)


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Once a session: DeepSpeed keeps the first process group it sees."""
    import torch
    from torch import distributed as dist

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # on so small a model a second one only waits
    store = tmp_path_factory.mktemp("group") / "rendezvous"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_rank(process_group: None) -> Iterator[None]:
    """What DeepSpeed reads from a rank's environment; not left to the servers that other tests start."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            patch.setenv(name, value)
        yield
