"""Several engines in a batch: routing, engines that are gone, and answers that come late or to the wrong request."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.errors import StageError
from conf.schema import Publish
from data.rows import check_rollout
from tests.fakes import faults
from tests.fakes.context import World, until
from tests.fakes.engine import Behaviour, Call, FakeEngine
from tests.fakes.rollouts import SETTINGS, play, rids, roll, sample
from tests.fakes.toy_model import BASE, content_of, toy_logprob

PROMPTS = ([3, 4], [5, 6], [7, 8], [9, 10])  # groups 0 and 2 go to engine0, 1 and 3 to engine1


pytestmark = pytest.mark.usefixtures("retry_at_once")


def states(world: World) -> dict[str, str]:
    return {row.name: row.state for row in world.ledger.engines()}


def check_true(rows: list[dict[str, Any]]) -> None:
    """Every token has the log-probability that the committed weights give it after this row's own prompt."""
    for row in rows:
        ids = row["response_ids"]
        truth = [toy_logprob(content_of(BASE), [*row["prompt_ids"], *ids[:i]], ids[i]) for i in range(len(ids))]
        assert row["behavior_logprobs"] == pytest.approx(truth, abs=1e-6)


# -- routing


def test_groups_stay_whole_on_an_engine_and_spread_evenly(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.hold_at = 0
        rolling = asyncio.create_task(roll(world, *([3 + i, 4] for i in range(6))))
        await until(lambda: sum(len(fake.running) for fake in fakes) == 12)
        assert [len(fake.running) for fake in fakes] == [6, 6]
        for fake in fakes:
            await fake.release()
        assert (await rolling).facts.dropped == {}
        groups = [{rid[:12] for rid in rids(fake)} for fake in fakes]
        assert [len(own) for own in groups] == [3, 3]
        assert not groups[0] & groups[1]

    play(tmp_path, model, body, engines=2)


def test_an_engine_with_less_in_flight_gets_the_next_group(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].hold_at = 0
        rolling = asyncio.create_task(roll(world, *([3 + i, 4] for i in range(6))))
        await until(lambda: len(rids(fakes[1])) == 10 and not fakes[1].running)
        assert len(rids(fakes[0])) == 2
        await fakes[0].release()
        assert (await rolling).table.num_rows == 12

    play(tmp_path, model, body, engines=2, settings=replace(SETTINGS, max_in_flight=4))


def test_an_engine_in_an_update_gets_no_group_that_another_can_take(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        updating, other = fakes
        for fake in fakes:
            fake.hold_at = 0
        rolling = asyncio.create_task(roll(world, *PROMPTS[:3]))
        await until(lambda: [len(fake.running) for fake in fakes] == [2, 2])
        row = world.ledger.engines()[0]
        world.engines[0].ready_label = ""
        world.ledger.set_engine(row.name, row.boot, "DRAINING", row.label, row.checksum)
        await updating.release()
        await until(lambda: len(other.running) == 4)
        await world.publish(world.context.policy)
        await other.release()
        assert (await rolling).table.num_rows == 6

    play(tmp_path, model, body, engines=2, settings=replace(SETTINGS, max_in_flight=4, kv_policy="rebuild"))


# -- engines that are gone


async def changes_boot(call: Call) -> Any:
    """Restarted by somebody, behind a proxy that keeps the connections."""
    call.engine.boot = "boot-other"
    return await faults.invalid_json(call)


GONE: dict[str, tuple[str, Behaviour]] = {
    "dies": ("/generate", faults.dies),
    "restarts": ("/generate", faults.restarts),
    "is another one behind the same address": ("/generate", changes_boot),
    "dies when all is answered": ("/weights_checker", faults.dies),
    "restarts when all is answered": ("/weights_checker", faults.restarts),
}


@pytest.mark.parametrize("how", GONE)
def test_the_groups_of_an_engine_that_is_gone_are_generated_elsewhere_without_a_double_row(
    tmp_path: Path, model: Path, how: str
) -> None:
    route, behaviour = GONE[how]

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        gone, left = fakes
        boot = gone.boot
        if route == "/weights_checker":  # the second time: the first one opens the batch
            opening = faults.Held()
            opening.go_on.set()
            gone.inject(route, opening)
            gone.inject(route, behaviour)
        else:
            gone.inject(route, behaviour, only=sample("g002-s01"))
        out = await roll(world, *PROMPTS)
        rows = out.table.to_pylist()
        assert [row["sample_id"] for row in rows] == [f"i000001-g00{g}-s0{s}" for g in range(4) for s in range(2)]
        assert {row["engine"] for row in rows} == {f"engine1/{left.boot}"}
        assert out.facts.dropped == {}
        check_rollout(out.table, 2)
        check_true(rows)
        assert world.engines[0].ready_label == ""
        (dead,) = [row for row in world.ledger.engines() if row.name == "engine0"]
        assert (dead.state, dead.boot) == ("DEAD", boot)
        assert states(world)["engine1"] == "READY"
        assert world.progress[-1] == (8, 8, "samples")
        assert max(done for done, *_ in world.progress) == 8

    play(tmp_path, model, body, engines=2)


def test_what_an_engine_answered_before_it_died_is_generated_again(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        gone, left = fakes
        gone.inject("/generate", faults.generated([5, 5, 2], [-0.5] * 3), only=sample("g000"), times=None)
        left.hold_at = 0
        gone.inject("/generate", (waits := faults.Held()), only=sample("g002-s01"))
        gone.inject("/generate", faults.dies, only=sample("g002-s01"))
        rolling = asyncio.create_task(roll(world, *PROMPTS))
        await until(lambda: len(world.progress) == 3)  # all of engine0 but the one that waits
        await gone.die()
        waits.go_on.set()
        await left.release()
        out = await rolling
        assert [5, 5, 2] not in out.table["response_ids"].to_pylist()
        check_true(out.table.to_pylist())
        assert world.measured["rollout/retries"] == 4  # groups 0 and 2, two samples each

    play(tmp_path, model, body, engines=2)


def test_a_single_engine_that_dies_stops_the_stage_and_is_named(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.dies, only=sample("g001"))
        message = (
            r"rollout of iteration 1 must have 1 engine\(s\) \(publish.min_engines\), left are none; "
            f"gone: engine0 of {fakes[0].boot}: engine0: request .* failed"
        )
        with pytest.raises(StageError, match=message):
            await roll(world, [3, 4], [5, 6], [7, 8])
        assert states(world) == {"engine0": "DEAD"}

    play(tmp_path, model, body)


def test_an_engine_that_restarts_in_mid_batch_gives_no_rows(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.restarts, only=sample("g002-s01"))
        with pytest.raises(StageError, match="left are none; gone: engine0 of boot-"):
            await roll(world, [3, 4], [5, 6], [7, 8])

    play(tmp_path, model, body)


def test_fewer_engines_than_declared_stop_the_stage(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[1].inject("/generate", faults.dies)
        with pytest.raises(StageError, match=r"must have 2 engine\(s\) .*, left are engine0; gone: engine1 of boot-"):
            await roll(world, *PROMPTS)
        with pytest.raises(
            StageError, match=r"needs 2 engines READY on .* got 1: engine0 is READY .*; engine1 is DEAD"
        ):
            await roll(world, *PROMPTS)

    play(tmp_path, model, body, engines=2, publish=Publish(min_engines=2))


def test_a_batch_opens_without_the_engine_that_died_since_its_publish(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        await fakes[0].die()
        out = await roll(world, *PROMPTS)
        assert set(out.table["engine"].to_pylist()) == {f"engine1/{fakes[1].boot}"}
        assert states(world) == {"engine0": "DEAD", "engine1": "READY"}

    play(tmp_path, model, body, engines=2)


@pytest.mark.parametrize("code", [503, 200], ids=["and then fails", "and then answers"])
def test_an_engine_that_somebody_took_out_loses_its_groups_and_keeps_its_state(
    tmp_path: Path, model: Path, code: int
) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        gone = fakes[0]
        if code != 200:
            gone.inject("/generate", faults.status(code), only=sample("g002-s01"))
        for fake in fakes:
            fake.hold_at = 0
        rolling = asyncio.create_task(roll(world, *PROMPTS))
        await until(lambda: len(fakes[1].running) == 4 and len(gone.running) >= 3)
        world.engines[0].ready_label = ""
        world.ledger.set_engine("engine0", gone.boot, "OUT", "", "")
        for fake in fakes:
            await fake.release()
        out = await rolling
        assert set(out.table["engine"].to_pylist()) == {f"engine1/{fakes[1].boot}"}
        assert states(world)["engine0"] == "OUT"

    play(tmp_path, model, body, engines=2)


@pytest.mark.parametrize("kv_policy", ["pin", "rebuild"])
def test_an_engine_that_somebody_restarted_loses_its_groups(tmp_path: Path, model: Path, kv_policy: Any) -> None:
    """A publisher gave it a new life, with another client; the one of this batch is closed under its requests."""

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.hold_at = 0
        rolling = asyncio.create_task(roll(world, *PROMPTS))
        await until(lambda: [len(fake.running) for fake in fakes] == [4, 4])
        world.engines[0].ready_label = ""
        world.ledger.set_engine("engine0", "boot-next", "COLD", "", "")
        await world.engines[0].close()
        await fakes[1].release()
        out = await rolling
        assert set(out.table["engine"].to_pylist()) == {f"engine1/{fakes[1].boot}"}
        assert out.table.num_rows == 8
        assert states(world)["engine0"] == "COLD"

    play(tmp_path, model, body, engines=2, settings=replace(SETTINGS, kv_policy=kv_policy))


def test_an_engine_that_answers_errors_but_lives_keeps_its_groups(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.status(500), times=None, only=sample("g002"))
        out = await roll(world, *PROMPTS)
        assert out.facts.dropped == {"i000001-g002": "rollout_unavailable"}
        assert not any("g002" in rid for rid in rids(fakes[1]))
        assert states(world) == {"engine0": "READY", "engine1": "READY"}

    play(tmp_path, model, body, engines=2)


# -- answers that come late, or to the wrong request


def test_a_late_answer_of_an_engine_that_was_given_up_is_not_admitted(tmp_path: Path, model: Path) -> None:
    """Its connections are still open when its groups are elsewhere, and then it answers."""

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        gone, left = fakes
        late = faults.Held()
        gone.inject("/generate", late, only=sample("g000-s00"))
        gone.inject("/generate", changes_boot, only=sample("g002-s01"))
        left.inject("/generate", (waits := faults.Held()), only=sample("g000-s01"))
        rolling = asyncio.create_task(roll(world, *PROMPTS))
        await until(lambda: late.reached and waits.reached)  # the group is on its way again elsewhere
        late.go_on.set()
        await until(lambda: not gone.running)
        waits.go_on.set()
        rows = (await rolling).table.to_pylist()
        assert {row["engine"] for row in rows} == {f"engine1/{left.boot}"}
        assert len({row["sample_id"] for row in rows}) == 8

    play(tmp_path, model, body, engines=2)


def test_the_answer_to_an_earlier_try_of_the_same_sample_is_not_admitted(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        late: list[bytes] = []
        fakes[0].inject("/generate", faults.kept(late), only=sample("s01"))
        fakes[0].inject("/generate", faults.another(late), only=sample("s01"))
        out = await roll(world, [3, 4])
        assert sum("s01" in rid for rid in rids(fakes[0])) == 3
        assert world.measured["rollout/retries"] == 2
        check_true(out.table.to_pylist())

    play(tmp_path, model, body)


def test_the_answer_to_a_batch_that_is_closed_is_not_admitted(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        late: list[bytes] = []
        fakes[0].inject("/generate", faults.kept(late), only=sample("s01"))
        await roll(world, [3, 4])
        fakes[0].inject("/generate", faults.another(late), only=sample("s01"))
        await roll(world, [3, 4])  # the same sample ids
        assert late == []
        assert world.measured["rollout/retries"] == 1

    play(tmp_path, model, body)


def test_answers_delivered_to_each_others_requests_are_not_admitted(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.swapped(), times=2)
        out = await roll(world, [3, 4], [5, 6])
        assert world.measured["rollout/retries"] == 2
        check_true(out.table.to_pylist())

    play(tmp_path, model, body)


def test_an_answer_of_a_server_that_took_the_place_is_not_admitted(tmp_path: Path, model: Path) -> None:
    """It came up with its base weights under its own label, on the port of the one that was proven."""

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        async def takes_the_place(call: Call) -> Any:
            call.engine._reset()
            return await call.proceed()

        fakes[0].inject("/generate", takes_the_place, only=sample("g002-s01"))
        out = await roll(world, *PROMPTS)
        assert set(out.table["engine"].to_pylist()) == {f"engine1/{fakes[1].boot}"}
        assert len(set(out.table["sample_id"].to_pylist())) == 8

    play(tmp_path, model, body, engines=2)
