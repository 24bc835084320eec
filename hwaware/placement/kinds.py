"""Search clusters whose devices of one kind were measured alike, but not to the last digit.

If such devices differ by some per cent, none can be swapped. Larger stages can then be built in too many ways to list.
Two other clusters, on which devices can be swapped, help.

Plans: on the *likened* cluster, devices and links that differ by less than a tenth are the median one. A good plan for
it is good here, and small changes correct it.

Bounds: on the *better* cluster a stage costs the least that any device of its kind would make of it. Every device has a
host of its own, and a link between two kinds is the best one. No pipeline takes longer on it. So bounds proved on it
for pipelines, with the first stage's work once a step, hold here.
"""

from __future__ import annotations

import time
from typing import Dict, Iterator, List, Optional, Tuple

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile, Device, Host, Link
from hwaware.costs import PreparedCosts
from hwaware.costs.links import BestOfKinds, send_time_s
from hwaware.costs.own_times import alike, by_kind, changed_times
from hwaware.costs.prepared import device_row
from hwaware.costs.stages import StageTable, stage_table
from hwaware.placement.blocks import most_blocks
from hwaware.placement.problem import Problem
from hwaware.placement.search import search
from hwaware.placement.ways import Arrays, device_classes, prepare, spaces

# Devices of a kind, and links, that differ by no more than this factor count as alike.
TOLERANCE = 1.1
# Devices, states and pairs of ways to build a stage of the search for a bound: a few seconds.
MAX_DEVICES, MAX_STATES, MAX_PAIRS = 64, 8_000_000, 10_000


def likened(problem: Problem) -> Optional[Problem]:
    """Return the problem on a cluster where almost like devices are alike; None where no two would become so.

    For example, sixteen devices of one kind, each with its own measured curve, become sixteen with one curve.
    """
    costs = problem.costs
    devices = _likened_devices(costs)
    rows = [{device_row(one, costs.workload.dtype) for one in every} for every in (costs.profile.devices, devices)]
    if len(rows[1]) == len(rows[0]):
        return None
    profile = msgspec.structs.replace(costs.profile, devices=devices, links=_likened_links(costs))
    return problem._replace(costs=costs.on(profile, measured=costs.measured_groups))


def _likened_devices(costs: PreparedCosts) -> Tuple[Device, ...]:
    """Give each device the curve and rates of the middle one of its kind, memory and speed."""
    like: Dict[str, Device] = {}
    for kind in _by_hardware(costs)[1].values():
        for roomy in alike(kind, [device.memory_bytes for device in kind], TOLERANCE):
            for group in alike(roomy, [costs.whole_s(device.id) for device in roomy], TOLERANCE):
                middle, memory_bytes = group[(len(group) - 1) // 2], min(device.memory_bytes for device in group)
                for device in group:
                    own = {"id": device.id, "host": device.host, "memory_bytes": memory_bytes}
                    like[device.id] = msgspec.structs.replace(middle, **own)
    return tuple(like[device.id] for device in costs.profile.devices)


def _by_hardware(costs: PreparedCosts) -> Tuple[ClusterProfile, Dict[str, List[Device]]]:
    """Return the cluster with its hardware's kinds, and of each of these the devices as the layer times tell apart."""
    profile = msgspec.structs.replace(costs.profile, devices=tuple(costs.hardware.values()))
    kinds = by_kind(profile)
    return profile, {kind: [costs.devices[device.id] for device in devices] for kind, devices in kinds.items()}


def _likened_links(costs: PreparedCosts) -> Tuple[Link, ...]:
    """Make links alike that take about as long for the model's middle output."""
    nbytes = np.array([float(np.median(costs.outputs_bytes))])
    links = costs.profile.links
    like: Dict[Tuple[str, str], Link] = {}
    for group in alike(links, [float(send_time_s(link, nbytes)[0]) for link in links], TOLERANCE):
        middle = group[(len(group) - 1) // 2]
        for link in group:
            like[link.source, link.target] = msgspec.structs.replace(middle, source=link.source, target=link.target)
    return tuple(like[link.source, link.target] for link in links)


def kinds_bound_s(problem: Problem, best: float, limit_s: float) -> Optional[float]:
    """Return a bound on the objective of plans that Alpa can run; None where the search would be too large.

    It looks only for plans better than the objective `best`, for `limit_s` seconds.
    """
    if len(problem.costs.devices) > MAX_DEVICES:
        return None
    deadline, arrays = time.monotonic() + limit_s, None  # type: Tuple[float, Optional[Arrays]]
    for costs in _clusters_of_one_device_each(_without_waits(problem.costs)):
        # Pins and rule do not hold on these clusters.
        free = problem._replace(costs=costs, pins={}, rule=None)
        arrays = _searchable(free, deadline) if arrays is None else _with_least(arrays, free)
        if arrays is None or time.monotonic() > deadline:
            return None
    found = None if arrays is None else search(monotone(arrays), deadline, best)
    return None if found is None else found.bound_s


def monotone(arrays: Arrays) -> Arrays:
    """Return the arrays with per-step work on the first stage only: prices then only rise with any time.

    `evaluate` hides part of the work of other stages behind the gradients on their way to the first stage. A shorter
    way can therefore make the price larger.
    """
    per_step_s = arrays.tables.per_step_s.copy()
    per_step_s[:, 1:] = 0.0
    return arrays._replace(tables=arrays.tables._replace(per_step_s=per_step_s))


def _searchable(problem: Problem, deadline: float) -> Optional[Arrays]:
    """Return the arrays, if they hold all ways to build a stage and a search takes seconds."""
    classes = device_classes(problem)
    space, layers = next(spaces(problem, classes)), len(problem.costs.workload.layers)
    fits = space.fits(classes, layers, MAX_STATES, MAX_PAIRS) and layers <= most_blocks(len(space.options))
    found = prepare(problem, classes, space, deadline) if space.complete and fits else None
    # A stage's least time is one device's, what it gains by waiting another's: each stage may gain more than it takes.
    return found and found._replace(most_gained_s=found.most_gained_s * len(problem.costs.devices))


def _with_least(arrays: Arrays, problem: Problem) -> Arrays:
    """Return the arrays with the lesser times and needs, and the larger room, of theirs and the problem's."""
    placed = [option.placed(arrays.members) for option in arrays.options]
    made = [stage_table(one, problem.costs, problem.num_microbatches, replicas_alike=True) for one in placed]
    least = [
        (np.maximum if name == "most_in_flight" else np.minimum)(one, other)
        for name, one, other in zip(StageTable._fields, arrays.tables, StageTable.stacked(made))
    ]
    return arrays._replace(tables=StageTable(*least))


def _without_waits(costs: PreparedCosts) -> PreparedCosts:
    """Return the costs without waits of replicas, if devices of one kind have layer times of their own.

    The passes of unlike replicas vary as their mean does. Neither device's own variation then bounds their waits.
    """
    if not costs.own_kinds:
        return costs
    steady = [
        changed_times(layer, lambda _, __, time: msgspec.structs.replace(time, deviation_s=None))
        for layer in costs.workload.layers
    ]
    workload = msgspec.structs.replace(costs.workload, layers=tuple(steady))
    return PreparedCosts(workload, costs.profile, costs.schedule, costs.links, costs.measured_groups, kinds=costs.kinds)


def _clusters_of_one_device_each(costs: PreparedCosts) -> Iterator[PreparedCosts]:
    """Yield better clusters, with all devices of a kind like another one each time, until all had a turn."""
    profile, kinds = _by_hardware(costs)
    ahead = {kind: max(one.head_start_s or 0.0 for one in devices) for kind, devices in kinds.items()}
    links = BestOfKinds(profile, inside_hosts_apart=False).pairs([device.id for device in profile.devices])
    hosts = tuple(Host(name=f"{device.id} alone") for device in profile.devices)
    unlike = {
        kind: list({device_row(device, costs.workload.dtype): device for device in devices}.values())
        for kind, devices in kinds.items()
    }
    for turn in range(max(map(len, unlike.values()))):
        devices = tuple(
            # Between hosts, gradients take work to add; a stage inside one host must not get that here.
            msgspec.structs.replace(
                unlike[device.kind][turn % len(unlike[device.kind])],
                id=device.id,
                host=host.name,
                sum_bytes_per_s=None,
                head_start_s=ahead[device.kind] or None,
            )
            for device, host in zip(profile.devices, hosts)
        )
        better = ClusterProfile(hosts=hosts, devices=devices, links=links)
        yield costs.on(better, measured=costs.measured_groups.least())
