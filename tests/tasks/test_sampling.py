"""Which groups a rollout sends, waits for and keeps: refill, over-sampling, deadlines; in any order of events."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import StageError
from conf.schema import Experiment, GroupSampling, Prompts, Rollout
from data.prompts import PromptSource
from data.rows import check_rollout
from tasks.engines.client import Aborted, Refused, Unavailable
from tasks.engines.fleet import Fleet
from tasks.generation import batch, request
from tasks.generation.groups import Wanted
from tasks.rollout import rollout
from tasks.stage import Group, GroupStream, Rows
from tests.fakes.context import World, inputs_of, make_world, prompt_rows, until
from tests.fakes.puppet import BOOT, Puppet

pytestmark = pytest.mark.usefixtures("retry_at_once")

FILTER = GroupSampling(filter="zero_variance", max_rounds=3)


class Play:
    """A rollout over puppets, and the reward stage played by the test."""

    def __init__(self, world: World, engines: list[Puppet], sampling: GroupSampling, needed: int) -> None:
        self.world, self.engines, self.stream = world, engines, GroupStream()
        self.complete = self.stream.read()
        self.candidates = [f"i000001-g{g:03d}" for g in range(sampling.candidates(needed))]
        context = world.with_context(stream=self.stream)
        table = prompt_rows(*([3 + g] for g in range(len(self.candidates))))
        self.rolling: asyncio.Task[Any] = asyncio.create_task(rollout.run(inputs_of(table), context))  # type: ignore[arg-type]

    @property
    def groups_asked(self) -> set[str]:
        return {asked.group for engine in self.engines for asked in engine.asked if not asked.answer.done()}

    @property
    def groups_sent(self) -> list[str]:
        return sorted({rid[:12] for engine in self.engines for rid in engine.sent})

    async def asks(self, *groups: int) -> None:
        """Until exactly these groups are under way."""
        await until(lambda: self.groups_asked == {self.candidates[g] for g in groups} or self.rolling.done())
        assert self.groups_asked == {self.candidates[g] for g in groups}

    def end(self, group: int, *ids: int) -> None:
        for engine in self.engines:
            for asked in engine.asked:
                if asked.group == self.candidates[group] and not asked.answer.done():
                    asked.end(*(ids or (5,)))

    def lose(self) -> None:
        """The first engine is gone, with what is under way on it."""
        engine = self.engines[0]
        engine.alive = False
        next(asked for asked in engine.asked if not asked.answer.done()).fail(Unavailable("gone"))

    async def judge(self, group: int, reason: str) -> Group:
        """End the group, and judge it."""
        self.end(group)
        found = await self.complete.get()
        assert found.id == self.candidates[group]
        self.stream.judge(found, reason)
        return found

    async def ended(self) -> Rows:
        out = await self.rolling
        assert isinstance(out, Rows)
        check_rollout(out.table, 2, out.facts.dropped)
        return out


def play(
    folder: Path,
    model: Path,
    body: Callable[[Play], Awaitable[None]],
    *,
    sampling: GroupSampling = FILTER,
    needed: int = 2,
    engines: int = 1,
    restartable: bool = False,
    **options: Any,
) -> None:
    async def run() -> None:
        puppets = [Puppet(f"engine{i}", BOOT[:-1] + str(i)) for i in range(engines)]
        settings = Rollout(samples_per_prompt=2, max_new_tokens=8, max_failed_share=1.0, retries=0, **options)
        world = make_world(
            folder, model, puppets, rollout=settings, sampling=sampling, prompts=Prompts(per_iteration=needed)
        )
        source = PromptSource("made", [(f"w{i}", "", "{}") for i in range(100)], "d", held_out=0, shuffle=False, seed=0)
        ways: dict[str, Any] = dict.fromkeys((puppet.name for puppet in puppets), None) if restartable else {}
        world.context = world.with_context(prompts=source, engines=Fleet(puppets, ways))
        await world.publish(world.context.policy)
        playing = Play(world, puppets, sampling, needed)
        try:
            await body(playing)
        finally:
            playing.rolling.cancel()
            await asyncio.gather(playing.rolling, return_exceptions=True)
            await world.close()

    asyncio.run(run())


def kept(out: Rows) -> list[str]:
    return list(dict.fromkeys(out.table["group_id"].to_pylist()))


# -- refill


def test_a_group_that_does_not_pass_has_the_next_prompt_sent_in_its_place(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        await p.asks(0, 1)
        await p.judge(1, "zero_variance")
        await p.asks(0, 2)
        await p.judge(2, "")
        await p.judge(0, "zero_variance")
        await p.asks(3)
        assert not p.rolling.done()
        await p.judge(3, "")
        out = await p.ended()
        assert kept(out) == p.candidates[:4]  # stage filter, not the rollout, leaves out those that did not pass
        assert out.facts.dropped == {}
        assert out.facts.cursor == {"epoch": 0, "position": 4, "source": "d"}
        assert out.facts.metrics["sampling/groups_sent"] == 4
        assert p.groups_sent == p.candidates[:4]

    play(tmp_path, model, body)


def test_a_group_that_fails_is_replaced_too_and_named(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        await p.asks(0, 1)
        p.engines[0].asked[0].fail(Refused("no"))
        await p.asks(1, 2)
        await p.judge(1, "")
        await p.judge(2, "")
        out = await p.ended()
        assert kept(out) == [p.candidates[1], p.candidates[2]]
        assert out.facts.dropped == {p.candidates[0]: "rollout_refused"}
        assert out.facts.cursor["position"] == 3

    play(tmp_path, model, body)


def test_rounds_are_bounded_and_what_passed_until_then_is_committed(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        for group in range(6):  # 3 rounds of 2
            await until(lambda group=group: p.candidates[group] in p.groups_asked)  # type: ignore[misc]
            await p.judge(group, "zero_variance")
        out = await p.ended()
        assert kept(out) == p.candidates
        assert out.facts.cursor["position"] == 6

    play(tmp_path, model, body)


def test_the_tail_begins_when_no_request_is_left_to_send(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        await p.asks(0, 1)
        assert not p.stream.tail.is_set()  # a prompt may still have to be sent
        await p.judge(0, "")
        await p.judge(1, "")
        await p.ended()
        assert p.stream.tail.is_set()

    play(tmp_path, model, body)


def test_without_a_filter_the_tail_begins_while_the_last_are_generated(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        await until(lambda: len(p.engines[0].asked) == 3)
        assert not p.stream.tail.is_set()
        p.engines[0].asked[0].end(5)
        await until(p.stream.tail.is_set)
        assert len(p.engines[0].sent) == 4
        p.end(0)
        p.end(1)
        await p.ended()

    play(tmp_path, model, body, sampling=GroupSampling(), max_in_flight=3)


# -- what is generated again


def test_a_group_that_is_generated_again_comes_again_and_its_first_verdict_does_not_count(
    tmp_path: Path, model: Path
) -> None:
    async def body(p: Play) -> None:
        await p.asks(0, 1)
        lost = next(engine for engine in p.engines if engine.asked[0].group == p.candidates[0])
        other = next(engine for engine in p.engines if engine is not lost)
        p.end(0, 9)
        old = await p.complete.get()
        p.stream.judge(old, "")
        await p.judge(1, "")
        lost.alive = False  # found out when the batch closes
        await p.asks(0)
        assert [asked.group for asked in other.asked] == [p.candidates[0]] * 2
        p.stream.judge(old, "")
        p.end(0, 6)
        new = await p.complete.get()
        assert (new.id, new is old) == (old.id, False)
        assert old.read()["response_ids"].to_pylist() == [[9], [9]]
        assert new.read()["response_ids"].to_pylist() == [[6], [6]]
        p.stream.judge(new, "")
        out = await p.ended()
        assert out.table["response_ids"].to_pylist() == [[6], [6], [5], [5]]
        assert p.world.discarded(out.table) == {p.candidates[0]: 2}

    play(tmp_path, model, body, engines=2)


def test_tokens_of_a_rollout_that_fails_are_known(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        await p.asks(0, 1)
        p.end(0, 9, 9, 9)
        await p.asks(1)
        p.lose()
        with pytest.raises(StageError, match="left are none"):
            await p.rolling
        assert p.world.spent == {("response_tokens", p.candidates[0]): 6}

    play(tmp_path, model, body, sampling=GroupSampling())


def engines_come_back(p: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where too few engines are left, all of them can be restarted and get the same version."""

    async def publish(*arguments: Any) -> None:
        for engine in p.engines:
            engine.alive = True
        await p.world.publish(p.world.context.policy)

    monkeypatch.setattr("tasks.rollout.publish_to_engines", publish)
    monkeypatch.setattr(Fleet, "restartable", True)


def test_all_that_a_batch_had_generated_before_it_lost_its_engines_counts_as_thrown_away(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body(p: Play) -> None:
        engines_come_back(p, monkeypatch)
        engine = p.engines[0]
        await p.asks(0, 1)
        p.end(0, 5, 5, 5)
        p.stream.judge(await p.complete.get(), "zero_variance")
        await p.asks(1, 2)
        engine.asked[0].end(5, 5)  # one member of the second group
        engine.asked[2].end(5, 5, 5, 5)  # and one of the third
        await until(lambda: len(engine.asked) == 2)
        engine.alive = False
        engine.asked[0].fail(Unavailable("gone"))
        await p.asks(0, 1)
        await p.judge(0, "")
        await p.judge(1, "")
        out = await p.ended()
        assert out.facts.policy_versions == {p.world.context.policy.label: 4}  # a token each
        assert kept(out) == p.candidates[:2]
        # 2 x 3 of the first group; the third is not even sent this time
        assert p.world.discarded(out.table) == {p.candidates[0]: 6, p.candidates[1]: 2, p.candidates[2]: 4}

    play(tmp_path, model, body)


@pytest.mark.parametrize("engines", [1, 2], ids=["restarted", "another is left"])
def test_a_partial_answer_that_was_to_be_gone_on_with_counts_too(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch, engines: int
) -> None:
    async def body(p: Play) -> None:
        engines_come_back(p, monkeypatch)
        engine = p.engines[0]
        await until(lambda: len(engine.asked) == 2)
        first, second = engine.asked
        second.end(5, 5)
        first.fail(Aborted("cut off", first.tokens(4, 4, 4, 4, finish="abort")))
        await until(lambda: len(engine.sent) == 3)
        assert engine.asked[0].prompt_ids == [3, 4, 4, 4]  # the last of the four is left out
        engine.alive = False
        engine.asked[0].fail(Unavailable("gone"))
        await until(lambda: sum(len(e.asked) for e in p.engines) == 2)
        p.end(0)
        out = await p.ended()
        assert out.table["response_ids"].to_pylist() == [[5], [5]]
        assert p.world.discarded(out.table) == {p.candidates[0]: 6}  # 2 of the second member, 4 of the first

    play(tmp_path, model, body, sampling=GroupSampling(), needed=1, engines=engines, kv_policy="rebuild")


# -- over-sampling


def test_in_order_finishes_all_and_keeps_the_first(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        await p.asks(0, 1, 2)
        p.end(2)
        p.end(1)
        await p.asks(0)  # two are there, and it waits for the first all the same
        p.end(0)
        out = await p.ended()
        assert kept(out) == p.candidates[:2]
        assert out.facts.dropped == {p.candidates[2]: "surplus"}
        assert p.world.discarded(out.table) == {p.candidates[2]: 2}
        assert out.facts.dropped_lengths == {p.candidates[2]: {"stop": [1, 1]}}
        assert p.engines[0].aborted == []

    play(tmp_path, model, body, sampling=GroupSampling(oversample=1.5))


def test_fastest_stops_with_the_first_that_are_complete_and_aborts_the_others(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        p.engines[0].partial = (4, 4, 4)
        await p.asks(0, 1, 2)
        p.engines[0].asked[0].end(5, 5)  # one member of the first group
        p.end(2)
        p.end(1)
        out = await p.ended()
        assert kept(out) == p.candidates[1:3]
        assert out.facts.dropped == {p.candidates[0]: "oversampled"}
        assert p.world.discarded(out.table) == {p.candidates[0]: 5}
        assert out.facts.dropped_lengths == {p.candidates[0]: {"stop": [2]}}  # of the other member it is not known
        assert [rid[:16] for rid in p.engines[0].aborted] == [f"{p.candidates[0]}-s01"]
        assert p.world.measured["rollout/aborted"] == 0  # the engine cut nothing off by itself

    play(tmp_path, model, body, sampling=GroupSampling(oversample=1.5, keep="fastest"))


def test_fastest_with_a_filter_counts_what_passed(tmp_path: Path, model: Path) -> None:
    async def body(p: Play) -> None:
        await p.asks(0, 1, 2)
        await p.judge(1, "zero_variance")
        await p.asks(0, 2, 3)  # as many under way for each that is missing as before
        await p.judge(2, "")
        await p.judge(3, "")
        out = await p.ended()
        assert kept(out) == p.candidates[1:4]
        assert out.facts.dropped == {p.candidates[0]: "oversampled"}
        assert out.facts.cursor["position"] == 4

    play(tmp_path, model, body, sampling=GroupSampling(filter="zero_variance", oversample=1.5, keep="fastest"))


# -- deadlines


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.Event]:
    """The deadline of the n-th request that was sent passes when the n-th of these is set."""
    events: list[asyncio.Event] = []

    async def deadline(seconds: float) -> None:
        assert seconds == 5.0
        events.append(asyncio.Event())
        await events[-1].wait()

    monkeypatch.setattr(batch, "deadline", deadline)
    return events


def test_a_sample_past_its_deadline_keeps_its_tokens_and_says_so(
    tmp_path: Path, model: Path, late: list[asyncio.Event]
) -> None:
    async def body(p: Play) -> None:
        p.engines[0].partial = (4, 4, 4)
        await p.asks(0, 1)
        await until(lambda: len(late) == 4)
        late[1].set()
        await until(lambda: len(p.engines[0].asked) == 3)
        p.end(0)
        p.end(1)
        out = await p.ended()
        assert out.table["finish_reason"].to_pylist() == ["stop", "deadline", "stop", "stop"]
        assert out.table["response_ids"].to_pylist() == [[5], [4, 4, 4], [5], [5]]
        assert out.facts.metrics["rollout/deadline_rate"] == 0.25
        assert out.facts.metrics["rollout/truncated_rate"] == 0.0
        assert [rid[:16] for rid in p.engines[0].aborted] == [f"{p.candidates[0]}-s01"]

    play(tmp_path, model, body, sampling=GroupSampling(), sample_deadline_s=5.0)


@pytest.mark.parametrize(("partial", "on_deadline"), [((4, 4), "drop_group"), ((), "truncate")])
def test_its_group_is_dropped_where_that_is_declared_or_it_has_no_token_yet(
    tmp_path: Path, model: Path, late: list[asyncio.Event], partial: tuple[int, ...], on_deadline: Any
) -> None:
    async def body(p: Play) -> None:
        p.engines[0].partial = partial
        await until(lambda: len(late) == 4)
        late[1].set()
        await p.asks(1)
        p.end(1)
        out = await p.ended()
        assert kept(out) == [p.candidates[1]]
        assert out.facts.dropped == {p.candidates[0]: "deadline"}
        assert p.world.discarded(out.table) == ({p.candidates[0]: 2} if partial else {})

    play(tmp_path, model, body, sampling=GroupSampling(), sample_deadline_s=5.0, on_deadline=on_deadline)


def test_a_request_that_cannot_be_aborted_costs_its_group_and_nothing_waits_for_it(
    tmp_path: Path, model: Path, late: list[asyncio.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request, "ABORT_AGAIN_S", 0.01)

    async def deaf(rid: str) -> None:
        raise Unavailable("nobody answers")

    async def body(p: Play) -> None:
        monkeypatch.setattr(p.engines[0], "abort", deaf)
        await until(lambda: len(late) == 4)
        late[1].set()
        await p.asks(1)
        p.end(1)
        assert (await p.ended()).facts.dropped == {p.candidates[0]: "deadline"}

    play(tmp_path, model, body, sampling=GroupSampling(), sample_deadline_s=5.0)


def test_when_all_are_too_slow_the_stage_says_so(tmp_path: Path, model: Path, late: list[asyncio.Event]) -> None:
    async def body(p: Play) -> None:
        await until(lambda: len(late) == 4)
        late[0].set()
        late[2].set()
        with pytest.raises(StageError, match=r"lost 2 of 2 groups.*i000001-g000-s00 took more than 5 s"):
            await p.rolling

    play(tmp_path, model, body, sampling=GroupSampling(), sample_deadline_s=5.0, on_deadline="drop_group")


# -- any order

samplings = st.builds(
    GroupSampling,
    filter=st.sampled_from(["none", "zero_variance"]),
    max_rounds=st.integers(1, 3),
    oversample=st.sampled_from([1.0, 1.5, 2.0]),
    keep=st.sampled_from(["in_order", "fastest"]),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sampling=samplings, needed=st.integers(1, 4), engines=st.integers(1, 2), seed=st.integers(0, 2**32))
def test_whatever_comes_in_whatever_order_the_batch_is_exact_bounded_and_accounts_for_every_prompt(
    model: Path,
    tmp_path_factory: pytest.TempPathFactory,
    sampling: GroupSampling,
    needed: int,
    engines: int,
    seed: int,
) -> None:
    async def body(p: Play) -> None:
        random, arrived = Random(seed), []
        verdicts: dict[str, str] = {}
        reading = asyncio.create_task(_read(p.stream, arrived))
        deaths = engines - 1
        while not p.rolling.done():
            for _ in range(3):
                await asyncio.sleep(0)
            open_now = [a for e in p.engines for a in e.asked if not a.answer.done()]
            actions = [*open_now, *(arrived if sampling.filter != "none" else [])]
            if not actions:
                await asyncio.sleep(0.001)
                continue
            chosen = random.choice(actions)
            if isinstance(chosen, Group):
                arrived.remove(chosen)
                verdicts[chosen.id] = random.choice(["", "", "zero_variance"])
                p.stream.judge(chosen, verdicts[chosen.id])
            elif random.random() < 0.1:
                chosen.fail(Refused("no"))
            elif deaths and random.random() < 0.05:
                deaths -= 1
                dead = next(e for e in p.engines if chosen in e.asked)
                dead.alive = False
                chosen.fail(Unavailable("gone"))
            else:
                chosen.end(5, random.randint(3, 9))
        reading.cancel()
        try:
            out = await p.ended()
        except StageError:
            # every group that was sent failed, so all candidates were
            assert p.groups_sent == p.candidates
            return
        have, dropped = kept(out), out.facts.dropped
        sent = len(p.groups_sent)
        assert p.groups_sent == p.candidates[:sent]  # in the order of the prompts, none left out
        # Those of the first round are issued with the prompts, sent or not; whatever is issued has an end.
        assert sorted([*have, *dropped]) == p.candidates[: max(sent, sampling.started(needed))]
        assert have == sorted(have)
        if sampling.filter == "none":
            assert len(have) == min(needed, sent - sum(r.startswith("rollout") for r in dropped.values()))
            assert sent == len(p.candidates) or sampling.keep == "fastest"
        else:
            passed = [group for group in have if verdicts.get(group) == ""]
            assert len(passed) >= needed or sent == len(p.candidates)
            if sampling.oversample == 1:
                assert len(passed) <= needed
            if sampling.refills:
                assert out.facts.cursor["position"] == sent
        if sampling.keep == "in_order" or sampling.oversample == 1:
            assert "oversampled" not in dropped.values()
        assert p.stream.tail.is_set()

    play(
        tmp_path_factory.mktemp("run"), model, body, sampling=sampling, needed=needed, engines=engines, max_in_flight=5
    )


async def _read(stream: GroupStream, into: list[Group]) -> None:
    groups = stream.read()
    while True:
        into.append(await groups.get())


def test_an_evaluation_takes_every_prompt_whatever_is_sampled_for_training() -> None:
    assert Wanted(3).sampling == GroupSampling() == Experiment().sampling
    assert Wanted(3).deadline_s == 0
