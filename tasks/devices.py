"""The devices of a pool as its processes see them: GPUs that alone are visible, or cores they are pinned to."""

import os
from collections.abc import Sequence
from pathlib import Path

CORES = "RATCHET_CORES"  # cores a child pins itself to at its start: 0,1,2


def on_machine(device: str) -> str:
    """The machine's name for a device: `cuda:0` is the first GPU that this process may see, perhaps `cuda:7`."""
    kind, _, number = device.partition(":")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"cuda:{seen.split(',')[int(number)].strip()}" if kind == "cuda" and seen else device


def device_environment(devices: Sequence[str]) -> dict[str, str]:
    """What tells a child about its devices (`cpu:0`, `cuda:0`); nothing where there are none."""
    names = ",".join(on_machine(device).partition(":")[2] for device in devices)
    if not names:
        return {}
    return {CORES if devices[0].startswith("cpu") else "CUDA_VISIBLE_DEVICES": names}


def pin_to_cores() -> None:
    """Keep this process, its threads and its children on the cores it was given. Call it before there are threads."""
    if cores := os.environ.get(CORES):
        os.sched_setaffinity(0, [int(core) for core in cores.split(",")])


def cpu_seconds(session: int) -> float:
    """CPU time, in user and system, that the living processes of a session have taken."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()  # from the third field on: the name may hold blanks
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
