"""A short fixed computation, timed beside every measurement, so that a drifting machine is told from a slow one.

Machines that other work shares drift: up to 1.6 times within seconds was seen. A measured time divided by the time
of this kernel, taken just before and after it, can be compared with one that was measured a minute later.
"""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

# Products of 48 x 48 matrices: every BLAS runs products this small on one thread (OpenBLAS splits from about 64^3 on),
# so the time follows one processor and does not depend on how many are idle. The operands (0.6 MB) stay in cache.
_SIZE = 48
_BATCH = 32
# About 25 ms on the machine where this was written (83 GFLOP/s in float32, two shared cores).
_CALLS = 300
_MOST_PROCESSORS = 8


def reference_s(repeats: int = 3) -> float:
    """Seconds that one run of the reference kernel takes now: the median of `repeats` runs.

    The process must not be under a CPU quota, or the quota is what is measured.

    Example:
        >>> 0 < reference_s(repeats=1) < 10
        True
    """
    operands = _operands()
    _run(operands, 10)  # the processor's clock and the caches come up
    return statistics.median(_timed(operands) for _ in range(repeats))


def processors_reference_s() -> float:
    """The same, spread evenly over the processors that this process may use: for what keeps all of them busy.

    Two virtual processors of one machine can differ by half for seconds, each slowed by whoever shares its core. A
    kernel that runs once tells of one of them, a pipeline's step uses all. Of more than eight, eight are asked.

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
        for processor in asked:
            os.sched_setaffinity(0, {processor})
            _run(operands, 10)
            seconds += _timed(operands, calls)
    finally:
        os.sched_setaffinity(0, allowed)
    return seconds * _CALLS / (calls * len(asked))


def _operands() -> Any:
    import numpy

    left = numpy.full((_BATCH, _SIZE, _SIZE), 0.5, numpy.float32)
    return left, left[0].copy(), numpy.empty_like(left)


def _run(operands: Any, calls: int) -> None:
    import numpy

    left, right, out = operands
    for _ in range(calls):
        numpy.matmul(left, right, out=out)


def _timed(operands: Any, calls: int = _CALLS) -> float:
    start = time.perf_counter()
    _run(operands, calls)
    return time.perf_counter() - start
