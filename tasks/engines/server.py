"""SGLang servers as long-lived children of the run (managed), and those that somebody else runs (external)."""

import asyncio
import ipaddress
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conf.errors import ConfigError, EngineError
from conf.pools import co_located, device_numbers, devices_of_engine, pool_devices, pool_with
from conf.schema import Experiment, Rollout
from tasks.devices import device_environment
from tasks.engines.client import Engine, Refused, Unavailable, boot_of
from tasks.engines.fleet import Fleet, Restart, Unrestartable
from tasks.together import all_or_first_error

ROOT = Path(__file__).resolve().parents[2]  # the folder `tasks` is imported from
CPU_STUB = Path(__file__).resolve().parent / "cpu_stub"
POLL_S = 0.1
LOG_TAIL = 20  # lines of a failed server's log that its error shows
CPU_KV_BYTES = 2 << 30  # memory for KV on a CPU; with less than a batch needs, SGLang queues the rest


@dataclass(frozen=True)
class Limits:
    """What a request must respect; from the model's config.json."""

    vocab_size: int
    context_length: int
    kv_bytes: int  # of one token, over all layers


def read_limits(model: Path, options: Mapping[str, Any], dtype_bytes: int = 2) -> Limits:
    """Raises ConfigError where config.json lacks a number this needs."""
    config = json.loads((model / "config.json").read_text())
    config = {**config, **config.get("text_config", {})}  # a multimodal model keeps its language model's numbers there
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        return Limits(
            vocab_size=config["vocab_size"],
            context_length=options.get("context_length") or config["max_position_embeddings"],
            kv_bytes=2 * config["num_hidden_layers"] * kv_heads * head_dim * dtype_bytes,
        )
    except KeyError as missing:
        raise ConfigError(f"{model / 'config.json'} must have {missing}; it has {', '.join(sorted(config))}") from None


def server_options(experiment: Experiment, index: int, engines: int) -> dict[str, Any]:
    """SGLang's options for one engine, under SGLang's names; the experiment's `rollout.sglang` comes last."""
    rollout, given = experiment.rollout, experiment.rollout.sglang
    options: dict[str, Any] = {
        "model_path": str(Path(experiment.model.path).resolve()),
        "device": experiment.model.device,
        "dtype": rollout.dtype,  # "auto" would take a float32 model as float16
        "load_format": "safetensors",  # "auto" would also unpickle
        "random_seed": experiment.seed + index,
        "sleep_on_idle": True,  # an idle scheduler takes 86% of a core otherwise
        "skip_server_warmup": True,  # 6 s; the first publish's probe is the warm-up
        "log_level_http": "warning",  # no line for each request
    }
    if experiment.model.device == "cpu":
        limits = read_limits(Path(experiment.model.path), given, 4 if rollout.dtype == "float32" else 2)
        longest = min(experiment.prompts.max_tokens + rollout.max_new_tokens, limits.context_length)
        batch = longest * -(-rollout.max_in_flight // engines)
        options |= {
            "attention_backend": "torch_native",
            "mem_fraction_static": 0.8,  # of all memory: max_total_tokens is what bounds it
            "max_total_tokens": max(min(batch, CPU_KV_BYTES // limits.kv_bytes), longest),
        }
    else:
        pools = experiment.pools
        options["base_gpu_id"] = index * devices_of_engine(experiment)  # among those of its pool
        options["mem_fraction_static"] = pools[pool_with(pools, "rollout")].memory_share or None
        options["enable_memory_saver"] = bool(co_located(pools))  # without it, released memory stays taken
    return {**options, **given}


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """`{tp_size: 2, enable_mixed_chunk: true}` -> `--tp-size 2 --enable-mixed-chunk`; false and null leave it out."""
    arguments = []
    for name, value in options.items():
        if value is None or value is False:
            continue
        arguments.append("--" + name.replace("_", "-"))
        if isinstance(value, Mapping):
            arguments.append(json.dumps(value))
        elif isinstance(value, list | tuple):
            arguments += [str(v) for v in value]
        elif value is not True:
            arguments.append(str(value))
    return arguments


def server_environment(
    device: str, threads: int, index: int, ranks: int, devices: Sequence[str] = ()
) -> dict[str, str]:
    """`threads` cores for each rank (0: SGLang takes all), others for each engine, of the pool's or of the machine."""
    path = [str(CPU_STUB), str(ROOT)] if device == "cpu" else [str(ROOT)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*path, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HF_HUB_OFFLINE": "1",  # the model is a folder: nothing to ask for
        "GLOO_SOCKET_IFNAME": "lo",  # else an engine's ranks listen on the address of the machine's name
        **device_environment(devices),
    }
    # A server whose scheduler died would hang for 5 or 65 s, to dump what only a debugging session can read.
    for diagnosis in ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"):
        environment.setdefault(diagnosis, "0")
    if device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        # Threads that wait for work by spinning took 6 times the CPU time, and 8 times as long, on busy cores.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        cores = device_numbers(devices) or sorted(os.sched_getaffinity(0))
        if threads:
            groups = [
                [cores[((index * ranks + rank) * threads + i) % len(cores)] for i in range(threads)]
                for rank in range(ranks)
            ]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, g)) for g in groups)
    return environment


class SGLangServer:
    """One managed server: a child in a session of its own, on loopback, that dies with this process.

    The kernel kills it when the *thread* that called `start` ends, so call it from the thread of the event loop.
    """

    def __init__(self, name: str, options: Mapping[str, Any], environment: Mapping[str, str], log: Path) -> None:
        self.name = name
        self.log = log
        self._options = dict(options)
        self._environment = dict(environment)
        self._api_key, self._admin_key = secrets.token_hex(16), secrets.token_hex(16)
        self._boot = ""
        self._port = 0
        self._process: subprocess.Popen[str] | None = None
        self._scratch: Path | None = None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Of the server's first process, which leads its group and session. 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self, timeout_s: float) -> Engine:
        """Start the server and wait until it answers. Raises EngineError with the end of its log."""
        with socket.socket() as held:
            # Bound but not listening, the port is nobody else's, and SGLang can still listen on it: both ends reuse it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.bind(("127.0.0.1", 0))
            self._port = held.getsockname()[1]
            self._launch()
            try:
                return await self._wait(time.monotonic() + timeout_s, timeout_s)
            except BaseException:
                await self.stop()
                raise

    def _launch(self) -> None:
        self._boot = f"boot-{secrets.token_hex(8)}"
        own = {"host": "127.0.0.1", "port": self._port, "weight_version": self._boot}
        command = [sys.executable, "-m", "tasks.engines.launch", str(os.getpid())]
        self._scratch = Path(tempfile.mkdtemp(prefix="ratchet-"))  # its sockets; short, a socket's path is limited
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                [*command, *to_arguments({**self._options, **own})],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**self._environment, "TMPDIR": str(self._scratch)},
                start_new_session=True,
                text=True,
            )
        assert self._process.stdin
        with self._process.stdin as pipe:
            pipe.write(json.dumps({"api_key": self._api_key, "admin_api_key": self._admin_key}) + "\n")

    async def _wait(self, deadline: float, timeout_s: float) -> Engine:
        engine = self.connect()
        try:
            while True:
                if not self.alive:
                    assert self._process
                    raise EngineError(f"{self.name} ended with status {self._process.returncode}{self._tail()}")
                try:
                    info = await engine.model_info()
                except Unavailable:
                    info = None
                except Refused as error:
                    raise EngineError(f"{self.name}: another server answers on its port: {error}") from error
                if info:
                    if info.label != self._boot:
                        raise EngineError(
                            f"{self.name}: another server answers on port {self._port}: expected the label "
                            f"{self._boot}, got {info.label}"
                        )
                    # SGLang sends this to itself, without a warm-up before it listens, and then has a warning in its
                    # log. On a CPU each flush collects garbage: 0.5 s where nothing is frozen, three times a publish.
                    await engine.freeze_gc()
                    return engine
                if time.monotonic() > deadline:
                    raise EngineError(f"{self.name} was not ready after {timeout_s:g} s{self._tail()}")
                await asyncio.sleep(POLL_S)
        except BaseException:
            await engine.close()
            raise

    def connect(self) -> Engine:
        """A client of the running server. Each event loop needs its own."""
        limits = read_limits(Path(self._options["model_path"]), self._options)
        engine = Engine(
            self.name,
            f"http://127.0.0.1:{self._port}",
            vocab_size=limits.vocab_size,
            context_length=limits.context_length,
            boot=self._boot,
            api_key=self._api_key,
            admin_key=self._admin_key,
        )
        engine.session = self.pid
        return engine

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL:]
        return f"; the end of {self.log}:\n  " + "\n  ".join(lines)

    async def stop(self) -> None:
        """Kill every process of the server. It holds nothing worth saving, and its own shutdown takes 10 s."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await asyncio.to_thread(self._process.wait)
        self._process = None
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)


@asynccontextmanager
async def managed_engines(experiment: Experiment, logs: Path) -> AsyncIterator[Fleet]:
    """Start the rollout pool's servers at the same time, engine0, engine1, ...; stop them all on leaving."""
    name = pool_with(experiment.pools, "rollout")
    pool, devices = experiment.pools[name], pool_devices(experiment)[name]
    ranks = int(experiment.rollout.sglang.get("tp_size", 1))
    # Pinned to cores, SGLang must be told of them: by itself it binds its threads to all.
    threads = pool.threads or (max(1, len(devices) // (pool.engines * ranks)) if devices else 0)
    servers = [
        SGLangServer(
            f"engine{i}",
            server_options(experiment, i, pool.engines),
            server_environment(experiment.model.device, threads, i, ranks, devices),
            logs / f"engine{i}.log",
        )
        for i in range(pool.engines)
    ]
    async with AsyncExitStack() as stack:
        for server in servers:
            stack.push_async_callback(server.stop)
        async with all_or_first_error() as group:
            starts = [group.create_task(server.start(experiment.rollout.start_timeout_s)) for server in servers]

        def restart(server: SGLangServer) -> Restart:
            async def again(engine: Engine) -> Engine:
                await server.stop()
                return await server.start(experiment.rollout.start_timeout_s)

            return again

        fleet = Fleet([start.result() for start in starts], {server.name: restart(server) for server in servers})
        stack.push_async_callback(fleet.close)
        yield fleet


def external_keys(rollout: Rollout) -> tuple[str, str]:
    """Both keys of the external servers, from the environment.

    Raises ConfigError where one is missing and a server is not on this machine: whoever reaches such a server could
    load weights into it.
    """
    keys = os.environ.get(rollout.api_key_env, ""), os.environ.get(rollout.admin_key_env, "")
    for field, name, key in zip(
        ("api_key_env", "admin_key_env"), (rollout.api_key_env, rollout.admin_key_env), keys, strict=True
    ):
        if far := [url for url in rollout.urls if not key and not _on_loopback(url)]:
            raise ConfigError(
                f"rollout.urls: {far[0]} is not on this machine, so it must have keys, but the environment variable "
                f"{name} (rollout.{field}) is not set"
            )
    return keys


def _on_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@asynccontextmanager
async def external_engines(experiment: Experiment) -> AsyncIterator[Fleet]:
    """Connect to `rollout.urls`. They must see the run folder: weights reach them as a path.

    Raises EngineError for a server that does not answer. Whoever runs a server restarts it; a new life is waited for.
    """
    urls = {f"engine{i}": url for i, url in enumerate(experiment.rollout.urls)}

    async def again(engine: Engine) -> Engine:
        return await _next_life(experiment, engine)

    async with AsyncExitStack() as stack:
        engines = []
        for name, url in urls.items():
            engines.append(engine := await _connect(experiment, name, url))
            stack.push_async_callback(engine.close)
        fleet = Fleet(engines, dict.fromkeys(urls, again))
        stack.push_async_callback(fleet.close)
        yield fleet


async def _connect(experiment: Experiment, name: str, url: str) -> Engine:
    rollout = experiment.rollout
    limits = read_limits(Path(experiment.model.path), rollout.sglang)
    api_key, admin_key = external_keys(rollout)
    keys = {"api_key": api_key, "admin_key": admin_key}
    engine = Engine(name, url, vocab_size=limits.vocab_size, context_length=limits.context_length, boot="", **keys)
    try:
        info = await engine.server_info()
    except BaseException:
        await engine.close()
        raise
    boot = boot_of(info)
    length = min(limits.context_length, info.get("context_length") or limits.context_length)
    await engine.close()
    return Engine(name, url, vocab_size=limits.vocab_size, context_length=length, boot=boot, **keys)


async def _next_life(experiment: Experiment, engine: Engine) -> Engine:
    deadline = time.monotonic() + experiment.rollout.start_timeout_s
    while True:
        try:
            found = await _connect(experiment, engine.name, engine.url)
        except Unavailable as error:
            if time.monotonic() > deadline:
                limit = f"{experiment.rollout.start_timeout_s:g} s (rollout.start_timeout_s)"
                raise EngineError(f"{engine.name} did not come back within {limit}: {error}") from error
            await asyncio.sleep(POLL_S)
            continue
        if found.boot == engine.boot:
            await found.close()
            raise Unrestartable(f"{engine.name} at {engine.url} is external and still the same boot: restart it")
        return found
