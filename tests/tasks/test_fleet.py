"""The engines of a run: a new life is a new engine, whoever gives it; what is out of the pool gets nothing."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.errors import EngineError
from conf.schema import Experiment
from tasks.engines import server
from tasks.engines.client import Engine, NoAnswer, Unavailable
from tasks.engines.commands import Fence, Stale
from tasks.engines.fleet import Fleet, Restart, Unrestartable
from tasks.engines.server import SGLangServer, external_engines, managed_engines
from tasks.publish import publish_to_engines
from tests.engines_fixture import Tensors, changed, engine_experiment
from tests.fakes import faults
from tests.fakes.context import until
from tests.fakes.engine import FakeEngine
from tests.fakes.publishing import BASE, Publishing, client_of, make_toy_model, toy_experiment
from tests.tasks.test_publish import Publisher

LABEL = "000001-0123456789ab"


def play(body: Callable[[list[FakeEngine]], Coroutine[Any, Any, None]], engines: int = 1) -> None:
    async def main() -> None:
        fakes = [FakeEngine(BASE) for _ in range(engines)]
        for fake in fakes:
            await fake.__aenter__()
        try:
            await body(fakes)
        finally:
            for fake in fakes:
                await fake.__aexit__()

    asyncio.run(main())


# -- the fleet itself


def test_a_fleet_is_the_sequence_of_its_engines_in_service() -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        fleet = Fleet([client_of(fake, f"engine{i}") for i, fake in enumerate(fakes)])
        first, second, third = fleet
        assert (len(fleet), fleet[1], fleet[:2], second in fleet) == (3, second, [first, second], True)
        second.ready_label = LABEL
        fleet.take_out(second)
        assert (list(fleet), second.ready_label) == ([first, third], "")
        fleet.take_out(second)  # again: nothing more
        assert list(fleet) == [first, third]
        await fleet.close()
        for engine in (first, second, third):
            with pytest.raises(Unavailable, match="is over"):
                await engine.model_info()

    play(body, engines=3)


def test_a_restarted_engine_is_a_new_one_in_the_old_ones_place() -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        ways = {f"engine{i}": Publishing.restart(fake) for i, fake in enumerate(fakes)}
        fleet = Fleet([client_of(fake, f"engine{i}") for i, fake in enumerate(fakes)], ways)
        old, other = fleet
        old.ready_label = other.ready_label = LABEL
        new = await fleet.restart(old)
        assert list(fleet) == [new, other]
        assert (new.name, new.boot) == ("engine0", fakes[0].boot)
        assert new.boot != old.boot
        assert [engine.ready_label for engine in (old, new, other)] == ["", "", LABEL]
        with pytest.raises(Unavailable, match="is over"):
            await old.model_info()
        assert (await new.model_info()).label == new.boot
        await fleet.close()

    play(body, engines=2)


def test_commands_for_the_life_before_are_stale_in_the_next_one() -> None:
    async def sent() -> None:
        raise AssertionError("it was sent")

    async def body(fakes: list[FakeEngine]) -> None:
        fleet = Fleet([client_of(fakes[0], "engine0")], {"engine0": Publishing.restart(fakes[0])})
        old = fleet[0]
        await old.gate.send(Fence("run", 1, 4, old.boot), "Q2", lambda: old.pause("abort", 60))
        new = await fleet.restart(old)
        for late in (Fence("run", 1, 4, old.boot), Fence("run", 1, 3, new.boot), Fence("other", 9, 9, new.boot)):
            with pytest.raises(Stale):
                await new.gate.send(late, "Q4", sent)
        await fleet.close()

    play(body)


def test_an_engine_that_nobody_here_can_restart_says_so_and_stays_without_work() -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        fleet = Fleet([client_of(fakes[0], "engine0")])
        fleet[0].ready_label = LABEL
        with pytest.raises(Unrestartable, match="engine0 cannot be restarted from here"):
            await fleet.restart(fleet[0])
        assert fleet[0].ready_label == ""
        await fleet.close()

    play(body)


def test_a_start_that_fails_leaves_the_engine_in_the_fleet_without_work_for_another_try() -> None:
    tries = []

    def fails_once(fake: FakeEngine) -> Restart:
        async def again(engine: Engine) -> Engine:
            tries.append(engine.boot)
            if len(tries) == 1:
                raise EngineError("engine0 ended with status 1")
            return await Publishing.restart(fake)(engine)

        return again

    async def body(fakes: list[FakeEngine]) -> None:
        fleet = Fleet([client_of(fakes[0], "engine0")], {"engine0": fails_once(fakes[0])})
        old = fleet[0]
        old.ready_label = LABEL
        with pytest.raises(EngineError, match="ended with status 1"):
            await fleet.restart(old)
        assert (list(fleet), old.ready_label) == ([old], "")
        new = await fleet.restart(old)
        assert (list(fleet), new.boot) == ([new], fakes[0].boot)
        await fleet.close()

    play(body)


# -- external engines: whoever runs them restarts them


@asynccontextmanager
async def external(
    root: Path, fakes: list[FakeEngine], start_timeout_s: float = 60.0
) -> AsyncIterator[tuple[Fleet, Experiment]]:
    make_toy_model(root / "model")
    experiment = toy_experiment(root)
    rollout = replace(experiment.rollout, urls=[fake.url for fake in fakes], start_timeout_s=start_timeout_s)
    experiment = replace(experiment, rollout=rollout)
    async with external_engines(experiment) as fleet:
        yield fleet, experiment


def test_external_engines_are_named_by_their_place_and_known_by_their_boot(tmp_path: Path) -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        async with external(tmp_path, fakes) as (fleet, _):
            found = [(engine.name, engine.url, engine.boot) for engine in fleet]
        assert found == [(f"engine{i}", fake.url, fake.boot) for i, fake in enumerate(fakes)]

    play(body, engines=2)


def test_the_next_life_of_an_external_engine_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    connect = server._connect

    async def counted(*arguments: Any) -> Engine:
        asked.append(arguments)
        return await connect(*arguments)

    async def body(fakes: list[FakeEngine]) -> None:
        async with external(tmp_path, fakes) as (fleet, _):
            old, boot = fleet[0], fakes[0].boot
            await fakes[0].die()
            monkeypatch.setattr(server, "_connect", counted)
            monkeypatch.setattr(server, "POLL_S", 0.001)
            restart = asyncio.create_task(fleet.restart(old))
            await until(lambda: len(asked) >= 3)
            assert not restart.done()
            await fakes[0].restart()
            new = await restart
            assert new.boot == fakes[0].boot != boot
            assert list(fleet) == [new]

    play(body)


def test_an_external_engine_that_is_still_the_same_life_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        async with external(tmp_path, fakes) as (fleet, _):
            message = f"engine0 at {fakes[0].url} is external and still the same boot: restart it"
            with pytest.raises(Unrestartable, match=message):
                await fleet.restart(fleet[0])
            assert fleet[0].ready_label == ""

    play(body)


def test_an_external_engine_that_does_not_come_back_in_time_is_an_error_with_the_setting(tmp_path: Path) -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        async with external(tmp_path, fakes, start_timeout_s=0.05) as (fleet, _):
            await fakes[0].die()
            limit = r"engine0 did not come back within 0.05 s \(rollout.start_timeout_s\): engine0: /server_info failed"
            with pytest.raises(EngineError, match=limit):
                await fleet.restart(fleet[0])

    play(body)


def test_an_external_engine_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        await fakes[1].die()
        with pytest.raises(Unavailable, match="engine1: /server_info failed"):
            async with external(tmp_path, fakes):
                raise AssertionError("it started")

    play(body, engines=2)


def test_a_publish_to_an_external_engine_goes_on_in_the_life_its_owner_gives_it(tmp_path: Path) -> None:
    async def body(fakes: list[FakeEngine]) -> None:
        desk = Publishing(tmp_path, engines=0)
        package = desk.seal(1.0)
        async with external(tmp_path, fakes) as (fleet, experiment):
            fakes[0].inject("/update_weights_from_disk", faults.restarts)
            published = await publish_to_engines(
                package.manifest.ref, tmp_path / "weights", fleet, desk.ledger, experiment
            )
            assert (published.restarts, fleet[0].ready_label) == (1, package.manifest.label)
            assert [(r.state, r.boot) for r in desk.ledger.engines()] == [("READY", fakes[0].boot)]
        desk.ledger.close()

    play(body)


def test_no_answer_is_more_than_unavailable() -> None:
    """What was not sent may be sent again; what had no answer may be under way."""
    assert issubclass(NoAnswer, Unavailable)

    async def body(fakes: list[FakeEngine]) -> None:
        engine = client_of(fakes[0], "engine0")
        for fault in (faults.reset, faults.reset_after):
            fakes[0].inject("/model_info", fault)
            with pytest.raises(NoAnswer):
                await engine.model_info()
        await fakes[0].die()
        with pytest.raises(Unavailable) as caught:
            await engine.model_info()
        assert not isinstance(caught.value, NoAnswer)
        await engine.close()

    play(body)


# -- a managed server


class Adopted:
    """The suite's running server in the place of one that would be started; its second start is a real one."""

    def __init__(self, running: SGLangServer) -> None:
        self.server, self.name, self.starts = running, running.name, 0

    async def start(self, timeout_s: float) -> Engine:
        self.starts += 1
        return self.server.connect() if self.starts == 1 else await self.server.start(timeout_s)

    async def stop(self) -> None:
        if self.starts == 1:  # the last one is left to the suite
            await self.server.stop()


def test_a_managed_server_is_ended_and_started_anew_and_is_brought_to_the_version(
    sglang_server: SGLangServer,
    tiny_model: Path,
    tiny_tensors: Tensors,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adopted, frozen, freeze_gc = Adopted(sglang_server), list[str](), Engine.freeze_gc

    async def noted(engine: Engine) -> None:
        await freeze_gc(engine)
        frozen.append(engine.boot)

    monkeypatch.setattr(server, "SGLangServer", lambda *_: adopted)
    monkeypatch.setattr(Engine, "freeze_gc", noted)
    publisher = Publisher(tmp_path, tiny_model, engine_experiment(tiny_model))
    first, second = publisher.seal(tiny_tensors), publisher.seal(changed(tiny_tensors, 1))

    async def main() -> None:
        async with managed_engines(publisher.experiment, tmp_path) as fleet:
            await publisher.publish(first, fleet=fleet)
            pid, old = sglang_server.pid, fleet[0]
            new = await fleet.restart(old)
            assert sglang_server.pid != pid
            assert (new.boot != old.boot, (await new.model_info()).label) == (True, new.boot)
            assert (new.ready_label, list(fleet)) == ("", [new])
            assert frozen == [new.boot]
            published = await publisher.publish(second, fleet=fleet)
            assert (published.restarts, new.ready_label) == (0, second.manifest.label)
            assert publisher.engine_state() == ("READY", second.manifest.label)
            await new.resume(30)

    asyncio.run(main())
    publisher.ledger.close()
    assert adopted.starts == 2
    assert sglang_server.alive
