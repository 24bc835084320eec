"""Connect hosts by veth pairs behind one bridge, and set the rate of each directed link on its sender.

A rate is an HTB class. A u32 filter chooses it by the target address. Inside a host all devices have one address, so
the filter uses the target's port.

Each class has Linux's default queue (pfifo_fast), in which packets of a low priority wait for the others.

Acknowledgements pass unshaped. In one queue with the data of the other direction, they held up both. Messages of 4 MiB
over 100 Mbit/s, in both directions at once, took 335 to 615 ms that way. Without it they took 335 ms. Most systems
that the links stand for have more than one queue.

pyroute2 talks to the kernel directly, so neither `ip` nor `tc` needs to be installed.
"""

from __future__ import annotations

import errno
import ipaddress
from typing import Any, Dict, List, Optional

from hwaware.bench.testbed.layout import DEVICE_PORTS_MASK, RAY_PORTS_FIRST, RAY_PORTS_MASK, device_ports
from hwaware.errors import TestbedError

PREFIX_LENGTH = 24
_ROOT = 0x10000  # the handle 1:
_UNSHAPED = _ROOT  # as a filter's target, HTB's direct queue: the class 1:0
_BITS_PER_BYTE = 8
# Rates count payload. A frame of 1514 bytes carries 1448 bytes of a TCP stream (Ethernet 14, IP 20, TCP 32).
_FRAME_BYTES_PER_PAYLOAD_BYTE = 1514 / 1448
# HTB makes up for late wake-ups only within its burst, which must hold one large segment (64 KiB).
_BURST_BYTES = 64 << 10
_BURST_S = 1e-3
_ETH_P_IP = 0x0800
_SOURCE_PORT, _TARGET_PORT = 20, 22  # offsets behind an IP header without options
# Filters for a total length of 32 to 63 and 64 to 127 bytes. An acknowledgement with options has 40 to 88 bytes. Length
# 0 does not match: on the loopback it stands for more than 65535 bytes.
_SHORT = "0x0020/0xffe0+2", "0x0040/0xffc0+2"


def _route() -> Any:
    try:
        import pyroute2
    except ModuleNotFoundError as error:
        raise TestbedError("pyroute2 is not installed.", "pip install 'hwaware[testbed]'.") from error
    return pyroute2.IPRoute()


def create_bridge(name: str, address: str) -> None:
    """Make a testbed's bridge with `address`, and bring it and this namespace's loopback up."""
    with _route() as route:
        route.link("add", ifname=name, kind="bridge")
        index = _index(route, name)
        route.addr("add", index=index, address=address, prefixlen=PREFIX_LENGTH)
        route.link("set", index=index, state="up")
        route.link("set", index=_index(route, "lo"), state="up")


def connect_host(bridge: str, veth: str, pid: int) -> None:
    """Connect the network namespace of process `pid` to the bridge, as its eth0."""
    with _route() as route:
        route.link("add", ifname=veth, kind="veth", peer={"ifname": "eth0", "net_ns_pid": pid})
        route.link("set", index=_index(route, veth), master=_index(route, bridge), state="up")


def remove_link(name: str) -> None:
    """Remove a bridge, or a veth pair by either end; do nothing if it is gone."""
    with _route() as route:
        from pyroute2 import NetlinkError

        for index in route.link_lookup(ifname=name):
            try:
                route.link("del", index=index)
            except NetlinkError as error:
                # The kernel may just have removed the pair together with the host's namespace.
                if error.code != errno.ENODEV:
                    raise


def configure_host(address: str, rates_mbit: Dict[str, float], inside_mbit: Optional[float], num_devices: int) -> None:
    """Bring lo and eth0 of this namespace up, and set the rates of its links.

    Args:
        address: The host's address.
        rates_mbit: The rate to each other host's address in Mbit/s.
        inside_mbit: The rate to each device from the same host's others in Mbit/s; None leaves it unshaped.
        num_devices: The host's number of devices.
    """
    with _route() as route:
        loopback, ethernet = _index(route, "lo"), _index(route, "eth0")
        route.link("set", index=loopback, state="up")
        route.addr("add", index=ethernet, address=address, prefixlen=PREFIX_LENGTH)
        route.link("set", index=ethernet, state="up")
        _add_root(route, ethernet)
        for number, (target, mbit) in enumerate(rates_mbit.items(), start=1):
            _add_rate(route, ethernet, number, mbit)
            _add_filter(route, ethernet, _ROOT | number, [_to(target)], priority=2)
        if inside_mbit is not None:
            _shape_inside(route, loopback, address, inside_mbit, num_devices)


def _shape_inside(route: Any, loopback: int, address: str, mbit: float, num_devices: int) -> None:
    """Shape traffic from the host to its own address, except Ray's (layout.RAY_PORTS_FIRST).

    Traffic to each device (layout.device_ports) has a rate of its own, so the two directions between devices share
    none. All other traffic shares one rate.
    """
    _add_root(route, loopback)
    for port in (_SOURCE_PORT, _TARGET_PORT):
        key = f"{RAY_PORTS_FIRST:#06x}/{RAY_PORTS_MASK:#06x}+{port}"
        _add_filter(route, loopback, _UNSHAPED, [key], priority=1)
    for index in range(num_devices):
        _add_rate(route, loopback, 2 + index, mbit)
        key = f"{device_ports(index)[0]:#06x}/{DEVICE_PORTS_MASK:#06x}+{_TARGET_PORT}"
        _add_filter(route, loopback, _ROOT | (2 + index), [_to(address), key], priority=2)
    _add_rate(route, loopback, 1, mbit)
    _add_filter(route, loopback, _ROOT | 1, [_to(address)], priority=3)


def _index(route: Any, name: str) -> int:
    found = route.link_lookup(ifname=name)
    if not found:
        raise TestbedError(
            f"The network link {name} is gone.", "start the testbed again; another program may have removed the link."
        )
    return int(found[0])


def _to(address: str) -> str:
    return f"{int(ipaddress.IPv4Address(address)):#010x}/0xffffffff+16"  # destination address in the IP header


def _add_root(route: Any, index: int) -> None:
    route.tc("add", "htb", index, _ROOT, default=0)  # packets that match no filter (the head's, ARP) pass unshaped
    for length in _SHORT:
        _add_filter(route, index, _UNSHAPED, [length], priority=1)


def _add_rate(route: Any, index: int, number: int, mbit: float) -> None:
    bytes_per_s = mbit * 1e6 / _BITS_PER_BYTE * _FRAME_BYTES_PER_PAYLOAD_BYTE
    burst = max(_BURST_BYTES, int(bytes_per_s * _BURST_S))
    route.tc(
        "add-class", "htb", index, _ROOT | number, parent=_ROOT,
        rate=int(bytes_per_s), burst=burst, cburst=burst, quantum=_BURST_BYTES,
    )  # fmt: skip
    route.tc("add", "pfifo_fast", index, _ROOT * (number + 1), parent=_ROOT | number)


def _add_filter(route: Any, index: int, target: int, keys: List[str], priority: int) -> None:
    route.tc("add-filter", "u32", index, parent=_ROOT, prio=priority, protocol=_ETH_P_IP, target=target, keys=keys)
