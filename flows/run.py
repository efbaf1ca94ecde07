"""The run: a Prefect flow of iterations, each a flow of typed stages that the experiment's graph declares.

The flows of neighbouring iterations overlap as far as the schedule lets them (flows/schedule.py), in step too: there
the next one opens and draws its prompts while this one trains, so that Prefect's part costs the run no time.
"""

import asyncio
import time
from contextvars import ContextVar
from pathlib import Path

import httpx
from prefect import flow, runtime

from conf.errors import StageError
from data.crash import crash_point
from flows.account import account
from flows.opening import Run, open_run
from flows.prefect_server import Outages, retry_soon
from flows.schedule import Window
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
    retry_soon()
    outages, reached = Outages(run.display.message), 0
    while remaining := run.remaining():
        if remaining.start != reached:
            outages, reached = Outages(run.display.message), remaining.start
        run.window = Window(run.experiment, run.graph)
        try:
            async with all_or_first_error() as tasks:
                for number in remaining:
                    tasks.create_task(iteration(number))
                    await run.window.next_begins(number)
        except httpx.TransportError as error:  # engines' and the trainer's have types of their own
            await outages.over(error)


# persist_result: where Prefect retries the run, it runs a subflow without a result again, and gives no other one's.
@flow(name="iteration", flow_run_name="iteration-{number:06d}", persist_result=False)
async def iteration(number: int) -> None:
    """prompts -> rollout -> reward, reference -> advantage -> update -> publish, each when its inputs are there.

    They also wait for stages of the iterations before, as the schedule has it (flows/schedule.py).
    """
    run = RUN.get()
    async with run.window.under_way(number) as opened:
        async with all_or_first_error() as tasks:
            for node in run.due(number):
                needs = {need: opened.stages[need] for need in node.needs}
                opened.stages[node.name] = tasks.create_task(run_stage(run, node, number, needs))
            opened.checkpoint = tasks.create_task(_checkpoint(run, number))
            for rollout in run.window.rollouts:
                tasks.create_task(_tail(run, number, rollout))
        crash_point(f"{number}/stages/ended")
        await run.window.in_order(number)
        await account(run, number)


async def _checkpoint(run: Run, number: int) -> None:
    """Between the iteration's update and the next one, while the trainer stands there."""
    update = run.window.open(number).stages[run.window.update]
    await asyncio.wait([update])
    update.result()
    await run.checkpoint_if_due(number)


async def _tail(run: Run, number: int, rollout: str) -> None:
    """Let the next rollout begin where this one has nothing left to send, though it has not ended."""
    stream = run.stream(number, rollout)  # it is gone with the last who has it
    sent = asyncio.ensure_future(stream.tail.wait())
    try:
        await asyncio.wait([sent, run.window.open(number).stages[rollout]], return_when=asyncio.FIRST_COMPLETED)
        if sent.done():
            run.window.in_its_tail(number)
    finally:
        sent.cancel()


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
