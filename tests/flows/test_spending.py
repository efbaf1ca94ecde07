"""What attempts of stages take is in the ledger, however they end, and in the numbers of their iteration."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect import flow

from conf.errors import StageError
from data.accounts import Spending
from flows.run import RUN, iteration
from tasks.stage import Context
from tests.fakes import stages
from tests.fakes.runs import noop_run

pytestmark = pytest.mark.usefixtures("prefect_api")

FIRST, SECOND = "i000001-g000", "i000001-g001"  # of two samples each
NODES = stages.paced()


@pytest.fixture(autouse=True)
def _no_pace() -> Iterator[None]:
    yield
    stages.PACE.clear()


@flow(name="spends")
async def once(folder: str) -> None:
    with noop_run(Path(folder), NODES, 1) as run:
        RUN.set(run)
        await iteration(1)


def takes(cost: Spending, group: str, count: int, then: Callable[[], object] | None = None) -> None:
    """The stage that goes with the cost takes so many; `then` it ends as this ends."""

    async def body(context: Context) -> None:
        context.spend(cost, group, count)
        if then:
            then()

    stages.PACE[1, "rollout" if cost == "response_tokens" else "reward"] = body


def fails() -> None:
    raise ValueError("no")


def interrupted() -> None:
    raise asyncio.CancelledError


def test_what_failed_and_cancelled_attempts_took_counts_beside_what_the_last_one_took(tmp_path: Path) -> None:
    folder = str(tmp_path / "a")
    takes("response_tokens", FIRST, 7, fails)
    with pytest.raises(StageError, match="no"):
        asyncio.run(once(folder))
    takes("response_tokens", SECOND, 5)
    takes("reward_calls", FIRST, 3, fails)
    with pytest.raises(StageError, match="no"):
        asyncio.run(once(folder))
    takes("reward_calls", FIRST, 2, interrupted)
    with pytest.raises(BaseException):  # noqa: B017, PT011  as Prefect gives a cancelled task
        asyncio.run(once(folder))
    takes("reward_calls", SECOND, 8)
    asyncio.run(once(folder))
    with noop_run(tmp_path / "a", NODES, 1) as run:
        rows = [(row.node, row.state, row.spent) for row in run.ledger.accounts.stages(1) if row.spent]
        assert rows == [
            ("rollout", "failed", {"response_tokens": {FIRST: 7}}),
            ("rollout", "completed", {"response_tokens": {SECOND: 5}}),
            ("reward", "failed", {"reward_calls": {FIRST: 3}}),
            ("reward", "failed", {"reward_calls": {FIRST: 2}}),
            ("reward", "completed", {"reward_calls": {SECOND: 8}}),
        ]
        metrics = run.ledger.accounts.metrics()[1]
        assert len(run.experiment.reward.functions) == 2
        assert metrics["rollout/discarded_tokens"] == 12  # the rows of these stages have no tokens
        assert metrics["reward/discarded_calls"] == 13 - 4 * 2
        assert metrics["throughput/generated_tokens_per_s"] == pytest.approx(12 / metrics["time/iteration"])


def test_what_a_stage_took_that_anothers_error_ended_is_known(tmp_path: Path) -> None:
    """The reward waits inside a call when the stage beside it fails."""
    reached = asyncio.Event()

    async def spends(context: Context) -> None:
        context.spend("reward_calls", FIRST, 1)
        reached.set()
        await asyncio.Event().wait()

    async def fail(context: Context) -> None:
        await reached.wait()
        raise ValueError("no")

    stages.PACE[1, "reward"], stages.PACE[1, "update"] = spends, fail
    beside = {**NODES, "update": stages.replace(NODES["update"], needs=["rollout"])}

    @flow(name="spends-beside")
    async def main() -> None:
        with noop_run(tmp_path / "a", beside, 1) as run:
            RUN.set(run)
            await iteration(1)

    with pytest.raises(StageError, match="stage update of iteration 1 raised ValueError: no"):
        asyncio.run(main())
    with noop_run(tmp_path / "a", beside, 1) as run:
        (row,) = [row for row in run.ledger.accounts.stages(1) if row.node == "reward"]
        assert (row.state, row.spent) == ("failed", {"reward_calls": {FIRST: 1}})
