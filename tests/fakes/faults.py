"""What a fake engine can do wrong, one behaviour each: `fake.inject("/generate", faults.reset)`."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from tests.fakes.engine import Behaviour, Call
from tests.fakes.toy_model import Tensor

# the connection and the bytes: for any route


def status(code: int) -> Behaviour:
    async def answer(call: Call) -> web.StreamResponse:
        return web.json_response({"error": {"message": f"injected {code}"}}, status=code)

    return answer


async def reset(call: Call) -> web.StreamResponse:
    """The connection is reset; nothing was done."""
    assert call.request.transport is not None
    call.request.transport.abort()
    return web.Response()


async def reset_after(call: Call) -> web.StreamResponse:
    """It was done, but the connection is reset before the answer."""
    await call.proceed()
    return await reset(call)


async def hang(call: Call) -> web.StreamResponse:
    """Takes the request and never answers."""
    await asyncio.Event().wait()
    return web.Response()


class Held:
    """Waits until the test sets `go_on`."""

    def __init__(self) -> None:
        self.reached = False
        self.go_on = asyncio.Event()

    async def __call__(self, call: Call) -> web.StreamResponse:
        self.reached = True
        await self.go_on.wait()
        return await call.proceed()


async def slow_body(call: Call) -> web.StreamResponse:
    """The head and half of the body, then nothing more."""
    answer = await call.proceed()
    body = answer.body
    assert isinstance(body, bytes)
    stream = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(body))})
    await stream.prepare(call.request)
    await stream.write(body[: len(body) // 2])
    await asyncio.Event().wait()
    return stream


async def invalid_json(call: Call) -> web.StreamResponse:
    answer = await call.proceed()
    assert isinstance(answer.body, bytes)
    return web.Response(body=answer.body[:-5], content_type="application/json")


# the content of an answer


def edit(change: Callable[[dict[str, Any]], None]) -> Behaviour:
    """The true answer, changed."""

    async def answer(call: Call) -> web.StreamResponse:
        true = await call.proceed()
        assert isinstance(true.body, bytes)
        content = json.loads(true.body)
        change(content)
        return web.json_response(content, status=true.status)

    return answer


def missing(*path: str) -> Behaviour:
    """200, but this part of the answer is not there: `missing("meta_info", "finish_reason")`."""

    def change(content: dict[str, Any]) -> None:
        for key in path[:-1]:
            content = content[key]
        del content[path[-1]]

    return edit(change)


def generated(ids: list[int], logprobs: list[float | None], finish: str = "stop", cached: int = 0) -> Behaviour:
    """Exactly these tokens and log-probabilities."""

    def change(content: dict[str, Any]) -> None:
        meta = content["meta_info"]
        content["output_ids"] = ids
        meta["output_token_logprobs"] = [[p, i, None] for p, i in zip(logprobs, ids, strict=False)]
        meta["output_token_logprobs_length"] = len(meta["output_token_logprobs"])
        meta["completion_tokens"] = len(ids)
        meta["cached_tokens"] = cached
        meta["finish_reason"] = {"type": finish}
        meta["weight_versions"] = [{"version": meta["weight_version"], "start": 0, "end": len(ids)}]

    return edit(change)


def logprobs(change: Callable[[list[list[Any]]], list[list[Any]]]) -> Behaviour:
    """The list of [log-probability, token, null] changed: `logprobs(lambda rows: rows[:-1])`."""

    def change_all(content: dict[str, Any]) -> None:
        content["meta_info"]["output_token_logprobs"] = change(content["meta_info"]["output_token_logprobs"])

    return edit(change_all)


def first_logprob(value: Any) -> Behaviour:
    return logprobs(lambda rows: [[value, *rows[0][1:]], *rows[1:]])


def spans(*labels: str) -> Behaviour:
    """Spans of these labels, one token each but the last, which takes the rest."""

    def change(content: dict[str, Any]) -> None:
        last = len(labels) - 1
        content["meta_info"]["weight_versions"] = [
            {"version": label, "start": i, "end": i + 1 if i < last else len(content["output_ids"])}
            for i, label in enumerate(labels)
        ]
        content["meta_info"]["weight_version"] = labels[-1]

    return edit(change)


def aborted(tokens: int) -> Behaviour:
    """Aborted after so many tokens: 200 with the partial output."""

    async def answer(call: Call) -> web.StreamResponse:
        call.engine.hold_at = tokens
        answer = asyncio.ensure_future(call.proceed())
        rid = call.body["rid"]
        while rid not in call.engine.running or len(call.engine.running[rid].ids) < tokens:
            await asyncio.sleep(0)
        call.engine.running[rid].aborted = True
        await call.engine.release()
        return await answer

    return answer


def kept(answers: list[bytes]) -> Behaviour:
    """The true answer never arrives, it is kept in `answers`: the connection is reset."""

    async def answer(call: Call) -> web.StreamResponse:
        true = await call.proceed()
        assert isinstance(true.body, bytes)
        answers.append(true.body)
        return await reset(call)

    return answer


def another(answers: list[bytes]) -> Behaviour:
    """The oldest of `answers`, whatever was asked: a proxy that delivers it late, to the wrong request."""

    async def answer(call: Call) -> web.StreamResponse:
        return web.Response(body=answers.pop(0), content_type="application/json")

    return answer


def swapped() -> Behaviour:
    """Two requests get each other's answer."""
    bodies: list[asyncio.Future[Any]] = []

    async def answer(call: Call) -> web.StreamResponse:
        mine = len(bodies)
        bodies.append(asyncio.ensure_future(call.proceed()))
        while len(bodies) < 2:
            await asyncio.sleep(0)
        true = await bodies[1 - mine]
        return web.Response(body=true.body, content_type="application/json")

    return answer


# the life of the server and its weights


async def dies(call: Call) -> web.StreamResponse:
    await call.engine.die()
    return web.Response()


async def restarts(call: Call) -> web.StreamResponse:
    """Gone and back at once with base weights and another boot; the caller sees a reset."""
    await call.engine.restart()
    return web.Response()


def keeps_old_weights(rank: int) -> Behaviour:
    """Says 200 with the new label, and this rank still holds the old weights."""

    async def answer(call: Call) -> web.StreamResponse:
        old = call.engine.ranks[rank]
        response = await call.proceed()
        call.engine.ranks[rank] = old
        return response

    return answer


async def changes_but_says_400(call: Call) -> web.StreamResponse:
    await call.proceed()
    content = {"success": False, "message": "Failed to update weights.", "num_paused_requests": 0}
    return web.json_response(content, status=400)


def corrupts(name: str) -> Behaviour:
    """Says 200, and one byte of this tensor is wrong on every rank."""

    async def answer(call: Call) -> web.StreamResponse:
        response = await call.proceed()
        for rank in call.engine.ranks:
            true = rank[name]
            rank[name] = Tensor(true.dtype, true.shape, bytes([true.data[0] ^ 1]) + true.data[1:])
        return response

    return answer


def late(deliveries: list[Callable[[], Awaitable[web.Response]]]) -> Behaviour:
    """Never answers, and is carried out when the test awaits what it finds in `deliveries`."""

    async def answer(call: Call) -> web.StreamResponse:
        deliveries.append(call.proceed)
        return await hang(call)

    return answer


# publishing


async def not_flushed(call: Call) -> web.StreamResponse:
    """A request nobody knows of runs: the weights are new, the label and the cache old, and it says 400."""
    label, path = call.engine.label, call.engine.path
    await call.proceed()
    call.engine.label, call.engine.path = label, path
    message = "Weights were updated, but the cache was not flushed because requests are still running or queued."
    content = {"success": False, "message": message, "num_paused_requests": 0}
    return web.json_response(content, status=400)


async def ignored(call: Call) -> web.StreamResponse:
    """Says 200 and does nothing."""
    return web.json_response({"success": True, "message": "ok", "status": "ok"})


def under_label(label: str) -> Behaviour:
    """Loads the weights, under a label of its own."""

    async def answer(call: Call) -> web.StreamResponse:
        call.body["weight_version"] = label
        return await call.proceed()

    return answer


async def keeps_old_label(call: Call) -> web.StreamResponse:
    """Loads the weights, says 200, and goes on under its label of before."""
    label = call.engine.label
    response = await call.proceed()
    call.engine.label = label
    return response


async def from_elsewhere(call: Call) -> web.StreamResponse:
    """Loads the weights, and says they are from another folder."""
    response = await call.proceed()
    call.engine.path = "/elsewhere"
    return response


async def restarts_after(call: Call) -> web.StreamResponse:
    """Answers rightly, and has base weights and another boot the moment after."""
    response = await call.proceed()
    assert isinstance(response.body, bytes)
    call.engine._reset()
    return web.Response(body=response.body, status=response.status, content_type=response.content_type)


def lost(deliveries: list[Callable[[], Awaitable[web.Response]]]) -> Behaviour:
    """The connection is reset, and it is carried out when the test awaits what it finds in `deliveries`."""

    async def answer(call: Call) -> web.StreamResponse:
        deliveries.append(call.proceed)
        return await reset(call)

    return answer


def delivers(deliveries: list[Callable[[], Awaitable[web.Response]]]) -> Behaviour:
    """What was lost arrives after this answer was made."""

    async def answer(call: Call) -> web.StreamResponse:
        response = await call.proceed()
        while deliveries:
            await deliveries.pop(0)()
        return response

    return answer
