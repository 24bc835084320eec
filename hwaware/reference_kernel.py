"""A short fixed computation, timed beside every measurement, so that a drifting machine is told from a slow one.

Machines that other work shares drift: up to 1.6 times within seconds was seen. A measured time divided by the time
of this kernel, taken just before and after it, can be compared with one that was measured a minute later.

The kernel is arithmetic on arrays that stay in a core's second-level cache, because that slows as training does when
another machine's work shares the core: by 1.3 times where products of 48 x 48 matrices in a BLAS slow by 1.6. Beside
the passes of a GPT, an MLP and larger products (windows of 5 s), what is left of their drift after dividing by this
kernel is 2 to 4 %; undivided it is 5 to 7 %, divided by the small products 4 to 9 %.
"""

from __future__ import annotations

import os
import statistics
import time
from types import MappingProxyType
from typing import Any, Callable, Mapping, NamedTuple, Optional

#: Which kernel it is. Times of two kernels cannot be compared; a profile or result without a name was taken beside the
#: small matrix products.
NAME = "exp-add"
#: The name of another reference: the layers of the model whose steps are measured.
LAYERS = "layers"
# Half a MiB in and as much out.
_NUMBERS = 1 << 17
_ADDITIONS = 5  # take as long as one exponential
# About 25 ms on the machine where this was written.
_CALLS = 180
# Runs on all processors whose mean is one reading: of single ones, half the variance was their own. Steps of an MLP, a
# GPT and a Wide-ResNet (2026-11, four hosts of 0.45 processors, 45 steps of each) followed the mean of eight runs with
# correlations of 0.68, 0.81 and 0.72 and, in logarithms, slopes of 0.4, 0.8 and 1.0.
_LAPS = 4
_MOST_PROCESSORS = 8


class Reading(NamedTuple):
    """What one timing of a reference found.

    Attributes:
        seconds: What it took, the mean over the devices.
        of_kinds: For each kind of device, what it took there over what predictions count on; empty where the reference
            does not run on the devices.
    """

    seconds: float
    of_kinds: Mapping[str, float] = MappingProxyType({})


class Reference(NamedTuple):
    """What is timed again and again beside the steps of a model, to tell how fast the machine was just then.

    Attributes:
        name: Times of two references of different names cannot be compared.
        usual_s: What it took at the speed that predictions are for; None if that is not known.
        now: Times it now.
    """

    name: str
    usual_s: Optional[float]
    now: Callable[[], Reading]


def reference_s(repeats: int = 3, part: float = 1.0) -> float:
    """Seconds that one run of the reference kernel takes now: the median of `repeats` runs.

    The process must not be under a CPU quota, or the quota is what is measured. With `part` below 1 only so much of
    each run is timed, where the time is dear and many readings are averaged.

    Example:
        >>> 0 < reference_s(repeats=1) < 10
        True
    """
    operands = _operands()
    _run(operands, 10)  # the processor's clock and the caches come up
    calls = max(1, round(_CALLS * part))
    return statistics.median(_timed(operands, calls) for _ in range(repeats)) * _CALLS / calls


def processors_reference_s() -> float:
    """The processor time of several runs, spread evenly over the processors that this process may use, their mean: for
    what keeps all of them busy.

    Two virtual processors of one machine can differ by half for seconds, each slowed by whoever shares its core. A
    kernel that runs once tells of one of them, a pipeline's step uses all. Of more than eight, eight are asked.
    Processor time, not wall time: workers that wait for their step take a hundredth of a core each, beside which the
    kernel has to wait but a step under quotas has not (four mappings that waited made the wall time 3 to 6 % longer).

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
    """The kernel's time beside a profile, from its `environment`; None if there is none, or it was another kernel's.

    Example:
        >>> recorded_s({"reference_s": 0.025, "reference_kernel": NAME}), recorded_s({"reference_s": 0.025})
        (0.025, None)
    """
    known = environment or {}
    return known.get("reference_s") if known.get("reference_kernel") == NAME else None


def kernel_reference(environment: Optional[Mapping[str, Any]]) -> Reference:
    """The kernel on all processors, for predictions by a profile that was taken in this environment.

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
