"""`ratchet show`: the time of each pool over the whole run, by hand."""

from pathlib import Path

from rich.console import Console

from flows.show import Report, print_summary

POOLS = {"rollout": {"publish": 2.0, "working": 30.0, "weights": 8.0}, "cpu": {"working": 0.5, "data": 39.5}}


def test_the_time_of_each_pool_stands_under_it_and_adds_up_to_wall_time() -> None:
    report = Report(Path("runs/r"), "finished", {1: {"time/iteration": 30.0}}, [], [], [], {}, 1, POOLS)
    with (console := Console(width=80)).capture() as captured:
        print_summary(report, console)
    lines = [line.split() for line in captured.get().splitlines()]
    first = lines.index(["time", "of", "each", "pool"])
    assert lines[first + 1 : first + 7] == [
        ["seconds", "rollout", "cpu"],
        ["working", "30.0", "75%", "0.5", "1%"],
        ["publish", "2.0", "5%", "0.0", "0%"],
        ["data", "0.0", "0%", "39.5", "99%"],
        ["weights", "8.0", "20%", "0.0", "0%"],
        ["wall", "40.0", "40.0"],
    ]


def test_an_evaluation_stands_beside_the_reward_of_its_iteration() -> None:
    history = {
        1: {"time/iteration": 3.0, "reward/mean": 0.25},
        2: {"time/iteration": 3.0, "reward/mean": 0.5, "eval/reward/mean": 0.625, "actor/approx_kl": 2.4e-12},
    }
    with (console := Console(width=80)).capture() as captured:
        print_summary(Report(Path("runs/r"), "finished", history, [], [], [], {}, 2, {}), console)
    lines = [line.split() for line in captured.get().splitlines()]
    first = lines.index(["reward"])
    assert lines[first + 1 : first + 3] == [["1", "0.250", "█" * 15], ["2", "0.500", "█" * 30, "eval", "0.625"]]
