"""Stage `prompts`: source x cursor -> PROMPTS, one row a prompt, each of them a group."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from conf.errors import DataError, StageError
from conf.schema import Experiment
from data.columns import column
from data.issued import FIRST_ROUND, PROMPTS
from data.manifest import JSON, Facts, Manifest
from data.prompts import Cursor, Prompt, encode_prompts, load_tokenizer, tokenizer_digest
from tasks.stage import Context, Inputs, Rows, stage

COLUMNS = ("group_id", "prompt_index", "prompt_text", "prompt_ids", "answer", "prompt_data")


@stage(produces=COLUMNS, output="rows")
async def prompts(inputs: Inputs, context: Context) -> Rows:
    """Draw the iteration's prompts where the previous iteration stopped: as many as its rollout may send.

    Refuses a prompt longer than prompts.max_tokens, a previous iteration without prompts, and a source that changed.
    """
    before = cursor_before(context)
    return await asyncio.to_thread(_draw, context, before)  # the first call loads the tokenizer: seconds


def _draw(context: Context, before: Cursor) -> Rows:
    sampling, needed = context.experiment.sampling, context.experiment.prompts.per_iteration
    first = sampling.started(needed)
    drawn, _ = context.prompts.take(before, sampling.candidates(needed))
    facts = Facts(
        tokenizer_digest=tokenizer_digest(Path(context.experiment.model.path)),
        cursor=_after(context, before, first),
        sampling={FIRST_ROUND: first} if sampling.refills else {},
    )
    return Rows(prompt_table(drawn, f"i{context.iteration:06d}", context.experiment), facts)


def prompt_table(drawn: Sequence[Prompt], prefix: str, experiment: Experiment) -> pa.Table:
    """The prompts as rows, group ids `<prefix>-g000` and so on. Refuses a prompt longer than prompts.max_tokens."""
    settings = experiment.prompts
    values = {
        "group_id": [f"{prefix}-g{group:03d}" for group in range(len(drawn))],
        "prompt_index": [p.index for p in drawn],
        "prompt_text": [p.text for p in drawn],
        "prompt_ids": encode_prompts(
            load_tokenizer(experiment.model.path), drawn, settings.system, settings.max_tokens
        ),
        "answer": [p.answer for p in drawn],
        "prompt_data": [p.data for p in drawn],
    }
    return pa.table(values, pa.schema([column(name).field for name in COLUMNS]))


def cursor_after(context: Context, sent: int) -> dict[str, JSON]:
    """Where the next iteration goes on once this one has sent so many prompts."""
    return _after(context, cursor_before(context), sent)


def _after(context: Context, before: Cursor, sent: int) -> dict[str, JSON]:
    return {**context.prompts.after(before, sent).to_json(), "source": context.prompts.digest}


def cursor_before(context: Context) -> Cursor:
    """Where the previous iteration stopped: its committed data says so, so a retry draws the same again."""
    if context.iteration == 1:
        return context.prompts.start()
    cursor = _last_sent(context).facts.cursor
    if cursor["source"] != context.prompts.digest:
        raise DataError(
            f"prompt source {context.prompts.name} changed during the run: iteration {context.iteration - 1} drew from "
            f"{cursor['source']}, now it is {context.prompts.digest}; a changed source needs a new run"
        )
    return Cursor.from_json(cursor)


def _last_sent(context: Context) -> Manifest:
    """What knows the last prompt that the previous iteration has sent: its rollout, where that may refill."""
    number = context.iteration - 1
    prompts = context.store.committed(number, PROMPTS)
    if prompts is None:
        raise StageError(f"iteration {context.iteration} follows iteration {number}, which has no prompts")
    if FIRST_ROUND not in prompts.facts.sampling:
        return prompts
    (node,) = [name for name, node in context.experiment.graph.items() if node.stage == "rollout"]  # conf.check
    if rollout := context.store.committed(number, node):
        return rollout
    if any(row.rollback_of is not None and row.iteration == number for row in context.ledger.versions()):
        return prompts  # it ended at the roll-back: what it sent beyond its first round was never issued
    raise StageError(
        f"the prompts of iteration {context.iteration} follow those that iteration {number} has sent, which only its "
        f"{node} knows (sampling.filter), and that is not committed"
    )
