"""The demo: samples per second, seconds per stage, share of wall time outside stage work, peak memory of the tree.

    python -m benchmarks.demo [--iterations 10]

Runs `ratchet run conf/smollm2_arithmetic.yaml --new` and reads the run's own metrics. Memory is the proportional set
size (PSS) of every process of the tree, so that shared pages count once.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from data.metrics import read_metrics

EXPERIMENT = "conf/smollm2_arithmetic.yaml"


def run(arguments: list[str]) -> tuple[float, float]:
    """Run `ratchet run ARGUMENTS`, its output shown; gives (wall seconds, peak memory of its processes in GiB)."""
    began, peak, marker = time.monotonic(), 0.0, f"RATCHET_BENCH={os.getpid()}"
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", *arguments]
    with subprocess.Popen(command, env={**os.environ, "RATCHET_BENCH": str(os.getpid())}) as process:
        while process.poll() is None:
            peak = max(peak, tree_gib(marker))
            time.sleep(1)
    if process.returncode:
        sys.exit(f"the run ended with code {process.returncode}")
    return time.monotonic() - began, peak


def tree_gib(marker: str) -> float:
    """Memory of every process whose environment has the marker: children inherit it and keep it without a parent."""
    own = str(os.getpid())
    return sum(_pss_kib(process) for process in _marked(marker) if process.name != own) / 2**20


def _marked(marker: str) -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker.encode() in (process / "environ").read_bytes().split(b"\0"):
                yield process
        except OSError:  # it has ended
            continue


def _pss_kib(process: Path) -> int:
    try:
        lines = (process / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10)
    arguments = parser.parse_args()
    name = f"bench-demo-{int(time.time())}"
    wall, peak = run([EXPERIMENT, "--run", name, "--iterations", str(arguments.iterations)])
    history = list(read_metrics(Path("runs") / name / "metrics.parquet").values())
    total = sum(v["time/iteration"] for v in history)
    outside = sum(v["time/outside_stages"] for v in history)
    samples = sum(v["actor/samples"] for v in history)
    rewards = [v["reward/mean"] for v in history]
    print(f"whole command                     {wall:.0f} s   (target <= 480)")
    print(f"iterations                        {total:.0f} s for {len(history)}")
    print(f"samples per second of iterations  {samples / total:.2f}")
    for name in sorted({n for v in history for n in v if n.startswith("time/")} - {"time/iteration"}):
        print(f"  {name:31} {sum(v.get(name, 0.0) for v in history) / len(history):.2f} s an iteration")
    print(f"outside stage work                {outside / total:.1%} of wall time   (target <= 5%)")
    print(f"peak memory of the tree           {peak:.1f} GiB   (target <= 12)")
    last = sum(rewards[-3:]) / len(rewards[-3:])
    print(f"reward, first / mean of last 3    {rewards[0]:.3f} / {last:.3f}   (target < 0.15 / >= 0.35)")


if __name__ == "__main__":
    main()
