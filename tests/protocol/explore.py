"""One exploration: so many runs of the machine over the product, or over a product without one of its guarantees."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from tests.protocol.broken import VARIANTS
from tests.protocol.machine import machine
from tests.protocol.world import Broken, Template, World, session

MEMORY = Path("/dev/shm")  # no disk is waited for


class Kind(NamedTuple):
    ranks: int  # of each engine
    engines: int
    external: bool  # nobody here can restart them, and they outlive the publisher


class Found(NamedTuple):
    counts: dict[str, int]
    violation: str  # the first one and the steps to it; empty: none


def explore(kinds: list[Kind], number: int, runs: int, steps: int, variant: str = "") -> Found:
    """The runs of this number: the same each time. Raises what is no violation of an invariant."""
    patch = pytest.MonkeyPatch()
    with TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None) as folder:
        template = Template(Path(folder))
        if variant:
            VARIANTS[variant](patch)
        with session(patch):
            explored = seed(number)(machine(template, Path(folder), st.sampled_from(kinds)))
            bounds = settings(
                max_examples=runs,
                stateful_step_count=steps,
                database=None,
                deadline=None,
                print_blob=False,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
                phases=[Phase.generate],
            )
            try:
                run_state_machine_as_test(explored, settings=bounds)
            except Broken as error:
                return Found(dict(World.counts), "\n".join([str(error), *getattr(error, "__notes__", [])]))
            return Found(dict(World.counts), "")
