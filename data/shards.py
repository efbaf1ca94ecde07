"""safetensors files without torch: where each tensor lies, and nothing in the file that no tensor accounts for."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import DataError

# safetensors' name -> torch's name, bytes of an element
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
WIDTHS = dict(DTYPES.values())  # torch's name -> bytes of an element
MAX_HEADER = 100_000_000  # bytes; the limit of the safetensors library


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: str  # torch's name
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    end: int


def unique_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads(object_pairs_hook=): an object that names a key twice has no one meaning. Raises ValueError."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def read_header(path: Path) -> dict[str, Entry]:
    """Every tensor of the file. Raises DataError unless the tensors fill the file exactly, each name once."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER):
            raise DataError(f"{path.name}: expected a safetensors header of {length} bytes, the file has {size}")
        text = file.read(length)
    try:
        header = json.loads(text, object_pairs_hook=unique_keys)
        header.pop("__metadata__", None)
        entries = {name: _entry(value, 8 + length) for name, value in header.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path.name}: not a safetensors header: {error!r}") from error
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != end:
            raise DataError(f"{path.name}: tensor {name} must begin at byte {end}, begins at {entry.start}")
        end = entry.end
    if end != size:
        raise DataError(f"{path.name}: its tensors end at byte {end}, the file has {size}")
    return entries


def _entry(value: dict[str, Any], base: int) -> Entry:
    dtype, width = DTYPES[value["dtype"]]
    shape, (start, end) = tuple(value["shape"]), value["data_offsets"]
    if end - start != math.prod(shape) * width:
        raise ValueError(f"{dtype} {shape} needs {math.prod(shape) * width} bytes, has {end - start}")
    return Entry(dtype, shape, base + start, base + end)


def read_values(path: Path, entry: Entry, indices: Sequence[int]) -> tuple[float, ...]:
    """Elements of a float32, bfloat16 or float16 tensor by flat index, as float32."""
    raw = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}[entry.dtype]
    stored = np.memmap(path, raw, "r", entry.start, (math.prod(entry.shape),))[list(indices)]
    if entry.dtype == "bfloat16":  # the upper half of a float32
        return tuple((stored.astype("<u4") << 16).view("<f4").tolist())
    return tuple(stored.astype("<f4").tolist())
