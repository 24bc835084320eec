"""Measure a device's head start, the time that it saves after a wait, by bursts of equal work after pauses."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple

# Stages wait about this long for messages over slow links. A quota of 4.5 ms in 10 ms makes up for whole waits of up to
# 3 ms. For longer waits it makes up for 3.5 ms if passes take 16 ms of processor time, and for 6 ms if they take 32 ms
# (2026-11, Linux 6.18, nothing else running).
_PAUSE_S = 0.01
# One unit of work takes about this long. A quota lets only a part of this time run at once, so the first unit uses up
# the saved time. Two more units follow at the pace that the device can keep up.
_UNIT_S = 0.04
_UNITS = 3
# A unit may end at the beginning or at the end of a quota's period, which changes its gain by several milliseconds. So
# bursts have units of different lengths, as programs have passes. Multiples of the golden ratio spread any number of
# lengths evenly over this range.
_LENGTHS, _GOLDEN = (0.6, 1.4), 0.6180339887
# Of all gains, this part is left out on either side: something disturbed them.
_LEFT_OUT = 0.1
# So long it takes to find how much work that is: a quota, or another program, may stop a device for tens of ms.
_SIZING_S = 0.2
# The profiler ignores a head start of fewer standard errors, or of a smaller part of a unit. Messages between fast
# devices are so short that a head start that is only noise would hide them.
_SURE, _LEAST_PART = 2.0, 0.02
# For normal numbers: the standard error of the median over that of the mean, and the standard deviation over the median
# absolute deviation.
_MEDIAN_ERROR, _DEVIATIONS = 1.2533, 1.4826


def rested_bursts(call: Callable[[], Any], count: int) -> List[List[float]]:
    """Run bursts of work, each after a pause and of equal units. Return the time of each unit [s] by burst.

    Args:
        call: Starts the work and returns its last JAX array.
        count: Number of bursts, without one more that runs first and does not count.
    """
    calls = _calls_of_a_unit(call)
    bursts = []
    for number in range(count + 1):
        shorter, longer = _LENGTHS
        length = shorter + (longer - shorter) * (number * _GOLDEN % 1.0)
        time.sleep(_PAUSE_S)
        units = []
        before = time.perf_counter()
        for _ in range(_UNITS):
            for _ in range(max(1, round(calls * length))):
                result = call()
            result.block_until_ready()
            now = time.perf_counter()
            units.append(now - before)
            before = now
        bursts.append(units)
    return bursts[1:]


def _calls_of_a_unit(call: Callable[[], Any]) -> int:
    start, calls, took_s = time.perf_counter(), 0, 0.0
    while took_s < _SIZING_S:
        call().block_until_ready()
        calls, took_s = calls + 1, time.perf_counter() - start
    return max(1, round(calls * _UNIT_S / took_s))


def head_starts_s(bursts: Iterable[Tuple[str, Sequence[Sequence[float]]]]) -> Dict[str, float]:
    """Return the head start [s] of each kind of device that has one.

    A burst's head start is the mean time of its later units minus the time of its first unit. So drift between bursts
    does not count. A kind's head start is the trimmed mean over all bursts of its devices. It must exceed two
    standard errors of their median, and 1/50 of a unit.

    Args:
        bursts: Pairs of a kind and the bursts of one of its devices.

    Example:
        >>> quota = [[0.030, 0.041, 0.039], [0.034, 0.040, 0.042], [0.031, 0.040, 0.040]]
        >>> steady = [[0.040, 0.041, 0.039], [0.041, 0.040, 0.040], [0.039, 0.040, 0.039]]
        >>> {kind: round(seconds, 6) for kind, seconds in head_starts_s([("cpu-0.4", quota), ("gpu", steady)]).items()}
        {'cpu-0.4': 0.008667}
    """
    gains: Dict[str, List[float]] = {}
    units: Dict[str, List[float]] = {}
    for kind, of_device in bursts:
        for first, *others in of_device:
            units.setdefault(kind, []).append(statistics.mean(others))
            gains.setdefault(kind, []).append(statistics.mean(others) - first)
    found = {kind: _trimmed_mean(values) for kind, values in gains.items()}
    return {
        kind: seconds
        for kind, seconds in found.items()
        if seconds > max(_SURE * _error_of_median(gains[kind]), _LEAST_PART * statistics.median(units[kind]))
    }


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = int(_LEFT_OUT * len(values))
    return statistics.fmean(sorted(values)[cut : len(values) - cut])


def _error_of_median(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    deviation = _DEVIATIONS * statistics.median(abs(value - middle) for value in values)
    return _MEDIAN_ERROR * deviation / math.sqrt(len(values))
