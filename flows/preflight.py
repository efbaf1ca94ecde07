"""What can be known to be wrong before anything is started: used by `plan`, by `run` and by a worker's run alike."""

import os
from collections.abc import Iterator
from pathlib import Path

from conf.errors import ConfigError
from conf.load import Loaded
from conf.pools import device_numbers, devices_used, pool_devices
from conf.schema import Experiment
from data.model_files import check_model
from data.prompts import PromptSource, open_prompts
from flows.graph import Graph, load_graph
from tasks.engines.server import external_keys
from tasks.rewards.workers import check_rewards


def preflight(loaded: Loaded) -> Graph:
    """Check graph, devices, model folder, prompt source and reward functions.

    Raises ConfigError or DataError, one line.
    """
    experiment = loaded.experiment
    graph = load_graph(experiment, loaded.place)
    _check_devices(loaded)
    try:
        check_model(Path(experiment.model.path))
    except ConfigError as error:
        raise ConfigError(f"{loaded.place('model.path')}: {error}") from error
    external_keys(experiment.rollout)
    check_rewards(experiment.reward)
    prompt_source(experiment)
    return graph


def _check_devices(loaded: Loaded) -> None:
    """This machine has the pools' devices. Not when the YAML is loaded: a run's settings are read elsewhere too."""
    experiment = loaded.experiment
    for name, devices in pool_devices(experiment).items():
        if not devices:
            continue
        there, what = _devices_here(experiment.model.device)
        known = ", ".join(f"{experiment.model.device}:{number}" for number in sorted(there)) or "none"
        missing = [n for n, number in enumerate(device_numbers(devices)) if number not in there]
        if missing and not experiment.pools[name].devices:
            raise ConfigError(
                f"{loaded.place('model.device')}: model.device is cuda, so pool {name} needs {len(devices)} of the "
                f"{what} beside those of other pools, got {known}"
            )
        if missing:
            field = f"pools.{name}.devices[{missing[0]}]"
            raise ConfigError(f"{loaded.place(field)}: {field} must be {what} ({known}), got {devices[missing[0]]}")


def warnings(loaded: Loaded) -> list[str]:
    """What is allowed and probably not meant: by the settings alone, and on this machine."""
    return [*loaded.warnings, *_crowded(loaded.experiment)]


def _crowded(experiment: Experiment) -> Iterator[str]:
    """What has more processes or threads than it has cores, on a CPU: it runs, and slowly."""
    if experiment.model.device != "cpu":
        return
    for name, pool in experiment.pools.items():
        engines, ranks = devices_used(pool, experiment)
        cores = len(pool.devices) or len(os.sched_getaffinity(0))
        for field, processes in (("engines", 0 if experiment.rollout.urls else engines), ("ranks", ranks)):
            wanted = processes * max(pool.threads, 1)
            if wanted > cores:
                each = f" of {pool.threads} threads" if pool.threads > 1 else ""
                yield f"pools.{name}.{field}: {processes} process(es){each} share {cores} core(s): they slow each other"


def _devices_here(kind: str) -> tuple[set[int], str]:
    if kind == "cpu":
        return set(os.sched_getaffinity(0)), "cores that this process may use"
    import torch  # slow to import, and only a GPU needs it

    return set(range(torch.cuda.device_count())), "GPUs that this process sees"


def prompt_source(experiment: Experiment) -> PromptSource:
    """The experiment's prompts; those at the end are held out if there are evaluations."""
    held_out = experiment.evaluate.prompts if experiment.evaluate.every else 0
    at_once = experiment.sampling.candidates(experiment.prompts.per_iteration)
    return open_prompts(experiment.prompts, experiment.seed, held_out=held_out, at_once=at_once)
