"""Find the mapping that Alpa 0.2.3 would choose, by its own search, submesh choices and slicing.

Alpa treats all devices as equal, and all links of a kind. So the search here gets the cluster's mean measured speed
for every range of layers on every submesh shape. The gradients' all-reduce runs over mean links, spread over the
microbatches. Alpa's own estimate from a profiling database does the same. Memory does not bind in this search.

Alpa does not choose which host is which: it takes the hosts in the order in which Ray lists them. That order is
arbitrary, so Alpa has one mapping for each order.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from hwaware.cluster import ClusterProfile, Link, LinkTable
from hwaware.costs import PreparedCosts, evaluate
from hwaware.costs.gradient_sync import ring_all_reduce_s
from hwaware.errors import PlanError
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Workload

# The shape of a submesh of Alpa's: (hosts, devices of each host).
Shape = Tuple[int, int]

_UNLIMITED_SUCCESSORS = 2**20  # Alpa's INFINITY_N_STAGES, so that memory does not bind
_SHUFFLE_SEED = 0
MOST_ORDERS = 24


class OrderedPlan(NamedTuple):
    """Alpa's mapping for one order of the hosts.

    Attributes:
        hosts: The order in which Ray lists the hosts.
        plan: The mapping.
        predicted_step_s: Its step on the real cluster, as `evaluate` predicts it.
    """

    hosts: Tuple[str, ...]
    plan: Plan
    predicted_step_s: float


class Chosen(NamedTuple):
    """The answer of Alpa's search: layers and submesh shape of each stage, not yet its devices."""

    stages: Tuple[Tuple[Tuple[int, int], Shape], ...]


def host_orders(hosts: Sequence[str]) -> Dict[str, Tuple[str, ...]]:
    """Return three orders in which Ray might list the hosts: given, reversed, and shuffled by a fixed seed."""
    shuffled = list(hosts)
    random.Random(_SHUFFLE_SEED).shuffle(shuffled)
    return {"given": tuple(hosts), "reversed": tuple(reversed(hosts)), "shuffled": tuple(shuffled)}


def submesh_shapes(profile: ClusterProfile, samples: int, most_devices: Optional[int] = None) -> Tuple[Shape, ...]:
    """Return the submesh shapes that Alpa searches and hwaware's runtime can run as data-parallel replicas.

    Alpa refuses hosts with unequal numbers of devices, or with a number that is no power of two. On such a cluster
    each device counts as a host of its own, and a stage has one device.

    Args:
        profile: The cluster.
        samples: Samples in a microbatch; replicas must share them equally.
        most_devices: Largest number of devices in a stage; None for no limit.
    """
    from alpa.pipeline_parallel.stage_construction import get_submesh_choices

    counts = _device_counts(profile)
    if not _takes_hosts(counts):
        return ((1, 1),)
    offered = get_submesh_choices(len(counts), counts[0], "power_of_two")
    most = most_devices or sum(counts)
    return tuple(shape for shape in offered if math.prod(shape) <= most and samples % math.prod(shape) == 0)


def alpa_plan(
    workload: Workload,
    profile: ClusterProfile,
    num_microbatches: int,
    hosts: Sequence[str],
    most_devices: Optional[int] = 1,
) -> Plan:
    """Return Alpa's own mapping for one order of the hosts.

    Raises:
        PlanError: Alpa's search finds no solution. It must use every device, so it needs enough layers.
    """
    chosen = choose(
        workload, profile, num_microbatches, submesh_shapes(profile, workload.microbatch_size, most_devices)
    )
    return placed(chosen, profile, num_microbatches, hosts)


def every_order(
    workload: Workload, profile: ClusterProfile, num_microbatches: int, most_devices: Optional[int]
) -> List[OrderedPlan]:
    """Return Alpa's distinct mappings over all orders of the hosts, the fastest predicted first.

    A cluster with more than `MOST_ORDERS` orders gets a fixed random sample, which contains the given order.

    Raises:
        PlanError: Alpa's search finds no solution.
    """
    shapes = submesh_shapes(profile, workload.microbatch_size, most_devices)
    chosen, costs = choose(workload, profile, num_microbatches, shapes), PreparedCosts(workload, profile)
    found: Dict[Any, OrderedPlan] = {}
    for hosts in _orders([host.name for host in profile.hosts]):
        plan = placed(chosen, profile, num_microbatches, hosts)
        if identity(plan) not in found:
            step_s = evaluate(plan, workload, profile, costs).step_s
            found[identity(plan)] = OrderedPlan(hosts, plan, step_s)
    return sorted(found.values(), key=lambda one: one.predicted_step_s)


def identity(plan: Plan) -> Tuple[Any, ...]:
    """Return a key that is equal for plans that run alike: it ignores the order of replicas."""
    return tuple((stage.layers, frozenset((one.devices, one.share) for one in stage.replicas)) for stage in plan.stages)


def evenly(count: int, wanted: int) -> List[int]:
    """Return positions spread evenly over a ranking of `count`, with both ends; the middle if `wanted` is 1.

    Example:
        >>> evenly(24, 1), evenly(24, 3), evenly(2, 3)
        ([11], [0, 12, 23], [0, 1])
    """
    if wanted >= count:
        return list(range(count))
    if wanted == 1:
        return [(count - 1) // 2]
    return [math.floor(k * (count - 1) / (wanted - 1) + 0.5) for k in range(wanted)]


def _orders(hosts: Sequence[str]) -> Iterator[Tuple[str, ...]]:
    if math.factorial(len(hosts)) <= MOST_ORDERS:
        yield from itertools.permutations(hosts)
        return
    generator, order = random.Random(_SHUFFLE_SEED), list(hosts)
    for _ in range(MOST_ORDERS):
        yield tuple(order)
        generator.shuffle(order)


def choose(workload: Workload, profile: ClusterProfile, num_microbatches: int, shapes: Sequence[Shape]) -> Chosen:
    """Run Alpa's own search for the layers and submesh shape of each stage.

    Raises:
        PlanError: Alpa's search finds no solution.
    """
    from alpa.pipeline_parallel.stage_construction import training_dp

    layers, devices = len(workload.layers), len(profile.devices)
    costs = PreparedCosts(workload, profile)
    cost = np.full((layers, layers, len(shapes), 1), np.inf)
    for index, shape in enumerate(shapes):
        cost[:, :, index, 0] = _stage_costs_s(costs, shape, num_microbatches)
    unlimited = np.full(cost.shape, _UNLIMITED_SUCCESSORS)
    _, solution = training_dp(layers, devices, num_microbatches, tuple(shapes), 1, cost, unlimited)
    if solution is None:
        raise PlanError(
            f"Alpa's search finds no mapping of {layers} layers onto all {devices} devices.",
            "cut the model into more layers, or use fewer hosts.",
        )
    return Chosen(tuple(((int(first), int(end) - 1), shapes[shape]) for (first, end), shape, _ in solution))


def mean_speed_layer_times_s(costs: PreparedCosts, replicas: int = 1) -> npt.NDArray[np.float64]:
    """Return seconds of forward and backward per layer and microbatch at the devices' mean speed, shape [layers].

    Args:
        costs: The workload on the cluster.
        replicas: Number of devices that share each microbatch.
    """
    sums = [costs.sums((device.id,), 1 / replicas, replicas) for device in costs.profile.devices]
    seconds = np.array([np.diff(one.forward_s) + np.diff(one.backward_s) for one in sums])  # [device, layer]
    times: npt.NDArray[np.float64] = 1.0 / np.mean(1.0 / np.maximum(seconds, 1e-12), axis=0)
    return times


def _stage_costs_s(costs: PreparedCosts, shape: Shape, num_microbatches: int) -> npt.NDArray[np.float64]:
    """Return seconds per microbatch of layers first to last on a submesh, shape [first, last].

    Entries with last < first are infinite.
    """
    replicas, layers = math.prod(shape), costs.workload.layers
    edges = np.concatenate([[0.0], np.cumsum(mean_speed_layer_times_s(costs, replicas))])
    bytes_before = np.concatenate([[0.0], np.cumsum([layer.gradient_size_bytes for layer in layers])])
    link = mean_link(costs.profile, inside=shape[0] == 1) if replicas > 1 else None
    found = np.full((len(layers), len(layers)), np.inf)
    for first in range(len(layers)):
        for last in range(first, len(layers)):
            found[first, last] = edges[last + 1] - edges[first]
            if link is not None:
                summed = ring_all_reduce_s(bytes_before[last + 1] - bytes_before[first], [link] * replicas)
                found[first, last] += summed / num_microbatches
    return found


def mean_link(profile: ClusterProfile, inside: bool) -> Link:
    """Return the mean of all measured links inside hosts, or of all links between hosts.

    Raises:
        PlanError: The profile has no such link.
    """
    table, pairs = LinkTable(profile), itertools.permutations(profile.devices, 2)
    links = [table.between(one.id, other.id) for one, other in pairs if (one.host == other.host) == inside]
    known = [link for link in links if link is not None]
    if not known:
        where = "inside hosts" if inside else "between hosts"
        raise PlanError(f"The profile has no link {where}.", "measure the links (hwaware profile).")
    return Link(
        source=profile.devices[0].id,
        target=profile.devices[-1].id,
        latency_s=float(np.mean([link.latency_s for link in known])),
        bandwidth_bytes_per_s=float(np.mean([link.bandwidth_bytes_per_s for link in known])),
    )


def placed(chosen: Chosen, profile: ClusterProfile, num_microbatches: int, hosts: Sequence[str]) -> Plan:
    """Return the plan for Alpa's choice, with devices from Alpa's own slicing of the hosts in this order."""
    names = _sliced([shape for _, shape in chosen.stages], _boxes(profile, hosts))
    stages = tuple(
        Stage(layers=layers, replicas=tuple(Replica(devices=(device,)) for device in devices))
        for (layers, _), devices in zip(chosen.stages, names)
    )
    return Plan(num_microbatches=num_microbatches, stages=stages, solver="alpa", objective="alpa")


def _device_counts(profile: ClusterProfile) -> List[int]:
    owners = [device.host for device in profile.devices]
    return [owners.count(host.name) for host in profile.hosts]


def _takes_hosts(counts: Sequence[int]) -> bool:
    """Return True if Alpa accepts these device counts: equal, and a power of two."""
    return len(set(counts)) == 1 and counts[0] & (counts[0] - 1) == 0


def _boxes(profile: ClusterProfile, hosts: Sequence[str]) -> List[List[str]]:
    """Return the devices of each host in this order, or one device a box where Alpa refuses the hosts."""
    boxes = [[device.id for device in profile.devices if device.host == host] for host in hosts]
    return boxes if _takes_hosts(_device_counts(profile)) else [[device] for box in boxes for device in box]


def _sliced(shapes: Sequence[Shape], boxes: Sequence[Sequence[str]]) -> List[List[str]]:
    """Return the devices of each stage in pipeline order, by Alpa's own slicing."""
    from alpa.device_mesh import VirtualPhysicalMesh
    from alpa.pipeline_parallel.stage_construction import get_sliced_virtual_submeshes

    info = [{"NodeManagerAddress": str(index)} for index in range(len(boxes))]
    mesh = VirtualPhysicalMesh(list(range(len(boxes))), info, len(boxes[0]))
    return [
        [
            boxes[int(host["NodeManagerAddress"])][device]
            for host, devices in zip(sub.host_info, sub.devices)
            for device in devices
        ]
        for sub in get_sliced_virtual_submeshes(mesh, list(shapes))
    ]
