"""`ratchet plan`: what an experiment would do, before anything starts; with --simulate, how long it would take."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table

from conf.errors import ConfigError
from conf.load import Loaded
from conf.pools import co_located, pool_devices
from conf.schema import Experiment
from flows.forecast import COMPARED, Case, Costs, Forecast, costs_of, recommend, schedule_text, waits
from flows.graph import CHECKPOINT, Graph
from flows.past_run import PastRun
from flows.preflight import preflight, warnings
from flows.schedule import rollouts
from flows.simulate import HAND_OVER
from flows.stage_times import Recorded


def print_plan(loaded: Loaded, console: Console) -> None:
    """Check everything and print graph, pools, counts with their units, the resolved settings and warnings."""
    experiment = loaded.experiment
    graph = preflight(loaded)
    console.print(f"{experiment.name}: {experiment.iterations} iterations, config {loaded.digest[:12]}", markup=False)
    console.print(_graph_table(graph, experiment))
    console.print(_pool_table(graph, experiment))
    for line in (_schedule_line(experiment), *_hand_overs(graph, experiment)):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_count_table(experiment))
    console.print("resolved settings")
    console.print(Syntax(loaded.text, "yaml", background_color="default", word_wrap=True))
    for warning in warnings(loaded):  # last, where they are seen
        console.print(f"warning: {warning}", markup=False, style="yellow", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)


def _graph_table(graph: Graph, experiment: Experiment) -> Table:
    table = _table("graph", "node", "stage", "needs", "pool", "new columns")
    seen: set[str] = set()
    for node in graph:
        produced = [column.name for column in node.stage.produces(experiment)]
        new = [name for name in produced if name not in seen]
        seen.update(new)
        what = {"policy": "(a policy version)", "selection": "(selects rows)", "rows": "(new rows, same columns)"}
        table.add_row(
            node.name,
            node.stage.name,
            ", ".join(node.needs),
            node.pool,
            ", ".join(new) or what.get(node.stage.output, ""),
        )
    return table


def _pool_table(graph: Graph, experiment: Experiment) -> Table:
    table = _table("pools", "pool", "holds", "devices", "threads", "stages")
    update, devices = experiment.update, pool_devices(experiment)
    for name, pool in experiment.pools.items():
        holds = {
            "rollout": f"{pool.engines} SGLang server(s) on {experiment.model.device}, {experiment.rollout.dtype}",
            "train": f"{pool.ranks} DeepSpeed rank(s), ZeRO {update.zero_stage}, {update.precision}",
            "cpu": f"{experiment.reward.workers} reward worker(s)",
        }
        stages = ", ".join(node.name for node in graph if node.pool == name)
        held = "; ".join(holds[role] for role in pool.roles)
        cores = "" if pool.roles == ["cpu"] else "any core"
        table.add_row(name, held, ", ".join(devices[name]) or cores, str(pool.threads or "all"), stages)
    return table


def _schedule_line(experiment: Experiment) -> str:
    """With what the settings leave to the schedule."""
    schedule = experiment.schedule
    if schedule.ahead and not schedule.queue_groups:
        batch = experiment.sampling.candidates(experiment.prompts.per_iteration)
        schedule = replace(schedule, queue_groups=schedule.most_groups(batch))
    return f"schedule: {schedule_text(schedule)}"


def _hand_overs(graph: Graph, experiment: Experiment) -> Iterator[str]:
    """What an iteration of a co-located pool pays, and what separate pools do instead."""
    pool = co_located(experiment.pools)
    if not pool:
        yield "separate pools: rollout and training keep their devices, no hand-over"
        return
    changes, role = [], "rollout"
    for node in graph:
        if node.pool == pool and node.stage.role not in ("cpu", role):
            role = node.stage.role
            changes.append(f"to {role} before {node.name}")
    back = ["to rollout after them"] if role == "train" else []
    yield f"co-located pool {pool}: {len(changes + back)} hand-overs an iteration ({', '.join(changes + back)})"
    yield f"  and 2 for each checkpoint (every {experiment.update.checkpoint_every} iterations)"


def _count_table(experiment: Experiment) -> Table:
    table = _table("derived counts", "count", "per iteration", "per run", "unit")
    for name, count, times, unit in derived_counts(experiment):
        table.add_row(name, f"{count:,}", f"{count * times:,}" if times else "", unit)
    return table


def derived_counts(experiment: Experiment) -> Iterator[tuple[str, int, int, str]]:
    """(what, number per iteration, how many iterations have it, unit) of everything that follows from the settings.

    0 iterations: a ratio, which has no sum over the run.
    """
    n = experiment.iterations
    prompts, size = experiment.prompts.per_iteration, experiment.rollout.samples_per_prompt
    sent = experiment.sampling.candidates(prompts)
    bound = ", at most" if sent > prompts else ""  # with `sampling` more may be generated than is trained
    samples, generated = prompts * size, sent * size
    steps = experiment.update.epochs * experiment.update.mini_batches
    yield f"prompts drawn{bound}", sent, n, "prompts"
    yield "groups", prompts, n, f"groups of {size} samples"
    yield f"samples generated{bound}", generated, n, "samples"
    yield "tokens generated, at most", generated * experiment.rollout.max_new_tokens, n, "tokens"
    yield f"reward calls{bound}", generated * len(experiment.reward.functions), n, "calls"
    yield "optimizer steps", steps, n, "optimizer steps"
    yield "samples per optimizer step", samples // experiment.update.mini_batches, 0, "samples"
    published = math.ceil(n / experiment.schedule.publish_every)  # the last one publishes too
    yield "weight versions published, at most", 1, published, "versions"


# -- the simulation


def print_simulation(loaded: Loaded, costs: Costs, console: Console, *, past: PastRun | None = None) -> None:
    """Simulate the experiment and print makespan, pools, lag, alternatives and the recommendation."""
    experiment = loaded.experiment
    schedule, forecast = experiment.schedule, Forecast(experiment, costs)
    _require_times(forecast.graph, costs)
    case = forecast.case(forecast.declared, schedule, experiment.iterations)
    if not case.result.makespan:
        raise ConfigError("--time must give a stage more than 0 seconds: there is nothing to simulate")
    console.print(
        f"{experiment.name}: {experiment.iterations} iterations simulated, {schedule_text(schedule)}", markup=False
    )
    for name, text in _facts(case, past, experiment.iterations):
        console.print(f"  {name:18} {text}", markup=False)
    console.print()
    console.print(_time_table(case))
    cases = forecast.alternatives(schedule)
    console.print()
    console.print(_case_table(cases, min(experiment.iterations, COMPARED)))
    console.print()
    console.print(recommend(cases), markup=False, style="bold")
    for line in _assumptions(forecast):
        console.print(f"assumed: {line}", markup=False, style="dim")


def _require_times(graph: Graph, costs: Costs) -> None:
    known = [*(node.name for node in graph), CHECKPOINT]
    for name in costs.times:
        if name not in known:
            raise ConfigError(f"--time must name a node of the graph ({', '.join(known)}), got {name!r}")
    needed = [n for n in graph if n.stage.role != "cpu" and n.stage.name not in ("publish", "evaluate")]
    if missing := [node.name for node in needed if node.name not in costs.times]:
        raise ConfigError(
            f"--simulate needs the time of {', '.join(missing)}: --from RUN takes them from a past run, "
            f"--time {missing[0]}=SECONDS gives one"
        )


def _beyond(past: PastRun) -> float:
    experiment = replace(past.experiment, iterations=past.iterations)
    return Forecast(experiment, costs_of(experiment, past, {}, None, None)).beyond(past)


def _recorded(past: PastRun, makespan: float, iterations: int) -> str:
    beyond = _beyond(past)
    text = f"; recorded {past.makespan:,.1f} s"
    if past.as_it_went:
        text += f", {beyond:,.1f} s of it for stops and iterations not finished"
    if past.iterations != iterations:
        return f"{text}, for {past.iterations} iterations"
    return f"{text} ({makespan / (past.makespan - beyond) - 1:+.1%})"


def _facts(case: Case, past: PastRun | None, iterations: int) -> Iterator[tuple[str, str]]:
    result, total = case.result, case.layout.total
    recorded = _recorded(past, result.makespan, iterations) if past else ""
    yield "makespan", f"{result.makespan:,.1f} s{recorded}"
    yield "not below", f"{case.bound[0]:,.1f} s, {case.bound[1]}"
    each = case.samples_per_s / total
    yield "effective samples", f"{case.samples_per_s:.4g} /s over {total} devices, {each:.4g} /s each"
    yield "devices work", f"{case.busy:.1%} of the time"
    groups = sum(result.lag.values())
    yield "lag (updates)", ", ".join(f"{lag}: {count / groups:.1%}" for lag, count in result.lag.items()) or "no update"
    yield "queue (groups)", f"mean {result.queue_mean:.1f}, longest {result.queue_max}"


def _time_table(case: Case) -> Table:
    table = _figures("where the time of each pool goes", ["pool", "devices", ""], ["seconds", "share"])
    for pool, time in case.result.pools.items():
        rows = [("works", time.working), (HAND_OVER, time.hand_over), *((waits(c), s) for c, s in time.idle.items())]
        head = pool, str(case.layout.devices[pool])
        for what, seconds in rows:
            if seconds >= 0.0005 * case.result.makespan:
                table.add_row(*head, what, f"{seconds:,.1f}", f"{seconds / case.result.makespan:.1%}")
                head = "", ""
    return table


def _case_table(cases: Sequence[Case], iterations: int) -> Table:
    title = f"other ways on the same {cases[0].layout.total} devices, {iterations} iterations"
    table = _figures(title, ["rollout + train", "schedule"], ["lag mean", "max", "makespan", "samples/s", "works"])
    for case in cases:
        layout, schedule = case.layout, case.schedule
        devices = f"{layout.rollout_devices} + {layout.train_devices}"
        if len(layout.devices) == 1:
            devices = f"{layout.total} co-located"
        ahead = schedule.kind == "async"
        table.add_row(
            "as declared" if case is cases[0] else devices,
            f"async lag {schedule.lag_limit} every {schedule.publish_every}" if ahead else schedule.kind,
            f"{case.lag_mean:.1f}", str(max(case.result.lag, default=0)),
            f"{case.result.makespan:,.1f}", f"{case.samples_per_s:.4g}", f"{case.busy:.0%}",
        )  # fmt: skip
    return table


def _figures(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
    """A table without lines: columns of text, then of numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in texts:
        table.add_column(name)
    for name in numbers:
        table.add_column(name, justify="right")
    return table


def _assumptions(forecast: Forecast) -> Iterator[str]:
    costs, graph = forecast.costs, forecast.graph
    if none := [node.name for node in graph if node.name not in costs.times]:
        yield f"no time for {', '.join(none)}"
    yield "rollout and train stages take 1/n of the time on n times the devices, publish the same"
    if costs.tail is None:
        yield "no long tail (--tail); with one, more engines help a rollout less"
    if not costs.hand_over:
        yield "co-located pools hand over in no time (--hand-over)"
    schedule = forecast.experiment.schedule
    times = [time for node in rollouts(graph) if isinstance(time := costs.times.get(node.name), Recorded)]
    recorded = [took for time in times for took in time.took]
    if any(took.tail for took in recorded):
        yield "rollouts that ran beside each other take as long alone"
    elif schedule.ahead:
        yield "a rollout begins when the one before has ended; a run begins it in that one's tail already"
    if schedule.queue_tokens and (not recorded or any(took.tokens is None for took in recorded)):
        yield "each response takes rollout.max_new_tokens of schedule.queue_tokens, also once it is generated"
    if forecast.experiment.model.device == "cpu":
        yield "each pool has cores of its own; where they share them, overlap gains less"
