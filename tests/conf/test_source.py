"""YAML to located values: what is read as what, and what is refused where."""

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.source import MAX_BYTES, dump, parse, plain, read


def value(text: str) -> object:
    return plain(parse(text, "t"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6", 1e-6),
        ("5", 5),
        ("010", 10),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("1_000", "1_000"),
        (".5", 0.5),
        ("true", True),
        ("False", False),
        ("~", None),
        ("2020-01-01", "2020-01-01"),
        ('"7"', "7"),
        ("!!str 7", "7"),
        *((word, word) for word in ("yes", "no", "on", "off", "Yes", "y")),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, expected: object) -> None:
    assert value(text) == expected
    assert type(value(text)) is type(expected)


def test_a_value_knows_its_line_also_behind_an_alias() -> None:
    tree = parse("a: &x\n  b: 1\nc: *x\n", "t")
    assert tree.value["a"].value["b"].at == "t:2"
    assert tree.value["c"].at == "t:3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "t:4: b.c must be set once, got it again (first in line 3)"),
        ("a:\n\tb: 1\n", "t:2: is not YAML: found a tab"),
        ("a: [1\nb: 2\n", "t:2: is not YAML: expected ',' or ']'"),
        ("a: !!python/object:os.system {}\n", "t:1: a must be plain YAML, got the tag !!python/object:os.system"),
        ("a: !mine 1\n", "t:1: a must be plain YAML, got the tag !!!mine"),
        ("a: !!int x\n", "t:1: a must be written as YAML's int, got 'x'"),
        ("a: {1: 2}\n", "t:1: a key of a must be text, got '1'"),
        ("a: &x {b: 1}\nc:\n  <<: *x\n", "t:3: c.<< must not be used"),
        ("a: *nobody\n", "t:1: is not YAML: found undefined alias 'nobody'"),
        ("a: 1\n---\nb: 1\n", "t:2: is not YAML: but found another document"),
        ("a: 1\nb: \x00\n", "t:2: must be text, got the character 0"),
        ('a: "\\UFFFFFFFF"\n', "t:1: is not YAML: "),
        ("a: &x [*x]\n", "t:1: a[0][0]... must not nest deeper than 32"),
        ("[" * 2000, "t:1: must not nest deeper than 32"),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "t")
    assert str(error.value).startswith(message)


def test_aliases_that_multiply_are_refused() -> None:
    bomb = "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    bomb += "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20))
    with pytest.raises(ConfigError, match="must not come to more than 5,000 values"):
        parse(bomb, "t")


def test_what_is_no_file_of_settings_is_refused_by_name(tmp_path: Path) -> None:
    contents = {
        "empty": b"",
        "comment": b"# nothing\n",
        "list": b"- a\n",
        "latin": b"a: 1\nb: \xe9\n",
        "big": b"#" * (MAX_BYTES + 1),
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    expected = {
        "empty": "empty:1: must hold a mapping of settings, got nothing",
        "comment": "comment:1: must hold a mapping of settings, got nothing",
        "list": "list:1: must hold a mapping of settings, got a list",
        "latin": "latin:2: must be UTF-8 text, got the byte 0xe9",
        "big": "big: must hold at most 1,048,576 bytes of YAML",
        "absent": "absent: there is no such file",
        ".": ": is not a file",
        "n" * 300: "cannot be read: ",
    }
    for name, message in expected.items():
        with pytest.raises(ConfigError) as error:
            read(tmp_path / name)
        assert message in str(error.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_dumped_values_read_back_equal(original: object) -> None:
    assert value(dump(original)) == original


@given(st.text() | st.text(alphabet="ab:-[]{}&*!|>'\"\\#%@`,?~ \n\t0123456789.eExuU<"))
def test_any_text_is_read_or_refused_cleanly(text: str) -> None:
    with contextlib.suppress(ConfigError):
        parse(text, "t")
