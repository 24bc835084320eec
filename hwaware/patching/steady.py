"""Find the plan with the shortest likely step among those whose prices are nearly the best.

A price takes all passes of a stage for equally long. In fact they vary, and stages wait for late ones, longer in longer
pipelines. `hwaware.costs.intervals.lates_s` gives these waits by simulation, too slowly for a search.
"""

from __future__ import annotations

import heapq
import math
import time
from itertools import accumulate, groupby, islice
from typing import Dict, Iterator, List, Optional, Sequence, Tuple

from msgspec.structs import replace

from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts
from hwaware.costs.intervals import lates_s
from hwaware.costs.stages import LocatedStage, Replicas, located
from hwaware.placement.improve import Judge, State
from hwaware.placement.problem import Answer, Problem, StageRule, priced
from hwaware.plans import Plan
from hwaware.workload import Workload

# The price may be so much above the plan's: waits differ by less.
_DEARER = 0.06
# A gain that is smaller is rounding.
_LEAST = 1e-6
# Changes of all pairs of stages up to the square root of this number of stages, and of fewer in longer pipelines.
_MOST_NEAR = 128
# So many stages are priced to find plans of near prices: a third of a second.
_MOST_PRICED = 30_000
# So many are simulated at once: 0.1 GiB for the longest pipelines.
_AT_ONCE = 32
# A longer pipeline has too many changes to simulate. The simulations of one end after this time.
_MOST_STAGES, _LIMIT_S = 64, 10.0
# Noise of measurements moves the prices of like devices by so much. Unlike links move them by 0.4 to 1 %.
_EQUAL = 0.003
# Choices of like devices to price: all of five. On 64 devices, they take 0.15 s.
_MOST_CHOICES, _MOST_DEVICES = 120, 64


def steadiest(
    plan: Plan, workload: Workload, profile: ClusterProfile, rule: Optional[StageRule] = None,
    most_devices: Optional[int] = None,
) -> Plan:  # fmt: skip
    """Return the plan of the shortest likely step that few changes lead to.

    A change moves a stage to another place, or a layer from one stage to another. Or it merges two neighbours on the
    devices of one. It may also let two stages exchange their places, or their devices alone. The search first prices
    plans that several changes lead to, and simulates the cheapest ones. Then it takes every change that helps.

    At the end, devices of one kind take each other's places. The first choice in the order of the profile wins that
    raises the price by at most 0.3 %. So measured times that scatter a little lead to the same devices. The result
    keeps the bound on the price, and the names of solver and objective.

    Args:
        plan: A priced plan for the objective "step"; one that does not fit is returned.
        workload: The model's layers.
        profile: The cluster, with the memory that plans may use.
        rule: As in `hwaware.plan`.
        most_devices: The most devices of a stage; None for no limit.

    Example:
        A second device, half as fast, shortens the price a little. But one of both waits whenever the other is late.

        >>> from hwaware.placement import plan
        >>> from hwaware.workload import MeasuredTime
        >>> def times(s):
        ...     return {"1,1": MeasuredTime(forward_s=s, backward_s=s, deviation_s=0.05)}
        >>> workload = Workload.uniform(layers=2, measured={"cpu-0": times(0.05), "cpu-1": times(0.095)})
        >>> profile = ClusterProfile.uniform(hosts=2, flops_per_s=(1e10, 5e9))
        >>> cheapest = plan(workload, profile, num_microbatches=8)
        >>> len(cheapest.stages), len(steadiest(cheapest, workload, profile).stages)
        (2, 1)
    """
    if plan.status == "infeasible" or len(plan.stages) > _MOST_STAGES:
        return plan
    costs = PreparedCosts(workload, profile, plan.schedule)
    problem = Problem(costs, plan.num_microbatches, most_devices=most_devices, rule=rule)
    state, judge = located(plan), Judge(problem)
    most_s, until = (1 + _DEARER) * judge.price(state).value, time.monotonic() + _LIMIT_S

    def shortest(states: List[State], best: State, best_s: float) -> Tuple[State, float]:
        """Return the state of the shortest likely step, with this, of some states and the best one so far."""
        for alike in _alike(states):
            some = [one for one in alike if judge.price(one).value <= min(most_s, best_s)]  # waits only add to a price
            if some and (math.isinf(best_s) or time.monotonic() < until):
                late = lates_s([problem.plan(one) for one in some], workload, profile)
                usual = {one: judge.price(one).value + more_s for one, more_s in zip(some, late)}
                least = min(some, key=usual.__getitem__)
                if usual[least] < best_s * (1 - _LEAST):
                    best, best_s = least, usual[least]
        return best, best_s

    best, best_s = shortest([state], state, math.inf)
    priced_stages = 1
    while priced_stages:
        found, best_s = shortest(_near(best, judge, priced_stages), best, best_s)
        # One change after the other; where none helps, several at once.
        priced_stages = 1 if found != best else _MOST_PRICED if priced_stages == 1 else 0
        best = found
    best = _first_of_equals(best, judge, profile)
    if best == state:
        return plan
    made = priced(Answer(problem.plan(best), plan.bound_s), problem)
    return replace(made, solver=plan.solver, objective=plan.objective, search_s=plan.search_s)


def _first_of_equals(state: State, judge: Judge, profile: ClusterProfile) -> State:
    """Return the state on the first choice of like devices, in the order of the profile, that costs hardly more."""
    names = [name for stage in state for name in stage.devices]
    if len(names) > _MOST_DEVICES:
        return state
    kinds = {device.id: device.kind for device in profile.devices}
    alike = {name: [other for other, kind in kinds.items() if kind == kinds[name]] for name in names}
    most_s = (1 + _EQUAL) * judge.price(state).value
    for chosen in islice(_choices(names, alike), _MOST_CHOICES):
        one = _on_devices(state, dict(zip(names, chosen)))
        if judge.may_run(one) and not judge.price(one).misfit and judge.price(one).value <= most_s:
            return one
    return state


def _choices(names: List[str], alike: Dict[str, List[str]], taken: Tuple[str, ...] = ()) -> Iterator[Tuple[str, ...]]:
    """Yield all choices of unlike devices, one like each name, in the order of `alike`."""
    if len(taken) == len(names):
        yield taken
        return
    for name in alike[names[len(taken)]]:
        if name not in taken:
            yield from _choices(names, alike, (*taken, name))


def _on_devices(state: State, others: Dict[str, str]) -> State:
    """Return the state with other devices in the places of its own."""
    return tuple(
        replace(
            stage,
            replicas=tuple(one._replace(devices=tuple(map(others.__getitem__, one.devices))) for one in stage.replicas),
        )
        for stage in state
    )


def _near(state: State, judge: Judge, stages: int) -> List[State]:
    """Return states that one change or several lead to, by price, of about so many stages in all.

    Those that one change of the state leads to are always among them. Changes of the cheapest ones follow.
    """
    seen, waiting = {state: judge.price(state)}, [(judge.price(state), 0, state)]
    while waiting and (len(seen) == 1 or len(seen) * len(state) < stages):
        for one in _changes(heapq.heappop(waiting)[2]):
            if one not in seen:
                seen[one] = judge.price(one)
                if not seen[one].misfit:
                    heapq.heappush(waiting, (seen[one], len(seen), one))
    return sorted((one for one, price in seen.items() if not price.misfit), key=seen.__getitem__)


def _alike(states: Sequence[State]) -> Iterator[List[State]]:
    """Yield states to simulate at once: some that follow each other, and have equally many stages."""
    for start in range(0, len(states), _AT_ONCE):
        for _, alike in groupby(sorted(states[start : start + _AT_ONCE], key=len), key=len):
            yield list(alike)


def _changes(state: State) -> Iterator[State]:
    """Yield the states that one change leads to; in long pipelines, those of stages that are near each other."""
    layers, groups = [stage.last - stage.first + 1 for stage in state], [stage.replicas for stage in state]
    count, reach = len(state), max(1, _MOST_NEAR // len(state))
    for i in range(count):
        for j in range(max(0, i - reach), min(count, i + reach + 1)):
            if layers[i] > 1 and i != j:
                yield _laid([own - (k == i) + (k == j) for k, own in enumerate(layers)], groups)
            moved, exchanged = list(range(count)), list(range(count))
            moved.insert(j, moved.pop(i))
            exchanged[i], exchanged[j] = j, i
            for order in (moved, exchanged) if i < j else (moved,) if j < i else ():
                yield _laid([layers[k] for k in order], [groups[k] for k in order])
            if i < j:
                yield _laid(layers, [groups[k] for k in exchanged])
        for kept in groups[i : i + 2] if i + 1 < count else ():
            merged = [*layers[:i], layers[i] + layers[i + 1], *layers[i + 2 :]]
            yield _laid(merged, [*groups[:i], kept, *groups[i + 2 :]])


def _laid(layers: Sequence[int], groups: Sequence[Replicas]) -> State:
    """Return stages with so many layers each, on these groups of devices."""
    ends = accumulate(layers)
    return tuple(LocatedStage(end - own, end - 1, group) for end, own, group in zip(ends, layers, groups))
