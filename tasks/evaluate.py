"""Stage `evaluate`: fixed held-out prompts, answered by the version just published and scored by the same rewards."""

import asyncio
from dataclasses import replace

import pyarrow as pa

from conf.schema import Experiment
from data.columns import Column, column
from tasks.engines.client import Sampling
from tasks.generation.samples import SAMPLE_COLUMNS
from tasks.prompts import COLUMNS as PROMPT_COLUMNS
from tasks.prompts import prompt_table
from tasks.reward import produced as reward_columns
from tasks.reward import reward_metrics, score_rows
from tasks.rollout import generate_batch
from tasks.stage import Context, Inputs, Rows, stage


def _columns(experiment: Experiment) -> list[Column]:
    return [column(name) for name in (*PROMPT_COLUMNS, *SAMPLE_COLUMNS, *reward_columns(experiment))]


def _due(experiment: Experiment, iteration: int) -> bool:
    return experiment.evaluate.every > 0 and iteration % experiment.evaluate.every == 0


@stage(produces=_columns, output="rows", role="rollout", reads="trained", every=_due)
async def evaluate(inputs: Inputs, context: Context) -> Rows:
    """policy -> EVALUATED: rows like a rollout's with the columns of `reward`; its metrics carry the prefix `eval/`.

    A sample whose reward failed is kept with its outcome and is in no mean. Refuses what rollout and reward refuse.
    """
    experiment, settings = context.experiment, context.experiment.evaluate
    policy = context.ledger.live(inputs.policy())  # sealed again, where that one was found damaged after its publish
    context.ledger.lease(policy.number, "evaluated", lasting=True)  # what was measured can be looked at again
    prompts = await asyncio.to_thread(prompt_table, context.prompts.held_out(), f"e{context.iteration:06d}", experiment)
    sampling = Sampling(experiment.rollout.max_new_tokens, settings.temperature)
    generated = await generate_batch(context, prompts, policy, sampling, settings.samples_per_prompt)
    rewards = await score_rows(generated.table, context)
    table = pa.table(
        [*generated.table.columns, *rewards.columns], names=[*generated.table.column_names, *rewards.column_names]
    )
    metrics = {**generated.facts.metrics, **reward_metrics(rewards)}
    facts = replace(
        generated.facts,
        reward_code_digest=context.rewards.digest,
        metrics={f"eval/{name}": value for name, value in metrics.items()},
    )
    return Rows(table, facts)
