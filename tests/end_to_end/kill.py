"""A stage that kills the run when its queue holds exactly what the test wants: `KILL=K/N` in the environment."""

import asyncio
import os
import signal

from tasks.stage import Context, Inputs, Selection, stage


@stage(consumes=["sample_id"], output="selection")
async def kill(inputs: Inputs, context: Context) -> Selection:
    """Keep every row. In iteration K first wait until update K-1 and rollout N are committed, then kill the process.

    Later iterations wait for that, so that this stage is still to come in them when the run goes on.
    """
    iteration, _, rollout = os.environ.get("KILL", "0/0").partition("/")
    if 0 < int(iteration) < context.iteration:
        await asyncio.sleep(300)
    if context.iteration == int(iteration):
        wanted = [(int(rollout), "rollout"), *([(context.iteration - 1, "update")] if context.iteration > 1 else [])]
        async with asyncio.timeout(300):
            while not all(context.store.find(*stage) for stage in wanted):
                await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    assert inputs.table is not None
    return Selection(range(inputs.table.num_rows))
