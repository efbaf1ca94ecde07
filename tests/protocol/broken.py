"""The product without one of its guarantees. Each of these the machine must find out.

Where the product has a second line of defence that catches the same, both are taken away, and the docstring says so.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from conf.errors import RatchetError
from tasks.engines.client import Checksums, Engine, Generation, Mark, NoAnswer
from tasks.engines.commands import Fence, Gate
from tasks.engines.install import Install
from tasks.generation.batch import Batch
from tasks.generation.bracket import Bracket

Patch = pytest.MonkeyPatch


def nothing(*args: Any, **kwargs: Any) -> None: ...


async def nothing_async(*args: Any, **kwargs: Any) -> None: ...


def no_checksum_of_all_ranks(patch: Patch) -> None:
    """The checksums of rank 0 stand for the engine."""
    checksums = Engine.checksums

    async def of_rank_0(self: Engine, timeout_s: float = 30.0) -> Checksums:
        return [(await checksums(self, timeout_s))[0]] * 2

    patch.setattr(Engine, "checksums", of_rank_0)


def no_flush_and_no_key(patch: Patch) -> None:
    """And the probe does not look at cached tokens, by which it would find the KV of the probe before it."""
    complete, generate, update_weights = Engine._complete, Engine.generate_unready, Engine.update_weights

    async def without_key(self: Engine, rid: str, ids: Any, sampling: Any, key: str, *rest: Any) -> Any:
        return await complete(self, rid, ids, sampling, "", *rest)

    async def blind(self: Engine, **request: Any) -> Generation:
        return replace(await generate(self, **request), cached_tokens=0)

    async def update(self: Engine, path: str, label: str, timeout_s: float, **flush: bool) -> None:
        await update_weights(self, path, label, timeout_s, flush=False)

    patch.setattr(Engine, "_complete", without_key)
    patch.setattr(Engine, "generate_unready", blind)
    patch.setattr(Engine, "update_weights", update)
    patch.setattr(Engine, "flush_cache", nothing_async)


def ready_whatever_came_out(patch: Patch) -> None:
    bring = Install._bring

    async def anyhow(self: Install, applied: bool) -> str:
        try:
            return await bring(self, applied)
        except RatchetError:
            await resume(self)
            return await checksum_of(self)

    patch.setattr(Install, "_bring", anyhow)


def a_restarted_engine_works_at_once(patch: Patch) -> None:
    restart, bring = Install._restart, Install._bring

    async def at_once(self: Install) -> bool:
        patch_of[id(self)] = await restart(self)
        return patch_of[id(self)]

    async def skipped(self: Install, applied: bool) -> str:
        return await checksum_of(self) if patch_of.pop(id(self), False) else await bring(self, applied)

    patch_of: dict[int, bool] = {}
    patch.setattr(Install, "_restart", at_once)
    patch.setattr(Install, "_bring", skipped)


def a_timeout_is_a_success(patch: Patch) -> None:
    bring = Install._bring

    async def hopeful(self: Install, applied: bool) -> str:
        try:
            return await bring(self, applied)
        except NoAnswer:
            await resume(self)
            return await checksum_of(self)

    patch.setattr(Install, "_bring", hopeful)


def no_fence(patch: Patch) -> None:
    async def send(self: Gate, fence: Fence, step: str, command: Callable[[], Awaitable[Any]]) -> Any:
        return await command()

    patch.setattr(Gate, "claim", nothing)
    patch.setattr(Gate, "send", send)


def no_bracket(patch: Patch) -> None:
    """What an engine holds is read at the opening of a batch alone."""

    async def close(self: Batch) -> bool:
        return True

    patch.setattr(Batch, "close", close)


def a_bracket_that_compares_its_ends_alone(patch: Patch) -> None:
    """Not with what was proven at the publish."""

    async def mark(self: Bracket, engine: Engine) -> Mark:
        return await engine.mark()

    patch.setattr(Bracket, "mark", mark)


async def resume(install: Install) -> None:
    with suppress(RatchetError):
        await install.engine.resume(60)


async def checksum_of(install: Install) -> str:
    try:
        return (await install.engine.mark()).checksum
    except RatchetError:
        return ""


VARIANTS = {
    variant.__name__: variant
    for variant in (
        no_checksum_of_all_ranks,
        no_flush_and_no_key,
        ready_whatever_came_out,
        a_restarted_engine_works_at_once,
        a_timeout_is_a_success,
        no_fence,
        no_bracket,
        a_bracket_that_compares_its_ends_alone,
    )
}
