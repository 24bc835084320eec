"""Choose the mapping of a program: hwaware's if it is surely faster, else Alpa's own. Log the choice in one line."""

from __future__ import annotations

import logging
from typing import Any, Dict, Optional, Sequence

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.costs.intervals import step_interval
from hwaware.errors import InfeasibleError, UnusableInputError
from hwaware.placement import StageRule
from hwaware.plans import Plan, schedule_of
from hwaware.workload import Workload

LOG = logging.getLogger("hwaware")
# Two predictions are the same if they differ by a smaller fraction. Rounding of sums stays far below it.
_SAME = 1e-9
# The most stages that the log line names.
_MOST_SHOWN = 16
# The remedy inside a program, which has no command to change.
_FIX = (
    "use smaller microbatches (a larger num_micro_batches), more layers to cut at, rematerialisation, fewer excluded "
    "hosts, or devices with more memory."
)
# Solvers that search for nothing. A program that names one wants its mapping.
_MAPPINGS = ("alpa", "megatron", "even", "proportional")


def best_plan(
    settings: Any, profile: ClusterProfile, workload: Workload, arguments: Any, rule: Optional[StageRule] = None,
    level: int = logging.INFO,
) -> Plan:  # fmt: skip
    """Return the plan of a search, or Alpa's own mapping where the search finds nothing that is surely faster.

    `hwaware.costs.surely_better` decides: the predicted gain exceeds the errors of predicted differences.

    Args:
        settings: The PlacementSettings.
        profile: The profile of the mesh's devices.
        workload: Alpa's layers.
        arguments: The arguments of Alpa's stage construction.
        rule: Says which stages the program allows; None allows all.
        level: The logging level of the line about the choice.

    Raises:
        InfeasibleError: The model fits on no placement.
    """
    from hwaware.placement import alpa_mapping
    from hwaware.placement.infeasible import FIX

    asked: Dict[str, Any] = {
        "num_microbatches": arguments["num_micro_batches"],
        "schedule": schedule_of(arguments["pipeline_schedule"]),
        "rule": rule,
        "reserve_bytes": settings.reserve_bytes,
    }
    ordered = in_order(profile, arguments["virtual_mesh"])
    alpas = alpa_mapping.alpas_plan(workload, ordered, **asked)
    plan = alpas
    if settings.solver != "alpa" or settings.exclude:
        present = {*(host.name for host in profile.hosts), *(device.id for device in profile.devices)}
        exclude = tuple(name for name in settings.exclude if name in present)  # others may be lost
        given = ordered if settings.solver == "alpa" else profile
        plan = searched(workload, given, solver=settings.solver, exclude=exclude, **asked)
    if plan.status == "infeasible":
        what, _, fix = (plan.reason or "no reason given.").replace(FIX, _FIX).partition(" To fix: ")
        raise InfeasibleError(f"The model fits on no placement: {what}", fix or _FIX)
    asker = f"solver={settings.solver!r}" if settings.solver in _MAPPINGS else "exclude" if settings.exclude else None
    # Alpa's search may find nothing. Its mapping may need too much memory, or a link that the profile lacks.
    return _better(plan, None if alpas.status == "infeasible" else alpas, asker, workload, profile, level)


def searched(
    workload: Workload, profile: ClusterProfile, *, solver: str, exclude: Sequence[str], reserve_bytes: float,
    rule: Optional[StageRule], **asked: Any,
) -> Plan:  # fmt: skip
    """Return the plan of a search, changed for the shortest likely step, or that of a solver that searches nothing.

    Arguments are as in `hwaware.plan`. The solver "alpa" places as Alpa itself does on hosts in the profile's order.
    """
    import hwaware.placement
    from hwaware.patching.steady import steadiest
    from hwaware.placement.alpa_mapping import alpas_plan
    from hwaware.placement.choices import remaining, with_reserve

    if solver == "alpa":
        asked.pop("time_limit_s", None)
        return alpas_plan(workload, remaining(profile, exclude), rule=rule, reserve_bytes=reserve_bytes, **asked)
    chosen: Dict[str, Any] = {"solver": solver, "exclude": exclude, "reserve_bytes": reserve_bytes, "rule": rule}
    plan = hwaware.placement.plan(workload, profile, **chosen, **asked)
    if solver in _MAPPINGS:
        return plan
    return steadiest(plan, workload, with_reserve(remaining(profile, exclude), reserve_bytes), rule)


def best_order(plan: Plan, workload: Workload, profile: ClusterProfile) -> Plan:
    """Return the stages of a program that fixes them, each on the group of devices that suits it best.

    Keep Alpa's groups unless others are surely faster, or Alpa's alone need too much memory.

    Raises:
        PlanError: The profile lacks a link that the stages need, or a replica's share is no whole number of samples.
    """
    from hwaware.costs import PreparedCosts, evaluate, surely_better
    from hwaware.placement import regroup

    costs = PreparedCosts(workload, profile, plan.schedule)
    best = regroup.best_order(plan, costs)
    ours, theirs = (evaluate(one, workload, profile, costs) for one in (best, plan))
    alpas, needed = msgspec.structs.replace(plan, predicted_step_s=theirs.step_s), ours.fits and not theirs.fits
    decision = "; the stages are the program's own" + (", and Alpa's devices lack memory for them" if needed else "")
    LOG.info("%s", _line(best, alpas, workload, profile, decision))
    return best if needed or surely_better(best, alpas, workload, profile) else alpas


def _line(
    plan: Plan, alpas: Plan, workload: Workload, profile: ClusterProfile, decision: str, whose: str = "hwaware's",
    mapping: str = "hwaware's mapping",
) -> str:  # fmt: skip
    ours, theirs = (_seconds(one, workload, profile) for one in (plan, alpas))
    steps = f"a step likely takes {ours} with {mapping}, {theirs} with Alpa's"
    return f"{steps}{decision}. {whose}: {mapping_of(plan)}; Alpa's: {mapping_of(alpas)}."


def mapping_of(plan: Plan) -> str:
    """Return text with the layers and devices of each stage, in pipeline order, for at most 16 stages.

    Example:
        >>> from hwaware.plans import Replica, Stage
        >>> cuts = {"a:0": (0, 2), "b:0": (3, 3)}
        >>> stages = [Stage(layers=cut, replicas=(Replica(devices=(name,)),)) for name, cut in cuts.items()]
        >>> mapping_of(Plan(num_microbatches=4, stages=tuple(stages)))
        'layers 0-2 on a:0, 3 on b:0'
    """
    named = []
    for stage in plan.stages[:_MOST_SHOWN]:
        first, last = stage.layers
        named.append(f"{first if first == last else f'{first}-{last}'} on {'+'.join(stage.devices)}")
    left = len(plan.stages) - _MOST_SHOWN
    return f"layers {', '.join(named)}" + (f" and {left} more" if left > 0 else "")


def in_order(profile: ClusterProfile, virtual_mesh: Any) -> ClusterProfile:
    """Return the profile with its hosts in the order in which Alpa sees and fills them."""
    position = {
        virtual_mesh.host_info[host]["NodeManagerAddress"]: host for host in reversed(range(virtual_mesh.num_hosts))
    }
    hosts = sorted(profile.hosts, key=lambda host: position.get(host.address, len(position)))
    return msgspec.structs.replace(profile, hosts=tuple(hosts))


def _better(
    plan: Plan, alpas: Optional[Plan], asker: Optional[str], workload: Workload, profile: ClusterProfile,
    level: int = logging.INFO,
) -> Plan:  # fmt: skip
    """Return the plan if it is surely better, or if the setting `asker` asks for it; else Alpa's."""
    from hwaware.costs import surely_better

    if alpas is None:
        what = "a step likely takes %s with hwaware's mapping; Alpa finds none that fits."
        LOG.log(level, what, _seconds(plan, workload, profile))
        return plan
    is_used = asker is not None or surely_better(plan, alpas, workload, profile)
    of_solver = str(asker), f"the mapping of {asker}"
    whose, mapping = of_solver if asker not in (None, "exclude") else ("hwaware's", "hwaware's mapping")
    why = f", because {asker} asks for it" if asker else ""
    decision = f": {mapping} is used{why}" if is_used else ": Alpa's own mapping is kept"
    LOG.log(level, "%s", _line(plan, alpas, workload, profile, decision, whose, mapping))
    if is_used:
        return plan
    assert plan.predicted_step_s is not None  # a feasible plan has a price
    assert alpas.predicted_step_s is not None
    # A proof that the plan is the fastest also holds for Alpa's mapping, if that is as fast. Alpa's mapping may also be
    # faster than the bound: it can have stages that the search leaves out.
    is_slower = plan.predicted_step_s < alpas.predicted_step_s * (1 - _SAME)
    is_bounded = plan.bound_s is None or alpas.objective_s is None or plan.bound_s <= alpas.objective_s
    status = "feasible" if is_slower or not is_bounded else plan.status
    bound_s = plan.bound_s if is_bounded else None
    return msgspec.structs.replace(alpas, status=status, bound_s=bound_s, search_s=plan.search_s)


def _seconds(plan: Plan, workload: Workload, profile: ClusterProfile) -> str:
    """Return text with the likely step time of a plan and its interval [s]."""
    found = step_interval(plan, workload, profile, plan.predicted_step_s)
    return f"{found.likely_s:.4g} s (90 % of steps take {found.low_s:.4g} to {found.high_s:.4g} s)"


def say_why_not(error: UnusableInputError) -> None:
    """Log why hwaware does not apply to a program, which then runs with Alpa's own mapping."""
    LOG.warning("Alpa's own mapping runs. %s", error)
