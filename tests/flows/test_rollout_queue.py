"""The queue between rollouts and updates: bounds, order, back-pressure, and that it never locks up."""

import asyncio
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from flows.rollout_queue import Queue


def inside(body: Callable[[], None]) -> None:
    """Futures need a loop; nothing here waits."""

    async def main() -> None:
        body()

    asyncio.run(main())


def test_a_rollout_gets_room_for_its_whole_batch_or_waits() -> None:
    def body() -> None:
        queue = Queue(groups=5)
        first, second, third = (queue.reserve(n, 2, 100) for n in (1, 2, 3))
        assert (first.done(), second.done(), third.done()) == (True, True, False)
        assert (queue.groups, queue.tokens) == (4, 200)
        queue.take(1)
        assert third.done()
        assert queue.groups == 4

    inside(body)


def test_tokens_under_way_count_as_the_most_they_may_become_then_as_what_they_are() -> None:
    def body() -> None:
        queue = Queue(tokens=150)
        queue.reserve(1, 2, 100)
        second = queue.reserve(2, 2, 100)
        assert not second.done()
        queue.generated(1, 2, 50)
        assert second.done()
        assert queue.tokens == 150

    inside(body)


def test_the_batch_that_is_trained_next_gets_in_whatever_is_behind_it() -> None:
    """A rollout in the tail of another may end before it; after a resume its batch fills the queue."""

    def body() -> None:
        queue = Queue(groups=2)
        queue.generated(2, 2, 10)
        assert queue.reserve(1, 2, 10).done()
        assert not queue.reserve(3, 2, 10).done()

    inside(body)


def test_asking_and_taking_again_changes_nothing() -> None:
    def body() -> None:
        queue = Queue(groups=2)
        assert queue.reserve(1, 2, 10) is queue.reserve(1, 2, 10)
        queue.take(1)
        queue.take(1)
        assert queue.groups == 0

    inside(body)


@given(
    limit=st.integers(1, 8),
    tokens=st.integers(1, 400),
    sizes=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 100)), min_size=1, max_size=8),
    resumed=st.sets(st.integers(0, 7)),
    data=st.data(),
)
def test_any_run_comes_to_its_end_within_the_bounds(
    limit: int, tokens: int, sizes: list[tuple[int, int]], resumed: set[int], data: st.DataObject
) -> None:
    """Random sizes, ends and resumes: every batch gets in, in order, and is taken once."""

    def body() -> None:
        queue = Queue(limit, tokens)
        asked = {n: queue.reserve(n, *size) for n, size in enumerate(sizes) if n not in resumed}
        for n in resumed & set(range(len(sizes))):
            queue.generated(n, sizes[n][0], data.draw(st.integers(0, sizes[n][1])))
        generated, taken = {n for n in resumed if n < len(sizes)}, 0
        while taken < len(sizes):
            inside = [n for n, future in asked.items() if future.done()]
            assert inside == sorted(asked)[: len(inside)]  # none overtakes another
            held = [n for n in {*inside, *generated} if n >= taken]
            if not resumed and len(held) > 1:
                assert sum(sizes[n][0] for n in held) <= limit
                assert queue.tokens <= tokens
            running = [n for n in inside if n >= taken and n not in generated]
            assert running or taken in generated  # something can always go on
            if taken in generated and (not running or data.draw(st.booleans())):
                queue.take(taken)
                taken += 1
            else:
                n = data.draw(st.sampled_from(running))
                queue.generated(n, sizes[n][0], data.draw(st.integers(0, sizes[n][1])))
                generated.add(n)
        assert (queue.groups, queue.tokens) == (0, 0)

    inside(body)
