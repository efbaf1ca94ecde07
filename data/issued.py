"""Which prompt groups an iteration has issued, as its committed datasets say: the ledger must have the same."""

from data.manifest import Manifest
from data.store import Store

PROMPTS = "prompts"  # the node that draws them: the implicit first one of every graph
FIRST_ROUND = "first_round"  # fact of prompts of which only so many are sent whatever comes


def issued_groups(store: Store, prompts: Manifest, rollout: Manifest | None) -> list[tuple[str, int]]:
    """(group_id, prompt_index) of each, in the order of the prompts.

    All prompts; where they are more than the iteration needs (sampling.filter), the first round and, once the rollout
    is committed, whatever it has sent beyond: each of those it has as rows or names as dropped.
    """
    rows = store.read(prompts.dataset, ["group_id", "prompt_index"]).to_pydict()
    candidates = list(zip(rows["group_id"], rows["prompt_index"], strict=True))
    if FIRST_ROUND not in prompts.facts.sampling:
        return candidates
    sent = set(rows["group_id"][: prompts.facts.sampling[FIRST_ROUND]])
    if rollout is not None:
        sent |= {*store.read(rollout.dataset, ["group_id"])["group_id"].to_pylist(), *rollout.facts.dropped}
    return [(group, index) for group, index in candidates if group in sent]
