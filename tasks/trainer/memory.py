"""The trainer's tensors off their device and back, bit by bit, while engines have the memory.

The bytes behind each tensor go to the host and its storage shrinks to nothing, as FSDP does with what it has gathered:
parameters, views of DeepSpeed's flat buffers and the optimizer's state stay the objects they are. DeepSpeed 0.19.8's
own `offload_states` knows no ZeRO 0, and under ZeRO 3 refuses torch's AdamW.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Offloaded:
    """What `offload` took from the device; `bytes` of it, which `reload` needs there again."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._kept: list[tuple[torch.UntypedStorage, Tensor]] = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():  # one that is taken already has no bytes
                self._kept.append((storage, _bytes_of(storage).to("cpu", copy=True)))
                storage.resize_(0)

    @property
    def bytes(self) -> int:
        return sum(len(kept) for _, kept in self._kept)

    def reload(self) -> None:
        while self._kept:  # the host's memory goes as the device's fills
            storage, kept = self._kept.pop()
            storage.resize_(len(kept))
            _bytes_of(storage).copy_(kept)


def offload(engine: Any, *others: nn.Module) -> Offloaded:
    """Take from the device whatever the DeepSpeed engine, and models beside it, hold there."""
    device = engine.device.type  # a rank has one of them
    return Offloaded(tensor for tensor in _within([engine, *others], set()) if tensor.device.type == device)


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _within(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that an object of torch or DeepSpeed keeps: as an attribute, in a list, as a gradient."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, str | bytes | int | float | type | None):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value.data
            waiting += [value.grad, *vars(value).values()]  # DeepSpeed hangs partitions on parameters
        elif isinstance(value, Mapping):
            waiting += [*value.keys(), *value.values()]  # optimizer state is keyed by what it steps
        elif isinstance(value, list | tuple | set | frozenset):
            waiting += value
        elif type(value).__module__.startswith(("deepspeed.", "torch.optim.")) or isinstance(value, nn.Module):
            waiting += vars(value).values()
