"""Stage `reward`: every sample is scored by the named reward functions, in worker processes."""

import asyncio
import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from conf.schema import Experiment, Reward
from data.columns import REWARD_COMPONENT, column
from data.store import Facts
from tasks.filter import dropped_groups
from tasks.rewards.workers import Result, RewardWorkers, failure
from tasks.stage import Arriving, Columns, Context, Group, Inputs, stage
from tasks.together import all_or_first_error

CONSUMES = ("sample_id", "prompt_text", "response_text", "answer", "prompt_data", "finish_reason", "response_ids")


class Score(NamedTuple):
    """Of a sample that came before the rollout ended."""

    answer: tuple[str, bytes]  # which one it is of: the sample may have another in the end
    result: Result
    group: str


def produced(experiment: Experiment) -> list[str]:
    return ["rewards", "reward_outcome", "reward_error", *(REWARD_COMPONENT + n for n in experiment.reward.functions)]


@stage(consumes=CONSUMES, produces=produced, streams=True)
async def reward(inputs: Inputs, context: Context) -> Columns:
    """ROLLOUT -> SCORED: `rewards` = sum over functions of weight x value, null unless every value is ok.

    Groups are scored as they come, and judged for sampling.filter. A score belongs to one answer: what the committed
    rollout has otherwise, or what did not come, is scored at the end. Raises StageError when more samples fail than
    `reward.max_failed_share` allows, or any with `on_failure: fail`.
    """
    scores, scored = await _score_arriving(inputs.arriving, context) if inputs.arriving else ({}, Counter[str]())
    rollout = (await inputs.whole()).table
    assert rollout is not None
    settings, known = context.experiment.reward, _known(rollout, scores)
    results = {row: score.result for row, score in known.items()}
    table = await score_rows(rollout, settings, context.rewards, context.progress, results)
    scored.subtract(score.group for score in known.values())
    facts = Facts(
        reward_code_digest=context.rewards.digest,
        discarded_calls={group: answers * len(settings.functions) for group, answers in (+scored).items()},
        metrics=reward_metrics(table),
    )
    return Columns(table, facts)


async def _score_arriving(arriving: Arriving, context: Context) -> tuple[dict[str, Score], Counter[str]]:
    """The score of every sample that came before the rollout ended, by sample id; and answers scored, by group.

    Those are more than the scores where a group came again, and more than the rows' where it was not kept.
    """
    experiment = context.experiment
    scores: dict[str, Score] = {}
    scored: Counter[str] = Counter()
    groups = experiment.prompts.per_iteration
    size, most = (
        count * experiment.rollout.samples_per_prompt
        for count in (experiment.sampling.started(groups), experiment.sampling.candidates(groups))
    )

    async def score(group: Group) -> None:
        rows = await asyncio.to_thread(group.read)
        ids = rows["sample_id"].to_pylist()
        failed = [text for sample, score in scores.items() if (text := failure(sample, score.result))]
        results = await context.rewards.score(_samples(rows), ids, lambda done: None, total=most, failed=failed)
        scored[group.id] += len(ids)
        for sample, answer, result in zip(ids, _answers(rows), results, strict=True):
            scores[sample] = Score(answer, result, group.id)
        rewards = _table(results, experiment.reward).append_column("group_id", rows["group_id"])
        arriving.judge(group, dropped_groups(rewards).get(group.id, ""))
        context.progress(len(scores), max(len(scores), size), "samples")

    working: set[asyncio.Task[None]] = set()
    async with all_or_first_error() as tasks:
        while (group := await arriving.next(working)) is not None:
            task = tasks.create_task(score(group))
            working.add(task)
            task.add_done_callback(working.discard)
    return scores, scored


def _known(table: pa.Table, scores: Mapping[str, Score]) -> dict[int, Score]:
    """The scores that are of the table's own answers, by row."""
    known: dict[int, Score] = {}
    ids = table["sample_id"].to_pylist()
    for row, answer in enumerate(_answers(table) if scores else ()):
        if (score := scores.get(ids[row])) and score.answer == answer:
            known[row] = score
    return known


async def score_rows(
    table: pa.Table,
    settings: Reward,
    workers: RewardWorkers,
    progress: Callable[[int, int, str], None],
    known: Mapping[int, Result] = MappingProxyType({}),
) -> pa.Table:
    """The reward columns for rows with CONSUMES, in their order. `known`: results that are there already, by row."""
    ids = table["sample_id"].to_pylist()
    left = [row for row in range(len(ids)) if row not in known]
    found = await workers.score(
        _samples(table.take(pa.array(left, pa.int64()))),
        [ids[row] for row in left],
        lambda done: progress(len(known) + done, len(ids), "samples"),
        total=len(ids),
        failed=[text for row, result in known.items() if (text := failure(ids[row], result))],
    )
    results = dict(known) | dict(zip(left, found, strict=True))
    return _table([results[row] for row in range(len(ids))], settings)


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
