"""The same misbehaviour in a worker that is not confined, as on a kernel without Landlock."""

import sys

from tests.tasks.bad_rewards import act as act

sys.modules["__main__"].confine = lambda: None  # type: ignore[attr-defined]  # of tasks.rewards.child
