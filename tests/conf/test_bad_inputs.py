"""Experiments spoilt at random: each loads, or is refused by a ConfigError whose lines name file, line and field."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import conf
from conf.errors import ConfigError
from conf.load import load
from conf.source import dump, parse, plain
from tests.conf.experiments import MINIMAL, refusal, write

FOLDER = Path(conf.__file__).parent
ORIGINALS = [file.read_text() for file in sorted(FOLDER.glob("*.yaml"))]
# A loader that hangs is ended by this, not by a measured time.
pytestmark = pytest.mark.timeout(300)
many = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=150)

SCALARS = st.sampled_from(
    [
        *(
            "1e-6",
            "'1e-6'",
            "yes",
            "no",
            "On",
            "~",
            "null",
            "true",
            ".nan",
            "-.inf",
            "1e999",
            "-1",
            "0",
            "0x10",
            "0o17",
        ),
        *(
            "1_000",
            "9" * 30,
            "9" * 500,
            "-9223372036854775809",
            "''",
            '"\\ud800"',
            '"\\0"',
            "2020-01-01",
            "1:30",
            "???",
        ),
        *("${seed}", "${", "${nope}", "${oc.env:HOME}", "${${seed}}", "\\${seed}", "{}", "[]", "[1, [2, {a: b}]]"),
        *("{a: {b: {c: 1}}}", "!!python/object:os.system {}", "!!python/object/apply:os.system [id]", "!!binary aGk="),
        *("!!set {a}", "!mine x", "&a [*a]", "*nobody", "|\n  text", "x: y: z", "{a: 1, a: 2}", "<<: *x", "\x00"),
        *("\ud800", "\u2028", "é", "../../etc/passwd", "http://0.0.0.0:1"),
    ]
)


def set_value(lines: list[str], at: int, draw: Callable[..., Any]) -> None:
    key, colon, _ = lines[at].partition(":")
    lines[at] = key + (colon or ":") + " " + draw(SCALARS)


def rename(lines: list[str], at: int, draw: Callable[..., Any]) -> None:
    lines[at] = draw(st.text(max_size=8)) + lines[at]


def repeat(lines: list[str], at: int, draw: Callable[..., Any]) -> None:
    lines.insert(draw(st.integers(0, len(lines))), lines[at])


def remove(lines: list[str], at: int, draw: Callable[..., Any]) -> None:
    del lines[at]


def indent(lines: list[str], at: int, draw: Callable[..., Any]) -> None:
    lines[at] = draw(st.sampled_from([" ", "  ", "\t", " \t", "- ", "? ", "# ", "--- ", "%YAML 1.1 "])) + lines[at]


def cut(lines: list[str], at: int, draw: Callable[..., Any]) -> None:
    lines[at] = lines[at][: draw(st.integers(0, len(lines[at])))]


@st.composite
def spoilt_text(draw: Callable[..., Any]) -> str:
    """The text of an experiment of the repository after one to three changes of a line."""
    lines = draw(st.sampled_from([*ORIGINALS, MINIMAL])).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        if lines:
            change = draw(st.sampled_from([set_value, rename, repeat, remove, indent, cut]))
            change(lines, draw(st.integers(0, len(lines) - 1)), draw)
    return "\n".join(lines) + "\n"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            found += paths(child, (*path, key))
    return found


@st.composite
def spoilt_tree(draw: Callable[..., Any]) -> str:
    """An experiment with values of any type in one to three places of any depth, or under names of one's own."""
    tree = plain(parse(draw(st.sampled_from([*ORIGINALS, MINIMAL])), "t"))
    for _ in range(draw(st.integers(1, 3))):
        *above, last = draw(st.sampled_from(paths(tree)))
        holder: Any = tree
        for key in above:
            holder = holder[key]
        if isinstance(holder, dict) and draw(st.booleans()):
            last = draw(st.text(max_size=10))
        holder[last] = draw(VALUES)
    return dump(tree)


def check(folder: Path, content: bytes | str, overrides: list[str] | None = None) -> None:
    """Load it; where it is refused, each line of the error begins with a place and goes on with what is wrong there."""
    path = folder / "x.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    lines = []
    try:
        load(path, overrides or [])
    except ConfigError as error:
        lines = str(error).split("\n")
    places = rf"(?:{re.escape(str(path))}|conf/\w+\.yaml|conf/graph/\w+\.yaml)(?::[1-9]\d*)?"
    for line in lines:
        assert re.fullmatch(rf"(?:{places}|override .*?): \S.*", line)
        assert len(line) <= 600 or overrides  # an override is shown whole
    assert len(lines) <= 21


@many
@given(spoilt_text())
@example(MINIMAL + "extends: |\n  text\n")
def test_a_spoilt_text_loads_or_is_refused_with_its_place(tmp_path: Path, text: str) -> None:
    check(tmp_path, text)


@many
@given(spoilt_tree())
@example(MINIMAL + '"a\\nb": 1\n')
@example(MINIMAL + '" ": 1\n')
@example(MINIMAL + 'pools: {"a\\nb": {roles: [cpu]}}\n')
def test_values_of_any_type_anywhere_load_or_are_refused_with_their_place(tmp_path: Path, text: str) -> None:
    check(tmp_path, text)


@many
@given(st.binary(max_size=80), st.integers(0, len(MINIMAL)), st.integers(0, 3))
def test_any_bytes_anywhere_load_or_are_refused_with_their_place(
    tmp_path: Path, junk: bytes, at: int, over: int
) -> None:
    content = MINIMAL.encode()
    check(tmp_path, content[:at] + junk + content[at + over :])


@many
@given(st.text(max_size=40) | SCALARS.map(lambda value: f"prompts.task_options.a={value}"))
def test_any_override_loads_or_is_refused_by_its_text(tmp_path: Path, override: str) -> None:
    check(tmp_path, MINIMAL, [override])


def doubled(count: int, value: str) -> str:
    """a0, and each next value twice the one before: 2^count at the end."""
    more = [f"a{i}: {value.format(i - 1)}" for i in range(1, count)]
    return MINIMAL.replace("basic_arithmetic", f"t, task_options: {{a0: aaaaaaaaaa, {', '.join(more)}}}")


NAME = "${{prompts.task_options.a{0}}}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            doubled(60, f"'{NAME}{NAME}'"),
            "x.yaml:2: prompts.task_options.a11 must not multiply by interpolation to more",
        ),
        (doubled(60, f"['{NAME}', '{NAME}']"), "x.yaml:2: prompts.task_options.a"),
        (doubled(3000, f"'{NAME}'"), "x.yaml:2: prompts.task_options.a99 must not multiply by interpolation"),
        (MINIMAL + f"name: '{'${' * 200_000}'\n", "x.yaml:5: name must interpolate a setting by its full name, like"),
        ("".join(f"a{i}: 1\n" for i in range(6000)), "x.yaml:5000: a4999 must not come to more than 5,000 values"),
        ("".join(" " * i + "a:\n" for i in range(900)), "x.yaml:1: must not nest deeper than 32"),
        (MINIMAL + f"seed: {'9' * 900_000}\n", "x.yaml:5: seed must be written as YAML's int, got '9999999999"),
    ],
    ids=["text", "lists", "chain", "unclosed", "keys", "nesting", "digits"],
)
def test_what_would_take_for_ever_is_refused_at_once(tmp_path: Path, text: str, message: str) -> None:
    assert refusal(tmp_path, text=text).startswith(message)


@pytest.mark.parametrize(
    "value",
    ["${oc.env:HOME}", "${oc.decode:1}", "${oc.env:HOME,x}", "${prompts.${model.device}}", "${.x}", "${}", "${seed"],
)
def test_an_interpolation_takes_another_setting_and_nothing_else(tmp_path: Path, value: str) -> None:
    message = f"x.yaml:5: runs_dir must interpolate a setting by its full name, like ${{seed}}, got '{value}"[:-1]
    assert refusal(tmp_path, text=MINIMAL + f'runs_dir: "{value}"\n').startswith(message)


def test_an_error_tells_at_most_twenty_problems(tmp_path: Path) -> None:
    lines = refusal(tmp_path, text=MINIMAL + "".join(f"k{i}: 1\n" for i in range(50))).splitlines()
    assert (len(lines), lines[-1]) == (21, "x.yaml: and 30 more")


def test_what_was_spoilt_is_not_always_refused(tmp_path: Path) -> None:
    """Else the tests above would check nothing of what follows reading."""
    assert load(write(tmp_path, MINIMAL + "seed: 0x10\n")).experiment.seed == 16
