"""What is kept and what goes: two passes, and never anything that is leased, referenced or among the newest."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from conf.errors import DataError
from data import leftovers, retention
from data.fsck import fsck
from data.ledger import Ledger
from data.leftovers import clean_up, unreferenced
from data.objects import Objects
from data.retention import collect, retire
from data.run_lock import lock_run
from data.store import Facts, Store
from tests.crash_points import RETENTION
from tests.data.rollouts import rewards, rollout

KEEP = 2
CONTENT = "3f9a1c0b7d21" + "0" * 52
PATHS = {
    "EXPORTING": [],
    "SEALED": ["SEALED"],
    "PUBLISHING": ["SEALED", "PUBLISHING"],
    "COMMITTED": ["SEALED", "PUBLISHING", "COMMITTED"],
    "QUARANTINED": ["SEALED", "QUARANTINED"],
    "ABANDONED": ["SEALED", "ABANDONED"],
}


class Run:
    """A ledger and folders under its labels; what is in them does not matter here."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.weights = folder, folder / "weights"
        self.weights.mkdir(parents=True)
        self.ledger = Ledger(folder / "ledger.sqlite")
        self.ledger._db.execute("PRAGMA synchronous = OFF")  # no power cut here, and many runs
        self.reopen()

    def reopen(self) -> None:
        self.ledger.open_run(self.folder.name, "", "")

    def add(self, state: str = "COMMITTED") -> int:
        number = self.ledger.allocate_version(f"k{len(self.ledger.versions())}", None, 0, "")
        path = self.weights / f"{number:06d}-{CONTENT[:12]}"
        path.mkdir()
        (path / "x").write_bytes(b"123")
        path.chmod(0o555)
        for step in PATHS[state]:
            self.ledger.set_version(number, step, CONTENT if step == "SEALED" else None)
        return number

    def retire(self) -> None:
        for folder in retire(self.ledger, self.weights, KEEP):
            leftovers._delete(folder)()

    def collect(self) -> int:
        going = [*collect(self.folder, self.ledger, KEEP, 1), *unreferenced(self.folder, self.ledger)]
        for removal in going:
            removal.do()
            retention.crash_point("gc/removed")
        return sum(removal.bytes for removal in going)

    def clean_up(self) -> str:
        return clean_up(self.folder, self.ledger)

    def states(self) -> list[str]:
        return [row.state for row in self.ledger.versions()]

    def folders(self) -> set[int]:
        return {int(path.name[:6]) for path in self.weights.glob("[0-9]*")}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "r")
    yield run
    run.ledger.close()


# -- versions


@pytest.mark.parametrize("how", ["retire", "collect"])
def test_an_old_version_is_retired_in_one_pass_and_deleted_in_a_later_one(run: Run, how: str) -> None:
    for _ in range(4):
        run.add()
    passed: Callable[[], object] = getattr(run, how)
    passed()
    assert run.states() == ["RETIRED", "RETIRED", "COMMITTED", "COMMITTED"]
    assert run.folders() == {0, 1, 2, 3}
    run.add()
    passed()
    assert run.states() == ["DELETED", "DELETED", "RETIRED", "COMMITTED", "COMMITTED"]
    assert run.folders() == {2, 3, 4}
    assert sorted(path.name for path in run.weights.iterdir()) == sorted(
        f"{number:06d}-{CONTENT[:12]}" for number in (2, 3, 4)
    )


@pytest.mark.parametrize("lasting", [True, False])
def test_a_leased_version_stays_and_goes_in_two_passes_after_its_release(run: Run, lasting: bool) -> None:
    for _ in range(4):
        run.add()
    run.ledger.lease(0, "evaluated", lasting=lasting)
    for _ in range(3):
        run.retire()
    assert run.states() == ["COMMITTED", "DELETED", "COMMITTED", "COMMITTED"]
    run.ledger.release(0, "evaluated")
    run.retire()
    assert run.states()[0] == "RETIRED"
    run.retire()
    assert run.states()[0] == "DELETED"


def test_what_is_exported_sealed_or_published_now_is_never_touched(run: Run) -> None:
    for state in ("EXPORTING", "SEALED", "PUBLISHING", "COMMITTED", "COMMITTED", "COMMITTED"):
        run.add(state)
    for _ in range(3):
        run.collect()
    assert run.states() == ["EXPORTING", "SEALED", "PUBLISHING", "DELETED", "COMMITTED", "COMMITTED"]
    assert run.folders() == {0, 1, 2, 4, 5}


def test_what_a_roll_back_goes_back_to_stays_until_the_roll_back_is_sealed(run: Run) -> None:
    for _ in range(4):
        run.add()
    run.retire()
    back = run.ledger.roll_back(0)
    for _ in range(2):
        run.collect()
    assert run.folders() == {0, 2, 3}
    run.ledger.set_version(back.number, "SEALED", CONTENT)
    run.collect()
    assert run.folders() == {2, 3}


def test_gc_deletes_what_was_given_up_and_says_how_many_bytes(run: Run) -> None:
    for state in ("QUARANTINED", "ABANDONED", "QUARANTINED", "COMMITTED"):
        run.add(state)
    run.ledger.lease(2, "somebody")
    assert run.collect() == 2 * 3
    assert run.folders() == {2, 3}
    assert run.collect() == 0


def test_gc_keeps_the_newest_checkpoints_and_removes_what_is_unfinished(run: Run) -> None:
    for name in ("000001", "000002", "000010", ".000011.partial", ".000000.deleting"):
        (run.folder / "checkpoints" / name).mkdir(parents=True)
        (run.folder / "checkpoints" / name / "x").write_bytes(b"12345")
    assert run.collect() == 4 * 5
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["000010"]


def test_planning_changes_nothing(folder: Path) -> None:
    def state() -> list[tuple[str, int]]:
        return sorted((str(path), path.lstat().st_mtime_ns) for path in folder.rglob("*") if "ledger" not in path.name)

    with lock_run(folder):
        ledger = Ledger(folder / "ledger.sqlite")
        before = state()
        going = [*collect(folder, ledger, 2, 1), *unreferenced(folder, ledger)]
        assert going[0].what.startswith("weights/000000-")
        assert len(going) == 4  # two versions to retire, two checkpoints
        assert state() == before
        assert [row.state for row in ledger.versions()] == ["COMMITTED"] * 4
        ledger.close()


# -- any history, with crashes


class Crash(BaseException):
    """What no `except` may swallow."""


@contextmanager
def crash_after(points: int | None) -> Iterator[None]:
    """Die at the n-th crash point of a pass; None: never."""
    count = 0

    def crash_point(name: str) -> None:
        nonlocal count
        count += 1
        if count == points:
            raise Crash(name)

    with pytest.MonkeyPatch.context() as patch, suppress(Crash):
        patch.setattr(retention, "crash_point", crash_point)
        patch.setattr(leftovers, "crash_point", crash_point)
        yield


@settings(max_examples=150, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_history_of_passes_leases_and_crashes_loses_what_is_in_use(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = Run(tmp_path_factory.mktemp("run") / "r")
    try:
        for _ in range(data.draw(st.integers(1, 25))):
            _step(run, data)
        for row in run.ledger.versions():
            run.ledger.release(row.number, "a")
        for _ in range(2):  # once nobody crashes and nobody leases, everything else goes
            run.collect()
        newest = [row.number for row in run.ledger.versions() if row.state == "COMMITTED"]
        assert len(newest) <= KEEP
        waiting = {r.number for r in run.ledger.versions() if r.state in ("EXPORTING", "SEALED", "PUBLISHING")}
        assert run.folders() == waiting | set(newest)
        assert not [path for path in run.weights.iterdir() if path.name.startswith(".")]
    finally:
        run.ledger.close()


def _step(run: Run, data: st.DataObject) -> None:
    before = {row.number: row.state for row in run.ledger.versions()}
    leased = set(run.ledger.leases()) & run.folders()
    what = data.draw(st.sampled_from(["add", "lease", "release", "reopen", "retire", "collect", "clean_up"]))
    if what == "add":
        run.add(data.draw(st.sampled_from([*PATHS, *["COMMITTED"] * 4])))
    elif what in ("lease", "release") and before:
        number = data.draw(st.sampled_from(sorted(before)))
        if what == "release":
            run.ledger.release(number, "a")
        elif before[number] in ("RETIRED", "DELETED"):
            with pytest.raises(DataError, match="cannot be leased"):
                run.ledger.lease(number, "a")
        else:
            run.ledger.lease(number, "a", lasting=data.draw(st.booleans()))
    elif what == "reopen":
        run.reopen()
    elif what not in ("lease", "release"):
        with crash_after(data.draw(st.none() | st.integers(1, 6))):
            getattr(run, what)()
    _check(run, before, leased if what in ("retire", "collect", "clean_up") else set())


def _check(run: Run, before: dict[int, str], leased: set[int]) -> None:
    after = {row.number: row.state for row in run.ledger.versions()}
    folders = run.folders()
    committed = [number for number, state in after.items() if state == "COMMITTED"]
    for number, state in after.items():
        old = before.get(number, state)
        if state in ("EXPORTING", "SEALED", "PUBLISHING", "COMMITTED"):
            assert number in folders
        if number in leased:
            assert state == old
            assert number in folders
        if state == "DELETED":
            assert old in ("RETIRED", "DELETED")  # never in the pass that retired it
            assert number not in folders
        if state == "RETIRED" and old == "COMMITTED":
            assert number in folders
            assert len([other for other in committed if other > number]) >= KEEP


# -- data


def orphan(folder: Path, content: bytes = b"x") -> Path:
    digest, _ = Objects(folder / "data").put(".arrow", lambda path: path.write_bytes(content) and None)
    return folder / "data" / "objects" / f"{digest}.arrow"


def sweep(folder: Path, ledger: Ledger) -> None:
    for removal in unreferenced(folder, ledger):
        removal.do()


def test_an_object_that_nothing_refers_to_goes_in_the_second_pass(run: Run) -> None:
    store = Store(run.folder, "r")
    rows = store.commit_rows(1, "rollout", rollout(), key="sample_id", facts=Facts())
    lost = orphan(run.folder)
    sweep(run.folder, run.ledger)
    assert lost.exists()
    sweep(run.folder, run.ledger)
    assert not lost.exists()
    assert store.read(rows).equals(rollout())
    sweep(run.folder, run.ledger)
    assert unreferenced(run.folder, run.ledger) == []


def test_an_object_that_is_referred_to_after_the_first_pass_stays(run: Run) -> None:
    store = Store(run.folder, "r")
    rows = store.commit_rows(1, "rollout", rollout(), key="sample_id", facts=Facts())
    a = store.commit_columns(1, "a", rows, rewards([1.0] * 4), facts=Facts())
    b = store.commit_selection(1, "b", rows, [0], None, facts=Facts())
    del b
    joined = store.join([rows, a])
    sweep(run.folder, run.ledger)
    kept = store.commit_selection(1, "kept", joined, [0, 1], None, facts=Facts())
    for _ in range(3):
        sweep(run.folder, run.ledger)
    assert store.read(joined).num_rows == 4
    assert store.read(kept).num_rows == 2


def test_a_join_that_only_the_ledger_names_stays(run: Run) -> None:
    store = Store(run.folder, "r")
    rows = store.commit_rows(1, "rollout", rollout(), key="sample_id", facts=Facts())
    joined = store.join([rows, store.commit_columns(1, "a", rows, rewards([1.0] * 4), facts=Facts())])
    run.ledger.allocate_version("000001/update", None, 1, joined.id)
    for _ in range(3):
        sweep(run.folder, run.ledger)
    assert store.read(joined).num_rows == 4


def test_where_a_manifest_is_damaged_no_object_goes(folder: Path) -> None:
    lost = orphan(folder)
    reference = sorted(folder.glob("data/stages/*/rollout.json"))[0]
    reference.chmod(0o644)
    reference.write_bytes(reference.read_bytes() + b" ")
    with lock_run(folder):
        ledger = Ledger(folder / "ledger.sqlite")
        with pytest.raises(DataError, match=r"rollout\.json has the SHA-256"):
            unreferenced(folder, ledger)
        (folder / "config.tmp").write_text("x")
        for _ in range(2):
            line = clean_up(folder, ledger)
            assert "unreferenced data was not looked for: " in line
            assert f"ratchet fsck {folder}" in line
        ledger.close()
    assert lost.exists()
    assert not (folder / "config.tmp").exists()


@settings(max_examples=40, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(st.data())
def test_no_order_of_commits_sweeps_and_crashes_loses_a_dataset(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    run = Run(tmp_path_factory.mktemp("run") / "r")
    store, committed = Store(run.folder, "r"), []
    try:
        for step in range(1, data.draw(st.integers(2, 8))):
            match data.draw(st.sampled_from(["rows", "columns", "join", "orphan", "sweep", "sweep"])):
                case "columns" if committed:
                    rows = data.draw(st.sampled_from(committed))
                    if "rewards" not in store.manifest(rows).columns:
                        committed.append(store.commit_columns(step, "c", rows, rewards([1.0] * 4), facts=Facts()))
                case "join" if committed:
                    store.join(data.draw(st.lists(st.sampled_from(committed[:1]), min_size=1)))
                case "orphan":
                    orphan(run.folder, bytes([step]))
                case "sweep":
                    with crash_after(data.draw(st.none() | st.integers(1, 3))):
                        run.clean_up()
                case _:
                    table = rollout({"response_text": [f"{step}"] * 4})
                    committed.append(store.commit_rows(step, "r", table, key="sample_id", facts=Facts()))
            for ref in committed:
                assert Store(run.folder, "r").read(ref).num_rows == 4
        for _ in range(2):
            run.clean_up()
        assert {path.name for path in run.folder.glob("data/objects/*")} == store.referenced()
    finally:
        run.ledger.close()


# -- what a kill leaves


def test_at_the_start_everything_unfinished_goes_and_nothing_else(folder: Path) -> None:
    before = sorted(path for path in folder.rglob("*"))
    left = ["data/staging/a.arrow", "weights/staging/000007/model", "weights/staging/restored/x", "metrics.tmp"]
    left += ["weights/.deleting-000000-0123456789ab/model", "checkpoints/.000009.partial/state/x", "config.tmp"]
    for name in left:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"1234")
    (folder / "weights/.deleting-000000-0123456789ab").chmod(0o555)
    outside = folder.parent / "precious"
    outside.mkdir()
    (outside / "x").write_bytes(b"mine")
    (folder / "data/staging/link").symlink_to(outside)
    with lock_run(folder):
        ledger = Ledger(folder / "ledger.sqlite")
        line = clean_up(folder, ledger)
        assert line.startswith("removed what a killed process left (")
        assert clean_up(folder, ledger) == ""
        ledger.close()
    assert sorted(path for path in folder.rglob("*") if "ledger.sqlite-" not in path.name) == before
    assert (outside / "x").read_bytes() == b"mine"
    assert fsck(folder) == []


def test_a_staging_folder_that_leads_out_of_the_run_is_not_emptied(folder: Path) -> None:
    outside = folder.parent / "precious"
    outside.mkdir()
    (outside / "x").write_bytes(b"mine")
    (folder / "data/staging").rmdir()
    (folder / "data/staging").symlink_to(outside)
    with lock_run(folder):
        ledger = Ledger(folder / "ledger.sqlite")
        clean_up(folder, ledger)
        ledger.close()
    assert (outside / "x").exists()


KILLED = """
import sys
from pathlib import Path
from data.ledger import Ledger
from data.retention import collect
from data.leftovers import unreferenced
folder = Path(sys.argv[1])
ledger = Ledger(folder / "ledger.sqlite")
for removal in [*collect(folder, ledger, 2, 1), *unreferenced(folder, ledger)]:
    removal.do()
"""


@pytest.mark.parametrize("point", RETENTION)
def test_a_pass_that_is_killed_leaves_a_run_without_problems_and_the_next_one_ends_it(folder: Path, point: str) -> None:
    def collect_once(point: str) -> int:
        environment = {"RATCHET_CRASH_POINT": point, "PYTHONPATH": str(Path(__file__).parents[2])}
        return subprocess.run([sys.executable, "-c", KILLED, str(folder)], env=environment, check=False).returncode

    if point != "retire/checkpoint":
        assert collect_once("") == 0
    assert collect_once(point) == -9
    assert not [finding for finding in fsck(folder) if finding.problem]
    for _ in range(2):
        assert collect_once("") == 0
    assert fsck(folder) == []
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    assert [row.state for row in ledger.versions()] == ["DELETED", "DELETED", "COMMITTED", "COMMITTED"]
    ledger.close()
    assert len(list((folder / "weights").glob("*"))) == 3  # two packages and staging
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["000003"]


def test_a_version_that_was_overtaken_unpublished_is_abandoned_and_goes_unless_it_is_leased(tmp_path: Path) -> None:
    run = Run(tmp_path / "demo")
    start, skipped, leased, newest, ahead = [
        run.add(s) for s in ("COMMITTED", "SEALED", "SEALED", "COMMITTED", "SEALED")
    ]
    run.ledger.lease(leased, "somebody")
    run.retire()
    states = {row.number: row.state for row in run.ledger.versions()}
    assert states == {start: "COMMITTED", skipped: "ABANDONED", leased: "SEALED", newest: "COMMITTED", ahead: "SEALED"}
    assert sorted(int(path.name[:6]) for path in run.weights.iterdir()) == [start, leased, newest, ahead]
    run.ledger.close()
