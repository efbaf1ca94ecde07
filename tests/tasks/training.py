"""A small training dataset, trainers on a tiny model, and (run as a program) the ranks of a group: for tests only."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import distributed as dist

from conf.errors import TrainerError
from conf.schema import KL, Experiment, Model, Pool, Rollout, Update
from data.columns import COLUMNS
from data.files import map_table, write_table
from data.package import Probe, Receipt
from data.refs import DatasetRef
from data.store import Facts, Store
from tasks.trainer.client import Export, Logprobs, Progress, UpdateResult
from tasks.trainer.service import Service
from tasks.trainer.spec import Spec

ROOT = Path(__file__).parents[2]
RUN = "run"
VERSION = "000000-0123456789ab"
SETTINGS = Update(
    learning_rate=1e-2,  # large, so that a wrong gradient shows
    weight_decay=0.1,
    warmup_steps=3,
    epochs=2,
    mini_batches=2,
    micro_batch_tokens=60,
    clip_ratio=0.1,
    max_grad_norm=0.5,
    old_logprobs="recomputed",
    kl=KL(coef=0.1, estimator="k3"),
    precision="fp32",
    max_logprob_diff=10.0,
)


def under(stage: int) -> Update:
    """SETTINGS under a ZeRO stage. By default ZeRO-3 would keep all of so small a model whole on every rank."""
    small = {"param_persistence_threshold": 500, "max_live_parameters": 0, "max_reuse_distance": 0}
    partitioned = {"zero_optimization": {f"stage3_{name}": value for name, value in small.items()}}
    return replace(SETTINGS, zero_stage=stage, deepspeed=partitioned if stage == 3 else {})


def quiet(done: int, total: int) -> None:
    pass


def experiment(model: Path, update: Update, ranks: int = 1) -> Experiment:
    return Experiment(
        model=Model(path=str(model)),
        rollout=Rollout(temperature=0.8),
        update=update,
        pools={"train": Pool(roles=["train"], ranks=ranks, threads=1)},
    )


def commit_samples(
    store: Store, iteration: int, change: Callable[[dict[str, list[Any]]], None] | None = None, seed: int = 0
) -> DatasetRef:
    """Four groups of three samples with prompts of 3 to 6 and responses of 2 to 5 tokens, ready to train on.

    The last token of each response is masked out; every advantage of the last group is 0.
    """
    random = np.random.default_rng(seed)
    rows: dict[str, list[Any]] = {name: [] for name in TOKENS}
    for g in range(4):
        prompt = random.integers(0, 256, 3 + g).tolist()
        for k in range(3):
            n = 2 + (g + k) % 4
            rows["sample_id"].append(f"i{iteration}-g{g}-s{k}")
            rows["group_id"].append(f"i{iteration}-g{g}")
            rows["prompt_ids"].append(prompt)
            rows["response_ids"].append(random.integers(0, 256, n).tolist())
            rows["response_mask"].append([True] * (n - 1) + [False])
            for name in ("behavior_logprobs", "old_logprobs", "ref_logprobs"):
                rows[name].append((-random.uniform(5, 7, n)).tolist())
            rows["advantages"].append([0.0 if g == 3 else float(random.normal())] * n)
            rows["version_spans"].append([{"label": VERSION, "start": 0, "end": n}])
            rows["policy_version"].append(0)
            rows["finish_reason"].append("stop")
    if change:
        change(rows)
    schema = pa.schema([COLUMNS[name].field for name in rows])
    return store.commit_rows(iteration, "training", pa.table(rows, schema=schema), key="sample_id", facts=Facts())


TOKENS = [
    "sample_id", "group_id", "prompt_ids", "response_ids", "response_mask", "behavior_logprobs", "old_logprobs",
    "ref_logprobs", "advantages", "version_spans", "policy_version", "finish_reason",
]  # fmt: skip


def run_ranks(folder: Path, model: Path, *writers: str) -> None:
    """This file as a program, by two ranks."""
    processes, logs = [], [folder / f"rank{rank}.log" for rank in (0, 1)]
    (folder / "rendezvous").unlink(missing_ok=True)
    for rank, path in enumerate(logs):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        own |= {"GLOO_SOCKET_IFNAME": "lo"}  # or gloo asks how the machine's name resolves
        with path.open("wb") as log:
            command = [sys.executable, "-m", "tests.tasks.training", str(folder), str(model), *writers]
            environment = {**os.environ, **own, "DS_ACCELERATOR": "cpu"}
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    try:
        codes = [process.wait(240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    tails = "".join(path.read_text()[-3000:] for path in logs)
    assert codes == [0, 0], f"{tails}\nthe ranks must end with 0, got {codes}"


class Local:
    """The trainer's commands, executed in this process as a rank executes them."""

    def __init__(self, run_dir: Path, model: Path, update: Update, run: str = RUN) -> None:
        self.folder = run_dir / "socket"
        self.folder.mkdir(parents=True, exist_ok=True)
        spec = Spec(str(run_dir), run, str(model), "cpu", 0, 0.8, update)
        self.service = Service(spec, dist.group.WORLD, self.folder)

    def update(self, ref: DatasetRef, number: int) -> dict[str, Any]:
        return self.service.execute("update", {"dataset": ref.to_json(), "number": number}, quiet)

    def logprobs(self, rows: DatasetRef | pa.Table, model: str) -> tuple[list[list[float]], str]:
        if isinstance(rows, DatasetRef):
            what: dict[str, Any] = {"dataset": rows.to_json()}
        else:
            what = {"file": str(self.folder / "rows.arrow")}
            write_table(rows, rows.schema, Path(what["file"]))
        answer = self.service.execute("logprobs", {**what, "model": model}, quiet)
        dist.barrier()  # rank 0 writes it
        return map_table(Path(answer["path"]))["logprobs"].to_pylist(), answer["digest"]

    def export(self, staging: Path, dtype: str = "float32", probe_ids: Sequence[int] = (1, 2, 3)) -> dict[str, Any]:
        staging.mkdir(parents=True, exist_ok=True)
        arguments = {"staging": str(staging), "dtype": dtype, "probe_ids": list(probe_ids)}
        return self.service.execute("export", arguments, quiet)

    def checkpoint(self, folder: Path, facts: dict[str, Any]) -> None:
        self.service.execute("checkpoint", {"folder": str(folder), "facts": facts}, quiet)

    def restore(self, folder: Path) -> dict[str, Any]:
        return self.service.execute("restore", {"folder": str(folder)}, quiet)

    def weights(self) -> dict[str, torch.Tensor]:
        """Not under ZeRO-3, where no rank has them."""
        return {n: p.detach().clone() for n, p in self.service.learner.policy.lm.named_parameters()}


class InProcess:
    """The trainer's client without the process group behind it; `updates` and `exports` count what was really done."""

    def __init__(self, run_dir: Path, model: Path, settings: Update) -> None:
        self.local = Local(run_dir, model, settings, run="test")
        self.exports = 0

    async def update(self, dataset: DatasetRef, number: int, progress: Progress) -> UpdateResult:
        return UpdateResult(**self.local.update(dataset, number))

    async def export(self, staging: Path, dtype: str, probe_ids: Sequence[int]) -> Export:
        self.exports += 1
        answer = self.local.export(staging, dtype, probe_ids)
        receipts = tuple(Receipt.from_json(receipt) for receipt in answer["receipts"])
        return Export(receipts, answer["tied"], Probe.from_json(answer["probe"]))

    async def logprobs(self, rows: DatasetRef | pa.Table, model: str, progress: Progress) -> Logprobs:
        values, digest = self.local.logprobs(rows, model)
        return Logprobs(pa.table({"logprobs": pa.array(values, pa.list_(pa.float32()))}), digest)

    async def checkpoint(self, folder: Path, facts: Mapping[str, Any]) -> None:
        self.local.checkpoint(folder, dict(facts))

    async def restore(self, folder: Path) -> dict[str, Any]:
        return self.local.restore(folder)


def train_every_stage(folder: Path, model: Path) -> None:
    """As one rank: two updates under each ZeRO stage, exported, the second after a restore too.

    After the first, everything goes to the host and back. Then an export that the second rank cannot write, and an
    update in which it alone has gradients that are not finite.
    """
    rank = int(os.environ["RANK"])
    refs = [DatasetRef.from_json(ref) for ref in json.loads((folder / "refs.json").read_text())]
    for stage in (0, 1, 2, 3):
        own = folder / f"zero{stage}"
        trainer = Local(folder, model, under(stage))
        trainer.update(refs[0], 1)
        moved = away_and_back(trainer)
        trainer.checkpoint(own / "checkpoint", {"stage": stage})
        answer = trainer.update(refs[1], 2)
        exported = trainer.export(own / "export")
        restored = Local(folder, model, under(stage))
        assert restored.restore(own / "checkpoint") == {"stage": stage}
        restored.update(refs[1], 2)
        restored.export(own / "restored")
        logprobs, _ = trainer.logprobs(refs[0], "policy")
        blocked = own / "blocked"
        if rank == 1:
            (blocked / "model-00002-of-00002.safetensors").mkdir(parents=True)
        dist.barrier()  # every rank has read what rank 0 wrote; and the second cannot write
        errors = [raised(lambda trainer=trainer, blocked=blocked: trainer.export(blocked))]
        if rank == 1:
            restored.service.learner.policy.lm.model.norm.weight.register_hook(lambda gradient: gradient * math.inf)
        errors += [
            raised(lambda trainer=restored, own=own: trainer.update(refs[0], 3)),
            raised(lambda trainer=restored, own=own: trainer.export(own / "refused")),
        ]
        restored.service.failed = ""
        restored.export(own / "unchanged")
        if rank == 0:
            found = {**answer, "export": exported, "logprobs": logprobs, "errors": errors, "moved": moved}
            (own / "answer.json").write_text(json.dumps(found))


def away_and_back(trainer: Local) -> dict[str, Any]:
    """Offload and reload: bytes taken from the device, bytes of weights and optimizer left there, and whether all of
    it came back. Before anything is read through numpy, which fixes a CPU tensor where it is."""
    learner = trainer.service.learner
    if learner.spec.update.zero_stage == 0:
        for parameter in learner.policy.parameters():
            parameter.data = parameter.data.clone()  # on a CPU they still lie in the model's file
    optimizer = getattr(learner.engine.optimizer, "optimizer", learner.engine.optimizer)
    tensors = [*learner.policy.parameters(), *learner.policy.buffers(), *optimizer.state]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    before = [tensor.detach().clone() for tensor in tensors]
    offloaded = learner.offload()
    found = {"taken": offloaded.bytes, "left": sum(tensor.untyped_storage().nbytes() for tensor in tensors)}
    offloaded.reload()
    return {**found, "same": all(map(torch.equal, tensors, before))}


def raised(work: Callable[[], Any]) -> str:
    """What it raises."""
    try:
        work()
    except TrainerError as error:
        return str(error)
    return "nothing"


CONTINUED = (0, 2, 3)  # ZeRO stages from which, and under which, `continue_everywhere` goes on


def start_everywhere(folder: Path, model: Path) -> None:
    """As one rank of a group: two updates under each ZeRO stage, with a checkpoint after each."""
    refs = [DatasetRef.from_json(ref) for ref in json.loads((folder / "refs.json").read_text())]
    for stage in CONTINUED:
        trainer = Local(folder, model, under(stage))
        for number, ref in enumerate(refs, start=1):
            trainer.update(ref, number)
            trainer.checkpoint(folder / f"{dist.get_world_size()}x{stage}" / f"{number:06d}", {"number": number})


def continue_everywhere(folder: Path, model: Path, writers: Sequence[str]) -> None:
    """As one rank of a group: under each ZeRO stage go on from every writer's first checkpoint.

    One trainer takes them all in turn: a restore has to replace whatever was there. Leaves `READER/WRITER/same`,
    the checkpoint written again at once, and `READER/WRITER/after`, the one after the second update.
    """
    refs = [DatasetRef.from_json(ref) for ref in json.loads((folder / "refs.json").read_text())]
    for stage in CONTINUED:
        trainer = Local(folder, model, under(stage))
        for writer in writers:
            own = folder / f"{dist.get_world_size()}x{stage}" / writer
            assert trainer.restore(folder / writer / "000001") == {"number": 1}
            trainer.checkpoint(own / "same", {"number": 1})
            trainer.update(refs[1], 2)
            trainer.checkpoint(own / "after", {"number": 2})


def main() -> None:
    folder, model = map(Path, sys.argv[1:3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    if len(sys.argv) == 3:
        train_every_stage(folder, model)
    else:
        start_everywhere(folder, model)
        continue_everywhere(folder, model, sys.argv[3:])
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort an interpreter that is ending; a product's rank is ended by a signal


if __name__ == "__main__":
    main()
