"""The law of prompt groups: issued = trained + waiting + in flight + dropped(reason), proven at every step of a run.

The ledger has a row for each group that was issued, the committed datasets have the rows that were drawn, generated and
trained on: each is held against the other. A group is *in flight* until its samples are committed, then it *waits*
until it is trained or dropped. An iteration that is over has neither. A check costs as much as the iterations that are
not over yet, however long the run is.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count, takewhile

from conf.errors import DataError, RunError
from data.issued import PROMPTS, issued_groups
from data.ledger import Ledger
from data.manifest import Manifest
from data.metrics import accounted
from data.refs import DatasetRef
from data.store import Store
from flows.graph import Graph

SHOWN = 3  # groups named in an error
WAITING, IN_FLIGHT = "waiting", "in flight"

History = Mapping[int, Mapping[str, float]]  # metrics by iteration


@dataclass(frozen=True)
class Books:
    """What ledger and datasets say of one iteration's groups."""

    issued: Mapping[str, str | None]  # the ledger: group_id -> outcome; None: not yet
    drawn: frozenset[str]  # groups of the prompts' rows, without candidates that were never sent
    generated: bool  # the samples are committed
    dropped: Mapping[str, str]  # group_id -> reason, as stages committed it
    trained: frozenset[str]  # groups of the update's rows
    foreign: Mapping[str, str]  # groups of the update's rows that are not the iteration's -> what is wrong


def read_books(store: Store, ledger: Ledger, graph: Graph, iteration: int) -> Books:
    prompts = store.committed(iteration, PROMPTS)
    rollouts = [m for node in graph.of_stage("rollout") if (m := store.committed(iteration, node.name))]
    sent = issued_groups(store, prompts, rollouts[0] if rollouts else None) if prompts else []
    drawn = frozenset(group for group, _ in sent)
    dropped: dict[str, str] = {}
    for node in graph:
        if node.stage.reads != "trained" and (manifest := store.committed(iteration, node.name)):
            dropped |= manifest.facts.dropped  # groups of an evaluation were never issued
    issued = {group: outcome for group, _, outcome in ledger.groups.rows(iteration)}
    trained = trained_groups(store, graph, iteration)
    return Books(
        issued,
        drawn,
        generated(store, graph, iteration),
        dropped,
        trained,
        {group: _whereabouts(store, ledger, graph, group) for group in trained - drawn - issued.keys()},
    )


def generated(store: Store, graph: Graph, iteration: int) -> bool:
    """Whether the samples of the iteration's groups are committed."""
    makers = (n for n in graph if n.stage.output == "rows" and n.stage.reads != "trained" and n.name != PROMPTS)
    return any(store.find(iteration, node.name) for node in makers)


def trained_groups(store: Store, graph: Graph, iteration: int) -> frozenset[str]:
    """Groups of the rows that the iteration's committed update trained on."""
    updates = (store.committed(iteration, node.name) for node in graph.of_stage("update"))
    return frozenset(group for update in updates if update for group in _groups(store, training_rows(update)))


def training_rows(update: Manifest) -> DatasetRef:
    """A dataset with the rows that a committed update trained on; its other parents have further columns of them."""
    return next(parent for parent in update.parents if isinstance(parent, DatasetRef))


def _groups(store: Store, dataset: DatasetRef) -> set[str]:
    return set(store.read(dataset, ["group_id"])["group_id"].to_pylist())


def _whereabouts(store: Store, ledger: Ledger, graph: Graph, group: str) -> str:
    iteration = ledger.groups.issued_for(group)
    if iteration is None:
        return "unknown: among the update's rows, but it was never issued"
    if group in trained_groups(store, graph, iteration):
        return f"trained twice: here, and in iteration {iteration}, which issued it"
    return f"unknown: among the update's rows, but iteration {iteration} issued it"


def imbalances(books: Books, over: bool, behind: bool = False) -> Iterator[tuple[str, str]]:
    """(group_id, what is wrong) of every group that is not in exactly one place.

    Before the iteration is `over`, groups may be open. `behind`: the ledger may lack what was just committed.
    """
    yield from books.foreign.items()
    for group in sorted(books.issued.keys() | books.drawn):
        outcome = books.issued.get(group)
        found = outcome or (WAITING if books.generated else IN_FLIGHT)
        if behind and outcome is None:
            continue
        if group not in books.issued:
            yield group, "lost: a prompt drew it, but it is not in the ledger"
        elif group not in books.drawn:
            yield group, f"unknown: in the ledger ({found}), but no prompt drew it"
        elif group in books.trained and outcome != "trained":
            yield group, f"trained though {found}: the update's rows have it"
        elif outcome == "trained" and group not in books.trained:
            yield group, "lost: trained by the ledger, but not among the update's rows"
        elif group in books.dropped and outcome != f"dropped/{books.dropped[group]}":
            yield group, f"a stage dropped it for {books.dropped[group]}, but it is {found} in the ledger"
        elif over and outcome is None:
            yield group, f"lost: expected trained or dropped/<reason> at the iteration's end, found {found}"


def check_ended(store: Store, ledger: Ledger, graph: Graph, history: History, iteration: int) -> None:
    """Prove the balance at an iteration's end, before it is accounted for. Raises RunError naming groups."""
    left = ledger.groups.waiting().keys() & accounted(history).keys()
    _check(store, ledger, graph, {**dict.fromkeys(left, True), iteration: True})


def check_resumed(store: Store, ledger: Ledger, graph: Graph, history: History) -> None:
    """Prove the balance of every iteration that is not over, when a run is opened again. Raises RunError naming groups.

    What a kill kept from the ledger is settled first.
    """
    from flows.stages import settle  # brings Prefect along

    rolled_back = max((row.iteration for row in ledger.versions() if row.rollback_of is not None), default=0)
    ended = accounted(history)
    last = max(ended, default=0)
    begun = takewhile(lambda number: store.find(number, PROMPTS), count(max(last, rolled_back) + 1))
    iterations = sorted({*ledger.groups.waiting(), *begun})
    try:
        for number in iterations:
            for node in graph:
                settle(store, ledger, node, number)
    except DataError as error:
        raise RunError(f"run {store.run} does not balance: {error}; `ratchet fsck` says more") from error
    over = {number: number <= rolled_back or number in ended for number in iterations}
    _check(store, ledger, graph, over)


def _check(store: Store, ledger: Ledger, graph: Graph, iterations: Mapping[int, bool]) -> None:
    """`iterations` maps each to whether it is over."""
    wrong = [
        f"group {group} of iteration {number}: {what}"
        for number, over in iterations.items()
        for group, what in imbalances(read_books(store, ledger, graph, number), over)
    ]
    if wrong:
        more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise RunError(
            f"run {store.run} does not balance (issued = trained + waiting + in flight + dropped): "
            f"{'; '.join(wrong[:SHOWN])}{more}; `ratchet fsck` says more"
        )


def group_counts(store: Store, ledger: Ledger, graph: Graph) -> dict[str, int]:
    """issued, trained, waiting, in_flight and dropped/<reason>; issued is the sum of the others."""
    counts = ledger.groups.counts()
    in_flight = sum(len(g) for n, g in ledger.groups.waiting().items() if not generated(store, graph, n))
    return {**counts, "waiting": counts["waiting"] - in_flight, "in_flight": in_flight}
