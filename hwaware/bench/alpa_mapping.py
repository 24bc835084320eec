"""What Alpa 0.2.3 itself would do: its own search and its own slicing of the cluster, run as they are.

Alpa takes all devices as equal, so its search is given every layer's time at the cluster's mean measured speed, and it
is searched over single-device submeshes: Alpa's own `manually_specified_submeshes=[(1, 1)]`.
"""

from __future__ import annotations

import random
from typing import Dict, List, Sequence, Tuple

import numpy as np
import numpy.typing as npt

from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Workload

_UNLIMITED_SUCCESSORS = 2**20  # Alpa's INFINITY_N_STAGES: memory does not bind
_SHUFFLE_SEED = 0


def host_orders(devices: Sequence[str]) -> Dict[str, Tuple[str, ...]]:
    """Three orders in which Ray might list the same hosts: as given, reversed, and one shuffled by a fixed seed."""
    shuffled = list(devices)
    random.Random(_SHUFFLE_SEED).shuffle(shuffled)
    return {"given": tuple(devices), "reversed": tuple(reversed(devices)), "shuffled": tuple(shuffled)}


def mean_speed_layer_times_s(workload: Workload, profile: ClusterProfile) -> npt.NDArray[np.float64]:
    """Forward and backward of each layer per microbatch at the mean of the devices' speeds, shape [layers]."""
    prepared = PreparedCosts(workload, profile)
    sums = [prepared.sums((device.id,)) for device in profile.devices]
    seconds = np.array([np.diff(one.forward_s) + np.diff(one.backward_s) for one in sums])  # [device, layer]
    times: npt.NDArray[np.float64] = 1.0 / np.mean(1.0 / seconds, axis=0)
    return times


def alpa_plan(workload: Workload, profile: ClusterProfile, num_microbatches: int, order: Sequence[str]) -> Plan:
    """Alpa's own mapping, with the devices listed in `order`.

    Raises:
        RuntimeError: Alpa's search finds no solution (fewer layers than devices: it must use every device).
    """
    from alpa.pipeline_parallel.stage_construction import training_dp

    times = mean_speed_layer_times_s(workload, profile)
    count = len(times)
    sums = np.concatenate([[0.0], np.cumsum(times)])
    cost = np.full((count, count, 1, 1), np.inf)
    for first in range(count):
        for last in range(first, count):
            cost[first, last, 0, 0] = sums[last + 1] - sums[first]
    successors = np.full(cost.shape, _UNLIMITED_SUCCESSORS)
    _, solution = training_dp(count, len(order), num_microbatches, ((1, 1),), 1, cost, successors)
    if solution is None:
        raise RuntimeError(f"Alpa's search finds no mapping of {count} layers onto all of {len(order)} devices.")
    cuts = [(int(first), int(end) - 1) for (first, end), _, _ in solution]
    stages = tuple(
        Stage(layers=cut, replicas=(Replica(devices=(device,)),)) for cut, device in zip(cuts, _sliced(order))
    )
    return Plan(num_microbatches=num_microbatches, stages=stages, solver="alpa", objective="alpa")


def _sliced(order: Sequence[str]) -> List[str]:
    """The devices of the stages in pipeline order, as Alpa's own slicing hands out equal submeshes."""
    from alpa.device_mesh import VirtualPhysicalMesh
    from alpa.pipeline_parallel.stage_construction import get_sliced_virtual_submeshes

    info = [{"NodeManagerAddress": device} for device in order]
    mesh = VirtualPhysicalMesh(list(range(len(order))), info, 1)
    return [
        str(sub.host_info[0]["NodeManagerAddress"]) for sub in get_sliced_virtual_submeshes(mesh, [(1, 1)] * len(order))
    ]
