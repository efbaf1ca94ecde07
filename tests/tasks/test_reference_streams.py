"""Reference log-probabilities while the rollout runs: computed group by group by the real model, each token once."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from conf.errors import StageError
from data.refs import DatasetRef
from tasks.reference import reference
from tasks.stage import Arriving, Group, GroupStream, Inputs
from tasks.trainer.client import Logprobs, Progress, Trainer
from tests.fakes.context import until
from tests.tasks.test_update import Bench
from tests.tasks.training import InProcess


class Noting:
    """The real trainer, that notes down which groups it computes and in which hands it is."""

    def __init__(self, real: InProcess) -> None:
        self.real, self.asked, self.held = real, list[list[str]](), False
        self.gate = asyncio.Event()
        self.gate.set()

    async def logprobs(self, rows: DatasetRef | pa.Table, model: str, progress: Progress) -> Logprobs:
        assert self.held
        whole = isinstance(rows, DatasetRef)
        self.asked.append(["whole"] if whole else list(dict.fromkeys(rows["group_id"].to_pylist())))
        await self.gate.wait()
        return await self.real.logprobs(rows, model, progress)


class Scene:
    """A rollout that the test plays, and the real stage beside it."""

    def __init__(self, bench: Bench) -> None:
        store, dataset = bench.store, bench.inputs.dataset
        assert dataset is not None
        rows = store.read(dataset).drop_columns(["old_logprobs", "ref_logprobs"])
        facts = store.manifest(dataset).facts
        self.ref = store.commit_rows(2, "rollout", rows, key="sample_id", facts=facts)
        self.table = store.read(self.ref)
        self.groups = list(dict.fromkeys(self.table["group_id"].to_pylist()))
        self.trainer, self.stream = Noting(bench.trainer), GroupStream()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        arriving = Arriving(self.stream, self.over, nullcontext, self._whole, self._pool)
        context = replace(bench.context, trainer=cast(Trainer, self.trainer))
        running: Any = reference.run(Inputs({}, None, None, arriving), context)
        self.running: asyncio.Task[Any] = asyncio.ensure_future(running)

    @asynccontextmanager
    async def _pool(self) -> AsyncIterator[None]:
        assert not self.trainer.held
        self.trainer.held = True
        yield
        self.trainer.held = False

    async def _whole(self) -> Inputs:
        return Inputs({"rollout": self.ref}, self.ref, self.table)

    def put(self, name: str, **changed: pa.Array) -> None:
        own = self.table.filter(pa.compute.equal(self.table["group_id"], name))
        for column, values in changed.items():
            own = own.set_column(own.column_names.index(column), own.schema.field(column), values)
        self.stream.put(Group(name, lambda: own))

    async def commit(self) -> list[list[float]]:
        self.over.set_result(None)
        output = await self.running
        assert output.facts.sampling["model"].startswith("reference-")
        assert len(output.facts.sampling["model"]) == len("reference-") + 12
        return output.table["ref_logprobs"].to_pylist()


@pytest.fixture
def bench(tmp_path: Path, tiny_model: Path, one_rank: None) -> Any:
    made = Bench(tmp_path, tiny_model)
    yield made
    made.ledger.close()


def play(bench: Bench, body: Callable[[Scene], Awaitable[list[list[float]]]]) -> Scene:
    """Run it, and compare what comes of it with the log-probabilities of the whole rollout at once."""

    async def run() -> Scene:
        scene = Scene(bench)
        try:
            found = await body(scene)
            expected, _ = bench.trainer.local.logprobs(scene.ref, "reference")
            for mine, whole in zip(found, expected, strict=True):
                np.testing.assert_allclose(mine, whole, atol=1e-5)
            return scene
        finally:
            scene.running.cancel()
            await asyncio.gather(scene.running, return_exceptions=True)

    return asyncio.run(run())


def test_each_group_is_computed_when_it_comes_and_the_rows_are_in_the_order_of_the_rollout(bench: Bench) -> None:
    async def body(s: Scene) -> list[list[float]]:
        for count, group in enumerate(reversed(s.groups), start=1):
            s.put(group)
            await until(lambda count=count: len(s.trainer.asked) == count)  # type: ignore[misc]
            assert not s.trainer.held  # between groups the trainer is free
        return await s.commit()

    scene = play(bench, body)
    assert scene.trainer.asked == [[group] for group in reversed(scene.groups)]


def test_groups_that_come_while_one_is_computed_are_computed_together(bench: Bench) -> None:
    async def body(s: Scene) -> list[list[float]]:
        s.trainer.gate.clear()
        s.put(s.groups[0])
        await until(lambda: len(s.trainer.asked) == 1)
        for group in s.groups[1:]:
            s.put(group)
        s.trainer.gate.set()
        await until(lambda: len(s.trainer.asked) == 2 and not s.trainer.held)
        return await s.commit()

    scene = play(bench, body)
    assert scene.trainer.asked == [scene.groups[:1], scene.groups[1:]]


def test_what_was_generated_again_or_never_came_is_computed_from_the_committed_rows(bench: Bench) -> None:
    async def body(s: Scene) -> list[list[float]]:
        members = s.table["group_id"].to_pylist().count(s.groups[0])
        s.put(s.groups[0], response_ids=pa.array([[7, 8]] * members, pa.list_(pa.int32())))
        s.put(s.groups[1])
        await until(lambda: len(s.trainer.asked) == 1)
        return await s.commit()

    scene = play(bench, body)
    first, second, *others = scene.groups
    assert scene.trainer.asked == [[first, second], [first, *others]]


def test_a_group_that_is_dropped_already_is_not_computed(bench: Bench) -> None:
    async def body(s: Scene) -> list[list[float]]:
        first, second = s.groups[:2]
        s.put(first)
        s.put(second)
        s.stream.judge(s.stream._newest[first], "zero_variance")
        await until(lambda: len(s.trainer.asked) == 1)
        assert s.trainer.asked == [[second]]
        return await s.commit()

    play(bench, body)


def test_where_nothing_came_the_trainer_reads_the_dataset(bench: Bench) -> None:
    scene = play(bench, Scene.commit)
    assert scene.trainer.asked == [["whole"]]


def test_a_rollout_that_fails_fails_the_stage_with_its_error(bench: Bench) -> None:
    async def run() -> None:
        scene = Scene(bench)
        scene.running.cancel()
        arriving = Arriving(scene.stream, scene.over, nullcontext, _lost, scene._pool)
        scene.over.set_result(None)
        await reference.run(Inputs({}, None, None, arriving), bench.context)

    with pytest.raises(StageError, match="no engine is left"):
        asyncio.run(run())


async def _lost() -> Inputs:
    raise StageError("stage rollout of iteration 2: no engine is left")
