"""docs/faults.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "faults.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", PAGE.read_text())
    assert len(named) > 80
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (TESTS / file).is_file() or f"def {name}(" not in (TESTS / file).read_text()
    ]
    assert missing == []


def test_every_fault_has_a_test_or_a_reason() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and "---" not in line]
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert all(len(row) == 3 and all(row) for row in cells)
