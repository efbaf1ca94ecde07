"""A small valid experiment and ways to load variants of it."""

from pathlib import Path

import pytest

from conf.errors import ConfigError
from conf.load import Loaded, load

MINIMAL = """\
model: {path: some/model}
prompts: {task: basic_arithmetic}
reward: {functions: {right: {path: "package.module:function"}}}
graph: grpo_without_reference
"""


def write(folder: Path, text: str, name: str = "x.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load_with(folder: Path, *overrides: str, text: str = "") -> Loaded:
    return load(write(folder, MINIMAL + text), overrides)


def refusal(folder: Path, *overrides: str, text: str = MINIMAL) -> str:
    """The message with which the experiment is refused, without the folder's name."""
    with pytest.raises(ConfigError) as error:
        load(write(folder, text), overrides)
    return str(error.value).replace(f"{folder}/", "")
