"""Why no placement exists: the tightest constraint, by how much it is missed, and what helps."""

from __future__ import annotations

import math
import time
from typing import Optional, Tuple

import numpy as np

from hwaware.placement.problem import Problem
from hwaware.placement.request import Request
from hwaware.placement.search import Tables, search

FIX = (
    "To fix: use smaller microbatches (hwaware trace --microbatch-size), more or larger devices, fewer excluded hosts, "
    "or a model with smaller layers."
)
# Halvings of the interval in which the missing memory lies, when links decide as well.
HALVINGS = 20


def explain(problem: Problem, request: Request, proved: bool, deadline: float) -> str:
    """The reason for having no plan, as sentences that end in what to do about it.

    Args:
        problem: What was to be placed.
        request: As it was asked.
        proved: Whether it is certain that there is no plan.
        deadline: Of the search, by `time.monotonic()`; the explanation takes as long again at most.
    """
    layer = _largest_layer(problem)
    if layer is not None:
        index, needed, limit = layer
        return (
            f"Memory: layer {index} ({request.costs.workload.layers[index].name!r}) alone needs {_mib(needed)}, the "
            f"largest device has {_mib(limit)}: {_mib(needed - limit)} too much. {FIX}"
        )
    if not proved:
        return (
            f"No placement was found within {request.time_limit_s:g} s; it is not proved that there is none. The whole "
            f"model needs {_mib(_least_total(problem))} at least, all devices together have "
            f"{_mib(float((problem.limit_bytes * problem.sizes).sum()))}. To fix: search longer (time_limit_s), or use "
            "smaller microbatches or larger devices."
        )
    over, where = _closest(problem)
    if over > 0:
        first, last, k = where
        return (
            f"Memory: in the placement that comes closest, layers {first} to {last} on device "
            f"{problem.members[k][0]!r} ({_mib(float(problem.limit_bytes[k]))}) need {_mib(over)} too much. {FIX}"
        )
    missing = _missing_with_links(problem, deadline + request.time_limit_s)
    return (
        "Memory and links: every placement that fits in memory makes devices neighbours that have no link; along the "
        f"links that there are, {_mib(missing)} more memory on each device would do. To fix: measure the missing links "
        f"(hwaware profile), or {FIX[len('To fix: ') :]}"
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _largest_layer(problem: Problem) -> Optional[Tuple[int, float, float]]:
    """The layer that misses the largest device by most even as the last stage, with what it needs and what there is."""
    in_flight = float(Tables(problem.restricted([1] + [0] * (len(problem.members) - 1))).in_flight[0])
    needs = np.diff(problem.resident_bytes, axis=1) + in_flight * np.diff(problem.activation_bytes)
    missed = (needs - problem.limit_bytes[:, None]).min(axis=0)
    index = int(np.argmax(missed))
    if missed[index] <= 0:
        return None
    k = int(np.argmin(needs[:, index] - problem.limit_bytes))
    return index, float(needs[k, index]), float(problem.limit_bytes[k])


def _least_total(problem: Problem) -> float:
    """Bytes that the whole model needs when one microbatch is in flight everywhere."""
    return float(problem.resident_bytes[:, -1].min() + problem.activation_bytes[-1])


def _closest(problem: Problem) -> Tuple[float, Tuple[int, int, int]]:
    """The least worst excess over all placements, links disregarded, and the stage that has it."""
    tables = Tables(problem)
    excess = tables.relax()[2]
    over, state, end = float(excess[-1, 0]), 0, problem.num_layers
    while True:
        best = (math.inf, 0, 0, 0.0)
        for k in range(len(problem.members)):
            if tables.counts[state, k] >= tables.sizes[k]:
                continue
            for first in range(end):
                held = tables.in_flight[tables.later[state]]
                memory = (problem.resident_bytes[k, end] - problem.resident_bytes[k, first]) + held * (
                    problem.activation_bytes[end] - problem.activation_bytes[first]
                )
                own = float(memory - problem.limit_bytes[k])
                best = min(best, (max(own, float(excess[first, state + tables.strides[k]])), first, k, own))
        worst, first, k, own = best
        if own >= worst or first == 0:
            return over, (first, end - 1, k)
        state, end = state + int(tables.strides[k]), first


def _missing_with_links(problem: Problem, deadline: float) -> float:
    """How much more memory on every device makes a placement along existing links possible, rounded up."""
    in_flight = Tables(problem).in_flight[0]
    single = problem.resident_bytes[:, -1] + in_flight * problem.activation_bytes[-1]
    low, high = 0.0, float((single - problem.limit_bytes).min())
    for _ in range(HALVINGS):
        if time.monotonic() > deadline:
            break
        middle = (low + high) / 2
        if search(problem._replace(limit_bytes=problem.limit_bytes + middle), deadline).stages is None:
            low = middle
        else:
            high = middle
    return high
