"""The graph check: each thing that can be wrong is found before anything starts, and named."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.errors import ConfigError
from conf.load import load_experiment
from conf.schema import Experiment, Node, Pool
from flows.graph import load_graph

BASE = load_experiment("conf/smollm2_arithmetic.yaml")


def with_nodes(**changes: Node | None) -> Experiment:
    graph = {**BASE.graph, **changes}
    return replace(BASE, graph={name: node for name, node in graph.items() if node is not None})


def refused(experiment: Experiment) -> str:
    with pytest.raises(ConfigError) as error:
        load_graph(experiment, lambda field: "x.yaml")
    assert str(error.value).startswith("x.yaml: ")
    return str(error.value).removeprefix("x.yaml: ")


def test_the_ready_made_graph_is_in_an_order_that_respects_needs() -> None:
    graph = load_graph(BASE)
    seen: set[str] = set()
    for node in graph:
        assert set(node.needs) <= seen
        seen.add(node.name)
    assert seen == {"prompts", *BASE.graph}


def test_columns_flow_along_the_edges() -> None:
    edges = load_graph(BASE).edges
    assert edges["reward"].columns["behavior_logprobs"] == "rollout"
    assert edges["advantage"].columns["ref_logprobs"] == "reference"
    assert edges["advantage"].rows == ("rollout", "advantage")
    assert edges["update"].columns == {}


def test_a_cycle_is_named_with_its_members() -> None:
    message = refused(with_nodes(reward=Node("reward", "cpu", ["rollout", "advantage"])))
    assert message.startswith("graph has a cycle: ")
    assert "reward -> advantage -> reward" in message or "advantage -> reward -> advantage" in message


def test_a_missing_input_is_named_with_the_nearest_node() -> None:
    assert "got 'rolout'; did you mean 'rollout'?" in refused(with_nodes(reward=Node("reward", "cpu", ["rolout"])))


def test_a_column_that_is_not_among_the_inputs_names_who_produces_it() -> None:
    message = refused(with_nodes(advantage=Node("advantage", "cpu", ["reference"])))
    assert "consumes column 'rewards', not among its inputs (produced by 'reward': add it to needs)" in message


def test_a_column_that_nobody_produces_is_named() -> None:
    experiment = with_nodes(reference=None, advantage=Node("advantage", "cpu", ["reward"]))
    assert "graph.update (stage update) consumes column 'ref_logprobs'" in refused(experiment)


def test_two_producers_of_a_column_are_refused() -> None:
    experiment = with_nodes(
        second=Node("reward", "cpu", ["rollout"]), advantage=Node("advantage", "cpu", ["reward", "second", "reference"])
    )
    assert "has two producers: 'reward' and 'second'" in refused(experiment)
    assert "columns are appended, never rewritten" in refused(with_nodes(again=Node("reward", "cpu", ["reward"])))


def test_inputs_about_different_rows_are_refused() -> None:
    experiment = with_nodes(
        short=Node("tests.own_stage:drop_short", "cpu", ["rollout"]),
        reward=Node("reward", "cpu", ["short"]),
    )
    assert "must name inputs about the same rows" in refused(experiment)


def test_a_stage_of_ones_own_takes_its_place_by_import_path() -> None:
    graph = load_graph(
        with_nodes(
            short=Node("tests.own_stage:drop_short", "cpu", ["rollout"], {"min_tokens": 2}),
            reward=Node("reward", "cpu", ["short"]),
            reference=Node("reference", "train", ["short"]),
        )
    )
    assert graph["short"].options == {"min_tokens": 2}
    assert graph.edges["advantage"].rows == ("rollout", "short", "advantage")


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        ("rewrad", "did you mean 'reward'?"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("conf.schema:Node", "decorated with @stage"),
        ("conf.schema:nothing", "has no attribute 'nothing'"),
    ],
)
def test_a_stage_that_cannot_be_found_is_explained(stage: str, expected: str) -> None:
    assert expected in refused(with_nodes(reward=Node(stage, "cpu", ["rollout"])))


def test_pools_must_exist_and_have_the_stages_role() -> None:
    assert "must be a declared pool" in refused(with_nodes(reward=Node("reward", "gpus", ["rollout"])))
    assert "must have role rollout (stage rollout)" in refused(
        with_nodes(rollout=Node("rollout", "train", ["prompts"]))
    )
    co_located = replace(BASE, pools={"all": Pool(roles=["rollout", "train", "cpu"])})
    on_it = {name: replace(node, pool="all") for name, node in BASE.graph.items()}
    assert load_graph(replace(co_located, graph=on_it))["update"].pool == "all"


def test_a_stage_that_would_read_a_later_version_is_refused() -> None:
    experiment = with_nodes(old=Node("old_logprobs", "train", ["rollout"]))
    assert "graph.old (stage old_logprobs) would read a later version of the policy" in refused(experiment)


def test_one_update_and_its_publish_are_required() -> None:
    assert "one node of stage update" in refused(with_nodes(publish=None, evaluate=None))
    assert "must name one node that gives a policy" in refused(
        with_nodes(publish=Node("publish", "rollout", ["advantage"]), evaluate=None)
    )


def test_the_implicit_prompts_node_cannot_be_declared() -> None:
    assert "graph.prompts must not be declared" in refused(with_nodes(prompts=Node("prompts", "cpu", [])))


NAMES = ["a", "b", "c", "d"]


@given(st.dictionaries(st.sampled_from(NAMES), st.lists(st.sampled_from([*NAMES, "rollout"]), min_size=1), max_size=4))
def test_any_extra_nodes_give_an_order_or_a_config_error(extra: dict[str, list[str]]) -> None:
    nodes = {name: Node("tests.own_stage:drop_short", "cpu", needs) for name, needs in extra.items()}
    try:
        graph = load_graph(with_nodes(**nodes))
    except ConfigError:
        return
    order = [node.name for node in graph]
    assert all(order.index(need) < order.index(node.name) for node in graph for need in node.needs)
    assert set(order) == {"prompts", *BASE.graph, *nodes}
