"""fsck: quiet about whatever a run or a kill may leave, and it finds everything else, whichever byte it is."""

import builtins
import errno
import hashlib
import io
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from conf.errors import RatchetError, RunError
from data.checkpoints import check_files, read_checkpoint
from data.fsck import Finding, fsck
from data.ledger import Ledger
from data.refs import DatasetRef
from data.retention import checkpoints, delete_checkpoint, retire
from data.run_lock import lock_run
from data.store import Store
from data.weights import verify
from tests.fakes.whole_run import WholeRun

ROOT = Path(__file__).parents[2]


def problems(folder: Path) -> list[Finding]:
    return [finding for finding in fsck(folder) if finding.problem]


def notes(folder: Path) -> list[str]:
    return [f"{finding.what}: {finding.message}" for finding in fsck(folder) if not finding.problem]


def newest(folder: Path, part: str) -> Path:
    return sorted(folder.glob(part))[-1]


# -- what is right


def test_a_whole_run_has_nothing_to_report_and_is_left_as_it_was(folder: Path) -> None:
    def files() -> dict[str, tuple[int, int, bytes]]:
        return {
            str(p.relative_to(folder)): (p.lstat().st_mtime_ns, p.lstat().st_mode, p.read_bytes())
            for p in sorted(folder.rglob("*"))
            if p.is_file() and not p.name.startswith("ledger.sqlite-")  # SQLite's own, empty without a writer
        }

    before, seen = files(), list[tuple[int, int]]()
    assert fsck(folder, lambda done, total: seen.append((done, total))) == []
    assert files() == before
    assert (folder / "ledger.sqlite-wal").stat().st_size == 0
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


def test_every_point_at_which_a_run_can_be_killed_is_free_of_problems(tmp_path: Path, toy_model: Path) -> None:
    run = WholeRun.start(tmp_path / "demo-001", toy_model)
    run.iteration(1)
    steps: list[Callable[[], object]] = [
        lambda: run.prompts(2),
        lambda: run.issue(2),
        lambda: run.rollout(2),
        lambda: run.score(2),
        lambda: run.ledger.allocate_version("000002/update", 1, 2, run.ref(2, "advantage").id),
        lambda: run.stage_and_seal(2, 1, run.ref(2, "advantage").id),  # P5 done, the ledger says EXPORTING
        lambda: run.ledger.set_version(2, "SEALED", content(run, 2)),
        lambda: run.ledger.set_version(2, "PUBLISHING"),
        lambda: run.ledger.set_version(2, "COMMITTED"),
        lambda: run.ledger.set_version(0, "RETIRED"),
        lambda: shutil.rmtree(newest(run.folder, "weights/000000*")),
        lambda: run.ledger.set_version(0, "DELETED"),
    ]
    for step in steps:
        step()
        assert problems(run.folder) == []
    run.ledger.close()


def content(run: WholeRun, number: int) -> str:
    return verify(newest(run.folder, f"weights/{number:06d}-*")).manifest.content


WRITER = """
import shutil
import sys
from pathlib import Path
from data.retention import retire
from tests.fakes.whole_run import WholeRun
folder, model = map(Path, sys.argv[1:])
run = WholeRun.start(folder, model)
print("started", flush=True)
for iteration in range(1, 6):
    run.iteration(iteration)
    for doomed in retire(run.ledger, folder / "weights", keep=2):
        shutil.rmtree(doomed)
"""


def test_beside_a_run_that_goes_on_it_reports_nothing(tmp_path: Path, toy_model: Path) -> None:
    folder = tmp_path / "demo-001"
    command = [sys.executable, "-c", WRITER, str(folder), str(toy_model)]
    looked = 0
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "started\n"
        while writer.poll() is None:
            assert fsck(folder) == []
            looked += 1
    assert writer.returncode == 0
    assert looked >= 2
    assert problems(folder) == []


LOOKS = [(os, name) for name in ("stat", "lstat", "listdir", "scandir", "open", "readlink")]
LOOKS += [(io, "open"), (builtins, "open")]


def test_whatever_a_run_deletes_before_any_look_at_it_is_no_fault(
    pristine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For each place from which fsck looks at weights or checkpoints: a pass of retention goes by just before it."""
    folder = tmp_path / pristine.name
    seen = list[tuple[object, ...]]()
    passes, lock = 0, threading.RLock()

    def retention() -> None:
        nonlocal passes
        passes += 1
        ledger = Ledger(folder / "ledger.sqlite")
        for _ in range(2):
            for doomed in retire(ledger, folder / "weights", keep=1):
                shutil.rmtree(doomed)
        for old in checkpoints(folder)[:-1]:
            delete_checkpoint(old)
        ledger.close()

    def after_a_pass(look: Callable[..., object]) -> Callable[..., object]:
        def looked(path: object = ".", *args: object, **more: object) -> object:
            below = isinstance(path, str | os.PathLike) and re.search("/(weights|checkpoints)(/|$)", os.fspath(path))
            with lock:
                if below and not passes:
                    code = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
                    place = (look, *(at for at in code if "/data/" in at[0]))
                    if place not in seen:
                        seen.append(place)
                        retention()
            return look(path, *args, **more)

        return looked

    while True:
        subprocess.run(["cp", "-a", str(pristine), str(tmp_path)], check=True)
        with monkeypatch.context() as patch, lock_run(folder):
            for module, name in LOOKS:
                patch.setattr(module, name, after_a_pass(getattr(module, name)))
            assert fsck(folder) == [], f"before {seen[-1]}"
        subprocess.run(["chmod", "-R", "u+w", str(folder)], check=True)
        shutil.rmtree(folder)
        if not passes:
            break
        passes = 0
    assert len(seen) > 20


def test_a_folder_that_cannot_be_read_is_a_problem(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scandir = os.scandir

    def refused(path: str = ".") -> object:
        if os.fspath(path).endswith("/logs"):
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    (found,) = problems(folder)
    assert found.what == "logs"
    assert "Permission denied" in found.message
    assert found.message.endswith("make it readable")


def test_what_a_killed_run_left_unfinished_is_a_note_unless_somebody_has_the_run(folder: Path) -> None:
    for name in ("data/staging/x.arrow", "weights/staging/000004/model", "checkpoints/.000004.partial/x", "config.tmp"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"12")
    found = fsck(folder)
    assert [f.problem for f in found] == [False] * 4
    assert {f.what for f in found} == {
        "data/staging/x.arrow", "weights/staging/000004", "checkpoints/.000004.partial", "config.tmp",
    }  # fmt: skip
    assert all("2 bytes, unfinished" in f.message for f in found)
    with lock_run(folder):
        assert fsck(folder) == []


def test_data_that_nothing_refers_to_and_files_of_the_user_are_notes(folder: Path) -> None:
    store = Store(folder, folder.name)
    prompts = store.find(1, "prompts")
    assert isinstance(prompts, DatasetRef)
    orphan = store._objects.put(".arrow", lambda path: path.write_bytes(b"x") and None)[0]
    (folder / "notes.txt").write_text("mine")
    assert notes(folder) == [
        "notes.txt: is not Ratchet's; left alone",
        f"data/objects/{orphan}.arrow: nothing refers to it; `ratchet gc` removes it",
    ]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no run was started there"):
        fsck(tmp_path)


# -- what is wrong, one thing each


def sql(statement: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        with sqlite3.connect(folder / "ledger.sqlite") as db:
            db.execute(statement)
        db.close()

    return change


def gone(pattern: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = newest(folder, pattern)
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()

    return change


def outside(pattern: str) -> Callable[[Path], object]:
    """The same content, but behind a link out of the run."""

    def change(folder: Path) -> None:
        path = newest(folder, pattern)
        target = folder.parent / "outside"
        path.parent.chmod(0o755)
        path.rename(target)
        path.symlink_to(target)

    return change


def added(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(b"x")


def renamed(pattern: str, name: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = newest(folder, pattern)
        path.rename(path.with_name(name))

    return change


WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "reference gone": (
        gone("data/stages/000002/reward.json"),
        "000002/reward.json: expected what the stage",
    ),
    "column file gone": (gone("data/objects/*.arrow"), r"data/stages/.*: data/objects/.*arrow is missing"),
    "weights gone": (
        gone("weights/000003-*"),
        "000003-.*: expected the weights of a COMMITTED version",
    ),
    "package of nobody": (renamed("weights/000003-*", "000009-0123456789ab"), "there is none with number 9"),
    "package under another digest": (
        renamed("weights/000003-*", "000003-0123456789ab"),
        "its manifest is of version 000003-",
    ),
    "extra file in a package": (lambda f: added(f"{newest(f, 'weights/0*')}/x.bin")(f), r"x.bin: not in the list"),
    "extra object": (added("data/objects/x.bin"), "data/objects/x.bin: expected no such file here; move it away"),
    "extra file in data": (added("data/x"), "data/x: expected no such file here"),
    "extra stage file": (added("data/stages/000001/x.txt"), "data/stages/000001/x.txt: expected no such file here"),
    "extra folder of weights": (lambda f: (f / "weights" / "mine").mkdir(), "weights/mine: expected no such file here"),
    "extra file in a checkpoint": (added("checkpoints/000002/x"), "000002: x must be no such file, found 1 bytes"),
    "checkpoint without COMPLETE": (
        gone("checkpoints/000003/COMPLETE"),
        "is incomplete: .*then resumes from 000002",
    ),
    "checkpoint without a file": (gone("checkpoints/000003/r*"), r"rank-00001.safetensors must be \d+ bytes, found no"),
    "first checkpoint": (gone("checkpoints/000001/COMPLETE"), "replays every update from its recorded dataset"),
    "object is a link": (
        outside("data/objects/*.arrow"),
        "data/objects/.*: expected a file .* link to .*outside",
    ),
    "package is a link": (
        outside("weights/000003-*"),
        "weights/000003-.*: expected a .* link to .*outside",
    ),
    "shard is a link": (outside("weights/000003-*/model*"), "found a link to .*outside"),
    "checkpoints is a link": (outside("checkpoints"), "checkpoints: expected a file .* found a link to .*outside"),
    "settings changed": (
        lambda f: (f / "config.yaml").write_text((f / "config.yaml").read_text().replace("seed: 1", "seed: 2")),
        "config.yaml: expected settings with digest",
    ),
    "settings gone": (gone("config.yaml"), "config.yaml: .*the ledger has the settings too"),
    "metrics are no Parquet": (added("metrics.parquet"), "metrics.parquet: cannot be read: .*remove it"),
    "version lost": (
        sql("DELETE FROM versions WHERE number = 3"),
        "there is none with number 3",
    ),
    "version in the middle lost": (
        sql("DELETE FROM versions WHERE number = 2"),
        r"ledger.sqlite: expected versions 0 to 2, found 0, 1, 3",
    ),
    "other content": (
        sql("UPDATE versions SET content = replace(content, substr(content, 20, 5), 'fffff') WHERE number = 3"),
        r"weights/000003-.*: content: expected '.*fffff.*' as in the ledger, found",
    ),
    "other parent": (
        sql("UPDATE versions SET parent = 0 WHERE number = 3"),
        "parent: expected 0 as in",
    ),
    "other optimizer step": (
        sql("UPDATE versions SET optimizer_step = 9 WHERE number = 3"),
        "expected a version of the ledger, found PolicyRef",
    ),
    "content missing": (
        sql("UPDATE versions SET content = NULL WHERE number = 3"),
        "expected a SHA-256 as content",
    ),
    "DELETED with a folder": (
        sql("UPDATE versions SET state = 'DELETED' WHERE number = 0"),
        r"weights/000000-.*: expected nothing of a DELETED version",
    ),
    "DELETED under a lease": (
        lambda f: [
            sql("UPDATE versions SET state = 'DELETED' WHERE number = 0")(f),
            sql("INSERT INTO leases VALUES (0, 'evaluated', 1)")(f),
        ],
        "version 0: expected no lease of a DELETED version, found evaluated",
    ),
    "engine of nowhere": (
        sql("UPDATE engines SET label = '000007-0123456789ab'"),
        "engine0: expected the label",
    ),
    "tokens of an abandoned version": (
        sql("UPDATE versions SET state = 'ABANDONED' WHERE number = 1"),
        "rollout.json: expected tokens of published versions, found 000001-.*, ABANDONED",
    ),
    "row without its row": (
        sql("INSERT INTO leases VALUES (77, 'x', 0)"),
        "refers to a row that versions lacks",
    ),
    "group lost": (
        sql("DELETE FROM groups WHERE group_id = 'i000001-g000'"),
        "groups of iteration 1: expected the 2 groups it has sent, found 1, first i000001-g000",
    ),
    "group of nowhere": (sql("INSERT INTO groups VALUES ('x', 1, 1, NULL)"), "it has sent, found 3, first x"),
    "group forgotten": (
        sql("UPDATE groups SET outcome = NULL WHERE group_id = 'i000002-g001'"),
        "iteration 2: expected an outcome for each after the update, 1 wait, first i000002-g001",
    ),
    "group trained that had no row": (
        sql("UPDATE groups SET outcome = 'trained' WHERE group_id = 'i000002-g001'"),
        "expected the 1 groups of the update's rows trained, found 2, first i000002-g001",
    ),
    "empty ledger": (added("ledger.sqlite"), "ledger.sqlite: cannot be read: .*the rest was checked without it"),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_is_found_and_the_line_says_what_was_expected_and_what_to_do(folder: Path, what: str) -> None:
    change, message = WRONG[what]
    change(folder)
    found = [str(finding) for finding in problems(folder)]
    assert [line for line in found if re.search(message, line)], found
    assert all(line.startswith("problem: ") for line in found)
    assert not [line for line in found if str(folder) in line]


def test_weights_changed_with_their_manifest_are_found_by_the_content_in_the_ledger(folder: Path) -> None:
    package = verify(newest(folder, "weights/000003-*"))
    shard = package.folder / package.manifest.tensors[0].file
    for path in (package.folder, *package.folder.iterdir()):
        path.chmod(0o755)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    files = tuple(replace(f, sha256=digest) if f.path == shard.name else f for f in package.manifest.files)
    (package.folder / "MANIFEST.json").write_bytes(replace(package.manifest, files=files).to_bytes())
    verify(package.folder)  # agrees with itself
    assert [str(f) for f in problems(folder) if re.search(r"tensor .*: expected SHA-256 .*, found ", f.message)]


def test_a_run_under_another_name_is_found(folder: Path) -> None:
    other = folder.rename(folder.with_name("other"))
    found = [str(finding) for finding in problems(other)]
    assert "problem: ledger.sqlite: expected run other, found demo-001; rename the folder" in found


def test_damage_of_what_is_not_used_any_more_is_a_note(folder: Path) -> None:
    sql("UPDATE versions SET state = 'RETIRED' WHERE number = 0")(folder)
    package = newest(folder, "weights/000000-*")
    (package / "config.json").chmod(0o644)
    (package / "config.json").write_text("{}")
    assert notes(folder) == [
        f"weights/{package.name}: damaged, and RETIRED: not used any more; `ratchet gc` removes it"
    ]
    assert problems(folder) == []


def test_without_a_ledger_the_data_is_still_checked(folder: Path) -> None:
    (folder / "ledger.sqlite").write_bytes(b"x" * 4096)
    assert [finding.what for finding in problems(folder)] == ["ledger.sqlite"]
    gone("data/objects/*.arrow")(folder)
    assert len(problems(folder)) > 1


def test_a_page_of_the_ledger_that_was_overwritten_is_found(folder: Path) -> None:
    whole = (folder / "ledger.sqlite").read_bytes()
    for page in range(1, len(whole) // 4096):
        (folder / "ledger.sqlite").write_bytes(whole[: page * 4096] + b"\xa5" * 4096 + whole[(page + 1) * 4096 :])
        assert "ledger.sqlite" in [finding.what for finding in problems(folder)], page


# -- any byte of any file


@contextmanager
def damaged(path: Path, data: bytes) -> Iterator[None]:
    """Other bytes in the same inode: a hard link changes with it."""
    before, mode = path.read_bytes(), path.stat().st_mode
    path.chmod(0o644)
    path.write_bytes(data)
    try:
        yield
    finally:
        path.write_bytes(before)
        path.chmod(mode)


def refused(folder: Path, path: Path) -> list[str]:
    """What every reader of this file says."""
    if path.is_relative_to(folder / "weights"):
        return [_error(lambda: verify(path.parent))]
    if path.is_relative_to(folder / "checkpoints"):
        return [_error(lambda: check_files(path.parent, read_checkpoint(path.parent).files))]
    store = Store(folder, folder.name)
    errors = [_error(partial(_read, store, *stage)) for stage in store.stages()]
    return [error for error in errors if error]


def _read(store: Store, iteration: int, stage: str) -> None:
    """The stage's output and what it was made from."""
    manifest = store.committed(iteration, stage)
    assert manifest is not None
    for ref in (manifest.ref, *manifest.parents):
        if isinstance(ref, DatasetRef):
            store.read(ref)


def _error(read: Callable[[], object]) -> str:
    try:
        read()
    except RatchetError as error:
        return str(error)
    return ""


def changes(draw: st.DrawFn, whole: bytes, others: list[bytes]) -> bytes:
    kind = draw(st.sampled_from(["byte", "cut", "longer", "swapped"]))
    at = draw(st.integers(0, len(whole) - 1))
    match kind:
        case "byte":
            return whole[:at] + bytes([whole[at] ^ draw(st.integers(1, 255))]) + whole[at + 1 :]
        case "cut":
            return whole[:at]
        case "longer":
            return whole + draw(st.binary(min_size=1, max_size=9))
    different = [other for other in others if other != whole]
    return draw(st.sampled_from(different)) if different else whole + b" "


@settings(
    max_examples=120,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_any_change_of_any_file_is_refused_by_its_name_and_found(folder: Path, data: st.DataObject) -> None:
    kinds = ("data/objects/*.arrow", "data/objects/*.json", "data/stages/*/*.json", "weights/0*/*", "checkpoints/0*/*")
    kind = data.draw(st.sampled_from(kinds))
    files = sorted(folder.glob(kind))
    path = data.draw(st.sampled_from(files))
    others = [file.read_bytes() for file in files if file.suffix == path.suffix]
    new = data.draw(st.composite(changes)(path.read_bytes(), others))
    names = {f"{link.parent.name}/{link.name}" for link in folder.glob("data/*/**/*.json") if link.samefile(path)}
    names |= {f"{path.parent.name}/{path.name}", f"{path.parent.name}: {path.name}"}
    if path.name in ("MANIFEST.json", "COMPLETE"):  # the list of another folder accuses the files, of this folder
        names.add(path.parent.name)
    with damaged(path, new):
        errors, found = refused(folder, path), [str(finding) for finding in problems(folder)]
    assert errors
    assert all(any(name in error for name in names) for error in errors), errors
    assert any(name in line for name in names for line in found), found
