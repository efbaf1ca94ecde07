"""Dynamic sampling on the real SGLang with real reward workers: stages rollout and reward at the same time."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

from conf.errors import StageError
from conf.schema import GroupSampling, Prompts, Reward, RewardFunction, Rollout
from data.prompts import PromptSource
from data.rows import check_rollout
from tasks.engines.server import SGLangServer
from tasks.filter import filter
from tasks.reward import reward
from tasks.rewards.workers import RewardWorkers
from tasks.rollout import rollout
from tasks.stage import Arriving, Columns, GroupStream, Inputs, Rows, Selection
from tests.fakes.context import inputs_of, make_world, prompt_rows

NEEDED, SAMPLES, ROUNDS = 3, 4, 4
REWARDS = "tests.tasks.sampled_rewards"


class Waits:
    """Counts the waits for the next group."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> "Waits":
        self.count += 1
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def run(
    folder: Path, model: Path, server: SGLangServer, function: str, sampling: GroupSampling, **options: Any
) -> tuple[Rows, Columns, Any, dict[str, int]]:
    """The committed rows and rewards; what the filter made of them, or its error; and tokens that no row has."""

    async def play() -> tuple[Rows, Columns, Any, dict[str, int]]:
        settings = Reward(functions={"f": RewardFunction(f"{REWARDS}:{function}")}, timeout_s=20.0)
        workers = RewardWorkers(settings)
        parts: dict[str, Any] = {"prompts": Prompts(per_iteration=NEEDED), "sampling": sampling, "reward": settings}
        rolled = Rollout(samples_per_prompt=SAMPLES, timeout_s=120.0, **{"max_new_tokens": 8, **options})
        world = make_world(folder, model, [server.connect()], rollout=rolled, rewards=workers, **parts)
        source = PromptSource("made", [("a", "", "{}")] * 100, "d", held_out=0, shuffle=False, seed=0)
        stream = GroupStream()
        context = world.with_context(prompts=source, stream=stream)
        prompts = prompt_rows(*([65 + g, 66] for g in range(sampling.candidates(NEEDED))))
        try:
            await world.engines[0].update_weights(str(model), context.policy.label, 120.0)
            await world.publish(context.policy)
            running: Any = rollout.run(inputs_of(prompts), context)
            rolling: asyncio.Task[Rows] = asyncio.create_task(running)

            async def whole() -> Inputs:
                return inputs_of((await rolling).table)

            scored: Any = await reward.run(Inputs({}, None, None, Arriving(stream, rolling, Waits(), whole)), context)
            rows = rolling.result()
            table = rows.table
            for name in scored.table.column_names:
                table = table.append_column(scored.table.schema.field(name), scored.table[name])
            try:
                chosen: Any = await filter.run(inputs_of(table), context)
            except StageError as error:
                chosen = error
            return rows, scored, chosen, world.discarded(rows.table)
        finally:
            await workers.stop()
            await world.close()

    return asyncio.run(play())


def test_groups_that_teach_nothing_are_refilled_to_the_exact_batch(
    tmp_path: Path, tiny_model: Path, sglang_server: SGLangServer
) -> None:
    sampling = GroupSampling(filter="zero_variance", max_rounds=30)
    rows, scored, chosen, _ = run(tmp_path, tiny_model, sglang_server, "rare", sampling)
    check_rollout(rows.table, SAMPLES)
    assert isinstance(chosen, Selection)
    assert len(chosen.indices) == NEEDED * SAMPLES
    groups, rewards = rows.table["group_id"].to_pylist(), scored.table["rewards"].to_pylist()
    kept = Counter(groups[row] for row in chosen.indices)
    assert set(kept.values()) == {SAMPLES}
    for group in set(groups):
        own = {reward for reward, of in zip(rewards, groups, strict=True) if of == group}
        assert (len(own) > 1) == (group in kept)
    assert set(chosen.facts.dropped.values()) <= {"zero_variance"}  # without over-sampling there is no surplus
    sent = len(set(groups))
    assert sent == NEEDED + len(chosen.facts.dropped)
    assert rows.facts.cursor["position"] == sent
    print(f"{sent} groups were sent for {NEEDED}")


def test_a_reward_that_is_always_equal_ends_in_the_declared_outcome_after_the_last_round(
    tmp_path: Path, tiny_model: Path, sglang_server: SGLangServer
) -> None:
    sampling = GroupSampling(filter="zero_variance", max_rounds=ROUNDS)
    rows, scored, chosen, _ = run(tmp_path, tiny_model, sglang_server, "constant", sampling)
    assert len(set(rows.table["group_id"].to_pylist())) == NEEDED * ROUNDS
    assert set(scored.table["rewards"].to_pylist()) == {1.0}
    assert isinstance(chosen, StageError)
    assert f"needs {NEEDED} groups (prompts.per_iteration), 0 of {NEEDED * ROUNDS} passed" in str(chosen)


def test_the_real_engine_gives_the_tokens_of_what_it_is_told_to_cut_off(
    tmp_path: Path, tiny_model: Path, sglang_server: SGLangServer
) -> None:
    """At the deadline some of the 300 tokens are there."""
    rows, _, _, _ = run(
        tmp_path, tiny_model, sglang_server, "constant", GroupSampling(), max_new_tokens=300, sample_deadline_s=0.5
    )
    check_rollout(rows.table, SAMPLES, rows.facts.dropped)
    found = list(
        zip(rows.table["finish_reason"].to_pylist(), map(len, rows.table["response_ids"].to_pylist()), strict=True)
    )
    assert all(length == 300 for reason, length in found if reason == "length")
    assert all(length < 300 for reason, length in found if reason == "deadline")
    cut = sum(reason == "deadline" for reason, _ in found)
    dropped = sum(reason == "deadline" for reason in rows.facts.dropped.values())
    print(f"{cut} of {len(found)} samples were cut off with their tokens, {dropped} groups dropped")
    assert (rows.facts.metrics["rollout/deadline_rate"] > 0) == (cut + dropped > 0)


def test_fastest_aborts_the_others_on_the_real_engine_and_knows_what_they_cost(
    tmp_path: Path, tiny_model: Path, sglang_server: SGLangServer
) -> None:
    sampling = GroupSampling(oversample=3.0, keep="fastest")
    rows, _, _, discarded = run(
        tmp_path, tiny_model, sglang_server, "constant", sampling, max_new_tokens=200, max_in_flight=14
    )
    check_rollout(rows.table, SAMPLES, rows.facts.dropped)
    kept = set(rows.table["group_id"].to_pylist())
    assert len(kept) == NEEDED
    assert len(rows.facts.dropped) == 2 * NEEDED
    assert set(rows.facts.dropped.values()) <= {"oversampled", "surplus"}
    assert kept.isdisjoint(rows.facts.dropped)
    assert discarded.keys() <= rows.facts.dropped.keys()
    print(rows.facts.dropped, discarded)
