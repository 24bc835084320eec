"""Stages and their sizes stay; which of the equal groups of devices is behind which stage is chosen."""

from __future__ import annotations

import itertools
import math
from typing import Iterator, List, Sequence, Tuple

import msgspec

from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.plans import Plan, Replica, Stage

Groups = Tuple[Tuple[Replica, ...], ...]
# Up to here all orders are priced: 5040 prices of 7 stages; above, pairs are exchanged while that helps.
_MOST_FOR_ALL_ORDERS = 7


def best_order(plan: Plan, costs: PreparedCosts) -> Plan:
    """The plan with the groups of devices of equally shaped stages exchanged such that a step is predicted fastest.

    The best of all orders up to 7 stages; above, one that no exchange of two groups improves. Never slower than `plan`.

    Args:
        plan: Stages as they have to stay: layers, number of replicas, devices of each.
        costs: The workload on the cluster, under the plan's schedule.

    Returns:
        A plan with `predicted_step_s`.

    Raises:
        PlanError: Neither the plan nor any exchange of its groups has the links that it needs.
    """
    groups = tuple(stage.replicas for stage in plan.stages)
    search = _all_orders if len(groups) <= _MOST_FOR_ALL_ORDERS else _exchanges
    step_s, best = search(plan, groups, costs)
    if math.isinf(step_s):
        evaluate(plan, costs.workload, costs.profile, costs)  # says which link is missing
    return msgspec.structs.replace(_with(plan, best), predicted_step_s=step_s)


def _all_orders(plan: Plan, groups: Groups, costs: PreparedCosts) -> Tuple[float, Groups]:
    best = _price(plan, groups, costs), groups
    for order in _orders(groups, costs):
        price = _price(plan, order, costs)
        if price < best[0]:
            best = price, order
    return best


def _orders(groups: Groups, costs: PreparedCosts) -> Iterator[Groups]:
    shapes = [_shape(group, costs) for group in groups]
    for order in itertools.permutations(range(len(groups))):
        if all(shapes[place] == shapes[taken] for place, taken in enumerate(order)):
            yield tuple(groups[taken] for taken in order)


def _exchanges(plan: Plan, groups: Groups, costs: PreparedCosts) -> Tuple[float, Groups]:
    best, improved = (_price(plan, groups, costs), groups), True
    while improved:
        improved = False
        for one, other in itertools.combinations(range(len(groups)), 2):
            if _shape(groups[one], costs) != _shape(groups[other], costs):
                continue
            order: List[Tuple[Replica, ...]] = list(best[1])
            order[one], order[other] = order[other], order[one]
            price = _price(plan, tuple(order), costs)
            if price < best[0] * (1 - 1e-9):
                best, improved = (price, tuple(order)), True
    return best


def _shape(group: Sequence[Replica], costs: PreparedCosts) -> Tuple[Tuple[int, ...], int]:
    """The devices of each replica, and the hosts of all."""
    hosts = {costs.devices[device].host for replica in group for device in replica.devices}
    return tuple(len(replica.devices) for replica in group), len(hosts)


def _price(plan: Plan, groups: Groups, costs: PreparedCosts) -> float:
    """The predicted step; of a plan that lacks a link or memory it is infinite, or longer than all that fit."""
    try:
        cost = evaluate(_with(plan, groups), costs.workload, costs.profile, costs)
    except PlanError:
        return math.inf
    # An order over memory only counts if there is no other.
    return cost.step_s if cost.fits else cost.step_s * 1e6


def _with(plan: Plan, groups: Groups) -> Plan:
    stages = tuple(Stage(layers=stage.layers, replicas=group) for stage, group in zip(plan.stages, groups))
    return msgspec.structs.replace(plan, stages=stages)
