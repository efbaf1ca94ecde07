"""Stages `reference` and `old_logprobs`: log-probabilities of a rollout under other weights that the trainer holds."""

import hashlib
from typing import Literal

import pyarrow as pa

from data.columns import column
from data.refs import DatasetRef
from data.store import Facts
from tasks.stage import Arriving, Columns, Context, Inputs, stage
from tasks.trainer.client import Logprobs

_TOKENS = ["group_id", "prompt_ids", "response_ids"]


@stage(consumes=_TOKENS, produces=["ref_logprobs"], role="train", streams=True)
async def reference(inputs: Inputs, context: Context) -> Columns:
    """ROLLOUT x frozen starting model -> REFERENCE: log p_ref of every response token, after the rollout's temperature.

    Groups are computed as they come; what the committed rollout has beside them is computed at the end. The model is
    named in the facts by `reference-` and the content digest of its weights.
    """
    if inputs.arriving is None:
        return await _logprobs(inputs.dataset, context, "reference", "ref_logprobs")
    arrived = await _of_arriving(inputs.arriving, context)
    whole = await inputs.whole()
    assert whole.dataset is not None
    assert whole.table is not None
    if not arrived.at:
        async with inputs.arriving.pool():
            return await _logprobs(whole.dataset, context, "reference", "ref_logprobs")
    keys = _keys(whole.table)
    if left := [row for row, key in enumerate(keys) if key not in arrived.at]:
        rows = whole.table.select(_TOKENS).take(left)
        async with inputs.arriving.pool():
            arrived.add(rows, await context.trainer.logprobs(rows, "reference", lambda done, total: None))
    values = pa.concat_arrays(arrived.values).take(pa.array([arrived.at[key] for key in keys], pa.int64()))
    context.progress(len(keys), len(keys), "samples")
    return _columns(values, context, f"reference-{arrived.model[:12]}", "ref_logprobs")


@stage(consumes=_TOKENS, produces=["old_logprobs"], role="train", reads="current")
async def old_logprobs(inputs: Inputs, context: Context) -> Columns:
    """ROLLOUT x trainer's policy -> OLD: log p of every response token before the update, after temperature.

    The denominator of the ratio where `update.old_logprobs` is `recomputed` (decoupled PPO's proximal policy,
    arXiv:2110.00641). It is that of one policy for the whole batch, so it begins when no update can come between.
    """
    return await _logprobs(inputs.dataset, context, "policy", "old_logprobs")


async def _logprobs(
    dataset: DatasetRef | None, context: Context, model: Literal["policy", "reference"], name: str
) -> Columns:
    assert dataset is not None  # both stages consume columns, so the graph check gave them rows
    found = await context.trainer.logprobs(dataset, model, lambda done, total: context.progress(done, total, "samples"))
    label = context.policy.label if model == "policy" else f"reference-{found.model[:12]}"
    return _columns(found.table["logprobs"], context, label, name)


def _columns(values: pa.ChunkedArray | pa.Array, context: Context, label: str, name: str) -> Columns:
    facts = Facts(
        sampling={"model": label, "temperature": context.experiment.rollout.temperature},
        logprob_kind="after_temperature",
    )
    return Columns(pa.table([values], schema=pa.schema([column(name).field])), facts)


class _Arrived:
    """Log-probabilities by the tokens they are of: what a group had that was generated again is asked for by nobody."""

    def __init__(self) -> None:
        self.model = ""  # content digest
        self.values: list[pa.Array] = []
        self.at: dict[bytes, int] = {}  # key -> position in `values`
        self._rows = 0

    def add(self, rows: pa.Table, found: Logprobs) -> None:
        self.model = found.model
        self.values += found.table["logprobs"].chunks
        self.at |= {key: self._rows + row for row, key in enumerate(_keys(rows))}
        self._rows += len(rows)


async def _of_arriving(arriving: Arriving, context: Context) -> _Arrived:
    """All that came before the rollout ended and is still wanted; the trainer is taken for as many groups as wait."""
    experiment, arrived = context.experiment, _Arrived()
    size = experiment.sampling.started(experiment.prompts.per_iteration) * experiment.rollout.samples_per_prompt
    while groups := await arriving.batch():
        async with arriving.pool():
            wanted = [group for group in groups if not arriving.verdict(group.id)]  # one that is dropped needs none
            if wanted:
                rows = pa.concat_tables([group.read().select(_TOKENS) for group in wanted])
                arrived.add(rows, await context.trainer.logprobs(rows, "reference", lambda done, total: None))
        context.progress(len(arrived.at), max(len(arrived.at), size), "samples")
    return arrived


def _keys(rows: pa.Table) -> list[bytes]:
    """The digest of each row's tokens, prompt and response: all that its log-probabilities depend on."""
    pairs = zip(rows["prompt_ids"], rows["response_ids"], strict=True)
    return [hashlib.sha256(b"".join(_bytes(part) for part in pair)).digest() for pair in pairs]


def _bytes(ids: pa.ListScalar) -> bytes:
    values = ids.values.to_numpy()
    return len(values).to_bytes(8, "little") + values.tobytes()
