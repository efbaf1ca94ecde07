"""`ratchet versions` and `ratchet rollback`: a run's policy versions, who serves them, and going back to one."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from conf.load import load_experiment
from data.ledger import Ledger, VersionRow
from data.store import Store
from flows.graph import load_graph
from flows.show import run_folder


def print_versions(run: str, console: Console) -> None:
    """One row a version. Raises RunError where there is no run."""
    ledger = Ledger(run_folder(run) / "ledger.sqlite", read_only=True)
    try:
        rows, leases, engines = ledger.versions(), ledger.leases(), ledger.engines()
    finally:
        ledger.close()
    columns = ["version", "state", "iter", "step", "from", *(["kept for"] if leases else []), "served by"]
    table = Table(*columns, box=None)
    for row in rows:
        label = row.ref.label if row.content else f"{row.number:06d}"
        served = ", ".join(e.name for e in engines if row.content and e.state == "READY" and e.label == label)
        kept = [", ".join(leases.get(row.number, []))] if leases else []
        table.add_row(label, row.state, str(row.iteration), str(row.optimizer_step), _origin(row), *kept, served)
    console.print(table)
    for engine in engines:
        if engine.state != "READY":
            console.print(f"{engine.name} is {engine.state} and serves nothing", markup=False)
    console.print("served by: as last proven; managed engines end with the run's process", markup=False)


def _origin(row: VersionRow) -> str:
    if row.rollback_of is not None:
        return f"back to {row.rollback_of}"
    return "start" if row.parent is None else str(row.parent)


def roll_back(run: str, version: int, console: Console) -> None:
    """Let the run go on from an older version. Raises RunError while a process has the run, DataError for a bad one."""
    from flows.opening import FINISHED  # brings Prefect along

    folder = run_folder(run)
    ledger = Ledger(folder / "ledger.sqlite")
    try:
        _settle(folder, ledger)
        row = ledger.roll_back(version)
        old, info = ledger.version(version), ledger.run_info()
    finally:
        ledger.close()
    more = "; the run is finished, so that start needs --iterations" if info and info.state == FINISHED else ""
    console.print(
        f"version {row.number} will have the content of version {version} (iteration {old.iteration}): the next start "
        f"of {folder} brings the trainer back there, seals, publishes, and goes on with iteration {row.iteration + 1}; "
        f"what was recorded until iteration {row.iteration} stays{more}",
        markup=False,
    )


def _settle(folder: Path, ledger: Ledger) -> None:
    """Groups whose outcome a kill kept from the ledger have that outcome, and are not among those rolled back."""
    from flows.stages import settle  # brings Prefect along

    store, graph = Store(folder, folder.name), load_graph(load_experiment(folder / "config.yaml"))
    for iteration in ledger.groups.waiting():
        for node in graph:
            settle(store, ledger, node, iteration)
