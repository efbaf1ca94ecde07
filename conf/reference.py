"""The page docs/settings.md, made from `conf.schema`: `python -m conf.reference > docs/settings.md`."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal, get_args, get_origin, get_type_hints

from conf.fields import bounds_text
from conf.load import FREE
from conf.schema import Experiment

_INTRO = f"""# Settings

Made from `conf/schema.py` by `python -m conf.reference > docs/settings.md`; a test compares the two.

An experiment is one YAML file. What it leaves out has the default below.

- `extends: other.yaml` (relative to the file that says it) starts from another experiment. Later wins: mappings merge,
  lists and single values replace. A named entry of `pools`, `graph` or `reward.functions` set to `null` is removed.
- `graph: grpo` takes a ready-made graph of `conf/graph/`; `graph: {{extends: grpo, drop_short: {{...}}}}` changes one.
- `${{rollout.temperature}}` takes the value of another setting by its full name (`\\${{` is a literal one).
- On the command line `rollout.temperature=0.7` overrides; its value is YAML.
- Paths in settings are relative to the current directory, not to the file.
- The YAML is version 1.2's: `1e-6` is a number, `yes` and `on` are text. Unknown and repeated keys are errors.
- {", ".join(f"`{name}`" for name in FREE)} may change when a run continues. Every other setting is fixed for the run.
"""


def settings_reference() -> str:
    """Every setting as Markdown: type, default, unit, range and meaning."""
    return "\n".join([_INTRO, *_section(Experiment, "")]) + "\n"


def _section(declared: Any, prefix: str) -> Iterator[str]:
    """One table for the class's own fields, then one section for each class below it."""
    types, below = get_type_hints(declared), []
    yield "| setting | type | default | unit | range | meaning |"
    yield "|---|---|---|---|---|---|"
    for field in dataclasses.fields(declared):
        kind = types[field.name]
        entry = get_args(kind)[1] if get_origin(kind) is dict else kind
        name, meaning = prefix + field.name, field.metadata["help"]
        if dataclasses.is_dataclass(entry):
            below.append((entry, name if entry is kind else f"{name}.<name>", meaning))
            continue
        cells = [
            f"`{name}`",
            _type(kind),
            _default(field),
            field.metadata["unit"],
            bounds_text(field.metadata),
            meaning,
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    for entry, name, meaning in below:
        yield from ("", f"## `{name}`", "", f"{meaning[0].upper()}{meaning[1:]}.", "")
        yield from _section(entry, f"{name}.")


def _type(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(f"`{choice}`" for choice in get_args(kind))
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    if get_origin(kind) is list:
        return f"list of {names[get_args(kind)[0]]}"
    return "mapping" if get_origin(kind) is dict else names[kind]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()}`"
    if field.default is dataclasses.MISSING:
        return "required"
    if field.default == "":
        return "empty"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


if __name__ == "__main__":
    print(settings_reference(), end="")
