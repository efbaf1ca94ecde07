"""YAML text to values that know where they stand, so that every later error can name its file and line.

A narrow YAML: the scalars of YAML 1.2's core schema (`1e-6` is a number, `yes` and `on` are text), no duplicate keys,
no tags that construct objects, no merge keys, and bounds on size and nesting, since aliases can multiply exponentially.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from conf.errors import ConfigError

MAX_BYTES = 1 << 20
MAX_VALUES = 5_000  # after aliases are followed; OmegaConf takes 1 ms for each
MAX_DEPTH = 32
MAX_DIGITS = 400  # more cannot be a float64 either

_TAG = "tag:yaml.org,2002:"
_SCALARS = {  # YAML 1.2.2, section 10.3.2
    "null": re.compile(r"^(?:null|Null|NULL|~|)$"),
    "bool": re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"),
    "int": re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"),
    "float": re.compile(
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
}
_DIGITS = list("0123456789")
_FIRST = {
    "null": ["~", "n", "N", ""],
    "bool": list("tTfF"),
    "int": ["-", "+", *_DIGITS],
    "float": ["-", "+", ".", *_DIGITS],
}


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  (PyYAML's own attribute)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever YAML 1.1 or 1.2 would read as something else than text."""


for _kind in ("null", "bool", "int", "float"):
    _Loader.add_implicit_resolver(_TAG + _kind, _SCALARS[_kind], _FIRST[_kind])
    _Dumper.add_implicit_resolver(_TAG + _kind, _SCALARS[_kind], _FIRST[_kind])


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Double quotes for Unicode's own line breaks, which PyYAML would fold like spaces."""
    return dumper.represent_scalar(_TAG + "str", text, style='"' if re.search("[\x85\u2028\u2029]", text) else None)


_Dumper.add_representer(str, _text)


@dataclass(frozen=True)
class Located:
    """A value of YAML's kinds; lists hold Located, mappings hold text to Located."""

    value: Any
    at: str  # `file:line`, or the override's text
    replaces: bool = False  # a mapping that is not merged into an earlier one


def read(path: Path) -> Located:
    """The mapping a YAML file holds. Raises ConfigError with file and line."""
    shown = show_path(path)
    try:
        if not path.is_file():
            raise ConfigError(f"{shown}: {'is not a file' if path.exists() else 'there is no such file'}")
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{shown}: must hold at most {MAX_BYTES:,} bytes of YAML")
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise ConfigError(f"{shown}:{line}: must be UTF-8 text, got the byte 0x{content[error.start]:02x}") from error
    except (OSError, ValueError) as error:
        raise error if isinstance(error, ConfigError) else ConfigError(f"{shown}: cannot be read: {error}") from error
    tree = parse(text, shown)
    if not isinstance(tree.value, dict):
        found = "nothing" if tree.value is None else kind(tree.value)
        raise ConfigError(f"{tree.at}: must hold a mapping of settings, got {found}")
    return tree


def parse(text: str, name: str, *, lines: bool = True) -> Located:
    """The value of a YAML text. `name` says in errors where it stands, with `:line` after it if `lines`."""

    def at(index: int) -> str:
        return f"{name}:{index + 1}" if lines else name

    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = str(error.problem or error.context)
        if "'\\t'" in problem:
            problem = "found a tab; YAML is indented with spaces"
        raise ConfigError(f"{at(mark.line if mark else 0)}: is not YAML: {problem}") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n")
        raise ConfigError(f"{at(line)}: must be text, got the character {error.character!r}") from error
    except RecursionError as error:
        raise ConfigError(f"{at(0)}: must not nest deeper than {MAX_DEPTH}") from error
    except (ValueError, OverflowError) as error:  # PyYAML lets those of chr() through: "\\UFFFFFFFF"
        raise ConfigError(f"{at(0)}: is not YAML: {error}") from error
    if node is None:
        return Located(None, at(0))
    return _Builder(at).build(node, (), node.start_mark.line)


class _Builder:
    def __init__(self, at: Any) -> None:
        self.at = at
        self.count = 0

    def build(self, node: yaml.Node, path: tuple[str | int, ...], line: int) -> Located:
        at, where = self.at(line), dotted(path) or "the file"
        self.count += 1
        if self.count > MAX_VALUES:
            raise ConfigError(f"{at}: {where} must not come to more than {MAX_VALUES:,} values, aliases followed")
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{at}: {dotted(path[:3])}... must not nest deeper than {MAX_DEPTH}")
        expected = {yaml.MappingNode: ("map",), yaml.SequenceNode: ("seq",), yaml.ScalarNode: ("str", *_SCALARS)}
        tag = node.tag.removeprefix(_TAG)
        if tag not in expected[type(node)]:
            raise ConfigError(f"{at}: {where} must be plain YAML, got the tag !!{tag}")
        if isinstance(node, yaml.MappingNode):
            return Located(self._mapping(node, path), at)
        if isinstance(node, yaml.SequenceNode):
            items = [self.build(child, (*path, i), child.start_mark.line) for i, child in enumerate(node.value)]
            return Located(items, at)
        return Located(_scalar(tag, node.value, f"{at}: {where}"), at)

    def _mapping(self, node: yaml.MappingNode, path: tuple[str | int, ...]) -> dict[str, Located]:
        result: dict[str, Located] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line
            if key_node.tag != _TAG + "str":
                found = repr(key_node.value) if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise ConfigError(f"{self.at(line)}: a key of {dotted(path) or 'the file'} must be text, got {found}")
            key, where = key_node.value, dotted((*path, key_node.value))
            if key == "<<":
                raise ConfigError(
                    f"{self.at(line)}: {where} must not be used: there is `extends:` instead of merge keys"
                )
            if key in result:
                first = f"first in line {lines[key] + 1}"
                raise ConfigError(f"{self.at(line)}: {where} must be set once, got it again ({first})")
            lines[key] = line
            result[key] = self.build(value_node, (*path, key), line)
        return result


def _scalar(tag: str, text: str, where: str) -> Any:
    if tag == "str":
        return text
    if not _SCALARS[tag].match(text) or len(text) > MAX_DIGITS:
        raise ConfigError(f"{where} must be written as YAML's {tag}, got {text[:40]!r}")
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        return int(text, {"0x": 16, "0o": 8}.get(text[:2], 10))
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


def dump(value: Any) -> str:
    """YAML text that `parse` reads back as the same value."""
    text: str = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)
    return text


def plain(tree: Located) -> Any:
    """The value without its places."""
    if isinstance(tree.value, dict):
        return {key: plain(child) for key, child in tree.value.items()}
    if isinstance(tree.value, list):
        return [plain(child) for child in tree.value]
    return tree.value


def dotted(path: tuple[str | int, ...]) -> str:
    """`("pools", "train", "roles", 0)` as `pools.train.roles[0]`; a name that does not show is quoted."""
    text = ""
    for part in path:
        if isinstance(part, str) and not (part.isprintable() and part.strip() == part != ""):
            part = repr(part)
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def kind(value: Any) -> str:
    """The value as an error shows it."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def show_path(path: Path) -> str:
    """The path as a person would type it: relative where it lies below the current directory."""
    try:
        shown = str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        shown = str(path)
    return shown if shown.isprintable() else repr(shown)
