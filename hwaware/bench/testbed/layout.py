"""Planning a testbed before anything is made: names, addresses, quotas; pure, save for readers of what is taken."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import random
import socket
import struct
from pathlib import Path
from typing import Callable, Collection, Dict, Iterable, List, NamedTuple, Optional, Sequence

from hwaware.bench.testbed.scenarios import Scenario
from hwaware.errors import TestbedError

# The kernel allows quotas from 1 ms on. The shorter they are, the more often devices take turns on a core, with cold
# caches each time: the layers of a GPT, timed on shares of 0.8, 0.4, 0.4 and 0.2 at once (2026-11, two cores), took
# 141, 153, 148 and 163 ms of processor time with 2 ms, which scattered by 9 to 17 % between timings; with 4 ms they
# took 125, 131, 131 and 132 ms, which scattered by 2 to 4 %.
MIN_QUOTA_US = 4000
# The kernel's limit for a CFS period (kernel/sched/core.c: max_cfs_quota_period).
MAX_PERIOD_US = 1_000_000
# A busy group is stopped at a tick of the scheduler, 4 ms apart with HZ=250, and pays for what it ran too long. Shorter
# periods lose time that way: with 1.25 ms a share of 0.8 came out as 0.56, of 0.4 (2.5 ms) as 0.37; of 0.8, 0.4, 0.4
# and 0.2 at once on two cores, 0.8 came out as 0.74 with 5 ms and as 0.79 with 10 ms (Linux 6.18).
MIN_PERIOD_US = 10_000
# What a group that has waited may run beyond its quota, to catch up with what it lost to a late wake-up. With as much
# as the quota, 4 ms, work of 40 ms of processor time ran 1.20 to 1.25 times as fast as the share after a pause of 30 to
# 60 ms; with 1 ms 1.09 to 1.14, with none at all 1.07 to 1.13.
BURST_US = 1000
HEAD_HOST_NUMBER = 254
CPUS_PER_HOST = 4
# Ray's own ports inside a host's namespace: one aligned block, so that one mask finds them (see links._shape_inside).
RAY_PORTS_FIRST = 0x5000
RAY_PORTS_MASK = 0xFC00
# Where who serves a device listens: a block for each device of a host, by which links inside hosts are told apart.
DEVICE_PORTS_FIRST = 0x5400
DEVICE_PORTS_COUNT = 64
DEVICE_PORTS_MASK = 0xFFFF & ~(DEVICE_PORTS_COUNT - 1)
# Ports of what does not run in a namespace of its own: below those of outgoing connections (32768 to 60999 by default).
FREE_PORTS = range(22000, 32000)
# sockaddr_un holds 107 characters; Ray appends about 70 (session name, "/sockets/plasma_store").
MAX_TEMP_DIR_LENGTH = 30


class Quota(NamedTuple):
    """A CFS quota: the group may run `quota_us` microseconds of CPU time in every `period_us`."""

    quota_us: int
    period_us: int


def cpu_quota(share: float) -> Quota:
    """The shortest period in which the kernel keeps to `share` of a core, and the quota in it.

    Example:
        >>> cpu_quota(0.2), cpu_quota(0.8)
        (Quota(quota_us=4000, period_us=20000), Quota(quota_us=8000, period_us=10000))
    """
    period_us = min(max(MIN_PERIOD_US, round(MIN_QUOTA_US / share)), MAX_PERIOD_US)
    return Quota(max(MIN_QUOTA_US, round(share * period_us)), period_us)


def free_token(taken: Collection[str], random_token: Callable[[], str], tries: int = 100) -> str:
    """A short token that no other testbed has; it goes into the names of links and directories."""
    for _ in range(tries):
        token = random_token()
        if token not in taken:
            return token
    raise TestbedError(f"No free name for a testbed in {tries} tries.", "take down testbeds that are no longer used.")


def free_subnet(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """A /24 of the private ranges that overlaps nothing in `taken`.

    Raises:
        TestbedError: Everything tried is taken.
    """
    occupied = list(taken)
    for candidate in _candidates():
        if not any(candidate.overlaps(network) for network in occupied):
            return candidate
    raise TestbedError(
        "No private /24 network is free: the routes of this machine cover them all.",
        "remove a route (a VPN?) over 10.64.0.0/10, 172.16.0.0/12 or 192.168.0.0/16, or an unused testbed.",
    )


def free_loopback_subnet(taken: Iterable[ipaddress.IPv4Network]) -> ipaddress.IPv4Network:
    """A /24 of the loopback range that no other testbed has."""
    occupied = list(taken)
    subnets = ipaddress.IPv4Network("127.64.0.0/16").subnets(new_prefix=24)
    return next(subnet for subnet in subnets if subnet not in occupied)


def _candidates() -> Iterable[ipaddress.IPv4Network]:
    for large in ("10.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16"):
        yield from ipaddress.IPv4Network(large).subnets(new_prefix=24)


def routed_networks(route_table: str) -> List[ipaddress.IPv4Network]:
    """The networks in the text of /proc/net/route, without default routes."""
    networks = []
    for line in route_table.splitlines()[1:]:
        fields = line.split()
        destination, mask = (struct.unpack("=I", bytes.fromhex(fields[i]))[0] for i in (1, 7))
        if mask:  # the file holds the words in the machine's byte order as numbers; swap to network order
            length = bin(mask).count("1")
            address = socket.inet_ntoa(struct.pack("!I", destination))
            networks.append(ipaddress.IPv4Network(f"{address}/{length}", strict=False))
    return networks


def networks_in_use() -> List[ipaddress.IPv4Network]:
    """The networks that this machine has routes to."""
    return routed_networks(Path("/proc/net/route").read_text())


def host_address(subnet: ipaddress.IPv4Network, index: int) -> str:
    """The address of the host with that index (from 0) in the scenario."""
    return str(subnet[index + 1])


def head_address(subnet: ipaddress.IPv4Network) -> str:
    """The address of the head, which is also the bridge's."""
    return str(subnet[HEAD_HOST_NUMBER])


def hosts_file(addresses: Dict[str, str]) -> str:
    """The text of /etc/hosts inside a host: every host's name and its address."""
    return "127.0.0.1 localhost\n::1 localhost\n" + "".join(
        f"{address} {host}\n" for host, address in addresses.items()
    )


def free_ports(address: str, count: int) -> List[int]:
    """`count` different TCP ports that are free on `address` now; no outgoing connection is given one of them."""
    free: List[int] = []
    for port in random.SystemRandom().sample(FREE_PORTS, len(FREE_PORTS)):  # other testbeds choose at the same time
        with socket.socket() as tried, contextlib.suppress(OSError):  # it is in use
            tried.bind((address, port))
            free.append(port)
        if len(free) == count:
            return free
    raise TestbedError(
        f"{len(free)} ports of {FREE_PORTS.start} to {FREE_PORTS.stop - 1} are free on {address}, expected {count}.",
        "end the programs that listen on them (ss -tlnp).",
    )


def device_ports(index: int) -> range:
    """The ports on which who serves the host's device of that index listens.

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
    """What is said of each device of `host`: id, share, memory_bytes and kind; unshaped ones are all of one kind."""
    share = scenario.shares[host]
    return [
        {
            "id": f"{host}:{index}",
            "share": share,
            "memory_bytes": scenario.memory_bytes(host),
            "kind": f"{of}-{share:.2f}" if shaped else of,
        }
        for index in range(scenario.devices_of(host))
    ]


def devices_variable(
    devices: Sequence[Dict[str, object]],
    groups: Optional[DeviceGroups],
    memory_groups: Sequence[str] = (),
    own_ports: bool = False,
) -> str:
    """The value of HWAWARE_DEVICES on the host of these (`describe_devices`); see hwaware/host_devices.py."""
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
