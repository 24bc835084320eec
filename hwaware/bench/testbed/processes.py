"""Finding and ending the processes of a testbed, and no others: by namespace, descent and a mark in the environment."""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, Dict, Iterable, List, Optional, Set

from hwaware.errors import TestbedError

MARK = "HWAWARE_TESTBED"


def start_ticks(pid: int) -> Optional[int]:
    """When process `pid` started, in clock ticks since boot; None if there is none. The two name a process for good."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Whether process `pid` is still the one that started at `started` (from `start_ticks`)."""
    return pid > 0 and start_ticks(pid) == started


def command_line(pid: int) -> str:
    """The command line of process `pid`, blank between arguments; empty if it is gone."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def all_pids() -> List[int]:
    """Every process id that /proc shows."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def marked(name: str) -> Set[int]:
    """The processes that were started with HWAWARE_TESTBED=`name` in their environment."""
    mark = f"{MARK}={name}".encode()
    return {pid for pid in all_pids() if mark in _read(pid, "environ").split(b"\0")}


def in_networks(inodes: Iterable[int]) -> Set[int]:
    """The processes whose network namespace has one of those numbers."""
    wanted = set(inodes)
    return {pid for pid in all_pids() if _net_inode(pid) in wanted} if wanted else set()


def networks_of(pids: Iterable[int]) -> Set[int]:
    """The numbers of the network namespaces that these processes are in."""
    return {_net_inode(pid) for pid in pids}


def with_descendants(roots: Iterable[int]) -> Set[int]:
    """The processes in `roots`, their children, their children's children..."""
    children: Dict[int, List[int]] = {}
    for pid in all_pids():
        children.setdefault(_parent(pid), []).append(pid)
    found: Set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children.get(pid, [])
    return found


def end_all(find: Callable[[], Set[int]], limit_s: float) -> None:
    """Kill what `find` finds, again and again until it finds nothing; this process and its parents are spared.

    Raises:
        TestbedError: Some are still there after `limit_s` seconds.
    """
    spared = _ancestors(os.getpid())
    deadline = time.monotonic() + limit_s
    while True:
        found = {pid for pid in find() - spared if start_ticks(pid) is not None}
        if not found:
            return
        if time.monotonic() > deadline:
            raise TestbedError(
                f"The processes {sorted(found)} of the testbed did not end within {limit_s:g} s of being killed.",
                "look at them with `ps`, then run `hwaware testbed down` again.",
            )
        for pid in found:
            _kill(pid)
        time.sleep(0.02)


def _ancestors(pid: int) -> Set[int]:
    found: Set[int] = set()
    while pid > 0 and pid not in found:
        found.add(pid)
        pid = _parent(pid)
    return found


def _parent(pid: int) -> int:
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as stream:
            return stream.read()
    except OSError:  # gone meanwhile, or another user's: not ours in either case
        return b""


def _net_inode(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:  # gone meanwhile, or another user's: not ours in either case
        return 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
