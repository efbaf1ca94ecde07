"""Writing the policy as safetensors under Hugging Face's names, each rank its own shard (PUBLISH step P1)."""

import hashlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor
from transformers import PreTrainedModel

from data.crash import crash_point
from data.package import FileInfo, Receipt, TensorInfo, content_digest
from data.shards import DTYPES, WIDTHS

_KINDS = {torch_name: name for name, (torch_name, _) in DTYPES.items()}  # torch's name -> safetensors'


def named_tensors(lm: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The parameters to store, and those that share one of them: name -> the stored one's name."""
    stored: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    tied: dict[str, str] = {}
    for name, parameter in lm.named_parameters(remove_duplicate=False):
        if id(parameter) in names:
            tied[name] = names[id(parameter)]
        else:
            names[id(parameter)] = name
            stored[name] = parameter
    return stored, tied


def full_tensors(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor in full, one after another; under ZeRO-3 every rank must go through all of them."""
    for name, tensor in tensors.items():
        with deepspeed.zero.GatheredParameters([tensor]) if hasattr(tensor, "ds_id") else nullcontext():
            yield name, tensor.detach()


def write_shard(lm: PreTrainedModel, staging: Path, dtype: str, rank: int, ranks: int, point: str) -> Receipt:
    """Write and fsync this rank's share of the tensors, as `dtype`, into `staging`; gives the receipt for it.

    Tensors are hashed and their non-finite values counted as they will stand in the file. A rank whose share is empty
    writes no file. `point` begins the name of the crash point.
    """
    stored, _ = named_tensors(lm)
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in stored.items()}
    mine = shares({name: torch.Size(shape).numel() for name, shape in shapes.items()}, ranks)[rank]
    tensors = full_tensors(stored)
    try:
        if not mine:
            return Receipt(rank, ranks, (), ())
        path = staging / f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors"
        with Shard(path, dtype, {name: shape for name, shape in shapes.items() if name in mine}) as shard:
            for name, tensor in tensors:
                if name in mine:
                    shard.write(name, tensor)
                    crash_point(f"{point}.writing/{rank}")
        return Receipt(rank, ranks, (shard.info,), tuple(shard.tensors))
    finally:
        for _ in tensors:  # a rank that writes nothing, or cannot, still takes its part in the others' gathering
            pass


def weights_digest(lm: PreTrainedModel) -> str:
    """The content digest that a package of these weights, in their own dtype, would have."""
    return content_digest([_info(name, tensor, "") for name, tensor in full_tensors(named_tensors(lm)[0])])


def _info(name: str, tensor: Tensor, file: str) -> TensorInfo:
    digest = hashlib.sha256(_bytes(tensor)).hexdigest()
    return TensorInfo(
        name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), digest, file, _nonfinite(tensor)
    )


def shares(sizes: dict[str, int], ranks: int) -> list[set[str]]:
    """Names for each rank: largest first, each to the rank with least so far."""
    shares: list[set[str]] = [set() for _ in range(ranks)]
    loads = [0] * ranks
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rank = loads.index(min(loads))
        shares[rank].add(name)
        loads[rank] += sizes[name]
    return shares


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


class Shard:
    """A safetensors file written tensor by tensor, so that no second copy of the model is held.

    The format: 8 bytes with the header's length, a JSON header padded to 8 bytes, the tensors in the header's order.
    """

    def __init__(self, path: Path, dtype: str, shapes: dict[str, tuple[int, ...]]) -> None:
        self.path, self.dtype = path, dtype
        self.tensors: list[TensorInfo] = []
        self._digest = hashlib.sha256()
        kind, width = _KINDS[dtype], WIDTHS[dtype]
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + torch.Size(shape).numel() * width
            header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.size = len(self._head) + end

    def __enter__(self) -> "Shard":
        self._file = self.path.open("xb")
        self._threads = ThreadPoolExecutor(2)  # the two digests of a tensor: hashing releases the interpreter's lock
        self._digest.update(self._head)
        self._file.write(self._head)
        return self

    def write(self, name: str, tensor: Tensor) -> None:
        value = tensor.to(getattr(torch, self.dtype)).cpu().contiguous()
        data = _bytes(value)
        own = self._threads.submit(_info, name, value, self.path.name)
        whole = self._threads.submit(self._digest.update, data)
        self._file.write(data)
        self.tensors.append(own.result())
        whole.result()

    def __exit__(self, *error: object) -> None:
        self._threads.shutdown()
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    @property
    def info(self) -> FileInfo:
        return FileInfo(self.path.name, self.size, self._digest.hexdigest())


def _nonfinite(tensor: Tensor) -> int:
    """Elements that are NaN or infinite. A finite sum of magnitudes proves that there are none, at half the cost."""
    if torch.isfinite(tensor.abs().sum(dtype=torch.float32)):
        return 0
    return int((~torch.isfinite(tensor)).sum())
