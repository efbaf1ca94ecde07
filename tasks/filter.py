"""Stage `filter`: dynamic sampling. The groups that teach something, as many as an iteration needs.

The rollout has sent prompts until enough groups have passed the same rule (tasks/reward.py judges each as it comes).
DAPO, arXiv 2503.14476, section 3.2.
"""

from collections import Counter

import pyarrow as pa

from conf.errors import StageError
from data.store import Facts
from tasks.advantage import incomplete_groups
from tasks.stage import Context, Inputs, Selection, stage


@stage(consumes=["group_id", "rewards", "reward_outcome"], output="selection")
async def filter(inputs: Inputs, context: Context) -> Selection:
    """SCORED -> SCORED of the first `prompts.per_iteration` groups that pass, in the order of the prompts.

    A group that does not pass is dropped with its reason, one that is not needed as `surplus`. Raises StageError where
    none passes, and with `sampling.on_exhausted: fail` where too few do.
    """
    assert inputs.table is not None
    needed, settings = context.experiment.prompts.per_iteration, context.experiment.sampling
    kept, dropped = select_groups(inputs.table, needed)
    failed = {group: reason for group, reason in dropped.items() if reason != "surplus"}
    if len(kept) < needed and (not kept or settings.on_exhausted == "fail"):
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(Counter(failed.values()).items()))
        advice = "" if settings.on_exhausted == "train_fewer" else "; sampling.on_exhausted: train_fewer trains those"
        raise StageError(
            f"{context.node} of iteration {context.iteration} needs {needed} groups (prompts.per_iteration), "
            f"{len(kept)} of {len(kept) + len(failed)} passed ({reasons or 'no group came'}), and all prompts that "
            f"sampling.max_rounds {settings.max_rounds} allows were sent{advice if kept else ''}"
        )
    groups = inputs.table["group_id"].to_pylist()
    indices = [row for row, group in enumerate(groups) if group in kept]
    passed = 1 - len(failed) / len(set(groups))
    return Selection(indices, facts=Facts(dropped=dropped, metrics={"sampling/pass_rate": passed}))


def select_groups(table: pa.Table, needed: int) -> tuple[set[str], dict[str, str]]:
    """The first `needed` groups that pass, in the order of the rows, and of each other one why it is dropped."""
    dropped = dropped_groups(table)
    passed = [group for group in dict.fromkeys(table["group_id"].to_pylist()) if group not in dropped]
    return set(passed[:needed]), dropped | dict.fromkeys(passed[needed:], "surplus")


def dropped_groups(table: pa.Table) -> dict[str, str]:
    """Groups that do not pass: incomplete ones, with the reason that stage advantage has, and `zero_variance`.

    Zero variance: all rewards of the group are equal, so every advantage would be 0. Needs group_id, rewards and
    reward_outcome; the order of the rows does not matter.
    """
    dropped = incomplete_groups(table)
    rewards: dict[str, set[float]] = {}
    for group, reward in zip(table["group_id"].to_pylist(), table["rewards"].to_pylist(), strict=True):
        rewards.setdefault(group, set()).add(reward)
    equal = [group for group, values in rewards.items() if len(values) == 1 and group not in dropped]
    return dropped | dict.fromkeys(equal, "zero_variance")
