"""Stages `reference` and `old_logprobs`: log-probabilities of a rollout under other weights that the trainer holds."""

from typing import Literal

import pyarrow as pa

from data.columns import column
from data.refs import DatasetRef
from data.store import Facts
from tasks.stage import Columns, Context, Inputs, stage

_TOKENS = ["group_id", "prompt_ids", "response_ids"]


@stage(consumes=_TOKENS, produces=["ref_logprobs"], role="train")
async def reference(inputs: Inputs, context: Context) -> Columns:
    """ROLLOUT x frozen starting model -> REFERENCE: log p_ref of every response token, after the rollout's temperature.

    The model is named in the facts by `reference-` and the content digest of its weights.
    """
    return await _logprobs(inputs.dataset, context, "reference", "ref_logprobs")


@stage(consumes=_TOKENS, produces=["old_logprobs"], role="train", reads="current")
async def old_logprobs(inputs: Inputs, context: Context) -> Columns:
    """ROLLOUT x trainer's policy -> OLD: log p of every response token before the update, after temperature.

    The denominator of the ratio where `update.old_logprobs` is `recomputed` (decoupled PPO's proximal policy,
    arXiv:2110.00641).
    """
    return await _logprobs(inputs.dataset, context, "policy", "old_logprobs")


async def _logprobs(
    dataset: DatasetRef | None, context: Context, model: Literal["policy", "reference"], name: str
) -> Columns:
    assert dataset is not None  # both stages consume columns, so the graph check gave them rows
    found = await context.trainer.logprobs(dataset, model, lambda done, total: context.progress(done, total, "samples"))
    values = found.table["logprobs"]
    label = context.policy.label if model == "policy" else f"reference-{found.model[:12]}"
    facts = Facts(
        sampling={"model": label, "temperature": context.experiment.rollout.temperature},
        logprob_kind="after_temperature",
    )
    return Columns(pa.table([values], schema=pa.schema([column(name).field])), facts)
