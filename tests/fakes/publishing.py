"""A publisher of small real packages to fake engines, for what goes wrong: here, or in a process that can be killed.

    async with Publishing(tmp_path) as desk:
        desk.fake.inject("/update_weights_from_disk", faults.dies)
        await desk.publish(desk.seal(1.0))

As a program, `python -m tests.fakes.publishing ROOT NUMBER BOOT@URL ...` publishes a sealed version to those engines.
"""

import asyncio
import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import save_file

from conf.schema import Experiment, Model, Publish, Rollout
from data.crash import ARMED
from data.ledger import JournalRow, Ledger
from data.package import FileInfo, Package, Probe, Receipt, TensorInfo
from data.weights import seal
from tasks.engines.client import Engine
from tasks.engines.fleet import Fleet, Restart
from tasks.publish import Published, publish_to_engines
from tests.fakes.engine import FakeEngine
from tests.fakes.toy_model import Tensor, content_of, read_weights, toy_logprob

ROOT = Path(__file__).parents[2]
PROBE_IDS = (5, 6, 7)
SHARD = "model-00001-of-00001.safetensors"
NAME = "model.w.weight"
BASE = {NAME: Tensor("F32", (2, 2), np.full((2, 2), 0.5, np.float32).tobytes())}
RESTART: tuple[str, dict[str, Any]] = ("restart", {})  # stands in a fake's `calls` where its life ended


def toy_experiment(root: Path, **publish: Any) -> Experiment:
    """Precision of the packages is float32; nothing waits but for what a test holds back."""
    return Experiment(
        model=Model(path=str(root / "model")),
        rollout=Rollout(dtype="bfloat16"),  # so that the values are asked for by name too
        publish=Publish(**{"probe_tolerance": 1e-6, "restart_backoff_s": 0.0, **publish}),
    )


def make_toy_model(folder: Path) -> Path:
    """What a package takes from the model's folder, for an architecture whose tensors can be read by name."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "hidden_size": 2, "num_attention_heads": 1, "vocab_size": 1000, '
        '"max_position_embeddings": 2048, "num_hidden_layers": 1}'
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


def probe_of(folder: Path, ranks: int) -> Probe:
    """What the toy model says of the probe under the folder's weights."""
    content = content_of(*[read_weights(folder)] * ranks)
    return Probe(PROBE_IDS, tuple(toy_logprob(content, PROBE_IDS[:i], PROBE_IDS[i]) for i in (1, 2)))


class Publishing:
    """One run's folder, ledger and engines. `desk.fake` is the first engine's server, `desk.engine` its client now."""

    def __init__(self, root: Path, engines: int = 1, ranks: int = 1, **publish: Any) -> None:
        self.root, self.ranks = root, ranks
        self.experiment = toy_experiment(root, **publish)
        self.fakes = [FakeEngine(BASE, ranks=ranks) for _ in range(engines)]
        self.fleet = Fleet([])
        make_toy_model(root / "model")
        self.open_ledger()

    async def __aenter__(self) -> Self:
        for fake in self.fakes:
            await fake.__aenter__()
        self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.fleet.close()
        self.ledger.close()
        for fake in self.fakes:
            await fake.__aexit__()

    # -- the publisher's process

    def open_ledger(self) -> None:
        self.ledger = Ledger(self.root / "ledger.sqlite")
        self.ledger.open_run("test", "digest", "resolved")

    def connect(self, restart: Callable[[FakeEngine], Restart] | None = None, restartable: bool = True) -> None:
        """A fleet of new clients, as a process has that has just started. `restart` gives the way to a new life."""
        ways = {f"engine{i}": (restart or self.restart)(fake) for i, fake in enumerate(self.fakes)}
        clients = [client_of(fake, f"engine{i}") for i, fake in enumerate(self.fakes)]
        self.fleet = Fleet(clients, ways if restartable else {})

    @staticmethod
    def restart(fake: FakeEngine) -> Restart:
        async def again(engine: Engine) -> Engine:
            fake.calls.append(RESTART)
            await fake.restart()
            return client_of(fake, engine.name)

        return again

    async def follow(self) -> None:
        """What the next process has: the same folder and servers, everything else new."""
        await self.fleet.close()
        self.ledger.close()
        self.open_ledger()
        self.connect()

    async def killed_at(self, package: Package, point: str = "") -> int:
        """Publish in a process of its own that dies by SIGKILL at `point`, or never. Gives its exit status."""
        self.ledger.close()
        places = [f"{fake.boot}@{fake.url}" for fake in self.fakes]
        arguments = [str(self.root), str(package.manifest.number), *places]
        command = [sys.executable, "-m", "tests.fakes.publishing", *arguments]
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, env={**os.environ, ARMED: point})
        self.pid = process.pid
        status = await process.wait()
        self.open_ledger()
        return status

    # -- versions

    def seal(self, value: float, *, probe: Probe | None = None, rollback_of: int | None = None) -> Package:
        """Seal the next version, all of whose numbers are `value`."""
        number = len(self.ledger.versions())
        parent = number - 1 if number else None
        assert self.ledger.allocate_version(f"v{number}", parent, number, "", rollback_of) == number
        staging = self.root / "weights" / "staging" / f"{number}"
        staging.mkdir(parents=True)
        tensors = {NAME: np.full((2, 2), value, np.float32)}
        save_file(tensors, staging / SHARD)
        data = (staging / SHARD).read_bytes()
        infos = tuple(
            TensorInfo(name, "float32", t.shape, hashlib.sha256(t.tobytes()).hexdigest(), SHARD, 0)
            for name, t in tensors.items()
        )
        file = FileInfo(SHARD, len(data), hashlib.sha256(data).hexdigest())
        package = seal(
            staging, self.root / "weights", [Receipt(0, 1, (file,), infos)],
            model=self.root / "model", expected_tensors={i.name: (i.dtype, i.shape) for i in infos}, run="test",
            number=number, parent=parent, optimizer_step=number, dataset="", config_digest="", code_digest="", tied={},
            probe=probe or probe_of(staging, self.ranks), probe_tolerance=self.experiment.publish.probe_tolerance,
            rollback_of=rollback_of,
        )  # fmt: skip
        self.ledger.set_version(number, "SEALED", package.manifest.content)
        return package

    async def publish(self, package: Package, fleet: Fleet | None = None) -> Published:
        weights = self.root / "weights"
        return await publish_to_engines(
            package.manifest.ref, weights, fleet or self.fleet, self.ledger, self.experiment
        )

    async def published(self, value: float) -> Package:
        """A committed version, and a call log that begins after it."""
        package = self.seal(value)
        await self.publish(package)
        for fake in self.fakes:
            fake.calls.clear()
        return package

    # -- what a test looks at

    @property
    def fake(self) -> FakeEngine:
        return self.fakes[0]

    @property
    def engine(self) -> Engine:
        return self.fleet[0]

    def state(self, package: Package) -> str:
        return self.ledger.version(package.manifest.number).state

    def engine_states(self) -> list[tuple[str, str]]:
        return [(row.state, row.label) for row in self.ledger.engines()]

    def visible(self) -> list[str]:
        """The versions that engines in service get work for."""
        return [engine.ready_label for engine in self.fleet]

    def steps(self, package: Package, name: str = "engine0") -> str:
        """`Q1 Q2 ...` as journalled for an engine, with an exclamation mark where it became DIRTY."""
        rows = [row for row in self.ledger.journal_rows(package.manifest.number) if row.engine == name]
        return " ".join("!" if row.detail.startswith("DIRTY") else row.step for row in rows)

    def failures(self, package: Package) -> list[JournalRow]:
        return [row for row in self.ledger.journal_rows(package.manifest.number) if row.detail.startswith("DIRTY")]


def client_of(fake: FakeEngine, name: str) -> Engine:
    return Engine(name, fake.url, vocab_size=fake.vocab_size, context_length=fake.context_length, boot=fake.boot)


def updates(fake: FakeEngine) -> list[int]:
    """Updates that came, by life of the server."""
    found = [0]
    for route, _ in fake.calls:
        if route == RESTART[0]:
            found.append(0)
        found[-1] += route == "/update_weights_from_disk"
    return found


async def _main(root: Path, number: int, places: list[str]) -> None:
    ledger = Ledger(root / "ledger.sqlite")
    engines = []
    for i, (boot, _, url) in enumerate(place.partition("@") for place in places):
        engines.append(Engine(f"engine{i}", url, vocab_size=1000, context_length=2048, boot=boot))
    policy = ledger.version(number).ref
    await publish_to_engines(policy, root / "weights", Fleet(engines), ledger, toy_experiment(root))


if __name__ == "__main__":
    asyncio.run(_main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
