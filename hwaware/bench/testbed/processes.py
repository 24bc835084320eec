"""Find and end the processes of a testbed, and no others: by namespace, parents and a mark in the environment."""

from __future__ import annotations

import os
import signal
import time
from typing import Callable, Dict, Iterable, List, Optional, Set

from hwaware.errors import TestbedError

MARK = "HWAWARE_TESTBED"


def start_ticks(pid: int) -> Optional[int]:
    """Return when process `pid` started, in clock ticks since boot; None if it has ended.

    The id and this time together identify a process, even after the kernel gives the id to another one.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            fields = stream.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_alive(pid: int, started: int) -> bool:
    """Return True if process `pid` lives and is the one that started at `started` (from `start_ticks`)."""
    return pid > 0 and start_ticks(pid) == started


def all_pids() -> List[int]:
    """Return every process id in /proc."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def marked(by: str) -> Set[int]:
    """Return the processes that started with HWAWARE_TESTBED=`by` in their environment."""
    mark = f"{MARK}={by}".encode()
    return {pid for pid in all_pids() if mark in _read(pid, "environ").split(b"\0")}


def in_networks(inodes: Iterable[int]) -> Set[int]:
    """Return the processes whose network namespace has one of these inode numbers."""
    wanted = set(inodes)
    return {pid for pid in all_pids() if _net_inode(pid) in wanted} if wanted else set()


def raylets() -> Set[int]:
    """Return the processes of Ray's daemon, one a node."""
    return {pid for pid in all_pids() if _read(pid, "comm") == b"raylet\n"}


def networks_of(pids: Iterable[int]) -> Set[int]:
    """Return the inode numbers of these processes' network namespaces."""
    return {_net_inode(pid) for pid in pids}


def with_descendants(roots: Iterable[int]) -> Set[int]:
    """Return the processes in `roots` and all their descendants."""
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


def end_all(
    find: Callable[[], Set[int]], limit_s: float, testbed: str, prepare: Callable[[], None] = lambda: None
) -> None:
    """Kill the processes that `find` returns, until it returns none; spare this process and its ancestors.

    Args:
        find: Returns the processes that are left.
        limit_s: Limit of the wait for their end.
        testbed: Name of the testbed, for the error.
        prepare: Called each time before processes are killed; some may be new.

    Raises:
        TestbedError: Some processes are still there after `limit_s` seconds.
    """
    spared = _ancestors(os.getpid())
    deadline = time.monotonic() + limit_s
    while True:
        found = {pid for pid in find() - spared if start_ticks(pid) is not None}
        if not found:
            return
        if time.monotonic() > deadline:
            raise TestbedError(
                f"Processes {sorted(found)} of testbed {testbed} did not end within {limit_s:g} s of being killed.",
                f"see why with `ps`, then run `hwaware testbed down {testbed}` again.",
            )
        prepare()
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
