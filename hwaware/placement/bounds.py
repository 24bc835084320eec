"""Bound every plan from below, whatever its stages, shares and links."""

from __future__ import annotations

import math
from typing import Dict, List, Sequence, Tuple

import numpy as np

from hwaware.cluster import Device
from hwaware.costs import PreparedCosts
from hwaware.costs.compute import analytic_time_s, device_time_s, is_split
from hwaware.costs.curves import FloatArray, monotone_curve
from hwaware.costs.prepared import device_row
from hwaware.placement.problem import Problem
from hwaware.workload import Layer

# A little below, for the rounding of the sums.
SAFETY = 1.0 - 1e-12
# Rounds of improving the weights of the devices; any weights give a valid bound.
ROUNDS = 200
# After so many rounds, one counts in the bound on the step.
STEP_EVERY = 10
# Fewer rounds where each takes long.
MOST_STEPS, LEAST_ROUNDS = 20_000_000, 10


def least_objective_s(problem: Problem) -> float:
    """Return a bound on the objective of every plan: `fluid_bound_s`, or the least device-seconds of all work."""
    costs, count = problem.costs.of_layers, problem.num_microbatches
    bound = fluid_bound_s(costs, count)
    if problem.objective == "per-device":
        work = np.array([_least_work_s(costs, device).sum(axis=0) for device in costs.profile.devices])
        gained_s = 2.0 * costs.most_gained_s * len(work)
        bound = max(bound, float(count * work.min(axis=0).sum() * SAFETY) - gained_s)
    return bound


def fluid_bound_s(costs: PreparedCosts, num_microbatches: int) -> float:
    """Return a bound on the step of every plan with B microbatches, whatever its stages.

    The slowest stage takes R >= P, the `fluid_period_s`, so a step takes at least B P - 2 h. A stage gains at most h by
    waiting before its first forward or backward pass.

    Where nothing gains, stages with the times c per microbatch take at least (B - 1) R + sum c. A replica of g devices
    with a share x takes at least sum_l (a_l x + m_l) / g (`_least_work_s`). Let weights u of the devices add up to 1
    over the cluster, and let K = B - 1. Then each layer adds at least

        min over kinds, g and 1 / samples <= x <= 1 of   (a' / g) x + m / g + K u (a' + m / x)

    a' = a + 2 (g - 1) n / W, where groups sum n bytes over links with at most the rate W.

    In 1F1B, a stage behind the slowest counts 2 c - R, not c. If its weights add up to 1 / K or more, all of its
    devices' time R makes up for that. Else R is at least K min u (a + m).

    Example:
        >>> from hwaware.cluster import ClusterProfile
        >>> from hwaware.workload import Workload
        >>> workload = Workload.uniform()
        >>> profile = ClusterProfile.uniform(hosts=1, devices_per_host=2, flops_per_s=1e10)
        >>> round(fluid_bound_s(PreparedCosts(workload, profile), 10), 6)
        1.5
    """
    costs = costs.of_layers
    shared, owned, weights = costs.cached(_shared_owned_weights)
    turns, gained_s = costs.schedule == "1f1b", 2.0 * costs.most_gained_s
    bound = max(0.0, num_microbatches * _period_s(shared + owned, weights) - gained_s)
    if not weights or gained_s or (turns and num_microbatches <= min(len(costs.workload.layers), len(costs.devices))):
        return bound
    groups, least_share = _groups_s(costs), 1.0 / costs.workload.microbatch_size
    for one in weights[::STEP_EVERY]:
        paid, least = (num_microbatches - 1) * one[:, None], np.full(shared.shape, np.inf)
        for fewest, most, sums_s in groups:
            once, each = shared / most + sums_s / fewest, paid * owned
            share = np.clip(np.sqrt(each / np.maximum(once, 1e-300)), least_share, 1.0)
            least = np.minimum(least, once * share + owned / most + paid * (shared + sums_s) + each / share)
        smaller = num_microbatches * float((paid * (shared + owned)).min()) if turns and paid.min() < 1 else math.inf
        bound = max(bound, min(float(least.min(axis=0).sum()), smaller) * SAFETY)
    return bound


def fluid_period_s(costs: PreparedCosts) -> float:
    """Return P, the seconds of a microbatch if work could be divided like water: no slowest stage takes less.

    Device d needs at least w_ld = a_ld + m_ld seconds for the whole of layer l. So for any weights u >= 0

        P >= sum_l min_d (u_d w_ld) / sum_d u_d
    """
    shared, owned, weights = costs.of_layers.cached(_shared_owned_weights)
    return _period_s(shared + owned, weights)


def _period_s(work: FloatArray, weights: Sequence[FloatArray]) -> float:
    """Return the largest P over these weights of the devices, each with a sum of 1 over the cluster."""
    return max((float((work * one[:, None]).min(axis=0).sum()) for one in weights), default=0.0) * SAFETY


def _shared_owned_weights(costs: PreparedCosts) -> Tuple[FloatArray, FloatArray, List[FloatArray]]:
    """Return a and m [devices, layers], like devices once, and weights that make P larger; none if one is free."""
    alike: Dict[object, List[Device]] = {}
    for device in costs.profile.devices:
        alike.setdefault(device_row(device, costs.workload.dtype), []).append(device)
    shared, owned = np.array([_least_work_s(costs, devices[0]) for devices in alike.values()]).transpose(1, 0, 2)
    counts, work = np.array([float(len(devices)) for devices in alike.values()]), shared + owned
    if not np.all(work.sum(axis=1) > 0):
        return shared, owned, []
    weights, found = 1.0 / work.sum(axis=1), []
    for k in range(min(ROUNDS, max(LEAST_ROUNDS, MOST_STEPS // work.size))):
        found.append(weights / (weights * counts).sum())
        weighted = work * weights[:, None]
        # Devices that win more work than their number allows get dearer.
        won = np.bincount(weighted.argmin(axis=0), weights=weighted.min(axis=0), minlength=len(counts))
        weights = weights * np.exp((won / max(won.sum(), 1e-300) - found[-1] * counts) / (1 + k / 4))
    return shared, owned, found


def _groups_s(costs: PreparedCosts) -> List[Tuple[float, float, FloatArray]]:
    """Return the sizes g of tensor-parallel groups from one number to another, and their least 2 (g - 1) n / W.

    Measured layers hold their sums, and measured groups may be faster than any link: these count none.
    """
    links, layers = costs.links.numbered(list(costs.devices))[1], costs.workload.layers
    rates = [rate for x in links for rate in (x.bandwidth_bytes_per_s, *(y.bytes / y.seconds for y in x.samples))]
    nbytes = np.array([0.0 if x.measured or costs.measured_groups else x.tensor_parallel_bytes or 0.0 for x in layers])
    sums_s, sizes = nbytes / max(rates, default=math.inf), ((1, 1), (2, 2), (3, 3), (4, 4), (5, 8), (9, math.inf))
    sums_s = np.where([is_split(layer) for layer in layers], sums_s, 1e300)  # no group takes less than one device
    return [(fewest, most, 2.0 * (fewest - 1) * sums_s) for fewest, most in sizes]


def _least_work_s(costs: PreparedCosts, device: Device) -> FloatArray:
    """Return a and m [2, layers]: a share x of a microbatch takes at least a x + m device-seconds.

    m is what memory takes to move the layer's parameters. It is 0 for measured layers.
    """
    dtype, layers = costs.workload.dtype, costs.workload.layers
    device_time_s(device, dtype, np.array([1.0]))  # says so if the data type was not measured
    sizes, seconds = monotone_curve((point.flops, point.seconds) for point in device.throughput[dtype])
    rates, whole = seconds / sizes, np.ones(len(layers))
    # A group divides a product of one device. A FLOP of the smaller products takes at least this part of its time.
    gained = float((np.minimum.accumulate(rates) / rates).min())
    total = np.zeros((2, len(layers)))
    for backward in (False,) if costs.schedule == "inference" else (False, True):
        flops = np.array([float(layer.backward_flops if backward else layer.forward_flops) for layer in layers])
        analytic = analytic_time_s(layers, device, dtype, whole, backward, whole)
        owned = analytic - analytic_time_s(layers, device, dtype, whole, backward, 0.0 * whole)
        # All of the layer at the best rate of the curve; what memory takes is at least in proportion to the part.
        best = flops * float(rates.min()) + np.maximum(0.0, analytic - device_time_s(device, dtype, flops))
        for index, layer in enumerate(layers):
            if layer.measured:
                best[index] = _least_measured_s(layer, device, dtype, float(best[index]), backward, gained)
                owned[index] = 0.0
        total += best - owned, owned
    return total


def _least_measured_s(layer: Layer, device: Device, dtype: str, best: float, backward: bool, gained: float) -> float:
    """Return the least of a layer's measured times on groups of the device's kind, and of `best`, the curve's time."""
    least, gained = best, gained if is_split(layer) else 1.0
    for sharding, measured in (layer.measured or {}).get(device.kind, {}).items():
        replicas, group = (int(part) for part in sharding.split(","))
        seconds = float(measured.backward_s if backward else measured.forward_s)
        least = min(least, replicas * group * seconds * (gained if group == 1 else 1.0))
        if replicas == 1:
            # A share of a measured whole is scaled with the analytic time; at best down to the curve's best rate.
            part = np.array([1.0 / group if is_split(layer) else 1.0])
            whole = float(analytic_time_s([layer], device, dtype, part, backward, part)[0])
            least = min(least, group * seconds * (best * float(part[0]) / whole if whole > 0 else 1.0))
    return least
