"""A stage context over fake engines, a real ledger with one committed version, and a real, tiny tokenizer."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

import pyarrow as pa

from conf.schema import Experiment, Model, Rollout
from data.columns import column
from data.ledger import Ledger
from data.refs import PolicyRef
from data.store import Store
from tasks.engines.client import Engine
from tasks.engines.fleet import Fleet
from tasks.stage import Context, Inputs
from tests.fakes.engine import FakeEngine

WORDS = 1000  # token n is the word `w<n>`; 0 to 2 are special


def save_tokenizer(folder: Path) -> None:
    """A word-level tokenizer in Hugging Face's files: pad 0, unknown 1, end 2."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<unk>", "<eos>"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(3, WORDS))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)


def new_version(ledger: Ledger, content: str) -> PolicyRef:
    """The next version, brought to PUBLISHING."""
    number = len(ledger.versions())
    got = ledger.allocate_version(f"update/{number}", number - 1 if number else None, number, "")
    ledger.set_version(got, "SEALED", content.ljust(64, "0"))
    ledger.set_version(got, "PUBLISHING")
    return ledger.version(got).ref


def commit_version(ledger: Ledger, content: str = "3f9a1c0b7d21") -> PolicyRef:
    """The next version, brought through all states to COMMITTED."""
    policy = new_version(ledger, content)
    ledger.set_version(policy.number, "COMMITTED")
    return policy


def prompt_rows(*prompts: Sequence[int], iteration: int = 1) -> pa.Table:
    """What the stage `prompts` gives: one row for each list of token ids."""
    values = {
        "group_id": [f"i{iteration:06d}-g{i:03d}" for i in range(len(prompts))],
        "prompt_index": list(range(len(prompts))),
        "prompt_text": [" ".join(f"w{t}" for t in ids) for ids in prompts],
        "prompt_ids": [list(ids) for ids in prompts],
        "answer": ["" for _ in prompts],
        "prompt_data": ["{}" for _ in prompts],
    }
    return pa.table(values, pa.schema([column(name).field for name in values]))


@dataclass
class World:
    """Everything a stage test looks at afterwards."""

    context: Context
    ledger: Ledger
    engines: list[Engine]
    progress: list[tuple[int, int, str]] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    spent: Counter[tuple[str, str]] = field(default_factory=Counter)  # (cost, group) -> how many

    def spend(self, cost: str, group: str, count: int) -> None:
        self.spent[cost, group] += count

    def discarded(self, rows: pa.Table) -> dict[str, int]:
        """group -> response tokens that were generated for it and stand in none of the rows."""
        groups, lengths = rows["group_id"].to_pylist(), map(len, rows["response_ids"].to_pylist())
        left = Counter({group: count for (cost, group), count in self.spent.items() if cost == "response_tokens"})
        for group, length in zip(groups, lengths, strict=True):
            left[group] -= length
        assert min(left.values()) >= 0
        return dict(+left)

    def with_context(self, **changes: Any) -> Context:
        return replace(self.context, **changes)

    async def publish(self, policy: PolicyRef) -> None:
        """What a publish leaves behind: every engine proven to hold what it holds, and READY on this version."""
        for engine in self.engines:
            mark = await engine.mark()
            engine.ready_label = policy.label
            self.ledger.set_engine(engine.name, engine.boot, "READY", policy.label, mark.checksum)

    async def update(self, package: Path, mode: Literal["abort", "retract", "in_place"]) -> PolicyRef:
        """Publish the package as the next version while requests run, as tasks.publish does."""
        policy = new_version(self.ledger, package.name)
        rows = {row.name: row for row in self.ledger.engines()}
        for engine in self.engines:
            row, engine.ready_label = rows[engine.name], ""
            self.ledger.set_engine(engine.name, engine.boot, "UPDATING", row.label, row.checksum)
            await engine.pause(mode, 60)
            await engine.update_weights(str(package), policy.label, 60, flush=mode != "in_place")
            await engine.resume(60)
        await self.publish(policy)
        self.ledger.set_version(policy.number, "COMMITTED")
        return policy

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))
        self.ledger.close()


def client_of(fake: FakeEngine, name: str = "engine0") -> Engine:
    return Engine(name, fake.url, vocab_size=fake.vocab_size, context_length=fake.context_length, boot=fake.boot)


def make_world(
    folder: Path, model: Path, engines: Sequence[Engine], *, node: str = "rollout", rewards: Any = None, **parts: Any
) -> World:
    """A context with these engines and a committed version 0, not yet published to them. `parts` are sections of the
    experiment."""
    ledger = Ledger(folder / "ledger.sqlite")
    ledger.open_run("test", "digest", "resolved")
    policy = commit_version(ledger)
    parts = {"rollout": Rollout(samples_per_prompt=2, max_new_tokens=8), **parts}
    world = World(cast(Context, None), ledger, list(engines))
    world.context = Context(
        experiment=Experiment(model=Model(path=str(model)), **parts),
        run_dir=folder,
        config_digest="digest",
        store=Store(folder, "test"),
        ledger=ledger,
        prompts=cast(Any, None),
        engines=Fleet(engines),
        trainer=cast(Any, None),
        rewards=rewards,
        iteration=1,
        node=node,
        policy=policy,
        progress=lambda *step: world.progress.append(step),
        measure=world.measured.__setitem__,
        spend=world.spend,
    )
    return world


def inputs_of(table: pa.Table | None = None, **policies: PolicyRef) -> Inputs:
    return Inputs(policies, None, table)


async def until(condition: Callable[[], bool]) -> None:
    """Let everything else run until it holds; the test's own timeout is the limit."""
    while not condition():
        await asyncio.sleep(0.001)
