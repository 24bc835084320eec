"""Split kinds of devices whose speeds differ: one host may be slowed down, one card may throttle itself.

A layer has one time for all devices of a kind. So devices whose measured products differ by more than noise need
kinds of their own.
"""

from __future__ import annotations

from typing import Dict, List

import msgspec

from hwaware.cluster import ClusterProfile, Device

# Quick profiles of like devices repeat within 8 %.
_ALIKE = 1.25


def by_speed(profile: ClusterProfile) -> ClusterProfile:
    """Return the profile with kinds split where devices are slower by more than a quarter.

    The fastest devices keep their kind. Each slower group gets the factor behind its kind's name.

    Example:
        >>> from hwaware.cluster import Host, Link, MatrixProduct
        >>> devices = tuple(
        ...     Device(id=f"{host}:0", host=host, kind="cpu", memory_bytes=1,
        ...            throughput={"float32": (MatrixProduct(flops=1e9, seconds=seconds),)})
        ...     for host, seconds in (("a", 0.1), ("b", 0.105), ("c", 0.2)))
        >>> link = dict(latency_s=0.0, bandwidth_bytes_per_s=1e9)
        >>> profile = ClusterProfile(hosts=tuple(Host(name=h) for h in "abc"), devices=devices,
        ...     links=(Link(source="a", target="b", **link), Link(source="b", target="c", **link)))
        >>> [device.kind for device in by_speed(profile).devices]
        ['cpu', 'cpu', 'cpu (2.00x slower)']
    """
    fastest: Dict[str, float] = {}
    for device in profile.devices:
        fastest[device.kind] = min(fastest.get(device.kind, float("inf")), _time_s(device, profile))
    groups: Dict[str, List[float]] = {}
    devices = []
    for device in sorted(profile.devices, key=lambda one: _time_s(one, profile)):
        factor = _time_s(device, profile) / fastest[device.kind]
        known = groups.setdefault(device.kind, [1.0])
        if factor > _ALIKE * known[-1]:
            known.append(factor)
        kind = device.kind if known[-1] == 1.0 else f"{device.kind} ({known[-1]:.2f}x slower)"
        devices.append(msgspec.structs.replace(device, kind=kind))
    order = {device.id: place for place, device in enumerate(profile.devices)}
    return msgspec.structs.replace(profile, devices=tuple(sorted(devices, key=lambda one: order[one.id])))


def _time_s(device: Device, profile: ClusterProfile) -> float:
    """Return seconds per FLOP in the largest product that all devices measured."""
    dtype = min(device.throughput)
    most = min(one.throughput[dtype][-1].flops for one in profile.devices if dtype in one.throughput)
    points = [point for point in device.throughput[dtype] if point.flops <= most] or device.throughput[dtype][:1]
    point = max(points, key=lambda p: p.flops)
    return point.seconds / point.flops
