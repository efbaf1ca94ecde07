"""`ratchet fsck` and `ratchet gc` as commands: lines, bytes, exit codes, refusals."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.fsck import fsck
from data.ledger import Ledger
from data.run_lock import lock_run
from flows.cli import main
from tasks.engines.toy import write_model
from tests.fakes.whole_run import WholeRun

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five versions, closed; keep_versions is 3, keep_checkpoints 2."""
    root = tmp_path_factory.mktemp("runs")
    run = WholeRun.start(root / "demo-001", write_model(root / "model"))
    for iteration in (1, 2, 3, 4):
        run.iteration(iteration)
    run.ledger.close()
    return run.folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    subprocess.run(["cp", "-a", str(made), str(tmp_path)], check=True)
    return tmp_path / made.name


def ratchet(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out.splitlines(), printed.err


def test_fsck_of_a_clean_run_says_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = ratchet(capsys, "fsck", str(folder))
    assert (code, lines[-1]) == (0, f"{folder}: no problem(s), 0 note(s)")


def test_fsck_prints_a_line_a_problem_and_ends_with_1(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "notes.txt").write_text("")
    (folder / "data/stages/000002/reward.json").unlink()
    code, lines, _ = ratchet(capsys, "fsck", str(folder))
    assert code == 1
    assert lines[-1] == f"{folder}: 1 problem(s), 1 note(s)"
    assert lines[-3].startswith(
        "problem: data/stages/000002/reward.json: expected what the stage committed, found nothing;"
    )
    assert lines[-2] == "note: notes.txt: is not Ratchet's; left alone"


@pytest.mark.parametrize("command", ["fsck", "gc", "doctor"])
def test_a_folder_that_is_no_run_is_refused(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = ratchet(capsys, command, str(tmp_path))
    assert code == 1
    assert f"{tmp_path} must be the folder of a run" in error


def test_gc_prints_what_it_would_free_then_frees_it_in_two_passes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def tree() -> set[str]:
        return {str(path) for path in folder.rglob("*") if "ledger.sqlite-" not in path.name}

    before = tree()
    code, lines, _ = ratchet(capsys, "gc", str(folder), "--dry-run")
    assert code == 0
    assert tree() == before
    assert lines[-1] == f"{folder}: would free {_bytes(folder / 'checkpoints', '00000[12]'):,} bytes"
    assert [re.sub(r"-[0-9a-f]{12}", "", line.split("bytes  ")[1].split(":")[0]) for line in lines[:-1]] == [
        "weights/000000", "weights/000001", "checkpoints/000001", "checkpoints/000002",
    ]  # fmt: skip

    assert ratchet(capsys, "gc", str(folder))[1][:-1] == lines[:-1]
    expected = _bytes(folder / "weights", "00000[01]-*")
    code, lines, _ = ratchet(capsys, "gc", str(folder))
    assert lines[-1] == f"{folder}: freed {expected:,} bytes"
    assert ratchet(capsys, "gc", str(folder))[1] == [f"{folder}: freed 0 bytes"]
    assert fsck(folder) == []


def _bytes(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for top in folder.glob(pattern) for path in top.rglob("*") if path.is_file())


def test_gc_keeps_an_evaluated_version(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.lease(0, "evaluated", lasting=True)
    ledger.close()
    for _ in range(2):
        ratchet(capsys, "gc", str(folder))
    assert sorted(path.name[:6] for path in (folder / "weights").glob("0*")) == ["000000", "000002", "000003", "000004"]


def test_gc_leaves_data_alone_where_it_cannot_be_understood(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = next((folder / "data/stages/000001").glob("rollout.json"))
    path.chmod(0o644)
    path.write_bytes(b"{}")
    objects = len(list((folder / "data/objects").iterdir()))
    code, lines, _ = ratchet(capsys, "gc", str(folder))
    assert code == 1
    assert [line for line in lines if line.startswith("data objects are left alone: ") and "ratchet fsck" in line]
    assert len(list((folder / "data/objects").iterdir())) == objects


def test_gc_is_refused_while_a_process_has_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "import sys; from pathlib import Path; from data.run_lock import lock_run\n"
    code += "with lock_run(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdin=pipe, stdout=pipe, cwd=ROOT) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ended, _, error = ratchet(capsys, "gc", str(folder))
        assert ended == 1
        assert f"in use by process {process.pid}" in error
        assert ratchet(capsys, "fsck", str(folder))[0] == 0  # this may look
        process.communicate()
    with lock_run(folder):
        pass


def test_the_newest_version_gone_is_named_with_what_to_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    package = next((folder / "weights").glob("000004-*"))
    package.chmod(0o755)
    shutil.rmtree(package)
    code, lines, _ = ratchet(capsys, "fsck", str(folder))
    assert code == 1
    assert lines[-2].startswith(
        f"problem: weights/{package.name}: expected the weights of a COMMITTED version, found no such folder; restore"
    )
