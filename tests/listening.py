"""Where processes listen, as the kernel tells it: who could knock at them."""

import ipaddress
import os
from collections.abc import Iterable
from pathlib import Path

LISTEN = {"tcp": "0A", "tcp6": "0A", "udp": "07", "udp6": "07"}  # states; 07 is a bound datagram socket without a peer
ACCEPTING = 0x10000  # flag of a unix socket that listens


def listening(pids: Iterable[int]) -> set[tuple[str, str]]:
    """(kind, address) of every socket on which one of the processes can be reached: an IP address, or a path."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    found = set()
    for kind, state in LISTEN.items():
        for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and fields[3] == state:
                found.add((kind, _address(fields[1].partition(":")[0])))
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[6] in inodes and int(fields[3], 16) & ACCEPTING:
            found.add(("unix", fields[7] if len(fields) > 7 else ""))
    return found


def beyond_this_machine(found: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
    return {(kind, at) for kind, at in found if kind != "unix" and not ipaddress.ip_address(at).is_loopback}


def _sockets(pid: int) -> set[str]:
    found = set()
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            target = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            if target.startswith("socket:["):
                found.add(target[8:-1])
    except OSError:  # it has ended meanwhile
        pass
    return found


def _address(text: str) -> str:
    """The kernel prints words of 4 bytes, each with the machine's own byte order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
