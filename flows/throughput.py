"""What an iteration gave and what it was given: samples and tokens over seconds of all devices (docs/ledger.md)."""

from collections.abc import Mapping

from conf.pools import devices_used
from conf.schema import Experiment
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
    and those that the rollout threw away itself (`<node>/discarded_tokens`).
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


def _tokens(dataset: Manifest) -> int:
    """Response tokens of its rows."""
    return sum(dataset.facts.policy_versions.values())
