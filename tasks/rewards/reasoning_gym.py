"""The scorer of a reasoning-gym task, for prompts of the source `reasoning_gym`."""

from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from tasks.rewards import RewardInput


def score(sample: RewardInput) -> float:
    """The task's own score of the stripped response, from 0 to 1. The task is `source_dataset` in the prompt's data."""
    entry = {"question": sample.prompt, "answer": sample.answer, "metadata": sample.data}
    return float(_scorer(sample.data["source_dataset"])(sample.response.strip(), entry))


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym.get_score_answer_fn(task)
