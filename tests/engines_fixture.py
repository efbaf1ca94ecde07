"""A real SGLang server on a tiny random model, once a session, and weight packages to publish to it."""

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from conf.schema import Experiment, Model, Prompts, Publish, Rollout
from data.model_files import model_tensors
from data.package import FileInfo, Package, Probe, Receipt, TensorInfo
from data.weights import Expected, seal
from tasks.engines.client import Engine
from tasks.engines.server import SGLangServer, server_environment, server_options
from tasks.models import make_tiny_model

PROBE_IDS = (72, 101, 108, 108, 111, 32, 119, 111, 114, 108, 100)
SHARD = "model-00001-of-00001.safetensors"

Tensors = dict[str, Any]  # torch is imported where it is needed: conftest imports this file


def engine_experiment(model: Path) -> Experiment:
    """Settings of a run on the tiny model: float32, so that engine and transformers agree closely."""
    return Experiment(
        model=Model(path=str(model)),
        prompts=Prompts(max_tokens=256),
        rollout=Rollout(dtype="float32", max_new_tokens=256, max_in_flight=32),
        publish=Publish(probe_tolerance=0.01, keep_versions=2),
    )


def make_server(name: str, model: Path, log: Path) -> SGLangServer:
    return SGLangServer(name, server_options(engine_experiment(model), 0, 1), server_environment("cpu", 0, 0, 1), log)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", say=lambda text: None)


@pytest.fixture(scope="session")
def sglang_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SGLangServer]:
    """Started once. Each test takes its own client with `connect()` and publishes what it needs."""
    server = make_server("engine0", tiny_model, tmp_path_factory.mktemp("logs") / "engine0.log")

    async def start() -> None:
        await (await server.start(300)).close()

    asyncio.run(start())
    yield server
    asyncio.run(server.stop())


def changed(tensors: Tensors, seed: int) -> Tensors:
    """Another version of the same model: every tensor moved a little."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: t + 0.05 * torch.randn(t.shape, generator=generator) for name, t in tensors.items()}


def true_logprobs(model: Path, tensors: Tensors, ids: Sequence[int], temperature: float = 1.0) -> list[float]:
    """What transformers says of `ids` under these weights: log p(ids[i] | ids[:i]) for i >= 1, one fewer than ids."""
    import torch
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    lm.load_state_dict(tensors, strict=False)  # the tied head follows the embedding
    with torch.no_grad():
        logits = lm(torch.tensor([ids])).logits[0, :-1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


def true_probe(model: Path, tensors: Tensors) -> Probe:
    return Probe(PROBE_IDS, tuple(true_logprobs(model, tensors, PROBE_IDS)))


def make_package(
    root: Path,
    model: Path,
    number: int,
    tensors: Tensors,
    probe: Probe | None = None,
    tied: bool = True,
    expected: Expected | None = None,
) -> Package:
    """Seal `tensors` as version `number` in root/weights, as a trainer of one rank does.

    `expected`: what the model has, as a trainer knows it; None: just these, so that an incomplete package can be made.
    """
    import torch
    from safetensors.torch import save_file

    staging = root / "weights" / "staging" / f"{number}"
    staging.mkdir(parents=True)
    save_file(tensors, staging / SHARD)
    data = (staging / SHARD).read_bytes()
    infos = tuple(
        TensorInfo(
            name,
            str(t.dtype).removeprefix("torch."),
            tuple(t.shape),
            hashlib.sha256(t.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest(),
            SHARD,
            0,
        )
        for name, t in tensors.items()
    )
    file = FileInfo(SHARD, len(data), hashlib.sha256(data).hexdigest())
    return seal(
        staging,
        root / "weights",
        [Receipt(0, 1, (file,), infos)],
        model=model,
        expected_tensors=expected or {i.name: (i.dtype, i.shape) for i in infos},
        run="test",
        number=number,
        parent=number - 1 if number else None,
        optimizer_step=number,
        dataset="",
        config_digest="",
        code_digest="",
        tied={"lm_head.weight": "model.embed_tokens.weight"} if tied else {},
        probe=probe or true_probe(model, tensors),
        probe_tolerance=0.01,
    )


async def until_running(engine: Engine, *requests: asyncio.Task[Any]) -> None:
    """Until the engine reports a running request, or all have ended: on a busy machine, unseen."""
    while not await engine.running_requests() and not all(request.done() for request in requests):
        await asyncio.sleep(0.01)


@pytest.fixture(scope="session")
def tiny_tensors(tiny_model: Path) -> Tensors:
    from safetensors.torch import load_file

    tensors = load_file(tiny_model / "model.safetensors")
    assert set(tensors) == set(model_tensors(tiny_model, "float32"))
    return tensors
