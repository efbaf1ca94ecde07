"""The publish protocol under every order of faults: I1-I9 hold of the product, and not of one without a guarantee."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.protocol.broken import VARIANTS
from tests.protocol.explore import Found, Kind, explore
from tests.protocol.machine import STEPS
from tests.protocol.server import FAULTS, UPDATE

RUNS, STEPS_A_RUN = 470, 6  # of each kind; Hypothesis makes a few more
KINDS = [
    Kind(ranks=1, engines=1, external=False),
    Kind(ranks=2, engines=1, external=False),
    Kind(ranks=1, engines=2, external=False),
    Kind(ranks=2, engines=2, external=False),
    Kind(ranks=1, engines=2, external=True),
    Kind(ranks=2, engines=2, external=True),
]
INVARIANTS = [f"I{number}" for number in range(1, 10)]
BUDGET, STEPS_TO_FAIL = 500, 8  # of a broken variant
FOUND_WITH = [KINDS[1], KINDS[3]]
ONE_ENGINE = [KINDS[0]]  # most of its runs have a reader where the late update comes
FOUND_BY = {"no_bracket": ONE_ENGINE, "a_bracket_that_compares_its_ends_alone": ONE_ENGINE}


@pytest.fixture(scope="module")
def explorations() -> Iterator[dict[str, list[Future[Found]]]]:
    """All of them, two at a time; those of the product first."""
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        jobs = {"": [pool.submit(explore, [kind], i, RUNS, STEPS_A_RUN) for i, kind in enumerate(KINDS)]}
        for variant in VARIANTS:
            kinds = FOUND_BY.get(variant, FOUND_WITH)
            jobs[variant] = [pool.submit(explore, kinds, 0, BUDGET, STEPS_TO_FAIL, variant)]
        yield jobs
        pool.shutdown(cancel_futures=True)


def test_every_invariant_holds_of_the_product(
    explorations: dict[str, list[Future[Found]]], capsys: pytest.CaptureFixture[str]
) -> None:
    counts: Counter[str] = Counter()
    for kind, future in zip(KINDS, explorations[""], strict=True):
        found = future.result()
        assert found.violation == "", kind
        counts.update(found.counts)
    with capsys.disabled():
        print(f"\n{counts['runs']} runs, {counts['rows admitted']} rows admitted; {dict(sorted(counts.items()))}")
    assert counts["runs"] >= 3_000
    assert counts["rows admitted"] >= 20_000
    assert counts["rows admitted when faults had stopped"] <= counts["rows admitted"] - 10_000
    injected = {tuple(name.split()) for name in counts if name.startswith("/")}
    assert {path for path, _ in injected} == set(FAULTS)
    assert {kind for path, kind in injected if path == UPDATE} == set(FAULTS[UPDATE])
    assert {kind for _, kind in injected} == {kind for kinds in FAULTS.values() for kind in kinds}
    assert {f"killed at {step}" for step in STEPS} <= set(counts)
    for outcome in ("published", "not published", "stale", "batches admitted", "batches refused", "rows dropped"):
        assert counts[outcome] > 0, outcome


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_product_without_a_guarantee_is_found_out(explorations: dict[str, list[Future[Found]]], variant: str) -> None:
    (future,) = explorations[variant]
    found = future.result()
    assert found.violation.partition(":")[0] in INVARIANTS, found
    print(f"after {found.counts['runs']} runs: {found.violation}")
