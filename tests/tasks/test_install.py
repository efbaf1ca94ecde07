"""What follows when a publish fails at any step: real packages, engines that misbehave, publishers that die."""

import asyncio
import os
import re
import shutil
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from conf.errors import DataError, EngineError, PublishError
from data.package import Probe
from tasks.engines import install
from tasks.engines.client import Engine
from tasks.engines.commands import Stale
from tasks.engines.fleet import Restart
from tasks.publish import Published, Quarantined
from tests.crash_points import PUBLISHER
from tests.fakes import faults
from tests.fakes.context import until
from tests.fakes.engine import Behaviour, Call, FakeEngine
from tests.fakes.publishing import BASE, PROBE_IDS, SHARD, Publishing, client_of, updates

UPDATE = "/update_weights_from_disk"
ALL = "Q1 Q2 Q3 Q4 Q5 Q6 Q7 Q8 Q9 Q10 Q11"
WRONG_PROBE = Probe(PROBE_IDS, (-9.0, -9.0))

Deliveries = list[Callable[[], Awaitable[Any]]]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is not there at the first look is lost, unless a test says otherwise."""
    monkeypatch.setattr(install, "LATE_S", 0.0)
    monkeypatch.setattr(install, "POLL_S", 0.001)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "LATE_S", 30.0)


def play(root: Path, body: Callable[[Publishing], Coroutine[Any, Any, None]], **settings: Any) -> None:
    async def main() -> None:
        async with Publishing(root, **settings) as desk:
            await body(desk)

    asyncio.run(main())


def before(first: str, second: str) -> str:
    """The steps where an attempt failed at `first` and the next one began at `second`."""
    steps = ALL.split()
    return " ".join([*steps[: steps.index(first) + 1], "!", *steps[steps.index(second) :]])


async def assert_serves(desk: Publishing, package: Any, restarts: int, published: Published) -> None:
    """COMMITTED, and every engine in service READY for it, in the life its client knows, with its weights in memory."""
    label = package.manifest.label
    assert desk.state(package) == "COMMITTED"
    assert desk.visible() == [label] * len(desk.fleet)
    assert published.restarts == restarts
    for engine, row in zip(desk.fleet, [r for r in desk.ledger.engines() if r.state != "OUT"], strict=True):
        mark = await engine.mark()
        assert (row.state, row.boot, row.label, row.checksum) == ("READY", mark.boot, label, mark.checksum)
        assert (mark.boot, mark.label) == (engine.boot, label)
        assert await engine.ready()


def test_an_undisturbed_publish_asks_for_each_thing_once(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        package = desk.seal(1.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 0, published)
        assert desk.steps(package) == ALL
        assert updates(desk.fake) == [1]

    play(tmp_path, body)


# -- Q0: a damaged package never reaches an engine


def shard(folder: Path) -> Path:
    return folder / SHARD


def cut(path: Path, keep: Callable[[int], int]) -> None:
    os.truncate(path, keep(path.stat().st_size))


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "cut by a byte": (lambda new, old: cut(shard(new), lambda n: n - 1), f"{SHARD}: expected .* bytes"),
    "cut by half": (lambda new, old: cut(shard(new), lambda n: n // 2), f"{SHARD}: expected .* bytes"),
    "cut to nothing": (lambda new, old: cut(shard(new), lambda n: 0), f"{SHARD}: expected .* bytes, found 0"),
    "one bit flipped": (lambda new, old: flip(shard(new)), f"{SHARD}: expected SHA-256"),
    "the shard of another version": (lambda new, old: shutil.copyfile(shard(old), shard(new)), f"{SHARD}: expected"),
    "index of other files": (
        lambda new, old: (new / "model.safetensors.index.json").write_text('{"weight_map": {"model.w.weight": "x"}}'),
        "model.safetensors.index.json: expected",
    ),
    "extra .bin": (lambda new, old: (new / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin: not in the"),
    "extra .py": (lambda new, old: (new / "modeling_x.py").write_text("x"), "modeling_x.py: not in the list"),
    "shard gone": (lambda new, old: shard(new).unlink(), f"{SHARD}: missing"),
    "folder gone": (lambda new, old: shutil.rmtree(new), "expected a folder"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_version_is_quarantined_and_no_engine_hears_of_it(tmp_path: Path, damage: str) -> None:
    change, message = DAMAGE[damage]

    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        new = desk.seal(2.0)
        new.folder.chmod(0o755)
        for path in new.folder.iterdir():
            path.chmod(0o644)
        change(new.folder, old.folder)
        with pytest.raises(Quarantined, match=f"step Q0: .*{message}.*; the version is quarantined"):
            await desk.publish(new)
        assert (desk.state(old), desk.state(new)) == ("COMMITTED", "QUARANTINED")
        assert desk.fake.calls == []
        assert desk.visible() == [old.manifest.label]
        with pytest.raises(PublishError, match="must be sealed with this content, the ledger has QUARANTINED"):
            await desk.publish(new)  # never try and see

    play(tmp_path, body)


# -- Q2: no answer in time


@pytest.mark.parametrize("fault", [faults.reset, faults.hang], ids=["connection lost", "deadline"])
def test_after_a_pause_without_an_answer_the_barrier_decides_and_the_engine_is_drained_again(
    tmp_path: Path, fault: Behaviour
) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject("/pause_generation", fault)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 0, published)
        assert desk.steps(package) == before("Q2", "Q1")
        routes = [route for route, _ in desk.fake.calls]
        first = routes.index("/pause_generation")
        assert "/weights_checker" in routes[first : routes.index("/pause_generation", first + 1)]

    play(tmp_path, body, timeout_s=2.0)


@pytest.mark.parametrize("barrier", [True, False], ids=["it answers otherwise", "it is deaf"])
def test_an_engine_whose_pause_never_returns_is_restarted(tmp_path: Path, barrier: bool) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        boot = desk.fake.boot
        desk.fake.inject("/pause_generation", faults.reset, times=None, only=lambda _: desk.fake.boot == boot)
        if not barrier:
            desk.fake.inject("/weights_checker", faults.reset, times=None, only=lambda _: desk.fake.boot == boot)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 1, published)
        assert desk.steps(package) == "Q1 Q2 ! " * (2 if barrier else 1) + ALL
        assert updates(desk.fake) == [0, 1]

    play(tmp_path, body)


# -- Q4: the update


@pytest.mark.parametrize(
    "fault",
    [faults.not_flushed, faults.status(400), faults.changes_but_says_400, faults.status(503), faults.ignored],
    ids=["cache not flushed", "400", "400 that did change", "503", "200 and nothing done"],
)
def test_an_update_that_is_refused_once_is_given_again_after_a_new_drain(tmp_path: Path, fault: Behaviour) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject(UPDATE, fault)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 0, published)
        failed = desk.failures(package)[0].step
        assert failed == ("Q6" if fault is faults.ignored else "Q4")
        assert desk.steps(package) == before(failed, "Q1")
        assert updates(desk.fake) == [2]

    play(tmp_path, body)


def test_where_the_cache_is_never_flushed_the_engine_ends_with_new_weights_under_the_old_label_and_no_work(
    tmp_path: Path,
) -> None:
    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        weights = desk.fake.ranks[0]
        desk.fake.inject(UPDATE, faults.not_flushed, times=None)
        with pytest.raises(PublishError, match=r"step Q4: .*Weights were updated, but the cache was not flushed"):
            await desk.publish(desk.seal(2.0))
        assert (desk.fake.label, desk.fake.ranks[0] == weights) == (old.manifest.label, False)
        assert desk.engine_states() == [("DIRTY", old.manifest.label)]
        assert desk.visible() == [""]

    play(tmp_path, body, max_restarts=0)


def test_an_update_that_is_refused_twice_restarts_the_engine(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject(UPDATE, faults.status(400), times=2)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 1, published)
        assert updates(desk.fake) == [2, 1]

    play(tmp_path, body)


def test_an_engine_that_dies_of_the_update_is_restarted_and_gets_it_once_more(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject(UPDATE, faults.dies)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 1, published)
        assert desk.steps(package) == before("Q4", "Q1")
        assert updates(desk.fake) == [1, 1]

    play(tmp_path, body)


def test_an_engine_that_always_dies_is_out_after_the_cap(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject(UPDATE, faults.dies, times=None)
        package = desk.seal(2.0)
        with pytest.raises(PublishError, match=r"step Q4: .*engine0") as caught:
            await desk.publish(package)
        assert caught.value.__notes__ == ["0 of 1 engines are proven, publish.min_engines is 1"]
        assert updates(desk.fake) == [1, 1, 1]  # two restarts
        assert (desk.state(package), desk.visible()) == ("PUBLISHING", [""])

    play(tmp_path, body, max_restarts=2)


def test_a_restart_that_fails_counts_and_the_pause_before_each_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, sleep = [], asyncio.sleep

    async def at_once(delay: float) -> None:
        if delay >= 1:
            pauses.append(delay)
        await sleep(0)

    def cannot_start(fake: FakeEngine) -> Restart:
        async def again(engine: Engine) -> Engine:
            raise EngineError("engine0 ended with status 1; the end of its log: out of memory")

        return again

    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        await desk.fleet.close()
        desk.connect(cannot_start)
        desk.fake.inject(UPDATE, faults.dies)
        package = desk.seal(2.0)
        monkeypatch.setattr(asyncio, "sleep", at_once)
        with pytest.raises(PublishError, match="step Q4: ") as caught:
            await desk.publish(package)
        monkeypatch.undo()
        assert caught.value.__notes__[:3] == [
            f"restart {i}: engine0 ended with status 1; the end of its log: out of memory" for i in (1, 2, 3)
        ]
        assert pauses == [2.0, 4.0, 8.0]
        assert [row.state for row in desk.ledger.engines()] == ["DEAD"]

    play(tmp_path, body, max_restarts=3, restart_backoff_s=2.0)


def test_an_update_whose_answer_was_lost_is_found_applied_and_not_sent_again(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject(UPDATE, faults.reset_after)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 0, published)
        assert desk.steps(package) == before("Q4", "Q5")
        assert updates(desk.fake) == [1]

    play(tmp_path, body)


@pytest.mark.parametrize("route", ["/weights_checker", "/model_info"], ids=["before the barrier", "after the barrier"])
@pytest.mark.usefixtures("patient")
def test_an_update_that_is_applied_later_is_waited_for_and_not_sent_again(tmp_path: Path, route: str) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        under_way: Deliveries = []
        desk.fake.inject(UPDATE, faults.lost(under_way))
        desk.fake.inject(route, faults.delivers(under_way), times=None)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 0, published)
        assert desk.steps(package) == before("Q4", "Q5")
        assert updates(desk.fake) == [1]

    play(tmp_path, body)


@pytest.mark.parametrize("fault", [faults.reset, faults.hang], ids=["connection lost", "deadline"])
def test_an_update_that_never_comes_restarts_the_engine_and_is_not_sent_twice_to_one_life(
    tmp_path: Path, fault: Behaviour
) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject(UPDATE, fault)
        package = desk.seal(2.0)
        published = await desk.publish(package)
        await assert_serves(desk, package, 1, published)
        assert desk.steps(package) == before("Q4", "Q1")
        assert updates(desk.fake) == [1, 1]

    play(tmp_path, body, timeout_s=2.0)


# -- Q6 to Q10: the engine is wrong


def shifted(content: dict[str, Any]) -> None:
    content["meta_info"]["input_token_logprobs"][1][0] -= 0.5


def cached(content: dict[str, Any]) -> None:
    content["meta_info"]["cached_tokens"] = 2


def other_value(content: Any) -> None:
    content[0][0] += 1.0


def first_request(body: dict[str, Any]) -> bool:
    return str(body["rid"]).endswith("-g")


def any_request(body: dict[str, Any]) -> bool:
    return True


def scoring(body: dict[str, Any]) -> bool:
    return not first_request(body)


OTHER = "000009-0123456789ab"
WRONG: dict[str, tuple[str, str, Behaviour, Callable[[dict[str, Any]], bool]]] = {
    "Q6: old weights on one of two ranks": ("Q6", UPDATE, faults.keeps_old_weights(1), any_request),
    "Q7: another value": ("Q7", "/get_weights_by_name", faults.edit(other_value), any_request),
    "Q7: no such tensor": ("Q7", "/get_weights_by_name", faults.status(400), any_request),
    "Q8: label": ("Q8", UPDATE, faults.keeps_old_label, any_request),
    "Q8: path": ("Q8", UPDATE, faults.from_elsewhere, any_request),
    "Q9: continue lost": ("Q9", "/continue_generation", faults.ignored, any_request),
    "Q10: spans": ("Q10", "/generate", faults.spans(OTHER), first_request),
    "Q10: cached tokens": ("Q10", "/generate", faults.edit(cached), first_request),
    "Q10: log-probabilities": ("Q10", "/generate", faults.edit(shifted), scoring),
}


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_engine_gets_the_version_again_then_a_new_life_and_then_the_version_is_bad(
    tmp_path: Path, wrong: str, times: int
) -> None:
    steps, route, fault, only = WRONG[wrong]
    failed = (steps.split() * 3)[:times]

    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        desk.fake.inject(route, fault, times=times, only=only)
        new = desk.seal(2.0)
        if times < 3:
            published = await desk.publish(new)
            await assert_serves(desk, new, times - 1, published)
            assert updates(desk.fake) == [[2], [2, 1]][times - 1]
        else:
            message = rf"step {failed[-1]}: .*quarantined; the engines serve {old.folder.name}"
            with pytest.raises(Quarantined, match=message):
                await desk.publish(new)
            assert (desk.state(old), desk.state(new)) == ("COMMITTED", "QUARANTINED")
            assert desk.engine_states() == [("READY", old.manifest.label)]
            assert desk.visible() == [old.manifest.label]
            assert updates(desk.fake) == [2, 2]  # one of the new version on the fresh engine, one of the old
        assert [row.step for row in desk.failures(new)] == failed

    play(tmp_path, body, ranks=2)


def test_a_label_that_nobody_of_us_set_is_not_overwritten_but_costs_the_engine_its_life(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.fake.inject(UPDATE, faults.under_label(OTHER))
        new = desk.seal(2.0)
        await assert_serves(desk, new, 1, await desk.publish(new))
        assert [row.step for row in desk.failures(new)] == ["Q8", "Q3"]
        assert updates(desk.fake) == [1, 1]

    play(tmp_path, body)


def test_a_version_that_is_wrong_on_all_engines_is_bad_and_all_serve_the_one_before_again(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        new = desk.seal(2.0, probe=WRONG_PROBE)
        with pytest.raises(Quarantined, match=r"step Q10: .*all 2 engine\(s\) disagree"):
            await desk.publish(new)
        assert (desk.state(old), desk.state(new)) == ("COMMITTED", "QUARANTINED")
        assert desk.visible() == [old.manifest.label] * 2
        assert desk.engine_states() == [("READY", old.manifest.label)] * 2
        again = desk.seal(2.0)  # its content, under a new number and with the right probe
        await assert_serves(desk, again, 0, await desk.publish(again))

    play(tmp_path, body, engines=2)


def test_a_first_version_that_is_wrong_leaves_no_engine_with_work(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        new = desk.seal(2.0, probe=WRONG_PROBE)
        with pytest.raises(Quarantined, match=rf"so {new.manifest.label} is quarantined$"):
            await desk.publish(new)
        assert (desk.state(new), desk.visible()) == ("QUARANTINED", [""])

    play(tmp_path, body)


def test_an_engine_that_is_broken_costs_no_committed_version(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        versions = [await desk.published(value) for value in (1.0, 2.0)]
        desk.fake.inject("/generate", faults.edit(shifted), times=None, only=scoring)
        new, label = desk.seal(3.0), versions[1].manifest.label
        with pytest.raises(Quarantined, match=f"; {label} did not come back either: engine0, {label}: mean"):
            await desk.publish(new)
        assert [desk.state(v) for v in (*versions, new)] == ["COMMITTED", "COMMITTED", "QUARANTINED"]
        assert desk.visible() == [""]
        with pytest.raises(PublishError, match="step Q10: ") as caught:
            await desk.publish(versions[1])  # as at the start of a run
        assert not isinstance(caught.value, Quarantined)
        assert desk.state(versions[1]) == "COMMITTED"
        desk.fake.faults.clear()
        await assert_serves(desk, versions[1], 0, await desk.publish(versions[1]))

    play(tmp_path, body)


def test_an_engine_that_somebody_else_took_says_nothing_against_the_version(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        desk.connect(restartable=False)
        await desk.engine.update_weights(str(old.folder), OTHER, 60)
        new = desk.seal(2.0)
        with pytest.raises(PublishError, match=f"step Q3: .*expected {old.manifest.label}, found {OTHER}: somebody"):
            await desk.publish(new)
        assert desk.state(new) == "PUBLISHING"
        assert desk.visible() == [""]
        desk.connect()  # one that can be restarted is taken back
        await assert_serves(desk, new, 1, await desk.publish(new))

    play(tmp_path, body)


# -- min_engines, and one of two engines that dies


def dies_at(desk: Publishing, fake: FakeEngine, name: str, step: str) -> None:
    """The engine dies at its first request after that step began; and nothing is ever visible too early."""
    armed: list[bool] = []
    journal = desk.ledger.journal
    newest = len(desk.ledger.versions()) - 1

    def watched(number: int, attempt: int, engine: str, at: str, detail: str) -> None:
        journal(number, attempt, engine, at, detail)
        if (engine, at) == (name, step) and number == newest and not armed:
            armed.append(True)
        label = desk.ledger.version(newest).ref.label
        assert desk.ledger.version(newest).state == "COMMITTED" or label not in desk.visible()

    desk.ledger.journal = watched  # type: ignore[method-assign]

    async def dies(call: Call) -> Any:
        armed[0] = False
        return await faults.dies(call)

    questions = ["/v1/loads", "/server_info", "/model_info", "/weights_checker", "/get_weights_by_name", "/ready"]
    for route in (*questions, "/pause_generation", "/flush_cache", UPDATE, "/continue_generation", "/generate"):
        fake.inject(route, dies, times=None, only=lambda _: armed == [True])


@pytest.mark.parametrize("restartable", [True, False])
@pytest.mark.parametrize("step", ALL.split()[:-1])
def test_when_one_of_two_engines_dies_at_any_step_all_that_are_left_become_visible_at_once(
    tmp_path: Path, step: str, restartable: bool
) -> None:
    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        desk.connect(restartable=restartable)
        new = desk.seal(2.0)
        dies_at(desk, desk.fakes[1], "engine1", step)
        published = await desk.publish(new)
        await assert_serves(desk, new, 1 if restartable else 0, published)
        ready, out = ("READY", new.manifest.label), ("OUT", old.manifest.label)
        assert desk.engine_states() == [ready, ready if restartable else out]
        assert (len(desk.fleet), published.engines_out) == ((2, 0) if restartable else (1, 1))

    play(tmp_path, body, engines=2)


@pytest.mark.parametrize("step", ["Q2", "Q4", "Q10"])
def test_with_fewer_engines_than_declared_none_becomes_visible(tmp_path: Path, step: str) -> None:
    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        desk.connect(restartable=False)
        new = desk.seal(2.0)
        dies_at(desk, desk.fakes[1], "engine1", step)
        with pytest.raises(PublishError, match=f"step {step}: .*engine1") as caught:
            await desk.publish(new)
        assert "1 of 2 engines are proven, publish.min_engines is 2" in caught.value.__notes__
        assert (desk.state(old), desk.state(new)) == ("COMMITTED", "PUBLISHING")
        assert desk.visible() == ["", ""]
        await desk.fakes[1].restart()
        desk.connect()
        await assert_serves(desk, new, 0, await desk.publish(new))

    play(tmp_path, body, engines=2, min_engines=2)


# -- restarts that nobody asked for


def next_life(fake: FakeEngine) -> Restart:
    """An external engine: whoever runs it has restarted it."""

    async def again(engine: Engine) -> Engine:
        return client_of(fake, engine.name)

    return again


AFTER = {
    "the update": (UPDATE, any_request, "Q7"),
    "the checksums": ("/weights_checker", any_request, "Q7"),
    "continue": ("/continue_generation", any_request, "Q10"),
    "the first answer": ("/generate", first_request, "Q10"),
}


@pytest.mark.parametrize("moment", AFTER)
def test_an_engine_restarted_between_verify_and_ready_is_brought_to_the_version_in_its_new_life(
    tmp_path: Path, moment: str
) -> None:
    route, only, step = AFTER[moment]

    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.connect(next_life)
        desk.fake.inject(route, faults.restarts_after, only=only)
        new = desk.seal(2.0)
        await assert_serves(desk, new, 1, await desk.publish(new))
        assert [row.step for row in desk.failures(new)] == [step]

    play(tmp_path, body)


def test_an_engine_restarted_after_its_proof_is_seen_by_its_mark_and_proven_again(tmp_path: Path) -> None:
    """Nobody can see it before the commit; the bracket of the next batch does (tests/tasks/test_rollout.py)."""

    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        desk.connect(next_life)
        desk.fake.inject("/generate", faults.restarts_after, only=scoring)
        new = desk.seal(2.0)
        await desk.publish(new)
        (row,), mark = desk.ledger.engines(), await desk.engine.mark()
        assert (row.state, row.boot) == ("READY", desk.engine.boot)
        assert (mark.boot, mark.label) == (desk.fake.boot, desk.fake.boot)
        assert mark.boot != row.boot
        await assert_serves(desk, new, 1, await desk.publish(new))

    play(tmp_path, body)


@pytest.mark.parametrize(("policy", "found"), [("rebuild", ["Q3"]), ("pin", [])])
def test_where_requests_go_on_over_an_update_weights_changed_since_their_proof_are_seen_before_it(
    tmp_path: Path, policy: Literal["pin", "rebuild"], found: list[str]
) -> None:
    """Under `pin` no request goes on, and the batch's own bracket sees it."""

    async def body(desk: Publishing) -> None:
        desk.experiment = replace(desk.experiment, rollout=replace(desk.experiment.rollout, kv_policy=policy))
        await desk.published(1.0)
        desk.fake.ranks = [dict(BASE)]
        new = desk.seal(2.0)
        await assert_serves(desk, new, 0, await desk.publish(new))
        failures = desk.failures(new)
        assert [row.step for row in failures] == found
        assert all("checksum before the update" in row.detail for row in failures)

    play(tmp_path, body)


# -- the publisher dies


# Updates that the engine got in all: one that died before it sent Q4, or after the commit, costs none.
KILLED = dict(zip(PUBLISHER, [1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 1], strict=True))


@pytest.mark.parametrize("point", KILLED)
def test_a_publisher_killed_at_any_step_is_followed_by_one_that_ends_with_the_same_number(
    tmp_path: Path, point: str
) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        new = desk.seal(2.0)
        assert await desk.killed_at(new, point) == -signal.SIGKILL
        assert desk.state(new) == ("COMMITTED" if point.endswith("committed") else "PUBLISHING")
        await desk.follow()
        assert desk.ledger.leases() == {}
        await assert_serves(desk, new, 0, await desk.publish(new))
        assert len(desk.ledger.versions()) == 2
        assert updates(desk.fake) == [KILLED[point]]

    play(tmp_path, body)


def kills_the_publisher(desk: Publishing, deliveries: Deliveries) -> Behaviour:
    """The update came, and goes on after the process that sent it is gone."""

    async def answer(call: Call) -> Any:
        deliveries.append(call.proceed)
        os.kill(desk.pid, signal.SIGKILL)
        return await faults.hang(call)

    return answer


@pytest.mark.parametrize("route", ["/weights_checker", "/model_info"], ids=["before the barrier", "after the barrier"])
@pytest.mark.usefixtures("patient")
def test_an_update_that_outlives_its_publisher_is_waited_for_and_not_sent_again(tmp_path: Path, route: str) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        new = desk.seal(2.0)
        under_way: Deliveries = []
        desk.fake.inject(UPDATE, kills_the_publisher(desk, under_way))
        assert await desk.killed_at(new) == -signal.SIGKILL
        await desk.follow()
        desk.fake.inject(route, faults.delivers(under_way), times=None)
        await assert_serves(desk, new, 0, await desk.publish(new))
        assert updates(desk.fake) == [1]

    play(tmp_path, body)


@pytest.mark.usefixtures("patient")
def test_a_roll_back_waits_for_the_newer_version_that_is_half_installed(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        new = desk.seal(2.0)
        under_way: Deliveries = []
        desk.fake.inject(UPDATE, kills_the_publisher(desk, under_way))
        assert await desk.killed_at(new) == -signal.SIGKILL
        await desk.follow()
        back = desk.seal(1.0, rollback_of=0)
        loaded: list[str] = []

        async def watched(call: Call) -> Any:
            assert under_way == []  # the other one is over
            loaded.append(call.engine.label)
            return await call.proceed()

        desk.fake.inject("/weights_checker", faults.delivers(under_way))
        desk.fake.inject(UPDATE, watched)
        await assert_serves(desk, back, 0, await desk.publish(back))
        assert loaded == [new.manifest.label]
        assert back.manifest.content == old.manifest.content
        assert back.manifest.label != old.manifest.label
        calls = len(desk.fake.calls)
        with pytest.raises(PublishError, match=f"{new.manifest.label} is older than {back.manifest.label}, which is"):
            await desk.publish(new)
        assert len(desk.fake.calls) == calls

    play(tmp_path, body)


@pytest.mark.usefixtures("patient")
def test_a_publish_cancelled_in_mid_update_leaves_it_to_the_next_one_which_waits(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        new = desk.seal(2.0)
        under_way: Deliveries = []
        desk.fake.inject(UPDATE, faults.late(under_way))
        first = asyncio.create_task(desk.publish(new))
        await until(lambda: bool(under_way))
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        assert desk.visible() == [""]
        assert desk.ledger.leases() == {}
        desk.fake.inject("/weights_checker", faults.delivers(under_way))
        await assert_serves(desk, new, 0, await desk.publish(new))
        assert updates(desk.fake) == [1]

    play(tmp_path, body)


@pytest.mark.usefixtures("patient")
def test_a_publish_cancelled_while_it_waits_for_an_update_leaves_the_waiting_to_the_next_one(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        new = desk.seal(2.0)
        under_way: Deliveries = []
        desk.fake.inject(UPDATE, faults.lost(under_way))
        desk.fake.inject("/weights_checker", faults.hang)
        first = asyncio.create_task(desk.publish(new))
        await until(lambda: bool(desk.fake.routed("/weights_checker")))
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        assert [row.state for row in desk.ledger.engines()] == ["DIRTY"]
        desk.fake.inject("/weights_checker", faults.delivers(under_way))
        await assert_serves(desk, new, 0, await desk.publish(new))
        assert updates(desk.fake) == [1]

    play(tmp_path, body)


@pytest.mark.parametrize("fault", [faults.status(400), faults.keeps_old_weights(0)], ids=["refused", "kept the old"])
@pytest.mark.usefixtures("patient")
def test_an_update_that_was_answered_is_not_waited_for(tmp_path: Path, fault: Behaviour) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        new = desk.seal(2.0)
        desk.connect(restartable=False)
        desk.fake.inject(UPDATE, fault, times=2)
        desk.fakes[1].inject(UPDATE, faults.dies)  # so that the version is not taken for bad
        with pytest.raises(PublishError, match=r"step Q[46]: "):
            await desk.publish(new)
        await desk.fakes[1].restart()
        desk.fake.calls.clear()
        desk.connect()
        await assert_serves(desk, new, 0, await desk.publish(new))
        routes = [route for route, _ in desk.fake.calls]
        assert "/weights_checker" not in routes[: routes.index("/pause_generation")]

    play(tmp_path, body, engines=2)


# -- repeated, late and doubled publishes


def test_the_same_publish_again_changes_nothing(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        package = await desk.published(1.0)
        await assert_serves(desk, package, 0, await desk.publish(package))
        assert updates(desk.fake) == [0]
        assert desk.steps(package) == f"{ALL} Q11"

    play(tmp_path, body)


def one_at_a_time(desk: Publishing) -> None:
    """Fails the test where two commands are under way on one engine at once."""
    running: list[str] = []

    def exclusive(route: str) -> Behaviour:
        async def answer(call: Call) -> Any:
            assert running == [], f"{route} came beside {running}"
            running.append(route)
            try:
                for _ in range(20):
                    await asyncio.sleep(0)
                return await call.proceed()
            finally:
                running.clear()

        return answer

    for route in ("/pause_generation", "/flush_cache", UPDATE, "/continue_generation"):
        desk.fake.inject(route, exclusive(route), times=None)


def test_two_publishes_of_one_version_at_once_never_have_two_commands_under_way(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        one_at_a_time(desk)
        new = desk.seal(2.0)
        results = await asyncio.gather(*(desk.publish(new) for _ in range(3)), return_exceptions=True)
        assert {type(result) for result in results} <= {Published, Stale}
        last = next(result for result in results if isinstance(result, Published))
        await assert_serves(desk, new, 0, last)

    play(tmp_path, body)


def test_of_two_versions_published_at_once_one_has_the_engine_and_the_other_is_stale(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        await desk.published(1.0)
        one_at_a_time(desk)
        versions = [desk.seal(2.0), desk.seal(3.0)]
        results = await asyncio.gather(*(desk.publish(v) for v in versions), return_exceptions=True)
        won = [i for i, result in enumerate(results) if isinstance(result, Published)]
        assert [type(results[i]) for i in (0, 1) if i not in won] == [Stale] * (2 - len(won))
        published = results[won[-1]]
        assert isinstance(published, Published)
        await assert_serves(desk, versions[won[-1]], 0, published)

    play(tmp_path, body)


def test_an_older_version_that_comes_late_is_refused_before_an_engine_is_asked(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        late = desk.seal(1.0)
        newer = await desk.published(2.0)
        with pytest.raises(PublishError, match=f"Q0: version {late.folder.name} is older than {newer.folder.name}"):
            await desk.publish(late)
        assert desk.fake.calls == []
        assert desk.visible() == [newer.manifest.label]

    play(tmp_path, body)


# -- the counter is lost; clean-up while an engine loads


def test_a_ledger_restored_from_an_old_backup_gives_no_label_a_second_content(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        old = await desk.published(1.0)
        desk.ledger.close()
        shutil.copy(tmp_path / "ledger.sqlite", tmp_path / "backup")
        desk.open_ledger()
        new = await desk.published(2.0)
        desk.ledger.close()
        for left in tmp_path.glob("ledger.sqlite-*"):
            left.unlink()
        shutil.copy(tmp_path / "backup", tmp_path / "ledger.sqlite")
        desk.open_ledger()
        with pytest.raises(PublishError, match=f"step P5: version 1 is sealed already as {new.folder.name}, now as"):
            desk.seal(3.0)
        desk.ledger.set_version(1, "ABANDONED")
        # An engine that is ahead of the ledger is not taken for one that serves its version.
        desk.connect(restartable=False)
        with pytest.raises(PublishError, match=f"step Q3: .*expected {old.folder.name}, found {new.folder.name}: some"):
            await desk.publish(old)
        assert (desk.state(old), desk.visible()) == ("COMMITTED", [""])
        desk.connect()
        await assert_serves(desk, old, 1, await desk.publish(old))
        third = desk.seal(3.0)
        assert third.manifest.number == 2
        await assert_serves(desk, third, 0, await desk.publish(third))

    play(tmp_path, body)


def test_a_version_is_leased_while_an_engine_loads_it_so_that_nobody_deletes_it(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        package = await desk.published(1.0)
        await desk.fake.restart()
        desk.connect()
        tried: list[str] = []

        async def clean_up(call: Call) -> Any:
            desk.ledger.set_version(0, "RETIRED")
            with pytest.raises(DataError, match="version 0 is leased by publish and cannot be deleted"):
                desk.ledger.set_version(0, "DELETED")
            tried.append(call.body["weight_version"])
            return await call.proceed()

        desk.fake.inject(UPDATE, clean_up)
        with pytest.raises(DataError, match="RETIRED and cannot become COMMITTED"):
            await desk.publish(package)
        assert tried == [package.manifest.label]
        assert package.folder.exists()
        assert desk.ledger.leases() == {}

    play(tmp_path, body)


def test_the_lease_ends_also_where_the_publish_fails(tmp_path: Path) -> None:
    async def body(desk: Publishing) -> None:
        desk.fake.inject(UPDATE, faults.dies)
        desk.connect(restartable=False)
        with pytest.raises(PublishError, match=re.escape("engine0 cannot be restarted from here")) as caught:
            await desk.publish(desk.seal(1.0))
        assert caught.value.__notes__
        assert desk.ledger.leases() == {}

    play(tmp_path, body)
