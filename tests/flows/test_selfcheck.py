"""`ratchet selfcheck` passes on the product, and each of its checks fails on a product without the guarantee."""

import asyncio
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from data.package import MANIFEST, Package, PackageManifest
from data.refs import DatasetRef
from data.store import Facts, Store
from flows import selfcheck
from flows.selfcheck import Finding, run_check
from flows.simulate import simulate
from tasks import losses
from tasks.engines.client import Engine
from tasks.engines.toy import write_model

Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("toy") / "model")


def findings(name: str, folder: Path, model: Path) -> list[Finding]:
    return asyncio.run(run_check(getattr(selfcheck, name), folder / name, model))


def test_everything_is_as_expected_on_the_product() -> None:
    console = Console(file=(printed := io.StringIO()), width=200)
    assert selfcheck.selfcheck(console) == 0
    assert "FAIL" not in printed.getvalue()
    assert "36 of 36 as expected" in printed.getvalue()


def test_a_check_that_fails_is_shown_and_gives_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "CHECKS", {"stages": selfcheck.schedule})
    monkeypatch.setattr(selfcheck, "simulate", lambda *args: replace(simulate(*args), makespan=271.0))
    console = Console(file=(printed := io.StringIO()), width=200)
    assert selfcheck.selfcheck(console) == 1
    assert printed.getvalue().count("FAIL") == 2


def test_an_error_nobody_expected_fails_the_check(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("no")

    monkeypatch.setattr(selfcheck, "simulate", broken)
    assert findings("schedule", tmp_path, model) == [
        Finding("the check itself", "no error", "ZeroDivisionError: no", False)
    ]


# -- the product without one of its guarantees


def nothing(*args: Any, **kwargs: Any) -> None:
    pass


async def nothing_async(*args: Any, **kwargs: Any) -> None:
    pass


def receipts_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("data.weights._check_receipts", nothing)


def packages_are_not_verified(patch: pytest.MonkeyPatch) -> None:
    def verify(folder: Path) -> Package:
        return Package(folder, PackageManifest.from_bytes((folder / MANIFEST).read_bytes()))

    patch.setattr("tasks.publish.verify", verify)


def readers_are_not_waited_for(patch: pytest.MonkeyPatch) -> None:
    async def none_running(self: Engine) -> int:
        return 0

    patch.setattr(Engine, "running_requests", none_running)
    patch.setattr(Engine, "pause", nothing_async)
    flushes_prove_nothing(patch)


def flushes_prove_nothing(patch: pytest.MonkeyPatch) -> None:
    async def update(self: Engine, path: str, label: str, timeout_s: float, **flush: bool) -> None:
        body = {"model_path": path, "weight_version": label, "flush_cache": False}
        await self._json("POST", "/update_weights_from_disk", body, {}, timeout_s)

    patch.setattr(Engine, "flush_cache", nothing_async)
    patch.setattr(Engine, "update_weights", update)


def versions_share_their_kv(patch: pytest.MonkeyPatch) -> None:
    complete = Engine._complete

    async def without_key(self: Engine, rid: str, ids: Any, sampling: Any, key: str, *rest: Any) -> Any:
        return await complete(self, rid, ids, sampling, "", *rest)

    patch.setattr(Engine, "_complete", without_key)
    flushes_prove_nothing(patch)


def engines_serve_any_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Engine, "generate", Engine.generate_unready)


def checksums_are_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tasks.engines.install.Install._check_sums", nothing)


def engines_work_before_they_are_proven(patch: pytest.MonkeyPatch) -> None:
    update_weights = Engine.update_weights

    async def update(self: Engine, path: str, label: str, timeout_s: float, **flush: bool) -> None:
        await update_weights(self, path, label, timeout_s, **flush)
        self.ready_label = label

    patch.setattr(Engine, "update_weights", update)


def columns_may_be_written_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("data.store._check_new_columns", nothing)


def stages_may_be_committed_again(patch: pytest.MonkeyPatch) -> None:
    commit = Store.commit_rows

    def replace(self: Any, iteration: int, stage: str, table: Any, **kwargs: Any) -> DatasetRef:
        (self._root / "stages" / f"{iteration:06d}" / f"{stage}.json").unlink(missing_ok=True)
        return commit(self, iteration, stage, table, **kwargs)

    patch.setattr(Store, "commit_rows", replace)


def the_ratio_takes_the_current_probability_twice(patch: pytest.MonkeyPatch) -> None:
    sums = losses.ratio_sums
    patch.setattr(losses, "ratio_sums", lambda now, old, *rest: sums(now, now.detach(), *rest))


def the_loss_takes_the_current_probability_twice(patch: pytest.MonkeyPatch) -> None:
    loss = losses.ppo_clip
    patch.setattr(losses, "ppo_clip", lambda now, old, *rest: loss(now, now.detach(), *rest))


def groups_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("data.rows._check_groups", nothing)


def failed_rewards_are_used(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tasks.advantage.incomplete_groups", lambda table: {})
    patch.setattr("tasks.advantage._refuse_overflow", nothing)


def lost_groups_are_not_reported(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tasks.rollout.Facts", lambda **facts: Facts(**{**facts, "dropped": {}}))


def any_lag(newest: int, first: int, limit: int) -> int:
    return newest - first


def rollouts_do_not_look_at_the_lag(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("tasks.rollout.check_lag", any_lag)


def any_lag_is_admitted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(selfcheck, "check_lag", any_lag)


def training_does_not_wait_for_processing(patch: pytest.MonkeyPatch) -> None:
    def hasty(steps: list[Any], *args: Any) -> Any:
        return simulate([*steps[:2], replace(steps[2], needs=("rollout",))], *args)

    patch.setattr(selfcheck, "simulate", hasty)


BROKEN: list[tuple[Any, str, set[str]]] = [
    (
        receipts_are_not_counted,
        "missing_shard",
        {
            "rank 1 wrote nothing: no shard, no receipt",
            "... and its version",
            "both ranks wrote, but one tensor is in neither shard",
        },
    ),
    (
        packages_are_not_verified,
        "missing_shard",
        {"a tensor taken out of a sealed shard", "... and the engine, which would have taken it"},
    ),
    (
        readers_are_not_waited_for,
        "old_reader",
        {"a reader that ends while the publish waits", "... and the weights it reads"},
    ),
    (
        flushes_prove_nothing,
        "old_kv",
        {"old KV in the engine after a publish", "the same prefix under the new version"},
    ),
    (versions_share_their_kv, "old_kv", {"the check itself"}),  # the publish's own probe finds it
    (engines_serve_any_version, "old_kv", {"a request for the old version"}),
    (checksums_are_not_compared, "silent_rank", {"rank 1 keeps the old weights and the engine reports success"}),
    (engines_work_before_they_are_proven, "silent_rank", {"... and both"}),
    (columns_may_be_written_again, "behaviour", {"current probabilities written over the behaviour's"}),
    (stages_may_be_committed_again, "behaviour", {"the rollout committed again with current probabilities"}),
    (the_ratio_takes_the_current_probability_twice, "behaviour", {"0.2 when it was generated, 0.4 now, advantage -1"}),
    (the_loss_takes_the_current_probability_twice, "behaviour", {"0.2 when it was generated, 0.4 now, advantage -1"}),
    (groups_are_not_counted, "incomplete_group", {"a batch in which a group has lost a sample"}),
    (failed_rewards_are_used, "incomplete_group", {"a group of which one reward timed out"}),
    (lost_groups_are_not_reported, "incomplete_group", {"three prompts, one of which the engine refuses"}),
    (
        rollouts_do_not_look_at_the_lag,
        "stale_version",
        {
            "a rollout under the version before it, on an engine that still serves that",
            "a rollout under a version newer than any in the ledger",
        },
    ),
    (any_lag_is_admitted, "stale_version", {"... lag 1 allowed", "rows of version 9 when 7 is the newest"}),
    (training_does_not_wait_for_processing, "schedule", {"three batches of R=40, P=20, T=30, pipelined"}),
]


@pytest.mark.parametrize(("breaking", "check", "expected"), BROKEN, ids=[breaking.__name__ for breaking, *_ in BROKEN])
def test_a_check_fails_where_the_guarantee_is_gone(
    breaking: Patch, check: str, expected: set[str], tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaking(monkeypatch)
    failed = {finding.check for finding in findings(check, tmp_path, model) if not finding.ok}
    assert expected <= failed
