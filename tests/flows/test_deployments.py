"""`make check` names each thing in prefect.yaml that Prefect itself would accept and then get wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.deployments import check_deployments

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _from_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entrypoints and experiments are relative to it."""
    monkeypatch.chdir(ROOT)


@pytest.fixture
def declared() -> Any:
    return yaml.safe_load((ROOT / "prefect.yaml").read_text())


def problems(folder: Path, declared: Any) -> list[str]:
    file = folder / "prefect.yaml"
    file.write_text(yaml.safe_dump(declared))
    return [line.replace(f"{file}: ", "") for line in check_deployments(file)]


def test_the_repositorys_own_file_has_no_problem() -> None:
    assert list(check_deployments(ROOT / "prefect.yaml")) == []


def test_a_misspelt_key_is_named_wherever_it_stands(tmp_path: Path, declared: Any) -> None:
    deployment = declared["deployments"][0]
    declared["deployment"] = []
    deployment["paramters"] = {}
    deployment["schedules"][0]["cronn"] = "0 3 * * *"
    deployment["work_pool"]["job_variable"] = {}
    found = problems(tmp_path, declared)
    for expected in (
        ": unknown key 'deployment'",
        "deployment nightly: unknown key 'paramters'",
        "deployment nightly: schedule: unknown key 'cronn'",
        "deployment nightly: work_pool: unknown key 'job_variable'",
    ):
        assert any(expected in line for line in found), found
    assert len(found) == 4


def test_a_parameter_that_the_flow_lacks_is_named_with_those_it_has(tmp_path: Path, declared: Any) -> None:
    declared["deployments"][0]["parameters"]["iteration"] = 3
    (line,) = problems(tmp_path, declared)
    assert "deployment nightly: rl-run has no parameter 'iteration'" in line
    assert "experiment, overrides, iterations, run" in line


def test_a_parameter_of_the_wrong_type_is_named(tmp_path: Path, declared: Any) -> None:
    declared["deployments"][0]["parameters"]["iterations"] = "many"
    (line,) = problems(tmp_path, declared)
    assert "deployment nightly" in line
    assert "iterations" in line


def test_an_experiment_that_is_missing_or_wrong_is_named(tmp_path: Path, declared: Any) -> None:
    parameters = declared["deployments"][0]["parameters"]
    parameters["experiment"] = "conf/nothing.yaml"
    assert problems(tmp_path, declared) == ["deployment nightly: conf/nothing.yaml: there is no such file"]
    parameters["experiment"] = "conf/smollm2_arithmetic.yaml"
    parameters["overrides"] = ["rollout.temprature=1"]
    (line,) = problems(tmp_path, declared)
    assert "deployment nightly" in line
    assert "temprature" in line


def test_a_missing_experiment_parameter_is_named(tmp_path: Path, declared: Any) -> None:
    declared["deployments"][0]["parameters"] = {}
    (line,) = problems(tmp_path, declared)
    assert "deployment nightly" in line
    assert "experiment" in line


@pytest.mark.parametrize("entrypoint", ["flows/nothing.py:rl_run", "flows/run.py:no_such_flow"])
def test_an_entrypoint_that_cannot_be_loaded_is_named(tmp_path: Path, declared: Any, entrypoint: str) -> None:
    declared["deployments"][0]["entrypoint"] = entrypoint
    (line,) = problems(tmp_path, declared)
    assert "deployment nightly" in line
    assert entrypoint.split("/")[1].split(":")[0] in line or entrypoint.split(":")[1] in line


def test_two_deployments_of_one_name_are_refused(tmp_path: Path, declared: Any) -> None:
    declared["deployments"] *= 2
    found = problems(tmp_path, declared)
    assert found == ["deployments must have different names, got 'nightly' twice"]
