"""Wall time of an iteration of stages that do nothing, in step: what Prefect, the store and the ledger cost.

    python -m benchmarks.orchestration [--iterations 200]

The plain alternative in the same run, before and after: an empty Prefect flow of as many empty async tasks. An
iteration's flow opens while the one before it trains; here nothing takes time, so its opening is seen in full.
"""

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from pathlib import Path

from prefect import flow, task

from flows import prefect_server
from flows.run import RUN, _iterations
from tests.fakes.runs import noop_run

STAGES = 7


@task(name="empty")
async def empty() -> None: ...


@flow(name="empty-iteration")
async def empty_iteration() -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(STAGES):
            group.create_task(empty())


@flow(name="orchestration")
async def measure(folder: str, iterations: int) -> tuple[list[float], list[float]]:
    """Seconds from the accounts of one iteration to those of the next, and of each empty flow."""
    plain = [await timed_empty() for _ in range(iterations // 20)]
    with noop_run(Path(folder), iterations=iterations) as run:
        RUN.set(run)
        await _iterations(run)
        ours = [values["time/iteration"] for _, values in sorted(run.history.items())]
    return ours, plain + [await timed_empty() for _ in range(iterations // 20)]


async def timed_empty() -> float:
    began = time.perf_counter()
    await empty_iteration()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=200)
    iterations = parser.parse_args().iterations
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as scratch:
        prefect_server.HOME = Path(scratch) / "prefect"
        with prefect_server.prefect_server():
            ours, plain = asyncio.run(measure(f"{scratch}/run", iterations))
    early = statistics.median(ours[5:15])
    late = statistics.median(ours[-10:])
    print(f"iteration of {STAGES} no-op stages   median {statistics.median(ours):.3f} s   (target <= 0.4)")
    print(f"empty Prefect flow of {STAGES} tasks median {statistics.median(plain):.3f} s")
    print(f"ratio to the empty flow        {statistics.median(ours) / statistics.median(plain):.2f}")
    print(f"around iteration 10 / at the end {early:.3f} s / {late:.3f} s   ratio {late / early:.2f}   (target <= 1.2)")


if __name__ == "__main__":
    main()
