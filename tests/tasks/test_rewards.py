"""Reward functions run in worker processes: a faulty call costs its own sample, and never becomes a 0."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from conf.errors import ConfigError, StageError
from conf.schema import Experiment, Reward, RewardFunction
from data.columns import column
from tasks.reward import reward, reward_metrics
from tasks.rewards import RewardInput
from tasks.rewards import workers as workers_module
from tasks.rewards.arithmetic import last_number, only_number
from tasks.rewards.child import descendants, landlock_version
from tasks.rewards.workers import Outcome, RewardWorkers, check_rewards
from tasks.stage import Inputs

BAD = "tests.tasks.bad_rewards"
UNCONFINED = "tests.tasks.unconfined_rewards"
WITHOUT_LANDLOCK = "tests.tasks.unlandlocked_rewards"


def settings(path: str = f"{BAD}:act", options: dict[str, Any] | None = None, **changes: Any) -> Reward:
    functions = {"f": RewardFunction(path=path, options=options or {})}
    return Reward(**{"functions": functions, "timeout_s": 20.0, "max_failed_share": 1.0, "memory_mb": 256} | changes)


def sample(response: str, **changes: Any) -> dict[str, Any]:
    known = {"prompt": "2+2?", "answer": "4", "data": "{}", "finish_reason": "stop", "tokens": 3}
    return known | {"response": response} | changes


def score(reward_settings: Reward, *responses: str) -> list[Outcome]:
    """Score with fresh workers; afterwards none of their processes is left."""

    async def run() -> list[Outcome]:
        workers = RewardWorkers(reward_settings)
        try:
            samples = [sample(response) for response in responses]
            results = await workers.score(samples, [str(i) for i in range(len(samples))], lambda done: None)
            return [result["f"] for result in results]
        finally:
            await workers.stop()

    before = set(descendants(os.getpid()))
    try:
        return asyncio.run(run())
    finally:
        assert set(descendants(os.getpid())) <= before


def one(response: str, answer: str = "12") -> RewardInput:
    return RewardInput("7+5?", response, answer, {}, "stop", 4)


@pytest.mark.parametrize(
    ("response", "right", "form"),
    [
        ("12", 1.0, 1.0),
        (" 12\n", 1.0, 1.0),
        ("7 + 5 = 12.", 1.0, 0.0),
        ("12 is 7 + 5", 0.0, 0.0),
        ("-12", 0.0, 1.0),
        ("012", 1.0, 1.0),
        ("twelve", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_last_number_counts_and_only_a_number_is_well_formed(response: str, right: float, form: float) -> None:
    assert last_number(one(response)) == right
    assert only_number(one(response)) == form


def test_a_minus_before_the_last_number_belongs_to_it() -> None:
    assert last_number(one("5 - 3", "3")) == 1.0
    assert last_number(one("5-3", "3")) == 0.0


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("good", 0.5),
        ("whole", 2.0),
        ("numpy_number", 0.25),
        ("huge", 1e308),
        ("prints", 0.5),
        ("waits_for_its_process", 0.5),
        ("moves_a_file_between_folders", 0.5),
        ("runs_a_program", 0.5),
        ("looks_around", 0.0),
        ("keeps_rights", 0.0),
    ],
)
def test_a_finite_number_is_ok(response: str, value: float) -> None:
    assert score(settings(), "good", response, "good") == [
        Outcome("ok", 0.5, ""),
        Outcome("ok", value, ""),
        Outcome("ok", 0.5, ""),
    ]


@pytest.mark.parametrize(
    ("response", "outcome", "error"),
    [
        ("raises", "error", "LookupError: no such word: Zürich (bad_rewards.py:"),
        ("raises_without_text", "error", "Unprintable: (its message cannot be printed)"),
        ("exits", "error", "SystemExit: 3"),
        ("exits_at_once", "error", "the call ended its process with exit code 3"),
        ("segfaults", "error", "the call ended its process with SIGSEGV"),
        ("allocates", "error", "MemoryError: the call needs more than reward.memory_mb"),
        ("fills_the_disk", "error", "OSError: [Errno 27] File too large"),
        ("forks", "error", "the call left 1 process(es) behind"),
        ("forks_and_both_return", "error", "the call left 1 process(es) behind"),
        ("starts_a_daemon", "error", "the call left 1 process(es) behind"),
        ("forks_without_end", "error", "the call had "),
        ("forks_new_sessions_without_end", "error", "the call had "),
        ("hops_from_process_to_process", "error", "the call left "),
        ("kills_the_guard", "error", "PermissionError: [Errno 1] Operation not permitted"),
        ("leaves_a_daemon_and_kills_the_guard", "error", "the call left 1 process(es) behind"),
        ("lifts_its_limits", "error", "ValueError: not allowed to raise maximum limit"),
        ("writes_to_every_descriptor", "error", "the call wrote to the worker's own socket"),
        ("closes_every_descriptor", "error", "the call "),
        ("none", "error", "returned NoneType None, expected a float"),
        ("text", "error", "returned str '1.0', expected a float"),
        ("boolean", "error", "returned bool True, expected a float"),
        ("several", "error", "returned list [1.0, 0.0], expected a float"),
        ("nan", "nonfinite", "returned nan"),
        ("infinite", "nonfinite", "returned -inf"),
        ("beyond_float", "nonfinite", "OverflowError: int too large to convert to float"),
    ],
)
def test_a_faulty_call_costs_its_own_sample_only(response: str, outcome: str, error: str) -> None:
    first, faulty, *others = score(settings(), "good", response, "good", "good", "good")
    assert (faulty.outcome, faulty.value) == (outcome, None)
    assert faulty.error.startswith(error)
    assert [first, *others] == [Outcome("ok", 0.5, "")] * 4


def test_a_call_that_hangs_is_a_timeout_and_the_rest_go_on() -> None:
    outcomes = score(settings(timeout_s=2.0), "hangs", "good", "hangs", "good", "good", "good")
    assert [o.outcome for o in outcomes] == ["timeout", "ok", "timeout", "ok", "ok", "ok"]
    assert outcomes[0] == Outcome("timeout", None, "no answer within 2 s")


def test_an_alarm_left_set_does_not_end_a_later_call() -> None:
    outcomes = score(settings(workers=1), *["leaves_an_alarm"] * 20)
    assert outcomes == [Outcome("ok", 0.5, "")] * 20


def test_each_call_has_its_own_copy_of_the_prompts_data() -> None:
    assert score(settings(workers=1), *["changes_its_data"] * 3) == [Outcome("ok", 1.0, "")] * 3


def test_a_worker_sees_no_secret_and_no_file_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RATCHET_TEST_KEY", "secret")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        assert score(settings(), "secret_in_environment", "open_files") == [Outcome("ok", 0.0, "")] * 2


def test_a_call_can_neither_signal_nor_look_into_the_processes_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_ENVIRONMENT", ("RUN", *workers_module._ENVIRONMENT))
    monkeypatch.setenv("RUN", str(os.getpid()))
    signalled, seen = score(settings(), "signals_the_run", "looks_around")
    # What a kernel does not give, docs/security.md says.
    version = landlock_version()
    if version >= 6:
        assert signalled.error.startswith("PermissionError: [Errno 1] Operation not permitted (bad_rewards.py:")
    else:
        assert signalled == Outcome("ok", 1.0, "")
    assert (seen.outcome, seen.value == 0) == ("ok", version >= 2 or os.geteuid() == 0)


@pytest.mark.parametrize("response", ["kills_the_guard", "leaves_a_daemon_and_kills_the_guard"])
def test_a_guard_that_is_killed_is_replaced_and_leaves_nothing_behind(response: str) -> None:
    outcomes = score(settings(f"{UNCONFINED}:act"), "good", response, "good")
    assert outcomes[1] == Outcome("error", None, "the worker was ended from within the call and was replaced")
    assert [outcomes[0], outcomes[2]] == [Outcome("ok", 0.5, "")] * 2


def test_an_unconfined_call_could_look_into_the_run() -> None:
    """Else the test above that it cannot would prove nothing."""
    (seen,) = score(settings(f"{UNCONFINED}:act"), "looks_around")
    assert (seen.value or 0) > 0


def test_without_landlock_only_roots_processes_are_closed_to_a_call() -> None:
    (seen,) = score(settings(f"{WITHOUT_LANDLOCK}:act"), "looks_around")
    assert (seen.value == 0) == (os.geteuid() == 0)


def test_results_come_in_the_order_of_the_samples_and_progress_reaches_the_end() -> None:
    async def run() -> tuple[list[float | None], list[int]]:
        workers = RewardWorkers(settings(f"{BAD}:length", {"per_token": 0.5}, workers=3))
        seen: list[int] = []
        try:
            samples = [sample("", tokens=n) for n in range(50)]
            results = await workers.score(samples, [str(i) for i in range(50)], seen.append)
            return [r["f"].value for r in results], seen
        finally:
            await workers.stop()

    values, seen = asyncio.run(run())
    assert values == [0.5 * n for n in range(50)]
    assert seen == list(range(1, 51))


def test_a_share_of_failures_above_the_limit_stops_the_stage_with_the_first_errors() -> None:
    with pytest.raises(
        StageError, match=r"2 of 4 samples failed.*allows 0\.25 of them.*First: 1 f: error: LookupError"
    ):
        score(settings(max_failed_share=0.25, workers=1), "good", "raises", "good", "raises")


def test_a_share_of_failures_at_the_limit_is_accepted() -> None:
    outcomes = score(settings(max_failed_share=0.25), "good", "raises", "good", "good")
    assert [o.outcome for o in outcomes] == ["ok", "error", "ok", "ok"]


def test_with_on_failure_fail_one_failure_stops_the_stage() -> None:
    with pytest.raises(StageError, match=r"1 of 3 samples failed, and reward\.on_failure is `fail`"):
        score(settings(on_failure="fail"), "good", "nan", "good")


def test_guards_that_are_killed_again_and_again_stop_the_stage() -> None:
    with pytest.raises(StageError, match="had to be replaced more than 10 times"):
        score(settings(f"{UNCONFINED}:act", workers=1), *["kills_the_guard"] * 12)


def test_after_a_cancelled_batch_the_next_one_is_scored_right() -> None:
    async def run() -> list[Outcome]:
        workers = RewardWorkers(settings())
        try:
            hanging = asyncio.create_task(workers.score([sample("hangs")] * 2, ["a", "b"], lambda done: None))
            await workers.start()
            await asyncio.sleep(0.2)
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging
            results = await workers.score([sample("good")] * 4, list("abcd"), lambda done: None)
            return [r["f"] for r in results]
        finally:
            await workers.stop()

    assert asyncio.run(run()) == [Outcome("ok", 0.5, "")] * 4


def test_two_batches_at_once_share_the_workers() -> None:
    async def run() -> list[list[dict[str, Outcome]]]:
        workers = RewardWorkers(settings())
        try:
            batches = [workers.score([sample(r)] * 20, ["s"] * 20, lambda done: None) for r in ("good", "whole")]
            return await asyncio.gather(*batches)
        finally:
            await workers.stop()

    first, second = asyncio.run(run())
    assert first == [{"f": Outcome("ok", 0.5, "")}] * 20
    assert second == [{"f": Outcome("ok", 2.0, "")}] * 20


_HANGING_RUN = f"""
import asyncio, sys
from conf.schema import Reward, RewardFunction
from tasks.rewards.workers import RewardWorkers
async def main():
    workers = RewardWorkers(Reward(functions={{"f": RewardFunction(path="{BAD}:act")}}, timeout_s=600.0))
    await workers.start()
    print(*[w.process.pid for w in workers._workers], flush=True)
    s = dict(prompt="", response="hangs", answer="", data="{{}}", finish_reason="stop", tokens=1)
    await workers.score([s] * 2, ["a", "b"], lambda done: None)
asyncio.run(main())
"""


def test_workers_end_with_a_run_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _HANGING_RUN], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        keepers = [int(pid) for pid in run.stdout.readline().split()]
        assert len(keepers) == 2
        deadline = time.monotonic() + 30
        while len(below := [pid for keeper in keepers for pid in descendants(keeper)]) < 4:  # a guard and a runner each
            assert time.monotonic() < deadline
            time.sleep(0.01)
        processes = keepers + below
        run.send_signal(signal.SIGKILL)
        while any(_alive(pid) for pid in processes) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not [pid for pid in processes if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (
            "no_such_module:f",
            {},
            "cannot import `no_such_module`: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("tasks.rewards.arithmetic:last", {}, "has no function `last`; it has: last_number, only_number"),
        ("tasks.rewards.arithmetic", {}, "must be `package.module:function`, got `tasks.rewards.arithmetic`"),
        (f"{BAD}:asynchronous", {}, "must be a plain function, got an async one"),
        (f"{BAD}:length", {}, "missing a required argument: 'per_token'"),
        (f"{BAD}:good", {"colour": 1}, "got an unexpected keyword argument 'colour'"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_before_the_run(
    path: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as error:
        check_rewards(settings(path, options))
    assert str(error.value).startswith("reward.functions.f.path: ")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("1 / 0", "cannot import `broken`: ZeroDivisionError: division by zero (broken.py:1)"),
        ("raise SystemExit(2)", "cannot import `broken`: SystemExit: 2"),
        ("import os; os._exit(7)", "died while importing: nothing was printed, exit code 7"),
        ("import os, time; os.fork() or time.sleep(60)\ndef f(sample): return 1.0", "must start no process, but did"),
    ],
)
def test_a_module_that_breaks_while_importing_is_refused(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as error:
        check_rewards(settings("broken:f"))
    assert message in str(error.value)
    assert not _workers_that_import_from(tmp_path)


def _workers_that_import_from(folder: Path) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(folder) in (process / "environ").read_text(errors="replace"):
                found.append(process)
    return found


def test_the_digest_changes_with_the_options_and_with_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def digest(options: dict[str, Any]) -> str:
        workers = RewardWorkers(settings("own:f", options, workers=1))
        await workers.start()
        try:
            return workers.digest
        finally:
            await workers.stop()

    monkeypatch.syspath_prepend(tmp_path)
    source = tmp_path / "own.py"
    source.write_text("def f(sample, scale=1): return 1.0 * scale\n")
    first, again, scaled = (asyncio.run(digest(o)) for o in ({}, {}, {"scale": 2}))
    source.write_text("def f(sample, scale=1): return 2.0 * scale + 0\n")
    edited = asyncio.run(digest({}))
    assert first == again
    assert len({first, scaled, edited}) == 3


def test_the_reasoning_gym_scorer_is_the_tasks_own() -> None:
    metadata = '{"source_dataset": "basic_arithmetic"}'

    async def run() -> list[float | None]:
        workers = RewardWorkers(settings("tasks.rewards.reasoning_gym:score", workers=1))
        try:
            samples = [sample(r, answer="12", data=metadata) for r in (" 12 ", "7 + 5 = 12", "no")]
            return [r["f"].value for r in await workers.score(samples, list("abc"), lambda done: None)]
        finally:
            await workers.stop()

    assert asyncio.run(run()) == [1.0, 2 / 10, 0.0]


def run_stage(responses: list[str], functions: dict[str, RewardFunction]) -> Any:
    experiment = Experiment(reward=settings(functions=functions))
    output = asyncio.run(staged(experiment, responses, Counter()))
    assert output.table.schema.names == [c.name for c in reward.produces(experiment)]
    assert all(output.table.schema.field(name) == column(name).field for name in output.table.column_names)
    return output


async def staged(experiment: Experiment, responses: list[str], calls: Counter[str]) -> Any:
    """The stage's output; two responses are a group. `calls`: of reward functions, by group."""
    rows = pa.table(
        {
            "sample_id": [f"000001-000-{i:02d}" for i in range(len(responses))],
            "group_id": [f"g{i // 2}" for i in range(len(responses))],
            "prompt_text": ["2+2?"] * len(responses),
            "response_text": responses,
            "answer": ["4"] * len(responses),
            "prompt_data": ["{}"] * len(responses),
            "finish_reason": ["stop"] * len(responses),
            "response_ids": pa.array([[1, 2, 3]] * len(responses), pa.list_(pa.int32())),
        }
    )

    workers = RewardWorkers(experiment.reward)

    def spend(cost: str, group: str, count: int) -> None:
        assert cost == "reward_calls"
        calls[group] += count

    context: Any = SimpleNamespace(
        experiment=experiment, rewards=workers, progress=lambda done, total, unit: None, spend=spend
    )
    try:
        return await reward.run(Inputs({}, None, rows), context)
    finally:
        await workers.stop()


def test_the_stage_writes_each_reward_and_their_weighted_sum() -> None:
    functions = {
        "right": RewardFunction(path="tasks.rewards.arithmetic:last_number", weight=0.75),
        "form": RewardFunction(path="tasks.rewards.arithmetic:only_number", weight=0.25),
    }
    output = run_stage(["4", "2+2=4", "5", "none"], functions)
    assert output.table.to_pydict() == {
        "rewards": [1.0, 0.75, 0.25, 0.0],
        "reward_outcome": ["ok"] * 4,
        "reward_error": [""] * 4,
        "reward/right": [1.0, 1.0, 0.0, 0.0],
        "reward/form": [1.0, 0.0, 1.0, 0.0],
    }
    assert output.facts.metrics["reward/mean"] == 0.5
    assert output.facts.metrics["reward/std"] == pytest.approx((0.625 / 3) ** 0.5)
    assert output.facts.metrics["reward/right/mean"] == 0.5
    assert len(output.facts.reward_code_digest) == 64


def test_a_reward_that_failed_is_null_and_not_zero() -> None:
    functions = {"a": RewardFunction(path=f"{BAD}:half"), "b": RewardFunction(path=f"{BAD}:act")}
    output = run_stage(["good", "raises", "nan"], functions)
    assert output.table["rewards"].to_pylist() == [1.0, None, None]
    assert output.table["reward_outcome"].to_pylist() == ["ok", "error", "nonfinite"]
    assert output.table["reward_error"].to_pylist()[1].startswith("b: LookupError: no such word")
    assert output.table["reward/a"].to_pylist() == [0.5, 0.5, 0.5]
    assert output.table["reward/b"].to_pylist() == [0.5, None, None]
    metrics = output.facts.metrics
    assert (metrics["reward/mean"], metrics["reward/b/mean"]) == (1.0, 0.5)
    assert metrics["reward/failed_share"] == pytest.approx(2 / 3)


TWO = {"a": RewardFunction(path=f"{BAD}:half"), "b": RewardFunction(path=f"{BAD}:act")}


@pytest.mark.parametrize(
    ("responses", "changes", "calls"),
    [
        (["good"] * 4, {}, {"g0": 4, "g1": 4}),  # two functions on four samples
        (["good", "raises", "raises", "good"], {"max_failed_share": 0.25}, {"g0": 4, "g1": 2}),  # the last is spared
        (["good", "nan", "good", "good"], {"on_failure": "fail"}, {"g0": 4}),
        (["kills_the_guard"] * 12, {"functions": {"f": RewardFunction(path=f"{UNCONFINED}:act")}},
         dict.fromkeys(("g0", "g1", "g2", "g3", "g4"), 2) | {"g5": 1}),  # the first, and one after each of 10 restarts
    ],
    ids=["all pass", "too many failed", "one failed", "the workers die"],
)  # fmt: skip
def test_every_call_counts_for_its_group_also_of_a_stage_that_fails(
    responses: list[str], changes: dict[str, Any], calls: dict[str, int]
) -> None:
    experiment = Experiment(reward=settings(**{"functions": TWO, "workers": 1, **changes}))
    found: Counter[str] = Counter()
    with pytest.raises(StageError) if changes else contextlib.nullcontext():
        asyncio.run(staged(experiment, responses, found))
    assert found == calls


def test_a_call_that_is_cancelled_has_been_made() -> None:
    async def run() -> Counter[str]:
        found: Counter[str] = Counter()
        experiment = Experiment(reward=settings(functions=TWO, workers=1, timeout_s=600.0))
        hanging = asyncio.create_task(staged(experiment, ["good", "hangs", "good"], found))
        while found.total() < 4:
            await asyncio.sleep(0.01)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
        return found

    assert asyncio.run(run()) == {"g0": 4}


def test_a_weighted_sum_beyond_float_is_nonfinite() -> None:
    functions = {"a": RewardFunction(path=f"{BAD}:act", weight=10.0)}
    output = run_stage(["good", "huge"], functions)
    assert output.table["rewards"].to_pylist() == [5.0, None]
    assert output.table["reward_outcome"].to_pylist() == ["ok", "nonfinite"]
    assert output.table["reward_error"].to_pylist() == ["", "the weighted sum is inf"]


def test_metrics_of_a_batch_without_any_reward_hold_only_the_share() -> None:
    table = pa.table(
        {
            "rewards": pa.array([None], pa.float64()),
            "reward_outcome": ["error"],
            "reward/a": pa.array([None], pa.float64()),
        }
    )
    assert reward_metrics(table) == {"reward/failed_share": 1.0}
