"""Waits shown as waits: a stage that waits is Running under a name that says for what, and each second gets one cause.

The sub-state is sent as an event; the call is semi-internal to Prefect, so it is only made here (tests/flows pins it).
It is never used on flow runs: there it raised their run count.
"""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import get_args

from data.accounts import Spending, StageRow, Wait

UPSTREAM, POOL, WEIGHTS, QUEUE = "AwaitingUpstream", "AwaitingPool", "AwaitingWeights", "AwaitingQueue"
REWARD = "AwaitingReward"
HANDOVER = "AwaitingHandover"  # a co-located pool changes between rollout and training


def _set_state(name: str, message: str = "") -> None:
    """Rename the current task run's Running state; outside a task run it does nothing."""
    # Here, or what only reads waits would wait for Prefect's import: the planner, `ratchet ledger`.
    from prefect.context import TaskRunContext
    from prefect.states import Running, State
    from prefect.task_engine import emit_task_run_state_change_event

    if (context := TaskRunContext.get()) is None:
        return
    run = context.task_run
    old = run.state
    new: State = Running(name=name, message=message)
    new.state_details.task_run_id, new.state_details.flow_run_id = run.id, run.flow_run_id
    run.state, run.state_id, run.state_type, run.state_name = new, new.id, new.type, new.name
    emit_task_run_state_change_event(task_run=run, initial_state=old, validated_state=new)


@dataclass(eq=False)
class Clock:
    """Where the seconds of one attempt of a stage went: the times it waited, each for a cause; the rest is work."""

    iteration: int = 0
    node: str = ""
    pool: str = ""
    role: str = ""
    kind: str = "working"  # what its work is
    started: float = field(default_factory=time.time)
    ended: float | None = None
    spans: list[Wait] = field(default_factory=list)
    under_way: Wait | None = None
    message: str = ""  # of the wait under way
    coming: bool = False  # it has not begun: what passes from its start, or from one wait, to the next is of that next
    spent: dict[str, Counter[str]] = field(default_factory=lambda: {cost: Counter() for cost in get_args(Spending)})

    @contextmanager
    def waiting(self, cause: str, message: str, on: Sequence[str] = ()) -> Iterator[None]:
        """Count the block as a wait for `cause`, shown in the UI under that name. Waits of a clock do not overlap.

        on: nodes of the same iteration, where it is their output that is not there.
        """
        began = (self.spans[-1].end if self.spans else self.started) if self.coming else time.time()
        self.under_way, self.message = Wait(cause, began, began, tuple(on)), message
        _set_state(cause, message)
        try:
            yield
        finally:
            self.spans.append(self.under_way._replace(end=time.time()))
            self.under_way, self.message = None, ""
            _set_state("Running")

    def say(self, message: str) -> None:
        """Show the wait under way with another message: what it is for has changed."""
        if self.under_way and message != self.message:
            self.message = message
            _set_state(self.under_way.cause, message)

    def spend(self, cost: Spending, group: str, count: int) -> None:
        """The attempt has taken so many more of this for the group."""
        self.spent[cost][group] += count

    def __str__(self) -> str:
        return f"{self.node} of iteration {self.iteration}"

    @property
    def at_work_since(self) -> float | None:
        """Epoch seconds; None while it waits."""
        return None if self.under_way else self.spans[-1].end if self.spans else self.started

    def stop(self) -> None:
        """The attempt ends now; stopping again changes nothing."""
        if self.ended is None:
            self.ended = time.time()

    def row(self, state: str, at: float | None = None) -> StageRow:
        """The attempt as the ledger keeps it; one that is under way as far as it has come by `at` (default: now)."""
        end = self.ended or at or time.time()
        spans = (*self.spans, *([self.under_way._replace(end=end)] if self.under_way else []))
        spent = {cost: dict(groups) for cost, groups in self.spent.items() if groups}
        return StageRow(
            self.iteration, self.node, state, self.started, end, spans, self.pool, self.role, self.kind, spent
        )

    @property
    def waits(self) -> dict[str, float]:
        """cause -> seconds."""
        return self.row("").waits
