"""The fake engine keeps those rules of the real one that faults are about; the real one has tests of its own."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import faults
from tests.fakes.context import until
from tests.fakes.engine import FakeEngine
from tests.fakes.toy_model import content_of, toy_logprob, write_package

Body = Callable[[FakeEngine, httpx.AsyncClient], Coroutine[Any, Any, None]]


def play(body: Body, **options: Any) -> None:
    async def run() -> None:
        async with FakeEngine(**options) as fake, httpx.AsyncClient(base_url=fake.url, timeout=30) as client:
            await body(fake, client)

    asyncio.run(run())


def request(rid: str = "r0", prompt: tuple[int, ...] = (3, 4, 5), **more: Any) -> dict[str, Any]:
    params = {"max_new_tokens": 8, "temperature": 1.0}
    return {"rid": rid, "input_ids": list(prompt), "sampling_params": params, "return_logprob": True, **more}


async def generate(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    return (await client.post("/generate", json=request(**more))).json()["meta_info"]


async def update(client: httpx.AsyncClient, path: str, label: str, **more: Any) -> httpx.Response:
    return await client.post("/update_weights_from_disk", json={"model_path": path, "weight_version": label, **more})


def test_log_probabilities_are_those_of_the_toy_model() -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        meta = await generate(client, logprob_start_len=0)
        content = content_of(*fake.ranks)
        first, token, _ = meta["output_token_logprobs"][0]
        assert first == toy_logprob(content, [3, 4, 5], token)
        assert meta["input_token_logprobs"][0] == [None, 3, None]
        assert meta["input_token_logprobs"][2] == [toy_logprob(content, [3, 4], 5), 5, None]

    play(body)


def test_a_request_across_an_update_reports_two_spans(tmp_path: Path) -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        fake.hold_at = 1
        running = asyncio.create_task(generate(client))
        await until(lambda: any(r.ids for r in fake.running.values()))
        await client.post("/pause_generation", json={"mode": "retract"})
        assert (await client.get("/ready")).status_code == 503
        assert (await update(client, str(write_package(tmp_path, w=[1.0, 2.0])), "v2")).status_code == 200
        await fake.release()
        await client.post("/continue_generation", json={})
        spans = [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 4}]
        assert (await running)["weight_versions"] == spans

    play(body, label="v1")


def test_an_update_under_running_requests_says_400_and_has_changed_the_weights(tmp_path: Path) -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        fake.hold_at = 1
        running = asyncio.create_task(generate(client))
        await until(lambda: any(r.ids for r in fake.running.values()))
        await client.post("/pause_generation", json={"mode": "in_place"})
        before = content_of(*fake.ranks)
        answer = await update(client, str(write_package(tmp_path, w=[1.0, 2.0])), "v2")
        assert (answer.status_code, "was not flushed" in answer.json()["message"]) == (400, True)
        assert content_of(*fake.ranks) != before
        assert (await client.get("/model_info")).json()["weight_version"] == "v1"
        await client.post("/pause_generation", json={"mode": "abort"})
        assert (await running)["finish_reason"]["type"] == "abort"

    play(body, label="v1")


def test_a_package_with_a_tensor_missing_is_accepted_and_only_the_checksum_shows_it(tmp_path: Path) -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        await update(client, str(write_package(tmp_path, w=[1.0, 2.0], v=[3.0])), "v1")
        first = (await client.post("/weights_checker", json={"action": "checksum"})).json()["ranks"]
        assert (await update(client, str(write_package(tmp_path, w=[5.0, 6.0])), "v2")).status_code == 200
        second = (await client.post("/weights_checker", json={"action": "checksum"})).json()["ranks"]
        assert len(second) == 2
        assert first[1]["checksums"]["v"] == second[1]["checksums"]["v"]
        assert first[1]["checksums"]["w"] != second[1]["checksums"]["w"]
        values = await client.post("/get_weights_by_name", json={"name": "w", "truncate_size": 1})
        assert values.json() == [5.0]

    play(body, ranks=2)


def test_old_kv_under_new_weights_shows_in_cached_tokens_and_log_probabilities(tmp_path: Path) -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        await generate(client, rid="r1", extra_key="a")
        await update(client, str(write_package(tmp_path, w=[1.0, 2.0])), "v2", flush_cache=False)
        stale = await generate(client, rid="r2", extra_key="a", logprob_start_len=0)
        other_key = await generate(client, rid="r3", extra_key="b", logprob_start_len=0)
        assert (stale["cached_tokens"], other_key["cached_tokens"]) == (2, 0)
        assert stale["input_token_logprobs"][1] != other_key["input_token_logprobs"][1]
        assert (await client.post("/flush_cache")).status_code == 200
        fresh = await generate(client, rid="r4", extra_key="a", logprob_start_len=0)
        assert fresh["input_token_logprobs"] == other_key["input_token_logprobs"]

    play(body)


def test_a_truncated_file_kills_it_and_a_restart_is_another_boot(tmp_path: Path) -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        path = str(write_package(tmp_path, w=[1.0, 2.0]))
        (tmp_path / "m.safetensors").write_bytes((tmp_path / "m.safetensors").read_bytes()[:-1])
        with pytest.raises(httpx.TransportError):
            await update(client, path, "v2")
        assert not fake.alive
        boot = fake.boot
        await fake.restart()
        assert (await client.get("/model_info")).json()["weight_version"] == fake.boot != boot

    play(body)


def test_each_key_opens_its_own_routes() -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        def code(answer: httpx.Response) -> int:
            return answer.status_code

        api, admin = {"Authorization": "Bearer k"}, {"Authorization": "Bearer a"}
        assert code(await client.get("/ready")) == 200
        assert [code(await client.get("/model_info", headers=h)) for h in ({}, api, admin)] == [401, 200, 401]
        assert [code(await client.post("/flush_cache", headers=h)) for h in ({}, api, admin)] == [401, 401, 200]

    play(body, api_key="k", admin_key="a")


def test_a_late_update_is_applied_when_the_test_says_so(tmp_path: Path) -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        deliveries: list[Any] = []
        fake.inject("/update_weights_from_disk", faults.late(deliveries))
        with pytest.raises(httpx.ReadTimeout):
            await client.post(
                "/update_weights_from_disk",
                json={"model_path": str(write_package(tmp_path, w=[1.0, 2.0])), "weight_version": "v2"},
                timeout=0.2,
            )
        assert fake.label == "v1"
        await deliveries[0]()
        assert fake.label == "v2"

    play(body, label="v1")


def test_a_retracted_request_takes_whatever_kv_is_left_under_the_key_it_came_with(tmp_path: Path) -> None:
    async def body(fake: FakeEngine, client: httpx.AsyncClient) -> None:
        path = str(write_package(tmp_path, w=[1.0, 2.0]))
        second = []  # what the second token's log-probability would be under the new weights alone, and what it is
        for flush in (True, False):
            fake.hold_at = 1
            running = asyncio.create_task(generate(client, rid=f"r{flush:d}", extra_key=f"k{flush:d}"))
            await until(lambda: any(r.ids for r in fake.running.values()))
            await client.post("/pause_generation", json={"mode": "retract"})
            await update(client, path, "v2", flush_cache=flush)
            await fake.release()
            await client.post("/continue_generation", json={})
            (_, first, _), (found, token, _), *_ = (await running)["output_token_logprobs"]
            second.append((toy_logprob(content_of(*fake.ranks), [3, 4, 5, first], token), found))
            fake.ranks = [dict(fake.base)]
        assert second[0][0] == second[0][1]
        assert second[1][0] != second[1][1]

    play(body)
