"""Why no placement exists: the tightest constraint, by how much it is missed, and what helps."""

from __future__ import annotations

import math
import time
from typing import Optional, Tuple

import numpy as np

from hwaware.placement.problem import NO_LIMIT, Problem, StageTables
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
            f"Memory: in the placement that comes closest, layers {first} to {last} on {_named(problem, k)} "
            f"need {_mib(over)} too much. {FIX}"
        )
    missing = _missing_with_links(problem, deadline + request.time_limit_s)
    return (
        "Memory and links: every placement that fits in memory makes devices neighbours that have no link; along the "
        f"links that there are, {_mib(missing)} more memory on each device would do. To fix: measure the missing links "
        f"(hwaware profile), or {FIX[len('To fix: ') :]}"
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def explain_at_scale(request: Request, tables: StageTables) -> str:
    """The same for a cluster too large for proofs, from the tables of its templates."""
    layers = range(tables.forward_s.shape[1])
    missed = [float(tables.excess_bytes[:, index, index + 1].min()) for index in layers]
    index = int(np.argmax(missed))
    if missed[index] > 0:
        return (
            f"Memory: layer {index} ({request.costs.workload.layers[index].name!r}) alone needs {_mib(missed[index])} "
            f"more than there is, on whatever devices. {FIX}"
        )
    return (
        f"No placement was found within {request.time_limit_s:g} s; it is not proved that there is none. To fix: "
        "search longer (time_limit_s), or use smaller microbatches or devices with more memory."
    )


def _named(problem: Problem, k: int) -> str:
    """The devices of an option, with their memory."""
    option = problem.options[k]
    placed = option.placed(problem.members, [0] * len(problem.members))
    names = ", ".join(repr(name) for replica in placed for name in replica)
    least = min(float(problem.limit_bytes[c]) for replica in option.replicas for c in replica)
    return f"{'device' if problem.use[k].sum() == 1 else 'devices'} {names} ({_mib(least)})"


def _limit(problem: Problem, k: int) -> float:
    return float(problem.limit_bytes[problem.use[k] > 0].min())


def _largest_layer(problem: Problem) -> Optional[Tuple[int, float, float]]:
    """The layer that fits nowhere by most, even as the last stage, with what it needs and what there is."""
    held = float(Tables(problem).in_flight[0])
    layers = range(problem.num_layers)
    missed = np.array(
        [
            problem.tables.excess_bytes[:, index, index + 1]
            + (held - 1) * problem.tables.activation_bytes[:, index, index + 1]
            for index in layers
        ]
    )
    index = int(np.argmax(missed.min(axis=1)))
    over = float(missed[index].min())
    if over <= 0:
        return None
    k = int(np.argmin(missed[index]))
    return index, over + _limit(problem, k), _limit(problem, k)


def _least_total(problem: Problem) -> float:
    """Bytes that the whole model needs when one microbatch is in flight everywhere."""
    limits = np.array([_limit(problem, k) for k in range(len(problem.options))])
    single = problem.use.sum(axis=1) == 1
    return float((problem.tables.excess_bytes[:, 0, -1] + limits)[single].min())


def _closest(problem: Problem) -> Tuple[float, Tuple[int, int, int]]:
    """The least worst excess over all placements, links disregarded, and the stage that has it."""
    tables = Tables(problem)
    excess = tables.relax()[2]
    over, state, end = float(excess[-1, 0]), 0, problem.num_layers
    while True:
        best = (math.inf, 0, 0, 0.0)
        for k in range(len(problem.options)):
            if np.any(tables.counts[state] + problem.use[k] > tables.sizes):
                continue
            for first in range(end):
                held = tables.in_flight[tables.fewest[state]]
                own = float(
                    problem.tables.excess_bytes[k, first, end]
                    + (held - 1) * problem.tables.activation_bytes[k, first, end]
                )
                best = min(best, (max(own, float(excess[first, state + tables.deltas[k]])), first, k, own))
        worst, first, k, own = best
        if own >= worst or first == 0:
            return over, (first, end - 1, k)
        state, end = state + int(tables.deltas[k]), first


def _missing_with_links(problem: Problem, deadline: float) -> float:
    """How much more memory on every device makes a placement along existing links possible, rounded up."""
    held = Tables(problem).in_flight[0]
    t = problem.tables
    low, high = 0.0, max(0.0, float((t.excess_bytes + (held - 1) * t.activation_bytes)[:, 0, -1].min()))
    for _ in range(HALVINGS):
        if time.monotonic() > deadline:
            break
        middle = (low + high) / 2
        if search(_with_more_memory(problem, middle), deadline).stages is None:
            low = middle
        else:
            high = middle
    return high


def _with_more_memory(problem: Problem, more_bytes: float) -> Problem:
    t = problem.tables
    room = more_bytes - t.excess_bytes
    kept = t.activation_bytes
    more = np.where(kept > 0, 1 + np.floor(room / np.where(kept > 0, kept, 1.0)), NO_LIMIT)
    most = np.where(room >= 0, more, 0.0)
    return problem._replace(tables=t._replace(most_in_flight=most, excess_bytes=-room))
