"""Publishing to a real engine under the faults it really has: nothing wrong is served, and what can be mended is."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from conf.errors import EngineError
from data.model_files import model_tensors
from data.package import MANIFEST, FileInfo, Package, PackageManifest
from tasks.engines.answer import Generation, Refused, Sampling, Span, Unavailable
from tasks.engines.checksums import expected_checksums
from tasks.engines.client import Engine, check_bracket
from tasks.engines.fleet import Fleet
from tasks.engines.server import SGLangServer
from tests.contract.conftest import living
from tests.engines_fixture import (
    SHARD,
    Tensors,
    changed,
    engine_experiment,
    make_package,
    true_logprobs,
    until_running,
)
from tests.tasks.test_publish import Publisher, failing, run

PROMPTS = [[33 + i, 101, 108, 108, 111] for i in range(6)]  # none begins like the probe
LEFT_OUT = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def publisher(tmp_path: Path, tiny_model: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path, tiny_model, engine_experiment(tiny_model))
    yield publisher
    publisher.ledger.close()


def generate(
    engine: Engine, label: str, prompts: Sequence[Sequence[int]] = PROMPTS, tokens: int = 400
) -> list[asyncio.Task[Generation]]:
    """One request a prompt, in flight."""
    return [
        asyncio.create_task(
            engine.generate(
                rid=f"{label}-{i:04d}",
                prompt_ids=prompt,
                sampling=Sampling(tokens, 1.0),
                extra_key=label,
                timeout_s=120,
            )
        )
        for i, prompt in enumerate(prompts)
    ]


async def assert_serves(engine: Engine, package: Package) -> None:
    """It is READY on the version, holds exactly it, and answers with its label."""
    label = package.manifest.label
    assert engine.ready_label == label
    assert await engine.checksums() == [expected_checksums(package, "cpu", "float32")]
    (answer,) = await asyncio.gather(*generate(engine, label, PROMPTS[:1], 4))
    assert answer.spans == (Span(label, 0, len(answer.ids)),)


# -- what must be caught before the engine hears of it


def leave_out_a_tensor(folder: Path, manifest: PackageManifest) -> None:
    """The shard has one tensor less, and the manifest's entry of the file says so: only its tensor list does not."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / SHARD)
    del tensors[LEFT_OUT]
    save_file(tensors, folder / SHARD)
    data = (folder / SHARD).read_bytes()
    described = FileInfo(SHARD, len(data), hashlib.sha256(data).hexdigest())
    files = tuple(described if file.path == SHARD else file for file in manifest.files)
    (folder / MANIFEST).write_bytes(replace(manifest, files=files).to_bytes())


def truncate(folder: Path, manifest: PackageManifest) -> None:
    (folder / SHARD).write_bytes((folder / SHARD).read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, f"{SHARD}: expected .* bytes, found"),
        (leave_out_a_tensor, f"tensor .*{LEFT_OUT}.* is listed, the files do not hold it so"),
    ],
    ids=["truncated shard", "missing tensor"],
)
def test_a_damaged_package_never_reaches_the_engine_which_goes_on_serving(
    sglang_server: SGLangServer,
    publisher: Publisher,
    tiny_tensors: Tensors,
    damage: Callable[[Path, PackageManifest], None],
    message: str,
) -> None:
    first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))
    second.folder.chmod(0o755)
    for path in second.folder.iterdir():
        path.chmod(0o644)
    damage(second.folder, second.manifest)

    async def use(engine: Engine) -> None:
        await publisher.publish(first, engine)
        with failing("Q0", message):
            await publisher.publish(second, engine)
        await assert_serves(engine, first)

    run(sglang_server, use)
    assert (publisher.state(first), publisher.state(second)) == ("COMMITTED", "QUARANTINED")
    assert publisher.steps(second) == []


def test_a_package_of_fewer_tensors_than_the_model_has_is_never_sealed(
    tiny_model: Path, tiny_tensors: Tensors, tmp_path: Path
) -> None:
    """Its manifest would be consistent, so Q0 could not find it."""
    short = {name: t for name, t in tiny_tensors.items() if name != LEFT_OUT}
    with failing("P2", f"1 of {len(tiny_tensors)} tensors are missing, first {LEFT_OUT}"):
        make_package(tmp_path, tiny_model, 0, short, expected=model_tensors(tiny_model, "float32"))


# -- requests that the update meets


def test_requests_in_flight_end_under_their_weights_and_later_ones_have_nothing_of_them(
    sglang_server: SGLangServer, publisher: Publisher, tiny_model: Path, tiny_tensors: Tensors
) -> None:
    """`pin`: labels and log-probabilities of every token, compared with transformers under each version."""
    other = changed(tiny_tensors, 1)
    first, second = publisher.seal(tiny_tensors), publisher.seal(other)

    async def use(engine: Engine) -> list[list[Generation]]:
        await publisher.publish(first, engine)
        before = generate(engine, first.manifest.label)
        await until_running(engine, *before)
        await publisher.publish(second, engine)
        after = generate(engine, second.manifest.label)
        return [await asyncio.gather(*before), await asyncio.gather(*after)]

    for answers, package, tensors in zip(run(sglang_server, use), (first, second), (tiny_tensors, other), strict=True):
        for prompt, got in zip(PROMPTS, answers, strict=True):
            assert got.spans == (Span(package.manifest.label, 0, len(got.ids)),)
            assert got.cached_tokens == 0
            expected = true_logprobs(tiny_model, tensors, [*prompt, *got.ids])[len(prompt) - 1 :]
            assert got.logprobs == pytest.approx(expected, abs=1e-3)


# -- an engine that will not drop its cache


async def foreign_reader(engine: Engine, paused: bool) -> asyncio.Task[Generation]:
    """Somebody else's request runs on the engine, or is held there `in_place`, so that a flush is refused."""
    for number in range(100):
        reader = asyncio.create_task(
            engine.generate_unready(
                rid=f"foreign-{number:04d}",
                prompt_ids=PROMPTS[0],
                sampling=Sampling(500, 1.0),
                extra_key="foreign",
                timeout_s=120,
            )
        )
        await until_running(engine, reader)
        if paused:
            await Engine.pause(engine, "in_place", 30)
        try:
            await Engine.flush_cache(engine, 0)
        except Refused:
            return reader
        await engine.resume(30)  # it had ended: a busy machine
        await reader
    raise TimeoutError("no flush met a running request")


def failures(publisher: Publisher, package: Package) -> list[tuple[str, str]]:
    """(step, what failed there), in order."""
    rows = publisher.ledger.journal_rows(package.manifest.number)
    return [(row.step, row.detail) for row in rows if row.detail.startswith("DIRTY: ")]


def test_a_refused_flush_writes_nothing_and_the_next_attempt_drains_the_engine(
    sglang_server: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))
    readers: list[asyncio.Task[Generation]] = []

    class ResumedBySomebody(Engine):
        """Between its first pause and the flush after it, somebody lets it go on."""

        async def pause(self, mode: Literal["abort", "retract", "in_place"], timeout_s: float) -> None:
            await super().pause(mode, timeout_s)
            if not readers:
                await self.resume(30)
                readers.append(await foreign_reader(self, paused=False))

        async def flush_cache(self, timeout_s: float) -> None:
            await super().flush_cache(timeout_s if readers[0].done() else 0)

    async def use(engine: Engine) -> None:
        await publisher.publish(first, engine)
        engine.__class__ = ResumedBySomebody
        await publisher.publish(second, engine)
        got = await readers[0]
        assert got.spans == (Span(first.manifest.label, 0, len(got.ids)),)
        await assert_serves(engine, second)

    run(sglang_server, use)
    ((step, detail),) = failures(publisher, second)
    assert step == "Q2"
    assert "/flush_cache was answered 400" in detail
    assert [attempt for attempt, step in publisher.steps(second) if step == "Q4"] == [2]


def test_an_engine_that_hangs_after_a_half_update_is_restarted_and_its_base_weights_get_no_work(
    mortal: SGLangServer, publisher: Publisher, tiny_tensors: Tensors
) -> None:
    """A reader held `in_place` makes SGLang refuse the flush of Q4 with the weights written. Pausing that engine with
    `abort` never returns, and locks every later pause and continue out, so nothing but a restart helps."""
    settings = replace(publisher.experiment.publish, drain_timeout_s=0.5)
    publisher.experiment = replace(publisher.experiment, publish=settings)
    first, second = publisher.seal(changed(tiny_tensors, 1)), publisher.seal(changed(tiny_tensors, 2))
    label = first.manifest.label
    readers: list[asyncio.Task[Generation]] = []

    class HeldBySomebody(Engine):
        """Instead of its first pause, somebody's; and less patience with the second."""

        async def pause(self, mode: Literal["abort", "retract", "in_place"], timeout_s: float) -> None:
            if readers:
                await super().pause(mode, 5)
            else:
                readers.append(await foreign_reader(self, paused=True))

        async def flush_cache(self, timeout_s: float) -> None: ...

    async def main() -> None:
        engine = mortal.connect()
        await publisher.publish(first, engine)
        before = {"engine0": await engine.mark()}
        engine.__class__ = HeldBySomebody

        async def restart(old: Engine) -> Engine:
            await mortal.stop()
            new = await mortal.start(300)
            # As an external engine that came back at the same address, and a client that does not know it yet.
            stale = mortal.connect()
            stale.boot, stale.ready_label = old.boot, label
            with pytest.raises(EngineError, match=f"changed while the batch was open.*{old.boot}.*{new.boot}"):
                check_bracket(before, {"engine0": await stale.mark()})
            (answer,) = await asyncio.gather(*generate(stale, label, PROMPTS[:1], 4))
            assert [span.label for span in answer.spans] == [new.boot]  # a rollout takes no such label
            await stale.close()
            assert new.ready_label == ""
            with pytest.raises(EngineError, match="READY for no version"):
                await asyncio.gather(*generate(new, label, PROMPTS[:1], 4))
            return new

        fleet = Fleet([engine], {"mortal": restart})
        assert (await publisher.publish(second, fleet=fleet)).restarts == 1
        with pytest.raises(Unavailable):
            await readers[0]
        await assert_serves(fleet[0], second)
        await fleet.close()

    living(mortal)
    asyncio.run(main())
    (_, refused), (_, hung) = found = failures(publisher, second)
    assert [step for step, _ in found] == ["Q4", "Q2"], found
    assert "Weights were updated, but the cache was not flushed" in refused
    assert "/pause_generation had no answer in 5 s" in hung
    assert publisher.ledger.committed() == second.manifest.ref
