"""One iteration on a real Prefect server, with stages that do nothing: order, waits, resume, failure, cancel."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId
from prefect.client.schemas.objects import FlowRun, TaskRun

from conf.errors import StageError
from conf.schema import Node
from flows import account, prefect_server
from flows.pool_time import CAUSES, run_seconds
from flows.pools import Leases
from flows.run import RUN, iteration
from flows.waits import REWARD, UPSTREAM, WEIGHTS
from tests.fakes.runs import noop_run
from tests.fakes.stages import GRAPH
from tests.fakes.streaming import EVENTS

pytestmark = pytest.mark.usefixtures("prefect_api")


@flow(name="noop-run")
async def noop_flow(folder: str, iterations: int, nodes: dict[str, Any], overrides: Sequence[str] = ()) -> list[Any]:
    """The run flow without services: gives the display's events."""
    with noop_run(Path(folder), {k: Node(**v) for k, v in nodes.items()}, iterations, overrides) as run:
        RUN.set(run)
        for number in run.remaining():
            await iteration(number)
        return run.display.events


def nodes(**changes: Node) -> dict[str, Any]:
    return {name: vars(node) for name, node in {**GRAPH, **changes}.items()}


def run_flow(folder: Path, iterations: int = 1, **changes: Node) -> tuple[Any, FlowRun]:
    """Run it; gives (state, flow run)."""
    state = asyncio.run(noop_flow(str(folder), iterations, nodes(**changes), return_state=True))
    return state, asyncio.run(_flow_run(state.state_details.flow_run_id))


async def _flow_run(identity: Any) -> FlowRun:
    async with get_client() as client:
        return await client.read_flow_run(identity)


def task_runs(parent: FlowRun, wanted: int) -> dict[str, TaskRun]:
    """The stages of the parent's iterations by name, once the server has heard of all their ends."""

    async def read() -> dict[str, TaskRun]:
        async with get_client() as client:
            for _ in range(100):
                iterations = await client.read_flow_runs(
                    flow_run_filter=FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[parent.id]))
                )
                runs = await client.read_task_runs(
                    flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[r.id for r in iterations]))
                )
                found = {f"{run.name}": run for run in runs}
                if len(found) >= wanted and all(run.state and run.state.is_final() for run in runs):
                    return found
                await asyncio.sleep(0.2)
        raise AssertionError(f"expected {wanted} finished stages, got {[(r.name, r.state_name) for r in runs]}")

    return asyncio.run(read())


def test_every_stage_is_a_task_run_under_its_own_name(tmp_path: Path) -> None:
    state, parent = run_flow(tmp_path / "a")
    assert state.is_completed()
    runs = task_runs(parent, 7)
    assert set(runs) == {"prompts", *GRAPH}
    assert {run.state_name for run in runs.values()} == {"Completed"}


def test_a_finished_stage_is_not_repeated_and_shows_as_cached(tmp_path: Path) -> None:
    broken = {**GRAPH["reward"].__dict__, "stage": "tests.fakes.stages:fails"}
    state, parent = run_flow(tmp_path / "a", reward=Node(**broken))
    assert state.is_failed()
    assert "this stage fails" in state.message
    assert task_runs(parent, 3)["reward"].state_name == "Failed"

    state, parent = run_flow(tmp_path / "a")
    runs = task_runs(parent, 7)
    assert state.is_completed()
    assert runs["prompts"].state_name == runs["rollout"].state_name == "Cached"
    assert runs["reward"].state_name == runs["publish"].state_name == "Completed"


def test_the_first_error_is_raised_as_itself_and_the_other_stages_end(tmp_path: Path) -> None:
    slow = Node("tests.fakes.stages:sleeps", "cpu", ["rollout"])
    wrong = Node("tests.fakes.stages:fails", "cpu", ["rollout"])
    with pytest.raises(StageError, match=r"^stage reward of iteration 1 raised ValueError: this stage fails$"):
        asyncio.run(noop_flow(str(tmp_path / "a"), 1, nodes(slow=slow, reward=wrong)))


def test_waits_are_counted_by_cause_and_shown_in_the_artifact(tmp_path: Path) -> None:
    run_flow(tmp_path / "a")
    with noop_run(tmp_path / "a") as run:
        rows = {row.node: row for row in run.ledger.accounts.stages(1)}
    assert UPSTREAM in rows["advantage"].waits
    assert rows["prompts"].waits == {}
    assert all(row.state == "completed" for row in rows.values())

    (advantage,) = [r for r in artifact("stage-waits") if r["stage"] == "advantage"]
    assert advantage["AwaitingUpstream"] > 0


def artifact(key: str) -> list[dict[str, Any]]:
    """The rows of the newest table under the key."""

    async def read() -> Any:
        async with get_client() as client:
            return await client.request("GET", "/artifacts/{key}/latest", path_params={"key": key})

    rows: list[dict[str, Any]] = json.loads(asyncio.run(read()).json()["data"])
    return rows


def test_a_prefect_server_that_is_away_when_an_iteration_is_accounted_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next iteration is at work by then: it must not be cancelled for that."""
    outages, shown = ["refused", "reset"], account.acreate_table_artifact

    async def away(**artifact: Any) -> Any:
        if outages:
            raise httpx.ConnectError(outages.pop())
        return await shown(**artifact)

    async def up() -> None: ...

    monkeypatch.setattr(account, "acreate_table_artifact", away)
    monkeypatch.setattr(prefect_server, "until_up", up)
    events = asyncio.run(noop_flow(str(tmp_path / "a"), 1, nodes()))
    said = [f"warning: Prefect is away ({why}); waiting for it" for why in ("reset", "refused")]
    assert [event[1] for event in events if event[0] == "message"] == said
    assert [each["stage"] for each in artifact("stage-waits")][:2] == ["prompts", "rollout"]


STREAMING = {
    "rollout": Node("tests.fakes.streaming:rollout", "rollout", ["prompts"]),
    "reward": Node("tests.fakes.streaming:reward", "cpu", ["rollout"]),
}
FIRST, SECOND = "i000001-g000", "i000001-g001"


def test_a_stage_that_streams_works_on_a_group_while_the_rollout_generates_the_next(tmp_path: Path) -> None:
    EVENTS.clear()
    state, _ = run_flow(tmp_path / "a", **STREAMING)
    assert state.is_completed()
    assert [
        f"generated {FIRST}", f"scored {FIRST}", f"generated {SECOND}", f"scored {SECOND}", "whole rollout",
    ] == EVENTS  # fmt: skip
    with noop_run(tmp_path / "a") as run:
        rows = {row.node: row for row in run.ledger.accounts.stages(1)}
        assert not run.streams  # nothing is kept of an iteration that is over
        assert run.store.find(1, "reward").rows == 4
    assert UPSTREAM in rows["reward"].waits
    assert rows["reward"].started < rows["rollout"].ended < rows["reward"].ended


@pytest.mark.parametrize("pinned", [True, False])
def test_a_stage_of_the_trainer_streams_where_it_takes_nothing_from_the_engines(
    tmp_path: Path, pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it holds its pool only while it computes."""
    EVENTS.clear()
    take = Leases.take

    @asynccontextmanager
    async def noted(leases: Leases, pool: str, holder: str, *rest: Any, **more: Any) -> AsyncIterator[None]:
        async with take(leases, pool, holder, *rest, **more):
            if holder.startswith("reference"):
                EVENTS.append(f"takes {pool}")
            yield
        if holder.startswith("reference"):
            EVENTS.append(f"leaves {pool}")

    monkeypatch.setattr(Leases, "take", noted)
    graph = nodes(
        rollout=STREAMING["rollout"],
        reference=Node("tests.fakes.streaming:reference", "train", ["rollout"]),
        # Where nothing else reads the groups, this one judges them.
        reward=GRAPH["reward"] if pinned else STREAMING["reward"],
    )
    pins = ["pools.rollout.devices=[cpu:0]", "pools.train.devices=[cpu:1]"] if pinned else []
    asyncio.run(noop_flow(str(tmp_path / "a"), 1, graph, pins))
    lease = ["takes train", "leaves train"]
    beside = [
        f"generated {FIRST}", lease[0], f"computed {FIRST}", lease[1],
        f"generated {SECOND}", lease[0], f"computed {SECOND}", lease[1], "whole 4",
    ]  # fmt: skip
    after = [
        f"generated {FIRST}", f"scored {FIRST}", f"generated {SECOND}", f"scored {SECOND}",
        "whole rollout", lease[0], "whole 4", lease[1],
    ]  # fmt: skip
    assert sorted(EVENTS) == sorted(beside if pinned else after)
    own = [event for event in EVENTS if event != "whole rollout"]
    assert own == [event for event in (beside if pinned else after) if event != "whole rollout"]


def test_on_resume_a_stage_that_streams_reads_the_rollout_that_was_committed(tmp_path: Path) -> None:
    EVENTS.clear()
    plain = {"rollout": GRAPH["rollout"], "reward": Node("tests.fakes.stages:fails", "cpu", ["rollout"])}
    state, _ = run_flow(tmp_path / "a", **plain)
    assert "this stage fails" in state.message
    state, _ = run_flow(tmp_path / "a", **STREAMING)
    assert state.is_completed()
    assert EVENTS == ["whole rollout"]


def test_a_stage_that_fails_while_the_rollout_waits_for_it_ends_both(tmp_path: Path) -> None:
    wrong = Node("tests.fakes.streaming:fails", "cpu", ["rollout"])
    with pytest.raises(StageError, match=r"^stage reward of iteration 1 raised ValueError: this stage fails$"):
        asyncio.run(noop_flow(str(tmp_path / "a"), 1, nodes(**{**STREAMING, "reward": wrong})))


POOLS = ("cpu", "rollout", "train")


def test_the_time_of_each_pool_adds_up_in_metrics_artifact_and_ledger(tmp_path: Path) -> None:
    run_flow(tmp_path / "a", iterations=3)
    with noop_run(tmp_path / "a") as run:
        accounts = run.ledger.accounts
        (session, _), rows, metrics = accounts.sessions(), accounts.stages(), accounts.metrics()
    for values in metrics.values():
        for pool in POOLS:
            idle = sum(seconds for name, seconds in values.items() if name.startswith(f"idle/{pool}/"))
            assert values[f"busy/{pool}"] + idle == pytest.approx(values["time/iteration"])
    assert session.ready is not None
    assert session.accounted is not None
    assert session.ended is not None
    iterations = sum(values["time/iteration"] for values in metrics.values())
    assert iterations == pytest.approx(session.accounted - session.ready)  # no second between them
    for seconds in run_seconds([session], rows, POOLS).values():
        assert sum(seconds.values()) == pytest.approx(session.ended - session.started)
    tables = artifact("pool-seconds")
    assert sorted(table["name"] for table in tables) == sorted(POOLS)
    for table in tables:
        causes = sum(seconds for name, seconds in table.items() if name in CAUSES)
        assert causes == pytest.approx(table["sum"], abs=0.01)
        assert table["sum"] == table["wall"] == round(metrics[3]["time/iteration"], 3)


@flow(name="ahead-run")
async def ahead_flow(folder: str) -> tuple[dict[str, float], float]:
    """The first iteration, while the rollout of the second is under way; and the seconds before that had begun."""
    with noop_run(Path(folder)) as run, run.clock(2, run.graph["rollout"]) as clock:
        RUN.set(run)
        await iteration(1)
        (session,) = run.ledger.accounts.sessions()
        assert session.ready is not None
        return run.history[1], clock.started - session.ready


def test_an_iterations_time_counts_what_another_ones_stage_does_meanwhile(tmp_path: Path) -> None:
    values, before = asyncio.run(ahead_flow(str(tmp_path / "a")))
    assert values["time/outside_stages"] == pytest.approx(before, abs=1e-5)
    assert {name for name in values if name.startswith("idle/rollout/")} == {
        "idle/rollout/publish",
        "idle/rollout/other",
    }
    assert [values[f"idle/{pool}/other"] for pool in POOLS] == pytest.approx([before] * 3, abs=1e-5)


SLOW = Node("tests.fakes.stages:sleeps", "cpu", ["rollout"])
AFTER_SLOW = Node("tests.fakes.stages:advantage", "cpu", ["reward", "reference", "slow"])
SLOW_REWARD = Node("tests.fakes.stages:slow_reward", "cpu", ["rollout"])


@pytest.mark.parametrize(
    ("waits", "changes"),
    [
        (f"advantage:RUNNING:{UPSTREAM}", {"slow": SLOW, "advantage": AFTER_SLOW}),
        (f"advantage:RUNNING:{REWARD}", {"reward": SLOW_REWARD}),
        (f"publish:RUNNING:{WEIGHTS}", {"reward": SLOW_REWARD}),
    ],
)
def test_a_wait_is_a_running_sub_state_while_it_lasts(tmp_path: Path, waits: str, changes: dict[str, Node]) -> None:
    """Pins the semi-internal call: the server must hear of the sub-state and of its end."""

    async def watch() -> set[str]:
        seen: set[str] = set()
        async with get_client() as client:
            before = {r.id for r in await client.read_task_runs()}
            running = asyncio.create_task(noop_flow(str(tmp_path / "a"), 1, nodes(**changes), return_state=True))
            for _ in range(150):
                seen = {
                    f"{r.name}:{r.state_type.value}:{r.state_name}"
                    for r in await client.read_task_runs()
                    if r.state_type and r.id not in before
                }
                if waits in seen:
                    break
                await asyncio.sleep(0.2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return seen

    assert waits in asyncio.run(watch())
