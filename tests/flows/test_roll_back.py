"""`ratchet rollback` on a run that was killed between a stage's commit and the ledger's account of it."""

from pathlib import Path

from rich.console import Console

from data.fsck import fsck
from data.ledger import Ledger
from flows.versions import roll_back
from tasks.engines.toy import write_model
from tests.fakes.whole_run import WholeRun


def test_what_was_trained_is_not_rolled_back(tmp_path: Path) -> None:
    run = WholeRun.start(tmp_path / "demo", write_model(tmp_path / "model"))
    run.iteration(1)
    run.prompts(2)
    run.issue(2)
    run.rollout(2)
    run.score(2)
    run.publish(run.update(2))  # and no settle_groups
    run.prompts(3)
    run.issue(3)
    run.ledger.close()

    roll_back(str(run.folder), 1, Console(quiet=True))
    ledger = Ledger(run.folder / "ledger.sqlite", read_only=True)
    assert {group: outcome for group, iteration, outcome in ledger.groups.rows() if iteration > 1} == {
        "i000002-g000": "trained",
        "i000002-g001": "dropped/slow",
        "i000003-g000": "dropped/rolled_back",
        "i000003-g001": "dropped/rolled_back",
    }
    ledger.close()
    run.ledger = Ledger(run.folder / "ledger.sqlite")
    run.prompts(4)
    run.issue(4)
    run.ledger.close()
    assert [str(finding) for finding in fsck(run.folder) if finding.problem] == []
