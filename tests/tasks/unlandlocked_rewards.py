"""The same misbehaviour in a worker on a kernel without Landlock."""

import sys

from tests.tasks.bad_rewards import act as act

sys.modules["__main__"].landlock_version = lambda: 0  # type: ignore[attr-defined]  # of tasks.rewards.child
