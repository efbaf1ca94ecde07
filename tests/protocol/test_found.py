"""What the machine has found in the product, each in the fewest steps."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from data.refs import PolicyRef
from tasks.engines.commands import Stale
from tests.protocol.server import SERVER, UPDATE
from tests.protocol.world import Template, World, session

Open = Callable[[int, int, bool], World]  # ranks, engines, external


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """A run whose engines are READY on version 0. At the end everything holds, and faults can be recovered from."""
    worlds = []
    template = Template(tmp_path)

    def open_world(ranks: int, engines: int, external: bool) -> World:
        world = World(template, tmp_path / "world" / "run", ranks, engines, external)
        worlds.append(world)
        world.publish(template.policy)
        world.finish()
        return world

    with session(pytest.MonkeyPatch()):
        yield open_world
        for world in worlds:
            world.check()
            world.settle()
            world.close()


def exported(world: World, seed: int) -> PolicyRef:
    policy = world.export(seed)
    assert policy is not None
    return policy


def test_of_two_publishes_at_once_the_one_begun_first_is_refused_and_changes_nothing_more(opened: Open) -> None:
    world = opened(2, 2, False)
    first, second = exported(world, 2), exported(world, 3)
    stale = world.publish(first)
    world.advance(19)  # its engines are verified: it would commit, or take the engines back as DIRTY
    for server in world.servers:
        server.faults[UPDATE] = ["half"]
    world.publish(second)
    world.finish()
    with pytest.raises(Stale):
        stale.result()
    assert world.process.ledger.version(first.number).state == "PUBLISHING"
    assert [engine.ready_label for engine in world.process.fleet] == [second.label] * 2


def test_an_engine_that_turns_out_dirty_gets_no_work_while_it_is_repaired(opened: Open) -> None:
    world = opened(1, 1, False)
    (engine,) = world.process.fleet
    policy = world.process.ledger.committed()
    assert policy is not None
    assert engine.ready_label == policy.label
    world.servers[0].faults[SERVER] = ["dies"]  # in the proof that it is READY still; its restart waits a second
    world.publish(policy)
    world.advance(4)
    assert engine.ready_label == ""


@pytest.mark.parametrize("external", [False, True])
def test_a_rank_of_a_new_life_that_keeps_its_base_weights_does_not_stand_for_the_version(
    opened: Open, external: bool
) -> None:
    world = opened(2, 2, external)
    policy = exported(world, 2)
    for server in world.servers:
        server.restart()
    world.kill(servers_too=False)
    world.servers[0].faults[UPDATE] = ["kept"]
    world.publish(policy)
    world.finish()
    assert [engine.ready_label for engine in world.process.fleet] == [policy.label] * 2


@pytest.mark.parametrize("again", [False, True], ids=["content never sent before", "the content proven last"])
def test_a_rank_that_keeps_a_version_never_proven_is_found(opened: Open, again: bool) -> None:
    world = opened(2, 1, False)
    first, between, last = exported(world, 2), exported(world, 3), exported(world, 4)
    world.publish(first)
    world.finish()
    world.publish(between)
    while world.servers[0].label != between.label:  # written, and never READY on it
        world.advance(1)
    world.servers[0].faults[UPDATE] = ["kept"]
    world.publish(first if again else last)
    world.finish()
