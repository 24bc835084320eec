"""Complete measured layer times: for single devices, for other kinds of devices, and for other microbatch sizes.

A workload names measured times by a device's kind, or by its id, which wins. Prices know kinds alone. So devices with
times of their own get kinds of their own, one for all devices whose times are equal. Those select layer times only:
`PreparedCosts.hardware` keeps the kinds of the profile, which decide what Alpa can run.
"""

from __future__ import annotations

import math
import statistics
from typing import Callable, Dict, List, Mapping, Optional, Sequence, Tuple, TypeVar

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile, Device
from hwaware.costs.compute import analytic_time_s, device_time_s, is_split, joint_deviation_s, measured_time
from hwaware.costs.curves import FloatArray
from hwaware.errors import UnusableInputError
from hwaware.records import Record
from hwaware.records import rebuilt as replace
from hwaware.workload import Layer, MeasuredTime, Workload

M = TypeVar("M")
R = TypeVar("R", bound=Record)
Times = Dict[str, MeasuredTime]
# Figures of a layer that are in proportion to the samples of a microbatch.
PER_SAMPLE = (
    "forward_flops", "backward_flops", "output_bytes", "activation_bytes", "batch_bytes", "temporary_bytes",
    "tensor_parallel_bytes",
)  # fmt: skip
# Devices whose layers take the same time up to this factor share one time, their mean. Times repeat within 3 to 5 %.
_ALIKE = 1.06


def with_own_kinds(workload: Workload, profile: ClusterProfile) -> Tuple[Workload, ClusterProfile]:
    """Return workload and profile in which devices that the layers' `measured` names by id have kinds of their own.

    Example:
        >>> workload = Workload.uniform(measured={
        ...     "cpu": {"1,1": MeasuredTime(forward_s=0.1, backward_s=0.2)},
        ...     "h1:0": {"1,1": MeasuredTime(forward_s=0.3, backward_s=0.6)}})
        >>> profile = ClusterProfile.uniform(hosts=3, flops_per_s=1e10)
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
    firsts: Dict[Tuple[str, bytes], Device] = {}
    kinds: Dict[str, str] = {}
    for device in own:
        times = [(layer.measured or {}).get(device.id) for layer in workload.layers]
        first = firsts.setdefault((device.kind, msgspec.json.encode(times)), device)
        kinds[device.id] = f"{device.kind} like {first.id}"
    layers = []
    for layer in workload.layers:
        known = layer.measured or {}
        found = {name: times for name, times in known.items() if name not in kinds}
        for first in firsts.values():  # devices without own times keep those of their kind
            times_of = known.get(first.id, known.get(first.kind))
            if times_of is not None:
                found[kinds[first.id]] = times_of
        layers.append(replace(layer, measured=found or None))
    devices = tuple(replace(device, kind=kinds.get(device.id, device.kind)) for device in profile.devices)
    return replace(workload, layers=tuple(layers)), replace(profile, devices=devices)


def by_kind(profile: ClusterProfile) -> Dict[str, List[Device]]:
    """Return the devices of each kind, in the profile's order."""
    kinds: Dict[str, List[Device]] = {}
    for device in profile.devices:
        kinds.setdefault(device.kind, []).append(device)
    return kinds


def scaled(record: R, **factors: float) -> R:
    """Return the record with fields multiplied by their factors; a field without a value stays so."""
    values = {name: getattr(record, name) for name in factors}
    return replace(record, **{k: v * factors[k] for k, v in values.items() if v is not None})


def changed_times(layer: Layer, change: Callable[[str, str, MeasuredTime], Optional[MeasuredTime]]) -> Layer:
    """Return the layer with what `change` makes of each kind, sharding and time; None leaves a time out."""
    if layer.measured is None:
        return layer
    found = {
        kind: {sharding: t for sharding in times if (t := change(kind, sharding, times[sharding])) is not None}
        for kind, times in layer.measured.items()
    }
    return replace(layer, measured={kind: times for kind, times in found.items() if times} or None)


def with_device_times(workload: Workload, profile: ClusterProfile, times: Mapping[str, Sequence[Times]]) -> Workload:
    """Return the workload with times measured on devices, by device, layer and sharding ("DP,TP").

    Devices of a kind with like times share their mean. The fastest group's times stand under the kind's name, and count
    for devices without measurements too. If these have such times already, each group has times of its own.

    Example:
        >>> workload = Workload.uniform()
        >>> profile = ClusterProfile.uniform(hosts=3, flops_per_s=1e10)
        >>> took = {"h0:0": 0.100, "h1:0": 0.300, "h2:0": 0.104}
        >>> found = with_device_times(workload, profile, {
        ...     name: [{"1,1": MeasuredTime(forward_s=seconds, backward_s=seconds)}] for name, seconds in took.items()})
        >>> {name: round(one["1,1"].forward_s, 3) for name, one in found.layers[0].measured.items()}
        {'cpu': 0.102, 'h1:0': 0.3}
    """
    found: List[Dict[str, Times]] = [dict(layer.measured or {}) for layer in workload.layers]
    for kind, devices in by_kind(profile).items():
        names = [device.id for device in devices if device.id in times]
        known = [[one["1,1"] for one in times[name] if "1,1" in one] for name in names]
        totals = [math.fsum(one.forward_s + one.backward_s for one in own) for own in known]
        for number, group in enumerate(alike(names, totals, _ALIKE)):
            joined = [  # the mean times of like devices, for the shardings that all have
                {one: _mean([own[one] for own in layer]) for one in layer[0] if all(one in own for own in layer)}
                for layer in zip(*(times[name] for name in group))
            ]
            for layer, one in zip(found, joined):
                if one:
                    others = [device.id for device in devices if device.id not in times and device.id not in layer]
                    for name in group:  # it may be another machine than before
                        layer.pop(name, None)
                    is_of_kind = number == 0 and not (kind in layer and others)
                    layer.update(dict.fromkeys([kind] if is_of_kind else group, one))
    layers = (replace(layer, measured=measured or None) for layer, measured in zip(workload.layers, found))
    return replace(workload, layers=tuple(layers))


def alike(members: Sequence[M], seconds: Sequence[float], factor: float) -> List[List[M]]:
    """Return members by their seconds, those together that take at most so many times the least of their group.

    Example:
        >>> alike("abcd", (1.05, 2.0, 1.0, 1.2), 1.1)
        [['c', 'a'], ['d'], ['b']]
    """
    groups: List[List[M]] = []
    least_s = 0.0
    for place in sorted(range(len(members)), key=lambda place: seconds[place]):
        if not groups or seconds[place] > factor * least_s:
            groups.append([])
            least_s = seconds[place]
        groups[-1].append(members[place])
    return groups


def _mean(times: Sequence[MeasuredTime]) -> MeasuredTime:
    def known(name: str) -> List[float]:
        return [value for value in (getattr(time, name) for time in times) if value is not None]

    names = ("forward_s", "backward_s", "update_s", "memory_bytes")
    means = {name: statistics.fmean(known(name)) for name in names if known(name)}
    deviation_s = joint_deviation_s(known("deviation_s"))
    return MeasuredTime(**means, deviation_s=deviation_s, spread=max(known("spread"), default=None))


# What the factors between two devices' figures differ by, in log, where one factor explains them: quick profiles of
# processor shares repeat within 8 % each. Less than this is taken for noise.
NOISE = 0.1


def transferred_times(layer: Layer, measured_on: Device, wanted_on: Device, dtype: str) -> Times:
    """Return a layer's measured times "DP,1" carried over from one device to one of another kind by their curves.

        t' = t (a'(l) / a(l))^w  r^(1 - w),   w = max(0, 1 - (0.1 / u)^2)

    a and a' are the layer's analytic times on both devices: both leave out as much. r is the mean factor between all
    figures of both devices, and u their `unlikeness`. Figures that differ by little more than noise tell r alone.
    A share takes the factor of "1,1".

    The spread is the smaller of two. One is half of |log(t / a)|, because a layer that its own device's curve explains
    is carried over surely. The other is u, because like factors of all figures tell the layer's factor.

    Example:
        >>> devices = ClusterProfile.uniform(hosts=2, flops_per_s=(1e10, 5e9)).devices
        >>> old, new = (replace(device, memory_bandwidth_bytes_per_s=1e9) for device in devices)
        >>> times = {old.kind: {"1,1": MeasuredTime(forward_s=0.3, backward_s=0.3)}}
        >>> layer = Workload.uniform(backward_flops=1e9, measured=times).layers[0]
        >>> carried = transferred_times(layer, old, new, "float32")["1,1"]
        >>> round(carried.forward_s, 3), round(carried.spread, 3)
        (0.583, 0.347)

    Source: shrinkage towards the mean (James and Stein, 1961), positive part.
    """
    known, whole = (layer.measured or {})[measured_on.kind], np.ones(1)
    ratios, explained = [], []
    for backward, seconds in ((False, known["1,1"].forward_s), (True, known["1,1"].backward_s)):
        here, there = (
            float(analytic_time_s([layer], device, dtype, whole, backward, whole)[0])
            for device in (measured_on, wanted_on)
        )
        factor = _shrunk(there / here, measured_on, wanted_on, dtype) if here > 0 else 1.0
        ratios.append(seconds * factor / seconds if seconds > 0 else 1.0)
        explained.append(abs(math.log(seconds / here)) if here > 0 and seconds > 0 else 0.0)
    spread = min(max(explained) / 2, unlikeness(measured_on, wanted_on, dtype))
    old, new = measured_on.memory_bandwidth_bytes_per_s, wanted_on.memory_bandwidth_bytes_per_s
    slower = None if old is None or new is None else _shrunk(old / new, measured_on, wanted_on, dtype)
    return {
        sharding: MeasuredTime(
            forward_s=times.forward_s * ratios[0],
            backward_s=times.backward_s * ratios[1],
            update_s=None if times.update_s is None or slower is None else times.update_s * slower,
            deviation_s=None if times.deviation_s is None else times.deviation_s * max(ratios),
            spread=spread,
        )
        for sharding, times in known.items()
        if sharding.endswith(",1")
    }


def unlikeness(one: Device, other: Device, dtype: str) -> float:
    """Return how far two devices are from differing by one factor: the standard deviation of `log_factors`."""
    return float(np.std(log_factors(one, other, dtype)))


def log_factors(one: Device, other: Device, dtype: str) -> FloatArray:
    """Return log t' / t of two devices' products, and of their memory traffic where both were measured."""
    sizes = np.array([point.flops for point in one.throughput.get(dtype, ())], dtype=np.float64)
    factors = device_time_s(other, dtype, sizes) / device_time_s(one, dtype, sizes)
    here, there = one.memory_bandwidth_bytes_per_s, other.memory_bandwidth_bytes_per_s
    return np.log(factors if here is None or there is None else np.append(factors, here / there))


def _shrunk(factor: float, one: Device, other: Device, dtype: str) -> float:
    """Return a factor between two devices, shrunk to the mean of all their factors by the share of noise."""
    logs = log_factors(one, other, dtype)
    mean, unlike = float(np.mean(logs)), float(np.std(logs))
    weight = max(0.0, 1.0 - (NOISE / unlike) ** 2) if unlike > 0 else 0.0
    return math.exp(mean + weight * (math.log(factor) - mean))


def carried_over(workload: Workload, profile: ClusterProfile) -> Workload:
    """Return the workload with times for every kind of the profile: its own, or carried over from the likest kind.

    `transferred_times` carries over times "DP,1", not those of groups. Kinds that the profile does not have stay as
    they are, and so do layers without times on its kinds.

    Raises:
        UnusableInputError: A device lacks the curve of the workload's data type.
    """
    firsts, dtype, layers = {kind: devices[0] for kind, devices in by_kind(profile).items()}, workload.dtype, []
    for layer in workload.layers:
        known = dict(layer.measured or {})
        times = {kind: measured_time(layer, kind, 1, 1) for kind in firsts}
        sources = [firsts[kind] for kind, time in times.items() if time is not None and time.spread is None]
        for kind, device in firsts.items():
            if sources and "1,1" not in known.get(kind, {}):
                source = min(sources, key=lambda one: unlikeness(one, device, dtype))
                known[kind] = {**transferred_times(layer, source, device, dtype), **known.get(kind, {})}
        layers.append(replace(layer, measured=known or None))
    return replace(workload, layers=tuple(layers))


def carried_to_devices(workload: Workload, profile: ClusterProfile, source: str) -> Workload:
    """Return the workload, measured on the device `source`, with times for all devices of the profile.

    Devices of one kind whose products differ in speed get times of their own. Layers not measured there stay as is.

    Example:
        >>> times = {"cpu-0": {"1,1": MeasuredTime(forward_s=0.3, backward_s=0.3)}}
        >>> workload = Workload.uniform(backward_flops=1e9, measured=times)
        >>> profile = ClusterProfile.uniform(hosts=2, flops_per_s=(1e10, 5e9))
        >>> found = carried_to_devices(workload, profile, "h0:0").layers[0].measured
        >>> {name: round(times["1,1"].forward_s, 3) for name, times in found.items()}
        {'cpu-0': 0.3, 'cpu-1': 0.6}
    """
    own, dtype = profile.device(source), workload.dtype
    groups = []
    for devices in by_kind(profile).values():  # those of like speed together, by the largest product of all
        size = min((one.throughput[dtype][-1].flops for one in devices if dtype in one.throughput), default=1.0)
        seconds = [float(device_time_s(one, dtype, np.array([size]))[0]) for one in devices]
        names = [one.id for one in devices]
        groups += [sorted(group, key=names.index) for group in alike(names, seconds, _ALIKE)]
    groups.sort(key=lambda group: source not in group)  # the device's own group comes first: its times are measured
    named = {name: source if source in group else group[0] for group in groups for name in group}
    split = replace(profile, devices=tuple(replace(one, kind=named[one.id]) for one in profile.devices))
    layers = (replace(layer, measured={source: (layer.measured or {}).get(own.kind, {})}) for layer in workload.layers)
    found = [layer.measured or {} for layer in carried_over(replace(workload, layers=tuple(layers)), split).layers]
    times = {name: [layer.get(leader, {}) for layer in found] for name, leader in named.items()}
    return with_device_times(workload, profile, times)


def with_microbatch_size(workload: Workload, profile: ClusterProfile, samples: int) -> Workload:
    """Return the workload with microbatches of that many samples, at least 1.

    FLOPs, outputs, activations and tensor-parallel bytes are in proportion to the samples; parameters stay. Measured
    times are scaled by analytic times of both sizes. Times under other names than the profile's kinds are left out.

    Raises:
        UnusableInputError: A value of that size is beyond its bound.

    Example:
        >>> half = with_microbatch_size(Workload.uniform(parameter_bytes=10), ClusterProfile.uniform(), 2)
        >>> half.microbatch_size, half.layers[0].forward_flops, half.layers[0].parameter_bytes
        (2, 500000000.0, 10)
    """
    if samples == workload.microbatch_size:
        return workload
    factor = samples / workload.microbatch_size
    kinds = by_kind(profile)
    try:
        layers = tuple(_resized(layer, factor, kinds, workload.dtype) for layer in workload.layers)
        return replace(workload, microbatch_size=samples, layers=layers)
    except ValueError as error:
        raise UnusableInputError(
            f"no model has microbatches of {samples} samples like those of {workload.name!r}: {error}.",
            "correct the workload, or give a smaller global batch.",
        ) from error


def _resized(layer: Layer, factor: float, kinds: Dict[str, List[Device]], dtype: str) -> Layer:
    def resized(kind: str, sharding: str, time: MeasuredTime) -> Optional[MeasuredTime]:
        if kind not in kinds:
            return None
        device, (replicas, group) = kinds[kind][0], map(int, sharding.split(","))
        owned, ratios = 1.0 / (group if is_split(layer) else 1), []
        for backward in (False, True) if dtype in device.throughput else ():
            parts = (np.array([owned / replicas]), np.array([owned / replicas * factor]))
            times = (analytic_time_s([layer], device, dtype, part, backward, np.array([owned])) for part in parts)
            before, after = (float(seconds[0]) for seconds in times)
            ratios.append(after / before if before > 0 else factor)
        of_forward, of_backward = ratios or (factor, factor)
        memory_bytes = time.memory_bytes
        if memory_bytes is not None:
            memory_bytes = max(0.0, memory_bytes + layer.activation_bytes * (factor - 1) / replicas)
        return replace(scaled(time, forward_s=of_forward, backward_s=of_backward), memory_bytes=memory_bytes)

    return scaled(changed_times(layer, resized), **dict.fromkeys(PER_SAMPLE, factor))
