"""What follows from the declared pools: which pool a node means, which one is co-located, which devices each has."""

import math
import re
from collections.abc import Mapping, Sequence

from conf.schema import Experiment, Pool

ROLES = ("rollout", "train", "cpu")
DEVICE = re.compile(r"(cpu|cuda):(0|[1-9][0-9]*)")


def pools_meant(pools: Mapping[str, Pool], name: str) -> list[str]:
    """The pools that a node's `pool` may mean: the one of that name; where there is none, those with that role."""
    if name in pools:
        return [name]
    return [pool for pool, declared in pools.items() if name in declared.roles] if name in ROLES else []


def pool_with(pools: Mapping[str, Pool], role: str) -> str:
    """Name of the one pool that has the role rollout or train; the settings' check refuses a second."""
    return next(name for name, pool in pools.items() if role in pool.roles)


def co_located(pools: Mapping[str, Pool]) -> str:
    """Name of the pool that both generates and trains; empty where two pools do."""
    return next((name for name, pool in pools.items() if {"rollout", "train"} <= set(pool.roles)), "")


def devices_of_engine(experiment: Experiment) -> int:
    """Devices of one engine: the product of SGLang's parallel sizes. What is no number is left to SGLang to refuse."""
    sizes = [experiment.rollout.sglang.get(f"{kind}_size", 1) for kind in ("tp", "pp", "dp")]
    return math.prod(size for size in sizes if isinstance(size, int))


def devices_used(pool: Pool, experiment: Experiment) -> tuple[int, int]:
    """(devices of the pool's engines, of its trainer)."""
    engines = (len(experiment.rollout.urls) or pool.engines) * devices_of_engine(experiment)
    return engines * ("rollout" in pool.roles), pool.ranks * ("train" in pool.roles)


def devices_needed(pool: Pool, experiment: Experiment) -> int:
    """Devices of this machine that the pool needs: not those of external engines; what is co-located shares them."""
    engines, ranks = devices_used(pool, experiment)
    return max(ranks, 0 if experiment.rollout.urls else engines)


def pool_devices(experiment: Experiment) -> dict[str, tuple[str, ...]]:
    """Each pool's devices. Those declared; on cuda a pool that declares none takes as many as it needs, the lowest
    numbers that no pool names, pools in their order. On a CPU such a pool is not pinned, and has none here."""
    found = {name: tuple(pool.devices) for name, pool in experiment.pools.items()}
    if experiment.model.device == "cuda":
        taken = {device for devices in found.values() for device in devices}
        for name, pool in experiment.pools.items():
            if not found[name]:
                needed = devices_needed(pool, experiment)
                free = [d for i in range(len(taken) + needed) if (d := f"cuda:{i}") not in taken]
                found[name] = tuple(free[:needed])
                taken.update(found[name])
    return found


def apart(experiment: Experiment, pool: str, other: str) -> bool:
    """Whether stages of both can work at once without taking cores or memory from each other.

    So it is between pools that declare different devices, and where one of them is engines that run elsewhere. Two
    that are not pinned share every core.
    """
    devices = pool_devices(experiment)
    elsewhere = experiment.rollout.urls and "rollout" in {*experiment.pools[pool].roles, *experiment.pools[other].roles}
    known = elsewhere or (devices[pool] and devices[other])
    return pool != other and bool(known) and not set(devices[pool]) & set(devices[other])


def device_numbers(devices: Sequence[str]) -> list[int]:
    """`cpu:1` -> 1."""
    return [int(device.partition(":")[2]) for device in devices]
