"""A whole run's folder, made once and copied for each test that changes it."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.engines.toy import write_model
from tests.fakes.whole_run import WholeRun


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("toy") / "model")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory, toy_model: Path) -> Path:
    """Three iterations, closed."""
    run = WholeRun.start(tmp_path_factory.mktemp("runs") / "demo-001", toy_model)
    for iteration in (1, 2, 3):
        run.iteration(iteration)
    run.ledger.close()
    return run.folder


@pytest.fixture
def folder(pristine: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of it, hard links and all, under the same name."""
    subprocess.run(["cp", "-a", str(pristine), str(tmp_path)], check=True)
    yield tmp_path / pristine.name
    subprocess.run(["chmod", "-R", "u+w", str(tmp_path)], check=True)
    shutil.rmtree(tmp_path)
