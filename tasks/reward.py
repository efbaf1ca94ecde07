"""Stage `reward`: every sample is scored by the named reward functions, in worker processes."""

import asyncio
import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from conf.schema import Experiment, Reward
from data.columns import REWARD_COMPONENT, column
from data.store import Facts
from tasks.filter import dropped_groups
from tasks.rewards.workers import Result, failure
from tasks.stage import Arriving, Columns, Context, Group, Inputs, stage
from tasks.together import all_or_first_error

CONSUMES = (
    "sample_id",
    "group_id",
    "prompt_text",
    "response_text",
    "answer",
    "prompt_data",
    "finish_reason",
    "response_ids",
)


class Score(NamedTuple):
    """Of a sample that came before the rollout ended."""

    answer: tuple[str, bytes]  # which one it is of: the sample may have another in the end
    result: Result


def produced(experiment: Experiment) -> list[str]:
    return ["rewards", "reward_outcome", "reward_error", *(REWARD_COMPONENT + n for n in experiment.reward.functions)]


@stage(consumes=CONSUMES, produces=produced, streams=True)
async def reward(inputs: Inputs, context: Context) -> Columns:
    """ROLLOUT -> SCORED: `rewards` = sum over functions of weight x value, null unless every value is ok.

    Groups are scored as they come, and judged for sampling.filter. A score belongs to one answer: what the committed
    rollout has otherwise, or what did not come, is scored at the end. Raises StageError when more samples fail than
    `reward.max_failed_share` allows, or any with `on_failure: fail`.
    """
    scores = await _score_arriving(inputs.arriving, context) if inputs.arriving else {}
    rollout = (await inputs.whole()).table
    assert rollout is not None
    table = await score_rows(rollout, context, _known(rollout, scores))
    return Columns(table, Facts(reward_code_digest=context.rewards.digest, metrics=reward_metrics(table)))


async def _score_arriving(arriving: Arriving, context: Context) -> dict[str, Score]:
    """The score of every sample that came before the rollout ended, by sample id."""
    experiment = context.experiment
    scores: dict[str, Score] = {}
    groups = experiment.prompts.per_iteration
    size, most = (
        count * experiment.rollout.samples_per_prompt
        for count in (experiment.sampling.started(groups), experiment.sampling.candidates(groups))
    )

    async def score(group: Group) -> None:
        rows = await asyncio.to_thread(group.read)
        ids = rows["sample_id"].to_pylist()
        failed = [text for sample, score in scores.items() if (text := failure(sample, score.result))]
        results = await context.rewards.score(
            _samples(rows), ids, lambda done: None, total=most, failed=failed,
            called=lambda index: context.spend("reward_calls", group.id, 1),
        )  # fmt: skip
        for sample, answer, result in zip(ids, _answers(rows), results, strict=True):
            scores[sample] = Score(answer, result)
        rewards = _table(results, experiment.reward).append_column("group_id", rows["group_id"])
        arriving.judge(group, dropped_groups(rewards).get(group.id, ""))
        context.progress(len(scores), max(len(scores), size), "samples")

    working: set[asyncio.Task[None]] = set()
    async with all_or_first_error() as tasks:
        while (group := await arriving.next(working)) is not None:
            task = tasks.create_task(score(group))
            working.add(task)
            task.add_done_callback(working.discard)
    return scores


def _known(table: pa.Table, scores: Mapping[str, Score]) -> dict[int, Result]:
    """The results that are of the table's own answers, by row."""
    known: dict[int, Result] = {}
    ids = table["sample_id"].to_pylist()
    for row, answer in enumerate(_answers(table) if scores else ()):
        if (score := scores.get(ids[row])) and score.answer == answer:
            known[row] = score.result
    return known


async def score_rows(table: pa.Table, context: Context, known: Mapping[int, Result] = MappingProxyType({})) -> pa.Table:
    """The reward columns for rows with CONSUMES, in their order. `known`: results that are there already, by row."""
    ids, groups = table["sample_id"].to_pylist(), table["group_id"].to_pylist()
    left = [row for row in range(len(ids)) if row not in known]
    found = await context.rewards.score(
        _samples(table.take(pa.array(left, pa.int64()))),
        [ids[row] for row in left],
        lambda done: context.progress(len(known) + done, len(ids), "samples"),
        total=len(ids),
        failed=[text for row, result in known.items() if (text := failure(ids[row], result))],
        called=lambda index: context.spend("reward_calls", groups[left[index]], 1),
    )
    results = dict(known) | dict(zip(left, found, strict=True))
    return _table([results[row] for row in range(len(ids))], context.experiment.reward)


def _samples(table: pa.Table) -> list[dict[str, Any]]:
    columns = {
        "prompt": table["prompt_text"],
        "response": table["response_text"],
        "answer": table["answer"],
        "data": table["prompt_data"],
        "finish_reason": table["finish_reason"],
        "tokens": pc.list_value_length(table["response_ids"]),
    }
    return pa.table(columns).to_pylist()


def _answers(table: pa.Table) -> list[tuple[str, bytes]]:
    """What tells one answer of a sample from another: why it ended, and the digest of its tokens."""
    digests = [hashlib.sha256(ids.values.to_numpy().tobytes()).digest() for ids in table["response_ids"]]
    return list(zip(table["finish_reason"].to_pylist(), digests, strict=True))


def _table(results: Sequence[Result], settings: Reward) -> pa.Table:
    rows = [_row(result, settings) for result in results]
    names = ["rewards", "reward_outcome", "reward_error", *(REWARD_COMPONENT + n for n in settings.functions)]
    arrays = [pa.array([row[name] for row in rows], column(name).type) for name in names]
    return pa.table(arrays, schema=pa.schema([column(name).field for name in names]))


def _row(result: Result, settings: Reward) -> dict[str, Any]:
    row: dict[str, Any] = {REWARD_COMPONENT + name: outcome.value for name, outcome in result.items()}
    failed = [(name, outcome) for name, outcome in result.items() if outcome.outcome != "ok"]
    if failed:
        name, first = failed[0]
        return row | {"rewards": None, "reward_outcome": first.outcome, "reward_error": f"{name}: {first.error}"}
    total = sum(settings.functions[name].weight * (outcome.value or 0.0) for name, outcome in result.items())
    if not math.isfinite(total):
        return row | {"rewards": None, "reward_outcome": "nonfinite", "reward_error": f"the weighted sum is {total}"}
    return row | {"rewards": total, "reward_outcome": "ok", "reward_error": ""}


def reward_metrics(table: pa.Table) -> dict[str, float]:
    """`reward/mean`, `reward/std` (n - 1) and `reward/<name>/mean` over ok values; `reward/failed_share` over all."""
    metrics = {"reward/failed_share": pc.mean(pc.not_equal(table["reward_outcome"], "ok")).as_py()}
    for name in table.column_names:
        if name == "rewards":
            metrics |= _moments(table[name].drop_null().to_pylist())
        elif name.startswith(REWARD_COMPONENT) and table[name].null_count < len(table):
            values = table[name].drop_null().to_pylist()
            metrics[f"{name}/mean"] = math.fsum(v / len(values) for v in values)
    return metrics


def _moments(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    mean = math.fsum(v / len(values) for v in values)
    deviation = math.hypot(*(v - mean for v in values)) / math.sqrt(max(len(values) - 1, 1))
    return {"reward/mean": mean, "reward/std": deviation}
