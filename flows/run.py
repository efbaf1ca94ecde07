"""The run: a Prefect flow of iterations, each made of typed stages that the experiment's graph declares.

Under `schedule.kind: sync` an iteration is a flow of its own, one after another. Under the others the stages of several
iterations overlap, as tasks of one flow that are named by their iteration.
"""

import asyncio
import time
from contextvars import ContextVar
from pathlib import Path

import httpx
from prefect import flow, runtime

from conf.errors import StageError
from data.refs import Ref
from flows.account import account
from flows.opening import Run, open_run
from flows.prefect_server import MOST_RESTARTS, until_up
from flows.schedule import Iteration, Window
from flows.stages import run_stage
from tasks.together import all_or_first_error

RUN: ContextVar[Run] = ContextVar("run")


def _flow_run_name() -> str:
    parameters = runtime.flow_run.parameters
    return str(parameters["run"] or Path(parameters["experiment"]).stem)


@flow(name="rl-run", flow_run_name=_flow_run_name, persist_result=False, validate_parameters=True)
async def rl_run(
    experiment: str, overrides: list[str] | None = None, iterations: int | None = None, run: str | None = None
) -> str:
    """Train with reinforcement learning as an experiment file declares; gives the run's folder.

    experiment: the YAML file.
    overrides: settings that replace the file's, like `rollout.temperature=0.7`.
    iterations: RL iterations; replaces the file's.
    run: name of a run to start or to continue; empty: the newest run of this experiment if it is not finished, else a
        new one.
    """
    async with open_run(experiment, overrides or [], iterations, run) as opened:
        RUN.set(opened)
        async with all_or_first_error() as tasks:
            watch = tasks.create_task(watched(opened))
            await _iterations(opened)
            watch.cancel()
        return str(opened.folder)


async def _iterations(run: Run) -> None:
    """All of them; again, from where they stand, where the Prefect server was away in the middle."""
    outages, reached = 0, 0
    while remaining := run.remaining():
        outages = outages if remaining.start == reached else 0
        reached = remaining.start
        try:
            if run.experiment.schedule.ahead:
                await overlapping(run)
            else:
                await iteration(reached)
        except httpx.TransportError as error:  # engines' and the trainer's have types of their own
            outages += 1
            if outages > MOST_RESTARTS:
                raise
            run.display.message(f"warning: Prefect is away ({error}); waiting for it")
            await until_up()


@flow(name="iteration", flow_run_name="iteration-{number:06d}", persist_result=False)
async def iteration(number: int) -> None:
    """prompts -> rollout -> reward, reference -> advantage -> update -> publish, each when its inputs are there."""
    run = RUN.get()
    outputs: dict[str, asyncio.Task[Ref]] = {}
    async with all_or_first_error() as stages:
        for node in run.due(number):
            needs = {need: outputs[need] for need in node.needs}
            outputs[node.name] = stages.create_task(run_stage(run, node, number, needs))
    await run.checkpoint_if_due(number)
    await account(run, number)


async def overlapping(run: Run) -> None:
    """The same of all iterations, each stage also when the earlier iterations let it (flows/schedule.py)."""
    window = Window(run.experiment, run.graph)
    async with all_or_first_error() as tasks:
        for number in run.remaining():
            opened = window.open(number)
            for node in run.due(number):
                needs = {need: opened.stages[need] for need in node.needs}
                opened.stages[node.name] = tasks.create_task(run_stage(run, node, number, needs, window))
            opened.tails = [tasks.create_task(_tail(run, opened, name)) for name in window.rollouts]
            opened.checkpoint = tasks.create_task(_checkpoint(run, opened, window))
            opened.ended = tasks.create_task(_ended(run, opened, window))
            await opened.rolling


async def _tail(run: Run, opened: Iteration, rollout: str) -> None:
    """Let the next rollout begin where this one has nothing left to send, though it has not ended."""
    stream = run.stream(opened.number, rollout)  # it is gone with the last who has it
    await stream.tail.wait()
    if not opened.tail.done():
        opened.tail.set_result(None)


async def _checkpoint(run: Run, opened: Iteration, window: Window) -> None:
    """Between the iteration's update and the next one, while the trainer stands there."""
    await asyncio.wait([opened.stages[window.update]])
    opened.stages[window.update].result()
    await run.checkpoint_if_due(opened.number)


async def _ended(run: Run, opened: Iteration, window: Window) -> None:
    """Account for the iteration once it and those before it are over."""
    before = window.iterations.get(opened.number - 1)
    assert opened.checkpoint is not None
    parts = [*opened.stages.values(), opened.checkpoint, *([before.ended] if before and before.ended else [])]
    await asyncio.wait(parts)
    for part in parts:
        part.result()
    for tail in opened.tails:
        tail.cancel()  # of a rollout that was committed before
    await account(run, opened.number)
    window.close(opened.number)


async def watched(run: Run) -> None:
    """Raises StageError once nothing in the run has moved for `schedule.stall_timeout_s`.

    It names what is under way, and what waits and for what: in a deadlock every stage waits.
    """
    limit = run.experiment.schedule.stall_timeout_s
    while (left := run.moved + limit - time.monotonic()) > 0:
        await asyncio.sleep(left)
    now = time.time()
    at_work = sorted((since, str(clock)) for clock in run.clocks if (since := clock.at_work_since))
    under_way = [f"{what} (for {now - since:.0f} s)" for since, what in at_work]
    waits = sorted(
        (wait.start, str(clock), wait.cause, clock.message) for clock in run.clocks if (wait := clock.under_way)
    )
    waiting = [f"{what} ({cause}: {message}, {now - since:.0f} s)" for since, what, cause, message in waits]
    raise StageError(
        f"nothing in the run has moved for {limit:g} s (schedule.stall_timeout_s); "
        f"under way: {', '.join(under_way) or 'no stage'}; waiting: {', '.join(waiting) or 'no stage'}"
    )
