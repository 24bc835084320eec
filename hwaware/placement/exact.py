"""The exact search: contiguous layers on single devices, any devices in any order, proved to be the best.

The pipeline is built from its last stage to its first, so that the number of microbatches in flight, and with it the
memory of a stage, is known when the stage is added. Partial plans that share first layer, devices used and front device
are compared in everything that their completions depend on; those that cannot win are dropped. Bounds on the layers
that are still missing prune the rest. Where there are too many devices for that, the search keeps to a part of them,
and the bound to what holds for all.
"""

from __future__ import annotations

import functools
import math
import time
from typing import List, Optional

import numpy as np

from hwaware.costs import PreparedCosts
from hwaware.placement.infeasible import explain
from hwaware.placement.problem import Problem, prepare
from hwaware.placement.request import Answer, Request
from hwaware.placement.search import Found, number_of_states, search

# States of one search: what fits in a quarter of a GiB at 8 bytes a state. Sixteen unlike devices and 24 layers fit.
MAX_STATES = 32_000_000


def solve(request: Request) -> Answer:
    """The best plan of single-device stages for the request, with a bound that proves it where time allows."""
    problem = prepare(
        request.costs.workload,
        request.costs.profile,
        request.num_microbatches,
        request.objective,
        request.costs.schedule,
        request.costs,
    )
    _load_kernels()
    deadline = time.monotonic() + request.time_limit_s
    if _states(problem, problem.sizes.tolist()) <= MAX_STATES:
        found = search(problem, deadline)
        if found.stages is not None:
            return Answer(problem.plan(found.stages), found.bound_s)
        proved = math.isinf(found.bound_s)
        return Answer(None, None, explain(problem, request, proved, deadline))
    return _solve_part(problem, request, deadline)


def _states(problem: Problem, sizes: List[int]) -> int:
    classes = sum(1 for size in sizes if size > 0)
    return number_of_states(np.array(sizes, dtype=np.int64)) * classes * (problem.num_layers + 1)


def _solve_part(problem: Problem, request: Request, deadline: float) -> Answer:
    """Search among the fastest devices, then among the largest; the bound holds for all devices."""
    times = problem.forward_s[:, -1] + problem.backward_s[:, -1]
    best: Optional[Found] = None
    part = problem
    for order in (np.argsort(times, kind="stable"), np.argsort(-problem.limit_bytes, kind="stable")):
        candidate = problem.restricted(_largest_part(problem, order.tolist()))
        found = search(candidate, deadline, best.objective_s if best else math.inf)
        if found.stages is not None:
            best, part = found, candidate
    if best is None or best.stages is None:
        return Answer(None, None, explain(problem, request, False, deadline))
    return Answer(part.plan(best.stages), min(best.objective_s, bound_s(problem)))


def _largest_part(problem: Problem, order: List[int]) -> List[int]:
    """As many devices as the search can take, class by class in that order."""
    sizes = [0] * len(problem.members)
    for k in order:
        while sizes[k] < len(problem.members[k]):
            sizes[k] += 1
            if _states(problem, sizes) > MAX_STATES:
                sizes[k] -= 1
                break
    return sizes


def bound_s(problem: Problem) -> float:
    """A bound on the objective of every plan, for any number of devices: max( sum_l min_d c_ld, B P ).

    P >= sum_l min_d (u_d c_ld) / sum_d u_d for any weights u >= 0, because the slowest stage is at least as slow as
    the weighted mean of all; u_d = 1 / (time of the whole model on d) makes it the cluster's joint rate.
    """
    per_layer = np.diff(problem.forward_s + problem.backward_s, axis=1)
    whole = per_layer.sum(axis=1)
    if not np.all(whole > 0):
        return float(per_layer.min(axis=0).sum())
    weights = 1.0 / whole
    joint = float((per_layer * weights[:, None]).min(axis=0).sum() / (weights * problem.sizes).sum())
    # A little below, for the rounding of the sums.
    return max(float(per_layer.min(axis=0).sum()), problem.num_microbatches * joint) * (1 - 1e-12)


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
