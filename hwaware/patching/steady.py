"""Find the plan with the shortest likely step among those whose prices are nearly the best.

A price takes all passes of a stage for equally long. In fact they vary, and stages wait for late ones, longer in longer
pipelines. `hwaware.costs.intervals.late_s` gives these waits by simulation, too slowly for a search.
"""

from __future__ import annotations

from itertools import islice
from typing import Dict, Iterator, List, Optional, Tuple

from msgspec.structs import replace

from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts
from hwaware.costs.intervals import late_s
from hwaware.costs.stages import located
from hwaware.placement.improve import Judge, State
from hwaware.placement.problem import Answer, Problem, StageRule, priced
from hwaware.plans import Plan
from hwaware.workload import Workload

# The price may be so much above the plan's: waits differ by less.
_DEARER = 0.06
# A gain that is smaller is rounding.
_LEAST = 1e-6
# A longer pipeline has too many neighbours to simulate.
_MOST_STAGES = 64
# Noise of measurements moves the prices of like devices by so much. Unlike links move them by 0.4 to 1 %.
_EQUAL = 0.003
# Choices of like devices to price: all of five. On 64 devices, they take 0.15 s.
_MOST_CHOICES, _MOST_DEVICES = 120, 64


def steadiest(
    plan: Plan, workload: Workload, profile: ClusterProfile, rule: Optional[StageRule] = None,
    most_devices: Optional[int] = None,
) -> Plan:  # fmt: skip
    """Return the plan of the shortest likely step that small changes lead to, each shorter than the one before.

    A change merges two neighbours on the devices of one, or moves a layer from a stage to a neighbour. It may also let
    two neighbours exchange their places.

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

    def usual_s(one: State) -> float:
        return judge.price(one).value + late_s(problem.plan(one), workload, profile)

    most_s, best, best_s = (1 + _DEARER) * judge.price(state).value, state, usual_s(state)
    while True:
        near = [one for one in _changes(best) if judge.may_run(one) and not judge.price(one).misfit]
        times = {one: usual_s(one) for one in near if judge.price(one).value <= most_s}
        found = min(times, key=times.__getitem__, default=best)
        if times.get(found, best_s) >= best_s * (1 - _LEAST):
            break
        best, best_s = found, times[found]
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


def _changes(state: State) -> Iterator[State]:
    """Yield the states that one change leads to."""
    for k, (left, right) in enumerate(zip(state, state[1:])):
        before, after = state[:k], state[k + 2 :]
        for stage in (left, right):
            yield (*before, replace(stage, first=left.first, last=right.last), *after)
        cut = left.first + right.last - right.first
        moved = replace(right, first=left.first, last=cut), replace(left, first=cut + 1, last=right.last)
        yield (*before, *moved, *after)
        for cut in (left.last - 1, left.last + 1):
            if left.first <= cut < right.last:
                yield (*before, replace(left, last=cut), replace(right, first=cut + 1), *after)
