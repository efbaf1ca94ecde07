"""Stage `advantage`: what each sample did better than the others of its group, spread over its tokens."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from conf.errors import StageError
from conf.schema import Advantage
from data.columns import column
from data.store import Facts
from tasks.stage import Context, Inputs, Selection, stage


@stage(
    consumes=["group_id", "sample_id", "rewards", "reward_outcome", "response_mask"],
    produces=["advantages"],
    output="selection",
)
async def advantage(inputs: Inputs, context: Context) -> Selection:
    """SCORED -> ADVANTAGES of the complete groups.

    A group with a member that is not ok, or with only one member, is dropped with its reason.

    Raises StageError when no group is left, or an advantage does not fit float32.
    """
    assert inputs.table is not None
    table = inputs.table
    dropped = incomplete_groups(table)
    groups = table["group_id"].to_pylist()
    indices = [row for row, group in enumerate(groups) if group not in dropped]
    if not indices:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(Counter(dropped.values()).items()))
        raise StageError(f"no group is left to train on, of {len(dropped)}: {reasons or 'the input has no rows'}")
    kept = table.take(indices)
    rewards = kept["rewards"].to_numpy()
    kept_groups = kept["group_id"].to_pylist()
    values = group_advantages(rewards, kept_groups, context.experiment.advantage)
    _refuse_overflow(values, kept["sample_id"].to_pylist())
    metrics = {"groups/zero_variance": float(zero_variance_groups(rewards, kept_groups))}
    columns = pa.table([spread(values, kept["response_mask"])], schema=pa.schema([column("advantages").field]))
    return Selection(indices, columns, Facts(dropped=dropped, metrics=metrics))


def incomplete_groups(table: pa.Table) -> dict[str, str]:
    """Groups that cannot be compared, with the reason: `reward_timeout|error|nonfinite`, or `group_of_one`."""
    groups = table["group_id"].to_pylist()
    size = Counter(groups)
    found: dict[str, set[str]] = {group: {"group_of_one"} for group, members in size.items() if members == 1}
    for group, outcome in zip(groups, table["reward_outcome"].to_pylist(), strict=True):
        if outcome != "ok":
            found.setdefault(group, set()).add(f"reward_{outcome}")
    return {group: max(reasons) for group, reasons in sorted(found.items())}  # any one, but the same in any row order


def group_advantages(rewards: np.ndarray, groups: Sequence[str], settings: Advantage) -> np.ndarray:
    """The advantage of each sample, float64 [N], by the estimator of the settings."""
    if settings.estimator == "rloo":
        return group_advantages_rloo(rewards, groups)
    return group_advantages_grpo(rewards, groups, normalize_std=settings.normalize_std, epsilon=settings.epsilon)


def group_advantages_grpo(
    rewards: np.ndarray, groups: Sequence[str], *, normalize_std: bool, epsilon: float
) -> np.ndarray:
    """A_i = (r_i - mean(r)) / (std(r) + epsilon) over the sample's group, std with n - 1 as in TRL and verl.

    DeepSeekMath, arXiv 2402.03300. Without `normalize_std` the divisor is 1: Dr. GRPO, arXiv 2503.20783.
    Exactly 0 where all rewards of a group are equal or there is only one. Bitwise the same in any row order.
    """
    advantages = np.zeros(len(rewards))
    for rows in _rows_by_group(rewards, groups):
        centred, scale = _centred(rewards[rows])
        if normalize_std:
            std = math.sqrt(math.fsum(centred**2) / (len(rows) - 1))
            advantages[rows] = centred / (std + epsilon / scale)
        else:
            with np.errstate(over="ignore"):  # as in rloo
                advantages[rows] = centred * scale
    return advantages


def group_advantages_rloo(rewards: np.ndarray, groups: Sequence[str]) -> np.ndarray:
    """A_i = r_i - mean of the other members' rewards = n / (n - 1) * (r_i - mean(r)).

    REINFORCE leave-one-out, arXiv 2402.14740. Exactly 0 where all rewards of a group are equal or there is only one.
    Bitwise the same in any row order.
    """
    advantages = np.zeros(len(rewards))
    for rows in _rows_by_group(rewards, groups):
        centred, scale = _centred(rewards[rows])
        with np.errstate(over="ignore"):  # the stage refuses infinity with the sample's name
            advantages[rows] = centred * scale * (len(rows) / (len(rows) - 1))
    return advantages


def zero_variance_groups(rewards: np.ndarray, groups: Sequence[str]) -> int:
    """Groups whose rewards are all equal: they teach nothing."""
    return len(set(groups)) - len(_rows_by_group(rewards, groups))


def spread(values: np.ndarray, response_mask: pa.ChunkedArray) -> pa.Array:
    """A sample's advantage at each of its tokens, 0 where the mask is false. list<float32> [N,R]."""
    mask = response_mask.combine_chunks()
    lengths = pc.list_value_length(mask).to_numpy()
    tokens = np.repeat(values.astype(np.float32), lengths) * mask.flatten().to_numpy(zero_copy_only=False)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens.astype(np.float32)), column("advantages").type)


def _centred(r: np.ndarray) -> tuple[np.ndarray, float]:
    """(r - mean(r)) / scale, and the scale: 1 unless squares would overflow, then a power of two, which is exact."""
    scale = 2.0 ** max(math.frexp(float(np.abs(r).max()))[1] - 500, 0)
    return r / scale - math.fsum(r / scale) / len(r), scale  # fsum rounds once, whatever the order


def _rows_by_group(rewards: np.ndarray, groups: Sequence[str]) -> list[np.ndarray]:
    """Positions of each group's rows, for the groups whose rewards differ; the others' advantage is 0."""
    _, codes = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    order = np.argsort(codes, kind="stable")
    parts = np.split(order, np.flatnonzero(np.diff(codes[order])) + 1)
    return [rows for rows in parts if len(rows) and rewards[rows].min() != rewards[rows].max()]


def _refuse_overflow(values: np.ndarray, samples: Sequence[str]) -> None:
    for row in np.flatnonzero(~(np.abs(values) <= np.finfo(np.float32).max)):
        raise StageError(
            f"the advantage of sample {samples[row]} must fit float32, got {values[row]:g}: scale the rewards down"
        )
