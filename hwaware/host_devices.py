"""Read HWAWARE_DEVICES, which declares what the operating system cannot say of this host's devices.

A host without GPUs does not report the kind of its devices, nor the memory that each may use. A testbed's host must
also say which CPU quota belongs to which device. The environment variable holds a JSON list, one entry a device, in the
order of their indices:

    [{"id": "h0:0", "kind": "cpu-0.80", "memory_bytes": 2147483648,
      "ports": [FIRST, LAST]?, "group": FILE?, "start_group": FILE?, "setup_group": FILE?, "memory_group": FILE?}]

The worker of a device receives arrays and measurements on one of its `ports`; without them, on any port. Behind a
firewall, name ports that are open.

Each FILE is the `cgroup.procs` of a control group. `group` has the device's CPU quota, and `start_group` holds the
host's processes that serve no device yet. `setup_group` has no quota, and `memory_group` limits the device's memory.
Leave all four out to declare CPU hosts by hand.

This module imports the standard library alone, because workers import it first.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from typing import Any, Dict, Iterator, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.errors import HwawareError, UnusableInputError

VARIABLE = "HWAWARE_DEVICES"
ANY_PORT = (0,)
_HIGHEST_PORT = 65535
_GROUPS = ("group", "start_group", "setup_group", "memory_group")
_FIX = (
    f"set {VARIABLE} to a JSON list of "
    '{"id": "h0:0", "kind": "cpu", "memory_bytes": 2147483648}, one for each device, before `ray start`; or unset it.'
)


class DeclaredDevice(NamedTuple):
    """One device of this host, as declared.

    Attributes:
        id: The device's id in cluster.json, for example "h0:0".
        kind: Name of its kind; devices of one kind are interchangeable.
        memory_bytes: Memory that the device may use.
        group: The `cgroup.procs` file of the device's CPU quota, if it has one.
        start_group: The file of the group for the host's processes that serve no device yet.
        setup_group: The file of the group for work that no quota should slow, such as imports and compilation.
        memory_group: The file of the group with the limit of the device's memory; its parent has the whole host's.
        ports: TCP ports of the device's worker, which listens on the first free one; 0 is any.
    """

    id: str
    kind: str
    memory_bytes: int
    group: Optional[str] = None
    start_group: Optional[str] = None
    setup_group: Optional[str] = None
    memory_group: Optional[str] = None
    ports: Sequence[int] = ANY_PORT


class _Membership:
    """The control group of this process, with a lock for concurrent `unthrottled` blocks."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.joined: Optional[str] = None
        self.unthrottled_depth = 0


_membership = _Membership()


def declared() -> Tuple[DeclaredDevice, ...]:
    """Return the devices that HWAWARE_DEVICES declares for this host; none without the variable.

    Raises:
        UnusableInputError: The variable does not hold such a list.

    Example:
        >>> os.environ[VARIABLE] = '[{"id": "h0:0", "kind": "cpu", "memory_bytes": 1024}]'
        >>> declared()[0].memory_bytes
        1024
        >>> del os.environ[VARIABLE]
    """
    text = os.environ.get(VARIABLE)
    if not text:
        return ()
    try:
        entries = json.loads(text)
    except ValueError as error:
        raise UnusableInputError(f"{VARIABLE} is not valid JSON: {error}.", _FIX) from error
    if not isinstance(entries, list):
        raise UnusableInputError(f"{VARIABLE} holds a {type(entries).__name__}, expected a list.", _FIX)
    return tuple(_device(index, entry) for index, entry in enumerate(entries))


def ports(index: int) -> Sequence[int]:
    """Return the ports of the device with this index, or `ANY_PORT` if the host declares none."""
    devices = declared()
    return devices[index].ports if index < len(devices) else ANY_PORT


def join(*indices: int) -> None:
    """Move this process into the control group of the host's devices with these indices.

    A process that serves several devices joins a new group beside theirs, with the sum of their quotas. Devices without
    groups change nothing.

    Raises:
        UnusableInputError: The host declares devices, but fewer than an index asks for.
        HwawareError: The move failed.
    """
    devices = declared()
    if not devices:
        return
    unknown = [index for index in indices if not 0 <= index < len(devices)]
    if unknown:
        raise UnusableInputError(
            f"This process serves device {unknown[0]} of its host, but {VARIABLE} declares {len(devices)}.", _FIX
        )
    groups = [group for group in (devices[index].group for index in indices) if group is not None]
    if not groups:
        return
    group = groups[0] if len(groups) == 1 else _joint_group(groups)
    with _membership.lock:
        _membership.joined = group
        if _membership.unthrottled_depth == 0:
            _move_self(group)


def limit_memory(*indices: int) -> None:
    """Limit this process to the memory of the host's devices with these indices; beyond it, the kernel ends it.

    The process joins a group of its own. So its earlier memory does not count. Nor does the memory of other processes
    on the same devices, such as those of a benchmark's other mappings. A process that serves several devices gets the
    limit of the whole host. Devices without memory groups change nothing.

    Raises:
        HwawareError: The function could not make the group, or not move the process there.
    """
    devices = declared()
    groups = [devices[index].memory_group for index in indices if index < len(devices)]
    given = [group for group in groups if group is not None]
    if given:
        device = os.path.dirname(given[0])
        host = os.path.dirname(device)
        _move_self(_own_memory_group(device if len(given) == 1 else host, f"{host}-{os.getpid()}"))


@contextlib.contextmanager
def unthrottled() -> Iterator[None]:
    """Run the block without a CPU quota, as for imports and compilation, then restore the quota.

    The whole process leaves its quota, with all threads, so measure nothing meanwhile. Without declared groups, the
    block just runs.
    """
    devices = declared()
    setup = devices[0].setup_group if devices else None
    if setup is None:
        yield
        return
    with _membership.lock:
        if _membership.unthrottled_depth == 0:
            _move_self(setup)
        _membership.unthrottled_depth += 1
    try:
        yield
    finally:
        with _membership.lock:
            _membership.unthrottled_depth -= 1
            home = _membership.joined or devices[0].start_group
            if _membership.unthrottled_depth == 0 and home is not None:
                _move_self(home)


@contextlib.contextmanager
def on_one_processor() -> Iterator[None]:
    """Run the block, with all threads of this process, on the last processor that it may use.

    Two virtual processors of one machine can differ by half for seconds, each slowed by others on its core. So
    hwaware compares devices that are shares of a processor only on the same processor. Without declared groups,
    the block just runs.
    """
    if not any(device.group for device in declared()) or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = dict(_affinities())
    last = {max(before[os.getpid()])}
    _bind(dict.fromkeys(before, last))
    try:
        yield
    finally:
        # Threads that started meanwhile inherited the one processor.
        _bind({thread: before.get(thread, before[os.getpid()]) for thread, _ in _affinities()})


def _affinities() -> Iterator[Tuple[int, Set[int]]]:
    for name in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            yield int(name), os.sched_getaffinity(int(name))


def _bind(processors: Mapping[int, Set[int]]) -> None:
    for thread, chosen in processors.items():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, chosen)


def _device(index: int, entry: Any) -> DeclaredDevice:
    where = f"entry {index} of {VARIABLE}"
    if not isinstance(entry, dict):
        raise UnusableInputError(f"{where} is {entry!r}, expected an object.", _FIX)
    memory_bytes = entry.get("memory_bytes")
    if not isinstance(memory_bytes, int) or isinstance(memory_bytes, bool) or memory_bytes <= 0:
        raise UnusableInputError(f"memory_bytes of {where} is {memory_bytes!r}, expected a whole number above 0.", _FIX)
    groups = {key: _text(entry, key, where) for key in _GROUPS if entry.get(key) is not None}
    ports = _ports(entry["ports"], where) if "ports" in entry else ANY_PORT
    name = _text(entry, "id", where)
    if "+" in name:  # joins names, as in --only
        raise UnusableInputError(f"id of {where} is {name!r}, expected a name without +.", _FIX)
    return DeclaredDevice(name, _text(entry, "kind", where), memory_bytes, ports=ports, **groups)


def _ports(value: Any, where: str) -> Sequence[int]:
    numbers = isinstance(value, list) and [type(number) for number in value] == [int, int]
    if not numbers or not 0 < value[0] < value[1] <= _HIGHEST_PORT:  # a restarted worker needs a second port
        raise UnusableInputError(
            f"ports of {where} is {value!r}, expected [FIRST, LAST], two port numbers of 1 to {_HIGHEST_PORT}.", _FIX
        )
    return range(value[0], value[1] + 1)


def _text(entry: Dict[str, Any], key: str, where: str) -> str:
    value = entry.get(key)
    if not isinstance(value, str) or not value:
        raise UnusableInputError(f"{key} of {where} is {value!r}, expected a name.", _FIX)
    return value


def joint_quota(quotas: Sequence[Tuple[int, int]]) -> Tuple[int, int]:
    """Return the (quota, period) that gives one group the processor time of several; a quota of -1 is no limit.

    Example:
        >>> joint_quota([(2000, 10000), (3200, 4000)])
        (10000, 10000)
    """
    period = max(period for _, period in quotas)
    if any(quota < 0 for quota, _ in quotas):
        return -1, period
    return round(sum(quota / of for quota, of in quotas) * period), period


def _own_memory_group(like: str, own: str) -> str:
    """Make a group with the memory limit of the group `like`, and return its `cgroup.procs`."""
    try:
        os.makedirs(own, exist_ok=True)
        _write(own, "memory.limit_in_bytes", _read(like, "memory.limit_in_bytes"))
        _write(own, "memory.swappiness", "0")
    except OSError as error:
        raise _no_group(own, error) from error
    return os.path.join(own, "cgroup.procs")


def _no_group(group: str, error: OSError) -> HwawareError:
    return HwawareError(
        f"This process could not make the control group {group}: {error.strerror}.",
        "check that the testbed is still up (`hwaware testbed list`) and that this process runs as its user.",
    )


def _joint_group(groups: Sequence[str]) -> str:
    """Make a group beside the given ones with the sum of their quotas, and return its `cgroup.procs`."""
    folders = [os.path.dirname(group) for group in groups]
    joint = "+".join([folders[0], *(os.path.basename(folder) for folder in folders[1:])])
    try:
        os.makedirs(joint, exist_ok=True)
        _write_quota(joint, joint_quota([_read_quota(folder) for folder in folders]), folders[0])
    except OSError as error:
        raise _no_group(joint, error) from error
    return os.path.join(joint, "cgroup.procs")


def _read_quota(folder: str) -> Tuple[int, int]:
    if os.path.exists(os.path.join(folder, "cpu.max")):  # control groups of version 2
        quota, period = _read(folder, "cpu.max").split()
    else:
        quota, period = _read(folder, "cpu.cfs_quota_us"), _read(folder, "cpu.cfs_period_us")
    return -1 if quota == "max" else int(quota), int(period)


def _write_quota(folder: str, limits: Tuple[int, int], like: str) -> None:
    """Write the quota and the period, and the burst of the group `like`."""
    quota, period = limits
    second = os.path.exists(os.path.join(folder, "cpu.max"))
    burst = "cpu.max.burst" if second else "cpu.cfs_burst_us"
    bursts = os.path.exists(os.path.join(folder, burst))
    if bursts:
        _write(folder, burst, "0")  # a burst may never exceed the quota, not even while the quota changes
    if second:
        _write(folder, "cpu.max", f"{'max' if quota < 0 else quota} {period}")
    else:
        _write(folder, "cpu.cfs_period_us", str(period))
        _write(folder, "cpu.cfs_quota_us", str(quota))
    if bursts and quota >= 0:
        _write(folder, burst, _read(like, burst))


def _read(folder: str, name: str) -> str:
    with open(os.path.join(folder, name)) as stream:
        return stream.read().strip()


def _write(folder: str, name: str, text: str) -> None:
    with open(os.path.join(folder, name), "w") as stream:
        stream.write(text)


def _move_self(group: str) -> None:
    try:
        with open(group, "w") as stream:
            stream.write(str(os.getpid()))
    except OSError as error:
        raise HwawareError(
            f"Process {os.getpid()} could not move to the control group {os.path.dirname(group)}: {error.strerror}.",
            "check that the testbed is still up (`hwaware testbed list`) and that this process runs as its user.",
        ) from error
