"""The planner: seconds to simulate a run of many engines and iterations, against a plain loop over the same schedule.

    python -m benchmarks.simulate [--engines 1000 --iterations 10000]

The plain alternative in the same process knows one graph (rollout, process, update, each on a pool of its own) under
one schedule, and has neither a queue nor waits nor a publish: three lines of `max`. The two must agree.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from conf.load import load
from conf.schema import Schedule
from flows.forecast import Costs, Forecast, recommend, schedule_text
from flows.simulate import simulate
from flows.stage_times import Constant, LogNormal, generator
from flows.steps import Step

LAG = 4
TIMES = {  # seconds on one device, of the README's run
    "prompts": Constant(0.05),
    "rollout": LogNormal(4.4, 1.0),
    "reward": Constant(0.07),
    "reference": Constant(1.0),
    "advantage": Constant(0.01),
    "update": LogNormal(4.8, 0.5),
    "publish": Constant(1.7),
    "checkpoint": Constant(4.2),
}


def plain(rollout: Sequence[float], process: Sequence[float], update: Sequence[float]) -> float:
    """The makespan where a rollout waits for the update LAG + 1 batches before its own."""
    generated = processed = trained = 0.0
    updates: list[float] = []
    for batch, (r, p, u) in enumerate(zip(rollout, process, update, strict=True)):
        generated = max(generated, updates[batch - LAG - 1] if batch > LAG else 0.0) + r
        processed = max(processed, generated) + p
        trained = max(trained, processed) + u
        updates.append(trained)
    return trained


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--iterations", type=int, default=10_000)
    engines, iterations = (arguments := parser.parse_args()).engines, arguments.iterations

    sizes = [f"iterations={iterations}", f"pools.rollout.engines={engines}", f"pools.train.ranks={engines}"]
    loaded = load("conf/smollm2_arithmetic.yaml", [*sizes, f"prompts.per_iteration={engines}", "prompts.size=100000"])
    experiment = replace(loaded.experiment, evaluate=replace(loaded.experiment.evaluate, every=0))
    schedule = Schedule("async", LAG, publish_every=2, queue_groups=2 * engines)
    # The work grows with the engines: eight samples for each, as in the README's run for its one.
    forecast = Forecast(experiment, Costs(TIMES, engines, engines, 8 * engines, LogNormal(1.0, 0.5), hand_over=2.0))
    began = time.perf_counter()
    case = forecast.case(forecast.declared, schedule, iterations)
    whole = time.perf_counter() - began
    began = time.perf_counter()
    advice = recommend(forecast.alternatives(schedule))
    compared = time.perf_counter() - began

    steps = [
        Step("rollout", (), "a", "rollout"),
        Step("process", ("rollout",), "b"),
        Step("update", ("process",), "c", "update"),
    ]
    means = {"rollout": 4.4, "process": 1.0, "update": 4.8}
    seconds = {name: LogNormal(mean, 3.0).draw(generator(0, name), iterations).tolist() for name, mean in means.items()}
    began = time.perf_counter()
    ours = simulate(steps, seconds, iterations, Schedule("async", LAG)).makespan
    ours_s = time.perf_counter() - began
    began = time.perf_counter()
    theirs = plain(*seconds.values())
    theirs_s = time.perf_counter() - began

    print(f"{engines} engines, {iterations} iterations, {len(case.result.slots)} stages: {schedule_text(schedule)}")
    print(f"simulated in                   {whole:.2f} s   (target <= 10)")
    print(f"per stage                      {1e6 * whole / len(case.result.slots):.0f} us")
    print(f"alternatives compared in       {compared:.2f} s")
    print(f"three stages, simulated        {ours_s:.3f} s, makespan {ours:.3f}")
    print(f"the same, plain loop           {theirs_s:.3f} s, makespan {theirs:.3f}")
    print(f"ratio to the plain loop        {ours_s / theirs_s:.0f} times the time")
    print(advice)
    if abs(ours - theirs) > 1e-6 * theirs:
        sys.exit("the simulation and the plain loop disagree")


if __name__ == "__main__":
    main()
