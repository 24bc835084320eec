"""Plan the mappings to compare: hwaware's, Alpa's own in several host orders, and rules of thumb."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.bench import alpa_mapping
from hwaware.bench.alpa_mapping import OrderedPlan, identity
from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError, UnusableInputError
from hwaware.patching.steady import steadiest
from hwaware.placement import plan as search
from hwaware.plans import Plan
from hwaware.result import HostOrder, Unmeasured
from hwaware.workload import Workload

OURS = "hwaware"
ALPA = "alpa"
ALPA_PREFIX = "alpa-"
BEST_MEASURED = "best-measured"
# The solver of `hwaware.plan` behind each mapping, except Alpa's.
SOLVER_OF = {
    OURS: "exact",
    "annealing": "annealing",
    "gradient": "gradient",
    "even": "even",
    "proportional": "proportional",
}
KNOWN = (OURS, ALPA, "even", "proportional", "annealing", "gradient", BEST_MEASURED)
USUAL = (OURS, ALPA, "even", "proportional")
_SEARCH_LIMIT_S = 60.0


class Candidate(NamedTuple):
    """A mapping to measure.

    Attributes:
        name: Its name in the result.
        plan: The mapping.
        predicted_step_s: Its step by `hwaware.evaluate`.
        hosts: The order of the hosts that Alpa saw; empty for other mappings.
        also: Other names of the same mapping.
    """

    name: str
    plan: Plan
    predicted_step_s: float
    hosts: Tuple[str, ...] = ()
    also: Tuple[str, ...] = ()


class Candidates(NamedTuple):
    """All mappings to measure, with facts that need no measurement.

    Attributes:
        chosen: Candidates with different plans.
        unmeasured: Mappings for which no plan was found.
        orders: Alpa's distinct mappings over the orders of the hosts.
        bound_s: Predicted step that no plan can beat; None if unknown.
    """

    chosen: Tuple[Candidate, ...]
    unmeasured: Tuple[Unmeasured, ...]
    orders: Tuple[HostOrder, ...]
    bound_s: Optional[float]


class Wanted(NamedTuple):
    """The mappings that a user asks for.

    Attributes:
        names: Names from `KNOWN`.
        orders: How many of Alpa's mappings to measure, picked evenly from the fastest predicted to the slowest.
        max_devices_per_stage: Limit for Alpa's search and for hwaware's; None for what the runtime runs.
    """

    names: Tuple[str, ...] = USUAL
    orders: int = 3
    max_devices_per_stage: Optional[int] = None


def check_names(names: Sequence[str]) -> Tuple[str, ...]:
    """Return the names in the order of `KNOWN`, hwaware's first.

    Raises:
        UnusableInputError: A name is unknown.
    """
    for name in names:
        if name not in KNOWN:
            raise UnusableInputError(
                f"There is no mapping {name!r}.", f"choose from {', '.join(KNOWN)}, separated by commas.", found=name
            )
    return tuple(name for name in KNOWN if name in names)


def candidates(workload: Workload, profile: ClusterProfile, num_microbatches: int, wanted: Wanted) -> Candidates:
    """Plan every wanted mapping; equal plans become one candidate with several names."""
    most = _most_devices(profile, wanted.max_devices_per_stage)
    plans = {
        name: _searched(workload, profile, num_microbatches, most, SOLVER_OF[name])
        for name in wanted.names
        if name in SOLVER_OF
    }
    costs = PreparedCosts(workload, profile)
    found = [
        Candidate(name, plan, evaluate(plan, workload, profile, costs).step_s)
        for name, plan in plans.items()
        if plan.stages
    ]
    unmeasured = [_infeasible(name, plan) for name, plan in plans.items() if not plan.stages]
    orders: List[HostOrder] = []
    if ALPA in wanted.names:
        try:
            ranked = alpa_mapping.every_order(workload, profile, num_microbatches, most)
            ranks = alpa_mapping.evenly(len(ranked), wanted.orders)
            measured = {f"{ALPA_PREFIX}{rank + 1}": ranked[rank] for rank in ranks}
            orders = _recorded(ranked, measured)
            found += [Candidate(name, one.plan, one.predicted_step_s, one.hosts) for name, one in measured.items()]
        except PlanError as error:
            unmeasured.append(Unmeasured(name=ALPA, reason=str(error)))
    bound_s = plans[OURS].bound_s if OURS in plans else None
    return Candidates(_merged(found), tuple(unmeasured), tuple(orders), bound_s)


def _searched(
    workload: Workload, profile: ClusterProfile, num_microbatches: int, most: Optional[int], solver: str
) -> Plan:
    found = search(
        workload,
        profile,
        num_microbatches=num_microbatches,
        solver=solver,
        max_devices_per_stage=most,
        time_limit_s=_SEARCH_LIMIT_S,
    )
    return steadiest(found, workload, profile, most_devices=most) if solver == "exact" else found  # as programs do


def _most_devices(profile: ClusterProfile, wanted: Optional[int]) -> Optional[int]:
    """Return the largest number of devices in a stage; 1 for hwaware too where Alpa can use only one."""
    single = alpa_mapping.submesh_shapes(profile, 1 << 10, wanted) == ((1, 1),)
    return 1 if single else wanted


def _recorded(ranked: Sequence[OrderedPlan], measured: Dict[str, OrderedPlan]) -> List[HostOrder]:
    names = {identity(one.plan): name for name, one in measured.items()}
    return [
        HostOrder(hosts=one.hosts, predicted_step_s=one.predicted_step_s, measured_as=names.get(identity(one.plan)))
        for one in ranked
    ]


def _infeasible(name: str, plan: Plan) -> Unmeasured:
    reason = plan.reason or "the search found no plan"
    return Unmeasured(name=name, reason=reason, out_of_memory=reason.startswith("Memory"))


def _merged(found: Sequence[Candidate]) -> Tuple[Candidate, ...]:
    """Return one candidate for each plan; the first name stays first."""
    kept: Dict[object, Candidate] = {}
    for one in found:
        key = identity(one.plan)
        kept[key] = kept[key]._replace(also=(*kept[key].also, one.name)) if key in kept else one
    return tuple(kept.values())
