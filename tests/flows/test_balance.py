"""issued = trained + waiting + in flight + dropped, whatever stages, kills and starts come; and what breaks it."""

import asyncio
import hashlib
import sqlite3
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefect import flow

from conf.errors import RunError
from conf.schema import Node
from data.columns import column
from data.ledger import Ledger
from data.refs import DatasetRef, PolicyRef
from data.store import Facts, Store
from flows.balance import Books, check_ended, check_resumed, group_counts, imbalances
from flows.graph import Graph
from flows.run import RUN, iteration
from flows.stages import settle
from tests.fakes.runs import noop_run
from tests.fakes.stages import GRAPH

STAGES = ("prompts", "rollout", "advantage", "update")
GROUPS = 3
OPEN = ("in_flight", "waiting")


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Graph:
    with noop_run(tmp_path_factory.mktemp("noop") / "a") as run:
        return run.graph


def name(iteration: int, group: int) -> str:
    return f"i{iteration:06d}-g{group:03d}"


def table(**values: list[Any]) -> pa.Table:
    return pa.table(values, pa.schema([column(each).field for each in values]))


class Model:
    """A run's store and ledger, written as the stages write them, and where each group is by the model."""

    def __init__(self, folder: Path, graph: Graph) -> None:
        folder.mkdir(parents=True)
        self.folder, self.graph, self.store = folder, graph, Store(folder, folder.name)
        self.history: dict[int, dict[str, float]] = {}
        self.at: dict[str, str] = {}
        self.open()

    def open(self) -> None:
        self.ledger = Ledger(self.folder / "ledger.sqlite")
        self.ledger.open_run(self.folder.name, "digest", "")

    def kill_and_start(self) -> None:
        self.ledger.close()
        self.open()
        check_resumed(self.store, self.ledger, self.graph, self.history)

    def next_stage(self, iteration: int) -> str | None:
        return next((stage for stage in STAGES if self.store.find(iteration, stage) is None), None)

    def commit(self, iteration: int, lost: set[int], extra: list[str] | None = None) -> None:
        """The next stage of the iteration; the groups `lost` are dropped by it. `extra` groups get into the rollout."""
        stage = self.next_stage(iteration)
        groups = [name(iteration, g) for g in range(GROUPS)]
        if stage == "prompts":
            rows = table(group_id=groups, prompt_index=[iteration * GROUPS + g for g in range(GROUPS)])
            self.store.commit_rows(iteration, stage, rows, key="group_id", facts=Facts())
            self.at |= dict.fromkeys(groups, "in_flight")
            return
        if stage == "update":
            rows_of = self.store.find(iteration, "advantage")
            assert isinstance(rows_of, DatasetRef)
            policy = PolicyRef(self.store.run, iteration, hashlib.sha256(b"").hexdigest(), iteration, rows_of.id)
            self.store.commit_policy(iteration, stage, policy, parents=[rows_of], facts=Facts())
            self.at |= {group: "trained" for group in groups if self.at[group] == "waiting"}
            return
        dropped = {name(iteration, g): f"by_{stage}" for g in lost if self.at[name(iteration, g)] in OPEN}
        kept = [group for group in groups if self.at[group] in OPEN and group not in dropped]
        if stage == "rollout":
            kept += extra or []
            rows = table(sample_id=[f"{g}-s0" for g in kept], group_id=kept)
            self.store.commit_rows(iteration, stage, rows, key="sample_id", facts=Facts(dropped=dropped))
        elif stage == "advantage":
            rollout = self.store.find(iteration, "rollout")
            assert isinstance(rollout, DatasetRef)
            there = self.store.read(rollout, ["group_id"])["group_id"].to_pylist()
            chosen = [i for i, group in enumerate(there) if group not in dropped]
            self.store.commit_selection(iteration, stage, rollout, chosen, None, facts=Facts(dropped=dropped))
        self.at |= {group: f"dropped/{reason}" for group, reason in dropped.items()}
        self.at |= {group: "waiting" for group in kept if self.at.get(group) == "in_flight"}

    def settle(self, iteration: int) -> None:
        for node in self.graph:
            settle(self.store, self.ledger, node, iteration)

    def end(self, iteration: int) -> None:
        check_ended(self.store, self.ledger, self.graph, self.history, iteration)
        self.history[iteration] = {"time/iteration": 1.0}

    def whole(self, iteration: int, lost: set[int] = frozenset(), extra: list[str] | None = None) -> None:  # type: ignore[assignment]
        for stage in STAGES:
            self.commit(iteration, lost if stage == "advantage" else set(), extra if stage == "rollout" else None)
            self.settle(iteration)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("stage"), st.integers(0, 2), st.sets(st.integers(0, GROUPS - 1), max_size=2), st.booleans()),
        st.just(("kill",)),
        st.tuples(st.just("end"), st.integers(0, 2)),
    ),
    max_size=24,
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_the_ledger_balances_after_any_sequence_of_stages_kills_and_starts(
    steps: list[tuple[Any, ...]], graph: Graph, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Up to three iterations are open at once. A kill may come before the ledger knows what was committed."""
    model, killed = Model(tmp_path_factory.mktemp("runs") / "a", graph), False
    for step in steps:
        behind = [n for n in range(1, 30) if model.store.find(n, "prompts") and n not in model.history]
        if step[0] == "stage" and not killed:
            _, ahead, lost, killed = step
            begun = max([n for n in range(1, 30) if model.store.find(n, "prompts")], default=0)
            iteration = min(min(behind, default=begun + 1) + ahead, begun + 1)
            if iteration in model.history or model.next_stage(iteration) is None:
                killed = False
                continue
            model.commit(iteration, lost)
            if not killed:
                model.settle(iteration)
        elif step[0] == "kill":
            model.kill_and_start()
            killed = False
        elif step[0] == "end" and not killed and len(behind) > step[1]:
            iteration = behind[step[1]]
            if any(model.at[name(iteration, g)] in OPEN for g in range(GROUPS)):
                with pytest.raises(RunError, match="lost: expected trained or dropped/<reason> at the iteration's end"):
                    model.end(iteration)
            else:
                model.end(iteration)
        if not killed:
            counts = group_counts(model.store, model.ledger, graph)
            places = list(model.at.values())
            assert counts.pop("issued") == len(places) == sum(counts.values())
            assert {place: n for place, n in counts.items() if n} == {p: places.count(p) for p in set(places)}
    model.kill_and_start()
    model.ledger.close()


# -- each imbalance is found and named


@pytest.fixture
def model(tmp_path: Path, graph: Graph) -> Model:
    """An iteration that is over, one group of it dropped, and a whole one that is not accounted for."""
    model = Model(tmp_path / "demo-001", graph)
    model.whole(1, lost={2})
    model.end(1)
    model.whole(2, lost={0})
    return model


def sql(model: Model, statement: str) -> None:
    model.ledger.close()
    db = sqlite3.connect(model.folder / "ledger.sqlite")
    with db:
        db.execute(statement)
    db.close()
    model.open()


FIRST = name(2, 1)  # trained
DAMAGES = {
    f"DELETE FROM groups WHERE group_id = '{FIRST}'": f"{FIRST} of iteration 2: lost: a prompt drew it",
    f"UPDATE groups SET outcome = NULL WHERE group_id = '{FIRST}'": f"{FIRST} of iteration 2: trained though waiting",
    f"UPDATE groups SET outcome = 'dropped/x' WHERE group_id = '{FIRST}'": "trained though dropped/x: the update",
    f"UPDATE groups SET outcome = 'trained' WHERE group_id = '{name(2, 0)}'": (
        f"{name(2, 0)} of iteration 2: lost: trained by the ledger, but not among the update's rows"
    ),
    f"UPDATE groups SET outcome = 'dropped/x' WHERE group_id = '{name(2, 0)}'": (
        f"{name(2, 0)} of iteration 2: a stage dropped it for by_advantage, but it is dropped/x in the ledger"
    ),
    "INSERT INTO groups VALUES ('stranger', 2, 99, 'dropped/x')": "stranger of iteration 2: unknown: in the ledger",
    f"UPDATE groups SET outcome = NULL WHERE group_id = '{name(1, 2)}'": (
        f"{name(1, 2)} of iteration 1: a stage dropped it for by_advantage, but it is waiting in the ledger"
    ),
}


@pytest.mark.parametrize("statement", DAMAGES, ids=lambda s: s.split("SET ")[-1].split("FROM ")[-1])
def test_a_group_that_is_lost_or_twice_somewhere_stops_the_iteration_by_its_name(model: Model, statement: str) -> None:
    sql(model, statement)
    with pytest.raises(RunError) as raised:
        model.end(2)
    assert DAMAGES[statement] in str(raised.value)
    assert str(raised.value).startswith(
        "run demo-001 does not balance (issued = trained + waiting + in flight + dropped)"
    )
    assert str(raised.value).endswith("`ratchet fsck` says more")
    model.ledger.close()


def test_a_group_trained_twice_is_named_with_the_iteration_that_has_it_too(model: Model) -> None:
    model.whole(3, extra=[name(1, 0)])
    with pytest.raises(
        RunError, match=f"{name(1, 0)} of iteration 3: trained twice: here, and in iteration 1, which issued it"
    ):
        model.end(3)
    model.ledger.close()


def test_a_group_trained_though_an_earlier_iteration_dropped_it_stops_the_next_start(model: Model) -> None:
    for stage in STAGES:
        model.commit(3, set(), [name(1, 2)] if stage == "rollout" else None)
    with pytest.raises(RunError, match=f"does not balance: group {name(1, 2)} is dropped/by_advantage already"):
        model.kill_and_start()
    model.ledger.close()


def test_a_group_that_nobody_issued_stops_the_next_start(model: Model) -> None:
    for stage in STAGES:
        model.commit(3, set(), ["stranger"] if stage == "rollout" else None)
    with pytest.raises(RunError, match="does not balance: group stranger was never issued"):
        model.kill_and_start()
    model.ledger.close()


def test_a_group_that_waits_in_an_iteration_that_is_over_stops_the_next_start(model: Model) -> None:
    """It is in the ledger alone: no stage's output would settle it."""
    sql(model, f"INSERT INTO groups VALUES ('{name(1, 9)}', 1, 99, NULL)")
    with pytest.raises(RunError, match=f"{name(1, 9)} of iteration 1: unknown: in the ledger \\(waiting\\)"):
        model.kill_and_start()
    model.ledger.close()


def test_a_roll_back_balances_and_iterations_after_it_too(model: Model) -> None:
    """Those that had begun are over without having been accounted for."""
    for number, key in enumerate(["000000/start", "000001/update"]):
        model.ledger.allocate_version(key, number - 1 if number else None, number, "")
        for state in ("SEALED", "PUBLISHING", "COMMITTED"):
            model.ledger.set_version(number, state, f"{number}" * 64 if state == "SEALED" else None)
    model.commit(3, set())
    model.settle(3)
    model.ledger.roll_back(0)
    model.kill_and_start()
    assert group_counts(model.store, model.ledger, model.graph)["dropped/rolled_back"] == GROUPS
    model.whole(4)
    model.end(4)
    sql(model, f"UPDATE groups SET outcome = NULL WHERE group_id = '{name(3, 0)}'")
    with pytest.raises(
        RunError, match=f"{name(3, 0)} of iteration 3: lost: .* at the iteration's end, found in flight"
    ):
        model.kill_and_start()
    model.ledger.close()


def test_a_check_reads_open_groups_and_one_iteration_never_the_whole_run(model: Model) -> None:
    """By SQLite's own plan: a search by index, no scan of the table."""
    asked: list[str] = []
    model.ledger._db.set_trace_callback(asked.append)
    model.end(2)
    model.ledger._db.set_trace_callback(None)
    reads = [query for query in asked if "FROM groups" in query]
    assert len(reads) == 2
    for query in reads:
        plan = model.ledger._db.execute(f"EXPLAIN QUERY PLAN {query}").fetchall()
        assert "SEARCH groups USING INDEX" in plan[0][3]
    model.ledger.close()


@flow(name="balanced-run")
async def iterate(folder: str, iterations: int, reward: str) -> None:
    nodes = {**GRAPH, "reward": Node(f"tests.fakes.stages:{reward}", "cpu", ["rollout"])}
    with noop_run(Path(folder), nodes, iterations) as run:
        check_resumed(run.store, run.ledger, run.graph, run.history)
        RUN.set(run)
        for number in run.remaining():
            await iteration(number)


def test_an_iteration_that_does_not_balance_is_not_accounted_for(tmp_path: Path, prefect_api: str) -> None:
    folder = tmp_path / "a"
    asyncio.run(iterate(str(folder), 1, "reward"))
    stray = "group stray of iteration 2: unknown: in the ledger"
    with pytest.raises(RunError, match=stray):
        asyncio.run(iterate(str(folder), 2, "issues_a_stray"))
    with noop_run(folder) as run:
        counts = [run.history[1][f"groups/{place}"] for place in ("issued", "trained", "waiting", "in_flight")]
        assert counts == [2, 2, 0, 0]
        assert run.store.find(2, "publish")  # it had ended
        assert "time/iteration" not in run.history[2]
    with pytest.raises(RunError, match=stray):
        asyncio.run(iterate(str(folder), 2, "reward"))


# -- the law itself, on sets alone

OUTCOME = st.sampled_from([None, "trained", "dropped/slow"])


@given(
    issued=st.dictionaries(st.sampled_from("abcd"), OUTCOME),
    drawn=st.frozensets(st.sampled_from("abcd")),
    trained=st.frozensets(st.sampled_from("abcd")),
    dropped=st.frozensets(st.sampled_from("abcd")),
    over=st.booleans(),
)
def test_nothing_is_wrong_exactly_where_every_group_is_in_one_place(
    issued: dict[str, str | None], drawn: frozenset[str], trained: frozenset[str], dropped: frozenset[str], over: bool
) -> None:
    foreign = dict.fromkeys(trained - drawn - issued.keys(), "it was never issued")
    reasons = dict.fromkeys(dropped, "slow")
    wrong = dict(imbalances(Books(issued, drawn, True, reasons, trained, foreign), over))

    def places(group: str) -> set[str]:
        return {place for place, groups in (("trained", trained), ("dropped/slow", dropped)) if group in groups}

    for group in issued.keys() | drawn | trained:
        there = group in issued and group in drawn
        settled = places(group) == {issued.get(group)} or (
            # A drop may be in the ledger alone (a roll-back), and an open group is nowhere yet.
            not places(group) and (issued.get(group) == "dropped/slow" or (issued.get(group) is None and not over))
        )
        assert (group not in wrong) == (there and settled)
