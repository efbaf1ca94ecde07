"""What commits rely on in the filesystem of this machine."""

import ctypes
import errno
import os
from pathlib import Path

import pytest


def test_rename_replaces_an_empty_folder_silently_and_refuses_one_that_is_not(tmp_path: Path) -> None:
    """So sealing uses renameat2 with RENAME_NOREPLACE."""
    for name in ("new", "empty", "full"):
        (tmp_path / name).mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(OSError, match="not empty"):
        (tmp_path / "new").rename(tmp_path / "full")
    (tmp_path / "new").rename(tmp_path / "empty")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "full"]


def test_rename_noreplace_refuses_also_an_empty_folder(tmp_path: Path) -> None:
    for name in ("new", "empty"):
        (tmp_path / name).mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    new, empty, free = (os.fsencode(tmp_path / name) for name in ("new", "empty", "free"))
    assert libc.renameat2(-100, new, -100, empty, 1) == -1
    assert ctypes.get_errno() == errno.EEXIST
    assert libc.renameat2(-100, new, -100, free, 1) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "free"]


def test_link_never_replaces_and_gives_the_file_whole(tmp_path: Path) -> None:
    """The link of a stage's reference is the commit."""
    (tmp_path / "staged").write_text("new")
    (tmp_path / "taken").write_text("old")
    with pytest.raises(FileExistsError):
        os.link(tmp_path / "staged", tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "old"
    os.link(tmp_path / "staged", tmp_path / "free")
    (tmp_path / "staged").unlink()
    assert (tmp_path / "free").read_text() == "new"
