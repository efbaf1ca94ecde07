"""Ratchet against TRL's GRPOTrainer on the same work: same model, prompts, samples, precision, allocator, one machine.

    python -m benchmarks.peer [--iterations 8] [--peers ../shared/peers]

Both run in turn: first with a learning rate that changes nothing, so that both generate equally long responses and the
times compare; then as the workload says, for the reward curve. TRL has a virtual environment of its own, `.venv-peer`,
made from the peers folder at the first use. Ratchet's side is benchmarks/peer.yaml.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo import run
from data.metrics import read_metrics
from tasks.trainer.client import rank_environment

VENV = Path(".venv-peer")
LEARNING_RATE, NEXT_TO_NONE = 5e-5, 1e-9
MODEL = "models/smollm2-135m-instruct"
EXPERIMENT = "benchmarks/peer.yaml"


@dataclass(frozen=True)
class Result:
    """Seconds per iteration, without the first one; memory of the whole process tree."""

    total: list[float]
    generation: list[float]
    training: list[float]
    rewards: list[float]
    tokens: list[float]
    peak_gib: float


def allocator() -> dict[str, str]:
    """How Ratchet's trainer sets the allocator up, for TRL too."""
    return {k: v for k, v in rank_environment(0, 1, os.cpu_count() or 1, "cpu").items() if k.startswith("MALLOC_")}


def trl(peers: Path, iterations: int, rate: float) -> Result:
    if not (VENV / "bin/python").exists():
        print(f"making {VENV} for TRL (a few minutes) ...", flush=True)
        subprocess.run(["python3.11", "-m", "venv", VENV], check=True)
        for packages in (["torch==2.13.0"], ["-r", str(peers / "requirements.txt")]):
            subprocess.run([VENV / "bin/python", "-m", "pip", "install", "--quiet", *packages], check=True)
    options = {"--model": Path(MODEL).resolve(), "--iters": iterations, "--micro": 32, "--lr": rate}
    command = [str(VENV.absolute() / "bin/python"), str((peers / "trl_grpo.py").resolve())]
    command += [str(word) for option in options.items() for word in option]
    with tempfile.TemporaryDirectory() as scratch:  # it writes an output folder where it runs
        done = subprocess.run(
            command, cwd=scratch, env={**os.environ, **allocator()}, capture_output=True, text=True, check=True
        )
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    counted, summary = rows[1:-1], rows[-1]
    return Result(
        [r["total_s"] for r in counted], [r["gen_s"] for r in counted], [r["train_s"] for r in counted],
        [r["reward"] for r in rows[:-1]], [r["completion_tokens"] for r in counted], summary["peak_rss_mib"] / 1024,
    )  # fmt: skip


def ratchet(iterations: int, rate: float) -> Result:
    name = f"bench-peer-{int(time.time())}"
    _, peak = run([EXPERIMENT, f"update.learning_rate={rate}", "--run", name, "--iterations", str(iterations)])
    rows = list(read_metrics(Path("runs") / name / "metrics.parquet").values())
    counted = rows[1:]
    return Result(
        [r["time/iteration"] for r in counted], [r["time/rollout"] for r in counted],
        [r["time/update"] + r["time/publish"] for r in counted], [r["reward/mean"] for r in rows],
        [r["response_length/mean"] * 64 for r in counted], peak,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--peers", type=Path, default=Path("../shared/peers"))
    arguments = parser.parse_args()
    if not (arguments.peers / "trl_grpo.py").exists():
        sys.exit(f"--peers must be the folder with trl_grpo.py and requirements.txt, got {arguments.peers}")
    theirs = trl(arguments.peers, arguments.iterations, NEXT_TO_NONE)
    ours = ratchet(arguments.iterations, NEXT_TO_NONE)
    learning = trl(arguments.peers, arguments.iterations, LEARNING_RATE), ratchet(arguments.iterations, LEARNING_RATE)

    print(f"medians over {arguments.iterations - 1} iterations {'TRL':>20}{'Ratchet':>9}{'TRL / Ratchet':>15}")
    for label, field in [
        ("seconds an iteration", "total"),
        ("  generation", "generation"),
        ("  training (Ratchet: with publish)", "training"),
        ("response tokens an iteration", "tokens"),
    ]:
        a, b = statistics.median(getattr(theirs, field)), statistics.median(getattr(ours, field))
        print(f"{label:38}{a:8.2f}{b:9.2f}{a / b:15.2f}")
    a, b = statistics.median(theirs.total), statistics.median(ours.total)
    print(f"{'samples per second':38}{64 / a:8.2f}{64 / b:9.2f}{b / a:15.2f}")
    print(f"{'peak memory, GiB':38}{theirs.peak_gib:8.1f}{ours.peak_gib:9.1f}{theirs.peak_gib / ours.peak_gib:15.2f}")
    for label, result in zip(("TRL", "Ratchet"), learning, strict=True):
        print(f"reward of {label:8} " + " ".join(f"{reward:.2f}" for reward in result.rewards))


if __name__ == "__main__":
    main()
