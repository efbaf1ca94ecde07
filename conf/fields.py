"""Does a value fit the class that declares it? Names, types and ranges of `conf.schema`, one problem a line."""

import dataclasses
import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

from conf.source import dotted, kind

Path = tuple[str | int, ...]
Problem = tuple[str, str]  # dotted field, and "must ..., got ..."

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")  # of pools, nodes and rewards: they become files and columns
BOUNDS = {"ge": (">=", operator.ge), "gt": (">", operator.gt), "le": ("<=", operator.le), "lt": ("<", operator.lt)}
INT64 = 2**63
_TEXT_FOR = {int: "an integer", float: "a number", bool: "true or false", str: "text"}


def is_interpolation(value: object) -> bool:
    return isinstance(value, str) and "${" in value


def problems(
    value: Any, declared: Any, path: Path = (), *, resolved: bool, meta: Mapping[str, Any] | None = None
) -> Iterator[Problem]:
    """Every way in which `value` breaks its declaration. Unless `resolved`, an interpolation fits everything."""
    if not resolved and is_interpolation(value):
        return
    if value == "???":
        yield dotted(path), "must have a value, got '???' (which OmegaConf takes for a missing one)"
    elif dataclasses.is_dataclass(declared):
        yield from _section(value, declared, path, resolved)
    elif get_origin(declared) is dict:
        yield from _entries(value, get_args(declared)[1], path, resolved)
    elif get_origin(declared) is list:
        yield from _items(value, get_args(declared)[0], path, resolved)
    elif get_origin(declared) is Literal:
        yield from _choice(value, get_args(declared), path)
    elif declared is Any:
        yield from _anything(value, path, resolved)
    else:
        yield from _scalar(value, declared, path, meta or {})


def unknown(name: str, known: Sequence[str]) -> str:
    """`did you mean x?`, or all there is."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"there is: {', '.join(known) or 'nothing'}"


def _section(value: Any, declared: Any, path: Path, resolved: bool) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield dotted(path), f"must be a mapping of settings, got {kind(value)}"
        return
    types, fields = get_type_hints(declared), {f.name: f for f in dataclasses.fields(declared)}
    for name in value:
        if name not in fields:
            yield dotted((*path, name)), f"must be a known setting; {unknown(name, list(fields))}"
    for name, field in fields.items():
        if name in value:
            yield from problems(value[name], types[name], (*path, name), resolved=resolved, meta=field.metadata)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            yield dotted((*path, name)), f"must be given: {field.metadata['help']}"


def _entries(value: Any, declared: Any, path: Path, resolved: bool) -> Iterator[Problem]:
    if not isinstance(value, dict):
        yield dotted(path), f"must be a mapping, got {kind(value)}"
        return
    for name, entry in value.items():
        if dataclasses.is_dataclass(declared) and not NAME.fullmatch(name):
            yield dotted((*path, name)), f"must be named by a letter, then letters, digits, - or _, got {name!r}"
        yield from problems(entry, declared, (*path, name), resolved=resolved)


def _items(value: Any, declared: Any, path: Path, resolved: bool) -> Iterator[Problem]:
    if not isinstance(value, list):
        yield dotted(path), f"must be a list, got {kind(value)}"
        return
    for index, item in enumerate(value):
        yield from problems(item, declared, (*path, index), resolved=resolved)


def _choice(value: Any, choices: tuple[Any, ...], path: Path) -> Iterator[Problem]:
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = ", ".join(str(choice) for choice in choices)
        yield dotted(path), f"must be {'one of ' if len(choices) > 1 else ''}{listed}, got {kind(value)}"


def _anything(value: Any, path: Path, resolved: bool) -> Iterator[Problem]:
    if isinstance(value, dict):
        yield from _entries(value, Any, path, resolved)
    elif isinstance(value, list):
        yield from _items(value, Any, path, resolved)
    elif not isinstance(value, str | bool | None):
        yield from _range(value, path, {})


def _scalar(value: Any, declared: type, path: Path, meta: Mapping[str, Any]) -> Iterator[Problem]:
    allowed = (int, float) if declared is float else (declared,)
    if type(value) not in allowed:
        yield dotted(path), f"must be {_TEXT_FOR[declared]}, got {kind(value)}{_hint(value, declared)}"
    elif declared in (int, float):
        yield from _range(value, path, meta)


def _hint(value: Any, declared: type) -> str:
    if declared is bool and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return " (text in YAML 1.2)"
    if declared is str and not isinstance(value, dict | list | None):
        return f' (quote it: "{kind(value)}")'
    if isinstance(value, str) and re.fullmatch(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?([eE][-+]?[0-9]+)?", value):
        return " (text: write it without quotes and underscores)"
    return ' ("" is empty text)' if declared is str and value is None else ""


def _range(value: int | float, path: Path, meta: Mapping[str, Any]) -> Iterator[Problem]:
    if isinstance(value, int) and abs(value) >= INT64:
        yield dotted(path), f"must fit in 64 bits, got {kind(value)}"
        return
    if not math.isfinite(value):
        yield dotted(path), f"must be a finite number, got {value}"
        return
    if not all(within(value, meta[name]) for name, (_, within) in BOUNDS.items() if meta.get(name) is not None):
        yield dotted(path), f"must be {bounds_text(meta)}, got {value}"


def bounds_text(meta: Mapping[str, Any]) -> str:
    """A field's range: `> 0 and <= 1`."""
    return " and ".join(f"{sign} {meta[name]:g}" for name, (sign, _) in BOUNDS.items() if meta.get(name) is not None)
