"""Mappings that people use without measurements, as plans: the search must never do worse."""

from __future__ import annotations

import bisect
import collections
import math
import time
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from hwaware.costs import evaluate
from hwaware.costs.prepared import ReplicaSums
from hwaware.costs.stages import LocatedStage, in_groups
from hwaware.errors import PlanError
from hwaware.placement.alpa_dp import training_dp
from hwaware.placement.arrays import splits
from hwaware.placement.blocks import in_blocks, most_blocks
from hwaware.placement.options import alpa_runs
from hwaware.placement.problem import Answer, Problem
from hwaware.plans import Plan, Replica, Stage

# Alpa's search takes each layer on each number of devices: a device counts as so many ways to build a stage. Models of
# up to 128 layers are never joined in blocks on 1,024 devices.
ALPA_WEIGHT = 0.4


def even(problem: Problem) -> Answer:
    """The same number of layers on every device, devices in the profile's order; the first ones take what is over."""
    devices = [device.id for device in problem.costs.profile.devices]
    layers = len(problem.costs.workload.layers)
    used = devices[:layers]
    base, over = divmod(layers, len(used))
    return Answer(_plan(problem, used, [base + (1 if k < over else 0) for k in range(len(used))]))


def proportional(problem: Problem) -> Answer:
    """Layers in proportion to the speed of each device, devices in the profile's order; sends are disregarded.

    Speed is one over the time of the whole model. Each device takes at least one layer; with fewer layers than devices,
    the slowest devices stay idle.
    """
    costs = problem.costs
    layers = len(costs.workload.layers)
    sums = {device.id: costs.sums((device.id,)) for device in costs.profile.devices}
    whole = {device: s.forward_s[-1] + s.backward_s[-1] for device, s in sums.items()}
    kept = set(sorted(whole, key=lambda device: whole[device])[:layers])
    used = [device for device in whole if device in kept]
    # The part of the whole model that the layers before l are, in the mean of the devices.
    reached = [(np.array(sums[d].forward_s) + np.array(sums[d].backward_s)) / (whole[d] or 1.0) for d in used]
    parts = np.mean(reached, axis=0).tolist()
    speeds = [1.0 / whole[device] if whole[device] > 0 else 1.0 for device in used]
    return Answer(_plan(problem, used, _proportional_counts(parts, speeds)))


def _proportional_counts(parts: Sequence[float], speeds: Sequence[float]) -> List[int]:
    """How many layers each device takes: the cut nearest to its share of the work, at least one layer each."""
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
    """As with Megatron-LM: equal stages of DP x TP devices each, all devices used, the best such division by price.

    Layers are divided evenly, devices are taken in the profile's order, tensor-parallel groups stay inside a host.
    """
    best: Tuple[float, Optional[Plan]] = (math.inf, None)
    costs = problem.costs
    for candidate in _uniform_plans(problem):
        try:
            cost = evaluate(candidate, costs.workload, costs.profile, costs)
        except PlanError:  # no link
            continue
        # A plan over memory only counts if there is no other.
        value = cost.objective_s(problem.objective) * (1.0 if cost.fits else 1e6)
        if value < best[0]:
            best = value, candidate
    if best[1] is None:
        return Answer(None, None, "No equal division of layers and devices is possible. To fix: use the exact solver.")
    return Answer(best[1])


def _uniform_plans(problem: Problem) -> Iterator[Plan]:
    costs, most = problem.costs, problem.most_devices
    devices, layers = costs.profile.devices, len(costs.workload.layers)
    widest = min(collections.Counter(device.host for device in devices).values())
    for stages in range(1, min(layers, len(devices)) + 1):
        each = len(devices) // stages
        if len(devices) % stages or (most is not None and each > most):
            continue
        for group in range(1, each + 1):
            replicas = each // group
            if each % group or costs.workload.microbatch_size % replicas or group > widest:
                continue
            if group > 1 and not splits(costs.workload):
                continue
            made = []
            for k in range(stages):
                own = [device.id for device in devices[k * each : (k + 1) * each]]
                first, end = k * layers // stages, (k + 1) * layers // stages
                stage = LocatedStage(first, end - 1, in_groups(own, group))
                if problem.target == "alpa" and not alpa_runs(stage.replicas, costs.devices):
                    break
                made.append(stage.plan_stage())
            if len(made) == stages:
                yield Plan(num_microbatches=problem.num_microbatches, schedule=costs.schedule, stages=tuple(made))


def alpa(problem: Problem) -> Answer:
    """What Alpa 0.2.3 would do: its own objective at the mean speed of the devices, its own slicing of the cluster.

    All devices are taken as equal and all are used. Where hosts have unequal numbers of devices, which Alpa refuses,
    each device stands alone. A submesh of n devices takes 1/n of the time. Equal submeshes get hosts in reverse order.
    """
    costs = problem.costs
    blocks = in_blocks(problem, most_blocks(ALPA_WEIGHT * len(costs.devices)))
    if blocks is not None:
        return blocks.of_layers(alpa(blocks.problem), problem)._replace(bound_s=None)
    of_hosts: Dict[str, List[str]] = {host.name: [] for host in costs.profile.hosts}
    for device in costs.profile.devices:
        of_hosts[device.host].append(device.id)
    hosts = [names for names in of_hosts.values() if names]
    unequal = len({len(names) for names in hosts}) > 1
    if unequal:
        hosts = [[name] for names in hosts for name in names]
    width, layers = len(hosts[0]), len(costs.workload.layers)
    shapes = [(1, 1)] if unequal else _submesh_shapes(problem, len(hosts), width)
    per_layer = 1.0 / np.mean(
        [1.0 / np.maximum(np.diff(s.forward_s) + np.diff(s.backward_s), 1e-30) for s in _single_sums(problem)], axis=0
    )
    sums = np.concatenate([[0.0], np.cumsum(per_layer)])
    sizes = np.array([h * d for h, d in shapes])
    ranges = sums[None, 1:] - sums[:-1, None]
    cost = np.where(np.tri(layers, layers, -1)[:, :, None, None] > 0, np.inf, (ranges[:, :, None] / sizes)[..., None])
    _, found = training_dp(
        layers, width * len(hosts), problem.num_microbatches, shapes, 1, cost, np.full(cost.shape, 2**20)
    )
    if found is None:
        return Answer(
            None,
            None,
            f"Alpa uses all devices, and finds no way to give {layers} layers to {width * len(hosts)} of them. "
            "To fix: exclude some, or use the exact solver.",
        )
    sliced = _sliced([shapes[shape] for _, shape, _ in found], hosts)
    stages = []
    for (cut, _, _), names in zip(found, sliced):
        group = _logical_group(problem, len(names), width)
        stages.append(LocatedStage(cut[0], cut[1] - 1, in_groups(names, group)).plan_stage())
    return Answer(Plan(num_microbatches=problem.num_microbatches, schedule=costs.schedule, stages=tuple(stages)))


def _single_sums(problem: Problem) -> List[ReplicaSums]:
    return [problem.costs.sums((device.id,)) for device in problem.costs.profile.devices]


def _submesh_shapes(problem: Problem, hosts: int, width: int) -> List[Tuple[int, int]]:
    """Alpa's "power_of_two" shapes, less those that have no logical shape here."""
    shapes = [(1, 1 << k) for k in range(width.bit_length()) if 1 << k <= width]
    if shapes[-1][1] != width:
        shapes.append((1, width))
    shapes += [(1 << k, width) for k in range(1, hosts.bit_length()) if 1 << k <= hosts]
    most = problem.most_devices
    return [
        (h, d)
        for h, d in shapes
        if (most is None or h * d <= most) and (h * d == 1 or _logical_group(problem, h * d, width) <= width)
    ]


def _logical_group(problem: Problem, devices: int, width: int) -> int:
    """The smallest tensor-parallel group that leaves a number of replicas that divides the samples."""
    for group in range(1, devices + 1):
        fits = devices % group == 0 and problem.costs.workload.microbatch_size % (devices // group) == 0
        if fits and (group == 1 or splits(problem.costs.workload)):
            return group
    return width + 1


def _sliced(shapes: Sequence[Tuple[int, int]], hosts: Sequence[Sequence[str]]) -> List[List[str]]:
    """The devices of each submesh: the largest first, equal ones from the last stage to the first."""
    order = sorted(range(len(shapes)), key=lambda k: shapes[k][0] * shapes[k][1])[::-1]
    names = [name for host in hosts for name in host]
    sliced: List[List[str]] = [[] for _ in shapes]
    taken = 0
    for k in order:
        count = shapes[k][0] * shapes[k][1]
        sliced[k] = names[taken : taken + count]
        taken += count
    return sliced


def starting_plans(problem: Problem, deadline: float = math.inf) -> List[Plan]:
    """The plans of all baselines that have one; after the deadline no further one is asked."""
    plans: List[Plan] = []
    for baseline in (proportional, even, alpa, megatron):
        answer = baseline(problem) if not plans or time.monotonic() < deadline else Answer(None)
        if answer.plan is not None:
            plans.append(answer.plan)
    return plans


def _plan(problem: Problem, devices: Sequence[str], counts: Sequence[int]) -> Plan:
    stages, first = [], 0
    for device, count in zip(devices, counts):
        stages.append(Stage(layers=(first, first + count - 1), replicas=(Replica(devices=(device,)),)))
        first += count
    return Plan(num_microbatches=problem.num_microbatches, schedule=problem.costs.schedule, stages=tuple(stages))
