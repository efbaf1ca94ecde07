"""A damaged version is quarantined and its content sealed again; a run goes back to an older version and on."""

from pathlib import Path

import pytest

from data.ledger import Ledger, VersionRow
from tests.end_to_end.launches import RATCHET, Place, launched, ratchet

pytestmark = pytest.mark.timeout(1800)

RUN = "runs/back"


def train(place: Place, iterations: int) -> str:
    with launched(
        place, "-c", RATCHET, "run", "small.yaml", "--run", "back", "--iterations", str(iterations)
    ) as launch:
        assert launch.wait() == 0, launch.output
        return launch.output


def versions(folder: Path) -> list[VersionRow]:
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        return ledger.versions()
    finally:
        ledger.close()


@pytest.fixture(scope="module")
def place(external: Place) -> Place:
    train(external, 2)
    return external


def test_a_damaged_version_is_sealed_again_and_a_run_goes_back(place: Place) -> None:
    folder = place.folder / RUN
    second = versions(folder)[2]
    shard = next((folder / "weights" / second.ref.label).glob("*.safetensors"))
    shard.chmod(0o644)
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)

    output = train(place, 3)
    assert f"{second.ref.label}/{shard.name}: expected SHA-256" in output
    assert "the version is quarantined" in output
    rows = versions(folder)
    assert [(r.number, r.state, r.iteration) for r in rows[2:]] == [
        (2, "QUARANTINED", 2),
        (3, "COMMITTED", 2),
        (4, "COMMITTED", 3),
    ]
    assert rows[3].content == second.content
    assert (rows[4].parent, rows[4].optimizer_step) == (3, rows[3].optimizer_step + 1)

    refused = ratchet(place, "rollback", RUN, "4")
    assert (refused.returncode, refused.stderr) == (
        1,
        "error: version 4 is the newest: the run stands on it already\n",
    )
    assert "is QUARANTINED: only a version that was committed" in ratchet(place, "rollback", RUN, "2").stderr
    told = ratchet(place, "rollback", RUN, "1")
    assert told.returncode == 0, told.stderr
    assert "version 5 will have the content of version 1 (iteration 1)" in told.stdout

    output = train(place, 4)
    assert "sealed 000005-" in output
    assert "with the content of version 1" in output
    rows = versions(folder)
    assert rows[5].content == rows[1].content
    assert (rows[5].state, rows[5].rollback_of) == ("COMMITTED", 1)
    assert (rows[6].iteration, rows[6].parent, rows[6].optimizer_step) == (4, 5, rows[1].optimizer_step + 1)
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        assert [row.iteration for row in ledger.lineage(6)] == [1, 4]
        counts = ledger.groups.counts()
        assert counts["issued"] == 16
        assert counts["waiting"] == 0
    finally:
        ledger.close()
    looked = ratchet(place, "fsck", RUN)
    assert (looked.returncode, looked.stdout.count("note: ")) == (0, 1), looked.stdout  # the damaged package
    table = ratchet(place, "versions", RUN).stdout
    last = table.splitlines()[-2].split()
    assert last == [rows[6].ref.label, "COMMITTED", "4", str(rows[6].optimizer_step), "5", "evaluated", "engine0"]
    assert "back to 1" in table.splitlines()[-3]
