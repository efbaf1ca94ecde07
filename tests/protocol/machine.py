"""The state machine: what may happen to a run, in any order. The invariants are World's."""

import itertools
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.protocol.server import FAULTS, FLUSH, UPDATE
from tests.protocol.world import KEEP, Template, World

VERSIONS = 6  # at most in one run
STEPS = ("Q1", "Q2", "Q3", "Q4", "Q5", "Q6", "Q7", "Q8", "Q9", "Q10", "committed")  # crash points of a publish
FEW = 8  # refusals of a flush in a row, so that it stays refused until the deadline
numbers = itertools.count()

engines = st.integers(0, 1)
seeds = st.integers(2, 4)
moments = st.integers(1, 40)  # requests from now
faults = st.one_of(
    st.tuples(st.just(UPDATE), st.sampled_from(FAULTS[UPDATE])),
    st.sampled_from([(path, kind) for path, kinds in FAULTS.items() for kind in kinds]),
)
faulty = st.lists(st.tuples(engines, faults), max_size=2)
events = st.sampled_from(
    [
        "late",  # updates that timed out are done now
        "late_half",  # ... in part, and the label stays
        "crash",
        "restart",
        "hang",  # running requests neither go on nor end, until the next time
        "no_start",  # the next restart fails
        "publish",
        "publish_old",
        "publish_new",
        "export",
        "kill",
        "retire",
    ]
)


def machine(template: Template, folder: Path, kinds: Any) -> type[RuleBasedStateMachine]:
    """`kinds` draws (ranks, engines, external)."""

    class Machine(RuleBasedStateMachine):
        world: World

        @initialize(kind=kinds)
        def begin(self, kind: tuple[int, int, bool]) -> None:
            self.world = World(template, folder / f"{next(numbers)}" / "run", *kind)
            self.world.publish(template.policy)
            self.world.finish()

        # -- versions and publishers

        def sealed(self) -> list[Any]:
            """What may be asked for: every version that has been sealed."""
            return [row for row in self.world.process.ledger.versions() if row.content]

        def newest(self) -> Any:
            return [row.ref for row in self.sealed() if row.state in ("SEALED", "PUBLISHING", "COMMITTED")][-1]

        @precondition(lambda self: len(self.world.numbers) < VERSIONS and len(self.world.process.publishers) < 2)
        @rule(seed=seeds, faulty=faulty, far=st.none() | moments, rank=st.sampled_from([None, None, None, None, 0, 1]))
        def iterate(self, seed: int, faulty: list[Any], far: int | None, rank: int | None) -> None:
            """What a run does all the time: new weights are exported and published. `rank` dies before it wrote."""
            self.world.export(seed, rank)
            self.publish(self.newest(), faulty, far)

        @precondition(lambda self: len(self.world.process.publishers) < 2)
        @rule(age=st.sampled_from([0, 0, 0, 1, 2]), faulty=faulty, far=st.none() | moments)
        def publish_again(self, age: int, faulty: list[Any], far: int | None) -> None:
            rows = self.sealed()
            self.publish(rows[max(0, len(rows) - 1 - age)].ref, faulty, far)

        def publish(self, policy: Any, faulty: list[Any], far: int | None) -> None:
            for engine, fault in faulty:
                self.fault(engine, fault)
            self.world.publish(policy)
            self.advance(far)

        @precondition(lambda self: len(self.world.numbers) < VERSIONS)
        @rule(seed=seeds, step=st.sampled_from(STEPS), servers_too=st.booleans())
        def killed_at(self, seed: int, step: str, servers_too: bool) -> None:
            """The publisher dies at a journalled step; the next one starts as every run does, then resumes."""
            world = self.world
            world.finish()
            world.export(seed)
            policy = self.newest()
            process = world.process
            process.dies_at = step
            world.publish(policy)
            world.finish()
            process.dies_at = ""
            if servers_too:
                world.kill(servers_too=True)
            if world.process is not process:
                world.publish(world.process.ledger.committed())
                world.finish()
            world.publish(policy)
            world.finish()

        @precondition(lambda self: len(self.world.numbers) < VERSIONS)
        @rule(seed=seeds, engine=engines, far=moments, then=moments, half=st.booleans())
        def orphaned(self, seed: int, engine: int, far: int, then: int, half: bool) -> None:
            """The publisher dies while an update is unanswered, and it comes when the next one's readers read."""
            world = self.world
            world.finish()
            world.export(seed)
            self.fault(engine, (UPDATE, "late"))
            world.publish(self.newest())
            world.advance(far)
            self.happen(engine, "kill")
            world.finish()
            world.start_batch()
            world.advance(then)
            self.happen(engine, "late_half" if half else "late")
            world.finish()

        # -- readers

        @precondition(lambda self: len(self.world.process.batches) < 2)
        @rule(script=st.lists(st.tuples(moments, engines, events), max_size=4), far=st.none() | moments)
        def batch(self, script: list[Any], far: int | None) -> None:
            """A batch, and what happens meanwhile."""
            self.world.start_batch()
            for after, engine, event in script:
                self.world.advance(after)
                self.happen(engine, event)
            self.advance(far)

        # -- time and bad luck

        @rule(far=st.none() | moments)
        def advance(self, far: int | None) -> None:
            if far is None:
                self.world.finish()
            else:
                self.world.advance(far)

        @rule(engine=engines, event=events)
        def happen(self, engine: int, event: str) -> None:
            world = self.world
            server = world.servers[engine % len(world.servers)]
            more = len(world.numbers) < VERSIONS
            publish = len(world.process.publishers) < 2
            match event:
                case "late" | "late_half":
                    server.deliver_late(half=event == "late_half")
                case "crash":
                    server.crash()
                case "restart":
                    server.crash()
                    server.restart()
                case "hang":
                    server.hung = not server.hung
                case "no_start":
                    world.process.no_start += 1
                case "publish" if publish:
                    world.publish(self.newest())
                case "publish_old" if publish:
                    world.publish(self.sealed()[max(0, len(self.sealed()) - 2)].ref)
                case "publish_new" if publish and more:
                    world.export(2 + len(world.numbers) % 3)
                    world.publish(self.newest())
                case "export" if more:
                    world.export(2 + len(world.numbers) % 3)
                case "kill":
                    world.kill(servers_too=False)
                    world.publish(world.process.ledger.committed())
                case "retire":
                    world.retire(KEEP)

        @rule(engine=engines, fault=faults)
        def fault(self, engine: int, fault: tuple[str, str]) -> None:
            path, kind = fault
            waiting = self.world.servers[engine % len(self.world.servers)].faults.setdefault(path, [])
            waiting.extend([kind] * (FEW if fault == (FLUSH, "refused") else 1))

        # -- what must hold

        @invariant()
        def holds(self) -> None:
            if hasattr(self, "world"):
                self.world.check()

        def teardown(self) -> None:
            if hasattr(self, "world"):
                try:
                    if not self.world.broken:
                        self.world.settle()
                finally:
                    self.world.close()
                    World.counts["runs"] += 1

    return Machine
