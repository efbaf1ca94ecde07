"""Evaluation: held-out prompts, the version just published, the same rewards, and metrics of its own."""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conf.errors import StageError
from conf.schema import Evaluate, Experiment, Prompts, Reward, RewardFunction, Rollout
from data.prompts import open_prompts
from data.refs import PolicyRef
from data.rows import check_rollout
from tasks.evaluate import evaluate
from tasks.rewards.workers import RewardWorkers
from tasks.stage import Rows
from tests.fakes import faults
from tests.fakes.context import World, client_of, commit_version, inputs_of, make_world, save_tokenizer
from tests.fakes.engine import FakeEngine

REWARD = Reward(
    functions={"correct": RewardFunction(path="tasks.rewards.arithmetic:last_number", weight=0.5)},
    workers=1,
    timeout_s=60.0,
    max_failed_share=0.5,
)
Body = Callable[[World, FakeEngine, PolicyRef], Coroutine[Any, Any, None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    return folder


def play(tmp_path: Path, model: Path, body: Body, answers: tuple[str, str] = ("7", "8")) -> None:
    """A source of three prompts of which two are held out; version 1 is published after the iteration began with 0."""
    lines = [{"prompt": f"w{n} w4", "answer": answer} for n, answer in ((3, "1"), (5, answers[0]), (6, answers[1]))]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = Prompts(source="jsonl", path=str(tmp_path / "prompts.jsonl"), per_iteration=1)

    async def run() -> None:
        workers = RewardWorkers(REWARD)
        async with FakeEngine() as fake:
            world = make_world(
                tmp_path,
                model,
                [client_of(fake)],
                node="evaluate",
                rewards=workers,
                prompts=source,
                reward=REWARD,
                rollout=Rollout(samples_per_prompt=4, max_new_tokens=8),
                evaluate=Evaluate(every=2, prompts=2),
            )
            world.context = replace(world.context, prompts=open_prompts(source, seed=0, held_out=2), iteration=6)
            published = commit_version(world.ledger, "bbbbbbbbbbbb")
            fake.label = fake.span_label = published.label
            await world.publish(published)
            try:
                await body(world, fake, published)
            finally:
                await world.close()
                await workers.stop()

    asyncio.run(run())


async def evaluated(world: World, published: PolicyRef) -> Rows:
    out = await evaluate.run(inputs_of(publish=published), world.context)
    assert isinstance(out, Rows)
    return out


def test_held_out_prompts_are_answered_greedily_by_the_version_just_published_and_scored(
    tmp_path: Path, model: Path
) -> None:
    async def body(world: World, fake: FakeEngine, published: PolicyRef) -> None:
        fake.inject("/generate", faults.generated([7, 2], [-0.5, -0.5]), only=lambda b: "g000" in b["rid"])
        fake.inject("/generate", faults.generated([9, 9, 9, 2], [-0.5] * 4), only=lambda b: "g001" in b["rid"])
        out = await evaluated(world, published)
        rows = {name: out.table[name].to_pylist() for name in out.table.column_names}
        assert rows["sample_id"] == ["e000006-g000-s00", "e000006-g001-s00"]
        assert rows["prompt_text"] == ["w5 w4", "w6 w4"]
        assert rows["prompt_ids"] == [[5, 4], [6, 4]]
        assert rows["policy_version"] == [published.number] * 2 == [1, 1]
        assert rows["response_text"] == ["w7", "w9 w9 w9"]
        assert rows["reward/correct"] == [1.0, 0.0]
        assert rows["rewards"] == [0.5, 0.0]
        assert {body["sampling_params"]["temperature"] for body in fake.routed("/generate")} == {0.0}
        assert out.facts.metrics["eval/reward/mean"] == 0.25
        assert out.facts.metrics["eval/response_length/mean"] == 3.0  # (2 + 4) / 2
        assert all(name.startswith("eval/") for name in out.facts.metrics)
        assert out.facts.policy_versions == {published.label: 6}
        assert out.facts.reward_code_digest == world.context.rewards.digest
        check_rollout(out.table, 1)
        assert world.ledger.leases() == {published.number: ["evaluated"]}
        world.ledger.open_run("test", "digest", "resolved")  # the next start ends all but lasting leases
        assert world.ledger.leases() == {published.number: ["evaluated"]}

    play(tmp_path, model, body)


def test_evaluation_rows_have_exactly_the_declared_columns_and_can_be_committed(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fake: FakeEngine, published: PolicyRef) -> None:
        out = await evaluated(world, published)
        declared = evaluate.produces(world.context.experiment)
        assert out.table.column_names == [column.name for column in declared]
        store = world.context.store
        ref = store.commit_rows(6, "evaluate", out.table, key="sample_id", facts=out.facts, columns=declared)
        assert ref.versions == (published.label,)

    play(tmp_path, model, body)


def test_a_sample_whose_reward_failed_is_kept_with_its_outcome_and_is_in_no_mean(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fake: FakeEngine, published: PolicyRef) -> None:
        fake.inject("/generate", faults.generated([7, 2], [-0.5, -0.5]), times=2)
        out = await evaluated(world, published)
        assert out.table["rewards"].to_pylist() == [0.5, None]
        assert out.table["reward_outcome"].to_pylist() == ["ok", "error"]
        assert out.facts.metrics["eval/reward/mean"] == 0.5

    play(tmp_path, model, body, answers=("7", "not a number"))


def test_a_version_found_damaged_after_its_publish_is_evaluated_under_its_new_number(
    tmp_path: Path, model: Path
) -> None:
    async def body(world: World, fake: FakeEngine, published: PolicyRef) -> None:
        ledger, old = world.ledger, world.ledger.version(published.number)
        ledger.set_version(old.number, "QUARANTINED")
        number = ledger.allocate_version(old.key, old.parent, old.optimizer_step, old.dataset)
        for state in ("SEALED", "PUBLISHING", "COMMITTED"):
            ledger.set_version(number, state, old.content if state == "SEALED" else None)
        again = ledger.version(number).ref
        fake.label = fake.span_label = again.label
        await world.publish(again)
        out = await evaluated(world, published)
        assert set(out.table["policy_version"].to_pylist()) == {number}
        assert ledger.leases() == {number: ["evaluated"]}

    play(tmp_path, model, body)


def test_engines_on_another_version_than_the_published_one_are_not_evaluated(tmp_path: Path, model: Path) -> None:
    async def body(world: World, fake: FakeEngine, published: PolicyRef) -> None:
        world.engines[0].ready_label = world.context.policy.label  # version 0
        with pytest.raises(StageError, match=f"evaluate needs an engine READY on {published.label}"):
            await evaluated(world, published)
        assert fake.routed("/generate") == []

    play(tmp_path, model, body)


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_it_runs_every_k_iterations_and_never_at_0(every: int, due: list[int]) -> None:
    experiment = Experiment(evaluate=Evaluate(every=every))
    assert [i for i in range(1, 5) if evaluate.every(experiment, i)] == due
