"""Disks on which there is room for so many pages and no more: a real small tmpfs, or a limit on the size of files."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = 4096


class Tmpfs:
    """Mounted for the block. `full(n)` leaves n free pages, by a file that takes the rest."""

    pages = 512

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        options = f"size={self.pages * PAGE}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.folder)], check=True)
        try:
            yield self.folder
        finally:
            subprocess.run(["umount", "--lazy", str(self.folder)], check=True)

    @contextmanager
    def full(self, pages: int) -> Iterator[None]:
        filler = self.folder / "filler"
        with open(filler, "wb") as file:
            free = os.statvfs(self.folder).f_bavail
            file.write(b"\0" * (max(0, free - pages) * PAGE))
        try:
            yield
        finally:
            filler.unlink()


class Limit:
    """Where nothing may be mounted: no file may grow beyond n * n sectors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def mounted(self) -> Iterator[Path]:
        yield self.folder

    @contextmanager
    def full(self, pages: int) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (pages * pages * 512, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def can_mount(folder: Path) -> bool:
    with contextlib.suppress(OSError, subprocess.CalledProcessError), Tmpfs(folder).mounted():
        return True
    return False
