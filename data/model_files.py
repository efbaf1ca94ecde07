"""What a weight package takes over from the starting model's folder: tensor list, configuration, tokenizer."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conf.errors import ConfigError, DataError
from data.shards import read_header

MODEL_FILES = ("config.json", "generation_config.json")
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map*", "added_tokens*", "chat_template*", "vocab*", "merges*")
_NO_CODE = "a model's own code is never run; remove it where transformers and SGLang know the architecture themselves"
SUFFIXES = (".json", ".jinja", ".txt", ".model")  # no code, no weights


def check_model(folder: Path) -> None:
    """Raise ConfigError for what is no model's folder, holds no safetensors, or brings code of its own."""
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(
            f"model.path must be a model's folder with config.json, got {str(folder)!r}; "
            "`ratchet prepare` makes the demo's"
        )
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"model.path must hold the weights as *.safetensors (no pickles), found none in {folder}")
    if code := sorted(path.name for path in folder.glob("*.py")):
        raise ConfigError(f"model.path must hold no code, found {code[0]} in {folder}: {_NO_CODE}")
    for path in sorted(folder.glob("*config*.json")):
        if "auto_map" in _json_object(path):
            raise ConfigError(f"model.path must hold no code, but {path} names some (auto_map): {_NO_CODE}")


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise ConfigError(f"model.path must hold readable files, but {path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"model.path must hold readable files, but {path} holds no JSON object")
    return value


def model_tensors(model: Path, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """What a package of this model must hold: name -> (dtype, shape), floating-point tensors in `dtype`."""
    found = [read_header(path) for path in sorted(model.glob("*.safetensors"))]
    if not found:
        raise DataError(f"{model} must hold the model's weights as *.safetensors, found none")
    return {
        name: (dtype if "float" in entry.dtype else entry.dtype, entry.shape)
        for header in found
        for name, entry in header.items()
    }


def companions(model: Path) -> list[Path]:
    """What a package has of the model's folder besides weights: configuration and tokenizer files."""
    return _matching(model, (*MODEL_FILES, *TOKENIZER_FILES))


def copy_model_files(model: Path, staging: Path, dtype: str) -> list[str]:
    """Copy config and tokenizer files; config.json tells the package's dtype. The names of the copies."""
    found = companions(model)
    for path in found:
        if path.name != "config.json":
            shutil.copyfile(path, staging / path.name)  # content only: a link becomes a file
    config = json.loads((model / "config.json").read_bytes())
    older = {"torch_dtype": dtype} if "torch_dtype" in config else {}  # transformers renamed it to dtype
    (staging / "config.json").write_text(json.dumps({**config, "dtype": dtype, **older}, indent=2, sort_keys=True))
    return [path.name for path in found]


def tokenizer_digest(folder: Path) -> str:
    """SHA-256 over names and contents of the tokenizer files: the same for a model folder and a package made from it.

    Raises ConfigError where there is none.
    """
    found = _matching(folder, TOKENIZER_FILES)
    if not found:
        raise ConfigError(f"model.path must hold a tokenizer, found no {', '.join(TOKENIZER_FILES)} in {folder}")
    lines = [f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in found]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path.suffix in SUFFIXES)
