"""An experiment from YAML: files that extend each other, a graph by name, overrides, interpolation, checks.

Later wins: the defaults of `conf.schema`, the file that is extended, the file, the overrides in their order. Mappings
merge, lists and single values replace. A named entry (of `pools`, `graph`, `reward.functions`) set to null is removed.
Relative paths in settings are relative to the current directory; `extends:` alone is relative to its file.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from conf.check import contradictions, without_effect
from conf.errors import ConfigError
from conf.fields import Problem, problems, unknown
from conf.interpolation import interpolation_problems
from conf.precision import auto
from conf.schema import Experiment
from conf.source import Located, dotted, dump, kind, parse, plain, read, show_path

GRAPHS = Path(__file__).parent / "graph"
NAMED = (("pools",), ("graph",), ("reward", "functions"))  # mappings whose entries null removes
MAX_LINES, MAX_LINE = 20, 500  # of an error: problems, and characters of one
# May differ when a run continues, with all below them: it may be extended and moved, take other devices, keep less on a
# full disk, warn later. Those change where, how fast and for how long, not what is computed; sums in another order are
# rounded differently.
FREE = (
    "name",
    "iterations",
    "runs_dir",
    "pools",
    "update.zero_stage",
    "update.checkpoint_every",
    "update.keep_checkpoints",
    "publish.keep_versions",
    "schedule.stall_timeout_s",
    "bias",
)


@dataclass(frozen=True)
class Loaded:
    """An experiment and where it comes from."""

    file: str
    experiment: Experiment
    resolved: dict[str, Any]  # every setting, defaults and interpolations filled in
    text: str  # `resolved` as YAML; loading it gives the same experiment
    digest: str  # SHA-256 of `resolved` without FREE
    sources: Mapping[str, str]  # dotted field -> `file:line` or override, of what was given; defaults are absent
    warnings: tuple[str, ...]  # options without effect

    def place(self, field: str) -> str:
        """Where a dotted field was set; for a default, where what holds it was, or the file."""
        return _Places(self.file, self.sources).of(field)


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment in a YAML file, checked. Raises ConfigError, one line for each problem."""
    return load(path, overrides).experiment


def load(path: str | Path, overrides: Sequence[str] = ()) -> Loaded:
    """As `load_experiment`, with the resolved settings, their digest and places, and warnings."""
    file = Path(path)
    tree = _located(asdict(Experiment()))
    for layer in [*_layers(file), *map(_override, overrides)]:
        tree = _merge(tree, layer)
    if tree.value["name"].value == "":
        tree = _merge(tree, Located({"name": Located(file.stem, show_path(file))}, show_path(file)))
    places = _Places(show_path(file), {key: at for key, at in _walk(tree) if key and at})

    given = plain(tree)
    places.refuse(problems(given, Experiment, resolved=False))
    places.refuse(interpolation_problems(given))
    experiment, resolved = _resolve(given, places)
    places.refuse(problems(resolved, Experiment, resolved=True))
    places.refuse(contradictions(experiment))
    return Loaded(
        file=places.file,
        experiment=experiment,
        resolved=resolved,
        text=dump(escaped(_with_removals(resolved))),
        digest=config_digest(resolved),
        sources=places.known,
        warnings=tuple(map(places.line, without_effect(experiment, places.known))),
    )


def _with_removals(resolved: dict[str, Any]) -> dict[str, Any]:
    """The settings with a null for each default pool that was removed: without it, loading them brings it back."""
    removed = dict.fromkeys(name for name in Experiment().pools if name not in resolved["pools"])
    return {**resolved, "pools": {**resolved["pools"], **removed}}


def config_digest(resolved: Mapping[str, Any]) -> str:
    """SHA-256 over the canonical JSON of the settings that may not change within a run."""
    kept = _fixed(resolved)
    return hashlib.sha256(json.dumps(kept, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()).hexdigest()


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings of two resolved experiments that differ and enter the digest: dotted field -> (before, after).

    None stands for a setting that one of them lacks.
    """
    left, right = dict(_leaves(_fixed(before))), dict(_leaves(_fixed(after)))
    fields = dict.fromkeys([*left, *right])
    return {key: (left.get(key), right.get(key)) for key in fields if left.get(key) != right.get(key)}


def _fixed(value: Any, path: tuple[str, ...] = ()) -> Any:
    """The settings without FREE."""
    if not isinstance(value, Mapping):
        return value
    return {key: _fixed(child, (*path, key)) for key, child in value.items() if dotted((*path, key)) not in FREE}


def ready_made_graphs() -> list[str]:
    return sorted(file.stem for file in GRAPHS.glob("*.yaml"))


@dataclass(frozen=True)
class _Places:
    file: str
    known: Mapping[str, str]

    def of(self, field: str) -> str:
        while field and field not in self.known:
            field = re.sub(r"(^|\.|\[)[^.\[]*$", "", field)
        return self.known.get(field, self.file)

    def line(self, problem: Problem) -> str:
        field, message = problem
        return f"{self.of(field)}: {field or 'the experiment'} {message}"

    def refuse(self, found: Iterable[Problem]) -> None:
        if lines := [line[:MAX_LINE] for line in dict.fromkeys(map(self.line, found))]:
            more = [f"{self.file}: and {len(lines) - MAX_LINES} more"] if len(lines) > MAX_LINES else []
            raise ConfigError("\n".join(lines[:MAX_LINES] + more))


def _layers(path: Path, below: tuple[Path, ...] = ()) -> list[Located]:
    """The files of an `extends` chain, the first one extended first."""
    tree = read(path)
    values = dict(tree.value)
    if "graph" in values:
        values["graph"] = _graph(values["graph"])
    extends = values.pop("extends", None)
    own = Located(values, tree.at)
    if extends is None:
        return [own]
    if not isinstance(extends.value, str):
        raise ConfigError(f"{extends.at}: extends must name a file, got {kind(extends.value)}")
    target = Path(os.path.normpath(path.parent / extends.value))
    try:
        if not target.is_file():
            raise ConfigError(f"{extends.at}: extends must name a file, but there is no {show_path(target)}")
        below = (*below, path.resolve())
        if target.resolve() in below:
            raise ConfigError(f"{extends.at}: extends must not lead in a circle, got back to {show_path(target)}")
    except OSError as error:
        problem = f"must name a file, got {kind(extends.value)}: {error.strerror}"
        raise ConfigError(f"{extends.at}: extends {problem}") from error
    return [*_layers(target, below), own]


def _graph(tree: Located) -> Located:
    """The nodes that `graph:` stands for: a ready-made graph's, given ones, or given ones on top of `extends:`."""
    if isinstance(tree.value, str):
        base, nodes = tree, Located({}, tree.at)
    elif isinstance(tree.value, dict) and "extends" in tree.value:
        base = tree.value["extends"]
        nodes = Located({name: node for name, node in tree.value.items() if name != "extends"}, tree.at)
    else:
        return tree
    if base.value not in (known := ready_made_graphs()):
        problem = f"must name a ready-made graph, got {kind(base.value)}; {unknown(str(base.value), known)}"
        raise ConfigError(f"{base.at}: graph {problem}")
    return replace(_merge(_graph(read(GRAPHS / f"{base.value}.yaml")), nodes, ("graph",)), at=tree.at, replaces=True)


def _override(text: str) -> Located:
    """`rollout.temperature=0.7` as the mapping it stands for; the value is YAML."""
    at = f"override {text!r}"
    name, equals, value = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"{at}: must be written as dotted.field=value")
    if not value.strip():
        raise ConfigError(f'{at}: must have a value, got nothing ("" is empty text, null removes an entry)')
    tree = parse(value, at, lines=False)
    if parts == ["graph"]:
        tree = _graph(tree)
    for part in reversed(parts):
        tree = Located({part: tree}, at)
    return tree


def _merge(base: Located, over: Located, path: tuple[str, ...] = ()) -> Located:
    if over.replaces or not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    merged = dict(base.value)
    for name, child in over.value.items():
        if child.value is None and path in NAMED:
            if name not in merged:
                problem = f"must exist to be removed by null; {unknown(name, list(merged))}"
                raise ConfigError(f"{child.at}: {dotted((*path, name))} {problem}")
            del merged[name]
        else:
            merged[name] = _merge(merged[name], child, (*path, name)) if name in merged else child
    return Located(merged, base.at or over.at, base.replaces)


def _resolve(given: dict[str, Any], places: _Places) -> tuple[Experiment, dict[str, Any]]:
    """Types and interpolations by OmegaConf; what `auto` means on this machine.

    The default pools are in `given`, unless they were removed.
    """
    try:
        config = OmegaConf.merge(OmegaConf.structured(Experiment(pools={})), given)
        meant = auto(config.model.device)
        chosen = [f"{field}={value}" for field, value in meant.items() if OmegaConf.select(config, field) == "auto"]
        config = OmegaConf.merge(config, OmegaConf.from_dotlist(chosen))
        resolved: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        experiment: Any = OmegaConf.to_object(config)
    except (OmegaConfBaseException, RecursionError) as error:
        reason = str(error).split("\n")[0] or "it nests too deeply"
        line = places.line((getattr(error, "full_key", None) or "", f"must be a value or an interpolation: {reason}"))
        raise ConfigError(line) from error
    return experiment, resolved


def escaped(value: Any) -> Any:
    """The value with literal `${` written as OmegaConf reads it: escaped, the backslashes before it doubled."""
    if isinstance(value, dict):
        return {key: escaped(child) for key, child in value.items()}
    if isinstance(value, list):
        return [escaped(child) for child in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _located(value: Any) -> Located:
    if isinstance(value, dict):
        return Located({key: _located(child) for key, child in value.items()}, "")
    return Located([_located(child) for child in value] if isinstance(value, list) else value, "")


def _walk(tree: Located, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, str]]:
    yield dotted(path), tree.at
    if isinstance(tree.value, dict | list):
        for key, child in tree.value.items() if isinstance(tree.value, dict) else enumerate(tree.value):
            yield from _walk(child, (*path, key))


def _leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, child in value.items():
            yield from _leaves(child, (*path, key))
    else:
        yield dotted(path), value
