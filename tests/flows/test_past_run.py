"""A past run predicted from its rows: by hand, one cause at a time, and from those of a run on a real server."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from prefect import flow

from data.accounts import SessionRow
from data.ledger import Ledger
from flows.forecast import Forecast
from flows.past_run import PastRun, past_run
from flows.run import RUN, _iterations
from flows.steps import Took
from flows.waits import HANDOVER, POOL, QUEUE, REWARD, UPSTREAM, WEIGHTS
from tests.fakes.recorded import (
    CO_LOCATED,
    LAG_2,
    ONE_OFF,
    STREAMED,
    SYNC,
    at_once,
    forecast,
    predicted,
    recorded,
    row,
    settings,
    took,
)
from tests.fakes.runs import noop_run
from tests.fakes.stages import paced


def test_what_passes_between_two_stages_is_the_second_ones_also_where_others_work_meanwhile() -> None:
    """One step off; each stage begins 1 s after what it waited for, and in most of those seconds another one works."""
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 1, "prompts"),
        *at_once(3, 12, "prompts"),
        row(1, "rollout", 0, 11, (UPSTREAM, 0, 1)),
        row(1, "reward", 0, 14, (UPSTREAM, 0, 12)),
        row(1, "update", 0, 21, (UPSTREAM, 0, 15)),
        row(1, "publish", 0, 23, (WEIGHTS, 0, 22)),
        row(2, "rollout", 1, 22, (UPSTREAM, 1, 2), (POOL, 2, 12)),
        row(2, "reward", 1, 25, (UPSTREAM, 1, 23)),
        row(2, "update", 1, 32, (UPSTREAM, 1, 26)),
        row(2, "publish", 1, 35, (WEIGHTS, 1, 33), (POOL, 33, 34)),
        row(3, "rollout", 12, 34, (UPSTREAM, 12, 13), (POOL, 13, 23), (WEIGHTS, 23, 24)),
        row(3, "reward", 12, 37, (UPSTREAM, 12, 35)),
        row(3, "update", 12, 44, (UPSTREAM, 12, 38)),
        row(3, "publish", 12, 46, (WEIGHTS, 12, 45)),
    ]
    past = recorded(settings(*ONE_OFF), rows, [24, 12, 10.5])
    assert took(past, "rollout") == [Took(10, dispatch=1)] * 3
    assert took(past, "update") == [Took(6, dispatch=1)] * 3
    assert took(past, "publish") == [Took(1, dispatch=1)] * 3  # of which the second waited for its pool too
    assert past.outside == 0.5  # after the last; that nothing worked from 0 to 1 is the rollout's
    assert predicted(past) == past.makespan == 46.5
    assert predicted(past, *SYNC) == 3 * (11 + 3 + 7 + 2) + 0.5


def test_what_is_between_two_iterations_in_step_is_the_next_rollouts() -> None:
    """The second iteration opens as the first one trains; its rollout begins 3 s after the publish."""
    rows = [
        *at_once(1, 1, "prompts"),
        row(1, "rollout", 1, 11),
        row(1, "reward", 1, 14, (UPSTREAM, 1, 12)),
        row(1, "update", 1, 20, (UPSTREAM, 1, 14)),
        row(1, "publish", 1, 21, (WEIGHTS, 1, 20)),
        *at_once(2, 14, "prompts"),
        row(2, "rollout", 14, 34, (WEIGHTS, 14, 24)),
        row(2, "reward", 14, 37, (UPSTREAM, 14, 35)),
        row(2, "update", 14, 43, (UPSTREAM, 14, 37)),
        row(2, "publish", 14, 44, (WEIGHTS, 14, 43)),
    ]
    past = recorded(settings(), rows, [24, 23])
    assert took(past, "rollout") == [Took(10), Took(10, dispatch=3)]
    assert past.outside == 1 + 3  # before the first stage, and after the last
    assert predicted(past) == past.makespan == 47
    # rollouts to 23, the publish of 1 to 24, reward 1 + 2, update 6, publish 1
    assert predicted(past, *ONE_OFF) == 33 + 4


def test_how_long_a_pool_that_is_free_is_not_taken_counts_where_a_stage_waited_for_it() -> None:
    """Co-located, one step off. The update of 1 and its publish have the pool 1 s after the one before has left it."""
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 0, "prompts"),
        *at_once(3, 10, "prompts"),
        row(1, "rollout", 0, 10),
        row(1, "reward", 0, 11, (UPSTREAM, 0, 10)),
        row(1, "update", 0, 26, (UPSTREAM, 0, 11), (POOL, 11, 21)),
        row(1, "publish", 0, 33, (WEIGHTS, 0, 27), (POOL, 27, 32)),
        row(2, "rollout", 0, 20, (POOL, 0, 10)),
        row(2, "reward", 0, 21, (UPSTREAM, 0, 20)),
        row(2, "update", 0, 31, (UPSTREAM, 0, 26)),
        row(2, "publish", 0, 34, (WEIGHTS, 0, 33)),
        row(3, "rollout", 10, 44, (POOL, 10, 20), (WEIGHTS, 20, 34)),
        row(3, "reward", 10, 45, (UPSTREAM, 10, 44)),
        row(3, "update", 10, 50, (UPSTREAM, 10, 45)),
        row(3, "publish", 10, 52, (WEIGHTS, 10, 51)),
    ]
    past = recorded(settings(*ONE_OFF, *CO_LOCATED), rows, [33, 1, 18])
    assert took(past, "update") == [Took(5, wake=1), Took(5), Took(5)]
    assert took(past, "publish") == [Took(1, dispatch=1, wake=1), Took(1), Took(1, dispatch=1)]
    assert took(past, "rollout")[2] == Took(10, dispatch=1)
    assert predicted(past) == past.makespan == 52


def test_a_rollout_in_the_tail_of_another_took_all_of_its_time() -> None:
    """The publish of 1 comes at 11.5 and waits for rollout 2; rollout 3 may begin at 12 and waits behind it."""
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 0, "prompts"),
        *at_once(3, 6, "prompts"),
        *at_once(1, 10, "reward"),
        *at_once(2, 16, "reward"),
        *at_once(3, 27, "reward"),
        row(1, "rollout", 0, 10),
        row(1, "update", 0, 11.5, (UPSTREAM, 0, 10)),
        row(1, "publish", 0, 17, (WEIGHTS, 0, 11.5), (POOL, 11.5, 16)),
        row(2, "rollout", 0, 16, (POOL, 0, 6)),
        row(2, "update", 0, 17.5, (UPSTREAM, 0, 16)),
        row(2, "publish", 0, 28, (WEIGHTS, 0, 17.5), (POOL, 17.5, 27)),
        row(3, "rollout", 6, 27, (POOL, 6, 12), (POOL, 12, 17)),
        row(3, "update", 6, 28.5, (UPSTREAM, 6, 27)),
        row(3, "publish", 6, 29.5, (WEIGHTS, 6, 28.5)),
    ]
    past = recorded(settings(*LAG_2), rows, [17, 11, 1.5])
    assert took(past, "rollout") == [Took(10, tail=4), Took(10, tail=4), Took(10)]
    assert predicted(past) == past.makespan == 29.5
    assert predicted(past, *SYNC) == 3 * (10 + 1.5 + 1)


def test_under_rebuild_a_publish_goes_beside_the_rollout_and_under_pin_it_waits() -> None:
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 0, "prompts"),
        *at_once(3, 10, "prompts"),
        *at_once(1, 10, "reward"),
        *at_once(2, 20, "reward"),
        *at_once(3, 30, "reward"),
        row(1, "rollout", 0, 10),
        row(1, "update", 0, 14, (UPSTREAM, 0, 10)),
        row(1, "publish", 0, 17, (WEIGHTS, 0, 14)),
        row(2, "rollout", 0, 20, (POOL, 0, 10)),
        row(2, "update", 0, 24, (UPSTREAM, 0, 20)),
        row(2, "publish", 0, 27, (WEIGHTS, 0, 24)),
        row(3, "rollout", 10, 30, (POOL, 10, 20)),
        row(3, "update", 10, 34, (UPSTREAM, 10, 30)),
        row(3, "publish", 10, 37, (WEIGHTS, 10, 34)),
    ]
    past = recorded(settings(*ONE_OFF, "rollout.kv_policy=rebuild"), rows, [17, 10, 10])
    assert predicted(past) == past.makespan == 37
    assert predicted(past, *ONE_OFF) == 23 + 10 + 4 + 3  # the publish of 1 from 20 to 23, and only then rollout 3


def test_what_a_stage_does_beside_its_rollout_takes_the_trainer_from_an_earlier_update() -> None:
    """The first group of a rollout comes after 5 s and keeps the trainer for 4 s, the second at the end for 2 s."""
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 0, "prompts"),
        *at_once(3, 10, "prompts"),
        *at_once(1, 25, "publish"),
        *at_once(2, 37, "publish"),
        *at_once(3, 45, "publish"),
        row(1, "rollout", 0, 10),
        row(1, "reward", 0, 17, (UPSTREAM, 0, 10)),
        row(1, "reference", 0, 12, (UPSTREAM, 0, 5), (UPSTREAM, 9, 10)),
        row(1, "update", 0, 25, (UPSTREAM, 0, 17), (POOL, 17, 19)),  # reference 2 has the trainer from 15 to 19
        row(2, "rollout", 0, 20, (POOL, 0, 10)),
        row(2, "reward", 0, 27, (UPSTREAM, 0, 20)),
        row(2, "reference", 0, 27, (UPSTREAM, 0, 15), (UPSTREAM, 19, 20), (POOL, 20, 25)),
        row(2, "update", 0, 37, (UPSTREAM, 0, 27), (POOL, 27, 31)),
        row(3, "rollout", 10, 30, (POOL, 10, 20)),
        row(3, "reward", 10, 37, (UPSTREAM, 10, 30)),
        row(3, "reference", 10, 39, (UPSTREAM, 10, 25), (POOL, 25, 27), (POOL, 31, 37)),
        row(3, "update", 10, 45, (UPSTREAM, 10, 39)),
    ]
    past = recorded(settings(*LAG_2, nodes=STREAMED), rows, [25, 12, 8])
    assert took(past, "reference") == [Took(2, early=((5, 4),))] * 3
    assert predicted(past) == past.makespan == 45
    assert predicted(past, *SYNC) == 3 * (10 + 7 + 6)
    # On one pool nothing is beside the rollout: it comes after, also of reward 2 and 3.
    assert predicted(past, *SYNC, *CO_LOCATED) == 3 * (10 + 7 + 6)


def test_a_stage_on_its_way_to_the_trainer_or_done_with_it_does_not_have_it() -> None:
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 0, "prompts"),
        *at_once(1, 40, "publish"),
        *at_once(2, 50, "publish"),
        *at_once(1, 10, "reward"),
        *at_once(2, 20, "reward"),
        row(1, "rollout", 0, 10),
        row(1, "reference", 0, 10, (UPSTREAM, 0, 10)),
        row(1, "update", 0, 40, (UPSTREAM, 0, 19)),
        row(2, "rollout", 0, 20, (POOL, 0, 10)),
        # a group at 15 that it has computed by 19; from 20 to 22 it commits, while the update works
        row(2, "reference", 0, 22, (UPSTREAM, 0, 15), (UPSTREAM, 19, 20)),
        row(2, "update", 0, 50, (UPSTREAM, 0, 22), (POOL, 22, 40)),
    ]
    past = recorded(settings(*LAG_2, nodes=STREAMED), rows, [40, 10])
    assert took(past, "reference")[1] == Took(0, dispatch=2, early=((5, 4),))
    assert predicted(past) == past.makespan == 50


def test_a_wait_for_room_in_the_queue_is_found_anew_from_what_was_generated() -> None:
    """The queue holds 500 tokens; a batch may have 400 and came to 100."""
    rows = [
        *at_once(1, 0, "prompts"),
        *at_once(2, 0, "prompts"),
        *at_once(3, 10, "prompts"),
        *[stage for n, at in ((1, 10), (2, 20), (3, 45)) for stage in at_once(n, at, "reward")],
        *[stage for n, at in ((1, 35), (2, 60), (3, 85)) for stage in at_once(n, at, "publish")],
        row(1, "rollout", 0, 10),
        row(2, "rollout", 0, 20, (POOL, 0, 10)),
        row(3, "rollout", 10, 45, (POOL, 10, 20), (QUEUE, 20, 35)),
        row(1, "update", 0, 35, (UPSTREAM, 0, 10)),
        row(2, "update", 0, 60, (UPSTREAM, 0, 35)),
        row(3, "update", 10, 85, (UPSTREAM, 10, 60)),
    ]
    sizes = ["prompts.per_iteration=2", "rollout.samples_per_prompt=2", "rollout.max_new_tokens=100"]
    queued = ["update.mini_batches=1", "schedule.queue_tokens=500"]
    for tokens in (101, 100):
        experiment = settings(*LAG_2, *sizes, *queued)
        rate = {"throughput/generated_tokens_per_s": (tokens + 7) / 25, "rollout/discarded_tokens": 7}
        past = recorded(experiment, rows, [25, 25, 25], SessionRow(-5, 0, 85), metrics=rate)
        assert [one.tokens for one in took(past, "rollout")] == [tokens] * 3
        assert took(past, "rollout")[2].work == 10
        assert predicted(past) == 85
        third = forecast(past).case(forecast(past).declared, experiment.schedule, 3).result.slots
        assert [slot.start for slot in third if slot.node == "rollout"][2] == (35 if tokens == 101 else 20)


def test_a_stage_that_was_killed_before_it_had_a_row_leaves_its_time_to_the_next() -> None:
    rows = [
        *at_once(1, 0, "prompts"),
        row(1, "rollout", 0, 10),
        row(1, "update", 0, 18, (UPSTREAM, 0, 10), (REWARD, 10, 12)),
        row(1, "publish", 0, 19, (WEIGHTS, 0, 18)),
    ]
    past = recorded(settings(), rows, [19])
    assert "reward" not in past.times
    assert predicted(past) == past.makespan == 19


def test_a_co_located_run_gives_the_seconds_of_its_hand_overs() -> None:
    rows = []
    for n, opened, began in ((1, 0, 0), (2, 23, 51)):
        rolled, trained = began + 20, began + 43
        rows += [
            *at_once(n, opened, "prompts"),
            row(n, "rollout", opened, rolled, (WEIGHTS, opened, began)),
            *at_once(n, rolled, "reward"),
            row(n, "update", opened, trained, (UPSTREAM, opened, rolled), (HANDOVER, rolled, rolled + 3)),
            row(n, "publish", opened, began + 50, (WEIGHTS, opened, trained), (HANDOVER, trained, trained + 5)),
        ]
    past = recorded(settings(*CO_LOCATED), rows, [51, 51])
    assert (past.hand_over, past.outside) == (4, 1)
    assert predicted(past) == past.makespan == 102
    f = Forecast(past.experiment, replace(forecast(past).costs, hand_over=0.0))
    assert f.case(f.declared, f.experiment.schedule, 2).result.makespan == 102 - 4 * 4


def test_on_one_pool_a_publish_waits_for_the_checkpoint_as_for_its_inputs() -> None:
    rows = [
        *at_once(1, 0, "prompts"),
        row(1, "rollout", 0, 10),
        *at_once(1, 10, "reward"),
        row(1, "update", 0, 16, (UPSTREAM, 0, 10)),
        row(1, "checkpoint", 17, 20),
        row(1, "publish", 0, 22, (WEIGHTS, 0, 16), (POOL, 16, 21)),
    ]
    every = "update.checkpoint_every=1"
    past = recorded(settings(*CO_LOCATED, every), rows, [22])
    assert took(past, "checkpoint") == [Took(3, dispatch=1)]
    assert took(past, "publish") == [Took(1, dispatch=1)]
    assert predicted(past) == past.makespan == 22
    assert predicted(past, *SYNC, every) == 20  # on pools of their own the publish is from 17 to 18, beside it


# -- a run on a real Prefect server


@flow(name="recorded-run")
async def recorded_run(folder: str, overrides: list[str]) -> None:
    with noop_run(Path(folder), paced(0.4, 0.1, 0.4), 4, overrides) as run:
        RUN.set(run)
        await _iterations(run)


def read(folder: Path, overrides: Sequence[str]) -> PastRun:
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        sizes = ["prompts.per_iteration=2", "rollout.samples_per_prompt=2", "update.mini_batches=1"]
        experiment, accounts = settings(*sizes, *overrides), ledger.accounts
        return past_run(experiment, accounts.metrics(), accounts.stages(), accounts.sessions())
    finally:
        ledger.close()


@pytest.mark.parametrize("overrides", [[], ONE_OFF, LAG_2, [*LAG_2, *CO_LOCATED]], ids=["sync", "one", "async", "both"])
def test_a_run_is_predicted_from_what_it_recorded(prefect_api: str, tmp_path: Path, overrides: Sequence[str]) -> None:
    """However long its stages and what is between them took: the replay has the same times."""
    asyncio.run(recorded_run(str(tmp_path / "r"), list(overrides)))
    past = read(tmp_path / "r", overrides)
    assert past.iterations == 4
    assert past.as_it_went is None
    assert predicted(past) == pytest.approx(past.makespan, rel=0.1)
    f = forecast(past)
    assert f.case(f.declared, f.experiment.schedule, 4).samples_per_s == pytest.approx(16 / predicted(past))
