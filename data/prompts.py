"""Prompt sources with a cursor: reasoning-gym tasks, JSONL and Parquet files; and how prompts become token ids."""

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conf.errors import ConfigError, DataError
from conf.schema import Prompts
from data.model_files import tokenizer_digest as tokenizer_digest


@dataclass(frozen=True)
class Prompt:
    """One prompt. Produced by a source; the stage `prompts` makes a row of it.

    `divmod(index, rows of the source)` is (epoch, row); held-out prompts have the index of epoch 0.
    """

    index: int
    text: str  # the user's message
    answer: str  # reference answer; empty where the source has none (some reasoning-gym tasks: their scorer needs none)
    data: str  # JSON object: whatever else the source knows


@dataclass(frozen=True)
class Cursor:
    """Where a source goes on: `position` prompts of `epoch` have been drawn."""

    epoch: int
    position: int

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises DataError for anything but two counts; other keys are not looked at."""
        counts = [value.get("epoch"), value.get("position")]
        if not all(type(n) is int and n >= 0 for n in counts):
            raise DataError(f"a prompt cursor needs epoch and position, both counts, got {dict(value)}")
        return cls(value["epoch"], value["position"])


Row = tuple[str, str, str]  # text, answer, data


class Rows(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> Row: ...


class PromptSource:
    """Rows in a fixed order: the first ones are drawn, epoch after epoch, the last `held_out` never.

    `digest` changes with the rows (files) or with what generates them (reasoning-gym).
    """

    def __init__(self, name: str, rows: Rows, digest: str, *, held_out: int, shuffle: bool, seed: int) -> None:
        self.name, self.digest = name, digest
        self._rows, self._shuffle, self._seed = rows, shuffle, seed
        self._drawn = len(rows) - held_out  # prompts of an epoch

    def start(self) -> Cursor:
        return Cursor(0, 0)

    def take(self, cursor: Cursor, n: int) -> tuple[list[Prompt], Cursor]:
        """The next n prompts, over the end of an epoch where needed, and the cursor after them.

        Raises DataError for more prompts than an epoch has, or a cursor beyond it (the source has changed).
        """
        if cursor.position >= self._drawn:
            raise DataError(f"{self.name}: an epoch has {self._drawn} prompts, the cursor stands at {cursor.position}")
        if not 1 <= n <= self._drawn:
            raise DataError(f"{self.name}: an epoch has {self._drawn} prompts, asked for {n} at once")
        prompts = []
        first = cursor.epoch * self._drawn + cursor.position
        for drawn in range(first, first + n):
            epoch, position = divmod(drawn, self._drawn)
            prompts.append(self._prompt(epoch, int(self._order(epoch)[position])))
        return prompts, self.after(cursor, n)

    def after(self, cursor: Cursor, n: int) -> Cursor:
        """The cursor after the next n prompts."""
        return Cursor(*divmod(cursor.epoch * self._drawn + cursor.position + n, self._drawn))

    def held_out(self) -> list[Prompt]:
        """The prompts kept for evaluation: the last rows, in their order."""
        return [self._prompt(0, row) for row in range(self._drawn, len(self._rows))]

    def _prompt(self, epoch: int, row: int) -> Prompt:
        return Prompt(epoch * len(self._rows) + row, *self._rows[row])

    def _order(self, epoch: int) -> Sequence[int] | np.ndarray:
        return _permutation(self._seed, epoch, self._drawn) if self._shuffle else range(self._drawn)


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    """Raw Philox output, sorted: unlike Generator.permutation it is the same in every numpy version (NEP 19)."""
    return np.argsort(np.random.Philox(key=[seed, epoch]).random_raw(n), kind="stable")


def open_prompts(settings: Prompts, seed: int, held_out: int, at_once: int = 0) -> PromptSource:
    """Open the source that the settings name; every row of a file is checked now.

    at_once: prompts an iteration may send, where that is more than it needs.
    Raises ConfigError for settings that cannot work, DataError (`file:line: ...`) for a bad row.
    """
    if settings.source == "reasoning_gym":
        name, rows, digest = _reasoning_gym(settings, seed)
    else:
        path = Path(settings.path)
        if not path.is_file():
            raise ConfigError(f"prompts.path must be a {settings.source} file, got {settings.path!r}")
        name, rows = settings.path, (_read_jsonl if settings.source == "jsonl" else _read_parquet)(path, settings)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    if len(rows) - held_out < settings.per_iteration:
        raise ConfigError(
            f"prompts.per_iteration must be <= the prompts to draw from: {name} has {len(rows)}, "
            f"{held_out} are kept for evaluation, got {settings.per_iteration}"
        )
    if len(rows) - held_out < at_once:
        raise ConfigError(
            f"sampling may send {at_once} prompts in an iteration (prompts.per_iteration x sampling.oversample x "
            f"sampling.max_rounds): {name} has {len(rows)}, {held_out} are kept for evaluation; lower one of them"
        )
    return PromptSource(name, rows, digest, held_out=held_out, shuffle=settings.shuffle, seed=seed)


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)


_LONE_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON's "\\ud800" makes one; no encoder takes it


def _row(record: Mapping[str, Any], settings: Prompts, where: str) -> Row:
    """A record of a file as a row. `where` is `file:line`."""
    text, answer = (record.get(name) for name in (settings.prompt_field, settings.answer_field))
    for name in (settings.prompt_field, settings.answer_field):
        if name not in record:
            raise DataError(f"{where}: field {name!r} is missing; found {', '.join(sorted(record)) or 'none'}")
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: {settings.prompt_field} must be a text, got {text!r:.100}")
    if not isinstance(answer, str | int) or isinstance(answer, bool):
        raise DataError(f"{where}: {settings.answer_field} must be a text or a whole number, got {answer!r:.100}")
    others = {k: v for k, v in record.items() if k not in (settings.prompt_field, settings.answer_field)}
    try:
        row = text, str(answer), _json(others)
    except RecursionError:
        raise DataError(f"{where}: must not nest that deeply") from None
    for part in row:
        if (character := _LONE_SURROGATE.search(part)) is not None:
            raise DataError(f"{where}: must be Unicode text, got half a surrogate pair, {character[0]!r}")
    return row


def _read_jsonl(path: Path, settings: Prompts) -> Rows:
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"), object_pairs_hook=_unique)
            except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
                raise DataError(f"{path}:{number}: expected one JSON object a line: {error}") from None
            if not isinstance(record, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}")
            rows.append(_row(record, settings, f"{path}:{number}"))
    return rows


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{twice!r} is given twice")
    return record


def _read_parquet(path: Path, settings: Prompts) -> Rows:
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        names = file.schema_arrow.names
        if len(set(names)) < len(names):
            raise DataError(f"{path}: columns must have different names, got {names}")
        rows: list[Row] = []
        for batch in file.iter_batches():
            rows += [
                _row(record, settings, f"{path}:{len(rows) + i}") for i, record in _records(batch, path, len(rows))
            ]
        return rows
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: in the name of a column
        raise DataError(f"{path}: not a readable Parquet file: {' '.join(str(error).split())}") from None


def _records(batch: pa.RecordBatch, path: Path, before: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a batch, counted from 1. Raises DataError for one whose values Python cannot hold, like bad UTF-8."""
    try:
        yield from enumerate(batch.to_pylist(), 1)
    except (ValueError, OverflowError):
        for i in range(len(batch)):
            try:
                batch.slice(i, 1).to_pylist()
            except (ValueError, OverflowError) as error:
                raise DataError(f"{path}:{before + i + 1}: not readable: {error}") from None
        raise


class _Generated:
    """reasoning-gym generates a row when it is asked for, from the seed and the row number alone."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, row: int, /) -> Row:
        item = self._dataset[row]
        answer = "" if item["answer"] is None else str(item["answer"])
        return item["question"], answer, _json(item["metadata"])


def _reasoning_gym(settings: Prompts, seed: int) -> tuple[str, Rows, str]:
    try:
        import reasoning_gym
    except ImportError:
        raise ConfigError("prompts.source reasoning_gym needs the package: pip install 'ratchet-rl[demo]'") from None
    try:
        dataset = reasoning_gym.create_dataset(settings.task, seed=seed, size=settings.size, **settings.task_options)
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"prompts.task must be a reasoning-gym task with its own options: {error}") from None
    made_from = [settings.task, dict(settings.task_options), settings.size, seed]
    digest = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()
    return f"reasoning_gym/{settings.task}", _Generated(dataset), digest


@functools.cache
def load_tokenizer(folder: str) -> Any:
    """The tokenizer of a model folder, loaded once a process and never from the network."""
    from transformers import AutoTokenizer  # seconds; only who needs it pays

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)  # None would ask
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path must hold a tokenizer, got {folder!r}: {error}") from error


def encode_prompts(tokenizer: Any, prompts: Sequence[Prompt], system: str, max_tokens: int) -> list[list[int]]:
    """Token ids of each prompt: the chat template with the assistant's turn opened; plain text where there is none.

    Raises DataError for a prompt that is longer than `max_tokens`, by its index and length.
    """
    encoded = []
    for prompt in prompts:
        if tokenizer.chat_template:
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": prompt.text})
            ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(f"{system}\n\n{prompt.text}" if system else prompt.text)["input_ids"]
        if not 1 <= len(ids) <= max_tokens:
            raise DataError(
                f"prompt {prompt.index} must have 1 to {max_tokens} tokens (prompts.max_tokens), got {len(ids)}"
            )
        encoded.append([int(i) for i in ids])
    return encoded
