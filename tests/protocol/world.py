"""One run of the product's own publisher and reader over misbehaving servers, and what must hold of it: I1-I9.

What stands in the place of something else: the trainer (tensors of one seed), the servers and the wire to them, the
clock, threads (their work is done at once), the nonce of a batch (a counter). Everything else is the product's: export,
seal, ledger, publish, install, gate, fleet, rollout, bracket, retire.
"""

import asyncio
import itertools
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest

import data.retention
import tasks.publish
import tasks.rollout
from conf.errors import EngineError, PublishError, RatchetError
from conf.schema import Experiment, Publish
from data.ledger import EngineRow, Ledger
from data.package import Package
from data.refs import PolicyRef
from data.rows import check_rollout
from data.weights import verify
from flows.lab import PROBE_IDS, SAMPLES, Lab, Ranks, table_of
from tasks.engines.client import Engine, Sampling
from tasks.engines.commands import Fence, Gate, Stale
from tasks.engines.fleet import Fleet
from tasks.engines.toy import random_weights, write_model
from tasks.trainer.client import Trainer
from tasks.update import Exporter
from tests.protocol.clock import Clock, InlinePool, inline
from tests.protocol.server import FaultyEngine, FaultyServer

BASE = random_weights(0)
PROMPTS = ((11, 12, 13, 14), (11, 12, 13, 21))
TOKENS = 3
KEEP = 2
STEP_S = 0.001  # how far one training step moves a weight: no probe with the default tolerance can tell
TURNS = 20_000  # of the loop; more than anything here needs
PUBLISH = Publish(
    timeout_s=60, drain_timeout_s=20, keep_versions=KEEP, min_engines=1, max_restarts=2, restart_backoff_s=1.0
)


@cache
def weights_of(seed: int) -> dict[str, np.ndarray]:
    """Versions are as near to each other as those of one training run."""
    return {name: BASE[name] + np.float32(STEP_S) * change for name, change in random_weights(seed).items()}


@cache
def held_of(seed: int, ranks: int) -> str:
    server = FaultyServer(weights_of(seed), ranks)
    return server.held


class Broken(AssertionError):
    """An invariant does not hold; the message begins with its name."""


def must(holds: object, invariant: str, *what: object) -> None:
    if not holds:
        _worlds[-1].broken = True
        raise Broken(f"{invariant}: {' '.join(map(str, what))}")


class Killed(BaseException):
    """The process is gone at this point."""


class Process:
    """One orchestrator: its ledger, its clients, its publishers and its batches. All end with it."""

    def __init__(self, world: "World") -> None:
        self.alive = True
        self.requests = 0
        self.dies_at = ""  # crash point at which it is killed
        self.lab = Lab(world.root, world.model)
        self.ledger = self.lab.ledger
        for server in world.servers:
            if not server.alive:
                server.restart()
        engines = [FaultyEngine(f"engine{i}", server, self) for i, server in enumerate(world.servers)]
        restarts = {} if world.external else {engine.name: self.restart for engine in engines}
        self.fleet = Fleet(engines, restarts)
        self.publishers: dict[asyncio.Task[Any], PolicyRef] = {}
        self.batches: dict[asyncio.Task[Any], tuple[PolicyRef, list[str]]] = {}
        self.no_start = 0  # restarts that fail

    async def restart(self, engine: Engine) -> Engine:
        assert isinstance(engine, FaultyEngine)
        engine.server.crash()
        await asyncio.sleep(1)
        if self.no_start:
            self.no_start -= 1
            raise EngineError(f"{engine.name} did not start")
        engine.server.restart()
        return FaultyEngine(engine.name, engine.server, self)

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        return [*self.publishers, *self.batches]


class World:
    """A run folder, servers, and one process after another over them. `counts` are of the present session."""

    counts: ClassVar[Counter[str]] = Counter()
    clock: Clock  # of the present session

    def __init__(self, template: "Template", root: Path, ranks: int, engines: int, external: bool) -> None:
        shutil.copytree(template.root, root, copy_function=_link)
        self.broken = False
        self.root, self.model, self.ranks, self.external = root, template.model, ranks, external
        self.servers = [FaultyServer(weights_of(template.seed), ranks, i) for i in range(engines)]  # as they start
        for server in self.servers:
            server.on_write = self.written
            server.injected = self.counts
        _worlds[:] = [self]
        self.nonce = itertools.count()
        self.batch = itertools.count()
        self.seeds: dict[str, int] = {}  # content -> seed
        self.sealed: dict[str, tuple[Any, ...]] = {}  # label -> what its folder looked like when sealed
        self.numbers: dict[int, str | None] = {}
        self.newest = -1  # number committed
        self.highest: dict[str, int] = {}  # boot of an engine -> attempt of the newest command it executed
        self.settled = self.admitted = self.dropped = self.refused = self.dispatched = 0  # samples
        self.process = Process(self)
        self.remember(template.policy, template.seed)

    # -- what the user, the machine or bad luck does

    def export(self, seed: int, lost_rank: int | None = None, key: str = "") -> PolicyRef | None:
        """P0-P5. None where it was refused."""
        ledger = self.process.ledger
        rows = ledger.versions()
        trainer = cast(Trainer, Ranks(weights_of(seed), lost_rank))
        exporter = Exporter(trainer, ledger, self.experiment, self.root, "", lambda name, value: None)
        made = self.spawn(
            exporter.seal_version(
                key or f"{len(rows):06d}/update",
                parent=rows[-1].number,
                optimizer_step=len(rows),
                dataset="",
                probe_ids=PROBE_IDS,
            )
        )
        self.run([made])
        try:
            policy: PolicyRef = made.result()
        except PublishError:
            must(lost_rank is not None, "I3", "an export without a fault was refused")
            must(ledger.versions()[-1].state == "ABANDONED", "I3", "a version without a rank's shard is kept")
            return None
        must(lost_rank is None, "I3", f"{policy.label} is sealed without a rank's shard")
        self.remember(policy, seed)
        return policy

    def remember(self, policy: PolicyRef, seed: int) -> None:
        self.seeds[policy.content] = seed
        self.sealed[policy.label] = _look(self.root / "weights" / policy.label)

    def publish(self, policy: PolicyRef, min_engines: int = 1) -> asyncio.Task[Any]:
        process = self.process
        experiment = replace(self.experiment, publish=replace(PUBLISH, min_engines=min_engines))
        policy = process.ledger.live(policy)
        task = self.spawn(
            tasks.publish.publish_to_engines(policy, self.root / "weights", process.fleet, process.ledger, experiment)
        )
        process.publishers[task] = policy
        self.counts["publishes"] += 1
        return task

    def start_batch(self) -> asyncio.Task[Any] | None:
        process = self.process
        policy = process.ledger.committed()
        if policy is None:
            return None
        number = next(self.batch)
        groups = [f"b{number:02d}g{i}" for i in range(len(PROMPTS))]
        values = {
            "group_id": groups,
            "prompt_index": list(range(len(PROMPTS))),
            "prompt_text": [""] * len(PROMPTS),
            "prompt_ids": [list(ids) for ids in PROMPTS],
            "answer": [""] * len(PROMPTS),
            "prompt_data": ["{}"] * len(PROMPTS),
        }
        process.ledger.groups.issue(number, [(group, i) for i, group in enumerate(groups)])
        self.dispatched += len(PROMPTS) * SAMPLES
        context = replace(process.lab.context(policy), engines=process.fleet, experiment=self.experiment)
        task = self.spawn(
            tasks.rollout.generate_batch(context, table_of(values), policy, Sampling(TOKENS, 1.0), SAMPLES)
        )
        process.batches[task] = (policy, groups)
        return task

    def kill(self, servers_too: bool) -> None:
        """kill -9 of the orchestrator, and a new one."""
        old = self.process
        self.bury(old)
        self.counts["kills"] += 1
        for server in self.servers:
            if servers_too:
                server.crash()
        self.process = Process(self)

    def bury(self, process: Process) -> None:
        """Nothing of it has an effect any more."""
        process.alive = False
        for _, groups in process.batches.values():
            self.refused += len(groups) * SAMPLES  # the whole batch, for the process that asked for it is gone
        process.ledger.close()
        for task in process.tasks:
            task.cancel()
        ending = [task for task in process.tasks if not task.done()]
        self.run(ending)
        for task in process.tasks:
            with suppress(BaseException):
                task.result()
        process.publishers.clear()
        process.batches.clear()

    def retire(self, keep: int) -> None:
        """A pass of `ratchet gc`."""
        with suppress(Killed):
            for folder in data.retention.retire(self.process.ledger, self.root / "weights", keep):
                shutil.rmtree(folder)

    # -- time

    @property
    def experiment(self) -> Experiment:
        experiment = self.process.lab.experiment
        rollout = replace(experiment.rollout, max_new_tokens=TOKENS, retries=1, timeout_s=30, max_failed_share=0.5)
        return replace(experiment, rollout=rollout, publish=PUBLISH)

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        return self.clock.create_task(work)

    def run(self, tasks: list[asyncio.Task[Any]]) -> None:
        """Until all of them have ended."""
        turns = 0

        def going() -> bool:
            nonlocal turns
            turns += 1
            must(turns < TURNS, "I8", "it goes round and round")
            return not all(task.done() for task in tasks)

        self.clock.run_while(going)
        must(all(task.done() for task in tasks), "I8", "something waits for ever")

    def advance(self, requests: int) -> None:
        """Until so many more requests were sent, or everything has ended. A kill on the way ends the process."""
        process = self.process
        until, turns = process.requests + requests, 0

        def going() -> bool:
            nonlocal turns
            turns += 1
            must(turns < TURNS, "I8", "it goes round and round")
            return process.alive and process.requests < until and not all(t.done() for t in process.tasks)

        self.clock.run_while(going)
        if not process.alive:
            self.kill(servers_too=False)
        else:
            must(process.requests >= until or all(t.done() for t in process.tasks), "I8", "something waits for ever")
        self.collect()

    def finish(self) -> None:
        while self.process.tasks:
            self.advance(1 << 30)

    # -- what came out

    def collect(self) -> None:
        """Judge what has ended."""
        process = self.process
        for task in [t for t in process.publishers if t.done()]:
            policy = process.publishers.pop(task)
            try:
                task.result()
                self.counts["published"] += 1
            except Stale:
                self.counts["stale"] += 1
            except RatchetError as error:
                self.counts["not published"] += 1
                must(str(error), "I9", f"{policy.label} was not published, and no reason is given")
        for task in [t for t in process.batches if t.done()]:
            policy, groups = process.batches.pop(task)
            self.judge(task, policy, groups)

    def judge(self, task: asyncio.Task[Any], policy: PolicyRef, groups: list[str]) -> None:
        """I1, I2, I6, I9 for a batch that has ended."""
        ledger = self.process.ledger
        try:
            rows = task.result()
        except RatchetError as error:
            must(str(error), "I9", "a batch was refused without a reason")
            ledger.groups.settle(dict.fromkeys(groups, "dropped/batch_refused"))
            self.refused += len(groups) * SAMPLES
            self.counts["batches refused"] += 1
            return
        check_rollout(rows.table, SAMPLES, rows.facts.dropped)
        self.counts["batches admitted"] += 1
        kept = [g for g in groups if g not in rows.facts.dropped]
        must(sorted(set(rows.table["group_id"].to_pylist())) == kept, "I9", "groups are neither rows nor dropped")
        must(all(rows.facts.dropped.values()), "I9", "a group is dropped without a reason")
        ledger.groups.settle(
            {g: f"dropped/{rows.facts.dropped[g]}" if g in rows.facts.dropped else "trained" for g in groups}
        )
        self.admitted += rows.table.num_rows
        self.dropped += len(rows.facts.dropped) * SAMPLES
        self.counts["rows admitted"] += rows.table.num_rows
        self.counts["rows dropped"] += len(rows.facts.dropped) * SAMPLES
        true = held_of(self.seeds[policy.content], self.ranks)
        for row in rows.table.select(["sample_id", "version_spans", "response_ids", "engine"]).to_pylist():
            (served,) = self.answers(row["sample_id"], row["response_ids"], row["engine"])
            what = f"row {row['sample_id']} of {policy.label}"
            must({s["label"] for s in row["version_spans"]} == {policy.label}, "I1", what, row["version_spans"])
            must(set(served.made_by) == {true}, "I1", what, f"has tokens of {served.made_by}, not of {true}")
            must(set(served.kv_by) == {true}, "I1", what, f"has KV of {served.kv_by}, not of {true}")
            must(not served.overwritten, "I6", what, "was read from weights that were written meanwhile")

    def answers(self, sample: str, ids: list[int], engine: str) -> list[Any]:
        """The request that the row is of: the server's own record of it."""
        name = engine.partition("/")[0]
        served = self.servers[int(name.removeprefix("engine"))].served
        last = max(rid for rid in served if rid.startswith(f"{sample}-"))
        assert served[last].ids == ids
        return [served[last]]

    # -- what holds at any time

    def check(self) -> None:
        self.check_engines()
        self.check_versions()
        self.check_rows()

    def check_engines(self) -> None:
        """I2 between requests. A READY engine may have died, or been restarted, a moment ago: then its next bracket
        refuses it. While it is the same life, and no late update of an earlier process has come to it, it holds what it
        is READY for on all ranks."""
        ledger = self.process.ledger
        states = {row.ref.label: row.state for row in ledger.versions() if row.content}
        known = {row.name: row for row in ledger.engines()}
        for engine in self.process.fleet:
            server = cast(FaultyEngine, engine).server
            if not engine.ready_label:
                continue
            row, state = known[engine.name], states[engine.ready_label]
            must(state in ("COMMITTED", "RETIRED", "DELETED"), "I2", f"{engine.name} is READY for a {state} version")
            must(
                (row.boot, row.state, row.label) == (engine.boot, "READY", engine.ready_label),
                "I2",
                f"{engine.name} is given work for {engine.ready_label}, the ledger has {row}",
            )
            if server.alive and server.boot == engine.boot and not server.came_late:
                content = next(c for c in self.seeds if c.startswith(engine.ready_label.partition("-")[2]))
                true = held_of(self.seeds[content], self.ranks)
                must(server.held == true, "I2", f"{engine.name} is READY for {engine.ready_label} with other weights")

    def check_versions(self) -> None:
        ledger = self.process.ledger
        rows = ledger.versions()
        for row in rows:
            before = self.numbers.setdefault(row.number, row.content)
            must(before in (None, row.content), "I4", f"version {row.number} had {before}, now {row.content}")
            self.numbers[row.number] = row.content
        must([r.number for r in rows] == sorted(self.numbers), "I4", "numbers were lost or given twice")
        committed = max((r.number for r in rows if r.state == "COMMITTED"), default=-1)
        must(committed >= self.newest, "I4", f"{self.newest} was committed, now {committed} is the newest")
        self.newest = committed
        for row in rows:
            if row.content and row.ref.label in self.sealed:
                folder = self.root / "weights" / row.ref.label
                overtaken = row.state == "ABANDONED" and row.number < committed
                if (row.state in ("RETIRED", "DELETED") or overtaken) and not folder.exists():
                    continue
                must(folder.exists(), "I5", f"{folder.name} is gone, it is {row.state}")
                must(_look(folder) == self.sealed[folder.name], "I5", f"{folder.name} was changed")

    def check_rows(self) -> None:
        waiting = sum(len(groups) for _, groups in self.process.batches.values()) * SAMPLES
        accounted = self.admitted + self.dropped + self.refused + waiting
        must(self.dispatched == accounted, "I9", f"{self.dispatched} samples dispatched, {accounted} accounted for")

    # -- what holds at one moment

    def written(self, server: FaultyServer) -> None:
        """I6 whenever weights are written at a living publisher's command. A late one comes after its publisher has
        given up: then the rows of whoever reads are never admitted (`judge`)."""
        readers = [rid for rid, request in server.running.items() if not request.aborted]
        must(not readers or server.came_late, "I6", f"weights are written while {readers} read them")

    def executed(self, fence: Fence) -> None:
        """I7 whenever a gate lets a command through."""
        newest = self.highest.get(fence.boot, 0)
        must(fence.attempt >= newest, "I7", f"attempt {fence.attempt} is executed after {newest}")
        self.highest[fence.boot] = fence.attempt

    def committing(self, number: int, rows: list[EngineRow]) -> None:
        """I3 when a version becomes COMMITTED: its folder is whole, and each READY engine has shown to hold it."""
        policy = self.process.ledger.version(number).ref
        must(
            _look(self.root / "weights" / policy.label) == self.sealed[policy.label],
            "I3",
            f"{policy.label} is not whole",
        )
        must(any(row.state == "READY" for row in rows), "I3", f"{policy.label} is committed and no engine has it")
        for row in rows:
            server = self.servers[int(row.name.removeprefix("engine"))]
            if row.state == "READY" and row.boot == server.boot:
                true = held_of(self.seeds[policy.content], self.ranks)
                must(
                    server.answered_sums == true,
                    "I3",
                    f"{policy.label} is committed, {row.name} has shown {server.answered_sums}, not {true}",
                )

    def deleting(self, folder: Path) -> None:
        """I5 before a folder is deleted."""
        number = int(folder.name[:6])
        holders = self.process.ledger.leases().get(number)
        must(not holders, "I5", f"{folder.name} is deleted while leased by {holders}")
        state, newest = self.process.ledger.version(number).state, self.process.ledger.committed()
        overtaken = state == "ABANDONED" and newest is not None and number < newest.number
        must(state == "RETIRED" or overtaken, "I5", f"{folder.name} is deleted before its time")

    def crash_point(self, name: str) -> None:
        process = self.process
        if process.alive and process.dies_at and name.endswith(f"/{process.dies_at}"):
            self.counts[f"killed at {process.dies_at}"] += 1
            process.alive = False
            process.ledger.close()
            raise Killed(name)

    # -- the end

    def settle(self) -> None:
        """I8: faults stop, what was late comes, and a new process publishes as every start of a run does. All engines
        are READY, and a batch is admitted whole."""
        for server in self.servers:
            server.faults.clear()
            server.hung = False
        self.process.no_start = 0
        self.process.dies_at = ""
        self.finish()
        for server in self.servers:
            server.deliver_late()
            if not server.alive:
                server.restart()
        if len(self.process.fleet) < len(self.servers) or self.external:
            self.kill(servers_too=False)
        policy = self.process.ledger.committed()
        assert policy is not None  # the first version is, from the beginning
        task = self.publish(policy)
        self.finish()
        must(not task.exception(), "I8", f"{policy.label} cannot be published: {task.exception()}")
        for engine in self.process.fleet:
            server = cast(FaultyEngine, engine).server
            must(engine.ready_label == policy.label, "I8", f"{engine.name} is not READY")
            must((server.alive, server.boot) == (True, engine.boot), "I2", f"{engine.name} is READY in an earlier life")
            must(server.held == held_of(self.seeds[policy.content], self.ranks), "I2", f"{engine.name} holds others")
        before = self.admitted
        self.start_batch()
        self.finish()
        must(self.admitted == before + len(PROMPTS) * SAMPLES, "I8", "a batch without faults was not admitted")
        self.counts["rows admitted when faults had stopped"] += self.admitted - before
        self.check()

    def close(self) -> None:
        self.bury(self.process)
        for task in asyncio.all_tasks(self.clock):
            task.cancel()
        self.clock.run_while(lambda: bool(asyncio.all_tasks(self.clock)))
        for folder in (self.root / "weights").iterdir():
            folder.chmod(0o755)
        shutil.rmtree(self.root)


class Template:
    """A run folder in which version 0 is sealed: what every world starts from."""

    seed = 1

    def __init__(self, folder: Path) -> None:
        self.model = write_model(folder / "model")
        self.root = folder / "run"
        lab = Lab(self.root, self.model)
        lab.experiment = replace(lab.experiment, publish=PUBLISH)
        self.policy = asyncio.run(lab.export(weights_of(self.seed)))
        lab.ledger.close()


@contextmanager
def session(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Time, threads and nonces of the product are the clock's, and every hook of the invariants is in its place.

    What is patched before is kept: a broken product is watched as the whole one is.
    """
    clock = World.clock = Clock()
    World.counts = Counter()
    patch.setattr(asyncio, "to_thread", inline)
    patch.setattr("data.weights.ThreadPoolExecutor", InlinePool)
    for module in ("tasks.engines.install", "tasks.engines.client", "tasks.publish", "tasks.rollout", "tasks.update"):
        patch.setattr(f"{module}.time", clock)
    patch.setattr("tasks.engines.client.httpx.AsyncClient", lambda **options: None)  # Wire is in its place; 40 ms each
    patch.setattr("tasks.engines.install.POLL_S", 5.0)
    patch.setattr("tasks.engines.client.FLUSH_POLL_S", 5.0)
    patch.setattr("tasks.engines.simulated.POLL_S", 5.0)
    patch.setattr("tasks.engines.simulated.httpx.Response", Reply)
    patch.setattr("tasks.generation.samples.load_tokenizer", lambda model: Words())
    patch.setattr("tasks.rollout.tokenizer_digest", lambda model: "")
    proven: dict[Any, Package] = {}

    def verify_once(folder: Path) -> Package:
        """The same files need not be hashed again."""
        look = (folder, _look(folder)) if folder.exists() else None
        if look not in proven:
            proven[look] = verify(folder)
        return proven[look]

    patch.setattr("tasks.publish.verify", verify_once)
    patch.setattr("tasks.update.code_digest", lambda: "")
    patch.setattr("tasks.generation.request.secrets.token_hex", lambda size: f"{next(_worlds[-1].nonce):06d}")
    patch.setattr("tasks.engines.install.crash_point", lambda name: _worlds[-1].crash_point(name))
    patch.setattr("tasks.publish.crash_point", lambda name: _worlds[-1].crash_point(name))
    patch.setattr("data.retention.crash_point", lambda name: _worlds[-1].crash_point(name))
    patch.setattr("tasks.generation.bracket.POLL_S", 5.0)
    send, commit, withdraw = Gate.send, Ledger.commit_version, data.retention.withdraw

    async def watched_send(self: Gate, fence: Fence, step: str, command: Any) -> Any:
        async def watched() -> Any:
            _worlds[-1].executed(fence)
            return await command()

        return await send(self, fence, step, watched)

    def watched_commit(self: Ledger, number: int, engines: Any, min_engines: int, attempts: Any) -> None:
        commit(self, number, engines, min_engines, attempts)
        _worlds[-1].committing(number, engines)

    def watched_withdraw(folder: Path) -> Path:
        _worlds[-1].deleting(folder)
        return withdraw(folder)

    patch.setattr(Gate, "send", watched_send)
    patch.setattr(Ledger, "commit_version", watched_commit)
    patch.setattr("data.retention.withdraw", watched_withdraw)
    logger = logging.getLogger("tasks")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)
        clock.close()
        patch.undo()


_worlds: list["World"] = []  # the present one is the last


def _link(source: str, target: str) -> None:
    """Weights are never changed, so every run may have the same ones."""
    if "/weights/" in source:
        Path(target).hardlink_to(source)
    else:
        shutil.copyfile(source, target)


def _look(folder: Path) -> tuple[Any, ...]:
    """Names, sizes, times and permissions of the files: what a write to a sealed folder would change."""
    with os.scandir(folder) as entries:
        stats = sorted((entry.name, entry.stat()) for entry in entries)
    return tuple((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_mode) for name, s in stats)


class Reply:
    """In the place of an httpx.Response: what the client reads of one, without the bytes."""

    def __init__(self, status_code: int, *, json: Any = None, text: str = "") -> None:
        self.status_code = status_code
        self.content = json
        self.text = text or repr(json)

    def json(self) -> Any:
        return self.content


class Words:
    """In the place of a tokenizer, whose import takes seconds."""

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(f"w{i}" for i in row) for row in rows]
