"""What the safetensors library lets pass, and what it refuses: why data/shards.py and digests stand before it."""

import json
import math
import struct
from pathlib import Path

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors.numpy import load, save

WHOLE = save({"a": np.arange(4, dtype=np.float32)})


def test_a_truncated_or_extended_file_is_refused() -> None:
    for data in (b"", WHOLE[:7], WHOLE[:-1], WHOLE + b"\0"):
        with pytest.raises(SafetensorError):
            load(data)


def test_a_flipped_bit_and_a_value_that_is_not_finite_are_accepted() -> None:
    """So every package has digests, and ranks count non-finite values."""
    flipped = bytearray(WHOLE)
    flipped[-2] ^= 1
    assert load(bytes(flipped))["a"].tolist() != [0, 1, 2, 3]
    assert math.isnan(load(save({"a": np.array([math.nan], np.float32)}))["a"][0])


def test_a_name_that_stands_there_twice_is_accepted() -> None:
    """`read_header` refuses it: the two could be different tensors to different readers."""
    entry = {"dtype": "U8", "shape": [1]}
    both = [json.dumps({"a": {**entry, "data_offsets": offsets}})[1:-1] for offsets in ([0, 1], [0, 1])]
    header = ("{" + ",".join(both) + "}").encode()
    assert load(struct.pack("<Q", len(header)) + header + b"\7")["a"].tolist() == [7]


def test_tensors_are_read_from_disk_as_they_were_written(tmp_path: Path) -> None:
    """`_Shard` of tasks/trainer/export.py writes the format itself, in its own order of names."""
    from safetensors import safe_open

    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "z": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
            "a": {"dtype": "U8", "shape": [8], "data_offsets": [8, 16]},
        },
        separators=(",", ":"),
    ).encode()
    header += b" " * (-len(header) % 8)
    values = np.array([1.5, -2.0], np.float32)
    (tmp_path / "x.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + values.tobytes() + bytes(range(8))
    )
    with safe_open(tmp_path / "x.safetensors", "numpy") as file:
        assert file.get_tensor("z").tolist() == [1.5, -2.0]
        assert file.get_tensor("a").tolist() == list(range(8))
        assert file.metadata() == {"format": "pt"}
