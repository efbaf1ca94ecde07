"""A co-located pool with the real SGLang and DeepSpeed on one core: it changes hands back and forth, nothing slips."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from conf.errors import TrainerError
from conf.load import load
from data.store import Store
from flows.opening import co_located_handover
from flows.pools import Leases
from flows.services import Services, start_services
from flows.waits import HANDOVER, Clock
from tasks.engines.client import Engine, Generation, Sampling, Span, Unavailable
from tasks.handover import Role
from tests.engines_fixture import Tensors, changed
from tests.tasks.test_publish import Publisher
from tests.tasks.training import commit_samples, quiet


def processes_of(session: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == session:
                found.append(int(entry.name))
        except ProcessLookupError:
            continue
    return found


async def generated(engine: Engine, label: str, rid: str) -> Generation:
    return await engine.generate(
        rid=rid, prompt_ids=[72, 105], sampling=Sampling(4, 1.0), extra_key=label, timeout_s=120
    )


def test_engine_and_trainer_take_turns_on_one_core(tiny_model: Path, tiny_tensors: Tensors, tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    loaded = load(
        "conf/tiny_arithmetic.yaml",
        [
            f"model.path={tiny_model}", "update.max_logprob_diff=10", "publish.probe_tolerance=0.01",
            "pools.train=null", f"pools.rollout={{roles: [rollout, train], devices: ['cpu:{core}']}}",
        ],
    )  # fmt: skip
    publisher = Publisher(tmp_path, tiny_model, loaded.experiment)
    ref = commit_samples(Store(tmp_path, tmp_path.name), 1)

    async def scenario(services: Services) -> None:
        engine, trainer, clock = services.engines[0], services.trainer, Clock()
        handover = co_located_handover(loaded.experiment, services, publisher.ledger, tmp_path)
        assert handover is not None
        leases = Leases(loaded.experiment.pools, handover)

        @asynccontextmanager
        async def stage(role: Role) -> AsyncIterator[None]:
            async with leases.take("rollout", f"a stage of role {role}", clock, role):
                yield

        # every process is on the pool's core
        for pid in [*trainer.pids, *processes_of(engine.session)]:
            assert os.sched_getaffinity(pid) == {core}
        assert len(processes_of(engine.session)) > 1

        first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))
        before, after = first.manifest.label, second.manifest.label
        async with stage("publish"):
            await publisher.publish(first, fleet=services.engines)
        async with stage("rollout"):
            assert (await generated(engine, before, "a")).spans == (Span(before, 0, 4),)
            with pytest.raises(TrainerError, match="update is refused: the trainer is offloaded"):
                await trainer.update(ref, 1, quiet)
        assert clock.waits.keys() <= {HANDOVER}

        async with stage("train"):
            with pytest.raises(Unavailable, match="is READY for no version"):
                await generated(engine, before, "b")
            assert not await engine.ready()
            assert (await trainer.update(ref, 1, quiet)).optimizer_step == 1
        async with stage("publish"):
            assert engine.ready_label == ""  # not before the publish has proven it
            await publisher.publish(second, fleet=services.engines)
        async with stage("rollout"):
            assert (await generated(engine, after, "c")).spans == (Span(after, 0, 4),)

        # back and forth without a publish: what is in memory is proven by its checksum, nothing is loaded
        steps = publisher.steps(second)
        async with stage("train"):
            assert (await trainer.status()).optimizer_step == 1
        async with stage("rollout"):
            assert (await generated(engine, after, "d")).spans == (Span(after, 0, 4),)
        assert [step for _, step in publisher.steps(second)[len(steps) :]] == ["Q11"]
        assert clock.waits[HANDOVER] > 0

    async def main() -> None:
        async with start_services(loaded.experiment, tmp_path, lambda text: None) as services:
            await scenario(services)

    try:
        asyncio.run(main())
    finally:
        publisher.ledger.close()
