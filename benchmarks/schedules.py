"""Makespan of the schedules on stages that sleep, against the shortest that their order allows.

    python -m benchmarks.schedules [--scale 1 10] [--repeats 5]

Three batches of a rollout of 0.4 s, a reward of 0.2 s and an update of 0.3 s, each times a scale, on the real executor
and a real Prefect server. The plain alternative in the same run: the same sleeps as bare asyncio tasks that wait for
nothing else than the schedule says (at scale 1, times the scale). Makespan is from the start of the first rollout to
the end of the last update, as the ledger has them; between them every iteration also draws prompts, publishes and is
accounted for. Of several repeats the median counts, and the least and the most are shown: machines are shared.
"""

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from prefect import flow

from flows import prefect_server
from flows.pool_time import working_spans
from flows.run import RUN, _iterations
from tests.fakes.runs import noop_run
from tests.fakes.stages import paced

BATCHES = 3
ROLLOUT, REWARD, UPDATE = 0.4, 0.2, 0.3  # seconds at scale 1
TARGET = 1.05
RATIO = "update.correction.kind=ratio"
# name: (settings, lag in updates, bound in seconds at scale 1)
SCHEDULES = {
    "sync": ([], 0, 2.7),  # all in a row, three times
    "one_step_off": (["schedule.kind=one_step_off", RATIO], 1, 1.8),  # batches 1 and 3 in a row: 3 waits for update 1
    "async": (["schedule.kind=async", "schedule.max_lag=2", RATIO], 2, 1.7),  # three rollouts, then the rest of batch 3
}


@flow(name="schedules")
async def makespan(folder: Path, scale: float, overrides: list[str]) -> tuple[float, int]:
    """Seconds, and stages that ran."""
    nodes = paced(rollout=ROLLOUT * scale, reward=REWARD * scale, update=UPDATE * scale)
    with noop_run(folder, nodes, BATCHES, overrides) as run:
        RUN.set(run)
        await _iterations(run)
        rows = run.ledger.accounts.stages()
    began = [working_spans(row)[-1][0] for row in rows if row.node == "rollout"]  # after its waits
    ended = [row.ended for row in rows if row.node == "update"]
    return max(ended) - min(began), len(rows)


async def plain(lag: int) -> float:
    """The same order of sleeps at scale 1, without anything else: seconds."""
    rollouts: list[asyncio.Task[None]] = []
    updates: list[asyncio.Task[None]] = []

    async def after(seconds: float, *before: Awaitable[None]) -> None:
        for one in before:
            await one
        await asyncio.sleep(seconds)

    began = time.perf_counter()
    for n in range(BATCHES):
        fresh = updates[n - 1 - lag : n - lag] if n > lag else []
        rollouts.append(asyncio.ensure_future(after(ROLLOUT, *rollouts[-1:], *fresh)))
        reward = asyncio.ensure_future(after(REWARD, rollouts[-1]))
        updates.append(asyncio.ensure_future(after(UPDATE, reward, *updates[-1:])))
    await updates[-1]
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, nargs="+", default=[1.0, 10.0])
    parser.add_argument("--repeats", type=int, default=5)
    scales, repeats = (arguments := parser.parse_args()).scale, arguments.repeats
    logging.disable(logging.ERROR)
    bare = {name: asyncio.run(plain(lag)) for name, (_, lag, _) in SCHEDULES.items()}
    print(
        f"{'seconds':14}{'scale':>6}{'bound':>10}{'plain':>10}{'Ratchet':>10}{'to bound':>10}  target {TARGET}, range"
    )
    costs = []
    with tempfile.TemporaryDirectory() as scratch:
        prefect_server.HOME = Path(scratch) / "prefect"
        with prefect_server.prefect_server():
            asyncio.run(makespan(Path(scratch) / "first", 0, []))  # imports, connections
            for scale in scales:
                for name, (overrides, _, at_1) in SCHEDULES.items():
                    folders = [Path(scratch) / f"{name}-{scale:g}-{n}" for n in range(repeats)]
                    found = [asyncio.run(makespan(folder, scale, overrides)) for folder in folders]
                    ours, stages = statistics.median(seconds for seconds, _ in found), found[0][1]
                    bound, without = at_1 * scale, bare[name] * scale
                    ratio = ours / bound
                    if name == "sync":  # all its stages are one after another
                        costs.append(f"{(ours - bound) / stages * 1000:.0f} ms at scale {scale:g}")
                    print(
                        f"{name:14}{scale:6g}{bound:10.1f}{without:10.2f}{ours:10.2f}{ratio:10.3f}"
                        f"  {'met' if ratio <= TARGET else 'missed'}"
                        f"  {min(found)[0] / bound:.3f} to {max(found)[0] / bound:.3f}",
                        flush=True,
                    )
    print(f"one stage beside its sleep (sync, with its share of the accounting): {', '.join(costs)}")


if __name__ == "__main__":
    main()
