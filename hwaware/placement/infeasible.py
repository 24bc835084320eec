"""Why no placement exists: the tightest constraint, by how much it is missed, and what helps."""

from __future__ import annotations

import math
import time
from typing import Optional, Tuple

import numpy as np

from hwaware.costs.memory import common_bytes, microbatches_in_flight, resident_bytes
from hwaware.costs.stages import NO_LIMIT, StageTable
from hwaware.placement.arrays import Arrays
from hwaware.placement.problem import Problem
from hwaware.placement.search import Tables, search
from hwaware.plans import Schedule
from hwaware.workload import Layer

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
    if problem.costs.of_layers is not problem.costs:
        return _between_blocks(problem)
    layer = _largest_layer(arrays)
    if layer is not None and math.isinf(layer[1]) and problem.rule is not None:
        return f"Rule: no stage that is allowed may have layer {layer[0]}. To fix: allow more shapes of stages."
    if layer is not None:
        return _too_large_a_layer(problem, *layer)
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


def short_of_memory(problem: Problem) -> Optional[str]:
    """The reason where memory alone, without any search, shows that no plan fits; None if it does not."""
    costs = problem.costs
    held = microbatches_in_flight(costs.schedule, problem.num_microbatches, 0)
    least = [_least_bytes(layer, costs.schedule, problem.num_microbatches, held) for layer in costs.workload.layers]
    needed, room = (
        math.fsum(least) - _common_bytes(problem),
        float(sum(device.memory_bytes for device in costs.profile.devices)),
    )
    if needed <= room:
        return None
    largest = float(max(device.memory_bytes for device in costs.profile.devices))
    index = int(np.argmax(least))
    if least[index] > largest:
        return _too_large_a_layer(problem, index, least[index], largest)
    return (
        f"Memory: the whole model needs {_mib(needed)} at least, all devices together have {_mib(room)}: "
        f"{_mib(needed - room)} too much. {FIX}"
    )


def _common_bytes(problem: Problem) -> float:
    """Return the bytes that several layers count, but that one stage with all layers holds once."""
    return sum(pair.resident_bytes for pair in common_bytes(problem.costs.workload, problem.costs.schedule))


def _too_large_a_layer(problem: Problem, index: int, needed: float, limit: float) -> str:
    return (
        f"Memory: layer {index} ({problem.costs.workload.layers[index].name!r}) alone needs {_mib(needed)}, the "
        f"largest device has {_mib(limit)}: {_mib(needed - limit)} too much. {FIX}"
    )


def _least_bytes(layer: Layer, schedule: Schedule, num_microbatches: int, held: int) -> float:
    """No fewer bytes than a layer takes on all of its devices together, however it is divided among them."""
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


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def why_infeasible_at_scale(problem: Problem, tables: StageTable) -> str:
    """The same for a cluster too large for proofs, from the tables of its templates."""
    if problem.costs.of_layers is not problem.costs:
        return _between_blocks(problem)
    layers = range(tables.forward_s.shape[1])
    over = tables.over_bytes(1.0)
    missed = [float(over[:, index, index + 1].min()) for index in layers]
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
    needed = sum(resident_bytes(layer, costs.schedule) for layer in costs.workload.layers) - _common_bytes(problem)
    room = float(sum(device.memory_bytes for device in costs.profile.devices))
    return (
        f"No placement was found within {problem.time_limit_s:g} s; it is not proved that there is none. The whole "
        f"model needs {_mib(needed)} without activations, all devices together have {_mib(room)}; the tightest is "
        f"layer {index} ({costs.workload.layers[index].name!r}), with {_mib(-missed[index])} to spare where it fits "
        "best. To fix: search longer (time_limit_s), or use smaller microbatches or devices with more memory."
    )


def _between_blocks(problem: Problem) -> str:
    layers, blocks = (len(costs.workload.layers) for costs in (problem.costs.of_layers, problem.costs))
    return (
        f"No placement was found within {problem.time_limit_s:g} s that cuts the {layers:,} layers only between "
        f"{blocks:,} blocks; it is not proved that there is none. To fix: give a workload of fewer, larger layers, "
        "smaller microbatches, or devices with more memory."
    )


def _named(arrays: Arrays, k: int) -> str:
    """The devices of an option, with their memory."""
    option = arrays.options[k]
    placed = option.placed(arrays.members, [0] * len(arrays.members))
    names = ", ".join(repr(name) for replica in placed for name in replica.devices)
    least = min(float(arrays.limit_bytes[c]) for replica in option.replicas for c in replica)
    return f"{'device' if arrays.use[k].sum() == 1 else 'devices'} {names} ({_mib(least)})"


def _limit(arrays: Arrays, k: int) -> float:
    return float(arrays.limit_bytes[arrays.use[k] > 0].min())


def _largest_layer(arrays: Arrays) -> Optional[Tuple[int, float, float]]:
    """The layer that fits nowhere by most, even as the last stage, with what it needs and what there is."""
    held = float(Tables(arrays).in_flight[0])
    layers = range(arrays.num_layers)
    over_bytes = arrays.tables.over_bytes(held)
    missed = np.array([over_bytes[:, index, index + 1] for index in layers])
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
    return float((arrays.tables.over_bytes(1.0)[:, 0, -1] + limits)[single].min())


def _closest(arrays: Arrays) -> Tuple[float, Tuple[int, int, int]]:
    """The least worst excess over all placements, links disregarded, and the stage that has it."""
    tables = Tables(arrays)
    relaxed = tables.relax()
    assert relaxed is not None  # without a deadline
    excess = relaxed[2]
    over, state, end = float(excess[-1, 0]), 0, arrays.num_layers
    while True:
        fits = np.flatnonzero((tables.counts[state] + arrays.use <= tables.sizes).all(axis=1))
        held = tables.in_flight[tables.fewest[state]]
        t = arrays.tables
        passes = t.excess_bytes[fits, :end, end] + (held - 1) * t.activation_bytes[fits, :end, end]
        own = np.maximum(passes, t.update_excess_bytes[fits, :end, end])
        worst = np.maximum(own, excess[:end, state + tables.deltas[fits]].T)
        # The least, of several that of the first layer, then of the first option.
        first, place = (int(at) for at in np.unravel_index(int(np.argmin(worst.T)), worst.T.shape))
        k = int(fits[place])
        if own[place, first] >= worst[place, first] or first == 0:
            return over, (first, end - 1, k)
        state, end = state + int(tables.deltas[k]), first


def _missing_with_links(arrays: Arrays, deadline: float) -> float:
    """How much more memory on every device makes a placement along existing links possible, rounded up."""
    held = Tables(arrays).in_flight[0]
    low, high = 0.0, max(0.0, float(arrays.tables.over_bytes(float(held))[:, 0, -1].min()))
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
    updated = t.update_excess_bytes - more_bytes
    most = np.where((room >= 0) & (updated <= 0), more, 0.0)
    return arrays._replace(tables=t._replace(most_in_flight=most, excess_bytes=-room, update_excess_bytes=updated))
