"""Training checkpoints as folders: complete, closed and unchanged, or refused. Knows files, not models: no torch.

`checkpoints/000005/` holds the ranks' safetensors files, `COMPLETE`, which lists them and is written last, and nothing
else. It gets its name when all that is on disk.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conf.errors import CheckpointError
from data.manifest import canonical
from data.objects import sync, sync_folder
from data.package import FileInfo
from data.shards import unique_keys

COMPLETE = "COMPLETE"
FORMAT = 2


@dataclass(frozen=True)
class Checkpoint:
    """COMPLETE of a folder that has exactly the files it lists, each of its size."""

    folder: Path
    state: dict[str, Any]  # the trainer's own, JSON
    files: tuple[FileInfo, ...]


def seal_checkpoint(partial: Path, files: Sequence[FileInfo], state: dict[str, Any]) -> None:
    """Write COMPLETE and make the folder durable; the files are it already. To be renamed by the caller."""
    body = {"format": FORMAT, "state": state, "files": [asdict(file) for file in files]}
    (partial / COMPLETE).write_bytes(_signed(body))
    sync(partial / COMPLETE)
    sync_folder(partial)


def read_checkpoint(folder: Path) -> Checkpoint:
    """What a checkpoint says of itself. Raises CheckpointError; the files' content is left to `check_files`."""
    found = {path.name: path for path in folder.iterdir()} if folder.is_dir() and not folder.is_symlink() else {}
    if strange := [path.name for path in found.values() if path.is_symlink() or not path.is_file()]:
        raise CheckpointError(f"checkpoint {folder}: expected regular files only, found {strange[0]}")
    if COMPLETE not in found:
        raise CheckpointError(f"checkpoint {folder} is incomplete: expected a file {COMPLETE} in it")
    data = found.pop(COMPLETE).read_bytes()
    try:
        body = json.loads(data, object_pairs_hook=unique_keys)
        body.pop("digest")
        intact = _signed(body) == data and body["format"] == FORMAT
        checkpoint = Checkpoint(folder, body["state"], tuple(FileInfo(**file) for file in body["files"]))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {folder}: {COMPLETE} is not what was written: {error!r}") from error
    if not intact:
        raise CheckpointError(f"checkpoint {folder}: {COMPLETE} must have its own digest and format {FORMAT}")
    listed = {file.path: file.size for file in checkpoint.files}
    for name in sorted(listed.keys() | found.keys()):
        expected = f"{listed[name]} bytes" if name in listed else "no such file"
        size = f"{found[name].stat().st_size} bytes" if name in found else "no such file"
        if expected != size:
            raise CheckpointError(f"checkpoint {folder}: {name} must be {expected}, found {size}")
    return checkpoint


def check_files(folder: Path, files: Sequence[FileInfo]) -> None:
    """Raises CheckpointError unless each file has the listed content."""
    for file in files:
        with (folder / file.path).open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != file.sha256:
            raise CheckpointError(f"checkpoint {folder}: {file.path} must have SHA-256 {file.sha256}, found {found}")


def _signed(body: dict[str, Any]) -> bytes:
    return canonical({**body, "digest": hashlib.sha256(canonical(body)).hexdigest()})
