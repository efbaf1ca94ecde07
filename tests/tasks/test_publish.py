"""Publishing to a real SGLang server: proven before it is used, and every check of the protocol fails when it must."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conf.errors import PublishError
from conf.schema import Experiment
from data.ledger import Ledger
from data.package import Package, Probe
from tasks.engines.checksums import expected_checksums
from tasks.engines.client import BadAnswer, Engine, Sampling, Span
from tasks.engines.fleet import Fleet
from tasks.engines.server import SGLangServer
from tasks.publish import Published, publish_to_engines
from tests.engines_fixture import PROBE_IDS, SHARD, Tensors, changed, engine_experiment, make_package, until_running
from tests.fakes import faults
from tests.fakes.engine import FakeEngine
from tests.fakes.toy_model import content_of, read_weights, toy_logprob


class Publisher:
    """One run's ledger and weights folder, and the engine under test."""

    def __init__(self, root: Path, model: Path, experiment: Experiment) -> None:
        self.root, self.model, self.experiment = root, model, experiment
        self.ledger = Ledger(root / "ledger.sqlite")
        self.ledger.open_run("test", "digest", "resolved")

    def seal(self, tensors: Tensors, probe: Probe | None = None, tied: bool = True) -> Package:
        """Allocate, seal and record the next version."""
        number = len(self.ledger.versions())
        got = self.ledger.allocate_version(f"v{number}", number - 1 if number else None, number, "")
        package = make_package(self.root, self.model, got, tensors, probe, tied)
        self.ledger.set_version(got, "SEALED", package.manifest.content)
        return package

    async def publish(self, package: Package, *engines: Engine, fleet: Fleet | None = None) -> Published:
        weights = self.root / "weights"
        fleet = fleet or Fleet(engines)
        return await publish_to_engines(package.manifest.ref, weights, fleet, self.ledger, self.experiment)

    def steps(self, package: Package) -> list[tuple[int, str]]:
        """(attempt at this version, step)"""
        rows = self.ledger.journal_rows(package.manifest.number)
        attempts = sorted({row.attempt for row in rows})
        return [(1 + attempts.index(row.attempt), row.step) for row in rows]

    def state(self, package: Package) -> str:
        return self.ledger.version(package.manifest.number).state

    def engine_state(self) -> tuple[str, str]:
        (row,) = self.ledger.engines()
        return row.state, row.label


@pytest.fixture
def publisher(tmp_path: Path, tiny_model: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path, tiny_model, engine_experiment(tiny_model))
    yield publisher
    publisher.ledger.close()


def run(server: SGLangServer, use: Callable[[Engine], Awaitable[Any]], kind: type[Engine] = Engine) -> Any:
    """`use` with a client of the server; `kind` is a client that misbehaves in one way."""

    async def main() -> Any:
        engine = server.connect()
        engine.__class__ = kind
        try:
            return await use(engine)
        finally:
            await engine.resume(30)
            await engine.close()

    return asyncio.run(main())


@contextmanager
def failing(step: str, message: str) -> Iterator[None]:
    with pytest.raises(PublishError, match=message) as caught:
        yield
    assert caught.value.step == step


ALL_STEPS = [f"Q{i}" for i in range(1, 12)]


# -- the good path


def test_versions_are_installed_proven_committed_and_served(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    packages = [publisher.seal(changed(tiny_tensors, seed)) for seed in range(3)]

    async def use(engine: Engine) -> None:
        for package in packages:
            published = await publisher.publish(package, engine)
            label = package.manifest.label
            assert publisher.steps(package) == [(1, step) for step in ALL_STEPS]
            assert (publisher.state(package), publisher.engine_state()) == ("COMMITTED", ("READY", label))
            assert engine.ready_label == label
            assert published.bytes == (package.folder / SHARD).stat().st_size
            assert published.install_s > 0
            assert published.verify_s > 0
            got = await engine.generate(
                rid=label, prompt_ids=[1, 2, 3], sampling=Sampling(4, 1.0), extra_key=label, timeout_s=60
            )
            assert got.spans == (Span(label, 0, 4),)

    run(sglang_server, use)
    assert publisher.ledger.committed() == packages[2].manifest.ref
    assert [publisher.state(p) for p in packages] == ["RETIRED", "COMMITTED", "COMMITTED"]  # keep_versions: 2
    assert [p.folder.exists() for p in packages] == [True, True, True]  # the next publish deletes the first


def test_an_engine_may_hold_the_tensors_already_under_a_label_of_another_run(
    sglang_server: SGLangServer, publisher: Publisher, tiny_model: Path, tiny_tensors: Tensors
) -> None:
    """As where another run ended: its package has another content for the same tensors, in another precision say."""
    package = publisher.seal(tiny_tensors)

    async def use(engine: Engine) -> None:
        await engine.update_weights(str(tiny_model), "000007-0123456789ab", 60)
        await publisher.publish(package, engine)
        assert publisher.steps(package) == [(1, step) for step in ALL_STEPS]
        assert publisher.state(package) == "COMMITTED"

    run(sglang_server, use)


def test_what_the_engine_holds_is_computed_from_the_package_alone(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    package = publisher.seal(changed(tiny_tensors, 1))

    async def use(engine: Engine) -> Any:
        await publisher.publish(package, engine)
        return await engine.checksums()

    assert run(sglang_server, use) == [expected_checksums(package, "cpu", "float32")]


def test_an_engine_that_is_still_ready_is_left_alone(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors, tiny_model: Path
) -> None:
    package = publisher.seal(tiny_tensors)

    async def use(engine: Engine) -> None:
        await publisher.publish(package, engine)
        engine.ready_label = ""  # as after a restart of the orchestrator
        await publisher.publish(package, engine)
        assert engine.ready_label == package.manifest.label
        assert publisher.steps(package) == [*((1, step) for step in ALL_STEPS), (2, "Q11")]
        other = publisher.root / "other"  # somebody puts other weights under the same label
        other.mkdir()
        for path in (*tiny_model.glob("*.json"), publisher.seal(changed(tiny_tensors, 9)).folder / SHARD):
            (other / path.name).write_bytes(path.read_bytes())
        await engine.update_weights(str(other), package.manifest.label, 60)
        await publisher.publish(package, engine)
        assert publisher.steps(package)[len(ALL_STEPS) + 1 :] == [(3, step) for step in ALL_STEPS]

    run(sglang_server, use)


def test_a_running_request_ends_under_the_weights_it_began_with(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))

    async def use(engine: Engine) -> None:
        await publisher.publish(first, engine)
        old = first.manifest.label
        request = asyncio.create_task(
            engine.generate(rid="long-1", prompt_ids=[1, 2], sampling=Sampling(200, 1.0), extra_key=old, timeout_s=120)
        )
        await until_running(engine, request)
        await publisher.publish(second, engine)
        got = await request
        assert got.spans == (Span(old, 0, len(got.ids)),)

    run(sglang_server, use)


def test_a_request_that_does_not_end_in_time_is_aborted_and_never_a_sample(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))
    settings = replace(publisher.experiment.publish, drain_timeout_s=0.01)

    async def use(engine: Engine) -> None:
        await publisher.publish(first, engine)
        publisher.experiment = replace(publisher.experiment, publish=settings)
        request = asyncio.create_task(
            engine.generate(
                rid="long-2",
                prompt_ids=[1, 2],
                sampling=Sampling(500, 1.0),
                extra_key=first.manifest.label,
                timeout_s=120,
            )
        )
        await until_running(engine, request)
        await publisher.publish(second, engine)
        with pytest.raises(BadAnswer, match=r"long-2 wrongly: finish reason must be stop or length, got .*abort"):
            await request

    run(sglang_server, use)


# -- what must fail, and where


def test_a_package_with_a_tensor_missing_is_taken_by_the_engine_and_caught_by_the_checksum(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    whole = publisher.seal(tiny_tensors)
    some = changed(tiny_tensors, 1)
    del some["model.layers.1.mlp.down_proj.weight"]
    short = publisher.seal(some, probe=Probe(PROBE_IDS, (-1.0,) * (len(PROBE_IDS) - 1)))

    async def use(engine: Engine) -> None:
        await publisher.publish(whole, engine)
        with failing(
            "Q6", r"1 of 13 tensors .* checksum of model\.layers\.1\.mlp\.down_proj\.weight: expected no such"
        ):
            await publisher.publish(short, engine)
        assert engine.ready_label == whole.manifest.label  # it was taken back
        assert (await engine.model_info()).label == whole.manifest.label

    run(sglang_server, use)
    assert (publisher.state(short), publisher.engine_state()) == ("QUARANTINED", ("READY", whole.manifest.label))
    assert publisher.ledger.committed() == whole.manifest.ref
    assert [a for a, step in publisher.steps(short) if step == "Q4"] == [1, 2]  # given once more, then never again


def test_a_truncated_shard_is_caught_before_an_engine_sees_it(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    package = publisher.seal(tiny_tensors)
    shard = package.folder / SHARD
    shard.chmod(0o644)
    shard.write_bytes(shard.read_bytes()[:-1])

    async def use(engine: Engine) -> None:
        with failing("Q0", f"{SHARD}: expected .* bytes"):
            await publisher.publish(package, engine)
        assert await engine.ready()

    run(sglang_server, use)
    assert publisher.steps(package) == []
    assert publisher.state(package) == "QUARANTINED"


def test_old_contents_under_the_right_label_are_caught(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))

    class KeepsOld(Engine):
        async def update_weights(self, path: str, label: str, timeout_s: float, *, flush: bool = True) -> None:
            await super().update_weights(str(first.folder), label, timeout_s)

    async def use(engine: Engine) -> None:
        await publisher.publish(first, engine)
        with failing("Q6", "tensors in memory are not the package's"):
            await publisher.publish(second, engine)

    run(sglang_server, use, KeepsOld)


def test_old_kv_is_caught_by_the_probe(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    package = publisher.seal(tiny_tensors)

    class NeverFlushes(Engine):
        async def flush_cache(self, timeout_s: float) -> None: ...

        async def update_weights(self, path: str, label: str, timeout_s: float, *, flush: bool = True) -> None:
            body = {"model_path": path, "weight_version": label, "flush_cache": False}
            await self._json("POST", "/update_weights_from_disk", body, self._admin, timeout_s)

    async def use(engine: Engine) -> None:
        label = package.manifest.label
        await engine.generate_unready(
            rid="early-1", prompt_ids=PROBE_IDS, sampling=Sampling(1, 0.0), extra_key=label, timeout_s=60
        )
        with failing("Q10", "cached tokens of the first request: expected 0, found 10: old KV was not flushed"):
            await publisher.publish(package, engine)

    run(sglang_server, use, NeverFlushes)


def test_an_engine_that_computes_something_else_than_the_trainer_is_caught(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    package = publisher.seal(tiny_tensors, probe=Probe(PROBE_IDS, (-1.0,) * (len(PROBE_IDS) - 1)))

    async def use(engine: Engine) -> None:
        with failing("Q10", r"mean \|log-probability of engine - of trainer\| on the probe: expected at most 0.01"):
            await publisher.publish(package, engine)
        assert engine.ready_label == ""

    run(sglang_server, use)
    assert publisher.engine_state()[0] == "DIRTY"
    assert publisher.state(package) == "QUARANTINED"


def test_a_label_that_somebody_else_set_is_caught(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors, tiny_model: Path
) -> None:
    first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))

    async def use(engine: Engine) -> None:
        await publisher.publish(first, engine)
        await engine.update_weights(str(tiny_model), "000009-somebodyelse", 60)
        with failing("Q3", f"expected {first.manifest.label}, found 000009-somebodyelse"):
            await publisher.publish(second, engine)

    run(sglang_server, use)


def test_a_path_that_the_engine_cannot_read_is_refused_and_says_why(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    package = publisher.seal(tiny_tensors)

    class SeesAnotherDisk(Engine):
        async def update_weights(self, path: str, label: str, timeout_s: float, *, flush: bool = True) -> None:
            await super().update_weights("/nowhere" + path, label, timeout_s)

    async def use(engine: Engine) -> None:
        with failing("Q4", "/update_weights_from_disk was answered 400"):
            await publisher.publish(package, engine)

    run(sglang_server, use, SeesAnotherDisk)


# -- where the checksums cannot be computed from the package: canaries and probe


def test_a_package_in_another_precision_is_proven_by_canaries_and_probe(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    import torch

    package = publisher.seal({name: t.to(torch.bfloat16) for name, t in changed(tiny_tensors, 2).items()})
    assert expected_checksums(package, "cpu", "float32") is None
    asked = []

    class Counts(Engine):
        async def first_row(self, name: str, count: int, timeout_s: float = 30) -> list[float]:
            asked.append(name)
            return await super().first_row(name, count, timeout_s)

    run(sglang_server, lambda engine: publisher.publish(package, engine), Counts)
    assert asked == [canary.tensor for canary in package.manifest.canaries]
    assert publisher.state(package) == "COMMITTED"


def test_a_canary_of_another_value_is_caught(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    import torch

    package = publisher.seal({name: t.to(torch.bfloat16) for name, t in tiny_tensors.items()})

    class Wrong(Engine):
        async def first_row(self, name: str, count: int, timeout_s: float = 30) -> list[float]:
            return [x * 1.02 for x in await super().first_row(name, count, timeout_s)]

    async def use(engine: Engine) -> None:
        with failing("Q7", r"model\.embed_tokens\.weight\[0, 21, 42, 63\]: expected"):
            await publisher.publish(package, engine)

    run(sglang_server, use, Wrong)


# -- several ranks, on fake engines


@pytest.fixture
def toys(publisher: Publisher) -> tuple[Package, Package]:
    import torch

    publisher.model = publisher.root / "toy"
    publisher.model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (publisher.model / name).write_text("{}")
    packages = []
    for value in (1.0, 2.0):
        tensors = {"w": torch.from_numpy(np.full(2, value, np.float32))}
        (publisher.root / "toy.safetensors").unlink(missing_ok=True)
        packages.append(publisher.seal(tensors, probe=toy_probe(publisher.root, tensors), tied=False))
    return packages[0], packages[1]


def toy_probe(root: Path, tensors: Tensors) -> Probe:
    from safetensors.torch import save_file

    folder = root / "toy-weights"
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "w.safetensors")
    content = content_of(*[read_weights(folder)] * 2)
    ids = (5, 6, 7)
    return Probe(ids, tuple(toy_logprob(content, ids[:i], ids[i]) for i in (1, 2)))


def connect(fake: FakeEngine, name: str) -> Engine:
    return Engine(name, fake.url, vocab_size=1000, context_length=2048, boot=fake.boot)


def test_one_rank_that_kept_the_old_weights_is_caught(publisher: Publisher, toys: tuple[Package, Package]) -> None:
    async def main() -> None:
        async with FakeEngine(ranks=2) as fake:
            engine = connect(fake, "engine0")
            await publisher.publish(toys[0], engine)
            fake.inject("/update_weights_from_disk", faults.keeps_old_weights(1))
            await publisher.publish(toys[1], engine)  # given once more, it is right
            (failure,) = [r for r in publisher.ledger.journal_rows(1) if "DIRTY" in r.detail]
            assert failure.step == "Q6"
            assert "checksum of rank 1: expected another one than before" in failure.detail
            assert publisher.engine_state() == ("READY", toys[1].manifest.label)
            await engine.close()

    asyncio.run(main())


def test_all_engines_become_visible_at_once_or_none(publisher: Publisher, toys: tuple[Package, Package]) -> None:
    label = toys[0].manifest.label

    async def main() -> None:
        async with FakeEngine(ranks=2) as good, FakeEngine(ranks=2) as bad:
            engines = [connect(good, "engine0"), connect(bad, "engine1")]
            bad.inject("/update_weights_from_disk", faults.status(503), times=None)
            publisher.experiment = replace(
                publisher.experiment, publish=replace(publisher.experiment.publish, min_engines=2)
            )
            with failing("Q4", "engine1: /update_weights_from_disk was answered 503"):
                await publisher.publish(toys[0], *engines)
            assert publisher.state(toys[0]) == "PUBLISHING"
            assert publisher.ledger.committed() is None
            assert [e.ready_label for e in engines] == ["", ""]
            bad.faults.clear()
            await publisher.publish(toys[0], *engines)
            assert publisher.state(toys[0]) == "COMMITTED"
            assert [e.ready_label for e in engines] == [label, label]
            for engine in engines:
                await engine.close()

    asyncio.run(main())


def test_an_engine_that_fails_is_taken_out_with_the_commit(publisher: Publisher, toys: tuple[Package, Package]) -> None:
    async def main() -> None:
        async with FakeEngine(ranks=2) as good, FakeEngine(ranks=2) as bad:
            engines = [connect(good, "engine0"), connect(bad, "engine1")]
            fleet = Fleet(engines)
            bad.inject("/update_weights_from_disk", faults.status(503), times=None)
            published = await publisher.publish(toys[0], fleet=fleet)
            assert (publisher.state(toys[0]), published.engines_out) == ("COMMITTED", 1)
            assert [(r.name, r.state) for r in publisher.ledger.engines()] == [("engine0", "READY"), ("engine1", "OUT")]
            assert [e.name for e in fleet] == ["engine0"]
            assert engines[1].ready_label == ""
            for engine in engines:
                await engine.close()

    asyncio.run(main())


def test_an_engine_restarted_since_its_client_was_made_is_caught(
    publisher: Publisher, toys: tuple[Package, Package]
) -> None:
    async def main() -> None:
        async with FakeEngine(ranks=2) as fake:
            engine = connect(fake, "engine0")
            await fake.restart()
            with failing("Q3", "it was restarted"):
                await publisher.publish(toys[0], engine)
            await engine.close()

    asyncio.run(main())
