"""Time a short fixed computation beside every measurement, to tell a drifting machine from a slow one.

A shared machine drifts, by up to 1.6 times within seconds. Divide a measured time by this kernel's time just before and
after it. Such ratios compare even if the measurements lie a minute apart.

The kernel computes on arrays that stay in a core's second-level cache. Its speed follows that of training when another
machine's work shares the core. It slows by 1.3 times where products of 48 x 48 matrices in a BLAS slow by 1.6.

The passes of a GPT, an MLP and larger products drift by 5 to 7 % over windows of 5 s. Divided by this kernel they drift
by 2 to 4 %, and divided by the small products by 4 to 9 %.
"""

from __future__ import annotations

import os
import statistics
import time
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Optional

#: Name of this kernel. Times of two kernels do not compare. A profile or result without a name used the small matrix
#: products.
NAME = "exp-add"
#: Name of another reference: the layers of the measured model.
LAYERS = "layers"
# Half a MiB of input, and as much of output.
_NUMBERS = 1 << 17
_ADDITIONS = 5  # these take as long as one exponential
# About 25 ms on the machine where this was written.
_CALLS = 180
# One reading is the mean of this many runs on each processor: half the variance of single runs was their own. Steps of
# an MLP, a GPT and a Wide-ResNet (2026-11, four hosts of 0.45 processors, 45 steps of each) followed the mean of eight
# runs. Correlations were 0.68, 0.81 and 0.72; slopes, in logarithms, were 0.4, 0.8 and 1.0.
_LAPS = 4
_MOST_PROCESSORS = 8


class Reading(NamedTuple):
    """One timing of a reference.

    Attributes:
        seconds: Its time, averaged over the devices.
        of_kinds: For each kind of device, the time there over the time that predictions assume. Empty if the reference
            does not run on the devices.
    """

    seconds: float
    of_kinds: Mapping[str, float] = MappingProxyType({})


class Reference(NamedTuple):
    """A computation to time again and again beside a model's steps, which shows the machine's speed.

    Attributes:
        name: Its name; times of references with different names do not compare.
        usual_s: Its time at the speed that predictions assume; None if unknown.
        now: Function that times it now.
    """

    name: str
    usual_s: Optional[float]
    now: Callable[[], Reading]


def reference_s(repeats: int = 3, part: float = 1.0) -> float:
    """Return the seconds that the kernel takes now, the median of `repeats` runs.

    Call it without a CPU quota, or the result measures the quota.

    Args:
        repeats: Number of runs.
        part: Part of each run to time; the result is scaled up to a whole run. Take less than 1 to save time if you
            average many readings.

    Example:
        >>> 0 < reference_s(repeats=1) < 10
        True
    """
    operands = _operands()
    _run(operands, 10)  # warm up the caches and the processor's clock
    calls = max(1, round(_CALLS * part))
    return statistics.median(_timed(operands, calls) for _ in range(repeats)) * _CALLS / calls


def processors_reference_s() -> float:
    """Return the kernel's mean processor time over the processors that this process may use, in seconds.

    Use it beside work that keeps all processors busy, such as a pipeline's step. Two virtual processors of one machine
    can differ by half for seconds, each slowed by others on its core. With more than eight processors, the kernel runs
    on five to eight, evenly spread.

    The function takes processor time, not wall time. Workers that wait for their step use a hundredth of a core each.
    The kernel waits for them, while a step under quotas does not. Four waiting mappings made the wall time 3 to 6 %
    longer.

    Example:
        >>> 0 < processors_reference_s() < 10
        True
    """
    if not hasattr(os, "sched_setaffinity"):  # not Linux
        return reference_s(repeats=1)
    allowed = os.sched_getaffinity(0)
    asked = sorted(allowed)[:: -(-len(allowed) // _MOST_PROCESSORS)]
    operands, calls = _operands(), max(1, _CALLS // len(asked))
    seconds = 0.0
    try:
        for processor in asked * _LAPS:
            os.sched_setaffinity(0, {processor})
            _run(operands, 10)
            seconds += _timed(operands, calls, time.thread_time)
    finally:
        os.sched_setaffinity(0, allowed)
    return seconds * _CALLS / (calls * len(asked) * _LAPS)


def recorded_s(environment: Optional[Mapping[str, Any]]) -> Optional[float]:
    """Return the kernel's time from a profile's `environment`; None if that has none, or another kernel's.

    Example:
        >>> recorded_s({"reference_s": 0.025, "reference_kernel": NAME}), recorded_s({"reference_s": 0.025})
        (0.025, None)
    """
    known = environment or {}
    return known.get("reference_s") if known.get("reference_kernel") == NAME else None


def kernel_reference(environment: Optional[Mapping[str, Any]]) -> Reference:
    """Return the kernel on all processors as a reference, for predictions by a profile with this `environment`.

    Example:
        >>> kernel_reference({"reference_s": 0.025, "reference_kernel": NAME}).usual_s
        0.025
    """
    return Reference(NAME, recorded_s(environment), lambda: Reading(processors_reference_s()))


def _operands() -> Any:
    import numpy

    source = numpy.full(_NUMBERS, 0.5, numpy.float32)
    return source, numpy.empty_like(source)


def _run(operands: Any, calls: int) -> None:
    import numpy

    source, out = operands
    for _ in range(calls):
        numpy.exp(source, out=out)
        for _ in range(_ADDITIONS):
            numpy.add(source, source, out=out)


def _timed(operands: Any, calls: int = _CALLS, clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    _run(operands, calls)
    return clock() - start
