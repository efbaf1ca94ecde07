"""Dynamic sampling over several iterations: no prompt is skipped or repeated, and every group that was sent has an end.

Prompts, rollout and filter are the real stages over a puppet engine; a rollout may be killed and run again.
"""

import asyncio
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conf.errors import StageError
from conf.load import load
from conf.schema import Model
from data.columns import column
from data.fsck import fsck
from data.issued import FIRST_ROUND, issued_groups
from data.manifest import Facts
from data.prompts import PromptSource
from data.refs import DatasetRef, PolicyRef
from flows.conservation import conservation
from flows.graph import load_graph
from flows.stages import settle
from tasks.engines.client import Refused
from tasks.engines.toy import write_model
from tasks.filter import filter
from tasks.prompts import prompts
from tasks.rollout import rollout
from tasks.stage import Context, GroupStream, Inputs, Output, Rows, Selection
from tests.fakes.context import World, commit_version, make_world, save_tokenizer
from tests.fakes.puppet import Puppet
from tests.fakes.whole_run import WholeRun, declared

NEEDED = 2


@dataclass
class Iterations:
    """A run of the graph `dapo`, a stage at a time."""

    world: World
    engine: Puppet
    graph: Any
    random: Random
    failures: float  # probability of each way to fail
    verdicts: dict[str, bool] = field(default_factory=dict)

    def context(self, iteration: int, node: str) -> Context:
        return self.world.with_context(iteration=iteration, node=node)

    async def run(self, stage: Any, inputs: Inputs, context: Context) -> Output:
        output: Output = await stage.run(inputs, context)
        return output

    def committed(self, iteration: int, node: str, ref: DatasetRef) -> Inputs:
        store = self.world.context.store
        settle(store, self.world.ledger, self.graph[node], iteration)
        settle(store, self.world.ledger, self.graph[node], iteration)  # as at a resume
        return Inputs({node: ref}, ref, store.read(ref))

    async def draw(self, iteration: int) -> Inputs:
        out = await self.run(prompts, Inputs({}, None, None), self.context(iteration, "prompts"))
        assert isinstance(out, Rows)
        store = self.world.context.store
        ref = store.commit_rows(iteration, "prompts", out.table, key="group_id", facts=out.facts)
        return self.committed(iteration, "prompts", ref)

    async def generate(self, iteration: int, drawn: Inputs) -> Inputs:
        """Until an attempt comes to its end; others are killed on their way."""
        while (out := await self._attempt(iteration, drawn)) is None:
            pass
        store, parents = self.world.context.store, list(drawn.refs.values())
        ref = store.commit_rows(iteration, "rollout", out.table, key="sample_id", parents=parents, facts=out.facts)
        return self.committed(iteration, "rollout", ref)

    async def _attempt(self, iteration: int, drawn: Inputs) -> Rows | None:
        stream = GroupStream()
        complete = stream.read()
        self.engine.sent.clear()
        context = replace(self.context(iteration, "rollout"), stream=stream)
        rolling: asyncio.Task[Any] = asyncio.ensure_future(self.run(rollout, drawn, context))
        try:
            while not rolling.done():
                await asyncio.sleep(0)
                if not complete.empty():
                    group = complete.get_nowait()
                    passes = self.random.random() < 0.5
                    stream.judge(group, "" if passes else "zero_variance")
                    self.verdicts[group.id] = passes
                elif asked := [a for a in self.engine.asked if not a.answer.done()]:
                    chosen = self.random.choice(asked)
                    if self.random.random() < self.failures:
                        chosen.fail(Refused("no"))
                    else:
                        chosen.end(5)
                    if self.random.random() < self.failures:
                        return None
                else:
                    await asyncio.sleep(0.001)
            out = rolling.result()
            assert isinstance(out, Rows)
            return out
        except StageError:
            return None  # every group was lost: the run would be started again
        finally:
            rolling.cancel()
            await asyncio.gather(rolling, return_exceptions=True)

    def choose(self, iteration: int, generated: Inputs) -> set[str]:
        """Score as the verdicts were, filter and train; gives the groups that were trained."""
        assert generated.table is not None
        assert generated.dataset is not None
        groups = generated.table["group_id"].to_pylist()
        rewards = [float(self.verdicts[group] and row % 2) for row, group in enumerate(groups)]
        scored = declared(
            {"rewards": rewards, "reward_outcome": ["ok"] * len(groups), "reward_error": [""] * len(groups)}
        )
        store, ledger = self.world.context.store, self.world.ledger
        ref = store.commit_columns(iteration, "reward", generated.dataset, scored, facts=Facts())
        whole = self.committed(iteration, "reward", ref)
        out: Any = asyncio.run(self.run(filter, whole, self.context(iteration, "filter")))
        assert isinstance(out, Selection)
        ref = store.commit_selection(iteration, "filter", ref, out.indices, None, facts=out.facts)
        kept = self.committed(iteration, "filter", ref).table
        assert kept is not None
        policy = PolicyRef(store.run, iteration, "0" * 64, iteration, ref.id)
        store.commit_policy(iteration, "update", policy, parents=[ref], facts=Facts())
        settle(store, ledger, self.graph["update"], iteration)
        return set(kept["group_id"].to_pylist())


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), failures=st.sampled_from([0.0, 0.05, 0.15]), oversample=st.sampled_from([1.0, 1.5]))
def test_over_iterations_and_resumes_the_ledger_balances_and_no_prompt_is_skipped_or_repeated(
    tmp_path_factory: pytest.TempPathFactory, seed: int, failures: float, oversample: float
) -> None:
    folder = tmp_path_factory.mktemp("run") / "test"
    save_tokenizer(folder / "model")
    overrides = [
        "graph=dapo", "sampling={filter: zero_variance, max_rounds: 3, on_exhausted: train_fewer}", "update.kl.coef=0",
        f"sampling.oversample={oversample}", f"prompts.per_iteration={NEEDED}", f"model.path={folder / 'model'}",
        "rollout={samples_per_prompt: 2, max_failed_share: 1.0, retries: 0}",
    ]  # fmt: skip
    loaded = load("conf/tiny_arithmetic.yaml", overrides)
    (folder / "config.yaml").write_text(loaded.text)

    async def setting() -> Iterations:
        engine = Puppet()
        world = make_world(folder, folder / "model", [engine])
        rows = [(f"w{i + 3}", "", "{}") for i in range(40)]
        source = PromptSource("made", rows, "d", held_out=0, shuffle=True, seed=1)
        world.context = world.with_context(prompts=source, experiment=loaded.experiment)
        await world.publish(world.context.policy)
        return Iterations(world, engine, load_graph(loaded.experiment), Random(seed), failures)

    run = asyncio.run(setting())
    store, ledger = run.world.context.store, run.world.ledger
    trained: set[str] = set()
    for iteration in (1, 2, 3):
        drawn = asyncio.run(run.draw(iteration))
        first = loaded.experiment.sampling.started(NEEDED)
        assert sum(number == iteration for _, number, _ in ledger.groups.rows()) == first
        generated = asyncio.run(run.generate(iteration, drawn))
        try:
            own = run.choose(iteration, generated)
        except StageError as error:
            assert "0 of" in str(error)  # noqa: PT017  nothing passed, and nothing was left to send
            break
        sent = [group for group, number, _ in ledger.groups.rows() if number == iteration]
        assert len(own) == NEEDED or len(sent) == loaded.experiment.sampling.candidates(NEEDED)
        trained |= own
    counts = ledger.groups.counts()
    assert counts["issued"] == sum(count for name, count in counts.items() if name != "issued")
    assert counts["trained"] == len(trained)
    found = conservation(folder)
    assert found.unbalanced == []
    assert found.total.groups == counts["issued"]
    indices: list[int] = []
    for iteration in sorted({iteration for _, iteration, _ in ledger.groups.rows()}):
        manifests = [store.committed(iteration, node) for node in ("prompts", "rollout")]
        assert manifests[0]
        indices += [index for _, index in issued_groups(store, manifests[0], manifests[1])]
    source = run.world.context.prompts
    expected, _ = source.take(source.start(), len(indices))
    assert indices == [prompt.index for prompt in expected]
    ledger.close()
    asyncio.run(run.engine.close())


def test_the_prompts_of_an_iteration_wait_for_the_rollout_before_it(tmp_path: Path) -> None:
    """A schedule that overlaps iterations must know it; after a roll-back the iteration before has ended as it is."""
    save_tokenizer(tmp_path / "model")
    loaded = load(
        "conf/tiny_arithmetic.yaml",
        ["graph=dapo", "sampling.filter=zero_variance", "prompts.per_iteration=2", "update.kl.coef=0"],
    )
    engine = Puppet()
    world = make_world(tmp_path, tmp_path / "model", [engine])
    source = PromptSource("made", [(f"w{i}", "", "{}") for i in range(30)], "d", held_out=0, shuffle=False, seed=0)
    experiment = replace(loaded.experiment, model=Model(path=str(tmp_path / "model")))
    world.context = world.with_context(prompts=source, experiment=experiment)
    run = Iterations(world, engine, load_graph(loaded.experiment), Random(0), 0.0)
    asyncio.run(run.draw(1))
    with pytest.raises(StageError, match="follow those that iteration 1 has sent, which only its rollout knows"):
        asyncio.run(run.draw(2))
    ledger = world.ledger
    commit_version(ledger, "a")
    ledger.roll_back(0)
    drawn = asyncio.run(run.draw(2)).table
    assert drawn is not None
    assert drawn["prompt_index"].to_pylist()[:2] == [2, 3]
    asyncio.run(world.close())


def test_fsck_expects_the_groups_that_were_sent_and_no_other(tmp_path: Path) -> None:
    run = WholeRun.start(tmp_path / "demo-001", write_model(tmp_path / "model"))
    groups = [f"i000001-g{g:03d}" for g in range(4)]
    rows = declared(
        {
            "group_id": groups, "prompt_index": [0, 1, 2, 3], "prompt_text": ["a"] * 4, "prompt_ids": [[5]] * 4,
            "answer": [""] * 4, "prompt_data": ["{}"] * 4,
        }
    )  # fmt: skip
    prompted = run.store.commit_rows(1, "prompts", rows, key="group_id", facts=run.facts(sampling={FIRST_ROUND: 1}))
    samples = rows.slice(0, 2).append_column(column("sample_id").field, pa.array(["s0", "s1"]))
    run.store.commit_rows(
        1, "rollout", samples, key="sample_id", parents=[prompted], facts=run.facts(dropped={groups[2]: "deadline"})
    )
    run.ledger.groups.issue(1, [(group, index) for index, group in enumerate(groups[:3])])
    run.ledger.groups.settle({groups[2]: "dropped/deadline"})
    for iteration in (2, 3):  # the one before the newest prompts may be under way
        run.prompts(iteration)
        run.issue(iteration)
    assert [str(found) for found in fsck(run.folder) if found.problem] == []
    run.ledger.groups.issue(1, [(groups[3], 3)])
    (found,) = [str(found) for found in fsck(run.folder) if found.problem]
    assert "expected the 3 groups it has sent, found 4, first i000001-g003" in found
    run.ledger.close()
