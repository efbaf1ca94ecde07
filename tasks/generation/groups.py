"""The groups of a batch: which prompts are sent, which are waited for and which are kept.

Prompts are sent in their order, as many as are needed to get the groups that `sampling` asks for: a group that failed,
or that the reward stage finds not worth training (`sampling.filter`), has the next prompt sent in its place.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from conf.schema import GroupSampling
from tasks.engines.client import BadAnswer, Engine, Generation, Refused, Unavailable
from tasks.generation.request import Flight
from tasks.stage import GroupStream

REASONS = {Refused: "rollout_refused", Unavailable: "rollout_unavailable", BadAnswer: "rollout_bad_answer"}


@dataclass(frozen=True)
class Wanted:
    """Which groups a batch starts, waits for and keeps; by default every group of every prompt, whatever it takes."""

    groups: int  # complete ones; with a filter, such as pass it
    sampling: GroupSampling = field(default_factory=GroupSampling)
    stream: GroupStream = field(default_factory=GroupStream)
    deadline_s: float = 0.0  # of one sample; 0: none
    on_deadline: Literal["truncate", "drop_group"] = "truncate"

    @property
    def filtered(self) -> bool:
        return self.sampling.filter != "none"


@dataclass
class PromptGroup:
    """The samples of one prompt."""

    row: int  # of the prompt
    id: str
    prompt_ids: list[int]
    engine: Engine | None = None  # all members go to one, which has their prompt in its prefix cache
    samples: dict[int, Generation] = field(default_factory=dict)  # by member
    flights: dict[int, Flight] = field(default_factory=dict)  # members under way
    failed: str = ""  # the reason it is dropped

    def sample_id(self, member: int) -> str:
        return f"{self.id}-s{member:02d}"

    @property
    def lengths(self) -> dict[str, list[int]]:
        """Response tokens of the members that ended, by finish_reason."""
        found: dict[str, list[int]] = {}
        for _, answer in sorted(self.samples.items()):
            found.setdefault(answer.finish_reason, []).append(len(answer.ids))
        return found

    def cancel(self) -> None:
        """Whatever comes for the members under way comes too late. The task that found out goes on."""
        for flight in self.flights.values():
            if flight.task and flight.task is not asyncio.current_task():
                flight.task.cancel()


class Groups:
    """`sent` are those of the batch so far, in the order of their prompts; `size` is the number of members of each."""

    def __init__(self, prompts: pa.Table, size: int, wanted: Wanted) -> None:
        self.sent: list[PromptGroup] = []
        self.size = size
        self._wanted = wanted
        ids, tokens = prompts["group_id"].to_pylist(), prompts["prompt_ids"].to_pylist()
        rows = enumerate(zip(ids, tokens, strict=True))
        self._candidates = deque(PromptGroup(row, group, prompt_ids) for row, (group, prompt_ids) in rows)  # not sent
        for group in self._candidates:
            wanted.stream.take_back(group.id)  # of a batch that lost its engines

    def send_next(self) -> list[PromptGroup]:
        """The next ones, as long as too few groups are under way for those that are missing."""
        more = self._wanted.sampling.started(self.missing) - len(self.open)
        groups = [self._candidates.popleft() for _ in range(min(more, len(self._candidates)))]
        self.sent += groups
        return groups

    def passed(self, group: PromptGroup) -> bool:
        """Whether it is one of those wanted: complete and, with a filter, judged to pass."""
        return not group.failed and len(group.samples) == self.size and self._verdict(group) == ""

    def _verdict(self, group: PromptGroup) -> str | None:
        return self._wanted.stream.verdict(group.id) if self._wanted.filtered else ""

    @property
    def open(self) -> list[PromptGroup]:
        """Sent, and it is not known yet whether they will be among those wanted."""
        return [g for g in self.sent if not g.failed and not self.passed(g) and not self._verdict(g)]

    @property
    def missing(self) -> int:
        return max(self._wanted.groups - sum(map(self.passed, self.sent)), 0)

    @property
    def enough(self) -> bool:
        """Whether to stop although groups are open."""
        return self._wanted.sampling.keep == "fastest" and not self.missing

    @property
    def may_send_more(self) -> bool:
        return bool(self._candidates and self.missing)

    @property
    def alive(self) -> list[PromptGroup]:
        """Those sent that have not failed."""
        return [group for group in self.sent if not group.failed]

    @property
    def lost(self) -> int:
        """Groups that failed, rather than being too many or too slow."""
        return sum(group.failed in REASONS.values() for group in self.sent)

    def keep(self) -> list[PromptGroup]:
        """At the end: the groups that become rows. Those that are too many are dropped."""
        kept = self.alive
        if not self._wanted.filtered:  # else stage filter chooses among those that pass
            for group in kept[self._wanted.groups :]:
                group.failed = "surplus"
            kept = kept[: self._wanted.groups]
        return kept

    def metrics(self) -> dict[str, float]:
        sampled = self._wanted.filtered or self._wanted.sampling.oversample > 1
        return {"sampling/groups_sent": float(len(self.sent))} if sampled else {}
