"""Rewards for answers that are whole numbers."""

import re

from tasks.rewards import RewardInput

_NUMBER = re.compile(r"-?\d+")


def last_number(sample: RewardInput) -> float:
    """1 if the last whole number in the response equals the reference answer, else 0."""
    found = _NUMBER.findall(sample.response)
    return float(bool(found) and int(found[-1]) == int(sample.answer))


def only_number(sample: RewardInput) -> float:
    """1 if the response is one whole number and nothing else but space, else 0."""
    return float(re.fullmatch(r"\s*-?\d+\s*", sample.response) is not None)
