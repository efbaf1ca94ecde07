"""No crash point of the program is without a test that kills a process there, and none is listed that is not there."""

import ast
import re
from pathlib import Path

from tests import crash_points

ROOT = Path(__file__).parents[1]
LISTED = [name for value in vars(crash_points).values() if isinstance(value, tuple) for name in value]


def declared() -> dict[str, str]:
    """pattern -> where: every call of `crash_point` in the program, with `.+` for what it computes."""
    found: dict[str, str] = {}
    for path in (path for part in ("conf", "data", "tasks", "flows") for path in (ROOT / part).rglob("*.py")):
        for call in ast.walk(ast.parse(path.read_text())):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "crash_point":
                found[pattern(call.args[0])] = f"{path.relative_to(ROOT)}:{call.lineno}"
    return found


def pattern(name: ast.expr) -> str:
    match name:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern(part) for part in parts)
    return ".+"


def test_every_point_is_killed_at_by_a_test() -> None:
    found = declared()
    assert len(found) > 20
    unlisted = [where for own, where in found.items() if not any(re.fullmatch(own, name) for name in LISTED)]
    assert unlisted == []


def test_every_point_that_is_listed_exists() -> None:
    patterns = declared()
    assert [name for name in LISTED if not any(re.fullmatch(own, name) for own in patterns)] == []


def test_every_step_of_the_protocol_is_among_them() -> None:
    steps = {name.rpartition("/")[2] for name in LISTED if name.startswith("publish/")}
    # P1 is the export of each rank; Q0 changes nothing; Q11 is the commit.
    assert steps == {"P0", "P2", "P3", "P4", "P5", "sealed", *(f"Q{i}" for i in range(1, 11)), "committed"}
