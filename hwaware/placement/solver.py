"""Give all searches one interface: a problem goes in, a priced plan comes out."""

from __future__ import annotations

import importlib
import time
from typing import Callable, Dict, NamedTuple

import msgspec

from hwaware.costs import Cost, evaluate, step_interval
from hwaware.errors import PlanError
from hwaware.placement.problem import Answer, Problem
from hwaware.plans import Plan, Status

# `status` is "optimal" when the objective is within this of the bound; rounding stays far below it.
OPTIMALITY_TOLERANCE = 1e-9


class Solver(NamedTuple):
    """Name a way to choose a plan.

    Attributes:
        name: Its key in `SOLVERS`.
        module, function: The function that answers a problem. Python loads it on first use, since the exact search
            needs numba, and the gradient search JAX.
    """

    name: str
    module: str
    function: str

    def answer(self, problem: Problem) -> Answer:
        """Return stages without a price, and the proved bound."""
        function: Callable[[Problem], Answer] = getattr(importlib.import_module(self.module), self.function)
        return function(problem)

    def solve(self, problem: Problem) -> Plan:
        """Return a priced plan within about `problem.time_limit_s`; its status may be "infeasible".

        Raises:
            UnusableInputError: A device was not measured with the workload's data type.
        """
        started = time.monotonic()
        found = priced(self.answer(problem), problem)
        return msgspec.structs.replace(
            found, solver=self.name, objective=problem.objective, search_s=time.monotonic() - started
        )


SOLVERS: Dict[str, Solver] = {
    name: Solver(name, f"hwaware.placement.{module}", function)
    for name, module, function in (
        ("exact", "exact", "solve"),
        ("annealing", "annealing", "solve"),
        ("gradient", "gradient", "solve"),
        ("alpa", "alpa_mapping", "baseline"),
        ("megatron", "baselines", "megatron"),
        ("even", "baselines", "even"),
        ("proportional", "baselines", "proportional"),
    )
}


def priced(answer: Answer, problem: Problem) -> Plan:
    """Turn an answer into a plan, with every figure from `evaluate`."""
    if answer.plan is None:
        return Plan(
            num_microbatches=problem.num_microbatches,
            schedule=problem.costs.schedule,
            stages=(),
            status="infeasible",
            reason=answer.reason,
        )
    missed = problem.missed_in(answer.plan)
    if missed:
        names, what = ", ".join(map(str, missed)), "what is pinned" if problem.rule is None else "pins and rule"
        reason = f"This mapping does not keep {what}: layers {names}. To fix: use the exact solver."
        return priced(Answer(None, None, reason), problem)
    try:
        cost = evaluate(answer.plan, problem.costs.workload, problem.costs.profile, problem.costs)
    except PlanError as error:  # a baseline does not look at links
        return priced(Answer(None, None, str(error)), problem)
    objective_s, bound_s = cost.objective_s(problem.objective), answer.bound_s
    status: Status = "feasible"
    if not cost.fits:
        status = "infeasible"
    elif bound_s is not None and objective_s < bound_s * (1 - OPTIMALITY_TOLERANCE):
        bound_s = None  # it is not one of all plans
    elif bound_s is not None and objective_s <= bound_s * (1 + OPTIMALITY_TOLERANCE):
        status = "optimal"
    interval = step_interval(answer.plan, problem.costs.workload, problem.costs.profile, cost.step_s)
    return msgspec.structs.replace(
        answer.plan,
        stages=tuple(
            msgspec.structs.replace(
                stage,
                compute_s=price.compute_s,
                receive_s=price.receive_s,
                gradient_sync_s=price.gradient_sync_s,
                memory_bytes=price.memory_bytes,
            )
            for stage, price in zip(answer.plan.stages, cost.stages)
        ),
        status=status,
        objective_s=objective_s,
        bound_s=None if bound_s is None else min(bound_s, objective_s),
        predicted_step_s=cost.step_s,
        step_interval_s=(interval.low_s, interval.high_s),
        reason=None if cost.fits else _over_memory(cost),
    )


def _over_memory(cost: Cost) -> str:
    worst = max(range(len(cost.stages)), key=lambda index: cost.stages[index].memory_excess_bytes)
    stage = cost.stages[worst]
    return (
        f"Memory: stage {worst} on {', '.join(stage.devices)} needs {stage.memory_bytes / 2**20:,.1f} MiB of "
        f"{stage.memory_limit_bytes / 2**20:,.1f} MiB: {stage.memory_excess_bytes / 2**20:,.1f} MiB too much. "
        "To fix: use a solver that looks at memory (exact), or smaller microbatches."
    )
