"""The hand-over of a co-located pool, on fake engines with a GPU's memory: its order, its refusals, its failures."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from conf.errors import EngineError, HandoverError, RatchetError, TrainerError
from conf.schema import Model
from tasks import handover
from tasks.engines.client import Generation, NoAnswer, Sampling, Unavailable
from tasks.handover import (
    BROKEN,
    DRAINED,
    FLUSHED,
    RELEASED,
    RESUMED,
    SERVING,
    STEPS,
    TRAINING,
    Handover,
    Role,
    Step,
)
from tests.fakes import faults
from tests.fakes.context import until
from tests.fakes.device import ENGINES, GPU, TRAINER, FakeGpuTrainer
from tests.fakes.publishing import Publishing
from tests.fakes.toy_model import content_of, read_weights

ORDER = [
    "/v1/loads", "/pause_generation", "/flush_cache", "/release_memory_occupation",
    "/resume_memory_occupation", "/continue_generation",
]  # fmt: skip


class Pool:
    """Two engines and a trainer on one GPU, with a committed version; `log` has what was asked of whom."""

    def __init__(self, desk: Publishing, device: str) -> None:
        self.desk = desk
        self.experiment = replace(desk.experiment, model=Model(str(desk.root / "model"), device))
        desk.experiment = self.experiment
        self.trainer = FakeGpuTrainer(desk.fakes)
        self.proofs = 0
        held = {GPU: TRAINER} if device == "cuda" else {}
        self.handover = Handover(desk.fleet, self.trainer, held, desk.ledger, self.experiment, self.prove)

    async def prove(self) -> None:
        self.proofs += 1
        committed = self.desk.ledger.committed()
        assert committed is not None
        await self.desk.publish(self.packages[committed.number])

    async def publish_next(self, value: float) -> None:
        """What the stage publish does, in the state it finds."""
        package = self.desk.seal(value)
        self.packages[package.manifest.number] = package
        await self.desk.publish(package)

    packages: dict[int, Any]

    async def running_request(self) -> asyncio.Task[Generation]:
        """One that the first engine holds back after its first token."""
        self.desk.fake.hold_at = 1
        label = self.packages[0].manifest.label
        request = asyncio.create_task(
            self.desk.engine.generate(rid="r", prompt_ids=[5], sampling=Sampling(3, 1.0), extra_key=label, timeout_s=30)
        )
        await until(lambda: bool(self.desk.fake.running))
        return request

    def routes(self, engine: int = 0) -> list[str]:
        return [route for route, _ in self.desk.fakes[engine].calls if route in ORDER]

    def states(self) -> list[tuple[str, str]]:
        return self.desk.engine_states()


@asynccontextmanager
async def pool(root: Path, device: str = "cuda", engines: int = 1, **publish: Any) -> AsyncIterator[Pool]:
    async with Publishing(root, engines, **publish) as desk:
        made = Pool(desk, device)
        made.packages = {}
        first = await desk.published(1.0)
        made.packages[first.manifest.number] = first
        yield made


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "POLL_S", 0.0)


def test_the_pool_changes_hands_in_this_order_and_gets_work_only_after_the_publish(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, engines=2) as p:
            states = [p.handover.state]
            for step in ("drain", "flush", "release", "reload", "offload", "resume"):
                await p.handover.step(step)
                states.append(p.handover.state)
            assert states == [SERVING, DRAINED, FLUSHED, RELEASED, TRAINING, RELEASED, RESUMED]
            for engine in (0, 1):
                assert p.routes(engine) == ORDER
            assert p.trainer.calls == ["reload", "offload"]
            # Q9 has not been: no engine has work, and none of them holds what it held
            assert p.desk.visible() == ["", ""]
            assert [state for state, _ in p.states()] == ["PAUSED", "PAUSED"]
            await p.publish_next(2.0)
            await p.handover.to_serving()
            assert p.handover.state == SERVING
            assert p.proofs == 0  # the publish stage had proven them
            label = p.packages[1].manifest.label
            assert p.desk.visible() == [label, label]
            assert p.states() == [("READY", label)] * 2

    asyncio.run(main())


def test_where_no_publish_follows_the_committed_version_is_installed_again_before_an_engine_gets_work(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:
            await p.handover.to_training()
            await p.handover.to_serving()
            assert (p.handover.state, p.proofs) == (SERVING, 1)
            assert len(p.desk.fake.routed("/update_weights_from_disk")) == 1
            package = p.packages[0]
            assert p.desk.visible() == [package.manifest.label]
            assert content_of(*p.desk.fake.ranks) == content_of(read_weights(package.folder))

    asyncio.run(main())


def test_on_a_cpu_nothing_is_released_and_a_checksum_proves_the_engine(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, "cpu") as p:
            await p.handover.to_training()
            assert p.desk.visible() == [""]
            assert p.desk.fake.paused == "abort"  # under any other pause the scheduler does not sleep
            await p.handover.to_serving()
            assert p.desk.visible() == [p.packages[0].manifest.label]
            assert [r for r in p.routes() if "memory" in r] == []
            assert p.desk.fake.routed("/update_weights_from_disk") == []
            assert p.desk.fake.routed("/weights_checker")

    asyncio.run(main())


def test_an_engine_whose_weights_changed_meanwhile_is_installed_again_on_a_cpu_too(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, "cpu") as p:
            await p.handover.to_training()
            p.desk.fake.ranks = [dict(rank) for rank in p.desk.fake.ranks]
            p.desk.fake.ranks[0] = dict.fromkeys(p.desk.fake.ranks[0], p.desk.fake.base["model.w.weight"])
            await p.handover.to_serving()
            assert len(p.desk.fake.routed("/update_weights_from_disk")) == 1
            assert content_of(*p.desk.fake.ranks) == content_of(read_weights(p.packages[0].folder))

    asyncio.run(main())


@pytest.mark.parametrize("state", ["SERVING", "DRAINED", "FLUSHED", "RELEASED", "TRAINING", "RESUMED"])
def test_every_move_that_the_state_does_not_allow_is_refused_by_name_and_does_nothing(
    tmp_path: Path, state: str
) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:
            while p.handover.state != state:
                order: dict[str, Step] = {
                    SERVING: "drain", DRAINED: "flush", FLUSHED: "release", RELEASED: "reload",
                    TRAINING: "offload",
                }  # fmt: skip
                came_back = p.handover.state == RELEASED and state == RESUMED
                await p.handover.step("resume" if came_back else order[p.handover.state])
            calls = len(p.desk.fake.calls), len(p.trainer.calls)
            for step, (allowed, _) in STEPS.items():
                if state not in allowed:
                    with pytest.raises(HandoverError, match=f"{step} must begin in .*, but the pool is {state}"):
                        await p.handover.step(step)
            assert (len(p.desk.fake.calls), len(p.trainer.calls)) == calls
            assert p.handover.state == state

    asyncio.run(main())


def test_a_request_while_the_pool_trains_is_refused_without_being_sent(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:
            label = p.packages[0].manifest.label
            await p.handover.to_training()
            with pytest.raises(Unavailable, match=f"engine0 is READY for no version, request r is for {label}"):
                await p.desk.engine.generate(
                    rid="r", prompt_ids=[5], sampling=Sampling(1, 1.0), extra_key=label, timeout_s=5
                )
            assert p.desk.fake.routed("/generate") == []

    asyncio.run(main())


def test_running_requests_are_waited_for_and_then_the_pool_changes(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:
            fake, request = p.desk.fake, await p.running_request()
            training = asyncio.create_task(p.handover.to_training())
            await until(lambda: len(fake.routed("/v1/loads")) > 2)
            assert p.trainer.calls == []
            await fake.release()
            await training
            assert len((await request).ids) == 3
            assert p.trainer.wrong == []

    asyncio.run(main())


def test_a_request_that_does_not_end_is_aborted_after_the_drain_timeout(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, drain_timeout_s=0.01) as p:
            request = await p.running_request()
            await p.handover.to_training()
            with pytest.raises(RatchetError, match="abort"):
                await request
            assert p.trainer.wrong == []

    asyncio.run(main())


def test_memory_that_is_not_given_back_stops_the_pool_and_is_named_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "MEMORY_S", 0.0)
    monkeypatch.setattr(handover, "_gib", lambda size: f"{size} bytes")

    async def main() -> None:
        async with pool(tmp_path) as p:
            p.trainer.keeps = 55  # another process on the device
            with pytest.raises(
                HandoverError, match=r"^cuda:0: the trainer's reload needs 50 bytes free, found (0|45|-\d+) bytes"
            ):
                await p.handover.to_training()
            assert p.trainer.calls == []  # it was not let in
            assert p.handover.state == BROKEN
            with pytest.raises(HandoverError, match=r"refused, because a hand-over failed \(release: cuda:0"):
                await p.handover.to_serving()

    asyncio.run(main())


def test_engines_take_their_memory_only_when_the_trainers_is_seen_to_be_free(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:
            await p.handover.to_training()
            await p.handover.step("offload")
            assert (await p.trainer.memory())[GPU] >= ENGINES
            await p.handover.to_serving()
            assert p.trainer.wrong == []

    asyncio.run(main())


def test_an_engine_that_dies_in_the_hand_over_stops_the_pool(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path, engines=2) as p:
            p.desk.fakes[1].inject("/release_memory_occupation", faults.dies)
            with pytest.raises(NoAnswer, match="engine1"):
                await p.handover.to_training()
            assert (p.handover.state, p.trainer.calls) == (BROKEN, [])
            assert p.desk.visible() == ["", ""]

    asyncio.run(main())


def test_a_trainer_that_dies_at_its_reload_stops_the_pool(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:
            p.trainer.fail = "reload"
            with pytest.raises(TrainerError, match="SIGKILL"):
                await p.handover.to_training()
            with pytest.raises(HandoverError, match="reload: rank 0 of 1"):
                await p.handover.to_training()

    asyncio.run(main())


def test_a_publish_that_proves_nothing_gives_no_work(tmp_path: Path) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:

            async def nothing() -> None:
                pass

            p.handover._publish = nothing
            await p.handover.to_training()
            with pytest.raises(EngineError, match="engine0: expected to be proven by a publish, but is READY for no"):
                await p.handover.to_serving()

    asyncio.run(main())


def test_a_step_that_is_cancelled_ends_first_and_the_way_back_is_open(tmp_path: Path) -> None:
    """The run is cancelled, or its iteration begun again, while an engine drains."""

    async def main() -> None:
        async with pool(tmp_path) as p:
            fake, request = p.desk.fake, await p.running_request()
            training = asyncio.create_task(p.handover.to_training())
            await until(lambda: len(fake.routed("/v1/loads")) > 0)
            training.cancel()
            await fake.release()
            with pytest.raises(asyncio.CancelledError):
                await training
            await request
            assert p.handover.state == DRAINED
            await p.handover.to_serving()
            assert p.desk.visible() == [p.packages[0].manifest.label]
            assert [r for r in p.routes() if "memory" in r] == []  # to resume what was not released would kill it

    asyncio.run(main())


@pytest.mark.parametrize("role", ["rollout", "publish", "train", "cpu"])
def test_a_pool_that_is_where_a_stage_needs_it_changes_nothing(tmp_path: Path, role: Role) -> None:
    async def main() -> None:
        async with pool(tmp_path) as p:
            if role == "train":
                await p.handover.to_training()
            calls = len(p.desk.fake.calls)
            assert not p.handover.changes(role)
            await p.handover.give(role)
            assert len(p.desk.fake.calls) == calls

    asyncio.run(main())


# -- any order of commands and failures

FAULTS = {
    "engine dies": lambda p: p.desk.fake.inject("/flush_cache", faults.dies),
    "release fails": lambda p: p.desk.fake.inject("/release_memory_occupation", faults.status(503)),
    "resume fails": lambda p: p.desk.fake.inject("/resume_memory_occupation", faults.status(500)),
    "update lost": lambda p: p.desk.fake.inject("/update_weights_from_disk", faults.status(400)),
    "engine is killed": lambda p: p.desk.fake.die(),
    "trainer fails to reload": lambda p: setattr(p.trainer, "fail", "reload"),
    "trainer fails to offload": lambda p: setattr(p.trainer, "fail", "offload"),
    "memory stays taken": lambda p: setattr(p.trainer, "keeps", 70),
}
ROLES: list[Role] = ["rollout", "publish", "train", "cpu"]
ACTIONS = st.one_of(
    st.tuples(st.just("give"), st.sampled_from(ROLES)),
    st.tuples(st.just("step"), st.sampled_from(sorted(STEPS))),
    st.tuples(st.just("publish"), st.just("")),
    st.tuples(st.just("cancelled"), st.sampled_from(ROLES)),
    st.tuples(st.just("fault"), st.sampled_from(sorted(FAULTS))),
)
seen: dict[str, int] = {}


async def act(p: Pool, kind: str, what: Any, number: int) -> None:
    if kind == "give":
        await p.handover.give(what)
    elif kind == "step":
        await p.handover.step(what)
    elif kind == "publish" and p.handover.state in (SERVING, RESUMED):
        await p.publish_next(float(number))
    elif kind == "cancelled":
        task = asyncio.create_task(p.handover.give(what))
        for _ in range(number):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    elif kind == "fault" and isinstance(left := FAULTS[what](p), Awaitable):
        await left


def check(p: Pool) -> None:
    """Never training while an engine holds memory; never work for an engine whose weights are not its label's."""
    assert p.trainer.wrong == []
    serving = [fake for fake in p.desk.fakes if fake.alive and not fake.released]
    assert not (p.trainer.held and serving and p.handover.state == TRAINING)
    if p.handover.state in (DRAINED, FLUSHED, RELEASED, TRAINING):
        assert set(p.desk.visible()) <= {""}
    for engine in p.desk.fleet:
        if engine.ready_label and p.desk.fake.boot == engine.boot:
            package = next(k for k in p.packages.values() if k.manifest.label == engine.ready_label)
            assert content_of(*p.desk.fake.ranks) == content_of(read_weights(package.folder))
            assert not p.desk.fake.released


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, min_size=1, max_size=8))
@example([("give", "train"), ("give", "publish"), ("publish", ""), ("give", "rollout"), ("give", "train")])
@example([("give", "train"), ("fault", "trainer fails to offload"), ("give", "rollout"), ("give", "train")])
@example([("step", "drain"), ("step", "flush"), ("step", "release"), ("step", "resume"), ("give", "rollout")])
def test_any_order_of_commands_and_failures_keeps_the_device_to_one_and_serves_nothing_unproven(
    monkeypatch: pytest.MonkeyPatch, actions: list[tuple[str, Any]]
) -> None:
    monkeypatch.setattr(handover, "MEMORY_S", 0.0)
    monkeypatch.setattr(handover, "POLL_S", 0.0)

    async def main(root: Path) -> None:
        async with pool(root, max_restarts=1) as p:
            p.trainer.slow = 1  # nothing is waited for
            for number, (kind, what) in enumerate(actions, 2):
                before = p.handover.state
                try:
                    await act(p, kind, what, number)
                except RatchetError:
                    seen["refused or failed"] = seen.get("refused or failed", 0) + 1
                check(p)
                assert before != BROKEN or p.handover.state == BROKEN
                seen[p.handover.state] = seen.get(p.handover.state, 0) + 1

    with TemporaryDirectory() as root:
        asyncio.run(main(Path(root)))


def test_the_random_orders_above_went_everywhere() -> None:
    assert {SERVING, DRAINED, FLUSHED, RELEASED, TRAINING, RESUMED, BROKEN, "refused or failed"} <= seen.keys()
