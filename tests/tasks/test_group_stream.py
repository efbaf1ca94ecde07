"""Rewards while the rollout runs: each group is scored as it comes, and only an answer that was committed counts."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from conf.errors import StageError
from conf.schema import Experiment, GroupSampling, Prompts, Reward, RewardFunction, Rollout
from tasks.reward import reward
from tasks.rewards.workers import Outcome, RewardWorkers
from tasks.stage import Arriving, Columns, Group, GroupStream, Inputs
from tests.fakes.context import until

EXPERIMENT = Experiment(
    prompts=Prompts(per_iteration=2),
    rollout=Rollout(samples_per_prompt=2),
    reward=Reward(functions={"f": RewardFunction("m:f")}),
    sampling=GroupSampling(filter="zero_variance"),
)


def rows(group: str, *responses: list[int], finish: str = "stop") -> pa.Table:
    """A complete group; its members' texts are their tokens."""
    n = len(responses)
    return pa.table(
        {
            "sample_id": [f"{group}-s{i:02d}" for i in range(n)],
            "group_id": [group] * n,
            "prompt_text": ["?"] * n,
            "response_text": [" ".join(map(str, ids)) for ids in responses],
            "answer": [""] * n,
            "prompt_data": ["{}"] * n,
            "finish_reason": [finish] * n,
            "response_ids": pa.array(responses, pa.list_(pa.int32())),
        }
    )


class Workers:
    """The reward is the response's first token; 0 fails. `scored` are the sample ids in the order of the calls."""

    digest = "0" * 64

    def __init__(self) -> None:
        self.scored: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def score(
        self,
        samples: Sequence[Mapping[str, Any]],
        ids: Sequence[str],
        progress: Any,
        *,
        total: int,
        failed: Any,
        called: Callable[[int], None],
    ) -> list[dict[str, Outcome]]:
        self.scored += ids
        for index in range(len(ids)):
            called(index)
        await self.gate.wait()
        values = [float(sample["response"].split()[0]) for sample in samples]
        return [{"f": Outcome("ok", value, "") if value else Outcome("error", None, "zero")} for value in values]


class Scene:
    """A rollout that the test plays, and the real stage reward beside it."""

    def __init__(self, workers: Any, experiment: Experiment) -> None:
        self.workers, self.stream = workers, GroupStream()
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.committed: pa.Table | None = None
        self.events: list[str] = []
        self.calls: Counter[str] = Counter()
        context: Any = SimpleNamespace(
            experiment=experiment, rewards=workers, progress=lambda *step: None, spend=self._spend
        )
        self.arriving = Arriving(self.stream, self.over, self._waiting, self._whole)
        running: Any = reward.run(Inputs({}, None, None, self.arriving), context)
        self.running: asyncio.Task[Any] = asyncio.ensure_future(running)

    def _spend(self, cost: str, group: str, count: int) -> None:
        assert cost == "reward_calls"
        self.calls[group] += count

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        self.events.append("waits")
        yield
        self.events.append("goes on")

    async def _whole(self) -> Inputs:
        return Inputs({}, None, self.committed)

    def put(self, table: pa.Table) -> Group:
        group = Group(table["group_id"][0].as_py(), lambda: table)
        self.stream.put(group)
        return group

    async def commit(self, *tables: pa.Table) -> Columns:
        self.committed = pa.concat_tables(tables)
        self.over.set_result(None)
        output = await self.running
        assert isinstance(output, Columns)
        return output


def scene(body: Callable[[Scene], Awaitable[None]], experiment: Experiment = EXPERIMENT, workers: Any = None) -> None:
    async def run() -> None:
        playing = Scene(workers or Workers(), experiment)
        try:
            await body(playing)
        finally:
            playing.running.cancel()
            await asyncio.gather(playing.running, return_exceptions=True)

    asyncio.run(run())


def test_a_group_is_scored_and_judged_before_the_last_one_is_complete() -> None:
    async def body(s: Scene) -> None:
        first, second = rows("g0", [1, 5], [2, 5]), rows("g1", [3], [3])
        s.put(first)
        await until(lambda: s.stream.verdict("g0") is not None)
        assert s.stream.verdict("g0") == ""
        assert s.workers.scored == ["g0-s00", "g0-s01"]
        assert s.committed is None
        s.put(second)
        await until(lambda: s.stream.verdict("g1") is not None)
        assert s.stream.verdict("g1") == "zero_variance"
        out = await s.commit(first, second)
        assert out.table["rewards"].to_pylist() == [1.0, 2.0, 3.0, 3.0]
        assert s.workers.scored == ["g0-s00", "g0-s01", "g1-s00", "g1-s01"]  # nothing twice
        assert s.calls == {"g0": 2, "g1": 2}

    scene(body)


def test_scores_are_put_into_the_order_of_the_committed_rows() -> None:
    async def body(s: Scene) -> None:
        a, b, c = (rows(name, [n], [n + 1]) for name, n in (("g0", 1), ("g1", 3), ("g2", 5)))
        s.put(c)
        s.put(a)
        await until(lambda: s.stream.verdict("g0") is not None and s.stream.verdict("g2") is not None)
        out = await s.commit(a, b, c)  # one of them never came: a rollout that was killed and committed before
        assert out.table["rewards"].to_pylist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        assert sorted(s.workers.scored[-2:]) == ["g1-s00", "g1-s01"]

    scene(body)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (rows("g0", [1], [2]), rows("g0", [8], [2])),  # another answer
        (rows("g0", [1], [2]), rows("g0", [1, 9], [2])),  # the same beginning
        (rows("g0", [1], [2]), rows("g0", [1], [2], finish="length")),
    ],
    ids=["other tokens", "more tokens", "other end"],
)
def test_an_answer_that_was_generated_again_is_scored_again(old: pa.Table, new: pa.Table) -> None:
    async def body(s: Scene) -> None:
        s.put(old)
        await until(lambda: s.stream.verdict("g0") is not None)
        s.stream.take_back("g0")
        assert s.stream.verdict("g0") is None
        out = await s.commit(new)
        assert out.table["rewards"].to_pylist() == [float(ids[0]) for ids in new["response_ids"].to_pylist()]
        assert s.workers.scored[:2] == ["g0-s00", "g0-s01"]
        assert "g0-s00" in s.workers.scored[2:]
        assert s.calls == {"g0": len(s.workers.scored)}

    scene(body)


def test_a_verdict_on_an_answer_that_was_taken_back_meanwhile_says_nothing() -> None:
    async def body(s: Scene) -> None:
        s.workers.gate.clear()
        s.put(rows("g0", [1], [1]))
        await until(lambda: len(s.workers.scored) == 2)
        s.stream.take_back("g0")
        again = rows("g0", [1], [2])
        s.put(again)
        await until(lambda: len(s.workers.scored) == 4)  # beside the first, which is still scored
        s.workers.gate.set()
        await until(lambda: s.stream.verdict("g0") is not None)
        assert s.stream.verdict("g0") == ""
        out = await s.commit(again)
        assert out.table["rewards"].to_pylist() == [1.0, 2.0]
        assert s.calls == {"g0": 4}  # for 2 rows

    scene(body)


def test_calls_for_groups_that_no_row_holds_are_counted() -> None:
    """Three groups were scored; one is committed, with one that never came."""

    async def body(s: Scene) -> None:
        kept, surplus, late = rows("g0", [1], [2]), rows("g1", [1], [2], [3]), rows("g3", [1], [2])
        for table in (kept, surplus, rows("g2", [4])):
            s.put(table)
        await until(lambda: all(s.stream.verdict(group) is not None for group in ("g0", "g1", "g2")))
        await s.commit(kept, late)
        assert s.calls == {"g0": 2, "g1": 3, "g2": 1, "g3": 2}

    scene(body)


def test_only_time_without_anything_to_score_is_a_wait() -> None:
    async def body(s: Scene) -> None:
        await until(lambda: s.events == ["waits"])
        s.workers.gate.clear()
        table = rows("g0", [1], [2])
        s.put(table)
        await until(lambda: len(s.workers.scored) == 2)
        for _ in range(20):
            await asyncio.sleep(0)
        assert s.events == ["waits", "goes on"]
        s.workers.gate.set()
        await until(lambda: s.events == ["waits", "goes on", "waits"])
        await s.commit(table)
        assert s.events == ["waits", "goes on", "waits", "goes on"]

    scene(body)


def test_what_a_stage_upstream_raised_is_raised() -> None:
    async def fails() -> Inputs:
        raise StageError("the rollout failed")

    async def body(s: Scene) -> None:
        s.arriving._whole = fails
        s.over.set_result(None)
        with pytest.raises(StageError, match="the rollout failed"):
            await s.running

    scene(body)


def bad(group: str, *words: str) -> pa.Table:
    table = rows(group, *([i] for i in range(len(words))))
    return table.set_column(table.column_names.index("response_text"), "response_text", [list(words)])


@pytest.mark.parametrize("streamed", [True, False])
def test_the_share_of_failures_is_that_of_the_batch_however_it_came(streamed: bool) -> None:
    """Half of the first group's samples fail, a quarter of the batch: as many as are allowed."""
    functions = {"f": RewardFunction("tests.tasks.bad_rewards:act")}
    settings = Reward(functions=functions, max_failed_share=0.25, timeout_s=20.0, memory_mb=256)
    experiment = Experiment(prompts=EXPERIMENT.prompts, rollout=EXPERIMENT.rollout, reward=settings)

    async def run(second: pa.Table) -> pa.Table:
        workers = RewardWorkers(settings)
        first = bad("g0", "good", "raises")
        s = Scene(workers, experiment)
        try:
            if streamed:
                s.put(first)
                await until(lambda: s.stream.verdict("g0") is not None)
            return (await s.commit(first, second)).table
        finally:
            await workers.stop()

    table = asyncio.run(run(bad("g1", "good", "whole")))
    assert table["rewards"].to_pylist() == [0.5, None, 0.5, 2.0]
    assert table["reward_outcome"].to_pylist() == ["ok", "error", "ok", "ok"]
    with pytest.raises(StageError, match=r"the reward of 2 of 4 samples failed, .*allows 0.25.*First: g0-s01 f: error"):
        asyncio.run(run(bad("g1", "raises", "whole")))
