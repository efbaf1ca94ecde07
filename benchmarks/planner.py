"""What the planner makes of a run, against the run: its own makespan from its rows, and another schedule's from them.

    python -m benchmarks.planner [--iterations 8] [--real]

Each run is the real executor on a real Prefect server with stages that sleep (benchmarks/sleeping.py): rewards and the
reference stream, rollouts have a tail, no two iterations take the same time, every third one writes a checkpoint, every
fourth one is evaluated. `predicted` is what `ratchet plan --simulate --from RUN` gives for the run's own schedule, with
a target of 10% either way. `from sync` is the same for another run: the one in step on the same pools, asked for this
run's schedule; it has no target. There stages that sleep flatter the planner, since none slows another.

--real runs the tiny random model with real SGLang and DeepSpeed instead (conf/tiny_arithmetic.yaml, which `make bench`
prepares), six iterations in step and ahead. There both pools share the machine's cores.
"""

import argparse
import asyncio
import logging
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from prefect import flow

from benchmarks import sleeping
from conf.load import load
from flows import graph, prefect_server
from flows.forecast import Forecast, costs_of
from flows.past_run import PastRun, read_run
from flows.pools import Leases
from flows.run import RUN, _iterations
from tasks.engines.toy import write_model
from tests.fakes.runs import noop_run

TARGET = 0.1
SECONDS = {
    "rollout": "{seconds: 1.2, tail: 0.3}",
    "reward": "{seconds: 0.2}",
    "reference": "{seconds: 0.3}",
    "update": "{seconds: 0.8}",
    "publish": "{seconds: 0.2}",
    "evaluate": "{seconds: 0.5}",
}
CHECKPOINT, HAND_OVER = 0.4, 0.1
DUE = ["evaluate.every=4", "update.checkpoint_every=3"]

RATIO = "update.correction.kind=ratio"
SYNC: list[str] = []


def ahead(lag: int, every: int) -> list[str]:
    return ["schedule.kind=async", f"schedule.max_lag={lag}", f"schedule.publish_every={every}", RATIO]


SCHEDULES = {
    "sync": SYNC,
    "one_step_off": ["schedule.kind=one_step_off", RATIO],
    "async lag 1 every 1": ahead(1, 1),
    "async lag 1 every 2": ahead(1, 2),
    "async lag 4 every 1": ahead(4, 1),
    "async lag 4 every 2": ahead(4, 2),
}
OTHERS = {  # on separate pools only
    "async lag 1, rebuild": [*ahead(1, 1), "rollout.kv_policy=rebuild"],
    "async lag 4, queue of 2": [*ahead(4, 1), "schedule.queue_groups=4"],
}
POOLS = {
    "separate": ["pools.rollout.devices=['cpu:0']", "pools.train.devices=['cpu:1']"],  # the reference streams there
    "co-located": ["pools.train=null", "pools.rollout.roles=[rollout,train]"],
}
REAL = {"sync": SYNC, "async lag 1": ahead(1, 1), "async lag 4": ahead(4, 1)}


@flow(name="planner")
async def run(folder: Path, iterations: int, overrides: Sequence[str]) -> None:
    sizes = ["prompts.per_iteration=2", "rollout.samples_per_prompt=2"]  # as the prompts of noop_run
    nodes = load("conf/smollm2_arithmetic.yaml", [*sizes, *overrides]).experiment.graph
    with noop_run(folder, nodes, iterations, overrides) as opened:
        (folder / "config.yaml").write_text(opened.loaded.text)
        opened.services.trainer = sleeping.Trainer(CHECKPOINT)  # type: ignore[misc, assignment]
        opened.leases = Leases(opened.experiment.pools, sleeping.Handover(HAND_OVER))  # type: ignore[arg-type]
        RUN.set(opened)
        await _iterations(opened)


def sleeping_runs(scratch: Path, iterations: int) -> Iterator[tuple[str, str, PastRun]]:
    """(pools, schedule, what the run recorded)."""
    graph.BUILT_IN.update({node: f"benchmarks.sleeping:{node}" for node in SECONDS})
    graph.BUILT_IN["advantage"] = "tests.fakes.stages:advantage"
    common = [f"model.path={write_model(scratch / 'model')}", *DUE]
    common += [f"graph.{node}.options={options}" for node, options in SECONDS.items()]
    asyncio.run(run(scratch / "first", 1, common))  # imports, connections
    for where, pools in POOLS.items():
        for name, schedule in {**SCHEDULES, **(OTHERS if where == "separate" else {})}.items():
            folder = scratch / f"{where}-{name.replace(' ', '-')}"
            asyncio.run(run(folder, iterations, [*common, *pools, *schedule]))
            yield where, name, read_run(str(folder))


def real_runs(scratch: Path) -> Iterator[tuple[str, str, PastRun]]:
    for number, (name, schedule) in enumerate(REAL.items()):
        settings = [*schedule, f"runs_dir={scratch / 'runs'}", "iterations=6", "--run", f"real-{number}"]
        command = [sys.executable, "-c", "from flows.cli import main; main()", "run", "conf/tiny_arithmetic.yaml"]
        done = subprocess.run([*command, *settings], check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode:
            sys.exit(f"{name}: the run ended with code {done.returncode}: {done.stdout.decode()[-2000:]}")
        yield "tiny-random", name, read_run(str(scratch / "runs" / f"real-{number}"))


def predicted(past: PastRun, of: PastRun) -> float:
    """The makespan of the run `of`, from what `past` recorded."""
    experiment = replace(of.experiment, iterations=of.iterations)
    forecast = Forecast(experiment, costs_of(experiment, past, {}, None, None))
    return forecast.case(forecast.declared, experiment.schedule, of.iterations).result.makespan


def print_table(runs: Iterator[tuple[str, str, PastRun]]) -> None:
    head = f"{'seconds':12}{'schedule':25}{'recorded':>9}{'predicted':>11}{'':9}  target {TARGET:<5.0%}"
    print(f"{head}{'from sync':>11}")
    in_step: dict[str, PastRun] = {}
    for where, name, past in runs:
        own = predicted(past, past)
        off = own / past.makespan - 1
        line = f"{where:12}{name:25}{past.makespan:9.2f}{own:11.2f}{off:+9.1%}"
        line += f"  {'met' if abs(off) <= TARGET else 'missed':12}"
        if name == "sync":
            in_step[where] = past
        else:
            other = predicted(in_step[where], past)
            line += f"{other:11.2f}{other / past.makespan - 1:+9.1%}"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=8, help="of the runs whose stages sleep")
    parser.add_argument("--real", action="store_true", help="real engines and a real trainer, instead")
    arguments = parser.parse_args()
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        scratch = Path(place)
        if arguments.real:
            print_table(real_runs(scratch))
            return
        prefect_server.HOME = scratch / "prefect"
        with prefect_server.prefect_server():
            print_table(sleeping_runs(scratch, arguments.iterations))


if __name__ == "__main__":
    main()
