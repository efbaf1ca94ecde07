"""`ratchet selfcheck`: what Ratchet guarantees, proven by its own code on a model of 1,032 parameters.

Each check has a run of its own in a temporary folder: ledger, store, weight packages, and simulated engines with the
traps of the real one. Beside each thing that must be refused stands the same thing done rightly, which must pass.
"""

import asyncio
import inspect
import logging
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import shorten
from typing import Any, cast

import pyarrow as pa
import torch
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from safetensors.numpy import load_file, save_file

from conf.errors import RatchetError
from conf.schema import Schedule
from data.store import Facts
from data.versions import check_lag
from flows.lab import PROBE_IDS, SAMPLES, Lab, table_of
from flows.simulate import simulate
from flows.steps import Slot, Step
from tasks import losses
from tasks.advantage import advantage
from tasks.engines.client import Generation, Sampling
from tasks.engines.simulated import SimulatedEngine
from tasks.engines.toy import HEAD, NORM, VOCABULARY, random_weights, score, write_model
from tasks.stage import Inputs, Selection

PREFIX = (11, 12, 13, 14, 15, 16)
POLL = "/v1/loads"  # how many requests run
SHOWN = 110  # characters of a message that is as expected


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    check: str
    expected: str
    found: str
    ok: bool


def same(check: str, expected: str, found: str) -> Finding:
    return Finding(check, expected, found, expected == found)


async def refused(check: str, expected: str, attempt: Callable[[], Any]) -> Finding:
    """The attempt must raise one of Ratchet's errors whose message begins with `expected`."""
    try:
        result = attempt()
        if inspect.isawaitable(result):
            await result
    except RatchetError as error:
        return Finding(check, expected, str(error), str(error).startswith(expected))
    return Finding(check, expected, "not refused", False)


SERVED = "COMMITTED; READY, serves it"
STOPPED = "PUBLISHING; DIRTY, gets no work"


async def ask(engine: SimulatedEngine, label: str, rid: str) -> Generation:
    return await engine.generate(rid=rid, prompt_ids=PREFIX, sampling=Sampling(3, 1.0), extra_key=label, timeout_s=60)


def source(got: Generation, seeds: Mapping[str, int]) -> str:
    """Whose weights the log-probabilities of an answer to PREFIX are, by computing them again."""
    for name, seed in seeds.items():
        true = score(random_weights(seed), [*PREFIX, *got.ids])[len(PREFIX) - 1 :]
        if all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(true, got.logprobs, strict=True)):
            return name
    return "of no one version"


async def missing_shard(lab: Lab) -> AsyncIterator[Finding]:
    engine = lab.engine()
    whole = await lab.export(random_weights(1))
    await lab.publish(whole, engine)
    yield same("a version with the shards of both ranks", SERVED, lab.state(whole, engine))
    yield await refused(
        "rank 1 wrote nothing: no shard, no receipt",
        "publish step P2: expected one receipt of each of [2] ranks, found ranks [0]",
        lambda: lab.export(random_weights(2), lost_rank=1),
    )
    yield same("... and its version", "ABANDONED", lab.ledger.versions()[-1].state)
    short = {name: value for name, value in random_weights(2).items() if name != HEAD}
    yield await refused(
        "both ranks wrote, but one tensor is in neither shard",
        f"publish step P2: 1 of 3 tensors are missing, first {HEAD}",
        lambda: lab.export(short),
    )
    damaged = await lab.export(random_weights(2))
    _remove_tensor(lab.root / "weights" / damaged.label, NORM)
    commands = len(engine.server.calls)
    yield await refused(
        "a tensor taken out of a sealed shard",
        f"publish step Q0: {damaged.label}/model-",
        lambda: lab.publish(damaged, engine),
    )
    found = f"{len(engine.server.calls) - commands} commands, {lab.state(whole, engine)}"
    yield same("... and the engine, which would have taken it", f"0 commands, {SERVED}", found)


async def old_reader(lab: Lab) -> AsyncIterator[Finding]:
    engine = lab.engine()
    server = engine.server
    old, new, newer = [await lab.export(random_weights(seed)) for seed in (1, 2, 3)]
    seeds = {"old weights": 1, "new weights": 2}
    await lab.publish(old, engine)

    server.hung = True
    reader = asyncio.create_task(ask(engine, old.label, "reader-1"))
    await _until(lambda: bool(server.running))
    publishing = asyncio.create_task(lab.publish(new, engine))
    updates, polls = server.updates, server.calls.count(POLL)
    await _until(lambda: server.calls.count(POLL) > polls + 1 or server.updates > updates)  # it waits, or does not
    server.hung = False
    await publishing
    got = await reader
    labels = {span.label for span in got.spans}
    found = f"{source(got, seeds)}, label {'old' if labels == {old.label} else 'wrong'}"
    yield same("a reader that ends while the publish waits", "old weights, label old", found)
    yield same("... and then the publish", SERVED, lab.state(new, engine))

    server.hung = True
    reader = asyncio.create_task(ask(engine, new.label, "reader-2"))
    await _until(lambda: bool(server.running))
    updates, before = server.updates, await engine.checksums()
    yield await refused(
        "a reader that does not end, not even when aborted",
        f"publish step Q2: {newer.label}: engine0: /pause_generation had no answer",
        lambda: lab.publish(newer, engine, drain_timeout_s=0.05, timeout_s=0.3),
    )
    kept = "as they were" if await engine.checksums() == before else "overwritten"
    found = f"{server.updates - updates} updates sent, weights {kept}"
    yield same("... and the weights it reads", "0 updates sent, weights as they were", found)
    yield same("... and the engine", STOPPED, lab.state(newer, engine))

    server.hung = False
    await asyncio.wait([reader])
    await lab.publish(newer, engine)
    yield same("the same publish once the reader is gone", SERVED, lab.state(newer, engine))
    yield await refused("... and the reader's answer, cut short", "engine0 answered request reader-2", lambda: reader)


async def old_kv(lab: Lab) -> AsyncIterator[Finding]:
    engine = lab.engine()
    old, new = [await lab.export(random_weights(seed)) for seed in (1, 2)]
    seeds = {"old weights": 1, "new weights": 2}
    await lab.publish(old, engine)

    async def twice(label: str, name: str) -> str:
        first, second = [await ask(engine, label, f"{name}-{i}") for i in range(2)]
        whose = {source(got, seeds) for got in (first, second)}
        return f"{first.cached_tokens} then {second.cached_tokens} cached tokens, {' and '.join(sorted(whose))}"

    expected = f"0 then {len(PREFIX) - 1} cached tokens"
    found = await twice(old.label, "old")
    yield same("a prefix, asked for twice", f"{expected}, old weights", found)
    # What an attempt that stopped before the update leaves behind: KV of old weights under the new version's key.
    await engine.generate_unready(
        rid="stopped-0", prompt_ids=PREFIX, sampling=Sampling(1, 0.0), extra_key=new.label, timeout_s=60
    )
    await lab.publish(new, engine)
    left = [kv for key in (old.label, "") for kv in engine.server.cache.get(key, [])]
    yield same("old KV in the engine after a publish", "0 entries", f"{len(left)} entries")
    found = await twice(new.label, "new")
    yield same("the same prefix under the new version", f"{expected}, new weights", found)
    yield await refused(
        "a request for the old version",
        f"engine0 is READY for {new.label}, request old-9 is for {old.label}",
        lambda: ask(engine, old.label, "old-9"),
    )


async def silent_rank(lab: Lab) -> AsyncIterator[Finding]:
    engine = lab.engine(ranks=2)
    old, new = [await lab.export(random_weights(seed)) for seed in (1, 2)]
    await lab.publish(old, engine)
    yield same("an engine of two ranks", SERVED, lab.state(old, engine))
    engine.server.keeps_old = {1}
    yield await refused(
        "rank 1 keeps the old weights and the engine reports success",
        f"publish step Q6: engine0, {new.label}: checksum of rank 1: ",
        lambda: lab.publish(new, engine),
    )
    back = f"QUARANTINED; READY, serves {old.label}"
    yield same("... given once more it does so again, so the engine goes back", back, lab.state(new, engine))

    engine.server.keeps_old = set()
    other = lab.engine(ranks=2)
    other.server.keeps_old = {1}
    newer = await lab.export(random_weights(3))
    yield await refused(
        "one of two engines does so, and both are needed",
        "publish step Q",
        lambda: lab.publish(newer, engine, other, min_engines=2),
    )
    both = f"{lab.state(newer, engine)}; {lab.state(newer, other)}"
    yield same("... and both", f"PUBLISHING; PROBING, gets no work; {STOPPED}", both)


async def behaviour(lab: Lab) -> AsyncIterator[Finding]:
    ref = lab.store.commit_rows(1, "rollout", _samples(probability=0.2), key="sample_id", facts=Facts())
    current = _samples(probability=0.4)
    yield await refused(
        "current probabilities written over the behaviour's",
        "behavior_logprobs is already written by iteration 1's rollout",
        lambda: lab.store.commit_columns(1, "update", ref, current.select(["behavior_logprobs"]), facts=Facts()),
    )
    yield await refused(
        "the rollout committed again with current probabilities",
        f"iteration 1's rollout of run {lab.root.name} is committed as ",
        lambda: lab.store.commit_rows(1, "rollout", current, key="sample_id", facts=Facts()),
    )
    stored = torch.tensor([row[0] for row in lab.store.read(ref, ["behavior_logprobs"])[0].to_pylist()])
    now, advantages = torch.full_like(stored, math.log(0.4)), torch.full_like(stored, -1.0)
    ratio = losses.ratio_sums(now, stored, advantages, 0.2, 0.2)["ratio"] / len(stored)
    loss = losses.ppo_clip(now, stored, advantages, 0.2, 0.2).mean()
    yield same(
        "0.2 when it was generated, 0.4 now, advantage -1",
        "ratio 2.000, loss 2.000",
        f"ratio {ratio:.3f}, loss {loss:.3f}",
    )


async def incomplete_group(lab: Lab) -> AsyncIterator[Finding]:
    engine = lab.engine()
    version = await lab.export(random_weights(1))
    await lab.publish(version, engine)
    rows = await lab.rollout(version, PREFIX, (VOCABULARY,), PROBE_IDS)  # the second prompt's requests fail
    lab.store.commit_rows(1, "rollout", rows.table, key="sample_id", facts=rows.facts)
    groups = ", ".join(rows.table["group_id"].to_pylist())
    found = f"rows of {groups}; dropped {dict(rows.facts.dropped)}"
    yield same(
        "three prompts, one of which the engine refuses",
        "rows of g0, g0, g2, g2; dropped {'g1': 'rollout_refused'}",
        found,
    )
    yield await refused(
        "a batch in which a group has lost a sample",
        "group g2 is incomplete: expected 2 samples, got 1",
        lambda: lab.store.commit_rows(2, "rollout", rows.table.slice(0, 3), key="sample_id", facts=rows.facts),
    )
    scored: dict[str, list[Any]] = {"rewards": [1.0, 0.0, 1.0, None], "reward_outcome": ["ok", "ok", "ok", "timeout"]}
    table = pa.table([*rows.table.columns, *table_of(scored).columns], [*rows.table.column_names, *scored])
    kept = cast(Selection, await advantage.run(Inputs({}, None, table), lab.context(version)))
    found = f"rows {kept.indices}; dropped {dict(kept.facts.dropped)}"
    yield same("a group of which one reward timed out", "rows [0, 1]; dropped {'g2': 'reward_timeout'}", found)


async def stale_version(lab: Lab) -> AsyncIterator[Finding]:
    left_behind, served = lab.engine(), lab.engine()
    old, new = [await lab.export(random_weights(seed)) for seed in (1, 2)]
    await lab.publish(old, left_behind, served)
    restored = lab.open_ledger(lab.root / "restored")  # a backup from before `new`
    restored.allocate_version("0", None, 0, "")
    for state, content in (("SEALED", old.content), ("PUBLISHING", None), ("COMMITTED", None)):
        restored.set_version(0, state, content)
    await lab.publish(new, served)
    try:
        rows = await lab.rollout(new, PREFIX)
        yield same("a rollout under the newest version", f"{SAMPLES} rows", f"{rows.table.num_rows} rows")
        yield await refused(
            "a rollout under the version before it, on an engine that still serves that",
            "lag must be <= 0, got 1",
            lambda: lab.rollout(old, PREFIX),
        )
        yield await refused(
            "a rollout under a version newer than any in the ledger",
            "lag must be >= 0, got -1",
            lambda: lab.rollout(new, PREFIX, ledger=restored),
        )
    finally:
        restored.close()
    yield same("rows of version 7 when 9 is the newest and lag 2 allowed", "lag 2", f"lag {check_lag(9, 7, 2)}")
    yield await refused("... lag 1 allowed", "lag must be <= 1, got 2", lambda: check_lag(9, 7, 1))
    yield await refused(
        "rows of version 9 when 7 is the newest", "lag must be >= 0, got -2", lambda: check_lag(7, 9, 2)
    )


async def schedule(lab: Lab) -> AsyncIterator[Finding]:
    steps = [
        Step("rollout", (), "rollout", "rollout"),
        Step("process", ("rollout",), "process"),
        Step("train", ("process",), "train", "update"),
    ]
    durations = {"rollout": [40.0] * 3, "process": [20.0] * 3, "train": [30.0] * 3}
    serial, ahead = Schedule(), Schedule("async", max_lag=2)  # lag 2: no rollout of the three waits for weights
    # 3 x 2 inputs, and the turns of batches 2 and 3 in three pools; in serial these also wait for all of the one before
    for name, schedule, expected, rules in (("serial", serial, 270, 18), ("pipelined", ahead, 170, 12)):
        simulated = simulate(steps, durations, 3, schedule)
        kept = _dependencies(simulated.slots, {step.name: step.needs for step in steps}, schedule is serial)
        found = f"{simulated.makespan:g}; {sum(kept)} of {len(kept)} dependencies kept"
        expected_text = f"{expected}; {rules} of {rules} dependencies kept"
        yield same(f"three batches of R=40, P=20, T=30, {name}", expected_text, found)


def _dependencies(slots: Sequence[Slot], needs: Mapping[str, Sequence[str]], sync: bool) -> list[bool]:
    """Whether each dependency was kept: inputs, one batch at a time in a pool, and in `sync` in the whole run."""
    at = {(slot.batch, slot.node): slot for slot in slots}
    before = [(slot, at[slot.batch, need]) for slot in slots for need in needs[slot.node]]
    before += [(slot, at[slot.batch - 1, slot.node]) for slot in slots if slot.batch > 1]
    kept = [slot.start >= other.end for slot, other in before]
    if sync:
        ends = {batch: max(slot.end for slot in slots if slot.batch == batch) for batch, _ in at}
        kept += [slot.start >= ends[slot.batch - 1] for slot in slots if slot.batch > 1]
    return kept


def _samples(probability: float) -> pa.Table:
    """One group of one-token responses, each generated with this probability by version 1."""
    label = "000001-0123456789ab"
    return table_of(
        {
            "sample_id": [f"g0-s{i}" for i in range(SAMPLES)],
            "group_id": ["g0"] * SAMPLES,
            "response_ids": [[7]] * SAMPLES,
            "response_mask": [[True]] * SAMPLES,
            "behavior_logprobs": [[math.log(probability)]] * SAMPLES,
            "version_spans": [[{"label": label, "start": 0, "end": 1}]] * SAMPLES,
            "policy_version": [1] * SAMPLES,
            "finish_reason": ["length"] * SAMPLES,
        }
    )


def _remove_tensor(folder: Path, name: str) -> None:
    """What somebody with rights to the disk, or a broken disk, could do to a sealed version."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if tensors.pop(name, None) is not None:
            path.chmod(0o644)
            save_file(tensors, path)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


CHECKS: Mapping[str, Callable[[Lab], AsyncIterator[Finding]]] = {
    "a missing shard is not published": missing_shard,
    "an old reader blocks an in-place write": old_reader,
    "old KV does not mix with a new version": old_kv,
    "a rank with old weights is found": silent_rank,
    "a behaviour probability stays": behaviour,
    "an incomplete group is not admitted": incomplete_group,
    "a version too old, or from the future, is not admitted": stale_version,
    "stages overlap as far as their inputs allow": schedule,
}


async def run_check(check: Callable[[Lab], AsyncIterator[Finding]], folder: Path, model: Path) -> list[Finding]:
    """All its findings; an error that it did not expect is one more, and not ok."""
    lab = Lab(folder, model)
    findings = []
    try:
        async for finding in check(lab):
            findings.append(finding)  # noqa: PERF401  (those before an error count)
    except Exception as error:
        findings.append(Finding("the check itself", "no error", f"{type(error).__name__}: {error}", False))
    finally:
        await lab.close()
    return findings


def selfcheck(console: Console | None = None) -> int:
    """Run every check and print the table. 0: everything as expected; 1: not."""
    logging.getLogger("tasks").addHandler(logging.NullHandler())  # what is refused on purpose is in the table
    console = console or Console()
    table = Table("check", "expected", "found", "", box=box.SIMPLE_HEAD, row_styles=["", "dim"])
    failed = total = 0
    with TemporaryDirectory(prefix="ratchet-selfcheck-") as root:
        model = write_model(Path(root) / "model")
        for title, check in CHECKS.items():
            findings = asyncio.run(run_check(check, Path(root) / check.__name__, model))
            table.add_section()
            table.add_row(Text(title, "bold not dim"))
            for f in findings:
                found = shorten(f.found, SHOWN) if f.ok else f.found
                verdict = Text("ok", "green") if f.ok else Text("FAIL", "bold red")
                table.add_row(Text(f.check), Text(f.expected), Text(found), verdict)
            total, failed = total + len(findings), failed + sum(not f.ok for f in findings)
    console.print(table)
    console.print(f"{total - failed} of {total} as expected")
    return 1 if failed else 0
