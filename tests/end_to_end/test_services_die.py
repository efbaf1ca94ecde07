"""Services are killed in the middle of a rollout: the run starts them again and goes on."""

import os
import signal

import pytest

from data.ledger import Ledger
from tests.end_to_end.launches import RATCHET, Place, launched, stage_committed

pytestmark = pytest.mark.timeout(1800)


def test_engine_and_prefect_server_killed_in_mid_rollout_are_started_again_and_the_run_ends(managed: Place) -> None:
    folder = managed.folder / "runs" / "bereft"
    with launched(managed, "-c", RATCHET, "run", "slow.yaml", "--run", "bereft") as launch:
        launch.until(lambda: stage_committed(folder, 1, "prompts"), "the prompts are there")
        for command in ("-m tasks.engines.launch", "-m prefect server start"):
            (service,) = [pid for pid, line in launch.tree().items() if command in line]
            os.killpg(service, signal.SIGKILL)
        assert not stage_committed(folder, 1, "rollout")
        assert launch.wait() == 0, launch.output
        launch.until_gone()
        assert "the Prefect server ended with code -9; starting it again" in launch.output
        assert "Traceback" not in launch.output
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        assert [(v.number, v.state) for v in ledger.versions()] == [(0, "COMMITTED"), (1, "COMMITTED")]
        boots = [(row.attempt, row.step) for row in ledger.journal_rows(0) if row.step == "Q4"]
        assert len(boots) == 2  # to the first life and to the second
        counts = ledger.groups.counts()
        assert (counts["issued"], counts["waiting"]) == (16, 0)
        assert [s.state for s in ledger.accounts.stages(1) if s.node == "rollout"] == ["completed"]
    finally:
        ledger.close()
