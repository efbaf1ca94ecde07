"""Which version a run stands on, and how it is sealed again, whatever the start before was killed in."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from data.ledger import Ledger
from data.refs import PolicyRef
from flows import recovery
from flows.opening import Run

CONTENT = "3f9a1c0b7d21" + "0" * 52


@dataclass
class Place:
    """A ledger, and the iterations whose update is committed; sealing takes a number and its content."""

    ledger: Ledger
    ended: set[int] = field(default_factory=set)

    @property
    def run(self) -> Run:
        return cast(
            Run,
            SimpleNamespace(
                ledger=self.ledger,
                store=SimpleNamespace(committed=lambda iteration, node: iteration in self.ended or None),
                graph=SimpleNamespace(of_stage=lambda stage: [SimpleNamespace(name=stage)]),
                services=SimpleNamespace(trainer=None),
                display=SimpleNamespace(message=lambda text: None),
                experiment=None,
                folder=Path(),
                config_digest="",
            ),
        )

    def add(self, key: str, state: str, parent: int | None = None) -> int:
        number = self.ledger.allocate_version(key, parent, 0, "")
        for step in {"EXPORTING": [], "SEALED": ["SEALED"]}.get(state, ["SEALED", "PUBLISHING", state]):
            self.ledger.set_version(number, step, CONTENT if step == "SEALED" else None)
        return number

    def head(self) -> int | None:
        row = recovery._head(self.run)
        return row and row.number

    def seal_again(self) -> PolicyRef:
        return asyncio.run(recovery._sealed(self.run, recovery._head(self.run)))


class Sealer:
    def __init__(self, trainer: object, ledger: Ledger, *rest: object) -> None:
        self.ledger = ledger

    async def seal_version(self, key: str, *, probe_ids: object, **made_from: Any) -> PolicyRef:
        number = self.ledger.allocate_version(key, **made_from)
        self.ledger.set_version(number, "SEALED", CONTENT)
        return self.ledger.version(number).ref


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(recovery, "Exporter", Sealer)
    monkeypatch.setattr(recovery, "_probe_ids", lambda run: [])
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.open_run("r", "", "")
    yield Place(ledger)
    ledger.close()


def test_the_head_is_the_newest_version_whose_stage_has_ended(place: Place) -> None:
    assert place.head() is None
    start = place.add("000000/start", "EXPORTING")
    assert place.head() is None
    place.ledger.set_version(start, "SEALED", CONTENT)
    assert place.head() == 0
    place.add("000001/update", "SEALED", 0)
    assert place.head() == 0  # its stage was killed before its end
    place.ended.add(1)
    assert place.head() == 1


def test_a_start_killed_while_it_seals_a_quarantined_version_again_is_followed_by_one_that_does(place: Place) -> None:
    place.add("000000/start", "COMMITTED")
    place.add("000001/update", "QUARANTINED", 0)
    place.ended.add(1)
    assert place.add("000001/update", "EXPORTING", 0) == 2
    assert place.head() == 1  # it has the content that the trainer is proven against
    assert place.seal_again().number == 2
    assert place.head() == 2


def test_an_update_cut_off_on_a_version_that_is_sealed_again_is_given_up(place: Place) -> None:
    """Else it would keep the lost version as its parent, and a number below that of its parent."""
    place.add("000000/start", "COMMITTED")
    place.add("000001/update", "QUARANTINED", 0)
    place.ended.add(1)
    cut = place.add("000002/update", "EXPORTING", 1)
    again = place.seal_again()
    assert (cut, again.number, place.ledger.version(cut).state) == (2, 3, "ABANDONED")
    assert place.add("000002/update", "SEALED", again.number) == 4


@pytest.mark.parametrize(
    ("missing", "served"),
    [
        ((), 3),  # all that iteration 1 and 2 had to publish is published
        (("1/publish",), 1),  # updates 2 and 3 went on while the publish of 1 waited for the engines
        (("1/evaluate",), 1),
        (("2/publish", "2/evaluate"), 2),
        (("3/publish",), 3),  # as in step: the newest one itself
    ],
)
def test_engines_first_get_the_version_that_has_a_stage_to_come(
    place: Place, missing: tuple[str, ...], served: int
) -> None:
    """`missing` names the stages whose output is not there yet."""
    for number in range(4):
        place.add(f"{number:06d}/{'update' if number else 'start'}", "SEALED", number - 1 if number else None)
    refs = {f"{row.iteration}/update": row.ref for row in place.ledger.versions()}
    nodes = [SimpleNamespace(name=name, stage=SimpleNamespace(reads="trained")) for name in ("publish", "evaluate")]
    run = place.run
    run.trained = refs["3/update"]
    vars(run)["remaining"] = lambda: range(1, 10)
    vars(run)["due"] = lambda number: nodes
    vars(run.store)["find"] = lambda iteration, node: (
        refs.get(f"{iteration}/{node}") if node == "update" else f"{iteration}/{node}" not in missing or None
    )
    assert recovery._to_serve(run, place.ledger.version(3)).number == served


@pytest.mark.parametrize(("trained", "written"), [({1}, True), ({1, 2}, False)])
def test_no_checkpoint_is_written_of_weights_that_a_later_update_made(
    trained: set[int], written: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a kill before the first iteration was accounted for, the trainer stands where the second left it."""
    asked: list[Any] = []

    async def write(what: Any) -> None:
        asked.append(what)

    monkeypatch.setattr(recovery, "_checkpoint", write)
    run: Any = SimpleNamespace(
        folder=tmp_path,
        experiment=SimpleNamespace(update=SimpleNamespace(checkpoint_every=1, keep_checkpoints=1)),
        graph=SimpleNamespace(of_stage=lambda stage: [SimpleNamespace(name=stage, pool="train")]),
        store=SimpleNamespace(find=lambda iteration, node: iteration in trained or None),
        clock=lambda *attempt, **names: nullcontext(SimpleNamespace(stop=lambda: None)),
        leases=SimpleNamespace(take=lambda *claim: nullcontext()),
    )
    asyncio.run(recovery.checkpoint_if_due(run, 1))
    assert bool(asked) is written
