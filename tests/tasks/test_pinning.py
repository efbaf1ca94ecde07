"""Processes of a pool on a CPU stay on its cores, and what CPU time they take is counted."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from conf.errors import EngineError
from tasks import handover
from tasks.devices import CORES, cpu_seconds, device_environment
from tasks.engines.server import server_environment, server_options
from tasks.handover import Handover
from tests.conf.experiments import load_with

ROOT = Path(__file__).parents[2]
BURN = """
import os, subprocess, sys, time
from tasks.devices import pin_to_cores
pin_to_cores()
child = subprocess.Popen([sys.executable, "-c", "import os; print(*os.sched_getaffinity(0))"],
                         stdout=subprocess.PIPE, text=True)
cores = child.stdout.readline().split()
while time.process_time() < 0.3:
    pass
print(*os.sched_getaffinity(0), *cores, flush=True)
sys.stdin.read()
"""


def test_a_pinned_process_and_its_children_have_only_its_cores_and_its_time_is_counted() -> None:
    core = min(os.sched_getaffinity(0))
    process = subprocess.Popen(
        [sys.executable, "-c", BURN], cwd=ROOT, env={**os.environ, CORES: f"{core}", "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        assert process.stdout.readline().split() == [f"{core}"] * 2
        assert cpu_seconds(process.pid) >= 0.25  # the kernel counts in hundredths
        process.kill()


def test_gpus_are_named_among_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_environment(["cuda:2", "cuda:0"]) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-5f3a,1")
    assert device_environment(["cuda:1", "cuda:2"]) == {"CUDA_VISIBLE_DEVICES": "GPU-5f3a,1"}
    assert device_environment([]) == {}
    assert device_environment(["cpu:1", "cpu:3"]) == {CORES: "1,3"}


def test_each_engine_binds_its_threads_to_cores_of_its_pool() -> None:
    cores = ["cpu:4", "cpu:5", "cpu:6", "cpu:7"]
    bound = [server_environment("cpu", 1, i, 2, cores)["SGLANG_CPU_OMP_THREADS_BIND"] for i in range(2)]
    assert bound == ["4|5", "6|7"]


@pytest.mark.parametrize(("together", "saver"), [(False, False), (True, True)])
def test_on_a_gpu_an_engine_takes_its_share_of_memory_and_can_give_it_back_where_it_must(
    tmp_path: Path, together: bool, saver: bool
) -> None:
    roles = "[rollout, train]" if together else "[rollout]"
    overrides = ["pools.train=null"] if together else []
    e = load_with(tmp_path, "model.device=cuda", f"pools.rollout={{roles: {roles}, memory_share: 0.4}}", *overrides)
    options = server_options(e.experiment, 0, 1)
    assert (options["mem_fraction_static"], options["enable_memory_saver"]) == (0.4, saver)


class Polling:
    """An engine without requests, whose processes take `share` of a core."""

    name, session = "engine0", 1

    def __init__(self, requests: int = 0) -> None:
        self.requests = requests

    async def running_requests(self) -> int:
        return self.requests


def idle(engine: Polling) -> None:
    asyncio.run(Handover._idle(cast(Any, None), cast(Any, engine)))


def test_an_engine_that_goes_on_polling_keeps_the_trainer_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(handover, "cpu_seconds", lambda session: float(next(ticks)))
    monkeypatch.setattr(handover, "IDLE_S", 0.0)
    monkeypatch.setattr(handover, "BUSY_S", 0.0)
    with pytest.raises(EngineError, match=r"engine0: expected its processes to take at most 25% of a core while"):
        idle(Polling())
    with pytest.raises(EngineError, match="engine0: expected no request to run after the flush, found 2"):
        idle(Polling(requests=2))


def test_an_engine_that_falls_asleep_lets_it_in(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = iter([0.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr(handover, "cpu_seconds", lambda session: next(spent))
    monkeypatch.setattr(handover, "IDLE_S", 0.0)
    idle(Polling())
    assert list(spent) == []
