"""Mappings that people use without measurements, as plans: the search must never do worse."""

from __future__ import annotations

from typing import List, Sequence

from hwaware.placement.request import Answer, Request
from hwaware.plans import Plan, Replica, Stage


def even(request: Request) -> Answer:
    """The same number of layers on every device, devices in the profile's order; the first ones take what is over."""
    devices = [device.id for device in request.costs.profile.devices]
    layers = len(request.costs.workload.layers)
    used = devices[:layers]
    base, over = divmod(layers, len(used))
    return Answer(_plan(request, used, [base + (1 if k < over else 0) for k in range(len(used))]))


def proportional(request: Request) -> Answer:
    """Layers in proportion to the speed of each device, devices in the profile's order; sends are disregarded.

    Speed is one over the time of the whole model. Each device takes at least one layer; with fewer layers than devices,
    the slowest devices stay idle.
    """
    costs = request.costs
    layers = len(costs.workload.layers)
    sums = {device.id: costs.sums((device.id,)) for device in costs.profile.devices}
    whole = {device: s.forward_s[-1] + s.backward_s[-1] for device, s in sums.items()}
    kept = set(sorted(whole, key=lambda device: whole[device])[:layers])
    used = [device for device in whole if device in kept]
    # The part of the whole model that the layers before l are, in the mean of the devices.
    parts = [
        sum((sums[d].forward_s[end] + sums[d].backward_s[end]) / (whole[d] or 1.0) for d in used) / len(used)
        for end in range(layers + 1)
    ]
    speeds = [1.0 / whole[device] if whole[device] > 0 else 1.0 for device in used]
    return Answer(_plan(request, used, _proportional_counts(parts, speeds)))


def _proportional_counts(parts: Sequence[float], speeds: Sequence[float]) -> List[int]:
    """How many layers each device takes: the cut nearest to its share of the work, at least one layer each."""
    layers, total, reached, first = len(parts) - 1, sum(speeds), 0.0, 0
    counts = []
    for index, speed in enumerate(speeds):
        reached += speed / total
        last_possible = layers - (len(speeds) - index - 1)
        end = min(range(first + 1, last_possible + 1), key=lambda cut: abs(parts[cut] - reached))
        end = layers if index == len(speeds) - 1 else end
        counts.append(end - first)
        first = end
    return counts


def _plan(request: Request, devices: Sequence[str], counts: Sequence[int]) -> Plan:
    stages, first = [], 0
    for device, count in zip(devices, counts):
        stages.append(Stage(layers=(first, first + count - 1), replicas=(Replica(devices=(device,)),)))
        first += count
    return Plan(num_microbatches=request.num_microbatches, schedule=request.costs.schedule, stages=tuple(stages))
