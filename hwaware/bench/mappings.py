"""The mappings that are compared: hwaware's, Alpa's own in several orders of the hosts, and what people do by hand."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.bench import alpa_mapping
from hwaware.bench.alpa_mapping import OrderedPlan, identity
from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError, UnusableInputError
from hwaware.placement import plan as search
from hwaware.plans import Plan
from hwaware.result import HostOrder, Unmeasured
from hwaware.workload import Workload

OURS = "hwaware"
ALPA = "alpa"
ALPA_PREFIX = "alpa-"
BEST_MEASURED = "best-measured"
# Solver of each mapping that a search or a rule of thumb finds.
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
    """A mapping that is to be measured.

    Attributes:
        name: What it is called in the result.
        plan: The mapping.
        predicted_step_s: By `hwaware.evaluate`.
        hosts: For Alpa's, the order of the hosts that it saw.
        also: Other names of the same mapping.
    """

    name: str
    plan: Plan
    predicted_step_s: float
    hosts: Tuple[str, ...] = ()
    also: Tuple[str, ...] = ()


class Candidates(NamedTuple):
    """All that is to be measured, and what is known without measuring.

    Attributes:
        chosen: With different plans.
        unmeasured: What has no plan.
        orders: Alpa's distinct mappings over the orders of the hosts.
        bound_s: No plan is predicted to be faster; None if nothing is known.
    """

    chosen: Tuple[Candidate, ...]
    unmeasured: Tuple[Unmeasured, ...]
    orders: Tuple[HostOrder, ...]
    bound_s: Optional[float]


class Wanted(NamedTuple):
    """Which mappings are wanted.

    Attributes:
        names: Of KNOWN.
        orders: How many of Alpa's mappings over the orders of the hosts are measured, picked evenly from the fastest
            to the slowest predicted; None for three orders as Ray might list them (given, reversed, shuffled).
        max_devices_per_stage: The same for Alpa's search and for hwaware's; None for what the runtime runs.
    """

    names: Tuple[str, ...] = USUAL
    orders: Optional[int] = 3
    max_devices_per_stage: Optional[int] = None


def check_names(names: Sequence[str]) -> Tuple[str, ...]:
    """The names in the usual order, hwaware's first, if all are known.

    Raises:
        UnusableInputError: One is not known.
    """
    for name in names:
        if name not in KNOWN:
            raise UnusableInputError(
                f"There is no mapping {name!r}.", f"give some of {', '.join(KNOWN)}, separated by commas.", found=name
            )
    return tuple(name for name in KNOWN if name in names)


def candidates(workload: Workload, profile: ClusterProfile, num_microbatches: int, wanted: Wanted) -> Candidates:
    """Plan every mapping that is wanted; those that turn out to be the same are one candidate with several names."""
    most = _most_devices(profile, wanted.max_devices_per_stage)
    question = Question(workload, profile, num_microbatches, most)
    plans = {name: _searched(question, SOLVER_OF[name]) for name in wanted.names if name in SOLVER_OF}
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
            measured = _measured_orders(question, ranked, wanted.orders)
            orders = _recorded(ranked, measured)
            found += [Candidate(name, one.plan, one.predicted_step_s, one.hosts) for name, one in measured.items()]
        except PlanError as error:
            unmeasured.append(Unmeasured(name=ALPA, reason=str(error)))
    bound_s = plans[OURS].bound_s if OURS in plans else None
    return Candidates(_merged(found), tuple(unmeasured), tuple(orders), bound_s)


class Question(NamedTuple):
    """What every mapping answers."""

    workload: Workload
    profile: ClusterProfile
    num_microbatches: int
    most_devices: Optional[int]


def _searched(question: Question, solver: str) -> Plan:
    workload, profile, num_microbatches, most = question
    return search(
        workload,
        profile,
        num_microbatches,
        solver=solver,
        max_devices_per_stage=most,
        time_limit_s=_SEARCH_LIMIT_S,
    )


def _most_devices(profile: ClusterProfile, wanted: Optional[int]) -> Optional[int]:
    """Devices of a stage at most. Where Alpa has only stages of one device, hwaware gets no others either."""
    single = alpa_mapping.submesh_shapes(profile, 1 << 10, wanted) == ((1, 1),)
    return 1 if single else wanted


def _measured_orders(
    question: Question, ranked: Sequence[OrderedPlan], orders: Optional[int]
) -> Dict[str, OrderedPlan]:
    """Alpa's mappings that are to be measured, by name: the rank of their prediction, or the name of the order."""
    if orders is not None:
        chosen = alpa_mapping.evenly(len(ranked), orders)
        return {f"{ALPA_PREFIX}{rank + 1}": ranked[rank] for rank in chosen}
    workload, profile, num_microbatches, most = question
    named = {}
    for name, hosts in alpa_mapping.host_orders([host.name for host in profile.hosts]).items():
        plan = alpa_mapping.alpa_plan(workload, profile, num_microbatches, hosts, most)
        named[f"{ALPA_PREFIX}{name}"] = OrderedPlan(hosts, plan, evaluate(plan, workload, profile).step_s)
    return named


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
    """One candidate for each plan; the first name stays."""
    kept: Dict[object, Candidate] = {}
    for one in found:
        key = identity(one.plan)
        kept[key] = kept[key]._replace(also=(*kept[key].also, one.name)) if key in kept else one
    return tuple(kept.values())
