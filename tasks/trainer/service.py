"""The trainer's commands as one rank executes them. It keeps the policy, and the last update with its answer."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from conf.errors import RatchetError, TrainerError
from data.crash import crash_point
from data.files import map_table, write_table
from data.refs import DatasetRef
from data.store import Store
from tasks.trainer import checkpoint
from tasks.trainer.batches import Samples
from tasks.trainer.export import named_tensors, write_shard
from tasks.trainer.learner import Learner, Progress
from tasks.trainer.memory import Offloaded
from tasks.trainer.ranks import Ranks
from tasks.trainer.spec import Spec


class Service:
    """Every rank holds one and executes the same commands in the same order."""

    def __init__(self, spec: Spec, control: Any, folder: Path) -> None:
        self.spec = spec
        self.ranks = Ranks(control)
        self.folder = folder  # the client's, for what does not fit a line
        self.learner = Learner(spec, control)
        self.store = Store(Path(spec.run_dir), spec.run)
        self.last: dict[str, Any] = {"number": 0, "dataset": "", "answer": None}
        self.failed = ""  # why weights and gradients can no longer be trusted
        self.away = False  # offloaded: the device is the engines'
        self.offloaded: Offloaded | None = None  # on a GPU, where there is memory to give back

    def execute(self, command: str, arguments: dict[str, Any], progress: Progress) -> Any:
        """Give the command's result as JSON; only rank 0's is used. Raises RatchetError on every rank alike."""
        if self.failed and command != "status":
            raise TrainerError(f"{command} is refused, because an update failed ({self.failed}): restart the trainer")
        if self.away and command not in ("status", "memory", "offload", "reload"):
            raise TrainerError(f"{command} is refused: the trainer is offloaded, its device is the engines'; reload it")
        commands: dict[str, Callable[..., Any]] = {
            "status": self._status,
            "logprobs": self._logprobs,
            "update": self._update,
            "export": self._export,
            "checkpoint": self._checkpoint,
            "restore": self._restore,
            "offload": self._offload,
            "reload": self._reload,
            "memory": self._memory,
        }
        return commands[command](progress=progress, **arguments)

    def _status(self, progress: Progress) -> dict[str, Any]:
        return {"update": self.last["number"], "dataset": self.last["dataset"], "optimizer_step": self.learner.step}

    def _logprobs(
        self, model: str, progress: Progress, dataset: dict[str, Any] | None = None, file: str = ""
    ) -> dict[str, Any]:
        if dataset:
            samples = self._read(dataset, [])
        else:
            samples = self.ranks.together(lambda: Samples.from_table(map_table(Path(file))))
        chosen = self.learner.policy if model == "policy" else self.learner.reference()
        values = self.learner.logprobs(chosen, samples, progress)
        path = self.folder / "logprobs.arrow"
        if self.ranks.leader:
            column = pa.ListArray.from_arrays(pa.array(samples.starts, pa.int32()), pa.array(values, pa.float32()))
            table = pa.table({"logprobs": column})
            write_table(table, table.schema, path)
        return {"path": str(path), "digest": self.learner.reference_digest if model == "reference" else ""}

    def _update(self, dataset: dict[str, Any], number: int, progress: Progress) -> dict[str, Any]:
        ref, last = DatasetRef.from_json(dataset), self.last
        if number == last["number"] and ref.id == last["dataset"]:
            return last["answer"]
        if number != last["number"] + 1:
            raise TrainerError(
                f"update {number} on {ref.id} must follow update {number - 1}, but the last one applied is "
                f"{last['number']} on {last['dataset'] or 'no dataset'}"
            )
        started = time.monotonic()
        settings = self.spec.update
        columns = ["response_mask", "behavior_logprobs", "advantages"]
        columns += ["old_logprobs"] if settings.old_logprobs == "recomputed" else []
        columns += ["ref_logprobs"] if settings.kl.coef else []
        samples = self._read(dataset, columns)
        read = time.monotonic()
        try:
            metrics = self.learner.update(samples, number, progress)
        except RatchetError as error:
            self.failed = str(error)
            raise
        seconds = {"read": read - started, "train": time.monotonic() - read}
        answer = {"metrics": metrics, "optimizer_step": self.learner.step, "seconds": seconds}
        self.last = {"number": number, "dataset": ref.id, "answer": answer}
        crash_point(f"trainer/{number}/update.after/{self.ranks.rank}")
        return answer

    def _export(self, staging: str, dtype: str, probe_ids: Sequence[int], progress: Progress) -> dict[str, Any]:
        lm, (rank, ranks) = self.learner.policy.lm, (self.ranks.rank, self.ranks.size)
        point = f"trainer/{self.last['number']}/export"
        crash_point(f"{point}.before/{rank}")
        receipt = self.ranks.together(lambda: write_shard(lm, Path(staging), dtype, rank, ranks, point))
        crash_point(f"{point}.after/{rank}")
        return {
            "receipts": [receipt.to_json() for receipt in self.ranks.gather(receipt)],
            "tied": named_tensors(lm)[1],
            "probe": {"ids": list(probe_ids), "logprobs": self.learner.probe(probe_ids)},
        }

    def _checkpoint(self, folder: str, facts: dict[str, Any], progress: Progress) -> None:
        state = {"facts": facts, "step": self.learner.step, "last": self.last}
        point = f"trainer/{self.last['number']}/checkpoint"
        checkpoint.save(self.learner.engine, Path(folder), state, self.ranks, point)

    def _restore(self, folder: str, progress: Progress) -> dict[str, Any]:
        state = checkpoint.load(self.learner.engine, Path(folder), self.ranks)
        self.learner.step, self.last = state["step"], state["last"]
        return state["facts"]

    def _offload(self, progress: Progress) -> list[int]:
        if self.spec.device == "cuda" and not self.away:
            self.offloaded = self.learner.offload()
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        self.away = True
        return self.ranks.gather(self.offloaded.bytes if self.offloaded else 0)

    def _reload(self, progress: Progress) -> None:
        if self.offloaded:
            self.offloaded.reload()
        self.away, self.offloaded = False, None

    def _memory(self, progress: Progress) -> list[int]:
        on_gpu = self.spec.device == "cuda"
        return self.ranks.gather(torch.cuda.mem_get_info()[0]) if on_gpu else []

    def _read(self, dataset: dict[str, Any], columns: list[str]) -> Samples:
        names = ["group_id", "prompt_ids", "response_ids", *columns]
        return self.ranks.together(
            lambda: Samples.from_table(self.store.read(DatasetRef.from_json(dataset), names), columns)
        )
