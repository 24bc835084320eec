"""Keep stages and their sizes; choose the group of devices behind each stage among equal groups."""

from __future__ import annotations

import itertools
import math
from typing import Sequence, Tuple

import msgspec

from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.plans import Plan, Replica, Stage

# Up to here all orders are priced: 5040 prices of 7 stages; above, pairs are exchanged while that helps.
_MOST_FOR_ALL_ORDERS = 7


def best_order(plan: Plan, costs: PreparedCosts) -> Plan:
    """Return the plan with its groups of devices exchanged for the fastest step, `predicted_step_s`.

    Only groups of equal shape change places. The result is the best of all orders up to 7 stages. Above, no exchange of
    two groups improves it. It is never slower than `plan`.

    Raises:
        PlanError: Neither the plan nor any exchange of its groups has the links that it needs.
    """
    groups = tuple(stage.replicas for stage in plan.stages)
    shapes = [_shape(group, costs) for group in groups]
    places = range(len(groups))

    def priced(order: Tuple[int, ...]) -> Tuple[float, Tuple[int, ...]]:
        alike = all(shapes[place] == shapes[taken] for place, taken in enumerate(order))
        return _price(_with(plan, [groups[taken] for taken in order]), costs) if alike else math.inf, order

    if len(groups) <= _MOST_FOR_ALL_ORDERS:
        step_s, best = min(map(priced, itertools.permutations(places)), key=lambda one: one[0])
    else:
        (step_s, best), before = priced(tuple(places)), math.nan
        while step_s != before:
            before = step_s
            for one, other in itertools.combinations(places, 2):
                swapped = {one: best[other], other: best[one]}
                found = priced(tuple(swapped.get(place, best[place]) for place in places))
                if found[0] < step_s * (1 - 1e-9):
                    step_s, best = found
    if math.isinf(step_s):
        evaluate(plan, costs.workload, costs.profile, costs)  # says which link is missing
    return msgspec.structs.replace(_with(plan, [groups[taken] for taken in best]), predicted_step_s=step_s)


def _shape(group: Tuple[Replica, ...], costs: PreparedCosts) -> Tuple[Tuple[int, ...], int]:
    """Return the number of devices of each replica, and of the hosts of all."""
    hosts = {costs.devices[device].host for replica in group for device in replica.devices}
    return tuple(len(replica.devices) for replica in group), len(hosts)


def _price(plan: Plan, costs: PreparedCosts) -> float:
    """Return the predicted step; infinite without a link, and longer than all that fit if it lacks memory."""
    try:
        cost = evaluate(plan, costs.workload, costs.profile, costs)
    except PlanError:
        return math.inf
    # An order over memory counts only if no other exists.
    return cost.step_s if cost.fits else cost.step_s * 1e6


def _with(plan: Plan, groups: Sequence[Tuple[Replica, ...]]) -> Plan:
    stages = tuple(Stage(layers=stage.layers, replicas=group) for stage, group in zip(plan.stages, groups))
    return msgspec.structs.replace(plan, stages=stages)
