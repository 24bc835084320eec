"""Choose the number of microbatches: search each way to cut the global batch, and keep the best plan."""

from __future__ import annotations

import math
import time
from typing import List, Optional

import msgspec

from hwaware.placement.bounds import least_objective_s
from hwaware.placement.problem import OPTIMALITY_TOLERANCE, Answer, Problem, Solver, priced
from hwaware.plans import Plan, Status


def solve_open(solver: Solver, problem: Problem, global_batch: int) -> Plan:
    """Return the best plan over all numbers of microbatches that divide the global batch.

    Larger microbatches compute faster; smaller ones fill the pipeline better and need less memory. Sizes near the
    workload's own come first, and the sizes left share the time left equally. The search skips a size whose bound
    exceeds the best plan so far, and every size after the time limit. The bound is the least over all sizes. A judge
    compares the plans of all sizes, and the search then skips none.
    """
    if solver.name == "exact":
        from hwaware.placement.exact import load_kernels  # it imports numba

        load_kernels(problem)
    started = time.monotonic()
    sizes = _sizes(global_batch, problem.costs.workload.microbatch_size)
    best: Optional[Plan] = None
    reason: Optional[str] = None
    value = bound = math.inf
    for index, samples in enumerate(sizes):
        count, left = global_batch // samples, problem.time_limit_s - (time.monotonic() - started)
        part_s = max(left, 1e-3) / (len(sizes) - index)
        one = problem._replace(
            costs=problem.costs.of_size(samples), num_microbatches=count, microbatch_size=samples, time_limit_s=part_s
        )
        least = least_objective_s(one)
        if (least < value and (left > 0 or best is None)) or problem.judge is not None:
            answer = solver.answer(one)
            least = max(least, answer.bound_s or 0.0)
            found = priced(answer, one)
            if found.status == "infeasible" or found.objective_s is None:
                # The smallest microbatches need the least memory: their reason is the tightest.
                reason = found.reason if samples == min(sizes) or reason is None else reason
            else:
                judged = found.objective_s if problem.judge is None else problem.judge(found)
                if judged < value:
                    value, best = judged, found
        bound = min(bound, least)
    if best is None:
        best = priced(Answer(None, None, reason), problem._replace(num_microbatches=global_batch))
    elif best.objective_s is not None:
        status: Status = "optimal" if best.objective_s <= bound * (1 + OPTIMALITY_TOLERANCE) else "feasible"
        best = msgspec.structs.replace(best, status=status, bound_s=min(bound, best.objective_s))
    return solver.signed(best, problem, started)


def _sizes(global_batch: int, own: int) -> List[int]:
    """Return all divisors, those nearest to the workload's own microbatch size first."""
    lower = [size for size in range(1, math.isqrt(global_batch) + 1) if global_batch % size == 0]
    divisors = {*lower, *(global_batch // size for size in lower)}
    return sorted(divisors, key=lambda size: (abs(math.log(size / own)), size))
