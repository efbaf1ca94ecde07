"""What the trainer continues from: weights and Adam's moments by parameter name, whatever ranks and ZeRO stage hold.

Each rank writes what it alone holds: flat pieces of parameters, float32, as safetensors tensors called
`weight/NAME/START`, `exp_avg/NAME/START` and `exp_avg_sq/NAME/START`, START being the piece's place in the flattened
parameter. Reading puts together whatever a rank holds, so both sides may have any number of ranks and any ZeRO stage.
No random state is kept, because training uses none: dropout is off and the order of samples follows from seed and
update number.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import distributed as dist

from conf.errors import CheckpointError, DataError, TrainerError
from data.checkpoints import check_files, read_checkpoint, seal_checkpoint
from data.crash import crash_point
from data.objects import sync_folder
from data.package import FileInfo
from data.shards import Entry, read_header
from tasks.trainer.export import Shard, named_tensors, shares
from tasks.trainer.ranks import Ranks

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names


def save(engine: Any, folder: Path, state: dict[str, Any], ranks: Ranks, point: str) -> None:
    """Write a checkpoint; `state` is JSON kept with it, `state["step"]` the optimizer's steps. Every rank calls it.

    A complete one is left as it is. Raises TrainerError for values that are not finite: nothing good continues from
    them. `point` begins the names of the crash points.
    """
    crash_point(f"{point}.before/{ranks.rank}")
    partial = folder.with_name(f".{folder.name}.partial")
    if ranks.lead(lambda: _is_there(folder, partial)):
        return
    written = ranks.gather(ranks.together(lambda: _write(engine, partial, ranks, point)))
    files = [file for file in written if file]
    ranks.lead(lambda: seal_checkpoint(partial, files, state))
    crash_point(f"{point}.staged/{ranks.rank}")
    ranks.lead(lambda: _name(partial, folder))
    crash_point(f"{point}.after/{ranks.rank}")


def load(engine: Any, folder: Path, ranks: Ranks) -> dict[str, Any]:
    """Restore weights and optimizer from a complete checkpoint; gives its `state`. Every rank calls it.

    Raises, with nothing changed, CheckpointError for one that is incomplete or damaged, TrainerError for one of another
    model.
    """
    checkpoint = ranks.together(lambda: read_checkpoint(folder))
    ranks.together(lambda: check_files(folder, checkpoint.files[ranks.rank :: ranks.size]))
    stored = ranks.together(lambda: _Stored(folder, checkpoint.files, _sizes(engine)))
    for piece in _pieces(engine):
        for kind, part in piece.parts().items():
            part.copy_(stored.read(kind, piece.name, piece.start, len(part)))
        piece.state["step"].fill_(checkpoint.state["step"])
    _to_the_model(engine, stored)
    return checkpoint.state


def _is_there(folder: Path, partial: Path) -> bool:
    """Whether the checkpoint is there already; if not, `partial` is an empty folder for it."""
    if folder.exists():
        return True
    shutil.rmtree(partial, ignore_errors=True)  # of a trainer that died
    partial.mkdir(parents=True)
    return False


def _name(partial: Path, folder: Path) -> None:
    partial.rename(folder)
    sync_folder(folder.parent)


@dataclass(frozen=True)
class _Piece:
    """What this rank's optimizer holds of a parameter: numel elements of `flat` from `offset` on."""

    name: str
    start: int  # in the flattened parameter
    numel: int
    flat: Tensor  # what the optimizer steps: the parameter itself, or under ZeRO a partition of many
    offset: int
    optimizer: torch.optim.AdamW

    @property
    def state(self) -> dict[str, Tensor]:
        """AdamW's of `flat`. It makes it at the first step; before that it is all zero, and made so here."""
        state = self.optimizer.state[self.flat]
        if not state:
            # The fused AdamW expects its step count beside the parameter, as a float.
            state["step"] = torch.zeros((), dtype=torch.float32, device=self.flat.device)
            for moment in _MOMENTS:
                state[moment] = torch.zeros_like(self.flat)
        return state

    def parts(self) -> dict[str, Tensor]:
        """Flat views of the weights and of each moment."""
        held = {"weight": self.flat.detach(), **{moment: self.state[moment] for moment in _MOMENTS}}
        return {kind: whole.view(-1).narrow(0, self.offset, self.numel) for kind, whole in held.items()}


def _pieces(engine: Any) -> Iterator[_Piece]:
    """Everything this rank's optimizer holds, in the parameters' order."""
    stage, outer = engine.zero_optimization_stage(), engine.optimizer
    for name, p in _parameters(engine).items():
        if stage == 0:
            yield _Piece(name, 0, p.numel(), p, 0, outer)
        elif stage < 3:
            if (held := p._hp_mapping) is not None:
                flat = outer.single_partition_of_fp32_groups[held.param_group_index]
                inner, place = held.lp_fragment_address, held.hp_fragment_address
                yield _Piece(name, inner.start, inner.numel, flat, place.start, outer.optimizer)
        else:
            group, offset, partition = outer.grad_position[outer.get_param_id(p)]
            start = dist.get_rank() * partition  # the last rank's is padded
            if (numel := min(partition, p.ds_numel - start)) > 0:
                yield _Piece(name, start, numel, outer.fp32_partitioned_groups_flat[group], offset, outer.optimizer)


def _to_the_model(engine: Any, stored: "_Stored") -> None:
    """The weights the model computes with, where the optimizer holds others: ZeRO keeps a copy in partitions."""
    stage = engine.zero_optimization_stage()
    if stage == 3:
        engine.optimizer.checkpoint_event_prologue()  # small parameters, kept whole on each rank, are let go
    with torch.no_grad():
        for name, p in _parameters(engine).items():
            if stage == 3:
                start = dist.get_rank() * p.ds_tensor.numel()
                if (numel := min(p.ds_tensor.numel(), p.ds_numel - start)) > 0:
                    p.ds_tensor.narrow(0, 0, numel).copy_(stored.read("weight", name, start, numel))
            elif stage:
                p.view(-1).copy_(stored.read("weight", name, 0, p.numel()))
    if stage == 3:
        engine.optimizer.checkpoint_event_epilogue()  # and gathered again


def _parameters(engine: Any) -> dict[str, Any]:
    return named_tensors(engine.module.lm)[0]


def _sizes(engine: Any) -> dict[str, int]:
    """Elements of each parameter."""
    return {name: math.prod(getattr(p, "ds_shape", p.shape)) for name, p in _parameters(engine).items()}


def _write(engine: Any, partial: Path, ranks: Ranks, point: str) -> FileInfo | None:
    """This rank's file, fsynced; None where other ranks write all that it holds."""
    own = set(_sizes(engine))
    if engine.zero_optimization_stage() == 0:  # every rank holds everything
        own = shares(_sizes(engine), ranks.size)[ranks.rank]
    parts = {
        f"{kind}/{piece.name}/{piece.start}": part
        for piece in _pieces(engine)
        if piece.name in own
        for kind, part in piece.parts().items()
    }
    if not parts:
        return None
    path = partial / f"state-{ranks.rank + 1:05d}-of-{ranks.size:05d}.safetensors"
    with Shard(path, "float32", {key: tuple(part.shape) for key, part in parts.items()}) as shard:
        for key, part in parts.items():
            shard.write(key, part)
            crash_point(f"{point}.writing/{ranks.rank}")
    if broken := [tensor for tensor in shard.tensors if tensor.nonfinite]:
        raise TrainerError(
            f"{partial}: {broken[0].name} must be finite, found {broken[0].nonfinite} values that are not; "
            "no checkpoint was written"
        )
    return shard.info


class _Stored:
    """The tensors of a checkpoint's files, by kind and parameter."""

    def __init__(self, folder: Path, files: tuple[FileInfo, ...], sizes: Mapping[str, int]) -> None:
        self._parts: dict[tuple[str, str], list[tuple[int, Path, Entry]]] = {}
        try:
            for file in files:
                for key, entry in read_header(folder / file.path).items():
                    kind, rest = key.split("/", 1)
                    name, start = rest.rsplit("/", 1)
                    self._parts.setdefault((kind, name), []).append((int(start), folder / file.path, entry))
        except (DataError, ValueError) as error:
            raise CheckpointError(f"checkpoint {folder}: {error}") from error
        expected = {(kind, name): size for name, size in sizes.items() for kind in ("weight", *_MOMENTS)}
        if unlike := sorted(expected.keys() ^ self._parts.keys()):
            # Not a fault of the checkpoint, which must not be put aside for it.
            raise TrainerError(
                f"checkpoint {folder} is of another model than model.path: {'/'.join(unlike[0])} is in one of them"
            )
        for (kind, name), size in expected.items():
            end = 0
            for begin, _, entry in sorted(self._parts[kind, name], key=lambda part: part[0]):
                if begin != end or entry.dtype != "float32":
                    raise CheckpointError(f"checkpoint {folder}: {kind}/{name} must be float32 and go on at {end}")
                end += math.prod(entry.shape)
            if end != size:
                raise CheckpointError(f"checkpoint {folder}: {kind}/{name} must have {size} elements, found {end}")

    def read(self, kind: str, name: str, start: int, numel: int) -> Tensor:
        """Elements of a flattened parameter, or of one of its moments."""
        found = np.empty(numel, "<f4")
        for first, path, entry in self._parts[kind, name]:
            low, high = max(start, first), min(start + numel, first + math.prod(entry.shape))
            if low < high:
                place = entry.start + 4 * (low - first)
                found[low - start : high - start] = np.memmap(path, "<f4", "r", place, (high - low,))
        return torch.from_numpy(found)
