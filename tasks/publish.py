"""Bring a sealed policy version to every engine and prove it there: docs/publish.md.

An engine gets work only while its `ready_label` is set. That happens for all engines of the pool at once, after the
version is COMMITTED in the ledger with every engine READY on it or taken out, never fewer than `publish.min_engines`.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from conf.errors import PublishError
from conf.schema import Experiment
from data.crash import crash_point
from data.ledger import Ledger
from data.package import Package
from data.refs import PolicyRef
from data.retention import retire
from data.weights import verify
from tasks.engines.fleet import Fleet
from tasks.engines.install import STEPS, Install, Mismatch, Target
from tasks.stage import Context, Inputs, NewPolicy, stage

__all__ = ["PublishError", "Published", "Quarantined", "publish", "publish_to_engines"]


class Quarantined(PublishError):
    """The version is damaged, or wrong on every engine. It is never tried again; its content gets a new number."""


@dataclass(frozen=True)
class Published:
    """What publishing cost. Times are of the slowest engine."""

    bytes: int  # of the package's weights
    install_s: float  # Q1-Q5: drain, pause, load
    verify_s: float  # Q0 and Q6-Q10
    restarts: int  # of engines
    engines_out: int  # taken out of the pool


def _due(experiment: Experiment, iteration: int) -> bool:
    return iteration % experiment.schedule.publish_every == 0 or iteration == experiment.iterations


@stage(output="policy", role="rollout", reads="trained", every=_due)
async def publish(inputs: Inputs, context: Context) -> NewPolicy:
    """POLICY (sealed) -> POLICY (committed): proven on every engine. Raises PublishError with the step that failed.

    The version given may be another than the input's: what its content was sealed as again, where it was quarantined.
    """
    policy = context.ledger.live(inputs.policy())
    published = await publish_to_engines(
        policy, context.run_dir / "weights", context.engines, context.ledger, context.experiment, context.progress
    )
    for name in ("bytes", "install_s", "verify_s", "restarts", "engines_out"):
        context.measure(f"weights/{name}", getattr(published, name))
    return NewPolicy(policy)


async def publish_to_engines(
    policy: PolicyRef,
    weights: Path,
    fleet: Fleet,
    ledger: Ledger,
    experiment: Experiment,
    progress: Callable[[int, int, str], None] = lambda done, total, unit: None,
) -> Published:
    """Install `weights/<label>` on every engine, all at once; then the version is COMMITTED and old ones are retired.

    Safe to repeat, also by a process that follows one that died at any step: an engine that is READY on this version,
    proven again by its checksum, is left alone. Also for the start of a run. Raises Quarantined; PublishError where
    fewer than `publish.min_engines` could be brought to it, and then no engine gets work.
    """
    started = time.monotonic()
    row = ledger.version(policy.number)
    if (newest := ledger.committed()) and newest.number > policy.number:
        raise PublishError("Q0", f"version {policy.label} is older than {newest.label}, which is committed")
    if row.state not in ("SEALED", "PUBLISHING", "COMMITTED") or row.content != policy.content:
        raise PublishError(
            "Q0", f"version {policy.label} must be sealed with this content, the ledger has {row.state} {row.content}"
        )
    with _leased(ledger, policy.number):
        package = await _prove(policy, weights, ledger)
        if row.state == "SEALED":
            ledger.set_version(policy.number, "PUBLISHING")
        checked = time.monotonic() - started
        installs = await _install(package, fleet, ledger, experiment, progress)
        wrong = bool(installs) and all(isinstance(install.error, Mismatch) for install in installs)
        if wrong and row.state != "COMMITTED":  # that one was proven before, so now the engines are at fault
            await _give_up(policy, weights, fleet, ledger, experiment, installs)
        _commit(policy, fleet, ledger, experiment, installs)
    for folder in retire(ledger, weights, experiment.publish.keep_versions):
        await asyncio.to_thread(shutil.rmtree, folder)
    return Published(
        bytes=sum(f.size for f in package.manifest.files if f.path.endswith(".safetensors")),
        install_s=max((i.install_s for i in installs), default=0.0),
        verify_s=checked + max((i.verify_s for i in installs), default=0.0),
        restarts=sum(i.restarts for i in installs),
        engines_out=sum(i.row is not None and i.row.state == "OUT" for i in installs),
    )


@contextmanager
def _leased(ledger: Ledger, number: int) -> Iterator[None]:
    ledger.lease(number, "publish")
    try:
        yield
    finally:
        ledger.release(number, "publish")


async def _prove(policy: PolicyRef, weights: Path, ledger: Ledger) -> Package:
    """Q0: manifest, sizes, digests, closed world. A damaged version is quarantined before an engine can see it."""
    try:
        package = await asyncio.to_thread(verify, weights / policy.label)
        if package.manifest.ref != policy:
            raise PublishError("Q0", f"{policy.label}: its manifest is of {package.manifest.ref}")
        return package
    except PublishError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, FileNotFoundError):
            raise  # the disk could not be read: that says nothing about the version
        ledger.set_version(policy.number, "QUARANTINED")
        raise Quarantined(
            error.step, f"{error.message}; the version is quarantined, continuing the run seals its content again"
        ) from error


async def _install(
    package: Package,
    fleet: Fleet,
    ledger: Ledger,
    experiment: Experiment,
    progress: Callable[[int, int, str], None],
) -> list[Install]:
    engines = list(fleet)
    target = Target(package, ledger, experiment, lambda done: progress(done, STEPS * len(engines), "steps"))
    installs = [Install(engine, fleet, target) for engine in engines]
    # Never cancelled in the middle because another one failed: an update that nobody waits for may come later.
    results = await asyncio.gather(*(install.run() for install in installs), return_exceptions=True)
    await target.close()
    for result in results:
        if result is not None:
            raise result
    return installs


def _commit(policy: PolicyRef, fleet: Fleet, ledger: Ledger, experiment: Experiment, installs: list[Install]) -> None:
    """Q11: all engines become visible at once, or none. Raises Stale where a newer publish has one of them."""
    for install in installs:
        install.claim()
    rows = [install.row for install in installs if install.row]
    ready = sum(row.state == "READY" for row in rows)
    if ready < experiment.publish.min_engines:
        failed = [install.error for install in installs if install.error]
        limit = f"{ready} of {len(rows)} engines are proven, publish.min_engines is {experiment.publish.min_engines}"
        if not failed:
            raise PublishError("Q11", f"{policy.label}: {limit}")
        first, *others = failed
        for note in [limit, *map(str, others)]:
            first.add_note(note)
        raise first
    attempts = {install.engine.name: install.attempt for install in installs}
    ledger.commit_version(policy.number, rows, experiment.publish.min_engines, attempts)
    crash_point(f"publish/{policy.number}/committed")
    for install in installs:
        if install.row and install.row.state == "READY":
            install.engine.ready_label = policy.label
        else:
            fleet.take_out(install.engine)


async def _give_up(
    policy: PolicyRef,
    weights: Path,
    fleet: Fleet,
    ledger: Ledger,
    experiment: Experiment,
    installs: list[Install],
) -> None:
    """No engine holds the version rightly: it is bad. The engines go back to the one before it. Raises Quarantined."""
    ledger.set_version(policy.number, "QUARANTINED")
    first = installs[0].error
    assert first is not None  # all have failed
    back = ""
    if previous := ledger.committed():
        try:
            await publish_to_engines(previous, weights, fleet, ledger, experiment)
            back = f"; the engines serve {previous.label} again"
        except PublishError as error:
            back = f"; {previous.label} did not come back either: {error.message}"
    raise Quarantined(
        first.step, f"{first.message}; all {len(installs)} engine(s) disagree, so {policy.label} is quarantined{back}"
    ) from first
