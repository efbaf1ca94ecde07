"""Attempts are in the ledger while they are under way: what a kill leaves of them, and what it cannot take."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conf.errors import RunError
from data.accounts import RUNNING, StageRow, Wait
from data.ledger import Ledger
from flows import clocks
from flows.clocks import Clocks
from flows.pool_time import run_seconds
from flows.waits import POOL, UPSTREAM, Clock


def test_an_attempt_is_a_row_as_far_as_it_has_come() -> None:
    clock = Clock(3, "update", "train", "train", started=10.0)
    clock.spans.append(Wait(UPSTREAM, 10.0, 14.0, ("reward",)))
    clock.spend("reward_calls", "g0", 2)
    clock.spend("reward_calls", "g1", 1)
    clock.spend("reward_calls", "g0", 1)
    spent = {"reward_calls": {"g0": 3, "g1": 1}}
    row = StageRow(3, "update", RUNNING, 10.0, 15.0, tuple(clock.spans), "train", "train", "working", spent)
    assert clock.row(RUNNING, 15.0) == row
    clock.under_way = Wait(POOL, 16.0, 16.0)
    assert clock.row(RUNNING, 18.5).spans[1:] == (Wait(POOL, 16.0, 18.5),)
    assert clock.row(RUNNING, 18.5).ended == 18.5
    clock.under_way, clock.ended = None, 20.0
    assert clock.row("completed", 99.0).ended == 20.0
    with pytest.raises(KeyError):
        clock.spend("money", "g0", 1)  # type: ignore[arg-type]


def test_until_an_attempt_has_begun_all_of_it_is_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes on its way from one wait to the next is no work: it does not hold its pool, and others work there."""
    clock = Clock(3, "update", "train", "train", started=10.0, coming=True)
    moments = iter([14.0, 16.0, 20.0, 21.0])
    monkeypatch.setattr("flows.waits.time.time", lambda: next(moments))
    for cause in (UPSTREAM, POOL):
        with clock.waiting(cause, ""):
            pass
    clock.coming = False
    with clock.waiting(UPSTREAM, ""):  # for the next group, of a stage that streams
        pass
    assert clock.spans == [Wait(UPSTREAM, 10.0, 14.0), Wait(POOL, 14.0, 16.0), Wait(UPSTREAM, 20.0, 21.0)]


def test_a_block_that_raises_is_an_attempt_that_failed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    held = Clocks(ledger)
    with held.timed(Clock(1, "rollout")):
        pass

    def fail(clock: Clock) -> None:
        assert list(held) == [clock]
        clock.spend("reward_calls", "g0", 4)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), held.timed(Clock(1, "reward")) as clock:
        fail(clock)
    assert list(held) == []
    assert {(row.node, row.state, str(row.spent)) for row in ledger.accounts.stages()} == {
        ("rollout", "completed", "{}"),
        ("reward", "failed", "{'reward_calls': {'g0': 4}}"),
    }
    ledger.close()


def test_a_ledger_that_cannot_be_written_ends_the_block_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")

    def full(rows: object, at: float) -> None:
        raise RunError("ledger.sqlite cannot be written")

    async def main() -> None:
        async with Clocks(ledger).kept():
            monkeypatch.setattr(ledger.accounts, "record_running", full)
            await asyncio.Event().wait()

    with pytest.raises(RunError, match="cannot be written"):
        asyncio.run(main())
    ledger.close()


UNDER_WAY = """
import asyncio, sys, time
from pathlib import Path
from data.ledger import Ledger
from flows import clocks
from flows.waits import UPSTREAM, Clock

async def main():
    ledger = Ledger(Path(sys.argv[1]))
    ledger.open_run("r", "digest", "")
    with ledger.accounts.session(time.time()):
        ledger.accounts.session_ready(time.time())
        held = clocks.Clocks(ledger)
        with held.timed(Clock(1, "rollout", "rollout")) as rollout, held.timed(Clock(1, "update", "train")) as update:
            async with held.kept():
                with update.waiting(UPSTREAM, "for rollout", on=["rollout"]):
                    while True:
                        rollout.spend("response_tokens", "g0", 5)
                        print("spent", flush=True)
                        sys.stdin.readline()
                        while (ledger.accounts.sessions()[0].seen or 0.0) < update.under_way.start + 0.1:
                            await asyncio.sleep(0.01)

clocks.WRITE_S = 0.02
asyncio.run(main())
"""


def test_what_a_killed_process_was_at_is_known_until_a_moment_before_with_what_it_had_taken(tmp_path: Path) -> None:
    """It takes five tokens twice, and is killed when the second five have been written and nothing more goes on."""
    path = tmp_path / "ledger.sqlite"
    with subprocess.Popen(
        [sys.executable, "-c", UNDER_WAY, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "spent\n"
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "spent\n"  # and it stands still there
        process.kill()
    ledger = Ledger(path)
    ledger.open_run("r", "digest", "")
    (session,), (rollout, update) = ledger.accounts.sessions(), ledger.accounts.stages()
    assert (rollout.state, update.state) == ("failed", "failed")
    assert rollout.spent == {"response_tokens": {"g0": 5}}  # the second five were not written: a kill loses that much
    assert session.ready is not None
    assert session.seen == rollout.ended == update.ended
    assert [(wait.cause, wait.end, wait.on) for wait in update.spans] == [(UPSTREAM, session.seen, ("rollout",))]
    assert session.seen - update.spans[0].start >= 0.1  # it was written again while the wait lasted
    seconds = run_seconds([session], [rollout, update], ["rollout", "train"])
    for pool in seconds.values():
        assert sum(pool.values()) == pytest.approx(session.seen - session.started)
    assert seconds["rollout"]["failed"] == pytest.approx(session.seen - rollout.started)
    assert seconds["train"]["data"] == pytest.approx(session.seen - update.spans[0].start)
    ledger.close()


def test_a_process_that_only_starts_is_known_to_have_been_there(tmp_path: Path) -> None:
    async def main() -> None:
        ledger = Ledger(tmp_path / "ledger.sqlite")
        began = time.time()
        with ledger.accounts.session(began):
            async with Clocks(ledger).kept():
                while (seen := ledger.accounts.sessions()[0].seen) is None:
                    await asyncio.sleep(0)
            assert seen >= began
        ledger.close()

    asyncio.run(main())
    assert clocks.WRITE_S <= 5  # "a few seconds" (docs/stages.md)


def test_who_gives_way_goes_on_when_no_stage_is_about_to_begin(tmp_path: Path) -> None:
    """One that waits is not, nor one that is at work."""

    async def main() -> None:
        ledger = Ledger(tmp_path / "ledger.sqlite")
        held = Clocks(ledger)
        with held.timed(Clock(1, "rollout")), held.timed(Clock(1, "update", coming=True)) as update:
            giving = asyncio.ensure_future(held.give_way())
            for _ in range(10):
                await asyncio.sleep(clocks.GLANCE_S)
                assert not giving.done()
            with update.waiting(POOL, ""):
                await giving
            giving = asyncio.ensure_future(held.give_way())
            await asyncio.sleep(10 * clocks.GLANCE_S)
            assert not giving.done()
            update.coming = False
            await giving
        ledger.close()

    asyncio.run(main())
