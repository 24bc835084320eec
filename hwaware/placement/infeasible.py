"""Why no placement exists: the tightest constraint, by how much it is missed, and what helps."""

from __future__ import annotations

import math
import time
from typing import Optional, Tuple

import numpy as np

from hwaware.costs.memory import layer_memory_bytes
from hwaware.placement.arrays import NO_LIMIT, Arrays, StageTables
from hwaware.placement.problem import Problem
from hwaware.placement.search import Tables, search

FIX = (
    "To fix: use smaller microbatches (hwaware trace --microbatch-size), more or larger devices, fewer excluded hosts, "
    "or a model with smaller layers."
)
# Halvings of the interval in which the missing memory lies, when links decide as well.
HALVINGS = 20


def why_infeasible(arrays: Arrays, problem: Problem, proved: bool, deadline: float) -> str:
    """The reason for having no plan, as sentences that end in what to do about it.

    Args:
        arrays: What was to be placed.
        problem: As it was asked.
        proved: Whether it is certain that there is no plan.
        deadline: Of the search, by `time.monotonic()`; the explanation takes as long again at most.
    """
    layer = _largest_layer(arrays)
    if layer is not None and math.isinf(layer[1]) and problem.rule is not None:
        return f"Rule: no stage that is allowed may have layer {layer[0]}. To fix: allow more shapes of stages."
    if layer is not None:
        index, needed, limit = layer
        return (
            f"Memory: layer {index} ({problem.costs.workload.layers[index].name!r}) alone needs {_mib(needed)}, the "
            f"largest device has {_mib(limit)}: {_mib(needed - limit)} too much. {FIX}"
        )
    if not proved:
        least, together = _least_total(arrays), float((arrays.limit_bytes * arrays.sizes).sum())
        whole = f"The whole model needs {_mib(least)} at least, all devices together have {_mib(together)}. "
        return (
            f"No placement was found within {problem.time_limit_s:g} s; it is not proved that there is none. "
            f"{'' if math.isinf(least) else whole}To fix: search longer (time_limit_s), pin less, or use smaller "
            "microbatches or larger devices."
        )
    over, where = _closest(arrays)
    if math.isinf(over) and problem.rule is not None:
        return "Rule: no stages that are allowed hold all layers on these devices. To fix: allow more shapes of stages."
    if math.isinf(over):
        pins = "; ".join(f"layer {layer} to {', '.join(names)}" for layer, names in sorted(problem.pins.items()))
        return (
            f"Pins: no contiguous stages keep all of {len(problem.pins)} pins ({pins}): layers between them need "
            "devices of their own. To fix: pin fewer layers, or to more devices."
        )
    if over > 0:
        first, last, k = where
        return (
            f"Memory: in the placement that comes closest, layers {first} to {last} on {_named(arrays, k)} "
            f"need {_mib(over)} too much. {FIX}"
        )
    missing = _missing_with_links(arrays, deadline + problem.time_limit_s)
    return (
        "Memory and links: every placement that fits in memory makes devices neighbours that have no link; along the "
        f"links that there are, {_mib(missing)} more memory on each device would do. To fix: measure the missing links "
        f"(hwaware profile), or {FIX[len('To fix: ') :]}"
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def why_infeasible_at_scale(problem: Problem, tables: StageTables) -> str:
    """The same for a cluster too large for proofs, from the tables of its templates."""
    layers = range(tables.forward_s.shape[1])
    missed = [float(tables.excess_bytes[:, index, index + 1].min()) for index in layers]
    index = int(np.argmax(missed))
    if math.isinf(missed[index]) and (problem.rule is not None or problem.pins):
        # Layers that may only be part of longer stages are not told apart here.
        return (
            f"No placement was found within {problem.time_limit_s:g} s: no device may run layer {index} "
            f"({problem.costs.workload.layers[index].name!r}) as a stage by itself, by pins or rule. To fix: pin less, "
            "or allow more shapes of stages."
        )
    if missed[index] > 0:
        return (
            f"Memory: layer {index} ({problem.costs.workload.layers[index].name!r}) alone needs {_mib(missed[index])} "
            f"more than there is, on whatever devices. {FIX}"
        )
    costs = problem.costs
    kinds = {device.kind for device in costs.profile.devices}
    needed = sum(
        min(layer_memory_bytes(layer, kind, costs.schedule, 1.0, 1, 1)[0] for kind in kinds)
        for layer in costs.workload.layers
    )
    room = float(sum(device.memory_bytes for device in costs.profile.devices))
    if needed > room:
        return (
            f"Memory: parameters, gradients and optimizer state need {_mib(needed)}, all devices together have "
            f"{_mib(room)}: {_mib(needed - room)} too much. {FIX}"
        )
    return (
        f"No placement was found within {problem.time_limit_s:g} s; it is not proved that there is none. The whole "
        f"model needs {_mib(needed)} without activations, all devices together have {_mib(room)}; the tightest is "
        f"layer {index} ({costs.workload.layers[index].name!r}), with {_mib(-missed[index])} to spare where it fits "
        "best. To fix: search longer (time_limit_s), or use smaller microbatches or devices with more memory."
    )


def _named(arrays: Arrays, k: int) -> str:
    """The devices of an option, with their memory."""
    option = arrays.options[k]
    placed = option.placed(arrays.members, [0] * len(arrays.members))
    names = ", ".join(repr(name) for replica in placed for name in replica)
    least = min(float(arrays.limit_bytes[c]) for replica in option.replicas for c in replica)
    return f"{'device' if arrays.use[k].sum() == 1 else 'devices'} {names} ({_mib(least)})"


def _limit(arrays: Arrays, k: int) -> float:
    return float(arrays.limit_bytes[arrays.use[k] > 0].min())


def _largest_layer(arrays: Arrays) -> Optional[Tuple[int, float, float]]:
    """The layer that fits nowhere by most, even as the last stage, with what it needs and what there is."""
    held = float(Tables(arrays).in_flight[0])
    layers = range(arrays.num_layers)
    missed = np.array(
        [
            arrays.tables.excess_bytes[:, index, index + 1]
            + (held - 1) * arrays.tables.activation_bytes[:, index, index + 1]
            for index in layers
        ]
    )
    index = int(np.argmax(missed.min(axis=1)))
    over = float(missed[index].min())
    if over <= 0:
        return None
    k = int(np.argmin(missed[index]))
    return index, over + _limit(arrays, k), _limit(arrays, k)


def _least_total(arrays: Arrays) -> float:
    """Bytes that the whole model needs when one microbatch is in flight everywhere."""
    limits = np.array([_limit(arrays, k) for k in range(len(arrays.options))])
    single = arrays.use.sum(axis=1) == 1
    return float((arrays.tables.excess_bytes[:, 0, -1] + limits)[single].min())


def _closest(arrays: Arrays) -> Tuple[float, Tuple[int, int, int]]:
    """The least worst excess over all placements, links disregarded, and the stage that has it."""
    tables = Tables(arrays)
    relaxed = tables.relax()
    assert relaxed is not None  # without a deadline
    excess = relaxed[2]
    over, state, end = float(excess[-1, 0]), 0, arrays.num_layers
    while True:
        best = (math.inf, 0, 0, 0.0)
        for k in range(len(arrays.options)):
            if np.any(tables.counts[state] + arrays.use[k] > tables.sizes):
                continue
            for first in range(end):
                held = tables.in_flight[tables.fewest[state]]
                own = float(
                    arrays.tables.excess_bytes[k, first, end]
                    + (held - 1) * arrays.tables.activation_bytes[k, first, end]
                )
                best = min(best, (max(own, float(excess[first, state + tables.deltas[k]])), first, k, own))
        worst, first, k, own = best
        if own >= worst or first == 0:
            return over, (first, end - 1, k)
        state, end = state + int(tables.deltas[k]), first


def _missing_with_links(arrays: Arrays, deadline: float) -> float:
    """How much more memory on every device makes a placement along existing links possible, rounded up."""
    held = Tables(arrays).in_flight[0]
    t = arrays.tables
    low, high = 0.0, max(0.0, float((t.excess_bytes + (held - 1) * t.activation_bytes)[:, 0, -1].min()))
    for _ in range(HALVINGS):
        if time.monotonic() > deadline:
            break
        middle = (low + high) / 2
        found = search(_with_more_memory(arrays, middle), deadline)
        if found is None:
            break
        if found.stages is None:
            low = middle
        else:
            high = middle
    return high


def _with_more_memory(arrays: Arrays, more_bytes: float) -> Arrays:
    t = arrays.tables
    room = more_bytes - t.excess_bytes
    kept = t.activation_bytes
    more = np.where(kept > 0, 1 + np.floor(room / np.where(kept > 0, kept, 1.0)), NO_LIMIT)
    most = np.where(room >= 0, more, 0.0)
    return arrays._replace(tables=t._replace(most_in_flight=most, excess_bytes=-room))
