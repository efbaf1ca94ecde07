"""Hand a rollout from one stage to the next: Ratchet's store against pickle and against raw bytes on the same disk.

    python -m benchmarks.handoff [--samples 100000 --tokens 256 --repeats 5]

Each side of each way runs in a process of its own, so that the receiver starts from nothing but the files, and its peak
memory is its own. Seconds are the best of the repeats, because a machine is shared; every way ends durable (fsync). The
sender's table stands in memory before the clock starts, as a stage would have it: that is 1.0 of the peak.
"""

import argparse
import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from data.columns import COLUMNS, SPAN
from data.refs import DatasetRef
from data.store import Facts, Store

LABEL = "000001-0123456789ab"
WAYS = ["ratchet", "raw bytes", "pickled table", "pickled lists"]


def rollout(samples: int, tokens: int) -> pa.Table:
    """Random rows that satisfy the rollout's contract, 8 samples a group, every response `tokens` long."""
    rng = np.random.default_rng(0)
    count = samples * tokens

    def lists(values: pa.Array, length: int = tokens) -> pa.Array:
        return pa.ListArray.from_arrays(pa.array(np.arange(samples + 1, dtype=np.int32) * length), values)

    spans = [pa.repeat(LABEL, samples), pa.repeat(pa.scalar(0, pa.int32()), samples)]
    spans.append(pa.repeat(pa.scalar(tokens, pa.int32()), samples))
    columns = {
        "sample_id": pa.array([f"000001-{i // 8:06d}-{i % 8:04d}" for i in range(samples)]),
        "group_id": pa.array([f"000001-{i // 8:06d}" for i in range(samples)]),
        "response_ids": lists(pa.array(rng.integers(0, 49152, count, np.int32))),
        "response_mask": lists(pa.repeat(True, count)),
        "behavior_logprobs": lists(pa.array(-rng.random(count, np.float32))),
        "version_spans": lists(pa.StructArray.from_arrays(spans, fields=list(SPAN)), 1),
        "policy_version": pa.repeat(pa.scalar(1, pa.int64()), samples),
        "finish_reason": pa.repeat("length", samples),
    }
    return pa.table(columns, schema=pa.schema([COLUMNS[name].field for name in columns]))


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def _write_durably(path: Path, write: Callable[[Any], Any]) -> None:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())


def send(way: str, folder: Path, table: pa.Table) -> Callable[[], object]:
    path = folder / "payload"
    if way == "ratchet":
        store = Store(folder, "bench")

        def commit() -> None:
            ref = store.commit_rows(1, "rollout", table, key="sample_id", facts=Facts())
            (folder / "ref.json").write_text(json.dumps(ref.to_json()))

        return commit
    if way == "raw bytes":
        data = next((folder / "data/objects").glob("*.arrow")).read_bytes()
        return lambda: _write_durably(path, lambda file: file.write(data))
    payload = table.to_pydict() if way == "pickled lists" else table
    return lambda: _write_durably(path, lambda file: pickle.dump(payload, file, protocol=5))


def receive(way: str, folder: Path) -> Callable[[], object]:
    path = folder / "payload"
    if way == "ratchet":
        ref = DatasetRef.from_json(json.loads((folder / "ref.json").read_text()))
        return lambda: Store(folder, "bench").read(ref)
    if way == "raw bytes":
        return path.read_bytes
    return lambda: pickle.loads(path.read_bytes())


def child(side: str, way: str, folder: Path, samples: int, tokens: int) -> None:
    """Run one side of one way; print its seconds and its peak memory above the imports."""
    before = _status("VmRSS")
    if side == "send":
        # The raw sender holds the bytes of the file instead of the table.
        table = pa.table({}) if way == "raw bytes" else rollout(samples, tokens)
        work = send(way, folder, table)
        del table
    else:
        work = receive(way, folder)
    pa.default_memory_pool().release_unused()
    # Memory that a virtual machine has never touched costs 0.3 s for 200 MB, whoever comes first: touch it beforehand.
    np.ones(2 * samples * tokens, np.int64)
    Path("/proc/self/clear_refs").write_text("5")  # start the peak anew: making the table is not the hand-off
    start = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak": _status("VmHWM") - before}))
    del kept


def measure(side: str, way: str, folder: Path, samples: int, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.handoff", "--child", side, way, str(folder)]
    sizes = ["--samples", str(samples), "--tokens", str(tokens)]
    return json.loads(subprocess.run([*command, *sizes], check=True, stdout=subprocess.PIPE).stdout)


def flat_cost(folder: Path, iterations: int = 200) -> tuple[float, float]:
    """Milliseconds to commit and read one iteration's rollout and rewards (64 x 16), early and late in a run."""
    store, table, times = Store(folder, "flat"), rollout(64, 16), []
    rewards = pa.table({"reward_outcome": ["ok"] * 64, "reward_error": [""] * 64})
    for iteration in range(1, iterations + 1):
        start = time.perf_counter()
        rows = store.commit_rows(iteration, "rollout", table, key="sample_id", facts=Facts())
        store.read(store.commit_columns(iteration, "reward", rows, rewards, facts=Facts()))
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times[:20]), statistics.median(times[-20:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; the disk under it is what is measured")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        side, way, folder = args.child
        child(side, way, Path(folder), args.samples, args.tokens)
        return

    results: dict[tuple[str, str], list[dict[str, float]]] = {}
    size = 0
    for repeat in range(args.repeats):
        for way in WAYS if repeat == 0 else WAYS[:-1]:  # lists take minutes and gigabytes: once
            if way == "ratchet":
                temporary = tempfile.TemporaryDirectory(dir=args.folder)  # raw bytes needs its file in the same round
                folder = Path(temporary.name)
            for side in ("send", "receive"):
                results.setdefault((way, side), []).append(measure(side, way, folder, args.samples, args.tokens))
            size = next((folder / "data/objects").glob("*.arrow")).stat().st_size
        temporary.cleanup()

    print(f"{args.samples:,} samples x {args.tokens} tokens, {size / 1e6:.0f} MB, {args.repeats} repeats")
    print(f"{'':14}{'send s':>9}{'receive s':>11}{'both s':>9}{'x ratchet':>11}{'peak/data':>11}")
    total = {way: sum(_seconds(results[way, side]) for side in ("send", "receive")) for way in WAYS}
    for way in WAYS:
        sent, received = (_seconds(results[way, side]) for side in ("send", "receive"))
        peak = max(r["peak"] for side in ("send", "receive") for r in results[way, side]) / size
        ratio = total[way] / total["ratchet"]
        print(f"{way:14}{sent:9.3f}{received:11.3f}{total[way]:9.3f}{ratio:11.2f}{peak:11.2f}")
    print(f"speed against raw bytes: {total['raw bytes'] / total['ratchet']:.2f} (target >= 0.5)")
    print(f"speed against pickled lists: {total['pickled lists'] / total['ratchet']:.1f} (target >= 10)")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder_name:
        early, late = flat_cost(Path(folder_name))
    print(
        f"commit and read of a small iteration: {early:.1f} ms at 1-20, {late:.1f} ms at 181-200: x {late / early:.2f}"
    )


def _seconds(runs: list[dict[str, float]]) -> float:
    return min(r["seconds"] for r in runs)


if __name__ == "__main__":
    main()
