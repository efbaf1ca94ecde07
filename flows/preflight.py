"""What can be known to be wrong before anything is started: used by `plan`, by `run` and by a worker's run alike."""

import os
from pathlib import Path

from conf.errors import ConfigError
from conf.load import Loaded
from conf.pools import device_numbers, pool_devices
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
        for index, device in enumerate(devices):
            if device_numbers([device])[0] not in there:
                given = f"devices[{index}]" if experiment.pools[name].devices else "devices"
                known = ", ".join(f"{experiment.model.device}:{number}" for number in sorted(there)) or "none"
                field = f"pools.{name}.{given}"
                raise ConfigError(f"{loaded.place(field)}: {field} must be {what} ({known}), got {device}")


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
