"""A trainer killed at any of its points, or left with damaged checkpoints: every version is made once, the same again.

The trainer, the stage `update`, sealing, recovery and checkpoints are the product's; publishing and the rest of the
iteration are left out.
"""

import asyncio
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed as dist

from conf.errors import TrainerError
from conf.schema import Experiment, Model, Pool, Publish, Rollout, Schedule, Update
from data.checkpoints import read_checkpoint
from data.crash import ARMED
from data.ledger import Ledger, VersionRow
from data.refs import DatasetRef
from data.store import Facts, Store
from flows import recovery
from tasks.stage import Context, Inputs, NewPolicy
from tasks.trainer.client import Trainer
from tasks.update import Exporter, update
from tests.crash_points import SECOND_RANK, TRAINER
from tests.fakes.context import prompt_rows
from tests.fakes.stages import commit_version
from tests.tasks.training import SETTINGS, InProcess, commit_samples

UPDATES = 3
TRAINING = replace(SETTINGS, zero_stage=2, checkpoint_every=2)

# What takes seconds to import, once for all processes; the last three would be imported only when they are needed.
PRELOADED = [
    __name__,
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.llama.modeling_llama",
    "pandas",
]


@pytest.fixture(scope="module")
def model(tiny_model: Path, one_rank: None) -> Path:
    """The starting model, with this process ready to train it."""
    return tiny_model


@dataclass
class Life:
    """One process of a run: what it shares with the next one is the folder."""

    folder: Path
    experiment: Experiment
    trainer: Any
    ledger: Ledger
    store: Store
    messages: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.messages.append(text)
        with (self.folder / "messages").open("a") as file:
            file.write(f"{text}\n")

    async def run(self, updates: int = UPDATES) -> None:
        """From wherever the run stands to its end."""
        run: Any = SimpleNamespace(
            folder=self.folder, experiment=self.experiment, ledger=self.ledger, store=self.store,
            graph=SimpleNamespace(of_stage=lambda stage: [SimpleNamespace(name=stage, pool="train")]),
            held=self.ledger.committed,
            leases=SimpleNamespace(take=lambda *claim: nullcontext()),
            clock=lambda *attempt, **names: nullcontext(SimpleNamespace(stop=lambda: None)),
            services=SimpleNamespace(trainer=self.trainer), display=SimpleNamespace(message=self.say),
        )  # fmt: skip
        if head := recovery._head(run):
            await recovery._restore_trainer(run, head)
        if self.ledger.committed() is None:
            exporter = Exporter(
                self.trainer, self.ledger, self.experiment, self.folder, "digest", lambda name, value: None
            )
            policy = await exporter.seal_version(
                recovery.START_KEY, parent=None, optimizer_step=0, dataset="", probe_ids=[1, 2, 3]
            )
            commit_version(self.ledger, policy.number)
        for iteration in range(1, updates + 1):
            ref = self._draw(iteration)
            if self.store.committed(iteration, "update") is None:
                output = await update.run(
                    Inputs({"advantage": ref}, ref, self.store.read(ref)), self._context(iteration)
                )
                assert isinstance(output, NewPolicy)
                self.store.commit_policy(iteration, "update", output.policy, parents=[ref], facts=output.facts)
                commit_version(self.ledger, output.policy.number)
            await recovery.checkpoint_if_due(run, iteration)

    def _draw(self, iteration: int) -> DatasetRef:
        """The iteration's prompts and samples, committed once."""
        if self.store.committed(iteration, "prompts") is None:
            facts = Facts(cursor={"position": iteration})
            self.store.commit_rows(iteration, "prompts", prompt_rows([1, 2]), key="group_id", facts=facts)
        return commit_samples(self.store, iteration, seed=iteration)

    def _context(self, iteration: int) -> Context:
        unused: Any = None
        policy = self.ledger.committed()
        assert policy is not None
        return Context(
            experiment=self.experiment, run_dir=self.folder, store=self.store, ledger=self.ledger, prompts=unused,
            engines=unused, trainer=self.trainer, rewards=unused, config_digest="digest", iteration=iteration,
            node="update", policy=policy, progress=lambda *step: None, measure=lambda name, value: None,
            spend=lambda cost, group, count: None,
        )  # fmt: skip


def experiment(model: Path, ranks: int, settings: Update = TRAINING) -> Experiment:
    return Experiment(
        model=Model(path=str(model)), rollout=Rollout(temperature=0.8), update=settings,
        publish=Publish(dtype="float32", probe_tokens=4),
        schedule=Schedule(kind="async", max_lag=100),  # all its samples are of version 0
        pools={"train": Pool(roles=["train"], ranks=ranks, threads=1)},
    )  # fmt: skip


@contextmanager
def life(folder: Path, experiment: Experiment, trainer: Any) -> Iterator[Life]:
    folder.mkdir(parents=True, exist_ok=True)
    ledger = Ledger(folder / "ledger.sqlite")
    try:
        ledger.open_run("test", "digest", "resolved")
        yield Life(folder, experiment, trainer, ledger, Store(folder, "test"))
    finally:
        ledger.close()


@contextmanager
def without_prefect() -> Iterator[None]:
    """The checkpoint's task as the function it is."""
    body = recovery._checkpoint.fn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recovery, "_checkpoint", lambda what: body(what.unquote()))
        patch.setattr(recovery, "_probe_ids", lambda run: [1, 2, 3])
        yield


@pytest.fixture(scope="module", autouse=True)
def no_prefect() -> Iterator[None]:
    with without_prefect():
        yield


# ------------------------------------------------------------------ kill -9 at every point


def one_process(folder: Path, model: Path, point: str) -> None:
    """A process with the run and its one rank in it, killed at the point. The body of a forked child."""
    os.environ.update({ARMED: point, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"})
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as group, without_prefect():
        dist.init_process_group("gloo", init_method=f"file://{group}/rendezvous", rank=0, world_size=1)
        with life(folder, experiment(model, 1), InProcess(folder, model, TRAINING)) as alive:
            asyncio.run(alive.run())
        dist.destroy_process_group()


@dataclass
class Chain:
    """What one run left, killed at every point and then let through; and the same run undisturbed."""

    killed: Path
    undisturbed: Path
    codes: list[int | None]  # how each process ended
    messages: list[list[str]]  # what each said


@pytest.fixture(scope="module")
def chain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    folder = tmp_path_factory.mktemp("runs")
    with life(folder / "undisturbed", experiment(model, 1), None) as alive:
        alive.trainer = InProcess(alive.folder, model, TRAINING)
        asyncio.run(alive.run())
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    chain = Chain(folder / "killed", folder / "undisturbed", [], [])
    chain.killed.mkdir()
    for point in (*TRAINER, "none"):
        (chain.killed / "messages").write_text("")
        process = context.Process(target=one_process, args=(chain.killed, model, point))
        process.start()
        process.join(120)
        process.kill()
        chain.codes.append(process.exitcode)
        chain.messages.append((chain.killed / "messages").read_text().splitlines())
    return chain


def versions(folder: Path) -> list[VersionRow]:
    ledger = Ledger(folder / "ledger.sqlite", read_only=True)
    try:
        return ledger.versions()
    finally:
        ledger.close()


def test_each_point_killed_the_process(chain: Chain) -> None:
    assert dict(zip((*TRAINER, "none"), chain.codes, strict=True)) == {
        **dict.fromkeys(TRAINER, -signal.SIGKILL), "none": 0
    }  # fmt: skip


def test_every_update_made_exactly_one_version_with_the_undisturbed_runs_content(chain: Chain) -> None:
    """Number, key, state, parent, optimizer step and content digest are all equal, so no update was applied twice."""
    made = versions(chain.killed)
    assert made == versions(chain.undisturbed)
    assert [(version.number, version.optimizer_step) for version in made] == [(0, 0), (1, 4), (2, 8), (3, 12)]
    assert len({version.content for version in made}) == UPDATES + 1


def test_the_trainer_comes_back_bit_by_bit_from_the_start_and_from_a_checkpoint(chain: Chain) -> None:
    restarts = dict(zip((*TRAINER, "none"), chain.messages, strict=True))
    assert not [text for texts in chain.messages for text in texts if "warning" in text]
    replayed = [text.split("iteration ")[1][0] for text in restarts["trainer/2/checkpoint.after/0"] if "replay" in text]
    assert replayed == ["1", "2"]  # no checkpoint yet: the one before was killed before it had its name
    assert "replaying" not in " ".join(restarts["trainer/3/step.before/0"])  # the checkpoint after update 2 is whole
    assert restarts["none"][-1].startswith("the trainer is at 000002")
    assert restarts["none"][-1].endswith("bit by bit")


def test_the_checkpoint_is_the_undisturbed_runs_byte_for_byte(chain: Chain) -> None:
    killed = read_checkpoint(chain.killed / "checkpoints" / "000002")
    undisturbed = read_checkpoint(chain.undisturbed / "checkpoints" / "000002")
    assert killed.files == undisturbed.files
    assert (killed.state["step"], killed.state["facts"]) == (undisturbed.state["step"], undisturbed.state["facts"])
    assert [path.name for path in killed.folder.parent.iterdir()] == ["000002"]


def test_the_death_of_the_second_of_two_ranks_is_a_failed_command_and_the_run_goes_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = experiment(model, ranks=2)

    async def live(name: str) -> str:
        """How it ended."""
        trainer = Trainer(settings, tmp_path / name, "test")
        with life(tmp_path / name, settings, trainer) as alive:
            try:
                await trainer.start()
                await alive.run(updates=2)
            except TrainerError as error:
                return str(error).splitlines()[0]
            finally:
                await trainer.stop()
        return "finished"

    def made(name: str) -> list[tuple[str, str, int, str | None]]:
        """Without those whose export was cut off: they are given up, and the next attempt has a new number."""
        return [
            (v.key, v.state, v.optimizer_step, v.content) for v in versions(tmp_path / name) if v.state != "ABANDONED"
        ]

    for point in SECOND_RANK:
        monkeypatch.setenv(ARMED, point)
        assert "rank 1 of 2 ended with signal SIGKILL" in asyncio.run(live("killed")), point
    monkeypatch.delenv(ARMED)
    assert asyncio.run(live("killed")) == asyncio.run(live("undisturbed")) == "finished"
    assert made("killed") == made("undisturbed")
    assert [step for _, _, step, _ in made("killed")] == [0, 4, 8]
    files = [read_checkpoint(tmp_path / name / "checkpoints" / "000002").files for name in ("killed", "undisturbed")]
    assert files[0] == files[1]
    assert len(files[0]) == 2


# ------------------------------------------------------------------ damaged checkpoints; other ranks


@pytest.fixture
def finished(model: Path, tmp_path: Path) -> Path:
    """A run of four updates with checkpoints after 2, 3 and 4 of them."""
    settings = experiment(model, 1, replace(TRAINING, checkpoint_every=1, keep_checkpoints=3))
    with life(tmp_path / "run", settings, InProcess(tmp_path / "run", model, settings.update)) as alive:
        asyncio.run(alive.run(updates=4))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["000002", "000003", "000004"]
    return tmp_path / "run"


def resumed(folder: Path, model: Path, settings: Update = TRAINING) -> list[str]:
    """What recovery says on the finished run."""
    with life(folder, experiment(model, 1, settings), InProcess(folder, model, settings)) as alive:
        before = alive.ledger.versions()
        asyncio.run(alive.run(updates=4))
        assert alive.ledger.versions() == before
        return alive.messages


def damage(folder: Path, name: str) -> None:
    path = next((folder / "checkpoints" / name).glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def test_a_damaged_checkpoint_is_named_and_the_next_older_one_restored(finished: Path, model: Path) -> None:
    damage(finished, "000004")
    (finished / "checkpoints" / "000003" / "COMPLETE").unlink()
    said = resumed(finished, model)
    assert "000004: state-00001-of-00001.safetensors must have SHA-256" in said[0]
    assert said[0].startswith("warning: checkpoint")
    assert said[0].endswith("; restoring 000003")
    assert "000003 is incomplete: expected a file COMPLETE in it; restoring 000002" in said[1]
    assert [text for text in said if "replaying" in text] == [
        f"replaying the update of iteration {number} from its recorded dataset" for number in (3, 4)
    ]
    assert said[-1].startswith("the trainer is at 000004")
    assert said[-1].endswith("bit by bit")
    # Put aside, and written again by the run that went on.
    assert {path.name for path in (finished / "checkpoints").iterdir()} == {
        "000002", "000003.damaged", "000004", "000004.damaged",
    }  # fmt: skip
    assert resumed(finished, model) == [said[-1]]


def test_without_any_whole_checkpoint_the_run_is_replayed_from_its_start(finished: Path, model: Path) -> None:
    for name in ("000002", "000003", "000004"):
        damage(finished, name)
    said = resumed(finished, model)
    assert said[2].endswith("; none is left: replaying from the start")
    assert len([text for text in said if "replaying the update" in text]) == 4
    assert said[-1].endswith("bit by bit")


def test_a_checkpoint_under_another_ones_name_is_not_taken_for_it(finished: Path, model: Path) -> None:
    shutil.rmtree(finished / "checkpoints" / "000004")
    (finished / "checkpoints" / "000002").rename(finished / "checkpoints" / "000004")
    said = resumed(finished, model)
    assert "000004 must be of (run, iteration) ('test', 4), is of ('test', 2); restoring 000003" in said[0]
    assert said[-1].endswith("bit by bit")


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_goes_on_under_another_zero_stage(finished: Path, model: Path, stage: int) -> None:
    assert resumed(finished, model, replace(TRAINING, zero_stage=stage))[-1].endswith("bit by bit")


def test_two_ranks_go_on_where_one_stopped_and_their_replay_says_how_far_it_is_off(finished: Path, model: Path) -> None:
    damage(finished, "000004")
    settings = experiment(model, 2)

    async def go_on() -> list[str]:
        trainer = Trainer(settings, finished, "test")
        with life(finished, settings, trainer) as alive:
            try:
                await trainer.start()
                await alive.run(updates=5)
            finally:
                await trainer.stop()
            assert [(v.number, v.optimizer_step) for v in alive.ledger.versions()] == [
                (number, 4 * number) for number in range(6)
            ]
            return alive.messages

    said = asyncio.run(go_on())
    assert "restoring 000003" in said[0]
    assert "replaying the update of iteration 4" in said[1]
    assert "replay was inexact" in said[2] or said[2].endswith("bit by bit")
