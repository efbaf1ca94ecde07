"""`ratchet plan` shows what the declared pools mean: devices, co-location, and what a co-located iteration pays."""

from pathlib import Path

import pytest

from flows import preflight
from flows.cli import main
from tasks.models import make_tiny_model


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_the_same_file_both_ways_by_an_override_of_pools_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = make_tiny_model(tmp_path / "tiny", say=lambda text: None)
    given = ["conf/tiny_arithmetic.yaml", f"model.path={model}", "update.checkpoint_every=3"]

    apart = planned(capsys, *given)
    assert "separate pools: rollout and training keep their devices, no hand-over" in apart
    assert "any core" in apart

    together = planned(
        capsys, *given, "pools.train=null", "pools.rollout={roles: [rollout, train], devices: ['cpu:0']}"
    )
    assert (
        "co-located pool rollout: 2 hand-overs an iteration (to train before reference, to rollout before publish)"
        in together
    )
    assert "and 2 for each checkpoint (every 3 iterations)" in together
    (row,) = [line for line in together.splitlines() if "SGLang server" in line]
    assert "1 SGLang server(s) on cpu, float32; 1 DeepSpeed rank(s), ZeRO 0, fp32" in row
    assert "cpu:0" in row
    assert "rollout, reference, update, publish, evaluate" in row


def test_a_publish_interval_lowers_the_count_of_published_versions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    model = make_tiny_model(tmp_path / "tiny", say=lambda text: None)
    ahead = ["schedule.kind=async", "schedule.max_lag=3", "update.correction.kind=ratio", "evaluate.every=0"]
    shown = planned(
        capsys, "conf/tiny_arithmetic.yaml", f"model.path={model}", *ahead, "schedule.publish_every=2", "iterations=7"
    )
    assert "schedule: async, lag <= 3, publish every 2, queue 16 groups" in shown  # 4 batches of 4
    (row,) = [line for line in shown.splitlines() if "weight versions published" in line]
    assert row.split()[-3:] == ["1", "4", "versions"]  # after iterations 2, 4, 6 and the last


def test_more_processes_than_cores_are_told_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight.os, "sched_getaffinity", lambda pid: {0, 1})
    model = make_tiny_model(tmp_path / "tiny", say=lambda text: None)
    crowded = ["pools.train.ranks=3", "pools.rollout={engines: 2, threads: 2}"]
    shown = planned(capsys, "conf/tiny_arithmetic.yaml", f"model.path={model}", *crowded)
    assert shown.splitlines()[-2:] == [
        "warning: pools.rollout.engines: 2 process(es) of 2 threads share 2 core(s): they slow each other",
        "warning: pools.train.ranks: 3 process(es) share 2 core(s): they slow each other",
    ]
