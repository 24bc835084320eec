"""CPU shares: CFS quotas in control groups of version 1 or 2; memory limits in those of version 1.

The groups of one testbed, below the version's mount point (Ray's daemons and set-up work have no quota):

    hwaware-NAME/head                  the head's Ray, and the testbed's own helpers
    hwaware-NAME/HOST/daemons          the host's Ray; workers are born here and moved out
    hwaware-NAME/HOST/device-N         who serves the device N
    hwaware-NAME/HOST/device-N+device-M  who serves both; made by the process itself (hwaware/host_devices.py)
    hwaware-NAME/HOST/start            workers of a host with several devices, until they say which they serve
    hwaware-NAME/HOST/setup            imports and compilation
    hwaware.awake-NAME                 what keeps cores from falling asleep; runs where nothing else wants to
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from hwaware.bench.testbed.layout import BURST_US, DeviceGroups, Quota, cpu_quota
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.errors import TestbedError

V1_MOUNTS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")
V2_MOUNT = "/sys/fs/cgroup"
MEMORY_MOUNT = "/sys/fs/cgroup/memory"
# What a worker takes beside arrays once it serves its device: XLA's programs, and what it compiles them with.
BESIDE_ARRAYS_BYTES = 512 << 20
# By version, a group's least, default and largest weight (kernel/sched: MIN_SHARES, NICE_0_LOAD, MAX_SHARES;
# cgroup-v2.rst).
_WEIGHTS = {1: (2, 1024, 1 << 18), 2: (1, 100, 10_000)}
# A core's worth of shares weighs like that many ordinary processes. With much more, forks elsewhere starve while they
# hold the lock that every move between groups waits for (seen: 3 s).
_PROCESSES_PER_CORE = 2
_REMOVE_LIMIT_S = 5.0


class GroupTree:
    """Control groups of one testbed.

    Attributes:
        roots: The groups that have all others below them.
    """

    roots: Tuple[Path, ...]

    def pids(self) -> List[int]:
        """Every process in any group of the testbed; none if the groups are gone."""
        pids: List[int] = []
        for group in self.roots:
            for directory, _, files in os.walk(group):
                if "cgroup.procs" in files:
                    pids += read_pids(os.path.join(directory, "cgroup.procs"))
        return pids

    def exist(self) -> bool:
        """Whether any group is there."""
        return any(group.exists() for group in self.roots)

    def remove(self) -> None:
        """Remove all groups; their processes must have ended. A second call does nothing.

        Raises:
            TestbedError: A group is still in use after a few seconds.
        """
        deadline = time.monotonic() + _REMOVE_LIMIT_S
        while self.exist():
            for group in self.roots:
                for directory, _, _ in os.walk(group, topdown=False):
                    _try_rmdir(directory)
            if self.exist() and time.monotonic() > deadline:
                raise TestbedError(
                    f"{self.roots[0]} is still in use by the processes {self.pids()} after {_REMOVE_LIMIT_S:g} s.",
                    "end those processes and run `hwaware testbed down` again.",
                )
            time.sleep(0.02)


class CpuGroups(GroupTree):
    """The groups of the cpu controller.

    Args:
        root: The mount point of the cpu controller.
        name: The testbed's name.
        version: 1 or 2.
    """

    def __init__(self, root: str, name: str, version: int) -> None:
        self.mount = Path(root)
        self.base = self.mount / f"hwaware-{name}"
        self.idle = self.mount / f"hwaware.awake-{name}"
        self.roots = (self.base, self.idle)
        self.version = version

    def create(self, scenario: Scenario) -> None:
        """Make all groups and set the quotas."""
        if self.version == 2:
            _enable_cpu(self.mount)
        for group in self._tree(scenario):
            group.mkdir()
            if self.version == 2 and not self._is_leaf(group):
                _enable_cpu(group)
        for host in scenario.hosts():
            self.set_share(scenario, host, scenario.shares[host])
        cores = sum(scenario.shares[host] * scenario.devices_of(host) for host in scenario.hosts())
        self._set_weight(self.base, _PROCESSES_PER_CORE * cores + 1)
        self._make_idle()

    def _make_idle(self) -> None:
        """A group whose processes run where nothing else on the machine wants to.

        Not the root group, whatever the processes' own policy: where the kernel groups by session there (autogroup), an
        idle process counts like an ordinary one. It took the driver 30 to 50 % of its time, and workers a tenth.
        """
        self.idle.mkdir()
        idle = self.idle / "cpu.idle"
        if idle.exists():  # from Linux 5.15 on
            _write(idle, "1")
        else:
            self._set_weight(self.idle, 0.0)

    def _set_weight(self, group: Path, processes: float) -> None:
        """Let `group` compete with the machine's other programs like that many ordinary processes.

        Without it the whole testbed would be like one, and a fast host would lose more to others than a slow one.
        """
        least, default, largest = _WEIGHTS[self.version]
        name = "cpu.weight" if self.version == 2 else "cpu.shares"
        _write(group / name, str(min(largest, max(least, round(default * processes)))))

    def _tree(self, scenario: Scenario) -> Iterator[Path]:
        yield self.base
        yield self.base / "head"
        for host in scenario.hosts():
            yield self.base / host
            for leaf in ("daemons", "setup", "start"):
                yield self.base / host / leaf
            for index in range(scenario.devices_of(host)):
                yield self.base / host / f"device-{index}"

    def _is_leaf(self, group: Path) -> bool:
        return group.parent != self.mount and (group.parent != self.base or group.name == "head")

    def set_share(self, scenario: Scenario, host: str, share: float) -> None:
        """Give each device of `host` that share of a core from now on, and the processes that serve none their sum.

        Raises:
            TestbedError: The kernel did not take the quota.
        """
        count = scenario.devices_of(host)
        for index in range(count):
            self._set_quota(self.base / host / f"device-{index}", cpu_quota(share))
        for joint in (self.base / host).glob("device-*+*"):
            self._set_quota(joint, cpu_quota(share * len(joint.name.split("+"))))
        self._set_quota(self.base / host / "start", cpu_quota(share * count))
        # By the share itself, a small one that meets a large one on a core loses most: 0.2 beside 0.8, 0.4 and 0.4 came
        # out as 0.179. With equal weights the large one does: 0.68. In between 0.8, 0.4 and 0.2 came out as 0.79, 0.40
        # and 0.20; with the root of the share 0.8 came out as 0.74 to 0.77.
        self._set_weight(self.base / host, _PROCESSES_PER_CORE * share**0.75 * count)

    def _set_quota(self, group: Path, quota: Quota) -> None:
        burst = group / ("cpu.max.burst" if self.version == 2 else "cpu.cfs_burst_us")
        if burst.exists():  # from Linux 5.14 on
            _write(burst, "0")  # a burst may never exceed the quota, also while the quota changes
        if self.version == 2:
            _write(group / "cpu.max", f"{quota.quota_us} {quota.period_us}")
        else:
            _write(group / "cpu.cfs_period_us", str(quota.period_us))
            _write(group / "cpu.cfs_quota_us", str(quota.quota_us))
        if burst.exists():
            _write(burst, str(BURST_US))
        found = self.quota(group)
        if found != quota:
            raise TestbedError(
                f"The kernel took {found} for {group}, expected {quota}.", "check the limits of the parent group."
            )

    def quota(self, group: Path) -> Optional[Quota]:
        """The quota that the kernel reports for `group`; None if it has none."""
        if self.version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        return None if quota.strip() in ("max", "-1") else Quota(int(quota), int(period))

    def share(self, host: str) -> float:
        """The share of a core that each device of `host` has now."""
        quota = self.quota(self.base / host / "device-0")
        return float("inf") if quota is None else quota.quota_us / quota.period_us

    def head(self) -> str:
        """The cgroup.procs file for the head's processes and the testbed's helpers."""
        return str(self.base / "head" / "cgroup.procs")

    def awake(self) -> str:
        """The cgroup.procs file for what keeps the cores awake."""
        return str(self.idle / "cgroup.procs")

    def daemons(self, host: str) -> str:
        """The cgroup.procs file of the host's Ray daemons."""
        return str(self.base / host / "daemons" / "cgroup.procs")

    def device_groups(self, scenario: Scenario, host: str) -> DeviceGroups:
        """The cgroup.procs files for the workers of `host`."""
        names = [f"device-{index}" for index in range(scenario.devices_of(host))]
        files = [str(self.base / host / name / "cgroup.procs") for name in names]
        start = files[0] if len(files) == 1 else str(self.base / host / "start" / "cgroup.procs")
        return DeviceGroups(files, start, str(self.base / host / "setup" / "cgroup.procs"))


def read_pids(procs: str) -> List[int]:
    """The process ids in a cgroup.procs file; none if the group is gone."""
    try:
        with open(procs) as stream:
            return [int(line) for line in stream]
    except (FileNotFoundError, OSError):  # ENODEV while the group is being removed
        return []


class MemoryGroups(GroupTree):
    """The groups of the memory controller, version 1.

        hwaware-NAME/HOST            who serves several of the host's devices
        hwaware-NAME/HOST/device-N   the limit for who serves the device N
    hwaware-NAME/HOST-PID        a process that serves devices of the host; made by itself (hwaware/host_devices.py)

    A process that takes more than its devices have is ended by the kernel. The runtime's own account of its buffers
    says no before that; the groups hold what no account sees.

    Args:
        root: The mount point of the memory controller.
        name: The testbed's name.
    """

    def __init__(self, root: str, name: str) -> None:
        self.mount = Path(root)
        self.base = self.mount / f"hwaware-{name}"
        self.roots = (self.base,)

    def create(self, scenario: Scenario) -> None:
        """Make all groups and set the limits."""
        self.base.mkdir()
        for host in scenario.hosts():
            (self.base / host).mkdir()
            self._limit(self.base / host, scenario.memory_bytes(host) * scenario.devices_of(host))
            for procs in self.device_groups(scenario, host):
                group = Path(procs).parent
                group.mkdir()
                self._limit(group, scenario.memory_bytes(host))

    def _limit(self, group: Path, memory_bytes: int) -> None:
        _write(group / "memory.limit_in_bytes", str(memory_bytes + BESIDE_ARRAYS_BYTES))
        _write(group / "memory.swappiness", "0")

    def device_groups(self, scenario: Scenario, host: str) -> List[str]:
        """The cgroup.procs files for the workers of `host`, one a device."""
        return [str(self.base / host / f"device-{n}" / "cgroup.procs") for n in range(scenario.devices_of(host))]


def find_memory_groups(name: str) -> Optional[MemoryGroups]:
    """The memory groups that a testbed called `name` would have here; None without a writable controller, version 1."""
    there = os.path.exists(f"{MEMORY_MOUNT}/memory.limit_in_bytes") and os.access(MEMORY_MOUNT, os.W_OK)
    return MemoryGroups(MEMORY_MOUNT, name) if there else None


def find_cpu_groups(name: str) -> Optional[CpuGroups]:
    """The control groups that a testbed called `name` would have here; None without a writable cpu controller."""
    for mount in V1_MOUNTS:
        if os.path.exists(f"{mount}/cpu.cfs_quota_us") or os.path.exists(f"{mount}/cgroup.procs"):
            return CpuGroups(mount, name, 1) if os.access(mount, os.W_OK) else None
    try:
        controllers = Path(V2_MOUNT, "cgroup.controllers").read_text().split()
    except OSError:
        return None
    return CpuGroups(V2_MOUNT, name, 2) if "cpu" in controllers and os.access(V2_MOUNT, os.W_OK) else None


def _enable_cpu(group: Path) -> None:
    control = group / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        _write(control, "+cpu")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise TestbedError(
            f"{text!r} could not be written to {path}: {error.strerror}.",
            "run as root where control groups are writable (a container needs --privileged).",
        ) from error


def _try_rmdir(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:  # busy for a moment after its last process died: the caller tries again until its limit
        return
