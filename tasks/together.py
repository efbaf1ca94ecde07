"""Doing several things at the same time, with one error for the user if one of them fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def all_or_first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first real error is raised as itself, after the other tasks were cancelled and have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except BaseExceptionGroup as errors:
        raise next(_leaves(errors)) from None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
