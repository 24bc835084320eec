"""Correct the devices' layer times by what the profile says of their speeds, where short timings say less.

A shared machine slows down one share of a processor and not another. A quota stops one program and not another. Short
timings are then several per cent off. The profile measured the devices' products longer, and each on one processor.
"""

from __future__ import annotations

import math
import statistics
from typing import Dict, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy

from hwaware.calibration.filling import Known
from hwaware.calibration.timing import Timing
from hwaware.cluster import Device
from hwaware.costs.curves import FloatArray
from hwaware.costs.own_times import NOISE, log_factors, scaled

# Relative error of a factor between two devices in the profile, at least.
_PROFILE_ERROR = 0.03
# Relative error of a device's level, at least: levels of two calibrations differ by more than their readings tell.
_LEVEL_ERROR = 0.02
# A prediction that is off by more standard deviations counts as if it were not: such devices are unlike.
_DEVIATIONS = 2.0
_PASSES = ("forward_s", "backward_s")


class Errors(NamedTuple):
    """Relative standard errors of a device's times.

    Attributes:
        program: Error of one program's time.
        level: Error that all programs have in common. A CPU quota stops one program and not another, so a sum of
            programs is surer than each.
    """

    program: float
    level: float


def errors_of(timings: Sequence[Optional[Timing]]) -> Errors:
    """Return the errors of a device's times: the root mean square over its programs, and that of their sum.

    Args:
        timings: Each program's timing; None if it has none.

    Example:
        >>> errors = errors_of([Timing((0.9, 1.1, 1.0, 1.0), 0.0), Timing((1.1, 0.9, 1.0, 1.0), 0.0), None])
        >>> round(errors.program, 3), errors.level
        (0.041, 0.02)
        >>> errors_of([Timing((1.0,), 0.0)])
        Errors(program=0.1, level=0.1)
    """
    readings = [timing.readings_s for timing in timings if timing is not None]
    if not readings or min(map(len, readings)) < 2 or min(map(min, readings)) <= 0:
        return Errors(NOISE, NOISE)  # one reading does not show how far it is off
    sums = [math.fsum(of_all) for of_all in zip(*readings)]
    program = math.sqrt(statistics.fmean(_variance_of_mean(one) for one in readings))
    return Errors(program, max(_LEVEL_ERROR, math.sqrt(_variance_of_mean(sums))))


def _variance_of_mean(readings: Sequence[float]) -> float:
    """Return the relative variance of the mean of readings."""
    return (statistics.stdev(readings) / statistics.fmean(readings)) ** 2 / len(readings)


class _Beside(NamedTuple):
    """Another device beside the one whose times are corrected.

    Attributes:
        known: Its measured times.
        log_factor: The mean log factor from its figures in the profile to those of the other.
        variance: Variance of that factor.
        errors: Errors of its times.
    """

    known: Known
    log_factor: float
    variance: float
    errors: Errors


def agreed(
    found: Mapping[str, Known], errors: Mapping[str, Errors], devices: Sequence[Device], dtype: str
) -> Dict[str, Known]:
    """Return the times of all devices, each program's time multiplied by two factors.

    Each is exp(w p). It lies between 1, the device's own timing, and exp(p), a prediction from the other devices:

        p = sum(w_e (r_e + ln(t_e / t))) / sum(w_e),  v = 1 / sum(w_e) + sum(w_e u_e^2) / sum(w_e),
        w_e = 1 / (s_e^2 + u_e^2),  w = s^2 / (s^2 + v)

    t and t_e are times on this device and on another device e. Their relative errors are s and s_e. r_e is the mean log
    factor between all figures of both in the profile. u_e is its error: the standard deviation of these log factors,
    but at least 3 %. So unlike devices, and sure timings, change little.

    The first factor is that of all programs: t and t_e are sums over those that both devices timed. Its s is
    `Errors.level`. The second factor is that of one program, with `Errors.program`. Its p is less the mean p of all
    programs, weighted by time, and it keeps their sum. A p farther than 2 sqrt(s^2 + v) from 0 counts as that.

    Args:
        found: Device -> key of a layer -> its measured times.
        errors: Device -> errors of its times; see `errors_of`.
        devices: The devices, with their curves.
        dtype: Data type of the curves.

    Source: inverse-variance weighting, of what programs have in common and of each program's own part. Huber, "Robust
    estimation of a location parameter", 1964, for the limit.

    Example:
        >>> from hwaware.cluster import ClusterProfile
        >>> from hwaware.workload import MeasuredTime
        >>> devices = ClusterProfile.uniform(hosts=2, flops_per_s=(1e10, 5e9)).devices
        >>> found = {name: {"layer": {"1,1": MeasuredTime(forward_s=s, backward_s=s)}} for name, s in
        ...          (("h0:0", 0.100), ("h1:0", 0.220))}
        >>> both = agreed(found, dict.fromkeys(found, Errors(0.05, 0.05)), devices, "float32")
        >>> {name: round(known["layer"]["1,1"].forward_s, 4) for name, known in both.items()}
        {'h0:0': 0.1036, 'h1:0': 0.2124}
        >>> both = agreed(found, dict.fromkeys(found, Errors(0.05, 0.001)), devices, "float32")
        >>> both["h1:0"]["layer"]["1,1"].forward_s > 0.2199
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
        result[device.id] = _corrected(found[device.id], errors[device.id], others)
    return result


def _beside(known: Known, errors: Errors, factors: FloatArray) -> _Beside:
    variance = max(_PROFILE_ERROR, float(numpy.std(factors))) ** 2
    return _Beside(known, float(numpy.mean(factors)), variance, errors)


def _corrected(known: Known, errors: Errors, others: Sequence[_Beside]) -> Known:
    """Return a device's times, each pass with its factors; all parts of a layer take those of the whole."""
    own_s = _passes_of(known)
    beside = [(one, _passes_of(one.known)) for one in others]
    shared = [(one, theirs, [name for name in own_s if name in theirs]) for one, theirs in beside]
    sums = [
        (one, one.errors.level, math.fsum(own_s[name] for name in names), math.fsum(theirs[name] for name in names))
        for one, theirs, names in shared
        if names
    ]
    common = math.exp(_log_factor(errors.level, sums))
    ones = {
        name: [(one, one.errors.program, seconds, theirs[name]) for one, theirs in beside if name in theirs]
        for name, seconds in own_s.items()
    }
    ones = {name: given for name, given in ones.items() if given}
    middle = _mean((own_s[name], _predicted(given)[0]) for name, given in ones.items())
    factors = {name: math.exp(_log_factor(errors.program, given, middle)) for name, given in ones.items()}
    mean = _mean((own_s[name], factor) for name, factor in factors.items()) or 1.0
    result = dict(known)
    for key in (key for key, times in known.items() if "1,1" in times):
        forward, backward = (common * factors.get((key, name), mean) / mean for name in _PASSES)
        both = math.sqrt(forward * backward)
        result[key] = {
            sharding: scaled(time, forward_s=forward, backward_s=backward, update_s=both, deviation_s=both)
            for sharding, time in known[key].items()
        }
    return result


def _passes_of(known: Known) -> Dict[Tuple[str, str], float]:
    """Return (layer, pass) -> seconds; a layer may lack a pass."""
    whole = {key: times["1,1"] for key, times in known.items() if "1,1" in times}
    found = {(key, name): getattr(time, name) for key, time in whole.items() for name in _PASSES}
    return {name: seconds for name, seconds in found.items() if seconds > 0}


# Another device, the relative error of its time, the own time, and its time.
_Given = Sequence[Tuple[_Beside, float, float, float]]


def _predicted(given: _Given) -> Tuple[float, float]:
    """Return the log factor from the own time to the one that other devices predict, and its variance."""
    weights = [1 / (error**2 + one.variance) for one, error, _, _ in given]
    total = math.fsum(weights)
    logs = [one.log_factor + math.log(theirs / own) for one, _, own, theirs in given]
    variances = [one.variance for one, *_ in given]
    return _mean(zip(weights, logs)), 1 / total + _mean(zip(weights, variances))


def _log_factor(error: float, given: _Given, middle: float = 0.0) -> float:
    """Return the log factor that an own time with this relative error takes, from the predicted one less `middle`."""
    if not given:
        return 0.0
    log_factor, variance = _predicted(given)
    most = _DEVIATIONS * math.sqrt(error**2 + variance)
    return error**2 / (error**2 + variance) * max(-most, min(most, log_factor - middle))


def _mean(weighted: Iterable[Tuple[float, float]]) -> float:
    """Return the mean of (weight, figure); 0 of none."""
    pairs = list(weighted)
    total = math.fsum(weight for weight, _ in pairs)
    return math.fsum(weight * figure for weight, figure in pairs) / total if pairs else 0.0
