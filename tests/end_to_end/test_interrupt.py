"""Ctrl-C, Ctrl-C again and again, and SIGTERM: everything ends in seconds, and the message says how to continue."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.launches import RATCHET, Launch, Place, launched, stage_committed

pytestmark = pytest.mark.timeout(1800)

IDLE_LIMIT_S = 10.0  # what the product promises on an idle machine
BUSY_LIMIT_S = 60.0


def interrupt(place: Place, run: str, after: str, send: Callable[[Launch], None]) -> tuple[Path, Launch]:
    """Start (or continue) a run, let `send` stop it once the node `after` is committed; gives what it left."""
    folder = place.folder / "runs" / run
    with launched(place, "-c", RATCHET, "run", "slow.yaml", "--run", run) as launch:
        launch.until(lambda: stage_committed(folder, 1, after), f"{after} is committed")
        time.sleep(0.3)
        began = time.monotonic()
        send(launch)
        code = launch.wait(BUSY_LIMIT_S)
        ended = time.monotonic() - began
        gone = launch.until_gone(BUSY_LIMIT_S)
        print(f"{run}: ended after {ended:.1f} s (promise: {IDLE_LIMIT_S:.0f} s), the last process {gone:.1f} s later")
        assert code == 130, launch.output
        return folder, launch


def test_ctrl_c_in_a_rollout_and_sigterm_in_the_update_that_follows(external: Place) -> None:
    folder, launch = interrupt(external, "stopped", "prompts", lambda it: it.process.send_signal(signal.SIGINT))
    assert not stage_committed(folder, 1, "rollout")
    assert launch.output.splitlines()[-1] == "stopped; the same command continues runs/stopped"
    assert "Traceback" not in launch.output

    folder, launch = interrupt(external, "stopped", "advantage", lambda it: it.process.send_signal(signal.SIGTERM))
    assert "run runs/stopped (continued)" in launch.output
    assert launch.output.splitlines()[-1] == "stopped; the same command continues runs/stopped"
    assert "Traceback" not in launch.output


def test_ctrl_c_again_and_again_ends_it_too_and_leaves_nothing(external: Place) -> None:
    def impatiently(launch: Launch) -> None:
        while launch.process.poll() is None:  # also into the interpreter's own end
            launch.process.send_signal(signal.SIGINT)
            time.sleep(0.05)

    folder, _ = interrupt(external, "impatient", "prompts", impatiently)
    assert not stage_committed(folder, 1, "rollout")
