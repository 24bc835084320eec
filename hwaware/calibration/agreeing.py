"""Correct the devices' layer times by what the profile says of their speeds, where short timings say less.

A shared machine slows down one share of a processor and not another. Short timings are then several per cent off.
The profile measured the devices' products longer, and each on the same processor.
"""

from __future__ import annotations

import math
import statistics
from typing import Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy

from hwaware.calibration.filling import Known, Times, passes_ratio
from hwaware.calibration.timing import Timing
from hwaware.cluster import Device
from hwaware.costs.own_times import NOISE, log_factors, scaled

# Relative error of a factor between two devices in the profile, at least.
_PROFILE_ERROR = 0.03


def error_of(timings: Sequence[Optional[Timing]]) -> float:
    """Return the relative standard error of the time that a device takes for all its programs.

    Args:
        timings: Each program's timing; None if it has none.

    Example:
        >>> round(error_of([Timing((0.9, 1.1, 1.0, 1.0), 0.0), None]), 3)
        0.041
        >>> error_of([Timing((1.0,), 0.0)])
        0.1
    """
    known = [timing.readings_s for timing in timings if timing is not None]
    totals = [math.fsum(reading) for reading in zip(*known)]
    if len(totals) < 2 or min(totals) <= 0:
        return NOISE  # one reading does not show how far it is off
    return statistics.stdev(totals) / statistics.fmean(totals) / math.sqrt(len(totals))


class _Estimate(NamedTuple):
    """An estimate of a device's log time over its measured time, and its variance."""

    log: float
    variance: float


def agreed(
    found: Mapping[str, Known], errors: Mapping[str, float], devices: Sequence[Device], dtype: str
) -> Dict[str, Known]:
    """Return the times of all devices, each device's multiplied by a factor.

    The factor is exp(w p). It lies between 1, the device's own timing, and exp(p), a prediction:

        w = s^2 / (s^2 + v)
        p = sum(w_e (r_e + ln(T_e / T))) / sum(w_e),  v = 1 / sum(w_e) + sum(w_e u_e^2) / sum(w_e),
        w_e = 1 / (s_e^2 + u_e^2)

    T and T_e are the times of the layers that both this device and the device e timed. Their relative errors are s and
    s_e. r_e is the mean log factor between all figures of both in the profile. u_e is its error: the standard deviation
    of these log factors, but at least 3 %. So unlike devices, and sure timings, change little.

    Args:
        found: Device -> key of a layer -> its measured times.
        errors: Device -> relative standard error of its times; see `error_of`.
        devices: The devices, with their curves.
        dtype: Data type of the curves.

    Source: inverse-variance weighting.

    Example:
        >>> from hwaware.cluster import ClusterProfile
        >>> from hwaware.workload import MeasuredTime
        >>> devices = ClusterProfile.uniform(hosts=2, flops_per_s=(1e10, 5e9)).devices
        >>> found = {name: {"layer": {"1,1": MeasuredTime(forward_s=s, backward_s=s)}} for name, s in
        ...          (("h0:0", 0.100), ("h1:0", 0.220))}
        >>> both = agreed(found, {"h0:0": 0.05, "h1:0": 0.05}, devices, "float32")
        >>> {name: round(known["layer"]["1,1"].forward_s, 4) for name, known in both.items()}
        {'h0:0': 0.1036, 'h1:0': 0.2124}
        >>> agreed(found, {"h0:0": 0.001, "h1:0": 0.001}, devices, "float32")["h1:0"]["layer"]["1,1"].forward_s > 0.2199
        True
    """
    measured = [device for device in devices if found.get(device.id) and dtype in device.throughput]
    result = {name: dict(known) for name, known in found.items()}
    for device in measured:
        own = _Estimate(0.0, max(errors[device.id], 1e-6) ** 2)
        others = [other for other in measured if other is not device]
        predicted = _predicted(device, others, found, errors, dtype)
        if predicted is not None:
            weight = own.variance / (own.variance + predicted.variance)
            factor = math.exp(weight * predicted.log)
            result[device.id] = {key: _scaled(times, factor) for key, times in found[device.id].items()}
    return result


def _scaled(times: Times, factor: float) -> Times:
    names = ("forward_s", "backward_s", "update_s", "deviation_s")
    return {sharding: scaled(time, **dict.fromkeys(names, factor)) for sharding, time in times.items()}


def _predicted(
    device: Device, others: Sequence[Device], found: Mapping[str, Known], errors: Mapping[str, float], dtype: str
) -> Optional[_Estimate]:
    """Return what the other devices and the profile say of a device's time; None if they say nothing."""
    logs: List[float] = []
    weights: List[float] = []
    unlike: List[float] = []
    for other in others:
        ratio = passes_ratio(found[device.id], found[other.id])
        if ratio is not None and ratio > 0:
            factors = log_factors(other, device, dtype)
            unlike.append(max(_PROFILE_ERROR, float(numpy.std(factors))) ** 2)
            weights.append(1 / (errors[other.id] ** 2 + unlike[-1]))
            logs.append(float(numpy.mean(factors)) - math.log(ratio))
    total = math.fsum(weights)
    if not total:
        return None
    mean, spread = (math.fsum(w * x for w, x in zip(weights, each)) / total for each in (logs, unlike))
    return _Estimate(mean, 1 / total + spread)
