"""What a run prints while it works: a bar for the stages under way, a line per iteration, a report at the end."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from prefect.logging import get_run_logger
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class Display(Protocol):
    def message(self, text: str) -> None: ...
    def stage_begun(self, iteration: int, node: str) -> None: ...
    def stage_progress(self, iteration: int, node: str, done: int, total: int, unit: str) -> None: ...
    def stage_done(self, iteration: int, node: str) -> None: ...
    def iteration_done(self, iteration: int, line: str) -> None: ...


class LineTable:
    """One line an iteration under one header; the columns follow from the graph, 80 wide for the ready-made ones."""

    def __init__(self, iterations: int, nodes: Sequence[tuple[str, str]]) -> None:
        self._iterations = iterations
        self._devices = [name for name, role in nodes if role != "cpu"]
        self._cpu = [name for name, role in nodes if role == "cpu"]

    @property
    def header(self) -> str:
        titles = "".join(f" {name:>{max(5, len(name))}}" for name in self._devices)
        return f"{'iter':>5} {'reward':>6} {'len':>4} {'lag':>3}{titles} {'other':>5} {'idle':>4} {'total':>5}"

    def line(self, iteration: int, values: Mapping[str, float]) -> str:
        def seconds(name: str) -> str:
            value = values.get(f"time/{name}")
            return f" {'-' if value is None else f'{value:.1f}':>{max(5, len(name))}}"

        other = sum(values.get(f"time/{name}", 0.0) for name in [*self._cpu, "checkpoint"])
        reward = values.get("reward/mean", float("nan"))
        length = values.get("response_length/mean", float("nan"))
        return (
            f"{iteration:>2}/{self._iterations:<2} {reward:>6.3f} {length:>4.0f} "
            f"{values.get('off_policy/lag_max', 0):>3.0f}{''.join(map(seconds, self._devices))} "
            f"{other:>5.1f} {values.get('time/outside_stages', 0.0):>4.1f} {values['time/iteration']:>4.0f}s"
        )


class Terminal:
    """Prints to a console; the bar only where it is a terminal. Use as a context manager."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self._bars = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._tasks: dict[tuple[int, str], TaskID] = {}

    def __enter__(self) -> "Terminal":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def message(self, text: str) -> None:
        self.console.print(text, markup=False)

    def stage_begun(self, iteration: int, node: str) -> None:
        self._tasks[iteration, node] = self._bars.add_task(f"{iteration:>5}  {node}", total=None, detail="")

    def stage_progress(self, iteration: int, node: str, done: int, total: int, unit: str) -> None:
        if (iteration, node) in self._tasks:
            self._bars.update(
                self._tasks[iteration, node], completed=done, total=total, detail=f"{done}/{total} {unit}"
            )

    def stage_done(self, iteration: int, node: str) -> None:
        if (iteration, node) in self._tasks:
            self._bars.remove_task(self._tasks.pop((iteration, node)))

    def iteration_done(self, iteration: int, line: str) -> None:
        self.message(line)


class Quiet:
    """Nothing but the messages, as Prefect logs: for a worker's run, which people watch in the UI."""

    def message(self, text: str) -> None:
        get_run_logger().info(text)

    def stage_begun(self, iteration: int, node: str) -> None: ...

    def stage_progress(self, iteration: int, node: str, done: int, total: int, unit: str) -> None: ...

    def stage_done(self, iteration: int, node: str) -> None: ...

    def iteration_done(self, iteration: int, line: str) -> None: ...


def seconds_since(began: float) -> str:
    """`12 s` since a time of the event loop's clock."""
    return f"{asyncio.get_running_loop().time() - began:.0f} s"
