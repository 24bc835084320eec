"""Rank the mappings that Alpa 0.2.3 would choose for the orders in which Ray may list the hosts.

Alpa does not choose which host is which: it takes the hosts in the order in which Ray lists them. That order is
arbitrary, so Alpa has one mapping for each order. hwaware.placement.alpa_mapping finds them.
"""

from __future__ import annotations

import itertools
import math
import random
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.placement.alpa_mapping import Chosen, choose, placed
from hwaware.placement.alpa_mapping import submesh_shapes as submesh_shapes
from hwaware.placement.problem import Problem
from hwaware.plans import Plan
from hwaware.workload import Workload

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
    problem = Problem(PreparedCosts(workload, profile), num_microbatches, most_devices=most_devices)
    return _placed(_chosen(problem), problem, hosts)


def every_order(
    workload: Workload, profile: ClusterProfile, num_microbatches: int, most_devices: Optional[int]
) -> List[OrderedPlan]:
    """Return Alpa's distinct mappings over all orders of the hosts, the fastest predicted first.

    A cluster with more than `MOST_ORDERS` orders gets a fixed random sample, which contains the given order.

    Raises:
        PlanError: Alpa's search finds no solution.
    """
    problem = Problem(PreparedCosts(workload, profile), num_microbatches, most_devices=most_devices)
    chosen = _chosen(problem)
    found: Dict[Any, OrderedPlan] = {}
    for hosts in _orders([host.name for host in profile.hosts]):
        plan = _placed(chosen, problem, hosts)
        if identity(plan) not in found:
            step_s = evaluate(plan, workload, profile, problem.costs).step_s
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


def _chosen(problem: Problem) -> Chosen:
    """Run Alpa's own dynamic programme.

    Raises:
        PlanError: It finds no solution.
    """
    from alpa.pipeline_parallel.stage_construction import training_dp

    chosen = choose(problem, search=training_dp)
    if chosen is None:
        raise PlanError(
            f"Alpa's search finds no mapping of {len(problem.costs.workload.layers)} layers onto all "
            f"{len(problem.costs.devices)} devices.",
            "cut the model into more layers, or use fewer hosts.",
        )
    return chosen


def _placed(chosen: Chosen, problem: Problem, hosts: Sequence[str]) -> Plan:
    return msgspec.structs.replace(placed(chosen, problem, order=hosts), solver="alpa", objective="alpa")
