"""What the fake engine holds and says: a dict of tensors, and log-probabilities that are a pure function of it."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

EOS = 2


@dataclass(frozen=True)
class Tensor:
    dtype: str  # safetensors' name: F32, F16, BF16
    shape: tuple[int, ...]
    data: bytes

    @cached_property
    def checksum(self) -> str:
        """64 bits, like the real server's."""
        return hashlib.sha256(f"{self.dtype}{self.shape}".encode() + self.data).hexdigest()[:16]

    def values(self) -> np.ndarray:
        if self.dtype == "BF16":
            wide = np.frombuffer(self.data, np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        return np.frombuffer(self.data, {"F32": np.float32, "F16": np.float16}[self.dtype]).reshape(self.shape)


Weights = dict[str, Tensor]
BASE: Weights = {"w": Tensor("F32", (2,), np.array([0.5, -0.5], np.float32).tobytes())}


def read_weights(folder: Path) -> Weights:
    """Every tensor of the folder's safetensors files. FileNotFoundError: nothing there; ValueError: a file is cut."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no safetensors in {folder}")
    weights: Weights = {}
    for path in files:
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        for name, entry in json.loads(raw[8:start]).items():
            if name != "__metadata__":
                low, high = entry["data_offsets"]
                if start + high > len(raw):
                    raise ValueError(f"{path} is cut")
                weights[name] = Tensor(entry["dtype"], tuple(entry["shape"]), raw[start + low : start + high])
    return weights


def write_package(folder: Path, **tensors: list[float]) -> Path:
    """What an engine loads: one file of float32 vectors."""
    folder.mkdir(exist_ok=True)
    save_file({name: np.array(values, np.float32) for name, values in tensors.items()}, folder / "m.safetensors")
    return folder


def content_of(*ranks: Weights) -> str:
    """What the toy model computes with; the order of the tensors does not matter."""
    text = json.dumps([{name: tensor.checksum for name, tensor in rank.items()} for rank in ranks], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def toy_logprob(content: str, prefix: Sequence[int], token: int) -> float:
    """log p(token | prefix) of the toy model: any number in [-3, -1), but always the same one."""
    digest = hashlib.sha256(f"{content}|{list(prefix)}|{token}".encode()).digest()
    return -1 - 2 * int.from_bytes(digest[:4], "little") / 2**32
