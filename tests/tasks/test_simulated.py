"""The simulated engine answers as SGLang does, through the product's client, and has SGLang's traps."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from tasks.engines.client import BadAnswer, Generation, Refused, Sampling, Span, Unavailable
from tasks.engines.simulated import SimulatedEngine, SimulatedServer
from tasks.engines.toy import EMBED, EOS, HEAD, NORM, kv_of, next_logprobs, random_weights, score, write_shards

IDS = (3, 4, 5, 6)
OLD, NEW = random_weights(0), random_weights(1)


def use(test: Callable[[SimulatedEngine, SimulatedServer], Awaitable[None]], ranks: int = 1) -> None:
    async def main() -> None:
        server = SimulatedServer(OLD, ranks)
        engine = SimulatedEngine("engine0", server)
        try:
            await asyncio.wait_for(test(engine, server), 30)
        finally:
            await engine.close()

    asyncio.run(main())


def folder(root: Path, weights: dict[str, np.ndarray] = NEW) -> str:
    path = root / f"{len(list(root.iterdir()))}"
    path.mkdir()
    write_shards(path, weights, ranks=2)
    return str(path)


async def ask(engine: SimulatedEngine, rid: str, key: str = "k", tokens: int = 3) -> Generation:
    sampling = Sampling(tokens, 1.0)
    return await engine.generate_unready(rid=rid, prompt_ids=IDS, sampling=sampling, extra_key=key, timeout_s=10)


async def running(server: SimulatedServer) -> None:
    while not server.running:
        await asyncio.sleep(0.001)


def said_by(weights: dict[str, np.ndarray], got: Generation) -> bool:
    return np.allclose(score(weights, [*IDS, *got.ids])[len(IDS) - 1 :], got.logprobs)


# -- the model


def test_log_probabilities_by_hand() -> None:
    weights = {EMBED: np.array([[1.0], [3.0]]), NORM: np.array([0.5]), HEAD: np.array([[0.0], [np.log(3)]])}
    # mean of 1 and 3 is 2; times 0.5: 1; logits 0 and log 3: probabilities 1/4 and 3/4
    np.testing.assert_allclose(np.exp(next_logprobs(weights, kv_of(weights, [0, 1]))), [0.25, 0.75])
    np.testing.assert_allclose(next_logprobs(weights, kv_of(weights, [0, 1]), 0.5), np.log([0.1, 0.9]))


def test_every_tensor_and_every_earlier_token_counts() -> None:
    said = next_logprobs(OLD, kv_of(OLD, IDS))
    for name in OLD:
        other = {**OLD, name: NEW[name]}
        assert not np.allclose(next_logprobs(other, kv_of(other, IDS)), said)
    assert not np.allclose(next_logprobs(OLD, kv_of(OLD, (7, *IDS[1:]))), said)


# -- what it does rightly


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_says_what_its_weights_say_however_they_are_split(ranks: int, tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        assert said_by(OLD, await ask(engine, "r0"))
        await engine.update_weights(folder(tmp_path), "v1", 10)
        got = await ask(engine, "r1")
        assert said_by(NEW, got)
        assert got.spans == (Span("v1", 0, len(got.ids)),)
        found = await engine.prompt_logprobs(IDS, rid="r2", extra_key="k", timeout_s=10)
        np.testing.assert_allclose(found, score(NEW, IDS))
        assert await engine.first_row(EMBED, 1) == NEW[EMBED][0].tolist()
        assert len(await engine.checksums()) == ranks

    use(test, ranks)


def test_a_response_ends_with_the_end_token_or_at_its_limit() -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        answers = [await ask(engine, f"r{i:03d}", tokens=40) for i in range(20)]
        for got in answers:
            assert (got.finish_reason == "stop") == (got.ids[-1] == EOS)
            assert EOS not in got.ids[:-1]
            assert len(got.ids) == 40 or got.finish_reason == "stop"
        assert {got.finish_reason for got in answers} == {"stop", "length"}

    use(test)


def test_a_paused_engine_is_not_ready_and_starts_nothing() -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        await engine.pause("abort", 10)
        assert not await engine.ready()
        request = asyncio.create_task(ask(engine, "r0"))
        await asyncio.sleep(0.02)
        assert not request.done()
        await engine.resume(10)
        assert await engine.ready()
        assert said_by(OLD, await request)

    use(test)


def test_a_pause_cuts_running_requests_short_and_their_answers_are_no_samples() -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        server.hung = True
        request = asyncio.create_task(ask(engine, "r0"))
        await running(server)
        pause = asyncio.create_task(engine.pause("abort", 10))
        server.hung = False
        await pause
        assert await engine.running_requests() == 0
        with pytest.raises(BadAnswer, match="abort"):
            await request

    use(test)


def test_whoever_hangs_up_ends_his_request() -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        server.hung = True
        request = asyncio.create_task(ask(engine, "r0"))
        await running(server)
        request.cancel()
        await asyncio.wait([request])
        while server.running:
            await asyncio.sleep(0.001)

    use(test)


# -- its traps


def test_a_package_with_a_tensor_missing_is_a_success_and_keeps_the_old_one(tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        await engine.update_weights(folder(tmp_path, {k: v for k, v in NEW.items() if k != NORM}), "v1", 10)
        assert (await engine.model_info()).label == "v1"
        assert said_by({**NEW, NORM: OLD[NORM]}, await ask(engine, "r0"))

    use(test)


def test_a_label_says_nothing_of_the_weights(tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        for weights in (NEW, OLD):
            await engine.update_weights(folder(tmp_path, weights), "v1", 10)
            got = await ask(engine, f"r-{(await engine.checksums())[0][NORM]}")
            assert said_by(weights, got)
            assert got.spans[0].label == "v1"

    use(test)


def test_kv_stays_for_its_key_and_prefix_until_a_flush(tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        assert [(await ask(engine, f"a{i}")).cached_tokens for i in range(2)] == [0, len(IDS) - 1]
        assert (await ask(engine, "b0", key="other")).cached_tokens == 0
        body = {"model_path": folder(tmp_path), "weight_version": "v1", "flush_cache": False}
        await engine._json("POST", "/update_weights_from_disk", body, {}, 10)
        got = await ask(engine, "c0")
        assert got.cached_tokens == len(IDS) - 1
        assert got.spans[0].label == "v1"
        assert not said_by(NEW, got)  # the KV of the old weights is in it
        assert not said_by(OLD, got)
        await engine.flush_cache(10)
        got = await ask(engine, "d0")
        assert got.cached_tokens == 0
        assert said_by(NEW, got)

    use(test)


def test_a_running_request_makes_a_flush_fail_and_an_update_half_happen(tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        server.hung = True
        request = asyncio.create_task(ask(engine, "r0"))
        await running(server)
        label = (await engine.model_info()).label
        with pytest.raises(Refused, match="idle"):
            await engine.flush_cache(0.01)
        before = await engine.checksums()
        with pytest.raises(Refused, match=r"were updated, but the cache was not flushed"):
            await engine.update_weights(folder(tmp_path), "v1", 10)
        assert (await engine.model_info()).label == label
        assert await engine.checksums() != before
        server.hung = False
        got = await request  # its prompt's KV is the old weights', its tokens the new ones'
        assert not said_by(NEW, got)
        assert got.spans[0].label == "v1"

    use(test)


def test_one_of_two_ranks_may_keep_its_weights_and_only_its_checksum_shows_it(tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        before = await engine.checksums()
        server.keeps_old = {1}
        await engine.update_weights(folder(tmp_path), "v1", 10)
        after = await engine.checksums()
        assert (await engine.model_info()).label == "v1"
        assert [old == new for old, new in zip(before, after, strict=True)] == [False, True]
        assert not said_by(NEW, await ask(engine, "r0"))

    use(test, ranks=2)


def test_a_command_goes_on_when_its_caller_stopped_waiting() -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        server.hung = True
        request = asyncio.create_task(ask(engine, "r0"))
        await running(server)
        with pytest.raises(Unavailable, match="had no answer"):
            await engine.pause("abort", 0.02)
        assert server.paused
        server.hung = False
        with pytest.raises(BadAnswer):
            await request

    use(test)


def test_a_folder_that_does_not_exist_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        before = await engine.mark()
        with pytest.raises(Refused, match="no such folder"):
            await engine.update_weights(str(tmp_path / "nowhere"), "v1", 10)
        assert await engine.mark() == before

    use(test)


def test_a_cut_file_kills_it_and_a_restart_has_the_base_weights_under_another_boot(tmp_path: Path) -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        await engine.update_weights(folder(tmp_path), "v1", 10)
        cut = Path(folder(tmp_path)) / "model-00001-of-00002.safetensors"
        cut.write_bytes(cut.read_bytes()[:-1])
        with pytest.raises(Unavailable, match="connection reset"):
            await engine.update_weights(str(cut.parent), "v2", 10)
        with pytest.raises(Unavailable, match="nobody listens"):
            await engine.ready()
        server.restart()
        assert await engine.current_boot() != engine.boot
        assert (await engine.model_info()).label == await engine.current_boot()
        assert said_by(OLD, await ask(engine, "r0"))
        assert SimulatedEngine("engine0", server).boot == await engine.current_boot()

    use(test)


def test_a_restart_resets_the_connections_of_running_requests() -> None:
    async def test(engine: SimulatedEngine, server: SimulatedServer) -> None:
        server.hung = True
        request = asyncio.create_task(ask(engine, "r0"))
        await running(server)
        server.restart()
        with pytest.raises(Unavailable, match="connection reset"):
            await request

    use(test)
