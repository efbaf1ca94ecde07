"""The stage contract: what a stage declares, what it is given, and what it returns.

A stage is an async function of its inputs and a `Context`. It declares the columns it consumes and produces; the graph
checks those before anything starts, and the store checks them again at commit.

    @stage(consumes=["response_ids"], output="selection")
    async def drop_short(inputs: Inputs, context: Context, *, min_tokens: int = 2) -> Selection:
        lengths = pc.list_value_length(inputs.table["response_ids"])
        ...
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from conf.schema import Experiment
from data.columns import Column, column
from data.refs import DatasetRef, PolicyRef
from data.store import Facts, Store

if TYPE_CHECKING:
    from data.accounts import Spend
    from data.ledger import Ledger
    from data.prompts import PromptSource
    from tasks.engines.fleet import Fleet
    from tasks.rewards.workers import RewardWorkers
    from tasks.trainer.client import Trainer

Kind = Literal["rows", "columns", "selection", "policy"]
Reads = Literal["none", "current", "trained"]  # current: the iteration's starting version; trained: the input's
Names = Sequence[str] | Callable[[Experiment], Sequence[str]]
Produced = Sequence[str | Column] | Callable[[Experiment], Sequence[str | Column]]


@dataclass(frozen=True)
class Context:
    """What a stage may use. Made for each stage of each iteration."""

    experiment: Experiment
    run_dir: Path
    config_digest: str
    store: Store
    ledger: "Ledger"
    prompts: "PromptSource"
    engines: "Fleet"  # those in service
    trainer: "Trainer"
    rewards: "RewardWorkers"
    iteration: int
    node: str  # the node's name in the graph, under which the store keeps the output
    policy: PolicyRef  # when the stage starts: the newest committed version; of role train: the one the trainer holds
    progress: Callable[[int, int, str], None]  # (done, total, unit): drives the bar of the stage under way
    measure: Callable[[str, float], None]  # (name, value): a time or rate for the ledger; never part of a dataset
    spend: "Spend"  # whatever comes of what is spent
    stream: "GroupStream | None" = None  # of a stage rollout: where it puts each group once it is complete


@dataclass(frozen=True, eq=False)
class Group:
    """A complete group of a rollout that is still running. Where it has to be generated again, it comes again."""

    id: str
    read: Callable[[], pa.Table]  # its rows, with the rollout's columns


class GroupStream:
    """The groups of one rollout as they become complete, and what the stage that reads them finds of each.

    It is in memory only. What counts is the committed rollout: whatever was not read here is read from there, and what
    was read here may not be in it.
    """

    def __init__(self) -> None:
        self.tail = asyncio.Event()  # no request of the rollout is left unsent: the engines have room
        self.judged = asyncio.Event()  # set at each verdict; whoever waits for it clears it
        self._readers: list[asyncio.Queue[Group]] = []
        self._newest: dict[str, Group] = {}
        self._verdicts: dict[str, str] = {}

    def put(self, group: Group) -> None:
        """The rollout has the group's last sample."""
        self._newest[group.id] = group
        for reader in self._readers:
            reader.put_nowait(group)

    def take_back(self, group_id: str) -> None:
        """The group is generated again, or not kept: what is found of it no longer counts."""
        self._newest.pop(group_id, None)
        self._verdicts.pop(group_id, None)

    def read(self) -> asyncio.Queue[Group]:
        """Every group for one more reader: those that are there, and each that comes."""
        reader: asyncio.Queue[Group] = asyncio.Queue()
        for group in self._newest.values():
            reader.put_nowait(group)
        self._readers.append(reader)
        return reader

    def judge(self, group: Group, dropped: str) -> None:
        """Why the group is not trained; empty: it passes. Of a group that was taken back it says nothing."""
        if self._newest.get(group.id) is group:
            self._verdicts[group.id] = dropped
            self.judged.set()

    def verdict(self, group_id: str) -> str | None:
        """None: not judged yet."""
        return self._verdicts.get(group_id)


class Arriving:
    """What a stage that streams gets while its rollout runs: the groups as they come, and the whole at the end."""

    def __init__(
        self,
        stream: GroupStream,
        over: asyncio.Future[Any],
        waiting: Callable[[], AbstractContextManager[None]],
        whole: Callable[[], Awaitable["Inputs"]],
        pool: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.judge, self.verdict = stream.judge, stream.verdict
        self.pool = pool  # of a stage of role train, which has the trainer only inside of it
        self._groups, self._over, self._waiting, self._whole = stream.read(), over, waiting, whole
        self._inputs: Inputs | None = None

    async def next(self, working: Set[asyncio.Task[Any]] = frozenset()) -> Group | None:
        """The next complete group; None once the rollout has ended.

        `working`: what the stage does meanwhile. Time in which none of it runs counts as a wait for the rollout.
        """
        coming = asyncio.ensure_future(self._groups.get())
        try:
            while not (coming.done() or self._over.done()):
                busy = {task for task in working if not task.done()}
                with nullcontext() if busy else self._waiting():
                    await asyncio.wait({coming, self._over, *busy}, return_when=asyncio.FIRST_COMPLETED)
            return coming.result() if coming.done() else None
        finally:
            coming.cancel()

    async def batch(self) -> list[Group]:
        """All complete groups that have come since the last, at least one; none once the rollout has ended."""
        first = await self.next()
        more = iter(lambda: None if self._groups.empty() else self._groups.get_nowait(), None)
        return [first, *more] if first else []

    async def whole(self) -> "Inputs":
        """The committed inputs. Raises what a stage upstream raised."""
        if self._inputs is None:
            self._inputs = await self._whole()
        return self._inputs


@dataclass(frozen=True)
class Inputs:
    """The outputs of the nodes a stage needs, joined: `table` has every column upstream produced, in one row order."""

    refs: Mapping[str, DatasetRef | PolicyRef]  # by node name
    dataset: DatasetRef | None  # the joined dataset; None where no input has rows
    table: pa.Table | None  # its declared columns, memory-mapped
    arriving: Arriving | None = None  # of a stage that streams, while its rollout runs: the others are empty then

    async def whole(self) -> "Inputs":
        """The same once everything upstream is committed."""
        return await self.arriving.whole() if self.arriving else self

    def policy(self) -> PolicyRef:
        """The one policy among the inputs. Raises StageError where there is none."""
        from conf.errors import StageError

        found = [r for r in self.refs.values() if isinstance(r, PolicyRef)]
        if len(found) != 1:
            raise StageError(f"expected one input with a policy, got {sorted(self.refs)}")
        return found[0]


@dataclass(frozen=True)
class Rows:
    """New rows: what `prompts`, `rollout` and `evaluate` return."""

    table: pa.Table
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Columns:
    """New columns for the input's rows, in the input's order."""

    table: pa.Table
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class Selection:
    """The rows of the input to keep, as increasing positions, and optionally new columns for the kept rows."""

    indices: Sequence[int]
    table: pa.Table | None = None
    facts: Facts = field(default_factory=Facts)


@dataclass(frozen=True)
class NewPolicy:
    """A policy version: sealed by `update`, committed by `publish`."""

    policy: PolicyRef
    facts: Facts = field(default_factory=Facts)


Output = Rows | Columns | Selection | NewPolicy


@dataclass(frozen=True)
class Stage:
    name: str
    run: Callable[..., Awaitable[Output]]
    consumes: Callable[[Experiment], tuple[str, ...]]
    produces: Callable[[Experiment], tuple[Column, ...]]
    output: Kind
    role: Literal["rollout", "train", "cpu"]  # the role its pool must have
    reads: Reads  # which policy version it uses
    every: Callable[[Experiment, int], bool]  # whether it runs in this iteration
    streams: bool  # whether it can begin with the first complete group of the rollout it needs


def _given(items: Any, experiment: Experiment) -> tuple[Any, ...]:
    return tuple(items(experiment) if callable(items) else items)


def stage(
    *,
    consumes: Names = (),
    produces: Produced = (),
    output: Kind = "columns",
    role: Literal["rollout", "train", "cpu"] = "cpu",
    reads: Reads = "none",
    every: Callable[[Experiment, int], bool] = lambda experiment, iteration: True,
    streams: bool = False,
) -> Callable[[Callable[..., Awaitable[Output]]], Stage]:
    """Declare a stage.

    `consumes` are column names; `produces` are column names of `data.columns`, or a `Column` of one's own. Both may be
    a function of the experiment, for columns that depend on a setting.
    """

    def declare(run: Callable[..., Awaitable[Output]]) -> Stage:
        return Stage(
            name=run.__name__,
            run=run,
            consumes=lambda experiment: _given(consumes, experiment),
            produces=lambda experiment: tuple(
                column(c) if isinstance(c, str) else c for c in _given(produces, experiment)
            ),
            output=output,
            role=role,
            reads=reads,
            every=every,
            streams=streams,
        )

    return declare
