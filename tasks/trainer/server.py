"""One rank of the trainer: `python -m tasks.trainer.server FOLDER`, started by `tasks.trainer.client`.

Rank 0 listens on FOLDER/socket. A command is a JSON line {"id", "command", "arguments"}; every rank executes it; rank 0
answers {"id", "progress": [done, total]} any number of times, then {"id", "result"} or {"id", "error", "kind"}, the
kind being the error's class. An error of Ratchet's own is raised on every rank alike and leaves the trainer running.
Anything else ends the rank with its traceback in the log, and the client sees it die.
"""

import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tasks.devices import pin_to_cores


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != int(os.environ["RATCHET_PARENT"]):
        sys.exit("the process that started this rank is gone")


class Commands:
    """Rank 0's end of the socket, and how the other ranks hear of a command."""

    def __init__(self, folder: Path, control: Any) -> None:
        from torch import distributed as dist

        self._dist, self._control = dist, control
        self.leader = dist.get_rank() == 0
        if self.leader:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(str(folder / "socket"))
            self._listener.listen(1)
            self._connection = self._listener.accept()[0]
            self._lines = self._connection.makefile("r", encoding="utf-8")

    def next(self) -> dict[str, Any]:
        """Wait for the next command, for days if need be."""
        message: list[Any] = [None]
        if self.leader:
            line = self._lines.readline()
            message = [json.loads(line) if line else {"command": "stop", "arguments": {}, "id": -1}]
        self._dist.broadcast_object_list(message, src=0, group=self._control)
        return message[0]

    def reply(self, number: int, **value: Any) -> None:
        if self.leader:
            self._connection.sendall(json.dumps({"id": number, **value}).encode() + b"\n")


def main() -> None:
    die_with_parent()
    pin_to_cores()
    folder = Path(sys.argv[1])
    from datetime import timedelta

    import torch
    from torch import distributed as dist

    from conf.errors import RatchetError
    from tasks.trainer.service import Service
    from tasks.trainer.spec import Spec

    spec = Spec.read(folder / "spec.json")
    if spec.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    forever = timedelta(days=365)  # the client has the deadlines; between commands ranks wait in a collective
    dist.init_process_group(
        "nccl" if spec.device == "cuda" else "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=forever,
    )
    control = dist.new_group(backend="gloo", timeout=forever)
    try:
        service = Service(spec, control, folder)
    except RatchetError as error:
        sys.exit(str(error))
    commands = Commands(folder, control)
    while True:
        command = commands.next()
        if command["command"] == "stop":
            break
        reply = partial(commands.reply, command["id"])
        try:
            progress = partial(_report, reply)
            reply(result=service.execute(command["command"], command["arguments"], progress))
        except RatchetError as error:
            reply(error=str(error), kind=type(error).__name__)


def _report(reply: Callable[..., None], done: int, total: int) -> None:
    reply(progress=[done, total])


if __name__ == "__main__":
    main()
