"""The end of an iteration: its numbers into the ledger, the Parquet file, Prefect's artifacts and the terminal."""

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
from prefect.artifacts import acreate_table_artifact
from prefect.logging import get_run_logger

from data.accounts import RUNNING, StageRow
from data.crash import crash_point
from data.metrics import accounted, write_metrics
from flows.balance import check_ended, group_counts
from flows.bias import BiasReport, read_samples
from flows.pool_time import (
    CAUSES,
    WORKING,
    Period,
    outside_stage_work,
    pool_seconds,
    unaccounted,
    working_seconds,
)
from flows.prefect_server import Outages
from flows.throughput import discarded, throughput

if TYPE_CHECKING:
    from flows.opening import Run


async def account(run: "Run", number: int) -> None:
    """Collect the iteration's metrics from its committed outputs and its clock, and put them where people look.

    Its time is all since the last accounting: what that took, and what stages of other iterations did meanwhile.
    Raises RunError, with nothing accounted for, where a group is not trained or dropped exactly once.
    """
    await run.clocks.give_way()  # what follows computes for some 10 ms at a time, in which no stage could begin
    check_ended(run.store, run.ledger, run.graph, run.history, number)
    stages, now = run.ledger.accounts.stages(number), time.time()
    rows, periods = _since_last(run, now)
    pools = pool_seconds(rows, run.pools, periods)
    values = _from_outputs(run, number) | _from_clock(stages) | _from_pools(pools)
    values["time/iteration"] = sum(end - start for start, end in periods)
    values["time/outside_stages"] = sum(outside_stage_work(rows, *period) for period in periods)
    counts = group_counts(run.store, run.ledger, run.graph)
    values |= {f"groups/{name}": float(count) for name, count in counts.items()}
    values |= discarded(run.store, run.graph, run.experiment, number, stages)
    values |= throughput(run.store, run.graph, run.experiment, number, run.history.get(number, {}) | values)
    bias = _bias(run, number)
    values |= bias.metrics() if bias else {}
    run.ledger.accounts.record_metrics(number, values, accounted=now)
    run.history[number] = run.history.get(number, {}) | values
    write_metrics(run.folder / "metrics.parquet", accounted(run.history))
    line = run.table.line(number, run.history[number])
    run.display.iteration_done(number, line)
    get_run_logger().info(line)  # for readers of the UI
    if bias:
        _warn(run, number, bias)
    which, wall = f"Iteration {number}", values["time/iteration"]
    tables = [
        Shown("stage-waits", stage_waits(stages), f"{which}: seconds each stage worked and waited, by cause"),
        Shown("pool-seconds", pool_table(pools, wall), f"{which}: where each second of each pool went"),
        Shown("metrics", _rounded(run.history[number]), f"{which} of {run.name}"),
    ]
    await _show(run, [*tables, _of_bias(number, bias)] if bias else tables)
    crash_point(f"{number}/iteration/ended")


class Shown(NamedTuple):
    """A table artifact in Prefect."""

    key: str
    table: list[dict[str, Any]]
    description: str


async def _show(run: "Run", tables: Sequence[Shown]) -> None:
    """Hand them to Prefect; a server that is away is waited for here, since other iterations are at work meanwhile."""
    for key, table, description in tables:
        outages = Outages(run.display.message)
        while True:
            try:
                await acreate_table_artifact(key=key, table=table, description=description)
                break
            except httpx.TransportError as error:
                await outages.over(error)


def _rounded(values: Mapping[str, float]) -> list[dict[str, Any]]:
    return [{"metric": name, "value": round(value, 6)} for name, value in sorted(values.items())]


def _of_bias(number: int, bias: BiasReport) -> Shown:
    of_what = f"Iteration {number}: issued and trained samples by response length in tokens"
    return Shown("bias", bias.by_length(), "\n\n".join([of_what, *bias.distances()]))


def _warn(run: "Run", number: int, bias: BiasReport) -> None:
    """In the terminal and in the UI, where the limits are exceeded."""
    if warning := bias.warning(run.experiment.bias):
        run.display.message(f"warning: iteration {number}: {warning}")
        get_run_logger().warning(f"iteration {number}: {warning}")


def stage_waits(stages: list[StageRow]) -> list[dict[str, str | float]]:
    """One row a stage: seconds of work, then of each wait that occurred."""
    causes = sorted({cause for row in stages for cause in row.waits})
    table: list[dict[str, str | float]] = []
    for row in sorted(stages, key=lambda r: r.started):
        waits = {cause: round(row.waits.get(cause, 0.0), 3) for cause in causes}
        table.append({"stage": row.node, "state": row.state, "working": round(working_seconds(row), 3), **waits})
    return table


def pool_table(pools: Mapping[str, Mapping[str, float]], wall: float) -> list[dict[str, str | float]]:
    """One row a pool: seconds of each cause that occurs at one of them, their sum, and wall time."""
    causes = [cause for cause in CAUSES if any(cause in seconds for seconds in pools.values())]
    return [
        {
            "name": pool,  # not pool: that is a cause
            **{cause: round(seconds.get(cause, 0.0), 3) for cause in causes},
            "sum": round(sum(seconds.values()), 3),
            "wall": round(wall, 3),
        }
        for pool, seconds in pools.items()
    ]


def _since_last(run: "Run", now: float) -> tuple[list[StageRow], list[Period]]:
    """The attempts of all iterations since the last accounting, also those under way, and the time since then."""
    sessions = run.ledger.accounts.sessions()
    since = max([session.accounted or 0.0 for session in sessions], default=0.0)
    under_way = [clock.row(RUNNING, now) for clock in run.clocks]  # the ledger has them as they were a moment ago
    rows = {
        (row.iteration, row.node, row.started): row for row in [*run.ledger.accounts.stages(since=since), *under_way]
    }
    return list(rows.values()), unaccounted(sessions, list(rows.values()), now)


def _from_outputs(run: "Run", number: int) -> dict[str, float]:
    values: dict[str, float] = {}
    for node in run.due(number):
        manifest = run.store.committed(number, node.name)
        if manifest is not None:
            values |= manifest.facts.metrics
    return values


def _bias(run: "Run", number: int) -> BiasReport | None:
    """How far the trained samples are from the issued ones; None where that cannot be told."""
    per_prompt = run.experiment.rollout.samples_per_prompt
    samples = read_samples(run.store, run.ledger, run.graph, number, per_prompt)
    return None if samples is None else BiasReport.of(samples)


def _from_clock(stages: Sequence[StageRow]) -> dict[str, float]:
    values: dict[str, float] = {}
    for row in stages:  # an attempt that was cut off before a resume has a row of its own
        values[f"time/{row.node}"] = values.get(f"time/{row.node}", 0.0) + working_seconds(row)
        for cause, seconds in row.waits.items():
            values[f"wait/{cause}"] = values.get(f"wait/{cause}", 0.0) + seconds
    return values


def _from_pools(pools: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """busy/<pool> and idle/<pool>/<cause> add up to time/iteration for each pool."""
    values: dict[str, float] = {}
    for pool, seconds in pools.items():
        values[f"busy/{pool}"] = seconds.get(WORKING, 0.0)
        values |= {f"idle/{pool}/{cause}": value for cause, value in seconds.items() if cause != WORKING}
    return values
