"""Map models as people do without measurements; the search must never do worse."""

from __future__ import annotations

import bisect
import collections
import itertools
import math
import time
from typing import Iterator, List, Sequence

import numpy as np

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
    return Answer(_plan(problem, used, [base + (1 if k < over else 0) for k in range(len(used))]))


def proportional(problem: Problem) -> Answer:
    """Give devices layers in proportion to their speed, in the profile's order, and disregard sends.

    Speed is one over the time of the whole model. Each device takes at least one layer; with fewer layers than devices,
    the slowest devices stay idle.
    """
    costs = problem.costs
    layers = len(costs.workload.layers)
    sums = {device.id: costs.sums((device.id,)) for device in costs.profile.devices}
    whole = {device: costs.whole_s(device) for device in sums}
    kept = set(sorted(whole, key=lambda device: whole[device])[:layers])
    used = [device for device in whole if device in kept]
    # The part of the whole model that the layers before l are, in the mean of the devices.
    reached = [(np.array(sums[d].forward_s) + np.array(sums[d].backward_s)) / (whole[d] or 1.0) for d in used]
    parts = np.mean(reached, axis=0).tolist()
    speeds = [1.0 / whole[device] if whole[device] > 0 else 1.0 for device in used]
    return Answer(_plan(problem, used, _proportional_counts(parts, speeds)))


def _proportional_counts(parts: Sequence[float], speeds: Sequence[float]) -> List[int]:
    """Return the layers of each device: the cut nearest to its share of the work, at least one layer."""
    layers, total, reached, first = len(parts) - 1, sum(speeds), 0.0, 0
    counts = []
    for index, speed in enumerate(speeds):
        reached += speed / total
        last_possible = layers - (len(speeds) - index - 1)
        # The parts only grow: the nearest cut is the first beyond the share, or the first of those just below it.
        above = bisect.bisect_left(parts, reached, first + 1, last_possible + 1)
        below = bisect.bisect_left(parts, parts[above - 1], first + 1, above)
        end = min((cut for cut in (below, above) if cut <= last_possible), key=lambda cut: abs(parts[cut] - reached))
        end = layers if index == len(speeds) - 1 else end
        counts.append(end - first)
        first = end
    return counts


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
    widest = widest if splits(costs.workload) else 1
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


def _plan(problem: Problem, devices: Sequence[str], counts: Sequence[int]) -> Plan:
    ends = itertools.accumulate(counts)
    stages = (LocatedStage(end - n, end - 1, in_groups([name], 1)) for name, n, end in zip(devices, counts, ends))
    return problem.plan(stages)
