"""Map models as people do without measurements; the search must never do worse."""

from __future__ import annotations

import collections
import math
import time
from typing import Iterator, List, Sequence

import numpy as np

from hwaware.costs.curves import FloatArray
from hwaware.costs.stages import LocatedStage, in_groups
from hwaware.placement import alpa_mapping
from hwaware.placement.problem import Answer, Problem
from hwaware.placement.ways import alpa_runs, splits
from hwaware.plans import Plan


def even(problem: Problem) -> Answer:
    """Give every device the same number of layers, in the profile's order; the first ones take the remainder."""
    devices = [device.id for device in problem.costs.profile.devices]
    layers = len(problem.costs.workload.layers)
    used = devices[:layers]
    base, over = divmod(layers, len(used))
    return Answer(_plan(problem, used, [k * base + min(k, over) for k in range(len(used) + 1)]))


def proportional(problem: Problem) -> Answer:
    """Give devices layers in proportion to their speed, in the profile's order, and disregard sends.

    Speed is one over the time of the whole model. Each device takes at least one layer; with fewer layers than devices,
    the slowest devices stay idle.
    """
    costs = problem.costs
    whole = {device.id: costs.whole_s(device.id) for device in costs.profile.devices}
    kept = set(sorted(whole, key=whole.__getitem__)[: len(costs.workload.layers)])
    used = [device for device in whole if device in kept]
    sums = [costs.sums((device,)) for device in used]
    # The part of the whole model that the layers before l are, in the mean of the devices.
    reached = [(np.array(s.forward_s) + np.array(s.backward_s)) / (whole[d] or 1.0) for d, s in zip(used, sums)]
    parts = np.mean(reached, axis=0)
    speeds = [1.0 / whole[device] if whole[device] > 0 else 1.0 for device in used]
    return Answer(_plan(problem, used, _proportional_cuts(parts, speeds)))


def _proportional_cuts(parts: FloatArray, speeds: Sequence[float]) -> List[int]:
    """Return 0 and the cut behind each device: the nearest to its share, after at least one layer."""
    cuts, total, reached = [0], sum(speeds), 0.0
    for behind, speed in zip(range(len(speeds) - 1, 0, -1), speeds):
        reached += speed / total
        possible = parts[cuts[-1] + 1 : len(parts) - behind]
        cuts.append(cuts[-1] + 1 + int(np.argmin(np.abs(possible - reached))))
    return [*cuts, len(parts) - 1]


def megatron(problem: Problem) -> Answer:
    """Return equal stages of DP x TP devices as Megatron-LM does: all devices used, the cheapest such division.

    Layers are divided evenly, in the profile's order of devices. Tensor-parallel groups stay inside a host.
    """
    plans = [(problem.cost(plan), plan) for plan in _uniform_plans(problem)]
    linked = [(cost, plan) for cost, plan in plans if cost is not None]
    if not linked:
        return Answer(None, None, "No equal division of layers and devices is possible. To fix: use the exact solver.")
    # A plan over memory counts only if no other exists.
    return Answer(min(linked, key=lambda one: (not one[0].fits, one[0].objective_s(problem.objective)))[1])


def _uniform_plans(problem: Problem) -> Iterator[Plan]:
    costs, most = problem.costs, problem.most_devices
    devices, layers = costs.profile.devices, len(costs.workload.layers)
    widest = min(collections.Counter(device.host for device in devices).values())
    widest = widest if splits(costs) else 1
    for stages in range(1, min(layers, len(devices)) + 1):
        each = len(devices) // stages
        if len(devices) % stages or (most is not None and each > most):
            continue
        for group in range(1, min(each, widest) + 1):
            if each % group or costs.workload.microbatch_size % (each // group):
                continue
            edges = [k * layers // stages for k in range(stages + 1)]
            own = ([device.id for device in devices[k * each : (k + 1) * each]] for k in range(stages))
            made = [LocatedStage(edges[k], edges[k + 1] - 1, in_groups(names, group)) for k, names in enumerate(own)]
            if problem.target != "alpa" or all(alpa_runs(stage.replicas, costs.hardware) for stage in made):
                yield problem.plan(made)


def starting_plans(problem: Problem, deadline: float = math.inf) -> List[Plan]:
    """Return the plans of all baselines that have one; after the deadline, ask no further one."""
    plans: List[Plan] = []
    for baseline in (proportional, even, alpa_mapping.baseline, megatron):
        answer = baseline(problem) if not plans or time.monotonic() < deadline else Answer(None)
        if answer.plan is not None:
            plans.append(answer.plan)
    return plans


def _plan(problem: Problem, devices: Sequence[str], cuts: Sequence[int]) -> Plan:
    edges = zip(devices, cuts, cuts[1:])
    return problem.plan(LocatedStage(first, end - 1, in_groups([name], 1)) for name, first, end in edges)
