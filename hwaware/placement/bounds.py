"""Bound every plan from below, whatever its stages, shares and links."""

from __future__ import annotations

from typing import Dict, List

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
# Fewer rounds where each takes long.
MOST_STEPS, LEAST_ROUNDS = 20_000_000, 10


def least_objective_s(problem: Problem) -> float:
    """Return a bound on the objective of every plan: `fluid_bound_s`, or the least device-seconds of all work."""
    costs, count = problem.costs.of_layers, problem.num_microbatches
    bound = fluid_bound_s(costs, count)
    if problem.objective == "per-device":
        work = np.array([_least_work_s(costs, device) for device in costs.profile.devices])
        gained_s = 2.0 * costs.most_gained_s * len(work)
        bound = max(bound, float(count * work.min(axis=0).sum() * SAFETY) - gained_s)
    return bound


def fluid_bound_s(costs: PreparedCosts, num_microbatches: int) -> float:
    """Return B P - 2 h with the `fluid_period_s` P: each stage works B times.

    A stage gains at most h by waiting before its first forward or backward pass.

    Example:
        >>> from hwaware.cluster import ClusterProfile
        >>> from hwaware.workload import Workload
        >>> workload = Workload.uniform()
        >>> profile = ClusterProfile.uniform(hosts=1, devices_per_host=2, flops_per_s=1e10)
        >>> round(fluid_bound_s(PreparedCosts(workload, profile), 10), 6)
        1.5
    """
    return max(0.0, num_microbatches * fluid_period_s(costs) - 2.0 * costs.most_gained_s)


def fluid_period_s(costs: PreparedCosts) -> float:
    """Return P, the seconds of a microbatch if work could be divided like water: no slowest stage takes less.

    Device d needs at least w_ld seconds for the whole of layer l, so for any weights u >= 0

        P >= sum_l min_d (u_d w_ld) / sum_d u_d

    w_ld is the smaller of two times: the least measured device-seconds, and the time at the device's best rate.
    Like devices share one weight.
    """
    costs = costs.of_layers
    alike: Dict[object, List[Device]] = {}
    for device in costs.profile.devices:
        alike.setdefault(device_row(device, costs.workload.dtype), []).append(device)
    work = np.array([_least_work_s(costs, devices[0]) for devices in alike.values()])
    return float(_joint_s(work, np.array([float(len(devices)) for devices in alike.values()])) * SAFETY)


def _joint_s(work: FloatArray, counts: FloatArray) -> float:
    """Return the largest bound found over weights of the devices."""
    whole = work.sum(axis=1)
    if not np.all(whole > 0):
        return 0.0
    weights, best = 1.0 / whole, 0.0
    for k in range(min(ROUNDS, max(LEAST_ROUNDS, MOST_STEPS // work.size))):
        weighted = work * weights[:, None]
        best = max(best, float(weighted.min(axis=0).sum() / (weights * counts).sum()))
        # Devices that win more work than their number allows get dearer.
        won = np.bincount(weighted.argmin(axis=0), weights=weighted.min(axis=0), minlength=len(counts))
        share = won / won.sum() - weights * counts / (weights * counts).sum()
        weights = weights * np.exp(share / (1 + k / 4))
    return best


def _least_work_s(costs: PreparedCosts, device: Device) -> FloatArray:
    """Return w_l: the least seconds that the whole of each layer needs on this device, per microbatch."""
    dtype, layers = costs.workload.dtype, costs.workload.layers
    device_time_s(device, dtype, np.array([1.0]))  # says so if the data type was not measured
    sizes, seconds = monotone_curve((point.flops, point.seconds) for point in device.throughput[dtype])
    rates, whole = seconds / sizes, np.ones(len(layers))
    # A group divides a product of one device. A FLOP of the smaller products takes at least this part of its time.
    gained = float((np.minimum.accumulate(rates) / rates).min())
    total: FloatArray = np.zeros(len(layers))
    for backward in (False,) if costs.schedule == "inference" else (False, True):
        flops = np.array([float(layer.backward_flops if backward else layer.forward_flops) for layer in layers])
        analytic = analytic_time_s(layers, device, dtype, whole, backward, whole)
        # All of the layer at the best rate of the curve; what memory takes is at least in proportion to the part.
        best = flops * float(rates.min()) + np.maximum(0.0, analytic - device_time_s(device, dtype, flops))
        for index, layer in enumerate(layers):
            if layer.measured:
                best[index] = _least_measured_s(layer, device, dtype, float(best[index]), backward, gained)
        total += best
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
