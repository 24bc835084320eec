"""Estimate layer times that nobody measured from those that were measured."""

from __future__ import annotations

import math
import statistics
from typing import Dict, Mapping, Optional, Sequence

import msgspec
import numpy as np

from hwaware.calibration.programs import LayerSource
from hwaware.cluster import Device
from hwaware.costs.compute import analytic_time_s, device_time_s
from hwaware.costs.own_times import NOISE, scaled
from hwaware.workload import Layer, MeasuredTime, Workload

Times = Dict[str, MeasuredTime]
Known = Dict[str, Times]
# Spread of a layer's time that another device of the kind measured, scaled by the ratio of layers that both measured.
_ALIKE = 0.03


def filled(
    found: Mapping[str, Known], sources: Sequence[LayerSource], workload: Workload, devices: Sequence[Device]
) -> Dict[str, Known]:
    """Return the times of all layers on all devices: measured ones, and estimates for the others.

    If other devices measured a layer, it takes the time of the device with the most layers in common. The factor is
    the ratio of these layers' times, or of the largest products if no layer is common. If no device measured a layer,
    it takes its analytic time. The factor is measured over analytic time of the device's other layers. A layer whose
    update alone was not measured takes other devices' updates, by the ratio of the layer's passes.

    Args:
        found: Device -> key of a layer -> its measured times; devices and layers may be missing.
        sources: The layers' keys.
        workload: The layers, for their analytic times.
        devices: Devices to return.
    """
    keys = {source.key: layer for source, layer in zip(sources, workload.layers)}
    speeds = {device.id: device for device in devices}
    result = {device.id: dict(found.get(device.id, {})) for device in devices}
    for name, known in result.items():
        for key in keys:
            donors = [other for other, theirs in found.items() if key in theirs and other in speeds]
            if key not in known and donors:
                own = found.get(name, {})
                donor = max(donors, key=lambda other: len(set(own) & set(found[other])))
                factor = _ratio(own, found[donor])
                alike = factor is not None and speeds[name].kind == speeds[donor].kind
                if factor is None:
                    factor = _product_ratio(speeds[name], speeds[donor], workload.dtype)
                spread = _ALIKE if alike else NOISE
                known[key] = {sharding: _scaled(times, factor, spread) for sharding, times in found[donor][key].items()}
        for key, times in known.items():
            whole = [theirs[key] for theirs in found.values() if key in theirs and _passes_s(theirs[key]) > 0]
            updates = [one["1,1"].update_s / _passes_s(one) for one in whole if one["1,1"].update_s is not None]
            if updates and times["1,1"].update_s is None:
                update_s = statistics.median(updates) * _passes_s(times)
                known[key] = {name: msgspec.structs.replace(one, update_s=update_s) for name, one in times.items()}
    for name, known in result.items():
        lacking = [key for key in keys if key not in known]
        if lacking:
            factor = _over_analytic(known, keys, speeds[name], workload.dtype)
            known.update({key: {"1,1": _analytic(keys[key], speeds[name], workload.dtype, factor)} for key in lacking})
    return result


def _passes_s(times: Times) -> float:
    return times["1,1"].forward_s + times["1,1"].backward_s


def _ratio(own: Known, theirs: Known) -> Optional[float]:
    common = [key for key in own if key in theirs]
    below = math.fsum(_passes_s(theirs[key]) for key in common)
    return math.fsum(_passes_s(own[key]) for key in common) / below if below > 0 else None


def _product_ratio(one: Device, other: Device, dtype: str) -> float:
    """Return the ratio of two devices' times of the largest product that both measured, or else of their rates."""
    if not (dtype in one.throughput and dtype in other.throughput):
        return seconds_per_flop(one, dtype) / seconds_per_flop(other, dtype)
    size = np.array([min(device.throughput[dtype][-1].flops for device in (one, other))])
    return float(device_time_s(one, dtype, size)[0] / device_time_s(other, dtype, size)[0])


def seconds_per_flop(device: Device, dtype: str) -> float:
    """Return the seconds per FLOP of a device's largest product of a data type, or of another that it has."""
    point = device.throughput.get(dtype, device.throughput[min(device.throughput)])[-1]
    return point.seconds / point.flops


def _scaled(times: MeasuredTime, factor: float, spread: float) -> MeasuredTime:
    return msgspec.structs.replace(
        scaled(times, forward_s=factor, backward_s=factor, update_s=factor, deviation_s=factor),
        spread=max(spread, times.spread or 0.0),
    )


def _over_analytic(known: Known, layers: Mapping[str, Layer], device: Device, dtype: str) -> float:
    analytic = [_analytic(layers[key], device, dtype, 1.0) for key in known]
    below = math.fsum(time.forward_s + time.backward_s for time in analytic)
    return math.fsum(map(_passes_s, known.values())) / below if below > 0 else 1.0


def _analytic(layer: Layer, device: Device, dtype: str, factor: float) -> MeasuredTime:
    whole = np.ones(1)
    times = (analytic_time_s([layer], device, dtype, whole, backward, whole) for backward in (False, True))
    forward_s, backward_s = (factor * float(seconds[0]) for seconds in times)
    return MeasuredTime(forward_s=forward_s, backward_s=backward_s, spread=2 * NOISE)
