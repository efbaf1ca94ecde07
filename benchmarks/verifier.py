"""The reward of benchmarks.skewed, in a module of its own: its worker processes import nothing else."""

import time

from tasks.rewards import RewardInput


def verify(sample: RewardInput, *, seconds: float) -> float:
    """0 or 1, whatever the answer, after so many seconds."""
    time.sleep(seconds)
    return float(sample.tokens % 2)
