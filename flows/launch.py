"""`ratchet run`: the same flow that a worker runs, in this process, with a Prefect server and a terminal display."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from pathlib import Path

from prefect.exceptions import TerminationSignal
from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console

from flows.display import Terminal
from flows.opening import DISPLAY, choose_run, load_run, next_free_name
from flows.prefect_server import HOME, own_server, prefect_server
from flows.preflight import preflight
from flows.show import print_summary, read_report


def run_here(experiment: str, overrides: Sequence[str], iterations: int | None, name: str | None, *, new: bool) -> int:
    """Run or continue; gives the exit code. Everything started here has ended when it returns."""
    loaded = load_run(experiment, overrides, iterations)
    preflight(loaded)  # again in the flow, where workers start; here so that a mistake costs no server start
    name = next_free_name(loaded) if new else choose_run(loaded, name).name
    folder = Path(loaded.experiment.runs_dir) / name
    console = Console(highlight=False, soft_wrap=True)
    try:
        with prefect_server(console.print) as url, Terminal(console) as display:
            console.print(f"Prefect UI while this runs: {url.removesuffix('/api')}", markup=False)
            DISPLAY.set(display)
            asyncio.run(_flow(experiment, list(overrides), iterations, name, HOME / "flow.log"))
    except (KeyboardInterrupt, asyncio.CancelledError, TerminationSignal):  # the last is Prefect's for SIGTERM
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # one more Ctrl-C would kill the interpreter while it exits
        how = f"the same command with --run {name} instead of --new" if new else "the same command"
        console.print(f"stopped; {how} continues {folder}", markup=False)
        return 130
    print_summary(read_report(str(folder)), console)
    if not own_server():
        console.print("Prefect UI later:  make ui   (or: ratchet ui), then open http://127.0.0.1:4200", markup=False)
    return 0


async def _flow(experiment: str, overrides: list[str], iterations: int | None, name: str, log: Path) -> None:
    from flows.run import rl_run

    _log_to_file(log)
    task = asyncio.current_task()
    assert task is not None  # we are in a coroutine
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await rl_run(experiment, overrides, iterations, name)


def _log_to_file(path: Path) -> None:
    """Logs go to a file and Prefect's API; the terminal belongs to the display and to one-line errors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in [logging.root, *loggers]:
        if any(isinstance(h, PrefectConsoleHandler) for h in logger.handlers):
            logger.handlers = [h for h in logger.handlers if not isinstance(h, PrefectConsoleHandler)]
            logger.propagate = True
    logging.root.addHandler(handler)
