"""One experiment under every schedule, real parts: killed with its queue empty, full or half full, and continued."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from data.crash import ARMED
from data.ledger import Ledger
from data.refs import DatasetRef
from data.store import Store
from flows.waits import HANDOVER
from tests.end_to_end.launches import RATCHET, Place, launched, ratchet, stage_committed

pytestmark = pytest.mark.timeout(3600)

ITERATIONS = 5
EXPERIMENT = (
    f"iterations: {ITERATIONS}"
    + """
extends: small.yaml
evaluate: {every: 2}
update: {correction: {kind: ratio}, checkpoint_every: 2}
graph:
  drop_short: null # so that reward and reference read the rollout itself, and begin with its first group
  reward: {needs: [rollout]}
  reference: {needs: [rollout]}
  kill: {stage: "tests.end_to_end.kill:kill", needs: [reward, reference], pool: cpu}
  advantage: {needs: [kill]}
"""
)
ASYNC = ["schedule.kind=async"]
EMPTY = {ARMED: "1/rollout/begun"}


def queued(folder: Path) -> list[int]:
    """Iterations whose rollout waits for its update."""
    numbers = range(1, ITERATIONS + 1)
    return [n for n in numbers if stage_committed(folder, n, "rollout") and not stage_committed(folder, n, "update")]


@pytest.mark.parametrize(
    ("name", "settings", "limit", "kills"),
    [
        # Kills, and the batches that the queue then holds: none, the one that is trained next, or as many as it may.
        ("sync", [], 0, [(EMPTY, []), ({"KILL": "2/2"}, [2])]),
        ("one", ["schedule.kind=one_step_off"], 1, [(EMPTY, []), ({"KILL": "2/3"}, [2, 3]), ({"KILL": "3/3"}, [3])]),
        ("async1", [*ASYNC, "schedule.max_lag=1"], 1, [(EMPTY, []), ({"KILL": "1/2"}, [1, 2]), ({"KILL": "2/2"}, [2])]),
        (
            "async4",
            [*ASYNC, "schedule.max_lag=4"],
            4,
            [(EMPTY, []), ({"KILL": "1/5"}, [1, 2, 3, 4, 5]), ({"KILL": "3/5"}, [3, 4, 5])],
        ),
        ("rebuild", [*ASYNC, "schedule.max_lag=2", "rollout.kv_policy=rebuild"], 2, [({"KILL": "2/4"}, [2, 3, 4])]),
    ],
)
def test_killed_and_continued_it_trains_every_prompt_once_within_its_lag(
    external: Place, name: str, settings: list[str], limit: int, kills: list[tuple[dict[str, str], list[int]]]
) -> None:
    external.experiment("overlapping", EXPERIMENT)
    folder = external.folder / "runs" / name
    command = ("-c", RATCHET, "run", "overlapping.yaml", *settings, "--run", name)
    for environment, batches in kills:
        with launched(external, *command, **environment) as launch:
            assert launch.wait() == -signal.SIGKILL, launch.output
            launch.until_gone()
        assert queued(folder) == batches
    with launched(external, *command) as launch:
        assert launch.wait() == 0, launch.output
        launch.until_gone()

    check(external, folder, limit)


def check(place: Place, folder: Path, limit: int) -> None:
    """Every prompt was drawn, generated and trained or dropped once, and none with more lag than the limit."""
    ledger, store = Ledger(folder / "ledger.sqlite", read_only=True), Store(folder, folder.name)
    try:
        counts, metrics = ledger.groups.counts(), ledger.accounts.metrics()
        completed = Counter(
            (row.iteration, row.node) for row in ledger.accounts.stages() if row.state == "completed" and row.iteration
        )
        steps = [(row.number, row.iteration, row.state) for row in ledger.versions()]
        lags = []
        for n in range(1, ITERATIONS + 1):
            ref = store.find(n, "rollout")
            assert isinstance(ref, DatasetRef)
            firsts = store.read(ref, ["policy_version"])["policy_version"].to_pylist()
            lags += [ledger.updates_between(first, n - 1) for first in firsts]  # version n - 1 is trained by update n
    finally:
        ledger.close()
    assert counts == {"issued": 4 * ITERATIONS, "waiting": 0, "trained": 4 * ITERATIONS}
    assert max(completed.values()) == 1
    assert [step[:2] for step in steps] == [(n, n) for n in range(ITERATIONS + 1)]
    assert min(lags) >= 0
    assert max(lags) <= limit
    assert max(values["off_policy/lag_max"] for values in metrics.values()) == max(lags)
    if limit:
        assert max(lags) > 0  # it did run ahead
    drawn = []
    for n in range(1, ITERATIONS + 1):
        ref = store.find(n, "prompts")
        assert isinstance(ref, DatasetRef)
        drawn += store.read(ref, ["prompt_index"])["prompt_index"].to_pylist()
    assert drawn == list(range(4 * ITERATIONS))
    looked = ratchet(place, "fsck", str(folder))
    assert looked.returncode == 0, looked.stdout
    balance = ratchet(place, "ledger", str(folder))
    assert balance.returncode == 0, balance.stdout


def test_the_same_experiment_on_one_co_located_pool(managed: Place) -> None:
    """By an override of `pools` alone: killed while the trainer has the pool, continued, handed over and back."""
    managed.experiment("colocated", EXPERIMENT)
    folder = managed.folder / "runs" / "colocated"
    pools = ("pools.train=null", "pools.rollout.roles=[rollout,train]")
    command = ("-c", RATCHET, "run", "colocated.yaml", "--run", "colocated", *pools)
    with launched(managed, *command, **{ARMED: "2/update/trained"}) as launch:
        assert launch.wait() == -signal.SIGKILL, launch.output
        launch.until_gone()
    with launched(managed, *command) as launch:
        assert launch.wait() == 0, launch.output
        launch.until_gone()
    check(managed, folder, limit=0)
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        handed = {row.node for row in ledger.accounts.stages() if HANDOVER in row.waits}
    finally:
        ledger.close()
    assert {"rollout", "reference", "publish"} <= handed
