"""What an iteration gave and what it was given: samples and tokens over seconds of all devices (docs/ledger.md)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from conf.pools import devices_used
from conf.schema import Experiment
from data.accounts import StageRow
from data.manifest import Manifest
from data.store import Store
from flows.balance import training_rows
from flows.graph import Graph


def device_counts(experiment: Experiment) -> dict[str, int]:
    """pool -> its devices. Those of a pool with both roles count once: engines and trainer share them."""
    return {name: len(pool.devices) or max(devices_used(pool, experiment)) for name, pool in experiment.pools.items()}


def run_devices(experiment: Experiment, graph: Graph) -> int:
    """Devices of all pools that the graph uses."""
    counts = device_counts(experiment)
    return sum(counts[name] for name in {node.pool for node in graph})


def throughput(
    store: Store, graph: Graph, experiment: Experiment, iteration: int, measured: Mapping[str, float]
) -> dict[str, float]:
    """The throughput of an iteration with a committed update, over `measured`'s `time/iteration`.

    Effective are samples and response tokens that were trained on. Generated are the response tokens of all samples,
    and those that no row holds (`<node>/discarded_tokens`).
    """
    update = store.committed(iteration, graph.of_stage("update")[0].name)
    assert update is not None  # the iteration has ended
    trained = store.manifest(training_rows(update))
    rollout = store.committed(trained.files[0].iteration, trained.files[0].stage)
    assert rollout is not None  # the update's rows are its rows
    thrown_away = measured.get(f"{rollout.stage}/discarded_tokens", 0.0)
    seconds = measured["time/iteration"]
    values = {
        "throughput/effective_samples_per_s": trained.rows / seconds,
        "throughput/effective_tokens_per_s": _tokens(trained) / seconds,
        "throughput/generated_tokens_per_s": (_tokens(rollout) + thrown_away) / seconds,
    }
    if total := run_devices(experiment, graph):
        values["throughput/effective_samples_per_device_s"] = trained.rows / (seconds * total)
    return values


def spent(attempts: Iterable[StageRow]) -> dict[str, Counter[str]]:
    """What the attempts took, however they ended: cost -> group -> how many."""
    found: dict[str, Counter[str]] = {}
    for row in attempts:
        for cost, groups in row.spent.items():
            found.setdefault(cost, Counter()).update(groups)
    return found


def discarded(
    store: Store, graph: Graph, experiment: Experiment, iteration: int, attempts: Sequence[StageRow]
) -> dict[str, float]:
    """`<node>/discarded_tokens` and `<node>/discarded_calls`: what a node's attempts took beyond what its rows hold."""
    values: dict[str, float] = {}
    for node in graph:
        output = store.committed(iteration, node.name)
        held = {
            "response_tokens": _tokens(output) if output else 0,
            "reward_calls": output.rows * len(experiment.reward.functions) if output else 0,
        }
        for cost, groups in spent(row for row in attempts if row.node == node.name).items():
            values[f"{node.name}/discarded_{cost.partition('_')[2]}"] = max(groups.total() - held[cost], 0.0)
    return values


def _tokens(dataset: Manifest) -> int:
    """Response tokens of its rows."""
    return sum(dataset.facts.policy_versions.values())
