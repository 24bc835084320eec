"""Plan a testbed's names, addresses, ports and quotas before anything is made.

All functions are pure, except those that read which networks and ports are taken.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import random
import socket
import struct
from pathlib import Path
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence

from hwaware.bench.testbed.scenarios import Scenario
from hwaware.errors import TestbedError

# The kernel allows quotas from 1 ms on. Shorter quotas let devices take turns on a core more often, with cold caches
# each time. Processor time of a GPT's layers on shares of 0.8, 0.4, 0.4 and 0.2 at once (2026-11, two cores):
#   2 ms: 141, 153, 148 and 163 ms; timings scatter by 9 to 17 %
#   4 ms: 125, 131, 131 and 132 ms; timings scatter by 2 to 4 %
MIN_QUOTA_US = 4000
# The kernel's limit for a CFS period (kernel/sched/core.c: max_cfs_quota_period).
MAX_PERIOD_US = 1_000_000
# The scheduler stops a busy group only at its ticks, 4 ms apart with HZ=250. The group pays for the excess, so short
# periods lose time (Linux 6.18):
#   alone: a share of 0.8 came out as 0.56 with 1.25 ms, a share of 0.4 as 0.37 with 2.5 ms
#   beside shares of 0.4, 0.4 and 0.2 on two cores: 0.8 came out as 0.74 with 5 ms, as 0.79 with 10 ms
MIN_PERIOD_US = 10_000
# Time beyond the quota that a group may run after a wait, to make up for a late wake-up. Speed of 40 ms of work after a
# pause of 30 to 60 ms, over the speed that the share allows:
#   a burst of 4 ms, the quota: 1.20 to 1.25
#   a burst of 1 ms: 1.09 to 1.14
#   no burst: 1.07 to 1.13
BURST_US = 1000
HEAD_HOST_NUMBER = 254
HEAD = "ray-head"  # no host has this name: theirs have no hyphen
CPUS_PER_HOST = 4
# Ray's own ports inside a host's namespace: one aligned block, which one mask matches (see links._shape_inside).
RAY_PORTS_FIRST = 0x5000
RAY_PORTS_MASK = 0xFC00
# The ports of a device's worker. Each device of a host has a block of its own, so that filters tell their links apart.
DEVICE_PORTS_FIRST = 0x5400
DEVICE_PORTS_COUNT = 64
DEVICE_PORTS_MASK = 0xFFFF & ~(DEVICE_PORTS_COUNT - 1)
# Ports for processes without a namespace of their own: below outgoing connections' (32768 to 60999 by default).
FREE_PORTS = range(22000, 32000)
# sockaddr_un holds 107 characters; Ray appends about 70 (session name, "/sockets/plasma_store").
MAX_TEMP_DIR_LENGTH = 30


class Quota(NamedTuple):
    """A CFS quota: `quota_us` microseconds of CPU time in every `period_us`."""

    quota_us: int
    period_us: int


def cpu_quota(share: float) -> Quota:
    """Return the quota with the shortest period in which the kernel keeps to `share` of a core.

    Example:
        >>> cpu_quota(0.2), cpu_quota(0.8)
        (Quota(quota_us=4000, period_us=20000), Quota(quota_us=8000, period_us=10000))
    """
    period_us = min(max(MIN_PERIOD_US, round(MIN_QUOTA_US / share)), MAX_PERIOD_US)
    return Quota(max(MIN_QUOTA_US, round(share * period_us)), period_us)


def free_token(is_taken: Callable[[str], bool], random_token: Callable[[], str], tries: int = 100) -> str:
    """Return a token that no other testbed has, for names of links and directories.

    Raises:
        TestbedError: All `tries` tokens were taken.
    """
    for _ in range(tries):
        token = random_token()
        if not is_taken(token):
            return token
    raise TestbedError(f"No free name for a testbed in {tries} tries.", "take down testbeds that you no longer need.")


def free_subnet(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """Return a private /24 network that overlaps none in `taken`.

    Raises:
        TestbedError: All are taken.
    """
    occupied = list(taken)
    for candidate in _candidates():
        if not any(candidate.overlaps(network) for network in occupied):
            return candidate
    raise TestbedError(
        "No private /24 network is free: this machine's routes cover them all.",
        "remove a route (a VPN?) over 10.64.0.0/10, 172.16.0.0/12 or 192.168.0.0/16, or an unused testbed.",
    )


def free_loopback_subnet(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """Return a /24 network of the loopback range that is not in `taken`."""
    occupied = list(taken)
    subnets = ipaddress.IPv4Network("127.64.0.0/16").subnets(new_prefix=24)
    return next(subnet for subnet in subnets if subnet not in occupied)


def _candidates() -> Iterable[ipaddress.IPv4Network]:
    for large in ("10.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16"):
        yield from ipaddress.IPv4Network(large).subnets(new_prefix=24)


def routed_networks(route_table: str) -> List[ipaddress.IPv4Network]:
    """Return the networks in the text of /proc/net/route, without default routes."""
    networks = []
    for line in route_table.splitlines()[1:]:
        fields = line.split()
        destination, mask = (struct.unpack("=I", bytes.fromhex(fields[i]))[0] for i in (1, 7))
        if mask:  # the file has numbers in the machine's byte order; swap to network order
            length = bin(mask).count("1")
            address = socket.inet_ntoa(struct.pack("!I", destination))
            networks.append(ipaddress.IPv4Network(f"{address}/{length}", strict=False))
    return networks


def networks_in_use() -> List[ipaddress.IPv4Network]:
    """Return the networks that this machine has routes to."""
    return routed_networks(Path("/proc/net/route").read_text())


def host_address(subnet: ipaddress.IPv4Network, index: int) -> str:
    """Return the address of the scenario's host number `index`, from 0."""
    return str(subnet[index + 1])


def head_address(subnet: ipaddress.IPv4Network) -> str:
    """Return the head's address, which is also the bridge's."""
    return str(subnet[HEAD_HOST_NUMBER])


def hosts_file(addresses: Dict[str, str]) -> str:
    """Return the text of /etc/hosts inside a host, with every host's name and address."""
    return "127.0.0.1 localhost\n::1 localhost\n" + "".join(
        f"{address} {host}\n" for host, address in addresses.items()
    )


def free_ports(address: str, count: int) -> List[int]:
    """Return `count` TCP ports that are free on `address` now, outside the range of outgoing connections.

    Raises:
        TestbedError: Fewer ports are free.
    """
    free: List[int] = []
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):  # other testbeds choose at the same time
        with socket.socket() as tried, contextlib.suppress(OSError):  # it is in use
            tried.bind((address, port))
            free.append(port)
        if len(free) == count:
            return free
    raise TestbedError(
        f"{len(free)} ports from {FREE_PORTS.start} to {FREE_PORTS.stop - 1} are free on {address}, expected {count}.",
        "end programs that listen on the others (ss -tlnp).",
    )


def device_ports(index: int) -> range:
    """Return the ports for the worker of a host's device number `index`.

    Example:
        >>> device_ports(1)
        range(21568, 21632)
    """
    first = DEVICE_PORTS_FIRST + index * DEVICE_PORTS_COUNT
    return range(first, first + DEVICE_PORTS_COUNT)


class DeviceGroups(NamedTuple):
    """The cgroup.procs files of one host's groups."""

    devices: Sequence[str]
    start: str
    setup: str


def describe_devices(scenario: Scenario, host: str, shaped: bool, of: str = "cpu") -> List[Dict[str, object]]:
    """Return id, share, memory_bytes and kind of each device of `host`.

    Args:
        scenario: The scenario.
        host: The host's name.
        shaped: Shares are shaped, so that each share is a kind of its own; otherwise all devices have one kind.
        of: The kind without its share.
    """
    share = scenario.shares[host]
    return [
        {
            "id": f"{host}:{index}",
            "share": share,
            "memory_bytes": scenario.memory_bytes(host),
            "kind": f"{of}-{f'{share:.2f}' if round(share, 2) == share else f'{share:g}'}" if shaped else of,
        }
        for index in range(scenario.devices_of(host))
    ]


def devices_variable(
    devices: Sequence[Dict[str, object]],
    groups: Optional[DeviceGroups],
    memory_groups: Sequence[str] = (),
    own_ports: bool = False,
) -> str:
    """Return the value of HWAWARE_DEVICES for a host; hwaware/host_devices.py reads it.

    Args:
        devices: The host's devices, from `describe_devices`.
        groups: The host's CPU groups, if shares are shaped.
        memory_groups: The cgroup.procs file of each device's memory group; empty without memory limits.
        own_ports: Each device has ports of its own (`device_ports`).
    """
    entries = []
    for index, device in enumerate(devices):
        entry = {key: device[key] for key in ("id", "kind", "memory_bytes")}
        if own_ports:
            ports = device_ports(index)
            entry.update(ports=[ports[0], ports[-1]])
        if groups is not None:
            entry.update(group=groups.devices[index], start_group=groups.start, setup_group=groups.setup)
        if memory_groups:
            entry.update(memory_group=memory_groups[index])
        entries.append(entry)
    return json.dumps(entries)
