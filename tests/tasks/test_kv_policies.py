"""What a version that is published in mid-batch does to the responses under way, under pin, rebuild and keep."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import EngineError, StageError
from data.refs import PolicyRef
from data.rows import check_rollout
from tasks.engines.client import Generation, Sampling, Span
from tasks.generation import bracket
from tasks.generation.request import joined, reprefilled, without_last
from tasks.rollout import generate_batch
from tasks.stage import Rows
from tests.fakes import faults
from tests.fakes.context import World, make_world, new_version, prompt_rows, save_tokenizer, until
from tests.fakes.engine import FakeEngine
from tests.fakes.publishing import Publishing
from tests.fakes.rollouts import SETTINGS, play, rids, roll, sample
from tests.fakes.toy_model import BASE, Tensor, Weights, content_of, read_weights, toy_logprob, write_package

REBUILD = replace(SETTINGS, kv_policy="rebuild")
KEEP = replace(SETTINGS, kv_policy="keep", accept_stale_kv=True)
OTHER = "000099-aaaaaaaaaaaa"


pytestmark = pytest.mark.usefixtures("retry_at_once")


async def roll_across(
    world: World, fake: FakeEngine, package: Path, mode: Any, *prompts: list[int], tokens: int = 1
) -> tuple[Any, PolicyRef]:
    """The rollout of these prompts, and the version that is published when every request has so many tokens."""
    fake.hold_at = tokens
    rolling = asyncio.create_task(roll(world, *prompts))
    in_flight = min(2 * len(prompts), world.context.experiment.rollout.max_in_flight)
    await until(lambda: sum(len(running.ids) == tokens for running in fake.running.values()) == in_flight)
    new = await world.update(package, mode)
    await fake.release()
    return await rolling, new


def true_logprobs(row: dict[str, Any], weights: dict[str, Weights]) -> list[float]:
    """Each token's under the weights of its span's label."""
    ids, found = row["response_ids"], []
    for span in row["version_spans"]:
        content = content_of(weights[span["label"]])
        tokens = range(span["start"], span["end"])
        found += [toy_logprob(content, [*row["prompt_ids"], *ids[:i]], ids[i]) for i in tokens]
    return found


def test_rebuild_gives_a_span_for_each_version_with_log_probabilities_under_its_own_weights(
    tmp_path: Path, model: Path
) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        old = world.context.policy
        out, new = await roll_across(world, fakes[0], package, "retract", [3, 4, 5], [6, 7])
        check_rollout(out.table, 2)
        rows = out.table.to_pylist()
        weights = {old.label: BASE, new.label: read_weights(package)}
        for row in rows:
            assert row["version_spans"] == [
                {"label": old.label, "start": 0, "end": 1},
                {"label": new.label, "start": 1, "end": 4},
            ]
            assert row["behavior_logprobs"] == pytest.approx(true_logprobs(row, weights), abs=1e-6)
            assert row["policy_version"] == old.number
        assert out.facts.policy_versions == {old.label: 4, new.label: 12}
        assert out.facts.sampling["kv_policy"] == "rebuild"
        assert (out.facts.metrics["rollout/lag_mean"], out.facts.metrics["rollout/lag_max"]) == (1.0, 1.0)
        # prompt and first token again: 2 x (3 + 1) + 2 x (2 + 1)
        assert world.measured["rollout/reprefilled_tokens"] == 14
        assert (world.measured["rollout/aborted"], world.measured["rollout/retries"]) == (0, 0)
        ref = world.context.store.commit_rows(1, "rollout", out.table, key="sample_id", facts=out.facts)
        assert ref.versions == (old.label, new.label)

    play(tmp_path, model, body, settings=REBUILD)


def test_what_is_sent_after_the_update_asks_for_kv_of_the_new_version_and_is_its_own(
    tmp_path: Path, model: Path
) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        old = world.context.policy
        out, new = await roll_across(world, fakes[0], package, "retract", [3, 4], [5, 6])
        keys = {body["rid"][8:12]: body["extra_key"] for body in fakes[0].routed("/generate")}
        assert keys == {"g000": old.label, "g001": new.label}
        assert out.table["policy_version"].to_pylist() == [old.number] * 2 + [new.number] * 2
        assert (out.facts.metrics["rollout/lag_mean"], out.facts.metrics["rollout/lag_max"]) == (0.5, 1.0)

    play(tmp_path, model, body, settings=replace(REBUILD, max_in_flight=2))


def test_pin_admits_no_response_that_ran_across_an_update(tmp_path: Path, model: Path) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        with pytest.raises(
            StageError, match=r"every token must come from 000000-3f9a1c0b7d21 \(rollout.kv_policy: pin"
        ):
            await roll_across(world, fakes[0], package, "retract", [3, 4])

    play(tmp_path, model, body)


def test_keep_is_said_in_the_metadata_and_its_log_probabilities_are_no_versions(tmp_path: Path, model: Path) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        out, new = await roll_across(world, fakes[0], package, "in_place", [3, 4])
        assert out.facts.sampling["kv_policy"] == "keep"
        weights = {world.context.policy.label: BASE, new.label: read_weights(package)}
        row = out.table.to_pylist()[0]
        truth = true_logprobs(row, weights)
        assert row["behavior_logprobs"][0] == pytest.approx(truth[0], abs=1e-6)
        assert row["behavior_logprobs"][1:] != pytest.approx(truth[1:], abs=1e-6)
        assert world.measured["rollout/reprefilled_tokens"] == 0

    play(tmp_path, model, body, settings=KEEP)


# -- what the engine cuts off


def test_under_rebuild_a_partial_answer_is_continued_with_the_budget_that_is_left(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fake = fakes[0]
        fake.response_tokens = 20
        fake.inject("/generate", faults.aborted(4), only=sample("s01"))
        out = await roll(world, [3, 4])
        row = out.table.to_pylist()[1]
        first, second = [body for body in fake.routed("/generate") if "s01" in body["rid"]]
        # three of the four tokens: the last one may be an end that the engine did not look at
        assert (first["input_ids"], second["input_ids"]) == ([3, 4], [3, 4, *row["response_ids"][:3]])
        assert [b["sampling_params"]["max_new_tokens"] for b in (first, second)] == [8, 5]
        assert first["rid"] != second["rid"]
        assert (len(row["response_ids"]), row["finish_reason"]) == (8, "length")
        assert row["version_spans"] == [{"label": world.context.policy.label, "start": 0, "end": 8}]
        truth = true_logprobs(row, {world.context.policy.label: BASE})
        assert row["behavior_logprobs"] == pytest.approx(truth, abs=1e-6)
        assert (world.measured["rollout/aborted"], world.measured["rollout/retries"]) == (1, 1)
        # of prompt + 3 tokens sent again the cache still had the prompt
        assert world.measured["rollout/reprefilled_tokens"] == 3
        assert world.discarded(out.table) == {"i000001-g000": 1}
        check_rollout(out.table, 2)

    play(tmp_path, model, body, settings=REBUILD)


def test_under_rebuild_what_an_update_cut_off_goes_on_under_the_new_version(tmp_path: Path, model: Path) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        old = world.context.policy
        out, new = await roll_across(world, fakes[0], package, "abort", [3, 4], tokens=3)
        for row in out.table.to_pylist():
            assert [(s["label"], s["start"], s["end"]) for s in row["version_spans"]] == [
                (old.label, 0, 2),
                (new.label, 2, 6),
            ]
            truth = true_logprobs(row, {old.label: BASE, new.label: read_weights(package)})
            assert row["behavior_logprobs"] == pytest.approx(truth, abs=1e-6)
        continued = fakes[0].routed("/generate")[2:]
        assert {body["extra_key"] for body in continued} == {new.label}
        assert world.measured["rollout/aborted"] == 2
        # prompt and two tokens again for the first; the second finds the prompt in the cache
        assert world.measured["rollout/reprefilled_tokens"] == 4 + 2

    play(tmp_path, model, body, settings=REBUILD)


def test_under_pin_an_aborted_answer_is_asked_for_again_whole(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.aborted(3), only=sample("s01"))
        out = await roll(world, [3, 4])
        sent = [body for body in fakes[0].routed("/generate") if "s01" in body["rid"]]
        assert [body["input_ids"] for body in sent] == [[3, 4]] * 2
        assert [body["sampling_params"]["max_new_tokens"] for body in sent] == [8] * 2
        assert [len(ids) for ids in out.table["response_ids"].to_pylist()] == [4, 4]
        assert (world.measured["rollout/aborted"], world.measured["rollout/retries"]) == (1, 1)
        assert world.discarded(out.table) == {"i000001-g000": 3}

    play(tmp_path, model, body)


def test_an_engine_that_aborts_before_it_gives_anything_is_given_up_after_the_retries(
    tmp_path: Path, model: Path
) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.aborted(1), times=None, only=sample("g001-s01"))
        out = await roll(world, [3, 4], [5, 6])
        assert out.facts.dropped == {"i000001-g001": "rollout_bad_answer"}
        assert sum("g001-s01" in rid for rid in rids(fakes[0])) == 3

    play(tmp_path, model, body, settings=REBUILD)


def generation(ids: list[int], *spans: tuple[str, int, int], finish: str = "stop", **more: int) -> Generation:
    own = tuple(Span(*span) for span in spans)
    return Generation(tuple(ids), tuple(-float(i) for i in ids), own, finish, more.pop("cached_tokens", 0), **more)


def test_the_last_token_of_a_partial_answer_is_left_out() -> None:
    whole = generation([5, 6, 7], ("a", 0, 2), ("b", 2, 3), finish="abort")
    assert without_last(whole) == generation([5, 6], ("a", 0, 2), finish="abort")
    assert without_last(generation([5], ("a", 0, 1))) == generation([])
    assert without_last(generation([])) == generation([])


def test_two_parts_of_a_response_are_joined_by_hand() -> None:
    first = generation([5, 6], ("a", 0, 2), finish="abort", cached_tokens=1, retractions=1)
    rest = generation([7, 8], ("a", 0, 1), ("b", 1, 2), finish="length", cached_tokens=9, retractions=2)
    assert joined(first, rest) == generation(
        [5, 6, 7, 8], ("a", 0, 3), ("b", 3, 4), finish="length", cached_tokens=1, retractions=3
    )


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_a_response_cut_anywhere_and_joined_is_itself(lengths: list[int], data: st.DataObject) -> None:
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    spans = [(f"v{i}", end - length, end) for i, (length, end) in enumerate(zip(lengths, ends, strict=True))]
    whole = generation(list(range(ends[-1])), *spans)
    cut = data.draw(st.integers(1, ends[-1]))

    def part(start: int, end: int) -> Generation:
        inside = [(label, max(a, start) - start, min(b, end) - start) for label, a, b in spans if a < end and b > start]
        return replace(generation([], *inside), ids=whole.ids[start:end], logprobs=whole.logprobs[start:end])

    assert joined(part(0, cut), part(cut, ends[-1])) == whole


@pytest.mark.parametrize(
    ("answer", "again", "expected"),
    [
        (generation([5, 6, 7], ("a", 0, 3)), False, 0),
        (generation([5, 6, 7], ("a", 0, 3), cached_tokens=4), True, 6),  # 10 sent, 4 of them in the cache
        (generation([5, 6, 7], ("a", 0, 1), ("b", 1, 3), retractions=1), False, 11),
        (generation([5, 6, 7], ("a", 0, 1), ("b", 1, 2), ("c", 2, 3), retractions=2), False, 11 + 12),
        (generation([5, 6, 7], ("a", 0, 1), ("b", 1, 3), retractions=2), False, 11 + 10),  # one for want of memory
        (generation([5, 6, 7], ("a", 0, 1), ("b", 1, 3)), False, 0),  # keep
    ],
)
def test_tokens_computed_again_by_hand(answer: Generation, again: bool, expected: int) -> None:
    assert reprefilled(answer, sent=10, again=again) == expected


# -- which versions are admitted


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (("000000-3f9a1c0b7d21", OTHER), "a version that the ledger does not have"),
        (("000000-3f9a1c0b7d21", "000001-bbbbbbbbbbbb"), "one that was never published"),
        (("000000-3f9a1c0b7d21", "000002-dddddddddddd"), "another content under a number"),
        (("000002-cccccccccccc", "000000-3f9a1c0b7d21"), "versions in the wrong order"),
        (("000000-3f9a1c0b7d21", "boot-1234"), "an engine that has just started"),
    ],
)
def test_under_rebuild_an_answer_of_other_versions_is_not_taken(
    tmp_path: Path, model: Path, labels: tuple[str, ...], found: str
) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        new_version(world.ledger, "bbbbbbbbbbbb")
        world.ledger.set_version(1, "QUARANTINED")
        new_version(world.ledger, "cccccccccccc")
        fakes[0].inject("/generate", faults.spans(*labels), only=sample("s01"))
        out = await roll(world, [3, 4])
        assert out.table["version_spans"][1].as_py() == [{"label": world.context.policy.label, "start": 0, "end": 4}]
        assert world.measured["rollout/retries"] == 1

    play(tmp_path, model, body, settings=REBUILD)


def test_under_rebuild_an_answer_older_than_the_batch_is_not_taken(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        new = await world.update(write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0]), "retract")
        fakes[0].inject("/generate", faults.spans("000000-3f9a1c0b7d21"))
        out = await roll(world, [3, 4], policy=new)
        assert out.facts.policy_versions == {new.label: 8}
        assert world.measured["rollout/retries"] == 1

    play(tmp_path, model, body, settings=REBUILD)


async def answered_by_a_version_under_way(world: World, fake: FakeEngine) -> tuple[asyncio.Task[Any], PolicyRef]:
    """A rollout of one group that waits to be closed: it has tokens of a version that is READY here, not committed."""
    new = new_version(world.ledger, "bbbbbbbbbbbb")
    fake.inject("/generate", faults.spans(world.context.policy.label, new.label), times=None)
    polls = 0
    state = world.ledger.version

    def counted(number: int) -> Any:
        nonlocal polls
        polls += number == new.number
        return state(number)

    world.ledger.version = counted  # type: ignore[method-assign]
    rolling = asyncio.create_task(roll(world, [3, 4]))
    await until(lambda: polls > 5)  # two at the answers
    assert not rolling.done()
    return rolling, new


def test_a_batch_waits_for_the_commit_of_a_version_it_has_tokens_of(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bracket, "POLL_S", 0.001)

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        rolling, new = await answered_by_a_version_under_way(world, fakes[0])
        world.ledger.set_version(new.number, "COMMITTED")
        assert set((await rolling).facts.policy_versions) == {world.context.policy.label, new.label}

    play(tmp_path, model, body, settings=REBUILD)


def test_tokens_of_a_version_that_is_given_up_refuse_the_batch(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bracket, "POLL_S", 0.001)

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        rolling, new = await answered_by_a_version_under_way(world, fakes[0])
        world.ledger.set_version(new.number, "QUARANTINED")
        with pytest.raises(StageError, match=f"committed when the batch closes, got {new.label} QUARANTINED"):
            await rolling

    play(tmp_path, model, body, settings=REBUILD)


# -- the bracket


def test_under_rebuild_other_weights_than_were_proven_refuse_the_batch(tmp_path: Path, model: Path) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        async def swaps_weights(call: Any) -> Any:
            answer = await call.proceed()
            call.engine.ranks[0]["w"] = Tensor("F32", (2,), bytes(8))
            return answer

        fakes[0].inject("/generate", swaps_weights, only=sample("s01"))
        with pytest.raises(EngineError, match="engine0 must hold what was proven on it last"):
            await roll_across(world, fakes[0], package, "retract", [3, 4])

    play(tmp_path, model, body, settings=REBUILD)


@pytest.mark.parametrize("settings", [SETTINGS, REBUILD], ids=["pin", "rebuild"])
def test_other_weights_than_were_published_get_no_work(tmp_path: Path, model: Path, settings: Any) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].ranks[0]["w"] = Tensor("F32", (2,), bytes(8))  # under the same label and boot
        with pytest.raises(EngineError, match="engine0 must hold what was proven on it last"):
            await roll(world, [3, 4])
        assert rids(fakes[0]) == []

    play(tmp_path, model, body, settings=settings)


def test_tokens_from_an_engine_whose_publish_failed_meanwhile_are_generated_again(tmp_path: Path, model: Path) -> None:
    """It went on at Q9, and Q10 found it wrong; its repair gives it the same label."""
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].hold_at = 1
        rolling = asyncio.create_task(roll(world, [3, 4]))
        await until(lambda: sum(len(r.ids) == 1 for r in fakes[0].running.values()) == 2)
        new = await world.update(package, "retract")
        world.ledger.journal(new.number, 1, "engine0", "Q10", "DIRTY: the probe differs")
        await fakes[0].release()
        out = await rolling
        assert out.facts.policy_versions == {new.label: 8}
        assert len(rids(fakes[0])) == 4
        assert len(set(out.table["sample_id"].to_pylist())) == 2
        assert world.progress[-1] == (2, 2, "samples")

    play(tmp_path, model, body, settings=REBUILD)


def test_a_publish_that_begins_while_the_batch_is_being_closed_does_not_refuse_it(tmp_path: Path, model: Path) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].hold_at = 1
        rolling = asyncio.create_task(roll(world, [3, 4]))
        await until(lambda: len(fakes[0].running) == 2)
        fakes[0].inject("/weights_checker", closing := faults.Held())
        await fakes[0].release()
        await until(lambda: closing.reached)  # its label is read, its weights are not
        await world.update(package, "retract")
        closing.go_on.set()
        assert (await rolling).facts.policy_versions == {world.context.policy.label: 8}

    play(tmp_path, model, body, settings=REBUILD)


def test_a_batch_that_opens_during_an_update_waits_for_it(tmp_path: Path, model: Path) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/update_weights_from_disk", waits := faults.Held())
        publishing = asyncio.create_task(world.update(package, "retract"))
        await until(lambda: waits.reached)
        rolling = asyncio.create_task(roll(world, [3, 4]))
        await asyncio.sleep(0)
        waits.go_on.set()
        new = await publishing
        assert (await rolling).facts.policy_versions == {new.label: 8}

    play(tmp_path, model, body, settings=REBUILD)


def test_an_engine_that_stays_in_its_update_is_given_up_at_the_deadline(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        world.engines[0].ready_label = ""
        with pytest.raises(StageError, match=r"engine0 of boot-.*: engine0 was not READY again in 0\.2 s"):
            await roll(world, [3, 4])

    play(tmp_path, model, body, settings=replace(REBUILD, timeout_s=0.2))


def test_an_engine_taken_out_of_the_pool_in_its_update_is_not_waited_for(tmp_path: Path, model: Path) -> None:
    package = write_package(tmp_path / "bbbbbbbbbbbb", w=[1.0, 2.0])

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        for fake in fakes:
            fake.hold_at = 1
        rolling = asyncio.create_task(roll(world, [3, 4], [5, 6]))
        await until(lambda: [len(fake.running) for fake in fakes] == [2, 2])
        await world.update(package, "abort")
        world.engines[0].ready_label = ""
        world.ledger.set_engine("engine0", fakes[0].boot, "OUT", "", "")
        for fake in fakes:
            await fake.release()
        out = await rolling
        assert set(out.table["engine"].to_pylist()) == {f"engine1/{fakes[1].boot}"}
        assert {row.name: row.state for row in world.ledger.engines()} == {"engine0": "OUT", "engine1": "READY"}

    play(tmp_path, model, body, settings=REBUILD, engines=2)


# -- the last engine dies after a version was committed in mid-batch


async def lose_the_engine_after_a_commit(root: Path, kv_policy: Any) -> tuple[Rows, list[PolicyRef]]:
    """A batch of two samples under a first version; one is complete and the other waits while a second version is
    published, and then the engine dies.

    Gives what the batch gave, and both versions.
    """
    async with Publishing(root) as desk:
        save_tokenizer(root / "model")
        published_with = "rebuild" if kv_policy == "pin" else kv_policy  # pin alone would wait for the batch
        settings = replace(KEEP, kv_policy=published_with, dtype="bfloat16")
        desk.experiment = replace(desk.experiment, rollout=settings)
        old = (await desk.published(1.0)).manifest.ref
        (root / "world").mkdir()
        world = make_world(root / "world", root / "model", [])
        context = world.with_context(
            experiment=desk.experiment, run_dir=root, ledger=desk.ledger, engines=desk.fleet, policy=old
        )
        desk.fake.inject("/generate", waits := faults.Held(), only=sample("s01"))
        prompts, sampling = prompt_rows([3, 4]), Sampling(8, 1.0)
        rolling = asyncio.create_task(generate_batch(context, prompts, old, sampling, 2, kv_policy))
        try:
            await until(lambda: waits.reached and bool(world.progress))
            new = desk.seal(2.0)
            await desk.publish(new)
            await desk.fake.die()
            return await rolling, [old, new.manifest.ref]
        finally:
            await asyncio.gather(rolling, return_exceptions=True)
            world.ledger.close()


@pytest.mark.parametrize("kv_policy", ["rebuild", "keep"])
def test_a_batch_that_lost_its_engines_is_generated_again_under_what_was_committed_meanwhile(
    tmp_path: Path, kv_policy: Any
) -> None:
    out, (_, new) = asyncio.run(lose_the_engine_after_a_commit(tmp_path, kv_policy))
    check_rollout(out.table, 2)
    assert out.facts.policy_versions == {new.label: 8}
    assert out.table["policy_version"].to_pylist() == [new.number] * 2
    assert out.facts.metrics["rollout/lag_max"] == 0.0


def test_a_pinned_batch_that_lost_its_engines_is_refused_where_its_version_is_no_longer_the_newest(
    tmp_path: Path,
) -> None:
    with pytest.raises(
        StageError, match=r"rollout needs an engine READY on 000000-.*, got none: engine0 is READY on 000001-"
    ):
        asyncio.run(lose_the_engine_after_a_commit(tmp_path, "pin"))
