"""A reward that a random model's answers differ in, so that there is something to train."""

from tasks.rewards import RewardInput


def letters(sample: RewardInput) -> float:
    """The share of ASCII letters among the characters of the response."""
    return sum(c.isascii() and c.isalpha() for c in sample.response) / max(1, len(sample.response))
