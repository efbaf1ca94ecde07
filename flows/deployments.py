"""`make check`: prove that prefect.yaml says what Prefect would do with it.

Prefect accepts misspelt keys and unknown parameters, and an unset variable becomes empty. This loads every entrypoint,
validates every parameter against the flow's signature, loads every experiment named, and refuses unknown keys.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prefect import Flow
from prefect.flows import load_flow_from_entrypoint

from conf.errors import ConfigError
from conf.load import load
from flows.graph import load_graph

TOP = {"name", "prefect-version", "build", "push", "pull", "definitions", "deployments"}
DEPLOYMENT = {
    "name", "description", "entrypoint", "parameters", "schedules", "concurrency_limit", "work_pool", "tags", "version",
    "enforce_parameter_schema", "triggers", "sla", "build", "push", "pull", "version_type",
}  # fmt: skip
SCHEDULE = {
    "cron",
    "interval",
    "anchor_date",
    "rrule",
    "timezone",
    "day_or",
    "active",
    "parameters",
    "slug",
    "max_scheduled_runs",
}
WORK_POOL = {"name", "work_queue_name", "job_variables"}


def check_deployments(file: Path) -> Iterator[str]:
    """Yield one line for each problem of a prefect.yaml."""
    declared = yaml.safe_load(file.read_text())
    yield from _unknown(file, "", declared, TOP)
    names = [deployment.get("name") for deployment in declared["deployments"]]
    for name in {name for name in names if names.count(name) > 1}:
        yield f"{file}: deployments must have different names, got {name!r} twice"
    for deployment in declared["deployments"]:
        where = f"deployment {deployment.get('name')}"
        yield from _unknown(file, where, deployment, DEPLOYMENT)
        yield from _unknown(file, f"{where}: work_pool", deployment.get("work_pool", {}), WORK_POOL)
        for schedule in deployment.get("schedules", []):
            yield from _unknown(file, f"{where}: schedule", schedule, SCHEDULE)
        yield from _flow(file, where, deployment)


def _unknown(file: Path, where: str, given: dict[str, Any], known: set[str]) -> Iterator[str]:
    for key in given.keys() - known:
        yield f"{file}: {where}: unknown key {key!r}; known are {', '.join(sorted(known))}"


def _flow(file: Path, where: str, deployment: dict[str, Any]) -> Iterator[str]:
    try:
        flow: Flow[Any, Any] = load_flow_from_entrypoint(deployment["entrypoint"])
        given = deployment.get("parameters", {})
        for name in given.keys() - flow.parameters.properties.keys():
            known = ", ".join(flow.parameters.properties)
            yield f"{file}: {where}: {flow.name} has no parameter {name!r}; it has {known}"
            return
        parameters = flow.validate_parameters(given)
        loaded = load(parameters["experiment"], parameters.get("overrides") or [])
        load_graph(loaded.experiment, loaded.place)
    except ConfigError as error:
        yield f"{file}: {where}: {error}"
    except Exception as error:  # whatever Prefect raises for an entrypoint or parameters it cannot use
        yield f"{file}: {where}: {type(error).__name__}: {error}"


def main() -> None:
    problems = list(check_deployments(Path("prefect.yaml")))
    for line in problems:
        print(line, file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
