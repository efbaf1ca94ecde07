"""Reward against time on SmolLM2: `async` (lag at most 2) against `sync`, on the same wall-clock budget, for each seed.

    python -m benchmarks.learning [--iterations 10] [--seeds 1 2]

Each is a whole `ratchet run conf/smollm2_arithmetic.yaml` without evaluation. The budget is what sync takes for its
iterations; async gets half as many again and is cut off there. On one machine's CPU engine and trainer share the cores,
so that overlap can win little: what is shown is whether the lag costs reward.
"""

import argparse
import math
import os
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path

from data.metrics import read_metrics

EXPERIMENT = "conf/smollm2_arithmetic.yaml"
COMMON = ["evaluate.every=0", "update.correction.kind=ratio"]
SCHEDULES = {"sync": ["schedule.kind=sync"], "async": ["schedule.kind=async", "schedule.max_lag=2"]}
MARKS = 6  # points in time at which the rewards are shown


def curve(schedule: str, seed: int, iterations: int) -> list[tuple[float, dict[str, float]]]:
    """(seconds since the services were up, metrics) at the end of each iteration of a new run."""
    name = f"bench-learning-{schedule}-{seed}-{os.getpid()}-{int(time.time())}"
    command = [sys.executable, "-c", "from flows.cli import main; main()", "run", EXPERIMENT, "--run", name]
    settings = [*COMMON, *SCHEDULES[schedule], f"seed={seed}"]
    if subprocess.run([*command, "--iterations", str(iterations), *settings], check=False).returncode:
        sys.exit("the run failed")
    history = read_metrics(Path("runs") / name / "metrics.parquet")
    values = [history[number] for number in sorted(history)]
    return list(zip(accumulate(each["time/iteration"] for each in values), values, strict=True))


def at(points: list[tuple[float, dict[str, float]]], seconds: float) -> str:
    """The reward of the last iteration that had ended by then."""
    ended = [values["reward/mean"] for end, values in points if end <= seconds]
    return f"{ended[-1]:.3f}" if ended else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=10, help="of sync")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    arguments = parser.parse_args()
    lines: list[str] = []
    for seed in arguments.seeds:
        sync = curve("sync", seed, arguments.iterations)
        ahead = curve("async", seed, math.ceil(1.5 * arguments.iterations))
        budget = sync[-1][0]
        marks = [budget * (n + 1) / MARKS for n in range(MARKS)]
        lines.append(f"seed {seed}, {budget:.0f} s     " + "".join(f"{mark:>7.0f} s" for mark in marks))
        for name, points in (("sync", sync), ("async", ahead)):
            inside = [(end, values) for end, values in points if end <= budget]
            rewards = [values["reward/mean"] for _, values in inside]
            samples = sum(values["actor/samples"] for _, values in inside)
            lag = max(values["off_policy/lag_max"] for _, values in inside)
            lines.append(f"  reward, {name:10}" + "".join(f"{at(points, mark):>9}" for mark in marks))
            lines.append(
                f"    {len(inside)} iterations, mean of the last 3 {sum(rewards[-3:]) / len(rewards[-3:]):.3f}, "
                f"{samples / inside[-1][0]:.2f} samples/s, lag at most {lag:.0f}, "
                f"ESS {sum(values['mismatch/ess'] for _, values in inside) / len(inside):.3f}"
            )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
