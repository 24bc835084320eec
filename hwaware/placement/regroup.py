"""Keep stages and their sizes; choose the group of devices behind each stage among equal groups."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Sequence, Tuple

import msgspec

from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.plans import Plan, Stage

# Up to here all orders are priced: 5040 prices of 7 stages; above, pairs are exchanged while that helps.
_MOST_FOR_ALL_ORDERS = 7


def best_order(plan: Plan, costs: PreparedCosts) -> Plan:
    """Return the plan with its groups of devices exchanged for the fastest step, `predicted_step_s`.

    Only groups of equal shape change places. The result is the best of all orders up to 7 stages. Above, no exchange of
    two groups improves it. It is slower than `plan` only where that needs too much memory.

    Raises:
        PlanError: Neither the plan nor any exchange of its groups has the links that it needs.
    """
    groups = [stage.replicas for stage in plan.stages]
    # The number of devices of each replica, and of the hosts of all.
    shapes = [
        ([len(one.devices) for one in group], len({costs.devices[name].host for one in group for name in one.devices}))
        for group in groups
    ]

    def ordered(order: Sequence[int]) -> Plan:
        stages = (Stage(layers=one.layers, replicas=groups[taken]) for one, taken in zip(plan.stages, order))
        return msgspec.structs.replace(plan, stages=tuple(stages))

    @functools.lru_cache(maxsize=None)
    def step_s(order: Tuple[int, ...]) -> float:
        if any(shapes[place] != shapes[taken] for place, taken in enumerate(order)):
            return math.inf
        try:
            cost = evaluate(ordered(order), costs.workload, costs.profile, costs)
        except PlanError:  # no link
            return math.inf
        # An order over memory counts only if no other exists.
        return cost.step_s if cost.fits else cost.step_s * 1e6

    best = tuple(range(len(groups)))
    if len(groups) <= _MOST_FOR_ALL_ORDERS:
        best = min(itertools.permutations(best), key=step_s)
    else:
        before: Tuple[int, ...] = ()
        while best != before:
            before = best
            for one, other in itertools.combinations(range(len(groups)), 2):
                swapped = {one: best[other], other: best[one]}
                best = min(best, tuple(swapped.get(place, taken) for place, taken in enumerate(best)), key=step_s)
    found = ordered(best)
    seconds = evaluate(found, costs.workload, costs.profile, costs).step_s  # says which link is missing
    return msgspec.structs.replace(found, predicted_step_s=seconds)
