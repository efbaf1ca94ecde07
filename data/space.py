"""Is there room on the disk? Asked before gigabytes are written, because a full disk costs more than a refusal."""

import math
import shutil
from pathlib import Path

from conf.errors import RunError
from data.model_files import companions, model_tensors
from data.shards import WIDTHS

FACTS = 2048  # bytes for a tensor's place in header, index and manifest


def package_bytes(model: Path, dtype: str) -> int:
    """Size of a weight package of this model."""
    tensors = model_tensors(model, dtype)
    weights = sum(math.prod(shape) * WIDTHS[kind] for kind, shape in tensors.values())
    return weights + sum(path.stat().st_size for path in companions(model)) + FACTS * len(tensors)


def checkpoint_bytes(model: Path) -> int:
    """Size of a training checkpoint: the weights and AdamW's two moments, float32."""
    tensors = model_tensors(model, "float32")
    return 3 * sum(math.prod(shape) * WIDTHS[kind] for kind, shape in tensors.values()) + FACTS * len(tensors)


def check_space(folder: Path, needed: int, what: str, setting: str) -> None:
    """Raises RunError where the disk of `folder` has fewer than `needed` bytes. `setting` is what could be lowered."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise RunError(
            f"{what} need {needed:,} bytes, the disk of {folder} has {free:,}: free space or lower {setting}"
        )
