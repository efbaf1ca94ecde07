"""Rewards for dynamic sampling: one that few groups of the tiny model disagree about, and one that none does."""

import hashlib

from tasks.rewards import RewardInput


def rare(sample: RewardInput) -> float:
    """1 for about one response in twenty, the same for the same response."""
    return float(hashlib.sha256(sample.response.encode()).digest()[0] < 13)


def constant(sample: RewardInput) -> float:
    return 1.0
