"""What `${...}` may say: the full dotted name of another setting, and nothing else.

OmegaConf's own language can do more: read the environment (`${oc.env:TOKEN}` would write a secret into the run's folder
and make the experiment depend on the machine), compute names, and multiply text exponentially.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from conf.fields import Problem
from conf.source import MAX_BYTES, MAX_VALUES, dotted

Path = tuple[str | int, ...]

_OPENING = re.compile(r"(\\*)\$\{")  # with an even number of backslashes before it; an odd one makes it literal text
_NAME = re.compile(r"\s*[A-Za-z_][\w-]*(?:\.[\w-]+|\[[\w-]+\])*\s*\}")


def interpolation_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Interpolations that are no plain names, or multiply beyond the limits a file has too."""
    wrong = False
    for path, text in _texts(given, ()):
        for rest in _opened(text):
            if not _NAME.match(rest):
                wrong = True
                shown = "${" + rest[:40]
                yield dotted(path), f"must interpolate a setting by its full name, like ${{seed}}, got {shown!r}"
                break
    if not wrong and (beyond := _Sizes(given).first_beyond_limits()) is not None:
        yield (
            dotted(beyond),
            f"must not multiply by interpolation to more than {MAX_VALUES:,} values or {MAX_BYTES:,} characters",
        )


def _texts(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(child, (*path, key))


def _opened(text: str) -> Iterator[str]:
    """What follows each `${` that is not escaped."""
    for match in _OPENING.finditer(text):
        if len(match[1]) % 2 == 0:
            yield text[match.end() :]


class _Sizes:
    """How many values, and characters, a value has once its interpolations are followed; each is measured once."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.given = given
        self.known: dict[str, tuple[int, int]] = {}

    def first_beyond_limits(self) -> Path | None:
        values = characters = 0
        for path, text in _texts(self.given, ()):
            try:
                more_values, more_characters = self.of(text)
            except RecursionError:
                return path
            values, characters = values + more_values, characters + more_characters
            if values > MAX_VALUES or characters > MAX_BYTES:
                return path
        return None

    def of(self, value: Any) -> tuple[int, int]:
        values, characters = 1, len(value) if isinstance(value, str) else 0
        if isinstance(value, dict | list):
            parts = [self.of(child) for child in (value.values() if isinstance(value, dict) else value)]
        elif isinstance(value, str):
            parts = [self.of_name(rest[: rest.index("}")].strip()) for rest in _opened(value)]
        else:
            parts = []
        return values + sum(part[0] for part in parts), characters + sum(part[1] for part in parts)

    def of_name(self, name: str) -> tuple[int, int]:
        if name not in self.known:
            self.known[name] = 1, 0  # while it is measured: a circle is OmegaConf's to refuse
            self.known[name] = self.of(self._find(name))
        return self.known[name]

    def _find(self, name: str) -> Any:
        found: Any = self.given
        for part in re.split(r"[.\[\]]+", name.rstrip("]")):
            if isinstance(found, list) and part.isdecimal() and int(part) < len(found):
                found = found[int(part)]
            elif isinstance(found, dict) and part in found:
                found = found[part]
            else:
                return None  # OmegaConf's to refuse
        return found
