"""The long-lived services of a run: engines, trainer, reward workers. Started together, stopped together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from conf.pools import co_located
from conf.schema import Experiment
from data.prompts import PromptSource, load_tokenizer
from flows.display import seconds_since
from flows.preflight import prompt_source
from tasks.engines.fleet import Fleet
from tasks.engines.server import external_engines, managed_engines
from tasks.rewards.workers import RewardWorkers
from tasks.together import all_or_first_error
from tasks.trainer.client import Trainer


@dataclass(frozen=True)
class Services:
    prompts: PromptSource
    engines: Fleet
    trainer: Trainer
    rewards: RewardWorkers
    offloaded: Mapping[str, int]  # bytes that a co-located trainer took off each GPU, and needs there again


@asynccontextmanager
async def start_services(experiment: Experiment, folder: Path, say: Callable[[str], None]) -> AsyncIterator[Services]:
    """Start everything at the same time; on leaving, also by an error or Ctrl-C, stop all that has come up.

    A co-located pool begins as the engines': the trainer comes first, and is offloaded before an engine looks how much
    memory a GPU has. Raises the first service's error, with the end of its log.
    """
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    began = asyncio.get_running_loop().time()
    prompts = await asyncio.to_thread(_load_prompts, experiment)
    trainer = Trainer(experiment, folder, folder.name)
    rewards = RewardWorkers(experiment.reward)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_stop, trainer, rewards)
        opening = external_engines(experiment) if experiment.rollout.urls else managed_engines(experiment, logs)
        async with all_or_first_error() as group:
            group.create_task(rewards.start())
            ready = group.create_task(_start_trainer(trainer, experiment))
            if co_located(experiment.pools) and experiment.model.device == "cuda":
                await ready
            engines = group.create_task(stack.enter_async_context(opening))
        say(f"started {len(engines.result())} engine(s), {trainer.ranks} trainer rank(s) in {seconds_since(began)}")
        yield Services(prompts, engines.result(), trainer, rewards, ready.result())


async def _start_trainer(trainer: Trainer, experiment: Experiment) -> dict[str, int]:
    await trainer.start()
    return await trainer.offload() if co_located(experiment.pools) else {}


def _load_prompts(experiment: Experiment) -> PromptSource:
    load_tokenizer(experiment.model.path)  # cached; it is slow to import and the first stage needs it
    return prompt_source(experiment)


async def _stop(trainer: Trainer, rewards: RewardWorkers) -> None:
    await asyncio.gather(trainer.stop(), rewards.stop())
