"""The layout of the project: conf <- data <- tasks <- flows, imports only leftwards, and no drawer of odds and ends."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ["conf", "data", "tasks", "flows"]
FILES = [file for layer in LAYERS for file in sorted((ROOT / layer).rglob("*.py"))]


def imported(file: Path) -> set[str]:
    """The layers a file imports, also inside functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_imports_go_only_leftwards(file: Path) -> None:
    layer = LAYERS.index(file.relative_to(ROOT).parts[0])
    forbidden = {*LAYERS[layer + 1 :], "tests", "benchmarks"}
    assert not imported(file) & forbidden


def test_the_rule_sees_every_kind_of_import(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text("import flows.run\nfrom tasks import stage\ndef f():\n    from data.store import Store\n")
    assert imported(file) == {"flows", "tasks", "data"}


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_a_file_says_what_it_holds(file: Path) -> None:
    assert not {"utils", "util", "helpers", "helper", "common", "manager", "misc"} & {
        part.removesuffix(".py") for part in file.parts
    }
    if file.name != "__init__.py":
        assert ast.get_docstring(ast.parse(file.read_text())), f"{file} has no docstring"


@pytest.mark.parametrize("file", FILES, ids=lambda f: str(f.relative_to(ROOT)))
def test_no_module_has_the_name_of_one_of_pythons_own(file: Path) -> None:
    """Prefect puts the folder of a flow on `sys.path`, and everything started later inherits it."""
    assert file.stem not in sys.stdlib_module_names - {"__main__"}


def test_the_top_level_is_the_one_agreed() -> None:
    allowed = {
        "pyproject.toml", "flows", "tasks", "conf", "data", "tests", "Makefile", "README.md", "prefect.yaml", "docs",
        "benchmarks", ".ci", ".git", ".gitignore", "LICENSE",
    }  # fmt: skip
    ignored = {line.strip().rstrip("/") for line in (ROOT / ".gitignore").read_text().splitlines()}
    extra = {p.name for p in ROOT.iterdir()} - allowed
    assert {name for name in extra if not any(Path(name).match(pattern) for pattern in ignored)} == set()
