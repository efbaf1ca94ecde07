"""The trainer on the demo's workload: 8 prompts of 29 tokens x 8 responses of 16, SmolLM2-135M, real process group.

    python -m benchmarks.trainer [--updates 4]

Each variant is a trainer of its own, started and stopped in turn; the first update warms up, the others' median counts.
The ratios say what each of Ratchet's means brings on this machine: the plain alternative's time over Ratchet's.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from conf.schema import Experiment, Model, Update
from data.columns import COLUMNS
from data.refs import DatasetRef
from data.store import Facts, Store
from tasks.trainer.client import Trainer

GROUPS, MEMBERS, PROMPT, RESPONSE, VOCABULARY = 8, 8, 29, 16, 49_152
UPDATE = Update(learning_rate=1e-5, max_logprob_diff=100.0)  # the engine's log-probabilities are made up
GLIBC = {"MALLOC_MMAP_MAX_": "65536", "MALLOC_TRIM_THRESHOLD_": "131072"}  # its own defaults


@dataclass(frozen=True)
class Times:
    """Seconds, and GiB at the end."""

    update: float
    reference: float
    export: float
    checkpoint: float
    memory: float


def commit(store: Store, iteration: int, flat_groups: int) -> DatasetRef:
    """The workload with random tokens; the first `flat_groups` groups have no advantage."""
    random = np.random.default_rng(iteration)
    n = GROUPS * MEMBERS
    prompts = random.integers(3, VOCABULARY, (GROUPS, PROMPT)).repeat(MEMBERS, axis=0)
    advantages = random.normal(size=(n, 1)).repeat(RESPONSE, axis=1)
    advantages[: flat_groups * MEMBERS] = 0
    label = "000000-0123456789ab"
    values = {
        "sample_id": [f"i{iteration:06d}-s{i:03d}" for i in range(n)],
        "group_id": [f"i{iteration:06d}-g{i // MEMBERS:03d}" for i in range(n)],
        "prompt_ids": prompts.tolist(),
        "response_ids": random.integers(3, VOCABULARY, (n, RESPONSE)).tolist(),
        "response_mask": [[True] * RESPONSE] * n,
        "behavior_logprobs": [[-10.0] * RESPONSE] * n,
        "advantages": advantages.tolist(),
        "version_spans": [[{"label": label, "start": 0, "end": RESPONSE}]] * n,
        "policy_version": [0] * n,
        "finish_reason": ["length"] * n,
    }
    table = pa.table(values, schema=pa.schema([COLUMNS[name].field for name in values]))
    return store.commit_rows(iteration, "training", table, key="sample_id", facts=Facts())


async def measure(
    model: Path, updates: int, settings: Update = UPDATE, environment: Mapping[str, str] | None = None, flat: int = 0
) -> Times:
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as folder:
        run_dir = Path(folder) / "bench"
        store = Store(run_dir, "bench")
        os.environ.update(environment or {})
        trainer = Trainer(Experiment(model=Model(path=str(model)), update=settings), run_dir, "bench")
        try:
            await trainer.start()
            seconds = []
            for number in range(1, updates + 1):
                ref = commit(store, number, flat)
                seconds.append((await trainer.update(ref, number, _quiet)).seconds["train"])
            await trainer.logprobs(ref, "reference", _quiet)  # loads it
            clock = time.monotonic()
            await trainer.logprobs(ref, "reference", _quiet)
            reference, clock = time.monotonic() - clock, time.monotonic()
            staging = run_dir / "staging"
            staging.mkdir()
            await trainer.export(staging, "bfloat16", [1, 2, 3])
            export, clock = time.monotonic() - clock, time.monotonic()
            await trainer.checkpoint(run_dir / "checkpoint", {})
            checkpoint = time.monotonic() - clock
            return Times(statistics.median(seconds[1:]), reference, export, checkpoint, _peak_gib(trainer.pids))
        finally:
            await trainer.stop()
            for name in environment or {}:
                del os.environ[name]


def _quiet(done: int, total: int) -> None:
    pass


def _peak_gib(pids: list[int]) -> float:
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**20


async def run(model: Path, updates: int) -> None:
    ours = await measure(model, updates)
    print(f"update of 64 samples              {ours.update:.2f} s")
    print(f"reference log-probabilities       {ours.reference:.2f} s")
    print(f"export, 269 MB bfloat16, fsynced  {ours.export:.2f} s")
    print(f"checkpoint, 1.6 GB, fsynced       {ours.checkpoint:.2f} s")
    print(f"peak memory                       {ours.memory:.1f} GiB")
    for name, other in (
        ("prompt computed for each sample", await measure(model, updates, replace(UPDATE, share_prefix_tokens=0))),
        ("glibc's allocator as it comes", await measure(model, updates, environment=GLIBC)),
        ("float32 instead of bfloat16", await measure(model, updates, replace(UPDATE, precision="fp32"))),
    ):
        print(f"{name:33} {other.update:.2f} s, {other.update / ours.update:.2f} x, {other.memory:.1f} GiB")
    skipped = await measure(model, updates, flat=GROUPS // 2)
    print(
        f"half the groups without advantage {skipped.update:.2f} s, skipping gains {ours.update / skipped.update:.2f} x"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m-instruct"))
    parser.add_argument("--updates", type=int, default=4)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.model, arguments.updates))


if __name__ == "__main__":
    main()
