"""Correct the devices' layer times by what the profile says of their speeds, where short timings say less.

A shared machine slows down one share of a processor and not another. A quota stops one program and not another. Short
timings are then several per cent off. The profile measured the devices' products longer, and each on one processor.
"""

from __future__ import annotations

import math
import statistics
from typing import Dict, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy

from hwaware.calibration.filling import Known, Times
from hwaware.calibration.timing import Timing
from hwaware.cluster import Device
from hwaware.costs.curves import FloatArray
from hwaware.costs.own_times import NOISE, log_factors, scaled
from hwaware.workload import MeasuredTime

# Relative error of a factor between two devices in the profile, at least.
_PROFILE_ERROR = 0.03


def error_of(timings: Sequence[Optional[Timing]]) -> float:
    """Return the relative standard error of a program's time on a device: the root mean square over its programs.

    Args:
        timings: Each program's timing; None if it has none.

    Example:
        >>> round(error_of([Timing((0.9, 1.1, 1.0, 1.0), 0.0), None]), 3)
        0.041
        >>> error_of([Timing((1.0,), 0.0)])
        0.1
    """
    readings = [timing.readings_s for timing in timings if timing is not None]
    if not readings or min(map(len, readings)) < 2 or min(map(min, readings)) <= 0:
        return NOISE  # one reading does not show how far it is off
    squares = [(statistics.stdev(one) / statistics.fmean(one)) ** 2 / len(one) for one in readings]
    return math.sqrt(statistics.fmean(squares))


class _Beside(NamedTuple):
    """Another device beside the one whose times are corrected.

    Attributes:
        known: Its measured times.
        log_factor: The mean log factor from its figures in the profile to those of the other.
        variance: Variance of that factor.
        weight: Weight of its predictions.
    """

    known: Known
    log_factor: float
    variance: float
    weight: float


def agreed(
    found: Mapping[str, Known], errors: Mapping[str, float], devices: Sequence[Device], dtype: str
) -> Dict[str, Known]:
    """Return the times of all devices, each program's time multiplied by a factor.

    The factor is exp(w p). It lies between 1, the device's own timing, and exp(p), a prediction:

        w = s^2 / (s^2 + v)
        p = sum(w_e (r_e + ln(t_e / t))) / sum(w_e),  v = 1 / sum(w_e) + sum(w_e u_e^2) / sum(w_e),
        w_e = 1 / (s_e^2 + u_e^2)

    t and t_e are the program's times on this device and on another device e. Their relative errors are s and s_e. r_e
    is the mean log factor between all figures of both in the profile. u_e is its error: the standard deviation of these
    log factors, but at least 3 %. So unlike devices, and sure timings, change little.

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
        others = [
            _beside(found[other.id], errors[other.id], log_factors(other, device, dtype))
            for other in measured
            if other is not device
        ]
        variance = errors[device.id] ** 2
        result[device.id] = {
            key: _corrected(
                times, variance, [(one, one.known[key]["1,1"]) for one in others if "1,1" in one.known.get(key, ())]
            )
            for key, times in found[device.id].items()
        }
    return result


def _beside(known: Known, error: float, factors: FloatArray) -> _Beside:
    variance = max(_PROFILE_ERROR, float(numpy.std(factors))) ** 2
    return _Beside(known, float(numpy.mean(factors)), variance, 1 / (error**2 + variance))


def _corrected(times: Times, variance: float, others: Sequence[Tuple[_Beside, MeasuredTime]]) -> Times:
    """Return a layer's times, with factors for its forward and its backward pass; all parts take those of the whole."""
    if not others or "1,1" not in times:
        return times
    total = math.fsum(one.weight for one, _ in others)
    error = (1 + math.fsum(one.weight * one.variance for one, _ in others)) / total
    trust, whole, logs = variance / (variance + error), times["1,1"], []
    for name in ("forward_s", "backward_s"):
        own_s = getattr(whole, name)
        pairs = [(one, getattr(time, name)) for one, time in others]
        is_known = own_s > 0 and all(seconds > 0 for _, seconds in pairs)  # a layer may lack a pass
        terms = (
            [one.weight * (one.log_factor + math.log(seconds / own_s)) for one, seconds in pairs] if is_known else []
        )
        logs.append(trust * math.fsum(terms) / total)
    forward, backward = map(math.exp, logs)
    both = math.sqrt(forward * backward)
    return {
        sharding: scaled(time, forward_s=forward, backward_s=backward, update_s=both, deviation_s=both)
        for sharding, time in times.items()
    }
