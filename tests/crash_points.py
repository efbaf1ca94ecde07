"""Every crash point at which a test kills a process, by the test that does. `tests/test_crash_points.py` proves that no
point of the program is missing here."""

# tests/end_to_end/test_resume.py: one run, killed at each in turn. Iteration 1 has no checkpoint, 2 has one. None of a
# stage that the launch before it may have committed: prompts come while the iteration before trains, and a rollout
# while it is accounted for.
RUN = (
    "start/sealed",
    "1/prompts/computed",
    "1/rollout/computed",
    "1/reward/begun",
    "1/reference/committed",
    "1/advantage/computed",
    "1/update/trained",
    "publish/1/Q6",  # the engine has the new weights, nothing says so yet
    "publish/1/committed",
    "1/iteration/ended",
    "2/update/computed",  # trained, exported and sealed, but not committed
    "2/publish/committed",
    "2/evaluate/begun",
    "2/stages/ended",
)

# tests/tasks/test_trainer_crashes.py: one run of updates, killed at each in turn; update 3 has a checkpoint.
TRAINER = (
    "trainer/0/export.writing/0",
    "publish/1/P0",
    "trainer/1/step.before/0",
    "trainer/1/step.after/0",  # the first of four optimizer steps
    "trainer/1/update.after/0",
    "trainer/1/export.before/0",
    "trainer/1/export.writing/0",
    "trainer/1/export.after/0",
    "publish/1/P2",
    "publish/1/P3",
    "publish/1/P4",
    "publish/1/P5",
    "publish/1/sealed",
    "trainer/2/step.after/0",
    "trainer/2/checkpoint.before/0",
    "trainer/2/checkpoint.writing/0",
    "trainer/2/checkpoint.staged/0",
    "trainer/2/checkpoint.after/0",
    "trainer/3/step.before/0",
    "trainer/3/export.after/0",
)
# The same with two ranks, of which only the second dies.
SECOND_RANK = ("trainer/1/export.writing/1", "trainer/2/checkpoint.writing/1")

# tests/tasks/test_install.py: the publisher of version 1, with an engine that lives on.
PUBLISHER = (*(f"publish/1/Q{i}" for i in range(1, 11)), "publish/1/committed")

# tests/data/test_retention.py: a pass that deletes what is no longer needed.
RETENTION = ("retire/withdrawn", "retire/deleted", "retire/checkpoint")
# The same at any point of random histories.
ANY_HISTORY = ("retire/retired", "clean/removed", "gc/removed")
