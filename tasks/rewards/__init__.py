"""Reward functions. A reward is `def f(sample: RewardInput, **options) -> float`, named in YAML by its import path."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RewardInput:
    """One sample, as a reward function sees it."""

    prompt: str  # the user's message
    response: str  # the decoded response, without the end token
    answer: str  # the reference answer
    data: dict[str, Any]  # whatever else the prompt source knows; each call has a copy of its own
    finish_reason: str  # stop; length or deadline where the response was cut off
    tokens: int  # length of the response in tokens
