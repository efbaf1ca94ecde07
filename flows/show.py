"""`ratchet show`: the table of a run again, the reward curve, where the time went and where the data is."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from conf.errors import RunError
from conf.load import load_experiment
from data.accounts import SessionRow, StageRow
from data.ledger import Ledger
from data.metrics import accounted, aggregate
from flows.display import LineTable
from flows.graph import load_graph
from flows.pool_time import CAUSES, run_seconds, working_seconds

BAR = 30  # characters of the longest bar


@dataclass(frozen=True)
class Report:
    """What a report needs of a run; `read_report` takes it from the ledger."""

    folder: Path
    state: str
    history: Mapping[int, Mapping[str, float]]
    stages: list[StageRow]
    sessions: list[SessionRow]
    roles: Sequence[tuple[str, str]]  # (node, role of its stage)
    groups: Mapping[str, int]
    iterations: int
    pools: Mapping[str, Mapping[str, float]]  # pool -> cause -> seconds of the whole run


def run_folder(run: str) -> Path:
    """The folder, if a run was started there. Raises RunError naming those that there are."""
    folder = Path(run)
    if not (folder / "ledger.sqlite").exists():
        known = sorted(str(p.parent) for p in Path("runs").glob("*/ledger.sqlite"))
        hint = f"; there are {', '.join(known)}" if known else ""
        raise RunError(f"{run} must be the folder of a run, but there is no {folder / 'ledger.sqlite'}{hint}")
    return folder


def read_report(run: str) -> Report:
    """`run` is a run's folder. Raises RunError where there is none."""
    folder = run_folder(run)
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        if (info := ledger.run_info()) is None:
            raise RunError(f"{run} was never opened: its ledger is empty")
        history, stages, groups = ledger.accounts.metrics(), ledger.accounts.stages(), ledger.groups.counts()
        sessions = ledger.accounts.sessions()
    finally:
        ledger.close()
    experiment = load_experiment(folder / "config.yaml")
    graph = load_graph(experiment)
    roles = [(node.name, node.stage.role) for node in graph]
    pools = run_seconds(sessions, stages, dict.fromkeys(node.pool for node in graph))
    return Report(folder, info.state, accounted(history), stages, sessions, roles, groups, experiment.iterations, pools)


def print_table(report: Report, console: Console) -> None:
    table = LineTable(report.iterations, report.roles)
    console.print(table.header, markup=False)
    for number, values in sorted(report.history.items()):
        console.print(table.line(number, values), markup=False)


def print_summary(report: Report, console: Console) -> None:
    """The reward curve, where the time went, the groups, and where everything is."""
    if not report.history:
        console.print("no iteration has ended yet")
        return
    console.print(_curve(report))
    console.print(_times(report))
    console.print(_pools(report))
    tokens = [v.get("actor/tokens", 0.0) for v in report.history.values()]
    names = ["throughput/effective_samples_per_s", "mismatch/logprob_abs_diff", "actor/approx_kl", "off_policy/lag_max"]
    for name in names:
        if values := [(v[name], t) for v, t in zip(report.history.values(), tokens, strict=True) if name in v]:
            console.print(f"{name:36} {aggregate(name, *map(list, zip(*values, strict=True))):.4g}", markup=False)
    console.print(f"{'groups':36} " + ", ".join(f"{n} {c}" for n, c in report.groups.items()), markup=False)
    console.print(f"{'data':36} {report.folder}/data (Arrow), {report.folder}/metrics.parquet", markup=False)
    console.print(f"{'weights, checkpoints, logs':36} {report.folder}/{{weights,checkpoints,logs}}", markup=False)


def _curve(report: Report) -> Table:
    rewards = {n: v["reward/mean"] for n, v in sorted(report.history.items()) if "reward/mean" in v}
    top = max([abs(r) for r in rewards.values()] + [1e-9])
    evaluated = {n: f"eval {v['eval/reward/mean']:.3f}" for n, v in report.history.items() if "eval/reward/mean" in v}
    table = Table("iter", "reward/mean", "", "", title="reward", title_justify="left", box=None, show_header=False)
    for number, reward in rewards.items():
        bar = "█" * max(0, round(BAR * reward / top))
        table.add_row(str(number), f"{reward:.3f}", bar, evaluated.get(number, ""))
    return table


def _times(report: Report) -> Table:
    working: dict[str, float] = {}
    waits: dict[str, float] = {}
    for row in (row for row in report.stages if row.iteration in report.history):
        working[row.node] = working.get(row.node, 0.0) + working_seconds(row)
        for cause, seconds in row.waits.items():
            waits[cause] = waits.get(cause, 0.0) + seconds
    wall = sum(v["time/iteration"] for v in report.history.values())
    outside = sum(v.get("time/outside_stages", 0.0) for v in report.history.values())
    table = Table("", "seconds", "of wall time", title="where the time went", title_justify="left", box=None)
    for name, seconds in sorted(working.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{seconds:.1f}", f"{seconds / wall:.1%}")
    table.add_row("outside stages", f"{outside:.1f}", f"{outside / wall:.1%}")
    table.add_row("wall", f"{wall:.1f}", "")
    for cause, seconds in waits.items():
        table.add_row(f"(stages waited: {cause})", f"{seconds:.1f}", "")
    return table


def _pools(report: Report) -> Table:
    """Pools beside each other, each second of one under one cause (docs/stages.md)."""
    walls = {pool: sum(seconds.values()) for pool, seconds in report.pools.items()}
    table = Table("seconds", *walls, title="time of each pool", title_justify="left", box=None)
    for cause in CAUSES:
        if any(cause in seconds for seconds in report.pools.values()):
            table.add_row(cause, *(_share(report.pools[pool].get(cause, 0.0), wall) for pool, wall in walls.items()))
    table.add_row("wall", *(f"{wall:.1f}" for wall in walls.values()))
    return table


def _share(seconds: float, wall: float) -> str:
    return f"{seconds:.1f}  {seconds / wall:.0%}" if wall else "-"
