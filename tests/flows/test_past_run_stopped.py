"""What a past run's stops and unfinished iterations cost is told apart; and what `ratchet plan --from` prints."""

from dataclasses import replace
from pathlib import Path

import pytest

from conf.load import load
from data.accounts import SessionRow, StageRow
from data.ledger import Ledger
from flows.cli import main
from flows.steps import Took
from flows.waits import POOL, UPSTREAM, WEIGHTS
from tests.fakes.recorded import ONE_OFF, at_once, forecast, predicted, recorded, row, settings, took


def whole_iteration(number: int, began: float) -> list[StageRow]:
    """In step: 10 s of rollout, 2 of reward, 6 of update, 1 of publish."""
    return [
        *at_once(number, began, "prompts"),
        row(number, "rollout", began, began + 10),
        row(number, "reward", began, began + 12, (UPSTREAM, began, began + 10)),
        row(number, "update", began, began + 18, (UPSTREAM, began, began + 12)),
        row(number, "publish", began, began + 19, (WEIGHTS, began, began + 18)),
    ]


def test_what_a_stop_in_step_cost_is_told_apart() -> None:
    """Interrupted at 25 in a rollout that began at 20, ended at 26; continued at 100, where it begins again at 102."""
    failed = replace(row(2, "rollout", 12, 25, (WEIGHTS, 12, 20)), state="failed")
    rows = [*whole_iteration(1, 0), *at_once(2, 12, "prompts"), failed, *whole_iteration(2, 102)[1:]]
    sessions = SessionRow(-5, 0, 20, 26), SessionRow(95, 100, 121.5)
    past = recorded(settings(), rows, [20, 27.5], *sessions)
    assert past.outside == 0.5
    assert predicted(past) == 2 * 19 + 0.5
    assert forecast(past).beyond(past) == (25 - 19) + (26 - 25) + (102 - 100)
    assert predicted(past) + forecast(past).beyond(past) == past.makespan


LAG_1_ROWS = [  # a rollout of 10 s, an update of 6 s
    *at_once(1, 0, "prompts"),
    *at_once(2, 0, "prompts"),
    *at_once(3, 10, "prompts"),
    *at_once(1, 10, "reward"),
    *at_once(2, 20, "reward"),
    *at_once(1, 16, "publish"),
    *at_once(2, 26, "publish"),
    row(1, "rollout", 0, 10),
    row(2, "rollout", 0, 20, (POOL, 0, 10)),
    row(1, "update", 0, 16, (UPSTREAM, 0, 10)),
    row(2, "update", 0, 26, (UPSTREAM, 0, 20)),
]


def test_what_a_kill_cost_a_run_ahead_is_the_overlap_that_was_lost() -> None:
    """Killed at 27: rollout 3 had begun at 20, and has no row; known is the end of update 2. Continued at 100."""
    rows = [
        *LAG_1_ROWS,
        row(3, "rollout", 100, 110),
        *at_once(3, 110, "reward"),
        row(3, "update", 100, 116, (UPSTREAM, 100, 110)),
        *at_once(3, 116, "publish"),
    ]
    past = recorded(settings(*ONE_OFF), rows, [16, 10, 16], SessionRow(-5, 0, 26), SessionRow(95, 100, 116))
    assert predicted(past) == 36
    assert forecast(past).beyond(past) == 6
    assert past.makespan == 36 + 6


def test_what_a_run_has_begun_beside_its_finished_iterations_is_told_apart() -> None:
    """Killed in the rollout of 4: the publish of 2 had waited for the rollout of 3, which nobody will train."""
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 0, "prompts"),
        *at_once(3, 10, "prompts"),
        *at_once(4, 21, "prompts"),
        *at_once(1, 10, "reward"),
        *at_once(2, 20, "reward"),
        *at_once(3, 31, "reward"),
        row(1, "rollout", 0, 10),
        row(1, "update", 0, 16, (UPSTREAM, 0, 10)),
        row(1, "publish", 0, 21, (WEIGHTS, 0, 16), (POOL, 16, 20)),
        row(2, "rollout", 0, 20, (POOL, 0, 10)),
        row(2, "update", 0, 26, (UPSTREAM, 0, 20)),
        row(2, "publish", 0, 32, (WEIGHTS, 0, 26), (POOL, 26, 31)),
        row(3, "rollout", 10, 31, (POOL, 10, 20), (WEIGHTS, 20, 21)),
    ]
    past = recorded(settings(*ONE_OFF), rows, [21, 11], SessionRow(-5, 0, 32))
    assert past.iterations == 2
    assert took(past, "rollout") == [Took(10)] * 2
    assert predicted(past) == 27
    assert forecast(past).beyond(past) == 5
    assert past.makespan == 32


# -- the command


def written(folder: Path, *overrides: str) -> str:
    """A run of two iterations in step on the graph of the file: 49 and 49 s of stages, and 1 s after each."""
    folder.mkdir()
    loaded = load("conf/smollm2_arithmetic.yaml", ["evaluate.every=0", "iterations=9", *overrides])
    (folder / "config.yaml").write_text(loaded.text)
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.open_run(folder.name, loaded.digest, loaded.text)
    with ledger.accounts.session(0.0):
        ledger.accounts.session_ready(0.0)
        for n, opened, began, rolled, updated in ((1, 0, 0, 20, 49), (2, 25, 50, 75, 99)):
            scored = rolled + 5
            for stage in [
                *at_once(n, opened, "prompts"),
                row(n, "rollout", opened, rolled, (WEIGHTS, opened, began)),
                *at_once(n, rolled, "reward"),
                row(n, "reference", opened, scored, (UPSTREAM, opened, rolled)),
                *at_once(n, scored, "advantage"),
                row(n, "update", opened, updated, (UPSTREAM, opened, scored)),
                *at_once(n, updated, "publish"),
            ]:
                ledger.accounts.record_stage(stage)
            values = {"time/iteration": 50.0, "throughput/effective_samples_per_s": 64 / 50}
            ledger.accounts.record_metrics(n, values, accounted=updated + 1)
    ledger.close()
    return str(folder)


def test_the_runs_own_makespan_comes_out_of_its_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = written(tmp_path / "r")
    with pytest.raises(SystemExit) as done:
        main(["plan", "--simulate", "--from", folder])
    printed = capsys.readouterr().out
    assert done.value.code == 0
    assert "makespan           100.0 s; recorded 100.0 s (+0.0%)" in printed
    assert max(map(len, printed.splitlines())) <= 80
    with pytest.raises(SystemExit):
        main(["plan", "--simulate", "--from", folder, "pools.rollout.engines=5", "--time", "update=8"])
    # rollouts take 20 / 5 and 25 / 5 s, updates 8 s: 4 + 5 + 8 + 1 and 5 + 5 + 8 + 1
    assert "makespan           37.0 s; recorded 100.0 s (-63.0%)" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--simulate", "--from", folder, "iterations=4"])
    # 49 s four times, 1 s before the second and the fourth, and 1 s after the last
    assert "makespan           199.0 s; recorded 100.0 s, for 2 iterations" in capsys.readouterr().out


def test_a_run_of_other_work_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = written(tmp_path / "r")
    for override, found in (
        ("rollout.samples_per_prompt=4", "the same samples an iteration, expected 32, got 64: give --time"),
        ("rollout.max_new_tokens=64", "the same rollout.max_new_tokens, expected 64, got 12"),
    ):
        with pytest.raises(SystemExit):
            main(["plan", "--simulate", "--from", folder, override])
        assert found in capsys.readouterr().err
