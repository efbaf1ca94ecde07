"""Runs one SGLang server: `python -m tasks.engines.launch PARENT_PID [SGLang options]`, keys as one JSON line on stdin.

A module of its own because SGLang takes its keys on the command line only, where `ps` shows them, and prints them
with its other options. SGLang spawns its scheduler and detokenizer with this module as their main module, so what
stands at module level protects them too.
"""

import ctypes
import importlib
import json
import logging
import os
import signal
import socket
import sys
from typing import Any

from tasks.devices import pin_to_cores

PARENT = "RATCHET_ENGINE_PARENT"
PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the call above
        os._exit(1)


def redact(*secrets: str) -> None:
    """Replace the secrets in every log record of this process, whichever handler writes it."""
    make = logging.getLogRecordFactory()

    def factory(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        message = record.getMessage()
        if any(secret in message for secret in secrets):
            for secret in secrets:
                message = message.replace(secret, "***")
            record.msg, record.args = message, ()
        return record

    logging.setLogRecordFactory(factory)


def rendezvous_on_loopback() -> None:
    """Have the store through which an engine's ranks find each other listen on loopback.

    torch lets it listen on every address. It asks for no password, and the ranks send each other pickles.
    """
    from torch import distributed

    class LoopbackStore(distributed.TCPStore):
        def __init__(
            self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, **options: Any
        ) -> None:
            if is_master:
                listener = socket.create_server(("127.0.0.1", port), backlog=1024)
                options["master_listen_fd"] = listener.detach()  # the store closes it
            super().__init__(host_name, port, world_size, is_master, **options)

    # By its path, since torch.distributed.rendezvous is also a function.
    for module in (distributed, importlib.import_module("torch.distributed.rendezvous")):
        vars(module)["TCPStore"] = LoopbackStore


def main() -> None:
    keys = json.loads(sys.stdin.readline())
    os.environ[PARENT] = str(os.getpid())  # for the processes SGLang spawns
    redact(keys["api_key"], keys["admin_api_key"])

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    secrets = ["--api-key", keys["api_key"], "--admin-api-key", keys["admin_api_key"]]
    try:
        run_server(prepare_server_args([*sys.argv[2:], *secrets]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__mp_main__":
    die_with_parent(int(os.environ[PARENT]))
    rendezvous_on_loopback()
    if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
        from tasks.engines import cpu_attention

        cpu_attention.register()
elif __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    pin_to_cores()
    main()
