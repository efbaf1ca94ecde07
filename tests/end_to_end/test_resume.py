"""Killed with `kill -9` inside every stage and between them, the same command continues as if nothing had happened."""

import asyncio
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prefect import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterParentFlowRunId

from data.crash import ARMED
from data.ledger import Ledger
from data.refs import DatasetRef
from data.store import Store
from flows.pool_time import run_seconds, session_ends
from tests.crash_points import RUN
from tests.end_to_end.conftest import Finished
from tests.end_to_end.launches import RATCHET, Place, launched, ratchet, stage_committed
from tests.end_to_end.test_run import NODES

pytestmark = pytest.mark.timeout(3600)


@dataclass
class Chain:
    """What one run left, killed at every point and then let through."""

    folder: Path
    outputs: list[str] = field(default_factory=list)
    committed: list[dict[str, str]] = field(default_factory=list)  # after each launch: stage reference -> its text
    seconds: list[float] = field(default_factory=list)


@pytest.fixture(scope="module")
def chain(external: Place) -> Chain:
    chain = Chain(external.folder / "runs" / "killed")
    for point in (*RUN, "none"):
        command = ("-c", RATCHET, "run", "small.yaml", "update.checkpoint_every=2", "--run", "killed")
        with launched(external, *command, **{ARMED: point}) as launch:
            code = launch.wait()
            assert code == (0 if point == "none" else -signal.SIGKILL), f"{point}: {launch.output}"
            chain.seconds.append(launch.until_gone())
            chain.outputs.append(launch.output)
        stages = sorted((chain.folder / "data" / "stages").rglob("*.json"))
        chain.committed.append({f"{path.parent.name}/{path.stem}": path.read_text() for path in stages})
    return chain


@pytest.fixture
def ledger(chain: Chain) -> Iterator[Ledger]:
    opened = Ledger(chain.folder / "ledger.sqlite", read_only=True)
    yield opened
    opened.close()


def test_it_was_killed_at_every_point_and_then_came_to_its_end(chain: Chain) -> None:
    assert len(chain.outputs) == len(RUN) + 1
    assert "where the time went" in chain.outputs[-1]
    assert not [text for text in chain.outputs[:-1] if "where the time went" in text]
    assert max(chain.seconds) < 15  # from each kill until the last process was gone


def test_what_was_committed_before_a_kill_is_what_stands_at_the_end(chain: Chain) -> None:
    for before, after in zip(chain.committed, chain.committed[1:], strict=False):
        assert before.items() <= after.items()
    assert set(chain.committed[-1]) == {f"{iteration:06d}/{node}" for iteration in (1, 2) for node in NODES}
    assert [len(stages) for stages in chain.committed].count(0) == 2  # the kills before the first commit


def test_no_stage_was_completed_twice(ledger: Ledger) -> None:
    completed = Counter(
        (row.iteration, row.node) for row in ledger.accounts.stages() if row.iteration and row.state == "completed"
    )
    assert set(completed.values()) == {1}
    assert completed.total() >= 2 * len(NODES) - 3  # a kill between commit and ledger leaves no row


def test_each_start_is_a_session_and_the_seconds_of_all_of_them_have_causes(chain: Chain, ledger: Ledger) -> None:
    sessions, rows = ledger.accounts.sessions(), ledger.accounts.stages()
    assert [session.ended is not None for session in sessions] == [False] * len(RUN) + [True]
    wall = sum(end - session.started for session, end in zip(sessions, session_ends(sessions, rows), strict=True))
    for seconds in run_seconds(sessions, rows, {row.pool for row in rows}).values():
        assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
    known = sum((s.accounted or 0.0) > 0 for s in sessions)
    assert known >= 2  # each iteration was accounted for in one of them
    assert "restore" in {row.node for row in rows if row.iteration == 0}


def test_versions_are_those_of_the_undisturbed_run_each_update_applied_once(ledger: Ledger, finished: Finished) -> None:
    def sequence(opened: Ledger) -> list[tuple[object, ...]]:
        return [(v.number, v.key, v.state, v.parent, v.optimizer_step) for v in opened.versions()]

    undisturbed = Ledger(finished.folder / "ledger.sqlite", read_only=True)
    try:
        assert sequence(ledger) == sequence(undisturbed)
        assert ledger.versions()[0].content == undisturbed.versions()[0].content
    finally:
        undisturbed.close()
    assert len({version.content for version in ledger.versions()}) == 3


def test_the_trainer_comes_back_to_the_sealed_weights_bit_by_bit(chain: Chain) -> None:
    """By replay from the start, and from a checkpoint, which is written while the version is published."""
    restarts = dict(zip((*RUN, "none")[1:], chain.outputs[1:], strict=True))
    proven = {point: text.partition("the trainer is at ")[2][:6] for point, text in restarts.items()}
    assert proven["1/update/trained"] == "000000"
    assert proven["publish/1/Q6"] == "000000"
    assert proven["publish/1/committed"] == proven["1/iteration/ended"] == "000001"
    assert proven["2/update/computed"] == "000001"
    assert proven["2/publish/committed"] == "000001"
    assert proven["2/evaluate/begun"] == proven["none"] == "000002"
    assert not [text for text in chain.outputs if "warning" in text]
    assert "replaying the update of iteration 1" in restarts["1/iteration/ended"]
    assert "replaying the update of iteration 1" in restarts["2/publish/committed"]
    assert "replaying" not in restarts["none"]  # the checkpoint has both


def test_prompts_are_those_of_the_undisturbed_run_none_skipped_or_repeated(chain: Chain, finished: Finished) -> None:
    def drawn(folder: Path) -> list[list[int]]:
        store = Store(folder, folder.name)
        refs = [store.find(iteration, "prompts") for iteration in (1, 2)]
        return [store.read(ref)["prompt_index"].to_pylist() for ref in refs if isinstance(ref, DatasetRef)]

    assert drawn(chain.folder) == drawn(finished.folder)


def test_every_group_is_issued_once_and_accounted_for(ledger: Ledger) -> None:
    counts = ledger.groups.counts()
    assert counts["issued"] == 8
    assert counts["waiting"] == 0
    assert counts["trained"] + counts.get("dropped/short", 0) == 8


def test_fsck_finds_nothing_wrong_with_it(chain: Chain, external: Place) -> None:
    looked = ratchet(external, "fsck", str(chain.folder))
    assert (looked.returncode, looked.stdout) == (0, f"{chain.folder}: no problem(s), 0 note(s)\n"), looked.stderr


def test_prefect_shows_the_finished_stages_as_cached(chain: Chain) -> None:
    async def last_iteration() -> dict[str, str]:
        async with get_client() as client:
            flows = [r for r in await client.read_flow_runs() if r.parameters.get("run") == "killed"]
            last = next(r for r in flows if r.state_name == "Completed")
            parent = FlowRunFilter(parent_flow_run_id=FlowRunFilterParentFlowRunId(any_=[last.id]))
            for _ in range(100):
                (iteration,) = await client.read_flow_runs(flow_run_filter=parent)
                own = FlowRunFilter(id=FlowRunFilterId(any_=[iteration.id]))
                found = {run.name: str(run.state_name) for run in await client.read_task_runs(flow_run_filter=own)}
                if set(found) >= {*NODES} and "Running" not in found.values():
                    break
                await asyncio.sleep(0.2)
            return found

    assert asyncio.run(last_iteration()) == dict.fromkeys(NODES, "Cached")


def test_killed_in_mid_rollout_it_leaves_no_process_and_continues_with_a_new_engine(managed: Place) -> None:
    folder = managed.folder / "runs" / "struck"
    command = ("-c", RATCHET, "run", "slow.yaml", "--run", "struck")
    with launched(managed, *command) as launch:
        launch.until(lambda: stage_committed(folder, 1, "prompts"), "the prompts are there")
        before = launch.tree()
        launch.process.kill()
        assert launch.wait() == -signal.SIGKILL
        seconds = launch.until_gone(60)
    assert not stage_committed(folder, 1, "rollout")
    for kind in ("tasks.engines.launch", "tasks.trainer.server", "tasks.rewards.child", "prefect server start"):
        assert any(kind in line for line in before.values()), before
    print(f"{len(before)} processes were gone {seconds:.1f} s after kill -9")

    prompts = (folder / "data" / "stages" / "000001" / "prompts.json").read_bytes()
    with launched(managed, *command) as launch:
        assert launch.wait() == 0, launch.output
        launch.until_gone()
    assert (folder / "data" / "stages" / "000001" / "prompts.json").read_bytes() == prompts
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        assert [(v.number, v.state) for v in ledger.versions()] == [(0, "COMMITTED"), (1, "COMMITTED")]
        assert ledger.groups.counts()["issued"] == 16
        (killed, second), rows = ledger.accounts.sessions(), ledger.accounts.stages()
    finally:
        ledger.close()
    assert killed.ended is None
    assert killed.seen is not None
    assert second.ended is not None
    wall = session_ends([killed, second], rows)[0] - killed.started + second.ended - second.started
    for seconds in run_seconds([killed, second], rows, {row.pool for row in rows}).values():
        assert sum(seconds.values()) == pytest.approx(wall, rel=0.01)
    assert {row.state for row in rows} <= {"completed", "failed"}
