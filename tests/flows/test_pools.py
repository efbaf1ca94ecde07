"""Leases: one stage at a time on a pool that holds devices; the wait is counted, and says who holds the pool."""

import asyncio
from typing import Any

import pytest

from conf.errors import HandoverError
from conf.schema import Pool
from flows.pools import Leases
from flows.waits import HANDOVER, POOL, Clock
from tasks.handover import Role


def test_two_stages_on_one_pool_take_turns_and_the_second_counts_its_wait() -> None:
    order: list[str] = []

    async def stage(leases: Leases, name: str, clock: Clock) -> None:
        async with leases.take("train", name, clock):
            order.append(f"{name} begins")
            await asyncio.sleep(0.01)
            order.append(f"{name} ends")

    async def main() -> tuple[Clock, Clock]:
        leases, first, second = Leases({"train": Pool(roles=["train"])}), Clock(), Clock()
        await asyncio.gather(stage(leases, "reference", first), stage(leases, "update", second))
        return first, second

    first, second = asyncio.run(main())
    assert order == ["reference begins", "reference ends", "update begins", "update ends"]
    assert first.waits == {}
    assert set(second.waits) == {POOL}


def test_stages_of_a_cpu_pool_run_at_the_same_time() -> None:
    async def main() -> list[str]:
        leases, order, both = Leases({"cpu": Pool(roles=["cpu"])}), [], asyncio.Barrier(2)

        async def stage() -> None:
            async with leases.take("cpu", "x", Clock()):
                await both.wait()  # passes only when both are inside
                order.append("inside")

        await asyncio.wait_for(asyncio.gather(stage(), stage()), 10)
        return order

    assert asyncio.run(main()) == ["inside", "inside"]


def test_a_pool_is_free_again_after_an_error() -> None:
    async def main() -> str:
        leases = Leases({"train": Pool(roles=["train"])})
        try:
            async with leases.take("train", "first", Clock()):
                raise ValueError
        except ValueError:
            pass
        async with leases.take("train", "second", clock := Clock()):
            return str(clock.waits)

    assert asyncio.run(main()) == "{}"


class Claims:
    """Stages that want one pool, each till it is told to end; what has it now, in the order it was given."""

    def __init__(self) -> None:
        self.leases, self.inside = Leases({"gpus": Pool(roles=["rollout", "train"])}), list[str]()
        self.ends: dict[str, asyncio.Event] = {}
        self.clocks: dict[str, Clock] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def ask(self, name: str, *, shared: bool = False, urgent: bool = False) -> list[str]:
        """What has the pool once the stage has asked for it."""
        self.ends[name], self.clocks[name] = asyncio.Event(), Clock()

        async def stage() -> None:
            async with self.leases.take("gpus", name, self.clocks[name], shared=shared, urgent=urgent):
                self.inside.append(name)
                await self.ends[name].wait()
                self.inside.remove(name)

        self.tasks.append(asyncio.create_task(stage()))
        return await self._settled()

    async def end(self, name: str) -> list[str]:
        """What has the pool once the stage has given it back."""
        self.ends[name].set()
        return await self._settled()

    def said(self, name: str) -> str:
        """What the stage is shown to wait for; empty: it does not."""
        return self.clocks[name].message

    async def _settled(self) -> list[str]:
        for _ in range(10):  # more turns of the loop than a stage takes from one wait to the next
            await asyncio.sleep(0)
        return list(self.inside)


def test_whoever_waits_says_who_has_the_pool_and_who_is_before_it_and_says_it_anew_when_that_changes() -> None:
    async def main() -> None:
        q = Claims()
        await q.ask("rollout 1", shared=True)
        await q.ask("rollout 2", shared=True)
        await q.ask("evaluate")
        assert q.said("evaluate") == "gpus: held by rollout 1, rollout 2"
        await q.ask("reference")
        assert q.said("reference") == "gpus: held by rollout 1, rollout 2; behind evaluate"
        await q.ask("publish", urgent=True)
        assert q.said("evaluate") == "gpus: held by rollout 1, rollout 2; behind publish"
        assert q.said("reference") == "gpus: held by rollout 1, rollout 2; behind publish, evaluate"
        await q.end("rollout 1")
        assert q.said("publish") == "gpus: held by rollout 2"
        await q.end("rollout 2")
        assert q.said("publish") == ""
        assert q.said("reference") == "gpus: held by publish; behind evaluate"
        q.tasks[2].cancel()  # evaluate
        await q.end("publish")
        assert q.said("reference") == ""
        assert [wait.cause for wait in q.clocks["reference"].spans] == [POOL]  # one wait, whatever it was called

    asyncio.run(main())


def test_shared_claims_hold_a_pool_together_and_an_exclusive_one_waits_for_all_of_them() -> None:
    async def main() -> None:
        q = Claims()
        assert await q.ask("rollout 1", shared=True) == ["rollout 1"]
        assert await q.ask("rollout 2", shared=True) == ["rollout 1", "rollout 2"]
        assert await q.ask("publish") == ["rollout 1", "rollout 2"]
        assert await q.end("rollout 1") == ["rollout 2"]
        assert await q.end("rollout 2") == ["publish"]

    asyncio.run(main())


def test_an_urgent_claim_goes_before_those_that_waited_longer() -> None:
    async def main() -> None:
        q = Claims()
        assert await q.ask("rollout 1", shared=True) == ["rollout 1"]
        await q.ask("evaluate")
        await q.ask("reference")
        assert await q.ask("publish", urgent=True) == ["rollout 1"]
        assert await q.end("rollout 1") == ["publish"]
        assert await q.end("publish") == ["evaluate"]
        assert await q.end("evaluate") == ["reference"]

    asyncio.run(main())


def test_a_shared_claim_waits_behind_an_exclusive_publish_though_those_inside_would_share() -> None:
    """Or rollouts that follow each other would keep the new weights out for ever."""

    async def main() -> None:
        q = Claims()
        await q.ask("rollout 1", shared=True)
        await q.ask("publish", urgent=True)
        assert await q.ask("rollout 2", shared=True) == ["rollout 1"]
        assert await q.end("rollout 1") == ["publish"]
        assert await q.end("publish") == ["rollout 2"]

    asyncio.run(main())


def test_an_urgent_claim_that_is_shared_goes_in_beside_a_rollout_before_one_that_waits() -> None:
    """A publish under rebuild and keep."""

    async def main() -> None:
        q = Claims()
        await q.ask("rollout 1", shared=True)
        await q.ask("evaluate")
        assert await q.ask("publish", shared=True, urgent=True) == ["rollout 1", "publish"]

    asyncio.run(main())


class Hands:
    """A hand-over that notes what it is asked for."""

    def __init__(self) -> None:
        self.state = "SERVING"
        self.given: list[str] = []

    def changes(self, role: str) -> bool:
        return role != "cpu" and role != self.state

    async def give(self, role: str) -> None:
        self.given.append(role)
        self.state = role


def test_a_co_located_pool_is_brought_to_the_stages_role_and_the_time_is_a_wait_of_its_own() -> None:
    async def main() -> tuple[list[str], list[set[str]]]:
        hands: Any = Hands()
        pools = {"all": Pool(roles=["rollout", "train"]), "cpu": Pool(roles=["cpu"])}
        leases, waits = Leases(pools, hands), []
        roles: list[tuple[str, Role]] = [("all", "train"), ("all", "train"), ("all", "cpu"), ("cpu", "rollout")]
        for pool, role in roles:
            async with leases.take(pool, "a stage", clock := Clock(), role):
                waits.append(set(clock.waits))
        return hands.given, waits

    given, waits = asyncio.run(main())
    assert given == ["train"]
    assert waits == [{HANDOVER}, set(), set(), set()]


def test_a_hand_over_that_fails_frees_the_pool() -> None:
    class Stuck(Hands):
        async def give(self, role: str) -> None:
            raise HandoverError("stuck")

    async def main() -> None:
        hands: Any = Stuck()
        leases = Leases({"all": Pool(roles=["rollout", "train"])}, hands)
        for _ in range(2):
            with pytest.raises(HandoverError, match="stuck"):
                async with leases.take("all", "a stage", Clock(), "train"):
                    raise AssertionError("it must not begin")

    asyncio.run(asyncio.wait_for(main(), 10))
