"""The ledger: numbers that only grow, states that only move as declared, groups that are never lost."""

import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conf.errors import DataError, RunError
from data.accounts import RUNNING, SessionRow, StageRow, Wait
from data.ledger import TRANSITIONS, EngineRow, Ledger, RunInfo
from data.refs import PolicyRef
from data.run_lock import lock_run

ROOT = Path(__file__).parents[2]
CONTENT = "3f9a1c0b7d21" + "0" * 52
PATHS = {  # how a new version gets into each state
    "EXPORTING": [],
    "SEALED": ["SEALED"],
    "PUBLISHING": ["SEALED", "PUBLISHING"],
    "COMMITTED": ["SEALED", "PUBLISHING", "COMMITTED"],
    "RETIRED": ["SEALED", "PUBLISHING", "COMMITTED", "RETIRED"],
    "DELETED": ["SEALED", "PUBLISHING", "COMMITTED", "RETIRED", "DELETED"],
    "ABANDONED": ["ABANDONED"],
    "QUARANTINED": ["SEALED", "QUARANTINED"],
}


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.open_run("demo", "c0ffee", "seed: 0\n")
    yield ledger
    ledger.close()


def advance(ledger: Ledger, number: int, state: str) -> None:
    for step in PATHS[state]:
        ledger.set_version(number, step, CONTENT if step == "SEALED" else None)


def run_python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


# -- versions


def test_the_states_are_those_of_the_protocol() -> None:
    assert set(PATHS) == set(TRANSITIONS)
    edges = {(a, b) for a, following in TRANSITIONS.items() for b in following}
    on_the_way = {pair for path in PATHS.values() for pair in pairwise(["EXPORTING", *path])}
    assert edges == on_the_way | {("SEALED", "ABANDONED")} | {(s, "QUARANTINED") for s in ("PUBLISHING", "COMMITTED")}


@pytest.mark.parametrize("after", TRANSITIONS)
@pytest.mark.parametrize("before", TRANSITIONS)
def test_a_version_moves_only_along_the_protocol(ledger: Ledger, before: str, after: str) -> None:
    number = ledger.allocate_version("1/update", None, 1, "d")
    advance(ledger, number, before)
    content = CONTENT if after == "SEALED" else None
    if after == before or after in TRANSITIONS[before]:
        ledger.set_version(number, after, content)
        assert ledger.version(number).state == after
    else:
        with pytest.raises(DataError, match=f"version 0 is {before} and cannot become {after}"):
            ledger.set_version(number, after, content)
        assert ledger.version(number).state == before


def test_an_unknown_state_and_an_unknown_number_are_named(ledger: Ledger) -> None:
    ledger.allocate_version("a", None, 0, "")
    with pytest.raises(DataError, match="unknown state 'DONE', expected one of EXPORTING"):
        ledger.set_version(0, "DONE")
    with pytest.raises(DataError, match="version 7 is not in the ledger"):
        ledger.set_version(7, "ABANDONED")


def test_the_same_key_gets_the_same_number_until_it_is_abandoned(ledger: Ledger) -> None:
    assert ledger.allocate_version("start", None, 0, "") == 0
    assert ledger.allocate_version("i1", 0, 1, "d1") == 1
    assert ledger.allocate_version("i1", 0, 1, "d1") == 1
    ledger.set_version(1, "ABANDONED")
    assert ledger.allocate_version("i1", 0, 1, "d1") == 2
    assert ledger.allocate_version("i1", 0, 1, "d1") == 2
    ledger.set_version(2, "ABANDONED")
    assert ledger.allocate_version("i2", 0, 2, "d2") == 3
    assert [(v.number, v.state) for v in ledger.versions()] == [
        (0, "EXPORTING"),
        (1, "ABANDONED"),
        (2, "ABANDONED"),
        (3, "EXPORTING"),
    ]


def test_a_quarantined_content_is_sealed_again_under_a_new_number_which_stands_for_it(ledger: Ledger) -> None:
    first = ledger.allocate_version("i1", None, 1, "d1")
    advance(ledger, first, "PUBLISHING")
    damaged = ledger.version(first).ref
    assert ledger.live(damaged) == damaged
    ledger.set_version(first, "QUARANTINED")
    assert ledger.live(damaged) == damaged  # nothing stands for it yet
    second = ledger.allocate_version("i1", None, 1, "d1")
    assert second == first + 1
    assert ledger.live(damaged) == damaged  # without content yet
    ledger.set_version(second, "SEALED", "1" * 64)  # a replay that was not bit by bit
    assert ledger.live(damaged) == ledger.version(second).ref


def test_a_leased_version_is_not_deleted(ledger: Ledger, tmp_path: Path) -> None:
    number = ledger.allocate_version("start", None, 0, "")
    advance(ledger, number, "COMMITTED")
    ledger.lease(number, "evaluated", lasting=True)
    ledger.lease(number, "publish")
    ledger.set_version(number, "RETIRED")
    with pytest.raises(DataError, match="version 0 is leased by evaluated, publish and cannot be deleted"):
        ledger.set_version(number, "DELETED")
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    again.open_run("demo", "c0ffee", "seed: 0\n")  # whoever held the other is gone
    assert again.leases() == {0: ["evaluated"]}
    again.release(number, "evaluated")
    again.set_version(number, "DELETED")
    with pytest.raises(DataError, match="version 0 is DELETED and cannot be leased by late"):
        again.lease(number, "late")
    again.close()


def test_a_pool_is_committed_at_once_or_not_at_all(ledger: Ledger) -> None:
    number = ledger.allocate_version("start", None, 0, "")
    advance(ledger, number, "PUBLISHING")
    label = ledger.version(number).ref.label
    ready = EngineRow("engine0", "b0", "READY", label, "sum")
    out = EngineRow("engine1", "b1", "OUT", "", "")
    attempts = {"engine0": 1, "engine1": 2}
    stray = replace(ready, label="000009-0123456789ab")
    for rows, least, message in (
        ([ready, out], 2, "needs 2 engine.s. READY to be committed, got 1"),
        ([stray], 1, "committed with engines READY on it or OUT, got"),
        ([replace(ready, state="DIRTY")], 1, "committed with engines READY on it or OUT, got"),
    ):
        with pytest.raises(DataError, match=message):
            ledger.commit_version(number, rows, least, attempts)
        assert (ledger.engines(), ledger.committed(), ledger.journal_rows(number)) == ([], None, [])
    for _ in range(2):  # a repeat is the same
        ledger.commit_version(number, [ready, out], 1, attempts)
        assert ledger.engines() == [ready, out]
        assert ledger.committed() == ledger.version(number).ref
    assert [(j.engine, j.attempt, j.step) for j in ledger.journal_rows(number)][:2] == [
        ("engine0", 1, "Q11"),
        ("engine1", 2, "Q11"),
    ]
    assert ledger.next_attempt() == 3


def test_numbers_go_on_after_the_file_was_closed(ledger: Ledger, tmp_path: Path) -> None:
    ledger.allocate_version("start", None, 0, "")
    ledger.set_version(0, "ABANDONED")
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.allocate_version("start", None, 0, "") == 1
    again.close()


def test_a_key_whose_facts_changed_is_refused(ledger: Ledger) -> None:
    ledger.allocate_version("i1", None, 1, "d1")
    with pytest.raises(DataError, match=r"'i1' has .*\(None, 1, 'd1', None\), now asked for \(None, 1, 'd2', None\)"):
        ledger.allocate_version("i1", None, 1, "d2")


def test_an_unknown_parent_is_refused(ledger: Ledger) -> None:
    with pytest.raises(DataError, match="FOREIGN KEY"):
        ledger.allocate_version("i1", 5, 1, "d1")
    assert ledger.versions() == []


def test_a_label_means_one_content_for_ever(ledger: Ledger) -> None:
    ledger.allocate_version("start", None, 0, "")
    with pytest.raises(DataError, match="SEALED brings the content digest"):
        ledger.set_version(0, "SEALED")
    with pytest.raises(DataError, match="has no content yet: it is EXPORTING"):
        _ = ledger.version(0).ref
    ledger.set_version(0, "SEALED", CONTENT)
    ledger.set_version(0, "SEALED", CONTENT)
    with pytest.raises(DataError, match="for ever"):
        ledger.set_version(0, "SEALED", "f" * 64)
    ledger.set_version(0, "PUBLISHING")
    assert ledger.version(0).content == CONTENT


def test_committed_is_the_newest_committed_version(ledger: Ledger) -> None:
    assert ledger.committed() is None
    for number, state in enumerate(["RETIRED", "COMMITTED", "COMMITTED", "PUBLISHING", "SEALED", "ABANDONED"]):
        assert ledger.allocate_version(f"k{number}", None, number, f"d{number}") == number
        advance(ledger, number, state)
    assert ledger.committed() == PolicyRef("demo", 2, CONTENT, 2, "d2")
    assert ledger.committed().label == "000002-3f9a1c0b7d21"  # type: ignore[union-attr]


# -- opening


def info(ledger: Ledger) -> RunInfo:
    found = ledger.run_info()
    assert found is not None
    return found


def test_a_run_continues_under_its_own_settings_only(ledger: Ledger) -> None:
    created = info(ledger).created
    ledger.finish_run("failed")
    assert info(ledger).state == "failed"
    ledger.open_run("demo", "c0ffee", "seed: 0\n")
    assert (info(ledger).state, info(ledger).created) == ("running", created)
    with pytest.raises(RunError, match=r"other settings .*: -seed: 0; \+seed: 1;"):
        ledger.open_run("demo", "decaf", "seed: 1\n")
    with pytest.raises(RunError, match="belongs to run demo, not to other"):
        ledger.open_run("other", "c0ffee", "seed: 0\n")


def test_nothing_is_allocated_before_the_run_is_opened(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    with pytest.raises(RunError, match="open_run comes first"):
        ledger.allocate_version("start", None, 0, "")
    ledger.close()


def test_a_reader_works_beside_the_writer_and_cannot_write(ledger: Ledger, tmp_path: Path) -> None:
    ledger.accounts.record_metrics(1, {"reward/mean": 0.5})
    reader = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    assert reader.accounts.metrics() == {1: {"reward/mean": 0.5}}
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.accounts.record_metrics(1, {"reward/mean": 0.7})
    ledger.accounts.record_metrics(2, {"reward/mean": 0.6})
    assert reader.accounts.metrics()[2] == {"reward/mean": 0.6}
    reader.close()


def test_a_reader_works_after_the_writer_and_does_not_create(ledger: Ledger, tmp_path: Path) -> None:
    ledger.close()
    reader = Ledger(tmp_path / "ledger.sqlite", read_only=True)
    assert info(reader).run == "demo"
    reader.close()
    with pytest.raises(RunError, match="does not exist"):
        Ledger(tmp_path / "other.sqlite", read_only=True)


def test_a_file_of_another_schema_is_refused_and_the_lock_given_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    other = sqlite3.connect(path)
    other.executescript("CREATE TABLE run (x); PRAGMA user_version = 9;")
    other.close()
    with pytest.raises(DataError, match="has ledger schema 9, expected 4"):
        Ledger(path)
    with lock_run(tmp_path):
        path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
        with pytest.raises(DataError, match="is not a ledger"):
            Ledger(path)


def test_a_second_process_is_refused_and_told_the_holder(tmp_path: Path) -> None:
    code = """
        import sys; from pathlib import Path
        from conf.errors import RunError; from data.ledger import Ledger; from data.run_lock import lock_run
        for take in (lambda p: Ledger(p / "ledger.sqlite"), lambda p: lock_run(p).__enter__()):
            try:
                take(Path(sys.argv[1])); print("taken")
            except RunError as error:
                print(error)
    """
    with lock_run(tmp_path):
        held = Ledger(tmp_path / "ledger.sqlite")
        lines = run_python(code, tmp_path).stdout.splitlines()
        held.close()
    assert lines == [f"run {tmp_path.name} is in use by process {os.getpid()}; wait for it or stop it"] * 2
    assert run_python(code, tmp_path).stdout.splitlines()[0] == "taken"


def test_the_lock_is_not_taken_twice_by_one_process(tmp_path: Path) -> None:
    with lock_run(tmp_path), pytest.raises(RunError, match=f"process {os.getpid()}"), lock_run(tmp_path):
        pass
    with lock_run(tmp_path):
        pass


def test_kill_9_inside_a_transaction_leaves_the_last_whole_one_and_frees_the_run(tmp_path: Path) -> None:
    code = """
        import os, signal, sys; from pathlib import Path
        from data.ledger import Ledger
        ledger = Ledger(Path(sys.argv[1]) / "ledger.sqlite")
        ledger.open_run("demo", "c0ffee", "")
        ledger.groups.issue(1, [(f"g{i}", i) for i in range(50)])
        class Killer(dict):
            def items(self):
                for i in range(50):
                    yield f"g{i}", "trained"
                    if i == 30:
                        os.kill(os.getpid(), signal.SIGKILL)
        ledger.groups.settle(Killer())
    """
    assert run_python(code, tmp_path).returncode == -signal.SIGKILL
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.groups.counts() == {"issued": 50, "waiting": 50, "trained": 0}
    assert info(ledger).run == "demo"
    ledger.close()


# -- groups


def test_groups_are_counted_by_how_they_end(ledger: Ledger) -> None:
    ledger.groups.issue(1, [("g0", 10), ("g1", 11), ("g2", 12), ("g3", 13)])
    ledger.groups.settle({"g0": "trained", "g1": "dropped/reward_failed", "g2": "dropped/reward_failed"})
    assert ledger.groups.counts() == {"issued": 4, "waiting": 1, "trained": 1, "dropped/reward_failed": 2}


def test_issuing_and_settling_again_changes_nothing_and_otherwise_is_refused(ledger: Ledger) -> None:
    for _ in range(2):
        ledger.groups.issue(1, [("g0", 10), ("g1", 11)])
        ledger.groups.settle({"g0": "trained"})
    assert ledger.groups.counts() == {"issued": 2, "waiting": 1, "trained": 1}
    with pytest.raises(DataError, match=r"group g0 was issued for .*\(1, 10\), now for \(2, 10\)"):
        ledger.groups.issue(2, [("g5", 5), ("g0", 10)])
    with pytest.raises(DataError, match="group g0 is trained already and cannot become dropped/late"):
        ledger.groups.settle({"g1": "trained", "g0": "dropped/late"})
    with pytest.raises(DataError, match="group g9 was never issued"):
        ledger.groups.settle({"g1": "trained", "g9": "trained"})
    for outcome in ("lost", "dropped", "dropped/", "waiting"):
        with pytest.raises(DataError):
            ledger.groups.settle({"g1": outcome})
    assert ledger.groups.counts() == {"issued": 2, "waiting": 1, "trained": 1}  # all of a call or nothing


OUTCOMES = st.sampled_from(["trained", "dropped/late", "dropped/reward_failed"])
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), st.lists(st.integers(0, 9), max_size=4)),
        st.tuples(st.just("settle"), st.dictionaries(st.integers(0, 11), OUTCOMES, max_size=4)),
    ),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(calls=CALLS)
def test_issued_is_waiting_plus_trained_plus_dropped_whatever_is_called(calls: list, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    ledger = Ledger(tmp_path_factory.mktemp("run") / "ledger.sqlite")
    model: dict[int, str] = {}
    try:
        for call, values in calls:
            if call == "issue":
                ledger.groups.issue(1, [(f"g{i}", i) for i in values])
                model |= {i: "waiting" for i in values if i not in model}
            elif all(model.get(i) in ("waiting", outcome) for i, outcome in values.items()):
                ledger.groups.settle({f"g{i}": outcome for i, outcome in values.items()})
                model |= values
            else:
                with pytest.raises(DataError):
                    ledger.groups.settle({f"g{i}": outcome for i, outcome in values.items()})
            counts = ledger.groups.counts()
            assert counts.pop("issued") == len(model) == sum(counts.values())
            assert {k: n for k, n in counts.items() if n} == {
                o: list(model.values()).count(o) for o in set(model.values())
            }
    finally:
        ledger.close()


# -- journal, engines, stages, metrics


def test_the_journal_keeps_every_step_in_order(ledger: Ledger) -> None:
    ledger.allocate_version("start", None, 0, "")
    assert ledger.next_attempt() == 1
    for step in ("Q0", "Q4", "Q0"):
        ledger.journal(0, 1, "engine-0", step, "ok")
    assert (ledger.next_attempt(), ledger.updates_sent("engine-0"), ledger.updates_sent("engine-1")) == (2, [0], [])
    assert [(j.attempt, j.engine, j.step, j.detail) for j in ledger.journal_rows(0)] == [
        (1, "engine-0", "Q0", "ok"),
        (1, "engine-0", "Q4", "ok"),
        (1, "engine-0", "Q0", "ok"),
    ]
    with pytest.raises(DataError, match="FOREIGN KEY"):
        ledger.journal(3, 1, "engine-0", "Q0", "")


def test_an_engine_is_what_it_was_last_set_to(ledger: Ledger) -> None:
    ledger.set_engine("engine-1", "b1", "COLD", "", "")
    ledger.set_engine("engine-0", "b0", "COLD", "", "")
    ledger.set_engine("engine-1", "b1", "READY", "000000-3f9a1c0b7d21", "sum")
    assert [(e.name, e.boot, e.state, e.label, e.checksum) for e in ledger.engines()] == [
        ("engine-0", "b0", "COLD", "", ""),
        ("engine-1", "b1", "READY", "000000-3f9a1c0b7d21", "sum"),
    ]


def test_each_attempt_of_a_stage_is_one_row(ledger: Ledger) -> None:
    waits = (Wait("upstream", 20.0, 20.125, ("reward", "reference")), Wait("pool", 20.25, 20.5), Wait("pool", 21, 22))
    failed = StageRow(1, "rollout", "failed", 10.0, 12.5, (Wait("pool", 10.0, 10.5),), "engines", "rollout")
    completed = StageRow(1, "rollout", "completed", 20.0, 23.0, waits, "engines", "rollout")
    spent = {"response_tokens": {"g0": 7, "g1": 5}, "reward_calls": {"g0": 2}}
    later = StageRow(2, "publish", "completed", 30.0, 31.0, (), "engines", "rollout", "publish", spent)
    ledger.accounts.record_stage(StageRow(1, "rollout", RUNNING, 10.0, 11.0))
    for row in (failed, completed, later):
        ledger.accounts.record_stage(row)
    assert ledger.accounts.stages(1) == [failed, completed]
    assert ledger.accounts.stages() == [failed, completed, later]
    assert ledger.accounts.stages(since=12.5) == [completed, later]
    assert completed.waits == {"upstream": 0.125, "pool": 1.25}


def test_an_attempt_that_a_kill_cut_off_has_failed_where_it_was_last_known(ledger: Ledger) -> None:
    rollout = StageRow(1, "rollout", RUNNING, 10.0, 12.0, spent={"response_tokens": {"g0": 7}})
    reward = StageRow(1, "reward", RUNNING, 10.0, 12.0, (Wait("upstream", 10.0, 12.0, ("rollout",)),))
    done = StageRow(1, "prompts", "completed", 9.0, 10.0)
    with ledger.accounts.session(8.0):
        ledger.accounts.record_stage(done)
        ledger.accounts.record_running([rollout, reward], 12.0)
        rollout, reward = (replace(row, ended=14.0) for row in (rollout, reward))
        ledger.accounts.record_running([rollout, reward], 14.0)
        assert ledger.accounts.sessions() == [SessionRow(8.0, seen=14.0)]
        assert ledger.accounts.stages() == [done, reward, rollout]
    ledger.open_run("demo", "c0ffee", "seed: 0\n")
    assert ledger.accounts.stages() == [done, replace(reward, state="failed"), replace(rollout, state="failed")]


def test_a_session_is_what_one_process_did_with_the_run(ledger: Ledger) -> None:
    with ledger.accounts.session(10.0):
        ledger.accounts.session_ready(12.0)
        ledger.accounts.record_metrics(1, {"x": 1.0}, accounted=20.0)
        ledger.accounts.record_metrics(2, {"x": 1.0}, accounted=30.0)
        ledger.accounts.record_metrics(2, {"y": 1.0})
    with ledger.accounts.session(1.0):  # the clock was set back: still the newest
        assert ledger.accounts.sessions()[1] == SessionRow(1.0)
    first, second = ledger.accounts.sessions()
    assert (first.started, first.ready, first.accounted) == (10.0, 12.0, 30.0)
    assert first.ended is not None
    assert second.ended is not None
    assert second.ready is None


def test_metrics_come_back_as_recorded_also_those_that_are_not_numbers(ledger: Ledger) -> None:
    ledger.accounts.record_metrics(1, {"reward/mean": 0.1, "actor/lr": float("nan"), "actor/approx_kl": float("inf")})
    ledger.accounts.record_metrics(1, {"reward/mean": 0.2})
    found = ledger.accounts.metrics()[1]
    assert found["reward/mean"] == 0.2
    assert found["actor/approx_kl"] == float("inf")
    assert found["actor/lr"] != found["actor/lr"]


# -- lineage and roll-back


def test_a_roll_back_has_the_lineage_of_its_version_and_ends_what_has_begun(ledger: Ledger) -> None:
    start = ledger.allocate_version("000000/start", None, 0, "")
    advance(ledger, start, "COMMITTED")
    for iteration in (1, 2, 3):
        number = ledger.allocate_version(f"{iteration:06d}/update", iteration - 1, iteration, f"d{iteration}")
        advance(ledger, number, "COMMITTED")
    ledger.groups.issue(4, [("i4-g0", 7), ("i4-g1", 8)])
    assert [row.iteration for row in ledger.lineage(3)] == [1, 2, 3]

    with pytest.raises(DataError, match="version 3 is the newest"):
        ledger.roll_back(3)
    back = ledger.roll_back(1)
    assert (back.number, back.state, back.iteration, back.rollback_of) == (4, "EXPORTING", 4, 1)
    assert (back.optimizer_step, back.dataset) == (1, "d1")
    assert [row.iteration for row in ledger.lineage(4)] == [1]
    assert ledger.groups.counts() == {"issued": 2, "waiting": 0, "trained": 0, "dropped/rolled_back": 2}
    with pytest.raises(DataError, match="version 4 is EXPORTING: only a version that was committed"):
        ledger.roll_back(4)

    again = ledger.allocate_version(back.key, back.parent, 1, "d1", rollback_of=1)
    assert again == 4  # who seals it finds its number
    advance(ledger, 4, "COMMITTED")
    after = ledger.allocate_version("000005/update", 4, 2, "d5")
    assert [row.iteration for row in ledger.lineage(after)] == [1, 5]
    advance(ledger, after, "COMMITTED")
    assert ledger.roll_back(4).rollback_of == 4
    assert [row.iteration for row in ledger.lineage(6)] == [1]


def test_lag_counts_updates_and_a_content_that_was_sealed_again_once(ledger: Ledger) -> None:
    advance(ledger, ledger.allocate_version("000000/start", None, 0, ""), "COMMITTED")
    for iteration in (1, 2):
        advance(ledger, ledger.allocate_version(f"{iteration:06d}/update", iteration - 1, iteration, ""), "COMMITTED")
    ledger.set_version(2, "QUARANTINED")
    advance(ledger, ledger.allocate_version("000002/update", 1, 2, ""), "COMMITTED")  # number 3, the same content
    advance(ledger, ledger.allocate_version("000003/update", 3, 3, ""), "SEALED")  # not published
    between = {(a, b): ledger.updates_between(a, b) for a in range(5) for b in range(a, 5)}
    assert between == {
        (0, 0): 0, (0, 1): 1, (0, 2): 2, (0, 3): 2, (0, 4): 3,
        (1, 1): 0, (1, 2): 1, (1, 3): 1, (1, 4): 2,
        (2, 2): 0, (2, 3): 0, (2, 4): 1,
        (3, 3): 0, (3, 4): 1,
        (4, 4): 0,
    }  # fmt: skip
    assert ledger.updates_between(4, 2) == -2


def test_a_roll_back_gives_up_what_was_on_its_way_and_can_be_taken_back_before_it_starts(ledger: Ledger) -> None:
    for iteration, state in enumerate(("COMMITTED", "COMMITTED", "PUBLISHING")):
        number = ledger.allocate_version(f"{iteration:06d}/update", iteration - 1 if iteration else None, iteration, "")
        advance(ledger, number, state)
    ledger.allocate_version("000003/update", 2, 3, "")
    assert ledger.roll_back(0).number == 4
    assert ledger.roll_back(1).number == 5  # it was the wrong one
    assert [row.state for row in ledger.versions()] == [
        "COMMITTED",
        "COMMITTED",
        "QUARANTINED",
        "ABANDONED",
        "ABANDONED",
        "EXPORTING",
    ]


def test_a_run_that_cannot_be_written_is_named() -> None:
    with pytest.raises(RunError, match=r"/proc/\d+ must be a folder that can be written, but is not: "):
        Ledger(Path("/proc/self/ledger.sqlite"))  # read-only, also for root
