"""Immutable files named by their SHA-256, written so that a crash leaves either nothing or the whole file.

Staging and objects are on one filesystem, so a link moves a finished file into place, and refuses to overwrite.
"""

import contextlib
import hashlib
import mmap
import os
import stat
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from conf.errors import DataError

LARGE = 4 * 2**20  # bytes; below it a thread costs more than it saves


@dataclass(frozen=True)
class Identity:
    """Which bytes an open file has, as far as the filesystem tells. ctime cannot be set back, unlike mtime."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int


def open_regular(path: Path) -> int:
    """A read-only descriptor. Raises DataError if the file is missing, a symlink, or not a regular file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise DataError(f"{path} is missing: the store is incomplete") from None
    except OSError as error:
        if path.is_symlink():
            raise DataError(f"{path} is a symlink, expected a regular file: a store holds its own files") from None
        raise DataError(f"{path} cannot be opened: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DataError(f"{path} is not a regular file")
    return fd


def map_file(path: Path) -> tuple[pa.Buffer, Identity]:
    """Map a file read-only. The descriptor that is checked is the one that is mapped, so no swap can come between."""
    fd = open_regular(path)
    try:
        s = os.fstat(fd)
        identity = Identity(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
        if s.st_size == 0:  # mmap refuses an empty file
            return pa.py_buffer(b""), identity
        return pa.py_buffer(mmap.mmap(fd, 0, prot=mmap.PROT_READ)), identity
    finally:
        os.close(fd)


def real_folder(path: Path) -> Path:
    """Refuses a folder that is a symlink: what lies behind it is outside the store."""
    if path.is_symlink():
        raise DataError(f"{path} is a symlink, expected a folder: a store holds its own files")
    return path


def make_folder(path: Path) -> None:
    """Create a folder and make its entry durable."""
    real_folder(path).mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    sync(path, os.O_DIRECTORY)


def sync(path: Path, flags: int = 0) -> None:
    """Make a file's bytes, or a folder's entries, durable."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _sync_and_hash(path: Path) -> str:
    """Make the bytes durable and read-only; their SHA-256."""
    with path.open("rb") as file:
        os.fchmod(file.fileno(), 0o444)
        if os.fstat(file.fileno()).st_size < LARGE:
            os.fsync(file.fileno())
            return hashlib.file_digest(file, "sha256").hexdigest()
        # Hash while the disk writes: of 200 MB each takes about 0.1 s.
        with ThreadPoolExecutor(1) as pool:
            digest = pool.submit(hashlib.file_digest, file, "sha256")
            os.fsync(file.fileno())
            return digest.result().hexdigest()


class Objects:
    """The content-addressed files below `root`: `objects/<sha256><suffix>`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.folder = root / "objects"
        self.staging = root / "staging"

    def path(self, sha256: str, suffix: str) -> Path:
        return self.folder / f"{sha256}{suffix}"

    def put(self, suffix: str, write: Callable[[Path], None]) -> tuple[str, int]:
        """Store what `write` puts into a new file: its digest and size in bytes. Equal content is stored once.

        The entry is durable after `sync`.
        """
        self.prepare()
        handle, name = tempfile.mkstemp(suffix=suffix, dir=self.staging)
        os.close(handle)
        staged = Path(name)
        try:
            write(staged)
            sha256 = _sync_and_hash(staged)
            size = staged.stat().st_size
            target = self.path(sha256, suffix)
            try:
                os.link(staged, target)
            except FileExistsError:
                self._check_equal(target, sha256)
            return sha256, size
        finally:
            # A crash leaves the staged file; nothing reads it. Anything else, such as a full disk, must give it back.
            with contextlib.suppress(OSError):
                staged.unlink()

    def sync(self) -> None:
        """Make the names of all objects durable."""
        sync_folder(self.folder)

    def prepare(self) -> None:
        # At the first write, not when the store is opened: a reader must not create a run that does not exist.
        self.root.parent.mkdir(parents=True, exist_ok=True)
        for folder in (self.root, self.folder, self.staging):
            if not real_folder(folder).is_dir():
                make_folder(folder)

    def _check_equal(self, path: Path, sha256: str) -> None:
        found = hashlib.sha256(map_file(path)[0]).hexdigest()
        if found != sha256:
            raise DataError(f"{path} is damaged: expected SHA-256 {sha256}, found {found}; remove it and run again")
