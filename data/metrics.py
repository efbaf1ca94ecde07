"""Metrics of a run: how each one aggregates over iterations or runs, and the one Parquet file they stand in."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

Aggregation = Literal["mean", "token_mean", "max", "sum", "last"]


@dataclass(frozen=True)
class Metric:
    pattern: str  # name, with * for a family
    aggregation: Aggregation  # token_mean: mean weighted by response tokens
    unit: str
    meaning: str


# Names are those of the field (verl, TRL, slime). The first pattern that fits decides.
METRICS = [
    Metric("*/discarded_tokens", "sum", "tokens", "response tokens generated for what no row holds"),
    Metric("*/discarded_calls", "sum", "calls", "calls of reward functions for what no row holds"),
    Metric("reward/*", "mean", "", "rewards of the samples with outcome ok, over all and per named reward"),
    Metric("eval/*", "mean", "", "the same on the held-out prompts"),
    Metric("response_length/max", "max", "tokens", "longest response"),
    Metric("response_length/*", "mean", "tokens", "response length"),
    Metric("rollout/retries", "sum", "requests", "requests sent again, whole or to go on from a partial answer"),
    Metric("rollout/aborted", "sum", "requests", "requests the engine cut off"),
    Metric(
        "rollout/reprefilled_tokens",
        "sum",
        "tokens",
        "prompt and response tokens computed again: KV given up at a retraction, or sent again and not in the cache",
    ),
    Metric("rollout/lag_max", "max", "versions", "as off_policy/lag_max, but when the batch was generated"),
    Metric("rollout/*", "mean", "", "shares and rates of generation"),
    Metric("evaluate/tokens_per_s", "mean", "1/s", "generation of an evaluation"),
    Metric("evaluate/*", "sum", "", "what it cost, as under rollout/*; its results are eval/*"),
    Metric("sampling/groups_sent", "sum", "groups", "groups started to get those an iteration needs"),
    Metric("sampling/*", "mean", "", "dynamic sampling: share of the generated groups that pass the filter"),
    Metric("actor/lr", "last", "", "learning rate"),
    Metric("actor/*", "token_mean", "", "the update: loss, approx_kl, clipfrac, entropy, grad_norm"),
    Metric("mismatch/*", "token_mean", "", "engine against trainer at the same tokens and weights"),
    Metric("off_policy/lag_max", "max", "updates", "between a sample's first token and the weights it trained"),
    Metric("off_policy/*", "mean", "updates", "the same, mean over samples"),
    Metric("rollout_correction/*", "token_mean", "", "importance weights of off-policy corrections"),
    Metric("groups/zero_variance", "sum", "groups", "groups of the iteration whose rewards were all equal"),
    Metric("groups/*", "last", "groups", "where the prompt groups went, counted from the start of the run"),
    Metric("bias/*", "mean", "", "Kolmogorov-Smirnov distance of trained from issued samples"),
    Metric("truncated/*", "mean", "", "share of samples not ended by the model"),
    Metric("time/*", "sum", "s", "work of a stage; time/iteration is the wall time of all"),
    Metric("commit/*", "sum", "s", "writing, hashing and committing a stage's output"),
    Metric("wait/*", "sum", "s", "waits of the stages by cause"),
    Metric("busy/*", "sum", "s", "time in which a pool's stages worked; with its idle/*, time/iteration"),
    Metric("idle/*", "sum", "s", "time in which they did not, by pool and cause (docs/stages.md)"),
    Metric("throughput/*_per_device_s", "mean", "1/s", "per second and device, over wall time of all devices"),
    Metric("throughput/*", "mean", "1/s", "per second of wall time"),
    Metric("weights/*", "sum", "", "bytes and seconds of bringing weights to the engines"),
    Metric("*", "mean", "", "a stage of one's own"),
]


def metric(name: str) -> Metric:
    return next(m for m in METRICS if fnmatchcase(name, m.pattern))


def accounted(history: Mapping[int, Mapping[str, float]]) -> dict[int, Mapping[str, float]]:
    """The metrics of iterations that were accounted for; of others the ledger has what their stages measured so far."""
    return {number: values for number, values in history.items() if "time/iteration" in values}


def write_metrics(path: Path, history: Mapping[int, Mapping[str, float]]) -> None:
    """Write one row an iteration and one float64 column a metric; null where an iteration has no value. Atomic.

    Each column's metadata says its unit, its meaning and how it aggregates.
    """
    names = sorted({name for values in history.values() for name in values})
    iterations = sorted(history)
    fields = [pa.field("iteration", pa.int64())]
    columns: list[pa.Array] = [pa.array(iterations, pa.int64())]
    for name in names:
        declared = metric(name)
        fields.append(
            pa.field(
                name,
                pa.float64(),
                metadata={"aggregation": declared.aggregation, "unit": declared.unit, "meaning": declared.meaning},
            )
        )
        columns.append(pa.array([history[i].get(name) for i in iterations], pa.float64()))
    staged = path.with_suffix(".tmp")
    pq.write_table(pa.table(columns, schema=pa.schema(fields)), staged)
    os.replace(staged, path)


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    table = pq.read_table(path)
    return {
        row.pop("iteration"): {name: value for name, value in row.items() if value is not None}
        for row in table.to_pylist()
    }


def aggregate(name: str, values: Sequence[float], tokens: Sequence[float]) -> float:
    """Aggregate a metric over iterations, as it declares; `tokens` are the response tokens of each."""
    match metric(name).aggregation:
        case "sum":
            return float(sum(values))
        case "max":
            return float(max(values))
        case "last":
            return float(values[-1])
        case "token_mean" if sum(tokens) > 0:
            return float(sum(v * t for v, t in zip(values, tokens, strict=True)) / sum(tokens))
    return float(sum(values) / len(values))
