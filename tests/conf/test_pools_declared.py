"""What follows from the declared pools: a role stands for its one pool, and each pool has devices of its own."""

from pathlib import Path

import pytest

from conf.load import load
from conf.pools import apart, co_located, device_numbers, devices_needed, pool_devices, pool_with
from flows.graph import load_graph
from tests.conf.experiments import load_with

CO_LOCATED = ("pools.train=null", "pools.rollout.roles=[rollout,train]")


def test_an_override_of_pools_alone_makes_a_ready_made_graph_co_located() -> None:
    separate = load("conf/tiny_arithmetic.yaml")
    together = load("conf/tiny_arithmetic.yaml", CO_LOCATED)
    assert co_located(separate.experiment.pools) == ""
    assert co_located(together.experiment.pools) == "rollout"
    pools = {node.name: node.pool for node in load_graph(together.experiment)}
    assert pools == {
        "prompts": "cpu", "rollout": "rollout", "reward": "cpu", "reference": "rollout", "advantage": "cpu",
        "update": "rollout", "publish": "rollout", "evaluate": "rollout",
    }  # fmt: skip
    assert together.digest == separate.digest  # the same run may go on either way


def test_a_pool_that_was_removed_does_not_come_back_with_the_runs_own_settings(tmp_path: Path) -> None:
    together = load("conf/tiny_arithmetic.yaml", CO_LOCATED)
    (tmp_path / "config.yaml").write_text(together.text)
    again = load(tmp_path / "config.yaml")
    assert again.experiment == together.experiment
    assert again.text == together.text


def test_a_node_may_still_name_a_pool_whatever_roles_there_are(tmp_path: Path) -> None:
    e = load_with(tmp_path, "pools.more={roles: [cpu]}", "graph.reward.pool=more").experiment
    assert e.graph["reward"].pool == "more"


@pytest.mark.parametrize("role", ["rollout", "train"])
def test_the_pool_of_a_role_is_found_by_the_role_and_not_by_its_name(tmp_path: Path, role: str) -> None:
    pools = load_with(tmp_path, *CO_LOCATED).experiment.pools
    assert pool_with(pools, role) == "rollout"


@pytest.mark.parametrize(
    ("overrides", "devices"),
    [
        ([], {"rollout": "0", "train": "1"}),
        (["rollout.sglang={tp_size: 2}", "pools.train.ranks=2"], {"rollout": "01", "train": "23"}),
        (["pools.train={ranks: 2, devices: ['cuda:0', 'cuda:2']}"], {"rollout": "1", "train": "02"}),
        (["pools.rollout={engines: 3, devices: ['cuda:3', 'cuda:2', 'cuda:1']}"], {"rollout": "321", "train": "0"}),
        ([*CO_LOCATED, "pools.rollout={engines: 2, ranks: 3}"], {"rollout": "012"}),
        (["rollout.urls=['http://a']"], {"rollout": "", "train": "0"}),
    ],
)
def test_gpus_that_no_pool_names_are_shared_out_in_the_order_of_the_pools(
    tmp_path: Path, overrides: list[str], devices: dict[str, str]
) -> None:
    e = load_with(tmp_path, "model.device=cuda", *overrides).experiment
    found = {name: "".join(map(str, device_numbers(d))) for name, d in pool_devices(e).items()}
    assert found == {**devices, "cpu": ""}


def test_on_a_cpu_a_pool_has_the_cores_it_names_and_no_others(tmp_path: Path) -> None:
    e = load_with(tmp_path, "pools.train.devices=['cpu:1']").experiment
    assert pool_devices(e) == {"rollout": (), "train": ("cpu:1",), "cpu": ()}
    assert devices_needed(e.pools["rollout"], e) == 1


PINNED = ("pools.rollout.devices=['cpu:0']", "pools.train.devices=['cpu:1']")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), False),  # neither is pinned: both have every core
        (PINNED[:1], False),
        (PINNED, True),
        (CO_LOCATED, False),
        (("model.device=cuda",), True),
        (("rollout.urls=['http://a']",), True),
    ],
)
def test_pools_are_apart_where_neither_takes_cores_or_memory_from_the_other(
    tmp_path: Path, overrides: tuple[str, ...], expected: bool
) -> None:
    e = load_with(tmp_path, *overrides).experiment
    names = [pool_with(e.pools, role) for role in ("rollout", "train")]
    assert apart(e, *names) == apart(e, *reversed(names)) == expected
