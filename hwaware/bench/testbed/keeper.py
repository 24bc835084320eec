"""Run the keeper: the process that builds a testbed, then puts each new Ray worker under its host's quota.

    python -m hwaware.bench.testbed.keeper NAME

`up` starts it, writes "go", and waits for one line of JSON. The keeper ends when the testbed's state file is gone.
`down` also works on a testbed whose keeper was killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List

import msgspec

from hwaware.bench.testbed import awake, gpu, hosts, links, namespaces, starting
from hwaware.bench.testbed.born.sitecustomize import is_worker
from hwaware.bench.testbed.cgroups import CpuGroups, read_pids
from hwaware.bench.testbed.state import State, state_path
from hwaware.errors import HwawareError

POLL_S = 0.03
# The raylet forks a worker, which becomes Python at once. A process that is no worker by then never becomes one.
_SETTLED_S = 2.0
_PR_SET_CHILD_SUBREAPER = 36


def main(name: str) -> None:
    """Build the testbed called `name`, report to `up`, and move workers until the testbed ends."""
    if sys.stdin.readline() != "go\n":
        return
    path = state_path(name)  # before a user namespace makes this process root, whose directory differs
    try:
        state = _build(State.load(path), path)
    except HwawareError as error:
        _report({"what": error.what, "fix": error.fix})
        return
    except Exception as error:  # `up` raises it; the log keeps the traceback
        _report(
            {
                "what": f"{type(error).__name__}: {error}.",
                "fix": "check that the kernel has bridges and veth (`modprobe -a bridge veth`).",
            }
        )
        raise
    _report({})
    _watch(state, path)


def _report(answer: Dict[str, str]) -> None:
    print(json.dumps(answer), flush=True)


def _build(state: State, path: Path) -> State:
    # Ray's daemons outlive `ray start`. The keeper becomes their parent and reaps them where no init does.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    groups = state.cpu_groups()
    if groups is not None:
        groups.create(state.scenario)
        with open(groups.head(), "w") as stream:
            stream.write(str(os.getpid()))
        _keep_cores_awake(groups)
    memory = state.memory_groups()
    if memory is not None:
        memory.create(state.scenario)
    if state.is_gpu() and gpu.has_service():
        gpu.start_service(state)
    if state.kind == "user":
        namespaces.become_user_root()
    if state.has_links():
        state = _build_network(state, path)
    starting.start_nodes(state)
    return state


def _keep_cores_awake(groups: CpuGroups) -> None:
    for core in sorted(os.sched_getaffinity(0)):
        line = [sys.executable, awake.__file__, str(core), groups.awake()]
        subprocess.Popen(line, stdout=subprocess.DEVNULL)  # as above: `up` reads the keeper's own


def _build_network(state: State, path: Path) -> State:
    for host in state.hosts:
        hosts.prepare_files(state, host)
    holders = [hosts.fork_holder(state, host, path) for host in state.hosts]
    for holder in holders:
        holder.wait_for_step("making its namespaces")
    state = msgspec.structs.replace(
        state,
        holders={holder.host: holder.pid for holder in holders},
        networks=tuple(namespaces.net_inode(holder.pid) for holder in holders),
    )
    state.save(path)
    links.create_bridge(state.bridge(), state.head_address())
    for holder in holders:
        links.connect_host(state.bridge(), state.veth(holder.host), holder.pid)
        holder.go_on()
    for holder in holders:
        holder.wait_for_step("setting the rates of its links")
    return state


def _watch(state: State, path: Path) -> None:
    """Move new workers under their quota until the state file is gone."""
    groups = state.cpu_groups()
    movers = []
    if groups is not None:
        movers = [
            WorkerMover(groups.daemons(host), groups.device_groups(state.scenario, host).start) for host in state.hosts
        ]
    while path.exists():
        for mover in movers:
            mover.poll(time.monotonic())
        _reap()
        time.sleep(POLL_S)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


class WorkerMover:
    """Moves each Ray worker of a host, once, from the daemons' group to the group where workers start.

    Most workers have already moved themselves (born/sitecustomize.py). This class moves the others.

    Args:
        daemons: The cgroup.procs file of the host's Ray and of the processes that it starts.
        start: The cgroup.procs file for new workers.
    """

    def __init__(self, daemons: str, start: str) -> None:
        self.daemons = daemons
        self.start = start
        self._first_seen: Dict[int, float] = {}

    def poll(self, now_s: float) -> List[int]:
        """Move workers that are new since the last call, and return their process ids."""
        pids = read_pids(self.daemons)
        self._first_seen = {pid: self._first_seen.get(pid, now_s) for pid in pids}
        moved = []
        for pid, seen_s in self._first_seen.items():
            if now_s - seen_s <= _SETTLED_S and is_worker(_arguments(pid)) and _move(pid, self.start):
                moved.append(pid)
        return moved


def _arguments(pid: int) -> List[str]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            return stream.read().decode(errors="replace").split("\0")
    except OSError:  # it has ended
        return []


def _move(pid: int, procs: str) -> bool:
    try:
        with open(procs, "w") as stream:
            stream.write(str(pid))
    except OSError:  # it has ended
        return False
    return True


if __name__ == "__main__":
    main(sys.argv[1])
