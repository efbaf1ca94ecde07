"""A task group gives its first error as itself, and does not make its task forget that it was cancelled."""

import asyncio

import pytest

from tasks.together import all_or_first_error


async def fails(after: float = 0.0) -> None:
    await asyncio.sleep(after)
    raise ValueError("no")


def cancelled() -> int:
    task = asyncio.current_task()
    assert task
    return task.cancelling()


@pytest.mark.parametrize("busy", [False, True], ids=["its block has ended", "in its block"])
def test_an_error_of_a_task_is_raised_and_its_own_cancellation_leaves_nothing(busy: bool) -> None:
    async def group_that_fails() -> None:
        async with all_or_first_error() as group:
            group.create_task(fails())
            if busy:
                await asyncio.Event().wait()

    async def main() -> None:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^no$"):
                await group_that_fails()
            assert cancelled() == 0
        await asyncio.sleep(0)

    asyncio.run(main())


@pytest.mark.parametrize("first", ["error", "cancellation"])
def test_who_was_cancelled_while_a_task_failed_is_still_cancelled_after_the_error(first: str) -> None:
    """A task is still ending when the second of both comes."""
    seen: list[str] = []

    async def ends_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.1)
            if first == "cancellation":
                raise ValueError("no")

    async def caller() -> None:
        try:
            async with all_or_first_error() as group:
                group.create_task(ends_slowly())
                if first == "error":
                    group.create_task(fails(0.01))
        except ValueError:
            seen.append("error")
            assert cancelled() == 1
            await asyncio.Event().wait()  # as one that waits for a server to come back

    async def main() -> None:
        task = asyncio.ensure_future(caller())
        await asyncio.sleep(0.05)
        task.cancel()
        async with asyncio.timeout(10):
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(main())
    assert seen == ["error"]
