"""`ratchet ledger`: where every prompt group of a run went, and what it cost. Nothing vanishes: issued is the sum."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import pyarrow.compute as pc
from rich.console import Console
from rich.table import Column, Table

from conf.load import load_experiment
from conf.schema import Experiment
from data.accounts import StageRow
from data.issued import PROMPTS
from data.ledger import Ledger
from data.metrics import accounted
from data.refs import DatasetRef
from data.store import Store
from flows.balance import IN_FLIGHT, WAITING, Books, imbalances, read_books
from flows.graph import Graph, GraphNode, load_graph
from flows.pool_time import shared_seconds
from flows.show import run_folder
from flows.throughput import device_counts, run_devices, spent

SHOWN = 5  # groups that are not balanced
# Groups that a rollout has sent and the ledger does not know: it is under way, or it did not come to its end and the
# one after it needed fewer. What they took was taken.
NOT_ISSUED = "not issued"


@dataclass
class Cost:
    """What some groups took. A device second is a second in which a stage worked, times the devices of its pool; where
    several worked there at once, each has an equal part of it. Those of a stage are shared out over the groups it
    worked on by their response tokens."""

    groups: float = 0
    samples: float = 0
    prompt_tokens: float = 0  # of each prompt once
    response_tokens: float = 0
    reward_calls: float = 0
    rollout_device_s: float = 0
    train_device_s: float = 0  # reference and old log-probabilities, and the update

    def add(self, other: "Cost") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def device_s(self) -> float:
        return self.rollout_device_s + self.train_device_s


@dataclass(frozen=True)
class Conservation:
    outcomes: Mapping[str, Cost]  # trained, waiting, in flight, dropped/<reason>; NOT_ISSUED, where it took anything
    unbalanced: list[str]  # what ledger and data do not agree on, a line a group
    device_s: float  # of all devices over the iterations that have ended

    @property
    def total(self) -> Cost:
        total = Cost()
        for cost in self.outcomes.values():
            total.add(cost)
        return total


def conservation(folder: Path) -> Conservation:
    """Count it from the ledger and from the committed datasets, each against the other."""
    graph = load_graph(experiment := load_experiment(folder / "config.yaml"))
    store, ledger = Store(folder, folder.name), Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        iterations = {number for number, _ in store.stages()} | {number for _, number, _ in ledger.groups.rows()}
        books = {number: read_books(store, ledger, graph, number) for number in sorted(iterations)}
        stages, history = ledger.accounts.stages(), ledger.accounts.metrics()
    finally:
        ledger.close()
    over = accounted(history)
    by_iteration: dict[int, list[tuple[StageRow, float]]] = {}
    for row, seconds in zip(stages, shared_seconds(stages), strict=True):
        by_iteration.setdefault(row.iteration, []).append((row, seconds))
    outcomes: dict[str, Cost] = {"trained": Cost(), WAITING: Cost(), IN_FLIGHT: Cost()}
    unbalanced: list[str] = []
    for number, found in books.items():
        wrong = imbalances(found, over=number in over, behind=number not in over)
        unbalanced += [f"group {group} of iteration {number}: {what}" for group, what in wrong]
        attempts = by_iteration.get(number, [])
        costs = _costs(store, graph, number, found, len(experiment.reward.functions), [row for row, _ in attempts])
        _share_seconds(costs, attempts, graph, experiment, found)
        for group, cost in costs.items():
            outcome = found.issued.get(group) or (WAITING if found.generated else IN_FLIGHT)
            if not cost.groups:
                outcome = NOT_ISSUED
            outcomes.setdefault(outcome, Cost()).add(cost)
    wall = sum(history[number]["time/iteration"] for number in over)
    return Conservation(outcomes, unbalanced, wall * run_devices(experiment, graph))


def _costs(
    store: Store, graph: Graph, iteration: int, books: Books, rewards: int, attempts: Sequence[StageRow]
) -> dict[str, Cost]:
    """By group, of the ledger and of the data: what all attempts took, and at least what the committed rows hold."""
    prompts = dict(_lengths(store, iteration, graph[PROMPTS], "prompt_ids"))
    costs = {g: Cost(groups=1, prompt_tokens=prompts.get(g, 0)) for g in books.issued.keys() | books.drawn}
    for node in graph:
        if node.stage.reads == "trained":
            continue  # evaluation is for no group
        held: dict[str, Counter[str]] = {}
        if node.stage.name in ("rollout", "reward"):
            rows = _lengths(store, iteration, node, "response_ids")
            if node.stage.name == "rollout":
                held["response_tokens"] = Counter()
                for group, tokens in rows:
                    costs[group].add(Cost(samples=1))
                    held["response_tokens"][group] += tokens
            else:
                held["reward_calls"] = Counter(group for group, _ in rows for _ in range(rewards))
        for cost, groups in spent(row for row in attempts if row.node == node.name).items():
            held[cost] = groups | held.get(cost, Counter())
        for cost, groups in held.items():
            for group, count in groups.items():
                costs.setdefault(group, Cost()).add(Cost(**{cost: count}))
    return costs


def _lengths(store: Store, iteration: int, node: GraphNode, column: str) -> list[tuple[str, int]]:
    """(group, length of the column) of each row that the node committed."""
    ref = store.find(iteration, node.name)
    if not isinstance(ref, DatasetRef):
        return []
    rows = store.read(ref, ["group_id", column])
    return list(zip(rows["group_id"].to_pylist(), pc.list_value_length(rows[column]).to_pylist(), strict=True))


def _share_seconds(
    costs: Mapping[str, Cost],
    stages: list[tuple[StageRow, float]],
    graph: Graph,
    experiment: Experiment,
    books: Books,
) -> None:
    """Share out the device seconds of an iteration's stages: an update's over what was trained, others' over all.

    So are an update's where nothing was trained: it failed, or has not ended.
    stages: attempts, each with the seconds of its pool that are its own.
    """
    devices, trained = device_counts(experiment), {group for group in costs if books.issued.get(group) == "trained"}
    nodes = {node.name: node for node in graph if node.stage.output != "policy" or node.stage.name == "update"}
    for row, own in stages:
        if (node := nodes.get(row.node)) is None or node.stage.role == "cpu" or node.stage.reads == "trained":
            continue  # publish and evaluation are for no group
        seconds = own * devices[node.pool]
        groups = trained if trained and node.stage.name == "update" else costs.keys()
        tokens = sum(costs[group].response_tokens for group in groups)
        for group in groups:
            share = costs[group].response_tokens / tokens if tokens else 1 / len(groups)
            name = "rollout_device_s" if node.stage.role == "rollout" else "train_device_s"
            costs[group].add(Cost(**{name: seconds * share}))


def print_conservation(run: str, console: Console) -> int:
    """Print the table and the balance; 1 where it does not balance."""
    found = conservation(run_folder(run))
    table = Table(Column("outcome", no_wrap=True), *(each.name.replace("_", " ") for each in fields(Cost)), box=None)
    rows = [*sorted(found.outcomes.items()), ("total", found.total)]
    for outcome, cost in rows:
        values = [getattr(cost, each.name) for each in fields(Cost)]
        table.add_row(outcome, *(f"{value:.1f}" if isinstance(value, float) else str(value) for value in values))
    console.print(table)
    issued = sorted((name, cost.groups) for name, cost in found.outcomes.items() if name != NOT_ISSUED)
    parts = " + ".join(f"{name} {groups}" for name, groups in issued)
    console.print(f"issued {found.total.groups} = {parts}", markup=False)
    worked, used = found.total.device_s, found.outcomes["trained"].device_s
    if worked:
        console.print(f"device seconds that went into trained groups: {used / worked:.1%}", markup=False)
    if found.device_s:
        console.print(
            f"of all devices' {found.device_s:.1f} s in ended iterations: {used / found.device_s:.1%}", markup=False
        )
    for line in found.unbalanced[:SHOWN]:
        console.print(f"not balanced: {line}", markup=False)
    if found.unbalanced:
        console.print(f"{len(found.unbalanced)} group(s) not balanced; `ratchet fsck {run}` says more", markup=False)
    return 1 if found.unbalanced else 0
