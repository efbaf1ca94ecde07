"""The declared graph: nodes resolved to stages, checked before anything starts, in an order that respects `needs`.

Everything that can be wrong with a graph is an error here, with the node, the stage and the column in the message:
a cycle, a missing input, a column nobody upstream produces, two producers of one column, inputs with different rows,
a pool without the stage's role, a stage that would read a later version of the policy.
"""

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from conf.check import IMPORT_PATH
from conf.errors import ConfigError
from conf.pools import pools_meant
from conf.schema import Experiment
from data.issued import PROMPTS
from tasks.stage import Stage

BUILT_IN = {
    "prompts": "tasks.prompts:prompts",
    "rollout": "tasks.rollout:rollout",
    "reward": "tasks.reward:reward",
    "reference": "tasks.reference:reference",
    "old_logprobs": "tasks.reference:old_logprobs",
    "filter": "tasks.filter:filter",
    "advantage": "tasks.advantage:advantage",
    "update": "tasks.update:update",
    "publish": "tasks.publish:publish",
    "evaluate": "tasks.evaluate:evaluate",
}
CHECKPOINT = "checkpoint"  # what the ledger and the UI call the trainer's checkpoints, beside the stages


@dataclass(frozen=True)
class GraphNode:
    name: str
    stage: Stage
    needs: tuple[str, ...]
    pool: str
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Edge:
    """What flows out of a node: the columns with their producers, and which rows they are about."""

    columns: Mapping[str, str]  # column -> node that produced it
    rows: tuple[str, ...]  # the node that made the rows, then each selection applied to them; () for a policy


@dataclass(frozen=True)
class Graph:
    """The checked graph; iterating gives its nodes, each after all it needs."""

    nodes: tuple[GraphNode, ...]
    edges: Mapping[str, Edge]

    def __iter__(self) -> Iterator[GraphNode]:
        return iter(self.nodes)

    def __getitem__(self, name: str) -> GraphNode:
        return next(node for node in self.nodes if node.name == name)

    def of_stage(self, stage: str) -> tuple[GraphNode, ...]:
        return tuple(node for node in self.nodes if node.stage.name == stage)

    def ancestors(self, name: str) -> set[str]:
        """Every node whose output `name` reads, directly or not."""
        found: set[str] = set()
        waiting = list(self[name].needs)
        while waiting:
            if (need := waiting.pop()) not in found:
                found.add(need)
                waiting.extend(self[need].needs)
        return found


def load_graph(experiment: Experiment, place: Callable[[str], str] = lambda field: "graph") -> Graph:
    """Resolve and check the experiment's graph. `place` gives the `file:line` of a dotted field. Raises ConfigError."""
    try:
        nodes = _ordered(_resolve(experiment))
        edges: dict[str, Edge] = {}
        for node in nodes:
            edges[node.name] = _edge(node, edges, experiment)
        graph = Graph(nodes, edges)
        _check_policy(graph)
    except ConfigError as error:
        raise ConfigError(f"{place(str(error).split()[0])}: {error}") from None
    return graph


def _resolve(experiment: Experiment) -> dict[str, GraphNode]:
    if CHECKPOINT in experiment.graph:
        raise ConfigError(f"graph.{CHECKPOINT} must have another name: this one stands for the trainer's checkpoints")
    if PROMPTS in experiment.graph:
        raise ConfigError(f"graph.{PROMPTS} must not be declared: it is the implicit first node; name it in `needs`")
    cpu = next((name for name, pool in experiment.pools.items() if "cpu" in pool.roles), None)
    if cpu is None:
        raise ConfigError("pools must hold one pool with role cpu (the stage prompts runs there), got none")
    nodes = {PROMPTS: GraphNode(PROMPTS, _stage(PROMPTS, PROMPTS), (), cpu, {})}
    for name, declared in experiment.graph.items():
        stage = _stage(name, declared.stage)
        meant = pools_meant(experiment.pools, declared.pool)
        if len(meant) != 1:
            raise ConfigError(
                f"graph.{name}.pool must be a declared pool ({', '.join(experiment.pools)}) or the role of one, "
                f"got {declared.pool!r}"
            )
        roles = experiment.pools[meant[0]].roles
        if stage.role not in roles:
            raise ConfigError(
                f"graph.{name}.pool must have role {stage.role} (stage {stage.name}), "
                f"got {meant[0]!r} with roles {list(roles)}"
            )
        try:
            inspect.signature(stage.run).bind(None, None, **declared.options)
        except TypeError as error:
            raise ConfigError(f"graph.{name}.options must fit the stage {stage.name}: {error}") from None
        nodes[name] = GraphNode(name, stage, tuple(declared.needs), meant[0], declared.options)
    return nodes


def _stage(node: str, path: str) -> Stage:
    full = BUILT_IN.get(path, path)
    module, _, attribute = full.partition(":")
    if not IMPORT_PATH.fullmatch(full):
        close = difflib.get_close_matches(path, BUILT_IN, 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            f"graph.{node}.stage must be a built-in stage ({', '.join(BUILT_IN)}) or an import path "
            f"`package.module:name`, got {path!r}{hint}"
        )
    if os.getcwd() not in sys.path:  # the `ratchet` command does not put it there; `python -m` and workers do
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the module raises when it is imported
        raise ConfigError(
            f"graph.{node}.stage must be importable, got {path!r}: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Stage):
        raise ConfigError(
            f"graph.{node}.stage must name a function decorated with @stage, got {path!r}: {type(found).__name__}"
        )
    return found


def _ordered(nodes: Mapping[str, GraphNode]) -> tuple[GraphNode, ...]:
    """Topological order, by declaration where it is free. Raises on a missing input and on a cycle, by its members."""
    for node in nodes.values():
        for need in node.needs:
            if need not in nodes:
                close = difflib.get_close_matches(need, nodes, 1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise ConfigError(f"graph.{node.name}.needs must name nodes ({', '.join(nodes)}), got {need!r}{hint}")
        if len(set(node.needs)) != len(node.needs):
            raise ConfigError(f"graph.{node.name}.needs must name each node once, got {list(node.needs)}")
        if node.stage.output != "rows" and not node.needs:
            raise ConfigError(
                f"graph.{node.name}.needs must name at least one node (stage {node.stage.name}), got none"
            )
    placed: dict[str, GraphNode] = {}
    while len(placed) < len(nodes):
        ready = [n for n in nodes.values() if n.name not in placed and all(need in placed for need in n.needs)]
        if not ready:
            raise ConfigError(f"graph has a cycle: {' -> '.join(_cycle(nodes, placed))}")
        placed[ready[0].name] = ready[0]
    return tuple(placed.values())


def _cycle(nodes: Mapping[str, GraphNode], placed: Mapping[str, GraphNode]) -> list[str]:
    path = [next(name for name in nodes if name not in placed)]
    while True:
        path.append(next(need for need in nodes[path[-1]].needs if need not in placed))
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]


def _edge(node: GraphNode, edges: Mapping[str, Edge], experiment: Experiment) -> Edge:
    """What the node's output holds. Checks the columns it consumes, those it produces, and that its inputs fit."""
    inputs = {need: edges[need] for need in node.needs}
    available: dict[str, str] = {}
    rows: dict[tuple[str, ...], str] = {}
    for need, edge in inputs.items():
        for column, producer in edge.columns.items():
            if available.setdefault(column, producer) != producer:
                raise ConfigError(
                    f"graph.{node.name} (stage {node.stage.name}): column {column!r} has two producers: "
                    f"{available[column]!r} and {producer!r}"
                )
        if edge.rows:
            rows.setdefault(edge.rows, need)
    if len(rows) > 1:
        (first, a), (second, b) = list(rows.items())[:2]
        raise ConfigError(
            f"graph.{node.name}.needs must name inputs about the same rows, got {a!r} ({' then '.join(first)}) "
            f"and {b!r} ({' then '.join(second)})"
        )
    for column in node.stage.consumes(experiment):
        if column not in available:
            by = [other for other, edge in edges.items() if column in edge.columns]
            hint = (
                f" (produced by {', '.join(map(repr, by))}: add it to needs)"
                if by
                else " (nobody upstream produces it)"
            )
            raise ConfigError(
                f"graph.{node.name} (stage {node.stage.name}) consumes column {column!r}, not among its inputs{hint}"
            )
    produced = {column.name: node.name for column in node.stage.produces(experiment)}
    if node.stage.output == "policy":
        return Edge({}, ())
    if node.stage.output == "rows":
        return Edge(produced, (node.name,))
    for column in produced:
        if column in available:
            raise ConfigError(
                f"graph.{node.name} (stage {node.stage.name}): column {column!r} has two producers: "
                f"{available[column]!r} and {node.name!r}; columns are appended, never rewritten"
            )
    base = next(iter(rows))
    selected = (node.name,) if node.stage.output == "selection" else ()
    return Edge({**available, **produced}, base + selected)


def _check_policy(graph: Graph) -> None:
    """One update, one publish of it, and nothing that reads this iteration's policy may run after the update."""
    updates, publishes = graph.of_stage("update"), graph.of_stage("publish")
    if len(updates) != 1 or len(publishes) != 1:
        raise ConfigError(
            f"graph must have one node of stage update and one of stage publish, "
            f"got {[n.name for n in updates]} and {[n.name for n in publishes]}"
        )
    update, publish = updates[0], publishes[0]
    before = graph.ancestors(update.name)
    for node in graph:
        policies = [need for need in node.needs if graph[need].stage.output == "policy"]
        if node.stage.reads == "trained" and len(policies) != 1:
            raise ConfigError(
                f"graph.{node.name}.needs must name one node that gives a policy (stage {node.stage.name}), "
                f"got {list(node.needs)}"
            )
        if node.stage.reads == "current" and node.name not in before:
            raise ConfigError(
                f"graph.{node.name} (stage {node.stage.name}) would read a later version of the policy: "
                f"it reads the iteration's starting version, so {update.name!r} must need it, directly or not"
            )
    if update.name not in publish.needs:
        raise ConfigError(f"graph.{publish.name}.needs must name {update.name!r}, whose version it publishes")
