"""What an engine's answer to a generation must be: every check of it, and the types that leave this boundary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from conf.errors import EngineError

LOWEST = float(np.finfo(np.float32).min)  # log-probabilities are kept in float32: below it they would become -inf
MOST_RETRACTIONS = 1_000_000


class Refused(EngineError):
    """The request itself is wrong (its rid is in the message); sending it again cannot help."""


class Unavailable(EngineError):
    """No usable connection or answer in time; another try may pass."""


class NoAnswer(Unavailable):
    """It was sent, and no answer came, or not in time. It may have been done, or may be done later."""


class BadAnswer(EngineError):
    """The engine answered 200 with something that breaks its contract; the answer is not used."""


class Aborted(BadAnswer):
    """The engine cut the response off (a pause, or no memory left) and gave what it had; a policy may go on from it."""

    def __init__(self, message: str, partial: "Generation") -> None:
        super().__init__(message)
        self.partial = partial


@dataclass(frozen=True)
class Sampling:
    max_new_tokens: int
    temperature: float  # 0: greedy
    top_p: float = 1.0
    top_k: int = -1  # -1: all

    def to_sglang(self) -> dict[str, Any]:
        """Under SGLang's names. What would change the distribution is switched off explicitly: a server may have
        other defaults (`--preferred-sampling-params`)."""
        return {
            "max_new_tokens": self.max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "n": 1,
            "skip_special_tokens": False,
        }


@dataclass(frozen=True)
class Span:
    """Output tokens [start, end) were generated under the weights `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class Generation:
    ids: tuple[int, ...]  # with the end-of-sequence token, where the model ended
    logprobs: tuple[float, ...]  # nats, of each id: after temperature, before top_p and top_k
    spans: tuple[Span, ...]  # partition [0, len(ids)), in order
    finish_reason: str  # stop | length; abort in a partial one
    cached_tokens: int  # prompt tokens taken from the prefix cache
    retractions: int = 0  # times the engine gave up its KV and computed it anew


def parse_generation(answer: Mapping[str, Any], vocab_size: int, prompt_tokens: int, max_new_tokens: int) -> Generation:
    """The answer of /generate with `return_logprob`, checked. Raises BadAnswer; Aborted where it was cut off."""
    try:
        meta = answer["meta_info"]
        ids = tuple(answer["output_ids"])
        reason = meta["finish_reason"]["type"]
        if reason not in ("stop", "length", "abort"):
            raise BadAnswer(f"finish reason must be stop or length, got {meta['finish_reason']}")
        if not ids and reason != "abort":
            raise BadAnswer("expected at least one token, got none")
        for token in ids:
            if type(token) is not int or not 0 <= token < vocab_size:
                raise BadAnswer(f"token ids must be in [0, {vocab_size}), got {token!r}")
        if len(ids) > max_new_tokens:
            raise BadAnswer(f"expected at most {max_new_tokens} tokens, got {len(ids)}")
        if meta["completion_tokens"] != len(ids):
            raise BadAnswer(f"{meta['completion_tokens']} completion tokens are reported, {len(ids)} came")
        logprobs = parse_logprobs(meta["output_token_logprobs"], ids)
        spans = tuple(Span(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]) if ids else ()
        _check_partition(spans, len(ids))
        queued = (
            reason == "abort" and "cached_tokens" not in meta
        )  # SGLang says neither of one that it had in its queue
        cached = 0 if queued else _count(meta, "cached_tokens", prompt_tokens)
        retractions = 0 if queued else _count(meta, "num_retractions", MOST_RETRACTIONS)
        found = Generation(ids, logprobs, spans, reason, cached, retractions)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BadAnswer(f"a part of the answer is missing or of the wrong type: {error!r}") from error
    if reason == "abort":
        message = f"finish reason must be stop or length, got abort after {len(ids)} tokens: {meta['finish_reason']}"
        raise Aborted(message, found)
    return found


def _count(meta: Mapping[str, Any], name: str, most: int) -> int:
    value = meta[name]
    if type(value) is not int or not 0 <= value <= most:
        raise BadAnswer(f"{name} must be 0 to {most}, got {value!r}")
    return value


def parse_logprobs(entries: Sequence[Any], ids: Sequence[int]) -> tuple[float, ...]:
    """SGLang's [log-probability, token id, text] entries for exactly these ids: finite and <= 0. Raises BadAnswer."""
    if len(entries) != len(ids):
        raise BadAnswer(f"expected {len(ids)} log-probabilities, one a token, got {len(entries)}")
    values = []
    for position, ((value, token, *_), expected) in enumerate(zip(entries, ids, strict=True)):
        if token != expected:
            raise BadAnswer(f"log-probability {position} must be of token {expected}, is of token {token}")
        if type(value) not in (float, int) or not LOWEST < value <= 0:  # false for NaN too
            raise BadAnswer(f"log-probability {position} must be finite and <= 0, got {value}")
        values.append(float(value))
    return tuple(values)


def _check_partition(spans: Sequence[Span], length: int) -> None:
    at = 0
    for span in spans:
        types = (type(span.label), type(span.start), type(span.end))
        if types != (str, int, int) or span.start != at or span.end <= at:
            raise BadAnswer(f"version spans must cover tokens 0..{length} in order without gap or overlap, got {spans}")
        at = span.end
    if at != length:
        raise BadAnswer(f"version spans must cover {length} tokens, got {spans}")
