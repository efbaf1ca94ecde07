"""The rollout: on the real SGLang, and over fake engines that misbehave: what is retried, dropped, refused and kept."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.errors import DataError, EngineError, StageError
from conf.schema import Rollout
from data.rows import check_rollout
from tasks.engines.server import SGLangServer
from tests.fakes import faults
from tests.fakes.context import (
    World,
    commit_version,
    make_world,
    until,
)
from tests.fakes.engine import Behaviour, Call, FakeEngine
from tests.fakes.rollouts import SETTINGS, play, rids, roll, sample
from tests.fakes.toy_model import BASE, Tensor

OTHER = "000099-aaaaaaaaaaaa"


pytestmark = pytest.mark.usefixtures("retry_at_once")


def test_a_row_holds_what_the_engine_said_and_nothing_else(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fake, policy = fakes[0], world.context.policy
        answers = {
            "g000-s00": faults.generated([5, 6, 2], [-0.5, -0.25, -0.125]),
            "g000-s01": faults.generated([7], [-1.5], finish="length", cached=2),
            "g001-s00": faults.generated([8, 2], [-0.75, 0.0]),
            "g001-s01": faults.generated([9, 9, 9, 9], [-2.0, -2.0, -2.0, -2.0], finish="length"),
        }
        for name, behaviour in answers.items():
            fake.inject("/generate", behaviour, only=sample(name))
        out = await roll(world, [3, 4, 5], [6, 7, 8, 9, 10])
        table, boot = out.table, f"engine0/{fake.boot}"
        rows = {name: table[name].to_pylist() for name in table.column_names}
        assert rows["sample_id"] == [f"i000001-{name}" for name in answers]
        assert rows["group_id"] == ["i000001-g000"] * 2 + ["i000001-g001"] * 2
        assert rows["prompt_ids"] == [[3, 4, 5]] * 2 + [[6, 7, 8, 9, 10]] * 2
        assert rows["prompt_text"][2] == "w6 w7 w8 w9 w10"
        assert rows["response_ids"] == [[5, 6, 2], [7], [8, 2], [9, 9, 9, 9]]
        assert rows["response_mask"] == [[True] * 3, [True], [True] * 2, [True] * 4]
        assert rows["behavior_logprobs"] == [[-0.5, -0.25, -0.125], [-1.5], [-0.75, 0.0], [-2.0] * 4]
        assert rows["version_spans"][0] == [{"label": policy.label, "start": 0, "end": 3}]
        assert rows["policy_version"] == [policy.number] * 4
        assert rows["finish_reason"] == ["stop", "length", "stop", "length"]
        assert rows["response_text"] == ["w5 w6", "w7", "w8", "w9 w9 w9 w9"]
        assert rows["engine"] == [boot] * 4
        assert rows["cached_tokens"] == [0, 2, 0, 0]
        assert out.facts.metrics == {
            "response_length/mean": 2.5,  # (3 + 1 + 2 + 4) / 4
            "response_length/max": 4.0,
            "rollout/truncated_rate": 0.5,
            "rollout/cached_prompt_share": 2 / 16,  # 2 of 2 x 3 + 2 x 5
            "rollout/lag_mean": 0.0,
            "rollout/lag_max": 0.0,
        }
        assert out.facts.policy_versions == {policy.label: 10}
        assert out.facts.logprob_kind == "after_temperature"
        assert out.facts.sampling == {
            "max_new_tokens": 8,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "samples_per_prompt": 2,
            "kv_policy": "pin",
        }
        assert len(out.facts.tokenizer_digest) == 64
        assert out.facts.dropped == {}

    play(tmp_path, model, body)


def test_rows_keep_the_rollout_contract_and_can_be_committed(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        out = await roll(world, [3, 4], [5, 6])
        check_rollout(out.table, 2)
        ref = world.context.store.commit_rows(1, "rollout", out.table, key="sample_id", facts=out.facts)
        assert ref.rows == 4
        assert ref.versions == (world.context.policy.label,)
        assert world.context.store.read(ref)["response_ids"].to_pylist() == out.table["response_ids"].to_pylist()

    play(tmp_path, model, body)


def test_requests_carry_token_ids_a_fixed_width_rid_and_the_policy_as_cache_key(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.status(503), only=sample("s01"))
        await roll(world, [3, 4])
        sent = fakes[0].routed("/generate")
        assert [request["input_ids"] for request in sent] == [[3, 4]] * 3
        assert {request["extra_key"] for request in sent} == {world.context.policy.label}
        assert all("text" not in request for request in sent)
        assert len(set(rids(fakes[0]))) == 3  # the retry has one of its own
        assert len({len(rid) for rid in rids(fakes[0])}) == 1  # SGLang aborts by prefix

    play(tmp_path, model, body)


PASSING: dict[str, tuple[Behaviour, str]] = {
    "500": (faults.status(500), "unavailable"),
    "503": (faults.status(503), "unavailable"),
    "reset": (faults.reset, "unavailable"),
    "answer lost": (faults.reset_after, "unavailable"),
    "invalid JSON": (faults.invalid_json, "bad_answer"),
    "no meta_info": (faults.missing("meta_info"), "bad_answer"),
    "no output_ids": (faults.missing("output_ids"), "bad_answer"),
    "no log-probabilities": (faults.missing("meta_info", "output_token_logprobs"), "bad_answer"),
    "no spans": (faults.missing("meta_info", "weight_versions"), "bad_answer"),
    "no finish reason": (faults.missing("meta_info", "finish_reason"), "bad_answer"),
    "aborted with partial tokens": (faults.aborted(2), "bad_answer"),
    "spans of two versions": (faults.spans("000000-3f9a1c0b7d21", OTHER), "bad_answer"),
    "unknown label": (faults.spans(OTHER), "bad_answer"),
    "fewer log-probabilities": (faults.logprobs(lambda rows: rows[:-1]), "bad_answer"),
    "more log-probabilities": (faults.logprobs(lambda rows: [*rows, rows[-1]]), "bad_answer"),
    "null": (faults.first_logprob(None), "bad_answer"),
    "-inf": (faults.first_logprob(-math.inf), "bad_answer"),
    "NaN": (faults.first_logprob(math.nan), "bad_answer"),
    "above 0": (faults.first_logprob(0.5), "bad_answer"),
    "another token's": (faults.logprobs(lambda rows: [[rows[0][0], 999, None], *rows[1:]]), "bad_answer"),
    "empty completion": (faults.generated([], []), "bad_answer"),
}


@pytest.mark.parametrize("fault", PASSING)
def test_a_failure_that_passes_is_retried_and_costs_nothing(tmp_path: Path, model: Path, fault: str) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", PASSING[fault][0], only=sample("g001-s01"))
        out = await roll(world, [3, 4], [5, 6])
        check_rollout(out.table, 2)
        assert out.table.num_rows == 4
        assert out.facts.dropped == {}
        assert len(rids(fakes[0])) == 5
        assert world.measured["rollout/retries"] == 1

    play(tmp_path, model, body)


@pytest.mark.parametrize("fault", PASSING)
def test_a_failure_that_stays_drops_the_group_with_its_reason_and_no_other(
    tmp_path: Path, model: Path, fault: str
) -> None:
    behaviour, kind = PASSING[fault]

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", behaviour, times=None, only=sample("g001-s01"))
        out = await roll(world, [3, 4], [5, 6])
        assert out.facts.dropped == {"i000001-g001": f"rollout_{kind}"}
        assert out.table["sample_id"].to_pylist() == ["i000001-g000-s00", "i000001-g000-s01"]
        check_rollout(out.table, 2, out.facts.dropped)
        assert sum("g001-s01" in rid for rid in rids(fakes[0])) == 3  # once and two retries

    play(tmp_path, model, body)


@pytest.mark.parametrize("fault", [faults.hang, faults.slow_body], ids=["never answers", "stops in mid-body"])
def test_a_request_without_an_end_is_given_up_at_its_deadline(tmp_path: Path, model: Path, fault: Behaviour) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", fault, times=None, only=sample("g001-s01"))
        out = await roll(world, [3, 4], [5, 6])
        assert out.facts.dropped == {"i000001-g001": "rollout_unavailable"}
        assert out.table.num_rows == 2

    play(tmp_path, model, body, settings=replace(SETTINGS, timeout_s=2.0, retries=1))


def test_one_request_of_512_that_never_returns_costs_its_group(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.hang, times=None, only=sample("g100-s03"))
        out = await roll(world, *([3 + i] for i in range(128)))
        assert out.facts.dropped == {"i000001-g100": "rollout_unavailable"}
        assert out.table.num_rows == 508
        check_rollout(out.table, 4, out.facts.dropped)

    few = replace(SETTINGS, samples_per_prompt=4, timeout_s=3.0, retries=1, max_in_flight=32)
    play(tmp_path, model, body, settings=few)


def test_a_refused_request_is_never_sent_again(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.status(400), times=None, only=sample("g001-s01"))
        out = await roll(world, [3, 4], [5, 6])
        assert out.facts.dropped == {"i000001-g001": "rollout_refused"}
        assert sum("g001-s01" in rid for rid in rids(fakes[0])) == 1

    play(tmp_path, model, body)


def test_a_prompt_the_engine_cannot_take_is_refused_before_it_is_sent(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        too_long, outside = [3] * (fakes[0].context_length - 7), [3, fakes[0].vocab_size]  # 8 new tokens do not fit
        out = await roll(world, [3, 4], too_long, [5, 6], outside)
        assert out.facts.dropped == {"i000001-g001": "rollout_refused", "i000001-g003": "rollout_refused"}
        assert not any("g001" in rid or "g003" in rid for rid in rids(fakes[0]))
        assert fakes[0].alive

    play(tmp_path, model, body)


def test_losing_more_groups_than_declared_stops_the_stage_with_the_first_errors(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.status(500), times=None)
        with pytest.raises(StageError, match=r"lost 2 of 3 groups, rollout.max_failed_share allows 50%.*500"):
            await roll(world, [3, 4], [5, 6], [7, 8])

    play(tmp_path, model, body)


def test_a_stage_that_loses_every_group_fails_whatever_is_declared(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.status(500), times=None)
        with pytest.raises(StageError, match="lost 2 of 2 groups"):
            await roll(world, [3, 4], [5, 6])

    play(tmp_path, model, body, settings=replace(SETTINGS, max_failed_share=1.0))


def test_weights_that_change_in_mid_batch_under_the_same_label_refuse_the_batch(tmp_path: Path, model: Path) -> None:
    async def swaps_weights(call: Call) -> Any:
        answer = await call.proceed()
        call.engine.ranks[0]["w"] = Tensor("F32", (2,), bytes(8))
        return answer

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", swaps_weights)
        with pytest.raises(EngineError, match="engine0"):
            await roll(world, [3, 4], [5, 6])
        assert fakes[0].base == BASE

    play(tmp_path, model, body)


def test_an_engine_that_serves_another_version_when_the_batch_closes_refuses_it(tmp_path: Path, model: Path) -> None:
    """What it held when it answered is proven no more; that version need not be committed yet."""

    async def body(world: World, fakes: list[FakeEngine]) -> None:
        (row,) = world.ledger.engines()

        def published_when_all_is_answered(done: int, total: int, unit: str) -> None:
            if done == total:
                world.ledger.set_engine(row.name, row.boot, "READY", OTHER, row.checksum)
                fakes[0].label = world.engines[0].ready_label = OTHER

        with pytest.raises(EngineError, match=f"engine0 changed while the batch was open.*after .*{OTHER}"):
            await roll(world, [3, 4], progress=published_when_all_is_answered)

    play(tmp_path, model, body)


def test_an_engine_restarted_since_its_publish_gets_no_work(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        await fakes[0].restart()
        with pytest.raises(
            StageError, match=f"engine0 of {world.engines[0].boot}: .*{fakes[0].boot}: it was restarted"
        ):
            await roll(world, [3, 4])
        assert rids(fakes[0]) == []

    play(tmp_path, model, body)


def test_without_a_ready_engine_the_stage_names_the_states(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        for engine in world.engines:
            engine.ready_label = ""
        world.ledger.set_engine("engine0", "b", "DIRTY", "", "")
        world.ledger.set_engine("engine1", "b", "READY", OTHER, "")
        with pytest.raises(StageError, match=f"engine0 is DIRTY on no label; engine1 is READY on {OTHER}"):
            await roll(world, [3, 4])
        assert fakes[0].calls == fakes[1].calls == []

    play(tmp_path, model, body, engines=2)


def test_only_engines_ready_on_the_policy_get_work(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        world.engines[0].ready_label = OTHER
        out = await roll(world, [3, 4], [5, 6])
        assert fakes[0].calls == []
        assert set(out.table["engine"].to_pylist()) == {f"engine1/{fakes[1].boot}"}

    play(tmp_path, model, body, engines=2)


def test_no_more_than_max_in_flight_requests_run_at_a_time(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        await roll(world, *([3 + i, 4] for i in range(20)))
        assert max(fake.most_running for fake in fakes) <= 3
        assert sum(len(rids(fake)) for fake in fakes) == 40

    play(tmp_path, model, body, engines=2, settings=replace(SETTINGS, max_in_flight=3))


def test_cancelling_aborts_every_request_on_the_engine(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].hold_at = 1
        rolling = asyncio.create_task(roll(world, *([3 + i, 4] for i in range(4))))
        await until(lambda: len(fakes[0].running) == 8)
        rolling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await rolling
        await until(lambda: not fakes[0].running)
        assert len(rids(fakes[0])) == 8

    play(tmp_path, model, body)


def test_two_groups_with_the_same_prompt_stay_two_groups(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        table = (await roll(world, [3, 4, 5], [3, 4, 5])).table
        assert len(set(table["sample_id"].to_pylist())) == 4
        assert table["group_id"].to_pylist() == ["i000001-g000"] * 2 + ["i000001-g001"] * 2

    play(tmp_path, model, body)


def test_requests_left_by_a_dispatcher_that_died_do_not_disturb_the_next(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].hold_at = 1
        first = asyncio.create_task(roll(world, [3, 4]))
        await until(lambda: len(fakes[0].running) == 2)
        second = asyncio.create_task(roll(world, [3, 4]))
        await until(lambda: len(fakes[0].running) == 4)
        await fakes[0].release()
        for rolling in (first, second):
            assert (await rolling).facts.dropped == {}

    play(tmp_path, model, body)


def test_a_policy_newer_than_the_ledger_is_refused_before_anything_is_sent(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        newer = world.with_context(policy=replace(world.context.policy, number=1)).policy
        for engine in world.engines:
            engine.ready_label = newer.label
        with pytest.raises(DataError, match="lag must be >= 0, got -1"):
            await roll(world, [3, 4], policy=newer)
        assert fakes[0].calls == []

    play(tmp_path, model, body)


def test_a_version_committed_in_mid_batch_makes_the_batch_too_old(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].hold_at = 1
        rolling = asyncio.create_task(roll(world, [3, 4]))
        await until(lambda: len(fakes[0].running) == 2)
        commit_version(world.ledger, "bbbbbbbbbbbb")
        await fakes[0].release()
        with pytest.raises(DataError, match="lag must be <= 0, got 1"):
            await rolling

    play(tmp_path, model, body)


def test_progress_counts_samples_to_the_end(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fakes: list[FakeEngine]) -> None:
        fakes[0].inject("/generate", faults.status(400), only=sample("g001"))
        await roll(world, [3, 4], [5, 6])
        assert world.progress == [(done, 4, "samples") for done in (1, 2, 3, 4)]
        assert world.measured["rollout/tokens_per_s"] > 0

    play(tmp_path, model, body)


def test_the_real_engine_fills_complete_groups_under_the_policys_label(
    tmp_path: Path, tiny_model: Path, sglang_server: SGLangServer
) -> None:
    async def run() -> None:
        settings = Rollout(samples_per_prompt=4, max_new_tokens=16, timeout_s=120.0)
        world = make_world(tmp_path, tiny_model, [sglang_server.connect()], rollout=settings)
        policy = world.context.policy
        try:
            await world.engines[0].update_weights(str(tiny_model), policy.label, 120.0)
            await world.publish(policy)
            out = await roll(world, [72, 101, 108, 108, 111], [72, 105], [72, 101, 108, 108, 111])
        finally:
            await world.close()
        check_rollout(out.table, 4)
        assert out.table.num_rows == 12
        assert set(out.facts.policy_versions) == {policy.label}
        assert out.facts.dropped == {}
        lengths = [len(ids) for ids in out.table["response_ids"].to_pylist()]
        for finish, length in zip(out.table["finish_reason"].to_pylist(), lengths, strict=True):
            assert finish == "stop" or length == 16
        assert len(set(map(tuple, out.table["response_ids"].to_pylist()))) > 1  # samples, not copies

    asyncio.run(run())
