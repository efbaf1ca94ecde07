"""A stage of a user's own, as the README describes it: `stage: tests.own_stage:drop_short`."""

import pyarrow.compute as pc

from conf.errors import StageError
from data.store import Facts
from tasks.stage import Context, Inputs, Selection, stage


@stage(consumes=["group_id", "response_ids"], output="selection")
async def drop_short(inputs: Inputs, context: Context, *, min_tokens: int = 2) -> Selection:
    """ROLLOUT -> ROLLOUT without the groups in which a response has fewer than `min_tokens` tokens.

    Whole groups go, so that each sample is still compared with all the samples of its prompt.
    """
    assert inputs.table is not None
    groups = inputs.table["group_id"].to_pylist()
    lengths = pc.list_value_length(inputs.table["response_ids"]).to_pylist()
    short = {group for group, length in zip(groups, lengths, strict=True) if length < min_tokens}
    kept = [row for row, group in enumerate(groups) if group not in short]
    if not kept:
        raise StageError(f"every group has a response of fewer than min_tokens = {min_tokens} tokens")
    return Selection(kept, facts=Facts(dropped=dict.fromkeys(sorted(short), "short")))
