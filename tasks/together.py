"""Doing several things at the same time, with one error for the user if one of them fails."""

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def all_or_first_error() -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first real error is raised as itself, after the other tasks were cancelled and have ended.

    Where the caller's task was cancelled meanwhile, its next await raises CancelledError. Until Python 3.13 a TaskGroup
    forgets that (python/cpython#116720): whoever handles the error would go on as if nobody had asked it to end.
    """
    task = asyncio.current_task()
    assert task
    before, leaving = task.cancelling(), True
    try:
        async with asyncio.TaskGroup() as group:
            yield group
            leaving = group._parent_cancel_requested  # type: ignore[attr-defined]
    except BaseExceptionGroup as errors:
        if sys.version_info < (3, 13):
            if group._parent_cancel_requested and not leaving:  # type: ignore[attr-defined]
                task.uncancel()  # its own, of an error that came while it waited for its tasks
            if task.cancelling() > before:
                task.uncancel()  # so that the count stays
                task.cancel()
        raise next(_leaves(errors)) from None


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error
