"""Rollouts over fake engines, as the tests of stage rollout play them."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from conf.schema import Rollout
from tasks.rollout import rollout
from tasks.stage import Rows
from tests.fakes.context import World, client_of, inputs_of, make_world, prompt_rows
from tests.fakes.engine import FakeEngine

SETTINGS = Rollout(samples_per_prompt=2, max_new_tokens=8, timeout_s=60.0, max_failed_share=0.5)

Body = Callable[[World, list[FakeEngine]], Coroutine[Any, Any, None]]


def play(
    tmp_path: Path, model: Path, body: Body, *, settings: Rollout = SETTINGS, engines: int = 1, **parts: Any
) -> None:
    """Run `body` with a world whose engines are fakes, and stop them all."""

    async def run() -> None:
        fakes = [FakeEngine() for _ in range(engines)]
        for fake in fakes:
            await fake.__aenter__()
        clients = [client_of(fake, f"engine{i}") for i, fake in enumerate(fakes)]
        world = make_world(tmp_path, model, clients, rollout=settings, **parts)
        for fake in fakes:
            fake.label = fake.span_label = world.context.policy.label
        await world.publish(world.context.policy)
        for fake in fakes:
            fake.calls.clear()
        try:
            await body(world, fakes)
        finally:
            await world.close()
            for fake in fakes:
                await fake.__aexit__()

    asyncio.run(run())


async def roll(world: World, *prompts: list[int], **context: Any) -> Rows:
    out = await rollout.run(inputs_of(prompt_rows(*prompts)), world.with_context(**context))
    assert isinstance(out, Rows)
    return out


def sample(name: str) -> Callable[[dict[str, Any]], bool]:
    """Requests of the sample that ends so: `sample("g000-s01")`, with any retry suffix."""
    return lambda body: name in body["rid"]


def rids(fake: FakeEngine) -> list[str]:
    return [body["rid"] for body in fake.routed("/generate")]
