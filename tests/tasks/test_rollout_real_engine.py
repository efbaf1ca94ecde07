"""The real SGLang at an update, a pause and a death in mid-generation: what the rollout relies on there."""

import asyncio
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import pytest

from conf.schema import Rollout
from data.rows import check_rollout
from tasks.engines.client import Engine, Generation, Sampling
from tasks.engines.server import SGLangServer
from tests.engines_fixture import Tensors, changed, make_server
from tests.fakes.context import World, make_world, until
from tests.fakes.rollouts import roll

PROMPTS = [72, 101, 108, 108, 111], [84, 104, 101, 114, 101, 32]
OLD, NEW, LATER = "000000-3f9a1c0b7d21", "000001-bbbbbbbbbbbb", "000002-cccccccccccc"


@pytest.fixture(scope="module")
def packages(tiny_model: Path, tiny_tensors: Tensors, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three versions of one model, as folders an engine loads."""
    from safetensors.torch import save_file

    found = {OLD: tiny_model}
    for seed, label in enumerate((NEW, LATER), 1):
        folder = tmp_path_factory.mktemp("weights") / label.partition("-")[2]
        shutil.copytree(tiny_model, folder)
        save_file(changed(tiny_tensors, seed), folder / "model.safetensors", {"format": "pt"})
        found[label] = folder
    return found


@pytest.fixture(scope="module")
def score(packages: dict[str, Path]) -> Callable[[str, list[int], list[int]], list[float]]:
    """log p of a response after its prompt under a version's weights, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    models = {
        label: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for label, path in packages.items()
    }

    def logprobs(label: str, prompt: list[int], ids: list[int]) -> list[float]:
        with torch.no_grad():
            logits = models[label](torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        return torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()

    return logprobs


def far(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


async def tokens_in_use(engine: Engine, count: int, answering: asyncio.Task[Any]) -> None:
    """Until the engine holds KV of so many tokens: then it is in the middle of its answers. Or all have ended."""
    used = 0
    while used < count and not answering.done():
        answer = await engine._json("GET", "/v1/loads", None, engine._user, 60)
        used = sum(load["num_used_tokens"] for load in answer["loads"])


def play(
    server: SGLangServer,
    tmp_path: Path,
    model: Path,
    settings: Rollout,
    body: Callable[[World, Engine], Awaitable[bool]],
) -> None:
    """Run `body` until it was in time: on a busy machine all answers may have ended before the engine is paused."""

    async def run(folder: Path) -> bool:
        folder.mkdir()
        world = make_world(folder, model, [server.connect()], rollout=settings)
        engine = world.engines[0]
        assert world.context.policy.label == OLD
        try:
            await engine.update_weights(str(model), OLD, 60)
            await world.publish(world.context.policy)
            return await body(world, engine)
        finally:
            await engine.resume(60)
            await world.close()

    assert any(asyncio.run(run(tmp_path / f"{attempt}")) for attempt in range(20))


def settings(kv_policy: Literal["pin", "rebuild", "keep"]) -> Rollout:
    return Rollout(samples_per_prompt=8, max_new_tokens=300, timeout_s=120.0, kv_policy=kv_policy)


def test_rebuild_on_the_real_engine_gives_spans_with_log_probabilities_under_their_own_weights(
    sglang_server: SGLangServer, packages: dict[str, Path], score: Any, tmp_path: Path
) -> None:
    async def body(world: World, engine: Engine) -> bool:
        rolling = asyncio.create_task(roll(world, *PROMPTS))
        await until(lambda: bool(world.progress))  # the first of 16 has ended
        new = await world.update(packages[NEW], "retract")
        out = await rolling
        assert new.label == NEW
        check_rollout(out.table, 8)
        rows = out.table.to_pylist()
        again = 0
        for row in rows:
            prompt, ids = row["prompt_ids"], row["response_ids"]
            assert len(ids) <= 300
            for span in row["version_spans"]:
                own = slice(span["start"], span["end"])
                found = row["behavior_logprobs"][own]
                assert found == pytest.approx(score(span["label"], prompt, ids)[own], abs=1e-3)
                other = score(NEW if span["label"] == OLD else OLD, prompt, ids)[own]
                assert len(found) < 5 or far(found, other) > 0.02
            assert [span["label"] for span in row["version_spans"]] in ([OLD], [OLD, NEW])
            again += sum(len(prompt) + span["start"] for span in row["version_spans"][1:])
        assert world.measured["rollout/reprefilled_tokens"] == again
        assert world.measured["rollout/aborted"] == world.measured["rollout/retries"] == 0
        world.context.store.commit_rows(1, "rollout", out.table, key="sample_id", facts=out.facts)
        return set(out.facts.policy_versions) == {OLD, NEW} and again > 0

    play(sglang_server, tmp_path, packages[OLD], settings("rebuild"), body)


@pytest.mark.parametrize("kv_policy", ["pin", "rebuild"])
def test_what_a_pause_of_the_real_engine_cut_off_is_whole_in_the_end_and_of_one_version(
    sglang_server: SGLangServer, packages: dict[str, Path], score: Any, tmp_path: Path, kv_policy: Any
) -> None:
    async def body(world: World, engine: Engine) -> bool:
        rolling = asyncio.create_task(roll(world, *PROMPTS))
        await until(lambda: bool(world.progress))  # the first of 16 has ended
        await engine.pause("abort", 60)
        await engine.resume(60)
        out = await rolling
        check_rollout(out.table, 8)
        assert set(out.facts.policy_versions) == {OLD}
        assert world.measured["rollout/retries"] == world.measured["rollout/aborted"]
        rows = out.table.to_pylist()
        for row in rows:
            assert [span["label"] for span in row["version_spans"]] == [OLD]
            truth = score(OLD, row["prompt_ids"], row["response_ids"])
            assert row["behavior_logprobs"] == pytest.approx(truth, abs=1e-3)
            assert len(row["response_ids"]) == 300 or row["finish_reason"] == "stop"
        return world.measured["rollout/aborted"] > 0

    play(sglang_server, tmp_path, packages[OLD], settings(kv_policy), body)


LONG = list(range(40, 104))


async def ask(engine: Engine, rid: str, key: str, tokens: int = 1) -> Generation:
    return await engine.generate_unready(
        rid=rid, prompt_ids=LONG, sampling=Sampling(tokens, 1.0), extra_key=key, timeout_s=120
    )


async def across_an_update(engine: Engine, package: Path, flush: bool) -> tuple[Generation, int]:
    """A response for OLD that is retracted and goes on under NEW, and where; 0: too little of it does."""
    asking = asyncio.create_task(ask(engine, "across-1", OLD, 300))
    await tokens_in_use(engine, len(LONG) + 5, asking)
    await engine.pause("retract", 60)
    await engine.update_weights(str(package), NEW, 60, flush=flush)
    await engine.resume(60)
    got = await asking
    start = got.spans[-1].start
    return got, start if len(got.ids) - start >= 5 else 0


def test_kv_rebuilt_after_a_retraction_lies_under_the_old_versions_key_and_the_next_update_drops_it(
    sglang_server: SGLangServer, packages: dict[str, Path], score: Any, tmp_path: Path
) -> None:
    """It is the new weights' KV, so nobody reads anything false; and no request for the old version is sent."""

    async def body(world: World, engine: Engine) -> bool:
        got, start = await across_an_update(engine, packages[NEW], flush=True)
        if not start:
            return False
        truth = score(NEW, LONG, list(got.ids))
        assert list(got.logprobs[start:]) == pytest.approx(truth[start:], abs=1e-3)
        under_old = await ask(engine, "under-old-1", OLD, 8)
        assert under_old.cached_tokens == len(LONG) - 1
        assert list(under_old.logprobs) == pytest.approx(score(NEW, LONG, list(under_old.ids)), abs=1e-3)
        assert {span.label for span in under_old.spans} == {NEW}
        assert (await ask(engine, "under-new-1", NEW)).cached_tokens == 0
        await engine.update_weights(str(packages[LATER]), LATER, 60)
        assert (await ask(engine, "under-old-2", OLD)).cached_tokens == 0
        return True

    play(sglang_server, tmp_path, packages[OLD], settings("rebuild"), body)


def test_without_the_updates_own_flush_a_retracted_request_goes_on_from_old_kv(
    sglang_server: SGLangServer, packages: dict[str, Path], score: Any, tmp_path: Path
) -> None:
    """Its key is still that of the old version: only the flush stands between it and that version's prefix."""

    async def body(world: World, engine: Engine) -> bool:
        got, start = await across_an_update(engine, packages[NEW], flush=False)
        await engine.flush_cache(60)
        if start:
            assert far(list(got.logprobs[start:]), score(NEW, LONG, list(got.ids))[start:]) > 0.01
        return start > 0

    play(sglang_server, tmp_path, packages[OLD], settings("rebuild"), body)


def test_a_real_server_killed_in_mid_batch_costs_nothing_but_time(
    sglang_server: SGLangServer, packages: dict[str, Path], score: Any, tmp_path: Path
) -> None:
    model = packages[OLD]
    victim = make_server("engine1", model, tmp_path / "engine1.log")

    async def run() -> None:
        engines = [sglang_server.connect(), await victim.start(300)]
        world = make_world(tmp_path, model, engines, rollout=settings("pin"))
        try:
            for engine in engines:
                await engine.update_weights(str(model), OLD, 60)
            await world.publish(world.context.policy)
            rolling = asyncio.create_task(roll(world, *PROMPTS, *PROMPTS))
            await until(lambda: bool(world.progress))  # the first of 32 has ended
            os.killpg(victim.pid, signal.SIGKILL)
            out = await rolling
            states = {row.name: row.state for row in world.ledger.engines()}
        finally:
            await world.close()
            await victim.stop()
        check_rollout(out.table, 8)
        rows = out.table.to_pylist()
        assert len({row["sample_id"] for row in rows}) == 32
        assert {row["engine"] for row in rows} == {f"engine0/{engines[0].boot}"}
        assert [row["prompt_ids"] for row in rows] == [prompt for prompt in (*PROMPTS, *PROMPTS) for _ in range(8)]
        for row in rows[::8]:
            truth = score(OLD, row["prompt_ids"], row["response_ids"])
            assert row["behavior_logprobs"] == pytest.approx(truth, abs=1e-3)
        assert states == {"engine0": "READY", "engine1": "DEAD"}

    asyncio.run(run())
