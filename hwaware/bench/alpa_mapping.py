"""What Alpa 0.2.3 itself would do: its own search, its own choice of submeshes, its own slicing, run as they are.

Alpa takes all devices as equal, and all links of a kind. So its search is given every range of layers on every shape of
submesh at the cluster's mean measured speed, with the gradients' all-reduce over mean links spread over the
microbatches, as Alpa's own estimate from a profiling database has it. Memory does not bind in its search.

Which host is which is not Alpa's choice: it takes them in the order in which Ray lists them, which is arbitrary. So its
mapping is one of many, one for each order.
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

# (hosts, devices of each): the shape of one of Alpa's submeshes.
Shape = Tuple[int, int]

_UNLIMITED_SUCCESSORS = 2**20  # Alpa's INFINITY_N_STAGES: memory does not bind
_SHUFFLE_SEED = 0
MOST_ORDERS = 24


class OrderedPlan(NamedTuple):
    """Alpa's mapping where Ray lists the hosts in one order.

    Attributes:
        hosts: The order.
        plan: The mapping.
        predicted_step_s: What it is predicted to take on the cluster as it is.
    """

    hosts: Tuple[str, ...]
    plan: Plan
    predicted_step_s: float


class Chosen(NamedTuple):
    """What Alpa's search settles on: the layers and the submesh of each stage; which devices those are comes later."""

    stages: Tuple[Tuple[Tuple[int, int], Shape], ...]


def host_orders(hosts: Sequence[str]) -> Dict[str, Tuple[str, ...]]:
    """Three orders in which Ray might list the same hosts: as given, reversed, and one shuffled by a fixed seed."""
    shuffled = list(hosts)
    random.Random(_SHUFFLE_SEED).shuffle(shuffled)
    return {"given": tuple(hosts), "reversed": tuple(reversed(hosts)), "shuffled": tuple(shuffled)}


def submesh_shapes(profile: ClusterProfile, samples: int, most_devices: Optional[int] = None) -> Tuple[Shape, ...]:
    """The shapes that Alpa offers its search, as far as hwaware's runtime runs them as data-parallel replicas.

    Where hosts have unequal numbers of devices, or one that is no power of two, Alpa refuses the cluster: its devices
    are then taken as hosts of one device each, of which no larger stages are made.

    Args:
        profile: The cluster.
        samples: Of a microbatch; replicas take equal parts of it.
        most_devices: Of one stage.
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
    """Alpa's own mapping, with the hosts listed in that order.

    Raises:
        PlanError: Alpa's search finds no solution (fewer layers than submeshes: it must use every device).
    """
    chosen = choose(
        workload, profile, num_microbatches, submesh_shapes(profile, workload.microbatch_size, most_devices)
    )
    return placed(chosen, profile, num_microbatches, hosts)


def every_order(
    workload: Workload, profile: ClusterProfile, num_microbatches: int, most_devices: Optional[int]
) -> List[OrderedPlan]:
    """Alpa's distinct mappings over the orders of the hosts, the one predicted to be fastest first.

    Of more than 24 orders a fixed random sample is taken, the given one among them.

    Raises:
        PlanError: As `alpa_plan`.
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
    """Equal for plans that run the same: which replicas of a stage comes first does not matter."""
    return tuple((stage.layers, frozenset((one.devices, one.share) for one in stage.replicas)) for stage in plan.stages)


def evenly(count: int, wanted: int) -> List[int]:
    """Positions spread evenly over a ranking: its ends and what lies between; the middle one if only one is wanted.

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
    """Layers and submesh shape of each stage, by Alpa's own search.

    Raises:
        PlanError: It finds no solution.
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
            f"Alpa's search finds no mapping of {layers} layers onto all of {devices} devices.",
            "cut the model into more layers, or take fewer hosts.",
        )
    return Chosen(tuple(((int(first), int(end) - 1), shapes[shape]) for (first, end), shape, _ in solution))


def mean_speed_layer_times_s(costs: PreparedCosts, replicas: int = 1) -> npt.NDArray[np.float64]:
    """Forward and backward of each layer per microbatch at the mean of the devices' speeds, shape [layers].

    Args:
        costs: The workload on the cluster.
        replicas: How many devices share each microbatch.
    """
    sums = [costs.sums((device.id,), 1 / replicas, replicas) for device in costs.profile.devices]
    seconds = np.array([np.diff(one.forward_s) + np.diff(one.backward_s) for one in sums])  # [device, layer]
    times: npt.NDArray[np.float64] = 1.0 / np.mean(1.0 / np.maximum(seconds, 1e-12), axis=0)
    return times


def _stage_costs_s(costs: PreparedCosts, shape: Shape, num_microbatches: int) -> npt.NDArray[np.float64]:
    """Seconds per microbatch of the layers first to last on a submesh, shape [first, last]; infinite below."""
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
    """The mean of all measured links inside hosts, or of those between them.

    Raises:
        PlanError: None was measured.
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
    """The plan that Alpa's choice becomes where its own slicing hands out the hosts in that order."""
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
    """Whether Alpa takes hosts with these numbers of devices: equally many, a power of two."""
    return len(set(counts)) == 1 and counts[0] & (counts[0] - 1) == 0


def _boxes(profile: ClusterProfile, hosts: Sequence[str]) -> List[List[str]]:
    """The devices of each host in that order; each device as a host of its own where Alpa would refuse the hosts."""
    boxes = [[device.id for device in profile.devices if device.host == host] for host in hosts]
    return boxes if _takes_hosts(_device_counts(profile)) else [[device] for box in boxes for device in box]


def _sliced(shapes: Sequence[Shape], boxes: Sequence[Sequence[str]]) -> List[List[str]]:
    """The devices of the stages in pipeline order, as Alpa's own slicing hands out submeshes."""
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
