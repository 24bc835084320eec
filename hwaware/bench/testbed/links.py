"""Links: veth pairs behind one bridge, and the rate of every directed link on its sender.

A rate is an HTB class, chosen by a u32 filter on the target address; inside a host, where all devices have the same
address, on the target's port. Acknowledgements are not shaped: in one queue with the data of the other direction they
held up both (messages of 4 MiB over 100 Mbit/s took 335 to 615 ms with both directions busy, without that 335 ms), and
most systems that the links stand for have more than one queue. pyroute2 talks to the kernel directly; neither `ip` nor
`tc` need be installed.
"""

from __future__ import annotations

import errno
import ipaddress
from typing import Any, Dict, List, Optional

from hwaware.bench.testbed.layout import DEVICE_PORTS_MASK, RAY_PORTS_FIRST, RAY_PORTS_MASK, device_ports
from hwaware.errors import TestbedError

PREFIX_LENGTH = 24
_ROOT = 0x10000  # the handle 1:
_UNSHAPED = _ROOT  # as a target, the class 1:0: HTB's direct queue
_BITS_PER_BYTE = 8
# The rates are of payload: a frame of 1514 bytes carries 1448 of a TCP stream (Ethernet 14, IP 20, TCP 32).
_FRAME_BYTES_PER_PAYLOAD_BYTE = 1514 / 1448
# HTB makes up for late wake-ups only within its burst. One large segment (64 KiB) must fit.
_BURST_BYTES = 64 << 10
_BURST_S = 1e-3
_ETH_P_IP = 0x0800
_SOURCE_PORT, _TARGET_PORT = 20, 22  # where they stand behind an IP header without options
# Total length in the IP header, 32 to 63 and 64 to 127: an acknowledgement has 40 to 88 bytes with its options. 0 is no
# such length: it stands for more than 65535, which the loopback has.
_SHORT = "0x0020/0xffe0+2", "0x0040/0xffc0+2"


def _route() -> Any:
    try:
        import pyroute2
    except ModuleNotFoundError as error:
        raise TestbedError("pyroute2 is not installed.", "pip install 'hwaware[testbed]'.") from error
    return pyroute2.IPRoute()


def create_bridge(name: str, address: str) -> None:
    """Make the bridge of a testbed, give it `address`, and bring it and the loopback of this namespace up."""
    with _route() as route:
        route.link("add", ifname=name, kind="bridge")
        index = _index(route, name)
        route.addr("add", index=index, address=address, prefixlen=PREFIX_LENGTH)
        route.link("set", index=index, state="up")
        route.link("set", index=_index(route, "lo"), state="up")


def connect_host(bridge: str, veth: str, pid: int) -> None:
    """Join the network namespace of process `pid`, where the link is called eth0, to the bridge."""
    with _route() as route:
        route.link("add", ifname=veth, kind="veth", peer={"ifname": "eth0", "net_ns_pid": pid})
        route.link("set", index=_index(route, veth), master=_index(route, bridge), state="up")


def remove_link(name: str) -> None:
    """Remove a bridge or one end of a veth pair (the other goes with it); nothing happens if there is none."""
    with _route() as route:
        from pyroute2 import NetlinkError

        for index in route.link_lookup(ifname=name):
            try:
                route.link("del", index=index)
            except NetlinkError as error:
                # A veth pair goes with the host's namespace, which the kernel takes down when it likes.
                if error.code != errno.ENODEV:
                    raise


def link_names() -> List[str]:
    """The names of all network links of this namespace."""
    with _route() as route:
        return [link.get_attr("IFLA_IFNAME") for link in route.get_links()]


def configure_host(address: str, rates_mbit: Dict[str, float], inside_mbit: Optional[float], num_devices: int) -> None:
    """Inside a host's namespace: bring lo and eth0 up, and set the rate to every address in `rates_mbit`."""
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
    """Shape what the host sends to its own address, except from and to Ray's ports (layout.RAY_PORTS_FIRST).

    What is sent to each device (layout.device_ports) has a rate of its own, so that the directions between two devices
    do not share one; all else has one rate together.
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
            f"The network link {name} is gone.", "did another program remove it? Start the testbed again."
        )
    return int(found[0])


def _to(address: str) -> str:
    return f"{int(ipaddress.IPv4Address(address)):#010x}/0xffffffff+16"  # destination address in the IP header


def _add_root(route: Any, index: int) -> None:
    route.tc("add", "htb", index, _ROOT, default=0)  # what no filter matches (the head, ARP) is not shaped
    for length in _SHORT:
        _add_filter(route, index, _UNSHAPED, [length], priority=1)


def _add_rate(route: Any, index: int, number: int, mbit: float) -> None:
    bytes_per_s = mbit * 1e6 / _BITS_PER_BYTE * _FRAME_BYTES_PER_PAYLOAD_BYTE
    burst = max(_BURST_BYTES, int(bytes_per_s * _BURST_S))
    route.tc(
        "add-class", "htb", index, _ROOT | number, parent=_ROOT,
        rate=int(bytes_per_s), burst=burst, cburst=burst, quantum=_BURST_BYTES,
    )  # fmt: skip


def _add_filter(route: Any, index: int, target: int, keys: List[str], priority: int) -> None:
    route.tc("add-filter", "u32", index, parent=_ROOT, prio=priority, protocol=_ETH_P_IP, target=target, keys=keys)
