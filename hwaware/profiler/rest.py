"""How much sooner a device is done that has waited: bursts of equal work after pauses."""

from __future__ import annotations

import math
import statistics
import time
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple

# About as long as stages wait for messages over links that are slow for them. A quota of 4.5 ms in 10 ms makes up for
# waits of up to 3 ms as a whole, and for longer ones by 3.5 ms where passes take 16 ms of processor time, by 6 ms where
# they take 32 ms (2026-11, Linux 6.18, nothing else running).
_PAUSE_S = 0.01
# One unit of work takes about so long, several times what a quota lets run at once, so that what was saved up is used
# up; two more follow at the pace that the device can keep up.
_UNIT_S = 0.04
_UNITS = 3
# A head start of fewer standard errors, or of a smaller part of a unit, is taken for none: messages between fast
# devices take so little that noise would hide them.
_SURE, _LEAST_PART = 2.0, 0.02
# The median of normal numbers scatters by so much more than their mean, and their median deviation is so much less than
# their standard deviation.
_MEDIAN_ERROR, _DEVIATIONS = 1.2533, 1.4826


def rested_bursts(call: Callable[[], Any], count: int) -> List[List[float]]:
    """Bursts of equal units of work, each burst after a pause: the seconds of each unit.

    Args:
        call: Starts the work and returns its last JAX array.
        count: How many bursts; one more before them does not count.
    """
    calls = _calls_of_a_unit(call)
    bursts = []
    for _ in range(count + 1):
        time.sleep(_PAUSE_S)
        units = []
        before = time.perf_counter()
        for _ in range(_UNITS):
            for _ in range(calls):
                result = call()
            result.block_until_ready()
            now = time.perf_counter()
            units.append(now - before)
            before = now
        bursts.append(units)
    return bursts[1:]


def _calls_of_a_unit(call: Callable[[], Any]) -> int:
    start, calls = time.perf_counter(), 0
    while time.perf_counter() - start < _UNIT_S:
        call().block_until_ready()
        calls += 1
    return calls


def head_starts_s(bursts: Iterable[Tuple[str, Sequence[Sequence[float]]]]) -> Dict[str, float]:
    """Return the head start of each kind of device that has one.

    Within each burst, by how much the first unit took less than the mean of the others, so that drift does not count;
    of all bursts of a kind's devices the median, if it is two of its standard errors above 0 and a fiftieth of a unit.

    Args:
        bursts: A kind, and the bursts of a device of it.

    Example:
        >>> quota = [[0.030, 0.041, 0.039], [0.034, 0.040, 0.042], [0.031, 0.040, 0.040]]
        >>> steady = [[0.040, 0.041, 0.039], [0.041, 0.040, 0.040], [0.039, 0.040, 0.039]]
        >>> {kind: round(seconds, 6) for kind, seconds in head_starts_s([("cpu-0.4", quota), ("gpu", steady)]).items()}
        {'cpu-0.4': 0.009}
    """
    gains: Dict[str, List[float]] = {}
    units: Dict[str, List[float]] = {}
    for kind, of_device in bursts:
        for first, *others in of_device:
            units.setdefault(kind, []).append(statistics.mean(others))
            gains.setdefault(kind, []).append(statistics.mean(others) - first)
    found = {kind: statistics.median(values) for kind, values in gains.items()}
    return {
        kind: seconds
        for kind, seconds in found.items()
        if seconds > max(_SURE * _error_of_median(gains[kind]), _LEAST_PART * statistics.median(units[kind]))
    }


def _error_of_median(values: Sequence[float]) -> float:
    middle = statistics.median(values)
    deviation = _DEVIATIONS * statistics.median(abs(value - middle) for value in values)
    return _MEDIAN_ERROR * deviation / math.sqrt(len(values))
