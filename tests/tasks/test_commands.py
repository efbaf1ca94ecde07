"""The fence before an engine: what is stale changes nothing, what is repeated is sent once, one command at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.engines.commands import Fence, Gate, Stale

RUN, BOOT = "run", "boot-1"


class Server:
    """Commands that came, in order, and those under way; they end when `open` is set."""

    def __init__(self) -> None:
        self.came: list[str] = []
        self.running = self.most = 0
        self.open = asyncio.Event()
        self.open.set()

    def command(self, name: str) -> Callable[[], Awaitable[str]]:
        async def send() -> str:
            self.came.append(name)
            self.running += 1
            self.most = max(self.most, self.running)
            try:
                await self.open.wait()
                await asyncio.sleep(0)
            finally:
                self.running -= 1
            return f"answer of {name}"

        return send


def fence(attempt: int, number: int = 3, run: str = RUN, boot: str = BOOT) -> Fence:
    return Fence(run, number, attempt, boot)


def test_commands_go_one_at_a_time_in_the_order_they_came() -> None:
    async def main() -> None:
        gate, server = Gate(BOOT), Server()
        steps = [f"Q{i}" for i in range(6)]
        answers = await asyncio.gather(*(gate.send(fence(1), step, server.command(step)) for step in steps))
        assert answers == [f"answer of {step}" for step in steps]
        assert (server.came, server.most) == (steps, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (fence(1), "Q4 of version 3 is late: it is of attempt 1, the engine has seen attempt 2 at version 3"),
        (fence(2, number=2), "Q4 of version 2 is late: it is of attempt 2, the engine has seen attempt 2 at version 3"),
        (fence(9, boot="boot-0"), "Q4 of version 3 is for boot boot-0, the engine is boot-1"),
        (fence(9, run="other"), "Q4 of version 3 is of run other, the engine serves run"),
    ],
    ids=["older attempt", "older version of the same attempt", "another boot", "another run"],
)
def test_what_is_stale_is_refused_and_not_sent(late: Fence, message: str) -> None:
    async def main() -> None:
        gate, server = Gate(BOOT), Server()
        await gate.send(fence(2), "Q2", server.command("first"))
        with pytest.raises(Stale, match=message):
            await gate.send(late, "Q4", server.command("late"))
        assert server.came == ["first"]
        await gate.send(fence(2), "Q4", server.command("second"))  # whoever has the engine keeps it
        assert server.came == ["first", "second"]

    asyncio.run(main())


def test_a_repeated_command_is_sent_once_and_gets_the_stored_answer() -> None:
    async def main() -> None:
        gate, server = Gate(BOOT), Server()
        first = await gate.send(fence(1), "Q4", server.command("Q4"))
        again = await asyncio.gather(*(gate.send(fence(1), "Q4", server.command("again")) for _ in range(3)))
        assert [first, *again] == ["answer of Q4"] * 4
        assert server.came == ["Q4"]

    asyncio.run(main())


def test_a_command_repeated_while_it_is_under_way_waits_for_its_answer() -> None:
    async def main() -> None:
        gate, server = Gate(BOOT), Server()
        server.open.clear()
        both = [asyncio.create_task(gate.send(fence(1), "Q4", server.command(name))) for name in ("Q4", "again")]
        while not server.came:
            await asyncio.sleep(0)
        server.open.set()
        assert await asyncio.gather(*both) == ["answer of Q4"] * 2
        assert server.came == ["Q4"]

    asyncio.run(main())


def test_a_newer_attempt_sends_the_same_step_anew() -> None:
    async def main() -> None:
        gate, server = Gate(BOOT), Server()
        for attempt in (1, 2):
            await gate.send(fence(attempt), "Q4", server.command(f"Q4 of {attempt}"))
        await gate.send(fence(3, number=1), "Q4", server.command("older version, newer attempt"))  # a roll back
        assert server.came == ["Q4 of 1", "Q4 of 2", "older version, newer attempt"]

    asyncio.run(main())


def test_a_command_that_failed_has_no_answer_and_may_be_sent_again() -> None:
    async def fails() -> None:
        raise ValueError("refused")

    async def main() -> None:
        gate, server = Gate(BOOT), Server()
        with pytest.raises(ValueError, match="refused"):
            await gate.send(fence(1), "Q4", fails)
        assert await gate.send(fence(1), "Q4", server.command("Q4")) == "answer of Q4"

    asyncio.run(main())


def test_the_order_goes_on_in_the_next_life_but_not_the_answers() -> None:
    async def main() -> None:
        first, server = Gate("boot-1"), Server()
        await first.send(fence(5), "Q4", server.command("first life"))
        second = Gate("boot-2", after=first)
        for late in (fence(5), fence(4, boot="boot-2"), fence(9, run="other", boot="boot-2")):
            with pytest.raises(Stale):
                await second.send(late, "Q4", server.command("late"))
        await second.send(fence(5, boot="boot-2"), "Q4", server.command("second life"))
        assert server.came == ["first life", "second life"]

    asyncio.run(main())


def test_a_caller_that_is_cancelled_frees_the_engine_and_stores_no_answer() -> None:
    async def main() -> None:
        gate, server = Gate(BOOT), Server()
        server.open.clear()
        task = asyncio.create_task(gate.send(fence(1), "Q4", server.command("cancelled")))
        while not server.came:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        server.open.set()
        assert await gate.send(fence(2), "Q2", server.command("next")) == "answer of next"
        assert server.came == ["cancelled", "next"]

    asyncio.run(main())


SENT = st.tuples(
    st.builds(
        Fence,
        st.sampled_from([RUN, RUN, RUN, "other"]),
        st.integers(0, 2),
        st.integers(1, 4),
        st.sampled_from([BOOT, BOOT, BOOT, "boot-0"]),
    ),
    st.sampled_from(["Q2", "Q4"]),
)


@given(st.lists(SENT, max_size=12))
def test_whatever_comes_the_server_sees_one_run_and_one_life_in_order_and_nothing_twice(
    sent: list[tuple[Fence, str]],
) -> None:
    came: list[tuple[Fence, str]] = []

    async def main() -> None:
        gate = Gate(BOOT)
        for fence, step in sent:

            async def command(what: tuple[Fence, str] = (fence, step)) -> None:
                came.append(what)

            with suppress(Stale):
                await gate.send(fence, step, command)

    asyncio.run(main())
    order = [(fence.attempt, fence.number) for fence, _ in came]
    assert order == sorted(order)
    assert len(came) == len(set(came))
    assert len({fence.run for fence, _ in came}) <= 1
    assert {fence.boot for fence, _ in came} <= {BOOT}
    assert bool(came) == any(fence.boot == BOOT for fence, _ in sent)  # the first one is never stale
