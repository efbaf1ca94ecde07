"""Wall time of an iteration of stages that do nothing: what Prefect, the store and the ledger cost.

    python -m benchmarks.orchestration [--iterations 200]

The plain alternative in the same run: the same stages as an empty Prefect flow of as many empty async tasks.
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
from flows.run import RUN, iteration
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
    ours, plain = [], []
    with noop_run(Path(folder), iterations=iterations) as run:
        RUN.set(run)
        for number in run.remaining():
            began = time.perf_counter()
            await iteration(number)
            ours.append(time.perf_counter() - began)
            if number % 10 == 0:  # spread over the run, so that both see the same machine
                began = time.perf_counter()
                await empty_iteration()
                plain.append(time.perf_counter() - began)
    return ours, plain


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
