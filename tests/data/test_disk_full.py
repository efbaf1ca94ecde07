"""A disk that is full at each write: nothing is half committed, and it goes on once there is room."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from conf.errors import PublishError, RunError
from data.fsck import fsck
from data.ledger import Ledger
from data.space import check_space, checkpoint_bytes, package_bytes
from data.weights import verify
from tests.fakes.disk import Limit, Tmpfs, can_mount
from tests.fakes.whole_run import WholeRun

# The last is the toy trainer's; what is not a RatchetError, the flow turns into a StageError.
REFUSALS = (OSError, RunError, PublishError, SafetensorError)


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> list[type[Tmpfs | Limit]]:
    return [Tmpfs, Limit] if can_mount(tmp_path_factory.mktemp("mount")) else [Limit]


@pytest.fixture
def disks(kinds: list[type[Tmpfs | Limit]], tmp_path: Path) -> list[Tmpfs | Limit]:
    found = []
    for kind in kinds:
        folder = tmp_path / kind.__name__
        folder.mkdir()
        found.append(kind(folder))
    return found


def fails_until_there_is_room(
    disk: Tmpfs | Limit, attempt: Callable[[], Any], clean: Callable[[], object] = lambda: None
) -> int:
    """Try with 0, 1, 2, ... pages free; after each failure the folder is a run without problems. Gives the failures."""
    for pages in range(200):
        with disk.full(pages), contextlib.suppress(*REFUSALS):
            attempt()
            return pages
        clean()
        assert not [finding for finding in fsck(disk.folder / "demo-001") if finding.problem]
    raise AssertionError("it never went through")


def test_all_that_writes_goes_on_after_a_full_disk_at_any_write(disks: list[Tmpfs | Limit], toy_model: Path) -> None:
    for disk in disks[:1]:  # the tmpfs where there may be one: every write once is enough
        with disk.mounted() as folder:
            run = WholeRun.start(folder / "demo-001", toy_model)
            run.iteration(1)
            failures = {}
            for name, attempt in {
                "prompts": lambda run=run: run.prompts(2),
                "issue": lambda run=run: run.issue(2),
                "rollout": lambda run=run: run.rollout(2),
                "score": lambda run=run: run.score(2),
                "update": lambda run=run: _update(run),
                "publish": lambda run=run: run.ledger.set_version(2, "PUBLISHING"),
                "metrics": lambda run=run: run.ledger.accounts.record_metrics(2, {f"m{i}": 1.0 for i in range(2000)}),
            }.items():
                staging = run.folder / "weights" / "staging"
                failures[name] = fails_until_there_is_room(disk, attempt, lambda s=staging: _emptied(s))
            assert {name for name, count in failures.items() if count} >= {"prompts", "rollout", "score", "update"}
            assert [row.state for row in run.ledger.versions()] == ["COMMITTED", "COMMITTED", "PUBLISHING"]
            assert run.store.read(run.ref(2, "advantage")).num_rows == 2
            verify(next((run.folder / "weights").glob("000002-*")))
            run.ledger.close()
            assert not [finding for finding in fsck(run.folder) if finding.problem]


def _update(run: WholeRun) -> None:
    """As the exporter does: the same key has the same number until it is sealed."""
    dataset = run.ref(2, "advantage")
    number = run.ledger.allocate_version("000002/update", 1, 2, dataset.id)
    package = run.stage_and_seal(number, 1, dataset.id)
    run.ledger.set_version(number, "SEALED", package.manifest.content)
    run.store.commit_policy(2, "update", package.manifest.ref, parents=[dataset], facts=run.facts())


def _emptied(staging: Path) -> None:
    shutil.rmtree(staging, ignore_errors=True)


def test_a_ledger_that_could_not_write_says_so_and_writes_when_there_is_room(disks: list[Tmpfs | Limit]) -> None:
    for disk in disks:
        with disk.mounted() as folder:
            ledger = Ledger(folder / "ledger.sqlite")
            ledger.open_run("r", "", "")
            many = {f"metric{i}": 1.0 for i in range(20_000)}
            with (
                disk.full(1),
                pytest.raises(RunError, match=r"cannot be written: .*; free space, then run"),
            ):
                ledger.accounts.record_metrics(1, many)
            assert ledger.accounts.metrics() == {}
            ledger.accounts.record_metrics(1, many)
            assert ledger.accounts.metrics() == {1: many}
            assert ledger.damage() == []
            ledger.close()


# -- asked before


def test_the_room_for_weights_is_the_size_of_what_is_written(toy_model: Path, tmp_path: Path) -> None:
    run = WholeRun.start(tmp_path / "demo-001", toy_model)
    run.ledger.close()
    package = next((run.folder / "weights").glob("000000-*"))
    real = sum(path.stat().st_size for path in package.iterdir())
    estimate = package_bytes(toy_model, "float32")
    assert real <= estimate < real + 8192
    parameters = 64 * 8 + 8 + 64 * 8
    assert estimate - package_bytes(toy_model, "bfloat16") == 2 * parameters


def test_the_room_for_a_checkpoint_is_weights_and_moments_in_float32(toy_model: Path) -> None:
    parameters = 64 * 8 + 8 + 64 * 8
    assert 12 * parameters <= checkpoint_bytes(toy_model) < 12 * parameters + 8192


def test_a_disk_without_room_is_refused_with_both_numbers(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    check_space(tmp_path / "not" / "yet", 1, "weights", "publish.keep_versions")
    message = rf"weights need {free * 2:,} bytes, the disk of .*/weights has [0-9,]+: free space or lower"
    with pytest.raises(RunError, match=message):
        check_space(tmp_path / "weights", free * 2, "weights", "publish.keep_versions")
