"""A run of stages that do nothing: real flow, store, ledger and Prefect; no engines, no trainer."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from conf.load import load
from conf.schema import Node
from data.ledger import Ledger
from data.store import Store
from flows import graph
from flows.clocks import Clocks
from flows.opening import Run
from flows.pools import Leases
from tests.fakes.stages import GRAPH, commit_version


class Recorder:
    """A display that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def message(self, text: str) -> None:
        self.events.append(("message", text))

    def stage_begun(self, iteration: int, node: str) -> None:
        self.events.append(("begun", iteration, node))

    def stage_progress(self, *values: Any) -> None: ...

    def stage_done(self, iteration: int, node: str) -> None:
        self.events.append(("done", iteration, node))

    def iteration_done(self, iteration: int, line: str) -> None:
        self.events.append(("iteration", iteration))


@contextmanager
def noop_run(
    folder: Path, nodes: Mapping[str, Node] = GRAPH, iterations: int = 3, overrides: Sequence[str] = ()
) -> Iterator[Run]:
    """Open `folder` as a run of no-op stages of two prompts each, with version 0 committed."""
    common = ["evaluate.every=0", "update.checkpoint_every=1000", "prompts.per_iteration=2", "update.mini_batches=1"]
    common.append("rollout.samples_per_prompt=2")
    loaded = load("conf/smollm2_arithmetic.yaml", [*common, f"iterations={iterations}", *overrides])
    experiment = replace(loaded.experiment, graph=dict(nodes))
    loaded = replace(loaded, experiment=experiment)
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / "ledger.sqlite")
    built_in = dict(graph.BUILT_IN)
    graph.BUILT_IN["prompts"] = "tests.fakes.stages:prompts"
    try:
        ledger.open_run(folder.name, loaded.digest, loaded.text)
        if ledger.committed() is None:
            ledger.allocate_version("000000/start", None, 0, "")
            ledger.set_version(0, "SEALED", "0" * 64)
            commit_version(ledger, 0)
        services: Any = type("NoServices", (), dict.fromkeys(["prompts", "engines", "trainer", "rewards"]))
        with ledger.accounts.session(time.time()):
            ledger.accounts.session_ready(time.time())
            yield Run(
                folder.name, folder, loaded, graph.load_graph(experiment), Store(folder, folder.name), ledger,
                Clocks(ledger), services, Leases(experiment.pools), Recorder(), ledger.accounts.metrics(),
            )  # fmt: skip
    finally:
        graph.BUILT_IN.update(built_in)
        ledger.close()
