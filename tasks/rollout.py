"""Rollout: samples for every prompt, from engines that hold proven policy versions. Token ids in, never text.

A response is accepted only whole, with its log-probabilities, from an engine that held before and after the batch what
the ledger says was proven on it, under the same boot (`tasks/generation`).

`rollout.kv_policy` says what a version that is published in mid-batch does to the responses under way:

    pin      nothing: a response has exactly one version, the batch's. What the engine cuts off is asked for again.
    rebuild  the engine computes the KV of prompt and response so far anew and goes on under the new weights: a span
             for each version. What it cuts off is sent again with the tokens it has, and the budget that is left.
    keep     the same, but the KV stays that of the old weights: no token after the update has true log-probabilities.
"""

import asyncio
import logging
import time
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from conf.errors import StageError
from data.prompts import tokenizer_digest
from data.refs import PolicyRef
from data.rows import tokens_per_version
from data.store import Facts
from data.versions import check_lag
from tasks.engines.client import Sampling
from tasks.generation.batch import Batch
from tasks.generation.bracket import EnginesLost, KVPolicy, engines_for
from tasks.generation.groups import Wanted
from tasks.generation.samples import SAMPLE_COLUMNS, sample_metrics, sample_table
from tasks.prompts import COLUMNS as PROMPT_COLUMNS
from tasks.prompts import cursor_after
from tasks.publish import publish_to_engines
from tasks.stage import Context, GroupStream, Inputs, Rows, stage

log = logging.getLogger(__name__)


@stage(
    consumes=PROMPT_COLUMNS,
    produces=(*PROMPT_COLUMNS, *SAMPLE_COLUMNS),
    output="rows",
    role="rollout",
    reads="current",
)
async def rollout(inputs: Inputs, context: Context) -> Rows:
    """PROMPTS x policy -> SAMPLES: `samples_per_prompt` responses for each prompt, under the iteration's policy.

    With `sampling`, of as many prompts as it takes to get `prompts.per_iteration` groups, and of no more than came in.
    Refuses the batch (StageError, EngineError, DataError): fewer engines than `publish.min_engines`, too many groups
    lost, an engine that changed meanwhile, a policy that is not the newest committed one.
    """
    assert inputs.table is not None  # the graph check refuses a stage whose columns nobody gives
    settings, groups = context.experiment.rollout, context.experiment.sampling
    sampling = Sampling(settings.max_new_tokens, settings.temperature, settings.top_p, settings.top_k)
    chosen = groups.filter != "none" or groups.oversample > 1
    wanted = Wanted(
        context.experiment.prompts.per_iteration if chosen else inputs.table.num_rows,
        groups,
        context.stream or GroupStream(),
        settings.sample_deadline_s,
        settings.on_deadline,
    )
    return await generate_batch(
        context, inputs.table, context.policy, sampling, settings.samples_per_prompt, settings.kv_policy, wanted
    )


async def generate_batch(
    context: Context,
    prompts: pa.Table,
    policy: PolicyRef,
    sampling: Sampling,
    samples: int,
    kv_policy: KVPolicy = "pin",
    wanted: Wanted | None = None,
) -> Rows:
    """`samples` responses for each prompt that is sent: complete groups only, in the order of the prompts.

    All under `policy` (pin), or each begun under it or under a version committed since (rebuild, keep). Where too many
    engines are gone, they are restarted and get the newest committed version, and the batch is generated once more from
    the beginning: under that version; with pin only if it is `policy` still, else StageError.
    """
    rest = (sampling, samples, kv_policy, wanted or Wanted(prompts.num_rows))
    try:
        return await _generate(context, prompts, policy, *rest)
    except EnginesLost as error:
        newest = context.ledger.committed()
        if newest is None or not context.engines.restartable:
            raise
        log.warning("%s; restarting engines", error)
    weights = context.run_dir / "weights"
    await publish_to_engines(newest, weights, context.engines, context.ledger, context.experiment, context.progress)
    if kv_policy != "pin":  # no response is kept of the first try, so none has to have begun under its version
        policy = context.ledger.committed() or newest
    return await _generate(context, prompts, policy, *rest)


async def _generate(
    context: Context,
    prompts: pa.Table,
    policy: PolicyRef,
    sampling: Sampling,
    samples: int,
    kv_policy: KVPolicy,
    wanted: Wanted,
) -> Rows:
    engines = engines_for(context, policy, kv_policy)
    _check_newest(context, policy)
    batch = Batch(context, prompts, policy, sampling, engines, samples, kv_policy, wanted)
    await batch.open()
    began = time.monotonic()
    await batch.generate()
    seconds = time.monotonic() - began
    newest = _check_newest(context, policy, crossing=kv_policy != "pin")
    kept, sent = batch.groups.keep(), batch.groups.sent
    table = await asyncio.to_thread(sample_table, prompts, kept, batch.bracket.boots, context.experiment.model.path)
    versions = tokens_per_version(table)
    context.measure(f"{context.node}/tokens_per_s", sum(versions.values()) / seconds)
    context.measure(f"{context.node}/retries", sum(tries - 1 for tries in batch.requests.tries.values()))
    context.measure(f"{context.node}/aborted", batch.requests.aborted)
    context.measure(f"{context.node}/reprefilled_tokens", batch.requests.reprefilled_tokens)
    facts = Facts(
        policy_versions=versions,
        sampling={**asdict(sampling), "samples_per_prompt": samples, "kv_policy": kv_policy},
        logprob_kind="after_temperature",
        tokenizer_digest=tokenizer_digest(Path(context.experiment.model.path)),
        dropped={group.id: group.failed for group in sent if group.failed},
        dropped_lengths={group.id: lengths for group in sent if group.failed and (lengths := group.lengths)},
        cursor=cursor_after(context, len(sent)) if wanted.sampling.refills else {},
        metrics={**sample_metrics(table, newest), **batch.metrics()},
    )
    return Rows(table, facts)


def _check_newest(context: Context, policy: PolicyRef, crossing: bool = False) -> int:
    """The number of the newest committed version: synchronous, so the policy's own, at admission and at the end alike.

    `crossing`: at the end it may be newer, by the versions that were published in mid-batch.
    """
    newest = context.ledger.committed()
    if newest is None:
        raise StageError(f"{context.node} needs a committed policy version, the ledger has none: publish one first")
    check_lag(newest.number, policy.number, limit=max(newest.number - policy.number, 0) if crossing else 0)
    return newest.number
