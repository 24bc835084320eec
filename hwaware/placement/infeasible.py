"""Say why no placement exists: the tightest constraint, by how much it is missed, and a remedy."""

from __future__ import annotations

import math
import time
from typing import List, Optional, Tuple

import numpy as np

from hwaware.costs.memory import common_bytes, microbatches_in_flight, resident_bytes
from hwaware.costs.stages import NO_LIMIT, StageTable
from hwaware.placement.problem import Problem
from hwaware.placement.search import make_tables, relaxed, search
from hwaware.placement.ways import Arrays
from hwaware.plans import Schedule
from hwaware.workload import Layer

FIX = (
    "To fix: use smaller microbatches (hwaware trace --microbatch-size), more or larger devices, fewer excluded hosts, "
    "or a model with smaller layers."
)
# Halvings of the interval in which the missing memory lies, when links decide as well.
HALVINGS = 20


def why_infeasible(arrays: Arrays, problem: Problem, proved: bool, deadline: float) -> str:
    """Return the reason for having no plan, as sentences that end in a remedy.

    Args:
        arrays: The arrays that were searched.
        problem: The problem as it was asked.
        proved: True if it is certain that no plan exists.
        deadline: Deadline of the search, by `time.monotonic()`; the explanation takes as long again at most.
    """
    if problem.costs.of_layers is not problem.costs:
        return _not_found(problem)
    layer = _largest_layer(arrays)
    if layer is not None and math.isinf(layer[1]) and problem.rule is not None:
        return f"Rule: no stage that is allowed may have layer {layer[0]}. To fix: allow more shapes of stages."
    if layer is not None:
        return _too_large_a_layer(problem, *layer)
    if not proved:
        return _not_found(problem)
    over, (first, last, k) = _closest(arrays)
    if math.isinf(over) and problem.rule is not None:
        return "Rule: no stages that are allowed hold all layers on these devices. To fix: allow more shapes of stages."
    if math.isinf(over):
        pins = "; ".join(f"layer {layer} to {', '.join(names)}" for layer, names in sorted(problem.pins.items()))
        return (
            f"Pins: no contiguous stages keep all of {len(problem.pins)} pins ({pins}): layers between them need "
            "devices of their own. To fix: pin fewer layers, or to more devices."
        )
    if over > 0:
        placed = arrays.options[k].placed(arrays.members, [0] * len(arrays.members))
        names = ", ".join(repr(name) for replica in placed for name in replica.devices)
        return (
            f"Memory: in the placement that comes closest, layers {first} to {last} on {names} "
            f"({_mib(_limit(arrays, k))}) need {_mib(over)} too much. {FIX}"
        )
    missing = _missing_with_links(arrays, deadline + problem.time_limit_s)
    return (
        "Memory and links: every placement that fits in memory makes devices neighbours that have no link; along the "
        f"links that there are, {_mib(missing)} more memory on each device would do. To fix: measure the missing links "
        f"(hwaware profile), or {FIX[len('To fix: ') :]}"
    )


def why_infeasible_at_scale(problem: Problem, tables: StageTable) -> str:
    """Return the reason for a cluster too large for proofs, from the tables of its templates."""
    over = tables.over_bytes(1.0)
    missed = [float(over[:, index, index + 1].min()) for index in range(over.shape[1])]
    index = int(np.argmax(missed))
    # Layers that may only be part of longer stages are not told apart here.
    if problem.costs.of_layers is not problem.costs or missed[index] <= 0:
        return _not_found(problem)
    if math.isinf(missed[index]) and (problem.rule is not None or problem.pins):
        return (
            f"No placement was found within {problem.time_limit_s:g} s: no device may run layer {index} "
            f"({problem.costs.workload.layers[index].name!r}) as a stage by itself, by pins or rule. To fix: pin less, "
            "or allow more shapes of stages."
        )
    return (
        f"Memory: layer {index} ({problem.costs.workload.layers[index].name!r}) alone needs {_mib(missed[index])} "
        f"more than there is, on whatever devices. {FIX}"
    )


def short_of_memory(problem: Problem) -> Optional[str]:
    """Return the reason if memory alone, without a search, shows that no plan fits; else None."""
    least, needed, room = _needed_bytes(problem)
    if needed <= room:
        return None
    largest = float(max(device.memory_bytes for device in problem.costs.profile.devices))
    index = int(np.argmax(least))
    if least[index] > largest:
        return _too_large_a_layer(problem, index, least[index], largest)
    return (
        f"Memory: the whole model needs {_mib(needed)} at least, all devices together have {_mib(room)}: "
        f"{_mib(needed - room)} too much. {FIX}"
    )


def _needed_bytes(problem: Problem) -> Tuple[List[float], float, float]:
    """Return the least bytes of each layer, and of all together, however divided; and those of all devices."""
    costs = problem.costs.of_layers
    held = microbatches_in_flight(costs.schedule, problem.num_microbatches, 0)
    least = [_least_bytes(layer, costs.schedule, problem.num_microbatches, held) for layer in costs.workload.layers]
    # One stage with all layers holds once what several layers count.
    common = sum(pair.resident_bytes for pair in common_bytes(costs.workload, costs.schedule))
    return least, math.fsum(least) - common, float(sum(device.memory_bytes for device in costs.profile.devices))


def _least_bytes(layer: Layer, schedule: Schedule, num_microbatches: int, held: int) -> float:
    # Replicas hold copies, and a group that splits the layer holds no less than one device.
    stays = [resident_bytes(layer, schedule)]
    if schedule != "inference":
        for times in (layer.measured or {}).values():
            for sharding, measured in times.items():
                replicas, group = (int(part) for part in sharding.split(","))
                if measured.memory_bytes is not None:
                    whole = replicas * group * measured.memory_bytes
                    stays.append(max(0.0, whole - group * layer.activation_bytes))
    return min(stays) + num_microbatches * (layer.batch_bytes or 0.0) + held * layer.activation_bytes


def _too_large_a_layer(problem: Problem, index: int, needed: float, limit: float) -> str:
    return (
        f"Memory: layer {index} ({problem.costs.workload.layers[index].name!r}) alone needs {_mib(needed)}, the "
        f"largest device has {_mib(limit)}: {_mib(needed - limit)} too much. {FIX}"
    )


def _not_found(problem: Problem) -> str:
    layers, blocks = (len(costs.workload.layers) for costs in (problem.costs.of_layers, problem.costs))
    cut = f" that cuts the {layers:,} layers only between {blocks:,} blocks" if blocks < layers else ""
    _, needed, room = _needed_bytes(problem)
    return (
        f"No placement was found within {problem.time_limit_s:g} s{cut}. The whole model needs {_mib(needed)} at "
        f"least, all devices together have {_mib(room)}; it is not proved that there is none. To fix: search longer "
        f"(time_limit_s), pin less, or use {'fewer, larger layers, ' if cut else ''}smaller microbatches, or devices "
        "with more memory."
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _limit(arrays: Arrays, k: int) -> float:
    return float(arrays.limit_bytes[arrays.use[k] > 0].min())


def _largest_layer(arrays: Arrays) -> Optional[Tuple[int, float, float]]:
    """Return the layer that misses most even as the last stage, with its needs and the limit."""
    over_bytes = arrays.tables.over_bytes(float(make_tables(arrays).in_flight[0]))
    missed = np.array([over_bytes[:, index, index + 1] for index in range(arrays.num_layers)])
    index = int(np.argmax(missed.min(axis=1)))
    over, limit = float(missed[index].min()), _limit(arrays, int(np.argmin(missed[index])))
    return (index, over + limit, limit) if over > 0 else None


def _closest(arrays: Arrays) -> Tuple[float, Tuple[int, int, int]]:
    """Return the least excess of the fullest stage over all placements, links disregarded, and that stage."""
    tables = make_tables(arrays)
    in_front = relaxed(tables)
    assert in_front is not None  # without a deadline
    excess = in_front[2]
    over, state, end = float(excess[-1, 0]), 0, arrays.num_layers
    while True:
        fits = np.flatnonzero((tables.counts[state] + arrays.use <= tables.sizes).all(axis=1))
        own = arrays.tables.over_bytes(tables.in_flight[tables.fewest[state]])[fits, :end, end]
        worst = np.maximum(own, excess[:end, state + tables.deltas[fits]].T)
        # The least, of several that of the first layer, then of the first option.
        first, place = (int(at) for at in np.unravel_index(int(np.argmin(worst.T)), worst.T.shape))
        k = int(fits[place])
        if own[place, first] >= worst[place, first] or first == 0:
            return over, (first, end - 1, k)
        state, end = state + int(tables.deltas[k]), first


def _missing_with_links(arrays: Arrays, deadline: float) -> float:
    """Return how much more memory on every device allows a placement along existing links, rounded up."""
    held = float(make_tables(arrays).in_flight[0])
    low, high = 0.0, max(0.0, float(arrays.tables.over_bytes(held)[:, 0, -1].min()))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        found = search(_with_more_memory(arrays, middle), deadline) if time.monotonic() < deadline else None
        if found is None:
            break
        low, high = (middle, high) if found.stages is None else (low, middle)
    return high


def _with_more_memory(arrays: Arrays, more_bytes: float) -> Arrays:
    t = arrays.tables
    room, updated = more_bytes - t.excess_bytes, t.update_excess_bytes - more_bytes
    kept = t.activation_bytes
    more = np.where(kept > 0, 1 + np.floor(room / np.where(kept > 0, kept, 1.0)), NO_LIMIT)
    most = np.where((room >= 0) & (updated <= 0), more, 0.0)
    return arrays._replace(tables=t._replace(most_in_flight=most, excess_bytes=-room, update_excess_bytes=updated))
