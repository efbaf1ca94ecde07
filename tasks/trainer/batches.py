"""From a dataset to micro-batches: which samples are computed together, in which rows, and how a row looks as tensors.

Samples of a group share their prompt. A *shared* row holds the prompt once and the responses behind it; the attention
mask lets each response see the prompt and itself, and its positions go on where the prompt ends. So a row of k
responses computes what k ordinary rows would, with P + k R tokens instead of k (P + R).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from conf.errors import DataError


@dataclass(frozen=True)
class Samples:
    """A dataset's tokens. Response tokens of all samples lie in flat arrays; `starts[i]:starts[i + 1]` is sample i."""

    groups: list[str]  # N
    prompts: list[np.ndarray]  # N, each P token ids
    starts: np.ndarray  # N + 1
    response_ids: np.ndarray  # T, token ids
    columns: dict[str, np.ndarray]  # T each: the other per-token columns

    @classmethod
    def from_table(cls, table: pa.Table, columns: Sequence[str] = ()) -> "Samples":
        """Read group_id, prompt_ids, response_ids and the named per-token columns.

        Raises DataError for a sample without prompt or response, or whose columns have different lengths.
        """
        prompt_starts, prompt_ids = _flat(table, "prompt_ids")
        starts, response_ids = _flat(table, "response_ids")
        for name, lengths in (("prompt_ids", np.diff(prompt_starts)), ("response_ids", np.diff(starts))):
            if len(lengths) and lengths.min() == 0:
                raise DataError(f"sample {int(lengths.argmin())}: {name} must hold at least one token, got none")
        values: dict[str, np.ndarray] = {}
        for name in columns:
            own_starts, values[name] = _flat(table, name)
            wrong = np.flatnonzero(np.diff(own_starts) != np.diff(starts))
            if len(wrong):
                i = int(wrong[0])
                raise DataError(
                    f"sample {i}: {name} must have one value for each response token, expected "
                    f"{starts[i + 1] - starts[i]}, got {own_starts[i + 1] - own_starts[i]}"
                )
        prompts = [prompt_ids[a:b] for a, b in pairwise(prompt_starts)]
        return cls(table["group_id"].to_pylist(), prompts, starts, response_ids, values)

    def __len__(self) -> int:
        return len(self.groups)

    def length(self, sample: int) -> int:
        """Response tokens of a sample."""
        return int(self.starts[sample + 1] - self.starts[sample])

    def members(self) -> dict[str, list[int]]:
        """group -> its samples, both in the dataset's order."""
        found: dict[str, list[int]] = {}
        for i, group in enumerate(self.groups):
            found.setdefault(group, []).append(i)
        return found

    def any_by_sample(self, tokens: np.ndarray) -> np.ndarray:
        """For each sample, whether any of its tokens is true. tokens: bool, T."""
        return np.logical_or.reduceat(tokens, self.starts[:-1])


def _flat(table: pa.Table, name: str) -> tuple[np.ndarray, np.ndarray]:
    column = table[name].combine_chunks()
    starts = np.concatenate([[0], np.cumsum(column.value_lengths().to_numpy(zero_copy_only=False))]).astype(np.int64)
    return starts, column.flatten().to_numpy(zero_copy_only=False)


@dataclass(frozen=True)
class Row:
    samples: tuple[int, ...]  # one: an ordinary row; several: a shared row of one group
    length: int  # tokens


def make_rows(samples: Samples, chosen: Sequence[int], share_tokens: int) -> list[Row]:
    """One shared row for each group whose prompt and chosen responses fit `share_tokens`; ordinary rows for the others.

    Raises DataError where samples of one group have different prompts.
    """
    wanted = set(chosen)
    rows = []
    for group, members in samples.members().items():
        members = [i for i in members if i in wanted]
        if not members:
            continue
        prompt = samples.prompts[members[0]]
        if any(not np.array_equal(prompt, samples.prompts[i]) for i in members[1:]):
            raise DataError(f"group {group}: its samples must have one prompt, got different prompt_ids")
        length = len(prompt) + sum(samples.length(i) for i in members)
        if length <= share_tokens:
            rows.append(Row(tuple(members), length))
        else:
            rows += [Row((i,), len(prompt) + samples.length(i)) for i in members]
    return rows


def split_rows(rows: Sequence[Row], ranks: int) -> list[list[Row]]:
    """Rows for each rank, longest first, each to the rank with the fewest tokens so far. Deterministic."""
    shares: list[list[Row]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(rows, key=lambda row: -row.length):
        rank = loads.index(min(loads))
        shares[rank].append(row)
        loads[rank] += row.length
    return shares


def pack_rows(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Micro-batches of at most `max_tokens` with padding, rows of like length together; a longer row is alone in one.

    Shared and ordinary rows are kept apart: ordinary ones need no attention mask.
    """
    batches: list[list[Row]] = []
    for kind in (True, False):
        batch: list[Row] = []
        for row in sorted((r for r in rows if (len(r.samples) > 1) == kind), key=lambda row: -row.length):
            if batch and (len(batch) + 1) * batch[0].length > max_tokens:
                batches.append(batch)
                batch = []
            batch.append(row)
        batches += [batch] if batch else []
    return batches


def micro_batches(rows: Sequence[Row], max_tokens: int, rank: int, ranks: int) -> list[list[Row]]:
    """The micro-batches of one rank. Every rank gets equally many, as each is a collective; missing ones are empty."""
    packed = [pack_rows(share, max_tokens) for share in split_rows(rows, ranks)]
    return packed[rank] + [[]] * (max(len(batches) for batches in packed) - len(packed[rank]))


def mini_batches(samples: Samples, count: int, *, seed: int, number: int, epoch: int) -> list[list[int]]:
    """Samples of each optimizer step of one pass: whole groups, in an order fixed by seed, update number and pass.

    Fewer than `count` where there are fewer groups.
    """
    members = list(samples.members().values())
    order = np.random.default_rng([seed, number, epoch]).permutation(len(members))
    parts = np.array_split(order, min(count, len(members)))
    return [[i for group in sorted(part) for i in members[group]] for part in parts]


@dataclass(frozen=True)
class Batch:
    """One micro-batch. n: the response tokens in it, the positions whose log-probabilities are wanted."""

    input_ids: Tensor  # B, T int64
    position_ids: Tensor  # B, T int64
    mask: Tensor | None  # B, 1, T, T bool, true where a query (dim 2) sees a key (dim 3); None: plain causal
    select: Tensor  # n int64, position in B * T whose output predicts the token
    targets: Tensor  # n int64, the token
    tokens: Tensor  # n int64, the token's place in the flat arrays of Samples

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """What the model's forward takes."""
        return self.input_ids, self.position_ids, self.mask, self.select, self.targets

    def to(self, device: torch.device) -> "Batch":
        mask = None if self.mask is None else self.mask.to(device)
        moved = (t.to(device) for t in (self.select, self.targets, self.tokens))
        return Batch(self.input_ids.to(device), self.position_ids.to(device), mask, *moved)


def collate(samples: Samples, rows: Sequence[Row], wanted: np.ndarray) -> Batch:
    """Rows as padded tensors. No row at all becomes one of two tokens with nothing selected: it weighs nothing.

    wanted: bool, T: the response tokens whose log-probabilities are computed.
    """
    width = max((row.length for row in rows), default=2)
    input_ids = np.zeros((max(len(rows), 1), width), np.int64)
    position_ids = np.zeros_like(input_ids)
    part = np.full_like(input_ids, -1)  # 0 prompt, 1.. the responses of a shared row, -1 padding
    select, tokens = [], []
    for b, row in enumerate(rows):
        prompt = samples.prompts[row.samples[0]]
        end = len(prompt)
        input_ids[b, :end], position_ids[b, :end], part[b, :end] = prompt, np.arange(end), 0
        for k, i in enumerate(row.samples, start=1):
            begin, end = end, end + samples.length(i)
            flat = np.arange(samples.starts[i], samples.starts[i + 1])
            input_ids[b, begin:end] = samples.response_ids[flat]
            position_ids[b, begin:end] = len(prompt) + np.arange(end - begin)
            part[b, begin:end] = k
            # A response's first token is predicted by the prompt's last position, the others by the token before.
            predicting = np.concatenate([[len(prompt) - 1], np.arange(begin, end - 1)])
            select.append(b * width + predicting[wanted[flat]])
            tokens.append(flat[wanted[flat]])
    chosen = np.concatenate(tokens) if tokens else np.zeros(0, np.int64)
    return Batch(
        torch.from_numpy(input_ids),
        torch.from_numpy(position_ids),
        _tree_mask(torch.from_numpy(part)) if any(len(row.samples) > 1 for row in rows) else None,
        torch.from_numpy(np.concatenate(select) if select else np.zeros(0, np.int64)),
        torch.from_numpy(samples.response_ids[chosen].astype(np.int64)),
        torch.from_numpy(chosen),
    )


def _tree_mask(part: Tensor) -> Tensor:
    """Causal, and between parts only towards the prompt. Padding sees padding, so that no row of the mask is empty."""
    query, key = part[:, None, :, None], part[:, None, None, :]
    width = part.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool).tril()
    return causal & ((key == 0) | (key == query))
