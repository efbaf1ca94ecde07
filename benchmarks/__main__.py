"""Run every benchmark, one after another, each in a process of its own: `make bench`."""

import subprocess
import sys

NAMES = [
    "simulate",
    "planner",
    "handoff",
    "orchestration",
    "schedules",
    "skewed",
    "publish",
    "trainer",
    "demo",
    "learning",
    "peer",
]

if __name__ == "__main__":
    chosen = sys.argv[1:] or NAMES
    failed = []
    for name in chosen:
        print(f"\n== {name}", flush=True)
        if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode:
            failed.append(name)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")
