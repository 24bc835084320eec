"""Say why no placement exists: the tightest constraint, by how much it is missed, and a remedy."""

from __future__ import annotations

import math
from typing import List, Optional, Tuple

import numpy as np

from hwaware.costs.memory import all_in_flight, common_bytes, resident_bytes
from hwaware.costs.stages import NO_LIMIT, StageTable
from hwaware.placement.problem import Problem
from hwaware.placement.search import make_tables, search
from hwaware.placement.ways import Arrays

FIX = (
    "use smaller microbatches (hwaware trace --microbatch-size), more or larger devices, fewer excluded hosts, "
    "or a model with smaller layers."
)
# Where parameters and optimizer states alone do not fit, the size of a microbatch changes nothing.
FIX_OF_STATE = (
    "use more or larger devices, fewer excluded hosts, or a model with smaller layers. Smaller microbatches do not "
    "help: parameters, gradients and optimizer states alone need too much."
)
# Less memory by this part is no longer told apart.
BELOW = 1.0 - 1e-9


def why_infeasible(arrays: Arrays, problem: Problem, proved: bool, deadline: float) -> str:
    """Return the reason for having no plan, as sentences that end in a remedy.

    `proved` says if it is certain that no plan exists. The explanation may go on for `problem.time_limit_s` after the
    deadline.
    """
    if problem.costs.of_layers is not problem.costs or not proved:
        return _not_found(problem)
    until = deadline + problem.time_limit_s
    closest = _closest(arrays._replace(pairs=np.zeros_like(arrays.pairs)), until)
    if closest is None and problem.rule is not None:
        return (
            "Rule: the search found no allowed stages that hold all layers on these devices. Of equal devices, it "
            "asked the rule about one alone. To fix: allow more shapes of stages, or name devices by exclude or pins, "
            "not in the rule."
        )
    if closest is None and problem.pins:
        pins = "; ".join(f"layer {layer} to {', '.join(names)}" for layer, names in sorted(problem.pins.items()))
        return (
            f"Pins: no contiguous stages keep all of {len(problem.pins)} pins ({pins}): layers between them need "
            "devices of their own. To fix: pin fewer layers, or to more devices."
        )
    if closest is not None and closest[0] > 0:
        over, (first, last, k) = closest
        placed = arrays.options[k].placed(arrays.members)
        names = [name for replica in placed for name in replica.devices]
        limit = min(problem.costs.memory_bytes[name] for name in names)
        return (
            f"Memory: in the placement that comes closest, layers {first} to {last} on {', '.join(map(repr, names))} "
            f"({_mib(limit)}) need {_mib(over)} too much. To fix: {FIX}"
        )
    linked = None if closest is None else _closest(arrays, until)
    if linked is None:  # time ran out
        return _not_found(problem)
    return (
        "Memory and links: every placement that fits in memory makes devices neighbours that have no link; along the "
        f"links that there are, {_mib(linked[0])} more memory on each device would do. To fix: measure the missing "
        f"links (hwaware profile), or {FIX}"
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
            f"Within the time limit, no placement was found: no device may run layer {index} "
            f"({problem.costs.workload.layers[index].name!r}) as a stage by itself, by pins or rule. To fix: pin less, "
            "or allow more shapes of stages."
        )
    return (
        f"Memory: layer {index} ({problem.costs.workload.layers[index].name!r}) alone needs {_mib(missed[index])} "
        f"more than there is, on whatever devices. To fix: {FIX}"
    )


def short_of_memory(problem: Problem) -> Optional[str]:
    """Return the reason if memory alone, without a search, shows that no plan fits; else None."""
    least, state, needed, room = _needed_bytes(problem)
    if needed <= room:
        return None
    largest = float(max(device.memory_bytes for device in problem.costs.profile.devices))
    index = int(np.argmax(least))
    if least[index] > largest:
        name, over = problem.costs.workload.layers[index].name, least[index] - largest
        return (
            f"Memory: layer {index} ({name!r}) alone needs {_mib(least[index])}, the largest device has "
            f"{_mib(largest)}: {_mib(over)} too much. To fix: {FIX if state[index] <= largest else FIX_OF_STATE}"
        )
    fix = FIX if needed - math.fsum(least) + math.fsum(state) <= room else FIX_OF_STATE
    return (
        f"Memory: the whole model needs {_mib(needed)} at least, all devices together have {_mib(room)}: "
        f"{_mib(needed - room)} too much. To fix: {fix}"
    )


def _needed_bytes(problem: Problem) -> Tuple[List[float], List[float], float, float]:
    """Return the least bytes of each layer, and those without activations; of all together; and of all devices."""
    costs = problem.costs.of_layers
    held = all_in_flight(costs.schedule, problem.num_microbatches, 1)[0]
    least, state = [], []
    for layer in costs.workload.layers:
        # Replicas hold copies, and a group that splits the layer holds no less than one device.
        stays = [resident_bytes(layer, costs.schedule)]
        known = (layer.measured or {}).values() if costs.schedule != "inference" else ()
        for sharding, measured in (one for times in known for one in times.items()):
            replicas, group = (int(part) for part in sharding.split(","))
            if measured.memory_bytes is not None:
                stays.append(max(0.0, group * (replicas * measured.memory_bytes - layer.activation_bytes)))
        batches = problem.num_microbatches * (layer.batch_bytes or 0.0)
        state.append(min(stays))
        least.append(state[-1] + batches + held * layer.activation_bytes)
    # One stage with all layers holds once what several layers count.
    common = sum(pair.resident_bytes for pair in common_bytes(costs.workload, costs.schedule))
    return least, state, math.fsum(least) - common, float(sum(device.memory_bytes for device in costs.profile.devices))


def _not_found(problem: Problem) -> str:
    layers, blocks = (len(costs.workload.layers) for costs in (problem.costs.of_layers, problem.costs))
    cut = f" that cuts the {layers:,} layers only between {blocks:,} blocks" if blocks < layers else ""
    *_, needed, room = _needed_bytes(problem)
    return (
        f"Within the time limit, no placement was found{cut}. The whole model needs {_mib(needed)} at least, all "
        f"devices together have {_mib(room)}; it is not proved that there is none. To fix: search longer "
        f"(time_limit_s), pin less, or use {'fewer, larger layers, ' if cut else ''}smaller microbatches, or devices "
        "with more memory."
    )


def _mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


def _closest(arrays: Arrays, deadline: float) -> Optional[Tuple[float, Tuple[int, int, int]]]:
    """Return the least excess of the fullest stage over all placements, and that stage; None without any placement."""
    held = make_tables(arrays).in_flight
    closest: Optional[Tuple[float, Tuple[int, int, int]]] = None
    low, high, more = 0.0, math.inf, math.inf
    while low < high * BELOW or math.isinf(more):
        found = search(_with_more_memory(arrays, more), deadline)
        if found is None or (found.stages is None and (math.isinf(more) or math.isfinite(found.bound_s))):
            break  # time ran out, or no memory would help
        if found.stages is None:
            low, more = more, high * BELOW  # does any come closer?
            continue
        over = [
            float(arrays.tables.over_bytes(held[behind])[k, first, last + 1])
            for behind, (first, last, k) in enumerate(reversed(found.stages))
        ]
        worst = int(np.argmax(over))
        high = max(0.0, over[worst])
        closest, more = (high, found.stages[-1 - worst]), (low + high) / 2
    return closest


def _with_more_memory(arrays: Arrays, more_bytes: float) -> Arrays:
    """Return the arrays with more memory on every device, and without times: any placement is the best."""
    t = arrays.tables
    allowed = np.isfinite(t.excess_bytes)
    room, kept = more_bytes - np.where(allowed, t.excess_bytes, 0.0), t.activation_bytes
    fit = np.where(kept > 0, 1 + np.floor(room / np.where(kept > 0, kept, 1.0)), NO_LIMIT)
    fits = allowed & (room >= 0) & (t.update_excess_bytes <= more_bytes)
    most, nothing = np.where(fits, fit, np.minimum(t.most_in_flight, 0.0)), np.zeros_like(t.forward_s)
    tables = t._replace(forward_s=nothing, backward_s=nothing, per_step_s=nothing, most_in_flight=most)
    return arrays._replace(tables=tables, messages_s=np.zeros_like(arrays.messages_s), most_gained_s=0.0)
