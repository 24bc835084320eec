"""The exact search: contiguous layers on located stages, any devices in any order, proved to be the best.

The pipeline is built from its last stage to its first, so that the number of microbatches in flight, and with it the
memory of a stage, is known when the stage is added. Partial plans that share first layer, devices used and front stage
are compared in everything that their completions depend on; those that cannot win are dropped. Bounds on the layers
that are still missing prune the rest. Where there are too many devices for that, hwaware.placement.scale searches.
"""

from __future__ import annotations

import functools
import math
import time

from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.placement.baselines import starting_plans
from hwaware.placement.bounds import fluid_bound_s
from hwaware.placement.fleet import optimistic
from hwaware.placement.infeasible import explain
from hwaware.placement.options import count_states
from hwaware.placement.problem import device_classes, prepare
from hwaware.placement.request import Answer, Request
from hwaware.placement.scale import solve_at_scale
from hwaware.placement.search import search
from hwaware.plans import Plan

# States of one search: what fits in a quarter of a GiB at 8 bytes a state. Sixteen unlike devices and 24 layers fit.
MAX_STATES = 32_000_000
# More devices than this are not even looked through for classes.
MAX_DEVICES = 64


def solve(request: Request) -> Answer:
    """The best plan for the request, with a bound that proves it where time allows; never worse than a baseline."""
    _load_kernels()
    deadline = time.monotonic() + request.time_limit_s
    best = min(((_value(plan, request), k, plan) for k, plan in enumerate(starting_plans(request))), default=None)
    answer = _solved(request, deadline)
    value = math.inf if answer.plan is None else _value(answer.plan, request)
    if best is None or best[0] >= value * (1 - 1e-12):
        return answer
    # Alpa's own mapping and Megatron's may put unlike devices in one stage, which the search leaves out.
    return Answer(best[2], fluid_bound_s(request.costs, request.num_microbatches))


def _value(plan: Plan, request: Request) -> float:
    """The objective; infinite if the plan cannot run."""
    costs = request.costs
    try:
        cost = evaluate(plan, costs.workload, costs.profile, costs)
    except PlanError:  # no link
        return math.inf
    return cost.objective_s(request.objective) if cost.fits else math.inf


def _solved(request: Request, deadline: float) -> Answer:
    if len(request.costs.devices) > MAX_DEVICES:
        return solve_at_scale(request, deadline)
    classes = device_classes(request.costs)
    layers = len(request.costs.workload.layers)
    states = count_states([len(names) for names in classes]) * len(classes) * (layers + 1)
    if states > MAX_STATES:
        return solve_at_scale(request, deadline)
    problem = prepare(
        request.costs.workload,
        request.costs.profile,
        request.num_microbatches,
        request.objective,
        request.costs.schedule,
        request.costs,
        request.target,
        request.most_devices,
        classes,
    )
    if states // len(classes) * len(problem.options) > MAX_STATES:
        return solve_at_scale(request, deadline)
    found = search(problem, deadline)
    if found.stages is None:
        proved = math.isinf(found.bound_s) and problem.complete
        return Answer(None, None, explain(problem, request, proved, deadline))
    if problem.complete:
        return Answer(problem.plan(found.stages), found.bound_s)
    return Answer(problem.plan(found.stages), _bound_beyond_s(request, found.objective_s))


def _bound_beyond_s(request: Request, best_s: float) -> float:
    """A bound for all plans where not all were listed: the fluid one, or the best plan if all links were the best."""
    bound = fluid_bound_s(request.costs, request.num_microbatches)
    costs = PreparedCosts(request.costs.workload, optimistic(request.costs.profile), request.costs.schedule)
    classes = device_classes(costs)
    states = count_states([len(names) for names in classes]) * (len(costs.workload.layers) + 1)
    if request.target == "alpa" and states * len(classes) <= MAX_STATES:
        problem = prepare(
            costs.workload, costs.profile, request.num_microbatches, request.objective, costs.schedule, costs,
            request.target, request.most_devices, classes,
        )  # fmt: skip
        if problem.complete and states * len(problem.options) <= MAX_STATES:
            bound = max(bound, search(problem, time.monotonic() + request.time_limit_s / 4).bound_s)
    return min(bound, best_s)


@functools.lru_cache(maxsize=None)
def _load_kernels() -> None:
    """Compile the kernels, or read them from numba's cache, before the clock starts."""
    from hwaware.cluster import ClusterProfile, Device, Host, MatrixProduct
    from hwaware.workload import Layer, Workload

    layer = Layer(name="0", forward_flops=1, backward_flops=1, parameter_bytes=0, output_bytes=0, activation_bytes=0)
    device = Device(
        id="0", host="a", kind="a", memory_bytes=1, throughput={"float32": (MatrixProduct(flops=1, seconds=1),)}
    )
    workload = Workload(name="one", microbatch_size=1, dtype="float32", layers=(layer,))
    profile = ClusterProfile(hosts=(Host(name="a"),), devices=(device,), links=())
    problem = prepare(workload, profile, 1, costs=PreparedCosts(workload, profile))
    search(problem, time.monotonic() + 3600.0)
