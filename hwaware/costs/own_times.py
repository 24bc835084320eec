"""Let devices of one kind have times of their own: one host may be slowed down, one card may throttle itself.

A workload names measured times by a device's kind, or by its id, which wins. Prices know kinds alone. So devices with
times of their own get kinds of their own, one for all devices whose times are equal.
"""

from __future__ import annotations

import math
import statistics
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile, Device
from hwaware.costs.compute import device_time_s
from hwaware.workload import Layer, MeasuredTime, Workload

Times = Dict[str, MeasuredTime]
# Devices whose layers take the same time up to this factor share one time, their mean. Times repeat within 3 to 5 %.
_ALIKE = 1.06


def with_own_kinds(workload: Workload, profile: ClusterProfile) -> Tuple[Workload, ClusterProfile]:
    """Return workload and profile in which no device has times of its own: such devices have kinds of their own.

    Args:
        workload: Layers whose `measured` may have ids of devices among its kinds.
        profile: Cluster with these devices.

    Example:
        >>> layer = Layer(name="0", forward_flops=1, backward_flops=2, parameter_bytes=0, output_bytes=0,
        ...               activation_bytes=0, measured={
        ...                   "cpu": {"1,1": MeasuredTime(forward_s=0.1, backward_s=0.2)},
        ...                   "h1:0": {"1,1": MeasuredTime(forward_s=0.3, backward_s=0.6)}})
        >>> profile = ClusterProfile.uniform(hosts=3, flops_per_s=1e10)
        >>> workload = Workload(name="one", microbatch_size=4, dtype="float32", layers=(layer,))
        >>> split, kinds = with_own_kinds(workload, profile)
        >>> [device.kind for device in kinds.devices]
        ['cpu', 'cpu like h1:0', 'cpu']
        >>> split.layers[0].measured["cpu like h1:0"]["1,1"].forward_s
        0.3
    """
    named = {name for layer in workload.layers for name in layer.measured or ()}
    own = [device for device in profile.devices if device.id in named]
    if not own:
        return workload, profile
    kinds: Dict[Tuple[str, bytes], str] = {}
    of_devices: Dict[str, str] = {}
    sources: Dict[str, Tuple[str, str]] = {}
    for device in own:
        times = [(layer.measured or {}).get(device.id) for layer in workload.layers]
        kind = kinds.setdefault((device.kind, msgspec.json.encode(times)), f"{device.kind} like {device.id}")
        of_devices[device.id] = kind
        sources.setdefault(kind, (device.kind, device.id))
    ids = {device.id for device in own}
    layers = tuple(_renamed(layer, sources, ids) for layer in workload.layers)
    devices = tuple(
        msgspec.structs.replace(device, kind=of_devices.get(device.id, device.kind)) for device in profile.devices
    )
    return msgspec.structs.replace(workload, layers=layers), msgspec.structs.replace(profile, devices=devices)


def _renamed(layer: Layer, sources: Mapping[str, Tuple[str, str]], ids: set[str]) -> Layer:
    """Return the layer with kinds in place of ids; a device without times of its own keeps those of its kind."""
    known = layer.measured or {}
    found = {name: times for name, times in known.items() if name not in ids}
    for kind, (usual, device) in sources.items():
        times = known.get(device, known.get(usual))
        if times is not None:
            found[kind] = times
    return msgspec.structs.replace(layer, measured=found or None)


def with_device_times(workload: Workload, profile: ClusterProfile, times: Mapping[str, Sequence[Times]]) -> Workload:
    """Return the workload with times measured on devices, those of like devices joined.

    Times of the fastest group of a kind stand under the kind's name, and also count for devices that were not measured.

    Args:
        workload: The layers.
        profile: Cluster of these devices.
        times: Device -> for each layer, "DP,TP" -> its times; empty where it was not measured.

    Example:
        >>> layer = Layer(name="0", forward_flops=1, backward_flops=2, parameter_bytes=0, output_bytes=0,
        ...               activation_bytes=0)
        >>> workload = Workload(name="one", microbatch_size=4, dtype="float32", layers=(layer,))
        >>> profile = ClusterProfile.uniform(hosts=3, flops_per_s=1e10)
        >>> took = {"h0:0": 0.100, "h1:0": 0.300, "h2:0": 0.104}
        >>> found = with_device_times(workload, profile, {
        ...     name: [{"1,1": MeasuredTime(forward_s=seconds, backward_s=seconds)}] for name, seconds in took.items()})
        >>> {name: round(one["1,1"].forward_s, 3) for name, one in found.layers[0].measured.items()}
        {'cpu': 0.102, 'h1:0': 0.3}
    """
    kinds: Dict[str, List[str]] = {}
    for device in profile.devices:
        if device.id in times:
            kinds.setdefault(device.kind, []).append(device.id)
    found: List[Dict[str, Times]] = [dict(layer.measured or {}) for layer in workload.layers]
    for kind, names in kinds.items():
        for number, group in enumerate(_groups({name: _total_s(times[name]) for name in names})):
            joined = [_joined(of_layer) for of_layer in zip(*(times[name] for name in group))]
            for name in [kind] if number == 0 else group:
                for layer, one in zip(found, joined):
                    if one:
                        layer[name] = one
    layers = (
        msgspec.structs.replace(layer, measured=measured or None) for layer, measured in zip(workload.layers, found)
    )
    return msgspec.structs.replace(workload, layers=tuple(layers))


def speed_groups(profile: ClusterProfile, dtype: str) -> List[List[str]]:
    """Return devices of one kind and like speed together, by their times of the largest product of all.

    Raises:
        UnusableInputError: A device lacks the data type's curve.

    Example:
        >>> speed_groups(ClusterProfile.uniform(hosts=3, flops_per_s=(1e10, 5e9, 1e10)), "float32")
        [['h0:0', 'h2:0'], ['h1:0']]
    """
    kinds: Dict[str, List[Device]] = {}
    for device in profile.devices:
        kinds.setdefault(device.kind, []).append(device)
    found = []
    for devices in kinds.values():
        size = np.array(
            [min((one.throughput[dtype][-1].flops for one in devices if dtype in one.throughput), default=1.0)]
        )
        found += _groups({one.id: float(device_time_s(one, dtype, size)[0]) for one in devices})
    return found


def _total_s(layers: Sequence[Times]) -> float:
    known = [times["1,1"] for times in layers if "1,1" in times]
    return math.fsum(time.forward_s + time.backward_s for time in known)


def _groups(totals_s: Mapping[str, float]) -> List[List[str]]:
    """Return devices of like speed together, the fastest first; each group in the given order."""
    groups: List[List[str]] = []
    least_s = 0.0
    for name in sorted(totals_s, key=lambda name: totals_s[name]):
        if not groups or totals_s[name] > _ALIKE * least_s:
            groups.append([])
            least_s = totals_s[name]
        groups[-1].append(name)
    order = {name: place for place, name in enumerate(totals_s)}
    return [sorted(group, key=lambda name: order[name]) for group in groups]


def _joined(of_devices: Sequence[Times]) -> Times:
    """Return the mean times of like devices, for the shardings that all have."""
    shardings = [one for one in of_devices[0] if all(one in times for times in of_devices)]
    return {sharding: _mean([times[sharding] for times in of_devices]) for sharding in shardings}


def _mean(times: Sequence[MeasuredTime]) -> MeasuredTime:
    def mean(name: str) -> Optional[float]:
        known = [value for value in (getattr(time, name) for time in times) if value is not None]
        return statistics.fmean(known) if known else None

    deviations = [time.deviation_s for time in times if time.deviation_s is not None]
    spreads = [time.spread for time in times if time.spread is not None]
    return MeasuredTime(
        forward_s=mean("forward_s") or 0.0,
        backward_s=mean("backward_s") or 0.0,
        update_s=mean("update_s"),
        memory_bytes=mean("memory_bytes"),
        deviation_s=math.sqrt(statistics.fmean(one**2 for one in deviations)) if deviations else None,
        spread=max(spreads) if spreads else None,
    )
