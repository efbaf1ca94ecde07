"""The rows of a rollout: the columns of its samples, made of what engines answered, and metrics over them."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import pyarrow as pa
import pyarrow.compute as pc

from data.columns import column
from data.prompts import load_tokenizer
from data.versions import number_of
from tasks.generation.groups import PromptGroup
from tasks.prompts import COLUMNS as PROMPT_COLUMNS

SAMPLE_COLUMNS = (
    "sample_id",
    "response_ids",
    "response_mask",
    "behavior_logprobs",
    "version_spans",
    "policy_version",
    "finish_reason",
    "response_text",
    "engine",
    "cached_tokens",
)


def sample_table(prompts: pa.Table, groups: Sequence[PromptGroup], boots: Mapping[str, str], model: str) -> pa.Table:
    """One row a sample, in the order of prompts and members; the prompt columns are repeated for each member.

    boots: of the engines, by name. model: the folder with the tokenizer.
    """
    members = [(group, member) for group in groups for member in sorted(group.samples)]
    generations = [group.samples[member] for group, member in members]
    ids = [g.ids for g in generations]
    values: dict[str, list] = {
        "sample_id": [group.sample_id(member) for group, member in members],
        "response_ids": ids,
        "response_mask": [[True] * len(own) for own in ids],
        "behavior_logprobs": [g.logprobs for g in generations],
        "version_spans": [[asdict(span) for span in g.spans] for g in generations],
        "policy_version": [number_of(g.spans[0].label) for g in generations],
        "finish_reason": [g.finish_reason for g in generations],
        "response_text": load_tokenizer(model).batch_decode([list(own) for own in ids], skip_special_tokens=True),
        "engine": [f"{group.engine.name}/{boots[group.engine.name]}" for group, _ in members if group.engine],
        "cached_tokens": [g.cached_tokens for g in generations],
    }
    carried = prompts.select(PROMPT_COLUMNS).take(pa.array([group.row for group, _ in members], pa.int64()))
    columns = [pa.array(values[name], column(name).type) for name in SAMPLE_COLUMNS]
    return pa.table([*carried.columns, *columns], names=[*PROMPT_COLUMNS, *SAMPLE_COLUMNS])


def sample_metrics(table: pa.Table, newest: int) -> dict[str, float]:
    """Metrics of a rollout's rows; `newest` is the newest committed version at the end of their batch."""
    lengths = pc.list_value_length(table["response_ids"])
    prompt_tokens = pc.sum(pc.list_value_length(table["prompt_ids"])).as_py()
    truncated = pc.sum(pc.equal(table["finish_reason"], "length")).as_py()
    lags = pc.subtract(newest, table["policy_version"])
    return {
        "response_length/mean": pc.mean(lengths).as_py(),
        "response_length/max": float(pc.max(lengths).as_py()),
        "rollout/truncated_rate": truncated / table.num_rows,
        "rollout/cached_prompt_share": pc.sum(table["cached_tokens"]).as_py() / prompt_tokens,
        "rollout/lag_mean": pc.mean(lags).as_py(),
        "rollout/lag_max": float(pc.max(lags).as_py()),
    }
