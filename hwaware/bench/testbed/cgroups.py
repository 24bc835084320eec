"""Limit CPU shares by control groups of version 1 or 2, and memory by those of version 1.

CPU shares are CFS quotas. Ray's daemons and set-up work have none. A testbed has these groups below the mount point:

    hwaware-NAME/ray-head              the head's Ray and the testbed's own processes
    hwaware-NAME/HOST/daemons          the host's Ray; workers start here and move out
    hwaware-NAME/HOST/device-N         the worker of device N
    hwaware-NAME/HOST/device-N+device-M  a worker of both devices, which makes this group (hwaware/host_devices.py)
    hwaware-NAME/HOST/start            workers on a host with several devices, until they name theirs
    hwaware-NAME/HOST/setup            imports and compilation
    hwaware.awake-NAME                 spinners that keep cores awake, at the lowest priority
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Iterator, List, Optional, Tuple

from hwaware.bench.testbed.layout import BURST_US, HEAD, DeviceGroups, Quota, cpu_quota
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.errors import TestbedError

V1_MOUNTS = ("/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct")
V2_MOUNT = "/sys/fs/cgroup"
MEMORY_MOUNT = "/sys/fs/cgroup/memory"
# In a control-group namespace of its own, a container's processes are in the group that it takes for the root group.
CONTAINER_NEEDS = "a container needs --privileged and --cgroupns=host"
# Memory of a worker beside its arrays: XLA's programs, and the compiler.
BESIDE_ARRAYS_BYTES = 512 << 20
# By version, a group's least, default and largest weight (kernel/sched: MIN_SHARES, NICE_0_LOAD, MAX_SHARES;
# cgroup-v2.rst).
_WEIGHTS = {1: (2, 1024, 1 << 18), 2: (1, 100, 10_000)}
# Weight of a whole core's shares, in ordinary processes. With much more weight, forks elsewhere starve while they hold
# the lock for moves between groups. Moves then waited for up to 3 s.
_PROCESSES_PER_CORE = 2
_REMOVE_LIMIT_S = 5.0


class GroupTree:
    """Control groups of one testbed.

    Attributes:
        roots: The topmost groups.
    """

    roots: Tuple[Path, ...]

    def pids(self) -> List[int]:
        """Return every process in any group; empty if the groups are gone."""
        pids: List[int] = []
        for group in self.roots:
            for directory, _, files in os.walk(group):
                if "cgroup.procs" in files:
                    pids += read_pids(os.path.join(directory, "cgroup.procs"))
        return pids

    def exist(self) -> bool:
        """Return True while any group exists."""
        return any(group.exists() for group in self.roots)

    def remove(self) -> None:
        """Remove all groups once their processes have ended; a second call does nothing.

        Raises:
            TestbedError: A group is still in use after 5 s.
        """
        deadline = time.monotonic() + _REMOVE_LIMIT_S
        while self.exist():
            for group in self.roots:
                for directory, _, _ in os.walk(group, topdown=False):
                    _try_rmdir(directory)
            if self.exist() and time.monotonic() > deadline:
                raise TestbedError(
                    f"Processes {self.pids()} still use {self.roots[0]} after {_REMOVE_LIMIT_S:g} s.",
                    "end these processes and run `hwaware testbed down` again.",
                )
            time.sleep(0.02)


class CpuGroups(GroupTree):
    """The groups of the CPU controller.

    Args:
        root: The mount point of the CPU controller.
        name: The testbed's name.
        version: Version of the control groups, 1 or 2.
    """

    def __init__(self, root: str, name: str, version: int) -> None:
        self.mount = Path(root)
        self.base = self.mount / f"hwaware-{name}"
        self.idle = self.mount / f"hwaware.awake-{name}"
        self.roots = (self.base, self.idle)
        self.version = version

    def create(self, scenario: Scenario) -> None:
        """Make all groups and set their quotas and weights."""
        if self.version == 2:
            _enable_cpu(self.mount)
        for group in self._tree(scenario):
            group.mkdir()
            if self.version == 2 and not self._is_leaf(group):
                _enable_cpu(group)
        for host in scenario.hosts():
            self.set_share(scenario, host, scenario.shares[host])
        self._set_weight(self.base, _PROCESSES_PER_CORE * scenario.share_cores + 1)
        self._make_idle()

    def _make_idle(self) -> None:
        """Make a group whose processes run only when nothing else wants the processor.

        The root group does not serve, whatever the policy of its processes. Where the kernel groups them by session
        (autogroup), an idle process counts like an ordinary one. It cost the driver 30 to 50 % of its time, and workers
        a tenth.
        """
        self.idle.mkdir()
        idle = self.idle / "cpu.idle"
        if idle.exists():  # from Linux 5.15 on
            _write(idle, "1")
        else:
            self._set_weight(self.idle, 0.0)

    def _set_weight(self, group: Path, processes: float) -> None:
        """Let `group` compete with the machine's other programs like `processes` ordinary processes.

        By default the whole testbed would weigh like one process. A fast host would then lose more than a slow one.
        """
        least, default, largest = _WEIGHTS[self.version]
        name = "cpu.weight" if self.version == 2 else "cpu.shares"
        _write(group / name, str(min(largest, max(least, round(default * processes)))))

    def _tree(self, scenario: Scenario) -> Iterator[Path]:
        yield self.base
        yield self.base / HEAD
        for host in scenario.hosts():
            yield self.base / host
            for leaf in ("daemons", "setup", "start"):
                yield self.base / host / leaf
            for index in range(scenario.devices_of(host)):
                yield self.base / host / f"device-{index}"

    def _is_leaf(self, group: Path) -> bool:
        return group.parent != self.mount and (group.parent != self.base or group.name == HEAD)

    def set_share(self, scenario: Scenario, host: str, share: float) -> None:
        """Give each device of `host` this share of a core from now on.

        Workers that serve no device yet get the sum of the shares.

        Raises:
            TestbedError: The kernel refused the quota.
        """
        count = scenario.devices_of(host)
        for index in range(count):
            self._set_quota(self.base / host / f"device-{index}", cpu_quota(share))
        for joint in (self.base / host).glob("device-*+*"):
            self._set_quota(joint, cpu_quota(share * len(joint.name.split("+"))))
        self._set_quota(self.base / host / "start", cpu_quota(share * count))
        # Measured with shares of 0.8, 0.4, 0.4 and 0.2 at once. Weights in proportion to the share hurt the small one:
        # 0.2 came out as 0.179. Equal weights hurt the large one: 0.8 came out as 0.68, and as 0.74 to 0.77 with the
        # square root. The exponent 0.75 gave 0.79, 0.40 and 0.20.
        self._set_weight(self.base / host, _PROCESSES_PER_CORE * share**0.75 * count)

    def _set_quota(self, group: Path, quota: Quota) -> None:
        burst = group / ("cpu.max.burst" if self.version == 2 else "cpu.cfs_burst_us")
        if burst.exists():  # from Linux 5.14 on
            _write(burst, "0")  # a burst may never exceed the quota, not even while the quota changes
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
                f"The kernel set {found} for {group}, expected {quota}.", "check the limits of the parent group."
            )

    def quota(self, group: Path) -> Optional[Quota]:
        """Return the quota that the kernel reports for `group`; None if it has none."""
        if self.version == 2:
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
        return None if quota.strip() in ("max", "-1") else Quota(int(quota), int(period))

    def share(self, host: str) -> float:
        """Return the current share of a core of each device of `host`; infinite without a quota."""
        quota = self.quota(self.base / host / "device-0")
        return float("inf") if quota is None else quota.quota_us / quota.period_us

    def head(self) -> str:
        """Return the cgroup.procs file for the head's processes and the testbed's own."""
        return str(self.base / HEAD / "cgroup.procs")

    def awake(self) -> str:
        """Return the cgroup.procs file for the spinners that keep cores awake."""
        return str(self.idle / "cgroup.procs")

    def let_end(self) -> None:
        """Take the groups' limits and low priorities from all processes in the groups, before somebody kills them.

        A killed process needs processor time in which to die. On a busy core, an idle or throttled one gets none.
        """
        for pid in self.pids():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                (self.mount / "cgroup.procs").write_text(str(pid))
                make_ordinary(pid)

    def daemons(self, host: str) -> str:
        """Return the cgroup.procs file of the host's Ray daemons."""
        return str(self.base / host / "daemons" / "cgroup.procs")

    def device_groups(self, scenario: Scenario, host: str) -> DeviceGroups:
        """Return the cgroup.procs files for the workers of `host`."""
        names = [f"device-{index}" for index in range(scenario.devices_of(host))]
        files = [str(self.base / host / name / "cgroup.procs") for name in names]
        start = files[0] if len(files) == 1 else str(self.base / host / "start" / "cgroup.procs")
        return DeviceGroups(files, start, str(self.base / host / "setup" / "cgroup.procs"))


def make_ordinary(pid: int) -> None:
    """Give every thread of a process the ordinary scheduling policy and priority.

    Raises:
        OSError: The process has ended, or this user may not do it.
    """
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):  # both belong to threads, not to processes
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, 0)


def read_pids(procs: str) -> List[int]:
    """Return the process ids in a cgroup.procs file; empty if the group is gone."""
    try:
        with open(procs) as stream:
            return [int(line) for line in stream]
    except (FileNotFoundError, OSError):  # ENODEV while the group is being removed
        return []


class MemoryGroups(GroupTree):
    """The groups of the memory controller, version 1.

        hwaware-NAME/HOST            a worker of several devices of the host
        hwaware-NAME/HOST/device-N   a worker of device N
        hwaware-NAME/HOST-PID        a worker that made this group for itself (hwaware/host_devices.py)

    The kernel ends a process that takes more memory than its devices have. The runtime accounts for its own buffers,
    and refuses before that. The groups catch memory that no account sees.

    Args:
        root: The mount point of the memory controller.
        name: The testbed's name.
    """

    def __init__(self, root: str, name: str) -> None:
        self.mount = Path(root)
        self.base = self.mount / f"hwaware-{name}"
        self.roots = (self.base,)

    def create(self, scenario: Scenario) -> None:
        """Make all groups and set their limits."""
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
        """Return the cgroup.procs files for the workers of `host`, one for each device."""
        return [str(self.base / host / f"device-{n}" / "cgroup.procs") for n in range(scenario.devices_of(host))]


def find_memory_groups(name: str) -> Optional[MemoryGroups]:
    """Return the memory groups for a testbed; None without a writable memory controller of version 1."""
    there = os.path.exists(f"{MEMORY_MOUNT}/memory.limit_in_bytes") and os.access(MEMORY_MOUNT, os.W_OK)
    return MemoryGroups(MEMORY_MOUNT, name) if there else None


def find_cpu_groups(name: str) -> Optional[CpuGroups]:
    """Return the CPU groups for a testbed; None without a writable CPU controller."""
    for mount in V1_MOUNTS:
        if os.path.exists(f"{mount}/cpu.cfs_quota_us") or os.path.exists(f"{mount}/cgroup.procs"):
            return CpuGroups(mount, name, 1) if os.access(mount, os.W_OK) else None
    try:
        controllers = Path(V2_MOUNT, "cgroup.controllers").read_text().split()
    except OSError:
        return None
    # The kernel's root group alone has no type. Any other gives its children no quota while it has processes itself.
    is_shared = os.path.exists(f"{V2_MOUNT}/cgroup.type") and bool(read_pids(f"{V2_MOUNT}/cgroup.procs"))
    usable = "cpu" in controllers and not is_shared and os.access(V2_MOUNT, os.W_OK)
    return CpuGroups(V2_MOUNT, name, 2) if usable else None


def _enable_cpu(group: Path) -> None:
    control = group / "cgroup.subtree_control"
    if "cpu" not in control.read_text().split():
        _write(control, "+cpu")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise TestbedError(
            f"Cannot write {text!r} to {path}: {error.strerror}.",
            f"run as root where control groups are writable ({CONTAINER_NEEDS}).",
        ) from error


def _try_rmdir(directory: str) -> None:
    try:
        os.rmdir(directory)
    except OSError:  # stays busy for a moment after its last process ended: the caller tries again
        return
