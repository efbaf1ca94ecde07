"""Schedules on the real executor: what overlaps, what waits for what, by the order of events; resume; what is stuck."""

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from prefect import flow, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId

from conf.errors import StageError
from conf.load import load
from conf.schema import Node
from data.ledger import Ledger
from flows.graph import load_graph
from flows.opening import Run
from flows.pool_time import run_seconds
from flows.run import RUN, _iterations, watched
from flows.schedule import Window, follows
from flows.waits import POOL, QUEUE, REWARD, UPSTREAM, WEIGHTS, Clock
from tasks.stage import Context
from tasks.together import all_or_first_error
from tests.fakes import stages
from tests.fakes.context import until
from tests.fakes.runs import Recorder, noop_run

pytestmark = pytest.mark.usefixtures("prefect_api")

Event = tuple[str, int, str]  # begun, done, or cause or message of a wait that has begun; iteration, node
RATIO = "update.correction.kind=ratio"
ASYNC = ("schedule.kind=async", RATIO)


@pytest.fixture(autouse=True)
def _no_pace() -> Iterator[None]:
    yield
    stages.PACE.clear()


@flow(name="paced-run")
async def paced_flow(folder: str, iterations: int, overrides: list[str], aside: bool = False) -> list[Any]:
    nodes = stages.paced() | ({"aside": Node("tests.fakes.stages:aside", "cpu", ["rollout"])} if aside else {})
    with noop_run(Path(folder), nodes, iterations, overrides) as run:
        RUN.set(run)
        await _iterations(run)
        assert isinstance(run.display, Recorder)
        return run.display.events


async def fails(context: Context) -> None:
    raise ValueError("no")


@flow(name="retried-run", retries=1)
async def retried_flow(folder: str, iterations: int, overrides: list[str]) -> list[Any]:
    return await paced_flow.fn(folder, iterations, overrides)


class Pace:
    """Holds stages until others have begun or ended, and gives the events of the run in their order."""

    def __init__(self) -> None:
        self.happened: dict[Event, asyncio.Event] = {}

    def _event(self, *event: Any) -> asyncio.Event:
        return self.happened.setdefault(event, asyncio.Event())

    def hold(self, iteration: int, node: str, *until: Event) -> None:
        """The stage stays in its body until these events, which a schedule without them never lets happen."""
        stages.PACE[iteration, node] = lambda context: self.happens(*until)

    async def happens(self, *events: Event) -> None:
        async with asyncio.timeout(120):
            for event in events:
                await self._event(*event).wait()

    def run(self, folder: Path, iterations: int, *overrides: str, aside: bool = False) -> list[Event]:
        begun, done = Recorder.stage_begun, Recorder.stage_done
        with pytest.MonkeyPatch.context() as patch:

            def noted(name: str, original: Callable[..., None]) -> Callable[..., None]:
                def note(recorder: Recorder, iteration: int, node: str) -> None:
                    original(recorder, iteration, node)
                    self._event(name, iteration, node).set()

                return note

            waiting = Clock.waiting

            def noted_wait(clock: Clock, cause: str, message: str, on: Sequence[str] = ()) -> Any:
                for what in (cause, message):
                    self._event(what, clock.iteration, clock.node).set()
                return waiting(clock, cause, message, on)

            patch.setattr(Clock, "waiting", noted_wait)
            patch.setattr(Recorder, "stage_begun", noted("begun", begun))
            patch.setattr(Recorder, "stage_done", noted("done", done))
            events = asyncio.run(paced_flow(str(folder), iterations, list(overrides), aside))
        return [event for event in events if event[0] in ("begun", "done")]


def dependencies(iterations: int) -> list[tuple[Event, Event]]:
    """(what comes first, what comes after) in every schedule."""
    found: list[tuple[Event, Event]] = []
    nodes = ("prompts", "rollout", "reward", "update", "publish")
    for n in range(1, iterations + 1):
        found += [(("done", n, a), ("begun", n, b)) for a, b in pairwise(nodes)]
        in_order = ("prompts", "rollout", "update", "publish") if n > 1 else ()
        found += [(("done", n - 1, node), ("begun", n, node)) for node in in_order]
    return found


def check(events: Sequence[Event], pairs: Sequence[tuple[Event, Event]]) -> None:
    assert len(set(events)) == len(events)
    for before, after in pairs:
        assert events.index(before) < events.index(after), (before, after)


def test_in_step_a_rollout_begins_when_the_iteration_before_has_ended(tmp_path: Path) -> None:
    """Its prompts are drawn while that one trains, which stays in its update until then."""
    pace = Pace()
    pace.hold(1, "update", ("done", 2, "prompts"), (WEIGHTS, 2, "rollout"))
    events = pace.run(tmp_path / "a", 3)
    check(events, dependencies(3))
    for n in (2, 3):
        before = max(events.index(("done", n - 1, node)) for node in stages.paced())
        assert before < events.index(("begun", n, "rollout"))


def test_async_overlaps_rollout_reward_and_update_of_three_batches(tmp_path: Path) -> None:
    """The worked example: each overlap is forced, since a stage stays until the other one has begun."""
    pace = Pace()
    pace.hold(1, "reward", ("begun", 2, "rollout"))
    pace.hold(2, "rollout", ("begun", 1, "update"))
    pace.hold(1, "update", ("begun", 2, "reward"), ("begun", 3, "rollout"))
    pace.hold(3, "rollout", ("begun", 2, "update"))
    events = pace.run(tmp_path / "a", 3, *ASYNC, "schedule.max_lag=2")
    check(events, dependencies(3))


@pytest.mark.parametrize("overrides", [(), (*ASYNC, "schedule.max_lag=2")], ids=["sync", "async"])
def test_each_second_is_in_one_iterations_time_and_has_one_cause(tmp_path: Path, overrides: Sequence[str]) -> None:
    pace = Pace()
    if overrides:
        pace.hold(1, "update", ("begun", 3, "rollout"))
        pace.hold(3, "rollout", ("begun", 2, "update"))  # it is under way when the first iteration is accounted for
    pace.run(tmp_path / "a", 4, *overrides)
    ledger = Ledger(tmp_path / "a" / "ledger.sqlite", read_only=True)
    (session,), rows, metrics = ledger.accounts.sessions(), ledger.accounts.stages(), ledger.accounts.metrics()
    ledger.close()
    assert session.ready is not None
    assert session.accounted is not None
    assert session.ended is not None
    wall = [values["time/iteration"] for values in metrics.values()]
    assert sum(wall) == pytest.approx(session.accounted - session.ready)
    for pool, seconds in run_seconds([session], rows, ("cpu", "rollout", "train")).items():
        assert sum(seconds.values()) == pytest.approx(session.ended - session.started)
        for values in metrics.values():
            idle = sum(value for name, value in values.items() if name.startswith(f"idle/{pool}/"))
            assert values[f"busy/{pool}"] + idle == pytest.approx(values["time/iteration"])
        for cause, name in (("working", f"busy/{pool}"), ("publish", f"idle/{pool}/publish")):
            assert sum(v.get(name, 0.0) for v in metrics.values()) == pytest.approx(seconds.get(cause, 0.0), abs=1e-5)


def test_one_step_off_runs_a_rollout_beside_the_update_before_it_and_no_further(tmp_path: Path) -> None:
    pace = Pace()
    pace.hold(1, "update", ("begun", 2, "rollout"), ("done", 2, "reward"), (WEIGHTS, 3, "rollout"))
    pace.hold(2, "update", ("begun", 3, "rollout"))
    events = pace.run(tmp_path / "a", 4, "schedule.kind=one_step_off", RATIO)
    fresh = [(("done", n - 2, "publish"), ("begun", n, "rollout")) for n in (3, 4)]
    check(events, dependencies(4) + fresh)


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_a_rollout_waits_for_the_weights_that_keep_its_lag(lag: int, tmp_path: Path) -> None:
    pace = Pace()
    pace.hold(1, "update", ("done", 1 + lag, "rollout"), (WEIGHTS, 2 + lag, "rollout"))
    events = pace.run(tmp_path / "a", 6, *ASYNC, f"schedule.max_lag={lag}")
    fresh = [(("done", n - 1 - lag, "publish"), ("begun", n, "rollout")) for n in range(2 + lag, 7)]
    check(events, dependencies(6) + fresh)
    with noop_run(tmp_path / "a", stages.paced(), 6, [*ASYNC, f"schedule.max_lag={lag}"]) as run:
        (row,) = [r for r in run.ledger.accounts.stages() if (r.iteration, r.node) == (2 + lag, "rollout")]
    assert WEIGHTS in row.waits


def test_a_full_queue_holds_the_rollout_and_drops_nothing(tmp_path: Path) -> None:
    pace = Pace()
    pace.hold(1, "update", ("done", 3, "rollout"), (QUEUE, 4, "rollout"))  # two batches beside its own
    overrides = (*ASYNC, "schedule.max_lag=4", "schedule.queue_groups=5")  # and a half that holds none
    events = pace.run(tmp_path / "a", 5, *overrides)
    room = [(("begun", n - 2, "update"), ("begun", n, "rollout")) for n in (3, 4, 5)]
    check(events, dependencies(5) + room)
    with noop_run(tmp_path / "a", stages.paced(), 5, overrides) as run:
        assert run.ledger.groups.counts() == {"issued": 10, "waiting": 0, "trained": 10}
        (row,) = [r for r in run.ledger.accounts.stages() if (r.iteration, r.node) == (4, "rollout")]
        assert QUEUE in row.waits


def test_a_rollout_begins_in_the_tail_of_the_one_before(tmp_path: Path) -> None:
    """Which stays, with nothing left to send, until the other one has begun beside it."""
    pace = Pace()

    async def in_its_tail(context: Context) -> None:
        assert context.stream is not None
        context.stream.tail.set()
        await pace.happens(("begun", 2, "rollout"))

    stages.PACE[1, "rollout"] = in_its_tail
    events = pace.run(tmp_path / "a", 2, *ASYNC, "schedule.max_lag=1")
    one_by_one = (("done", 1, "rollout"), ("begun", 2, "rollout"))
    check(events, [*(pair for pair in dependencies(2) if pair != one_by_one), one_by_one[::-1]])


@pytest.mark.parametrize("policy", ["rebuild", "keep"])
def test_a_publish_goes_in_beside_a_rollout_whose_responses_may_cross_versions(policy: str, tmp_path: Path) -> None:
    pace = Pace()
    pace.hold(1, "update", ("begun", 2, "rollout"))
    pace.hold(2, "rollout", ("done", 1, "publish"))
    crossing = [f"rollout.kv_policy={policy}", *(["rollout.accept_stale_kv=true"] if policy == "keep" else [])]
    events = pace.run(tmp_path / "a", 2, *ASYNC, "schedule.max_lag=1", *crossing)
    inside = [("begun", 2, "rollout"), ("begun", 1, "publish"), ("done", 1, "publish"), ("done", 2, "rollout")]
    check(events, dependencies(2) + list(pairwise(inside)))


def test_under_pin_a_publish_waits_for_the_rollout_that_runs(tmp_path: Path) -> None:
    pace = Pace()
    pace.hold(1, "update", ("begun", 2, "rollout"))
    pace.hold(2, "rollout", ("rollout: held by rollout of iteration 2", 1, "publish"))
    events = pace.run(tmp_path / "a", 2, *ASYNC, "schedule.max_lag=1")
    check(events, [*dependencies(2), (("done", 2, "rollout"), ("begun", 1, "publish"))])


def test_a_publish_takes_the_engines_before_a_rollout_that_waited_before_it(tmp_path: Path) -> None:
    """Something else has them until both wait: first the second rollout, then the first iteration's publish."""
    pace, beside = Pace(), list[asyncio.Task[None]]()
    held = "rollout: held by something else"
    pace.hold(1, "update", (held, 2, "rollout"))

    async def something_else() -> None:
        async with RUN.get().leases.take("rollout", "something else", Clock()):
            await pace.happens((held, 1, "publish"))

    async def begin_something_else(context: Context) -> None:
        beside.append(asyncio.create_task(something_else()))
        await asyncio.sleep(0)  # it is next in the line

    stages.PACE[1, "rollout"] = begin_something_else
    events = pace.run(tmp_path / "a", 2, *ASYNC, "schedule.max_lag=1")
    check(events, [*dependencies(2), (("done", 1, "publish"), ("begun", 2, "rollout"))])


def test_a_publish_interval_leaves_out_publishes_and_keeps_the_lag(tmp_path: Path) -> None:
    overrides = (*ASYNC, "schedule.max_lag=1", "schedule.publish_every=2")
    events = Pace().run(tmp_path / "a", 5, *overrides)
    assert [n for name, n, node in events if (name, node) == ("begun", "publish")] == [2, 4, 5]
    fresh = [(("done", 2, "publish"), ("begun", n, "rollout")) for n in (3, 4)]
    check(events, [*fresh, (("done", 4, "publish"), ("begun", 5, "rollout"))])


def test_an_error_in_one_iteration_ends_the_run_and_it_continues_where_it_stood(tmp_path: Path) -> None:
    """The rollout ahead is in the queue by then: it is neither repeated nor lost."""
    pace = Pace()

    async def fail(context: Context) -> None:
        await pace._event("done", 2, "rollout").wait()
        raise ValueError("no")

    stages.PACE[1, "update"] = fail
    overrides = (*ASYNC, "schedule.max_lag=2")
    with pytest.raises(StageError, match=r"^stage update of iteration 1 raised ValueError: no$"):
        pace.run(tmp_path / "a", 4, *overrides)
    stages.PACE.clear()
    events = Pace().run(tmp_path / "a", 4, *overrides)
    assert not {("begun", 1, "rollout"), ("begun", 2, "rollout")} & set(events)
    assert [n for name, n, node in events if (name, node) == ("done", "update")] == [1, 2, 3, 4]
    with noop_run(tmp_path / "a", stages.paced(), 4, overrides) as run:
        assert run.ledger.groups.counts() == {"issued": 8, "waiting": 0, "trained": 8}
        assert not run.remaining()


def test_an_error_ends_the_run_also_where_it_is_known_to_the_next_iteration_before(tmp_path: Path) -> None:
    """That one, whose update waits for the update that fails, is still ending a stage when the run ends it."""
    pace = Pace()

    async def fail(context: Context) -> None:
        await pace.happens(("update of iteration 1", 2, "update"), ("at work", 2, "aside"))
        raise ValueError("no")

    async def ends_slowly(context: Context) -> None:
        pace._event("at work", 2, "aside").set()
        try:
            await pace.happens(("never", 0, ""))
        finally:
            await asyncio.sleep(2)

    stages.PACE[1, "update"] = fail
    stages.PACE[2, "aside"] = ends_slowly
    with pytest.raises(StageError, match=r"^stage update of iteration 1 raised ValueError: no$"):
        pace.run(tmp_path / "a", 4, *ASYNC, "schedule.max_lag=2", aside=True)


@pytest.mark.parametrize(
    ("node", "overrides"), [("prompts", []), ("rollout", [*ASYNC, "schedule.max_lag=2"])], ids=["sync", "async"]
)
def test_where_a_later_iteration_fails_those_before_it_are_ended_first(
    tmp_path: Path, node: str, overrides: list[str]
) -> None:
    """It fails while the first one is in its update, which needs nothing of it."""
    pace = Pace()
    pace.hold(1, "update", ("done", 2, node))
    stages.PACE[2, node] = fails
    with pytest.raises(StageError, match=rf"^stage {node} of iteration 2 raised ValueError: no$"):
        pace.run(tmp_path / "a", 4, *overrides)
    stages.PACE.clear()
    with noop_run(tmp_path / "a", stages.paced(), 4, overrides) as run:
        assert run.remaining() == range(2, 5)
        assert run.store.find(1, "publish")
    events = Pace().run(tmp_path / "a", 4, *overrides)
    assert [n for name, n, ended in events if (name, ended) == ("done", "update")] == [2, 3, 4]


@pytest.mark.parametrize("overrides", [[], [*ASYNC, "schedule.max_lag=2"]], ids=["sync", "async"])
def test_a_run_that_prefect_retries_takes_no_iteration_for_another(tmp_path: Path, overrides: list[str]) -> None:
    """The third iteration is the retry's first subflow, as the first was the first attempt's: neither is its result."""
    attempts = list[int]()

    async def fail_once(context: Context) -> None:
        attempts.append(context.iteration)
        if len(attempts) == 1:
            raise ValueError("no")

    stages.PACE[3, "update"] = fail_once
    state = asyncio.run(retried_flow(str(tmp_path / "a"), 5, overrides, return_state=True))
    assert state.is_completed()
    assert attempts == [3, 3]
    with noop_run(tmp_path / "a", stages.paced(), 5, overrides) as run:
        assert not run.remaining()
        assert run.ledger.groups.counts() == {"issued": 10, "waiting": 0, "trained": 10}
        assert {n for n, values in run.history.items() if "time/iteration" in values} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("overrides", [[], [*ASYNC, "schedule.max_lag=2"]], ids=["sync", "async"])
def test_each_iteration_is_a_flow_with_its_stages_also_where_they_overlap(tmp_path: Path, overrides: list[str]) -> None:
    state = asyncio.run(paced_flow(str(tmp_path / "a"), 3, overrides, return_state=True))
    stages_of_each = {("prompts", "Completed"), *((node, "Completed") for node in stages.paced())}
    wanted = {(f"iteration-{n:06d}", "Completed"): stages_of_each for n in (1, 2, 3)}

    async def seen() -> dict[tuple[str, str], set[tuple[str, str]]]:
        parent = FlowRunFilterParentFlowRunId(any_=[state.state_details.flow_run_id])
        async with get_client() as client:
            for _ in range(100):
                iterations = await client.read_flow_runs(flow_run_filter=FlowRunFilter(parent_flow_run_id=parent))
                found = {}
                for run in iterations:
                    mine = FlowRunFilter(id=FlowRunFilterId(any_=[run.id]))
                    tasks = await client.read_task_runs(flow_run_filter=mine)
                    found[run.name, run.state_name or ""] = {(task.name, task.state_name or "") for task in tasks}
                if found == wanted:
                    break
                await asyncio.sleep(0.2)
            return found

    assert asyncio.run(seen()) == wanted


async def never(*_: Context) -> None:
    await asyncio.Event().wait()


def stuck(folder: Path, left: Mapping[str, str], held: str = "") -> str:
    """The error of a run of one iteration that is left with these nodes at work (empty) or in a wait for this cause.

    held: a pool that something else has and never gives back. Seconds are given as N.
    """
    overrides = [*ASYNC, "schedule.max_lag=1", "schedule.stall_timeout_s=0.01"]

    async def holding(run: Run) -> None:
        async with run.leases.take(held, "what never ends", Clock()):
            await never()

    async def watching(run: Run) -> None:
        def now() -> dict[str, str]:
            return {clock.node: clock.under_way.cause if clock.under_way else "" for clock in run.clocks}

        await until(lambda: now() == left)
        await watched(run)

    async def main() -> None:
        with noop_run(folder, stages.paced(), 1, overrides) as run:
            RUN.set(run)
            async with all_or_first_error() as tasks:
                if held:
                    tasks.create_task(holding(run))
                tasks.create_task(watching(run))
                tasks.create_task(_iterations(run))

    with pytest.raises(StageError) as raised:
        asyncio.run(flow(main)())
    said, all_of_it = str(raised.value).split("; ", 1)
    assert said == "nothing in the run has moved for 0.01 s (schedule.stall_timeout_s)"
    return re.sub(r"\d+ s\b", "N s", all_of_it)


def test_what_is_stuck_ends_in_an_error_that_names_it(tmp_path: Path) -> None:
    """A stage of one's own that never comes back, while everything else waits for it."""
    stages.PACE[1, "reward"] = never
    error = stuck(tmp_path / "a", {"reward": "", "update": REWARD, "publish": WEIGHTS})
    assert error.startswith("under way: reward of iteration 1 (for N s); waiting: ")
    assert "update of iteration 1 (AwaitingReward: for reward, N s)" in error
    assert "publish of iteration 1 (AwaitingWeights: for update, N s)" in error


def test_a_rollout_that_is_stuck_is_named_with_all_that_waits_for_it(tmp_path: Path) -> None:
    stages.PACE[1, "rollout"] = never
    error = stuck(tmp_path / "a", {"rollout": "", "reward": UPSTREAM, "update": REWARD, "publish": WEIGHTS})
    assert error.startswith("under way: rollout of iteration 1 (for N s); waiting: ")
    assert "reward of iteration 1 (AwaitingUpstream: for rollout, N s)" in error


def test_where_every_stage_waits_the_error_says_for_what(tmp_path: Path) -> None:
    """No stage is under way: the pool that the update wants is never given back."""
    error = stuck(tmp_path / "a", {"update": POOL, "publish": WEIGHTS}, held="train")
    assert error.startswith("under way: no stage; waiting: ")
    assert "update of iteration 1 (AwaitingPool: train: held by what never ends, N s)" in error
    assert "publish of iteration 1 (AwaitingWeights: for update, N s)" in error


GRPO = ["prompts", "rollout", "reward", "reference", "advantage", "update", "publish", "evaluate"]


@pytest.mark.parametrize(
    ("graph", "overrides", "node", "before"),
    [
        ("grpo", [], "prompts", ["prompts"]),
        (
            "dapo",
            ["update.kl.coef=0", "sampling.filter=zero_variance", "sampling.max_rounds=3"],
            "prompts",
            ["prompts", "rollout"],
        ),
        (
            "dapo",
            ["update.kl.coef=0", "sampling.filter=zero_variance", "sampling.max_rounds=1"],
            "prompts",
            ["prompts"],
        ),
        ("grpo", [], "rollout", GRPO),  # in step: all of them
        ("grpo", [*ASYNC, "schedule.max_lag=1"], "rollout", []),  # it has gates of its own
        ("grpo", [], "reference", []),
        (
            "grpo_recomputed",
            ["schedule.kind=one_step_off", "update.correction.kind=tis", "update.old_logprobs=recomputed"],
            "old_logprobs",
            ["update"],
        ),
        ("grpo", [], "publish", ["publish", "evaluate"]),
    ],
)
def test_what_a_stage_follows_in_the_iteration_before(
    graph: str, overrides: list[str], node: str, before: list[str]
) -> None:
    experiment = load("conf/smollm2_arithmetic.yaml", [f"graph={graph}", *overrides]).experiment
    loaded = load_graph(experiment)
    assert follows(loaded, loaded[node], experiment) == before


@pytest.mark.parametrize(("together", "waits"), [(True, ["checkpoint of iteration 1"]), (False, [])])
def test_on_one_pool_a_publish_lets_the_checkpoint_go_before_it(together: bool, waits: list[str]) -> None:
    """Or the pool would change hands twice more."""
    pools = ["pools={rollout: {roles: [rollout, train]}, train: null}"] if together else []
    experiment = load("conf/smollm2_arithmetic.yaml", pools).experiment
    graph = load_graph(experiment)

    async def gates() -> list[str]:
        window = Window(experiment, graph)
        window.open(1).checkpoint = asyncio.ensure_future(asyncio.sleep(0))
        return [gate.what for gate in window.gates(graph["publish"], 1)]

    assert asyncio.run(gates()) == waits
