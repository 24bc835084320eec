"""Define the question to every solver, a problem, and its answer, a priced plan."""

from __future__ import annotations

import importlib
import math
import time
from typing import Callable, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.cluster import Device
from hwaware.costs import Cost, Interval, PreparedCosts, evaluate, step_interval
from hwaware.costs.stages import LocatedStage, located
from hwaware.errors import PlanError
from hwaware.plans import Objective, Plan, Status

# `status` is "optimal" when the objective is within this of the bound; rounding stays far below it.
OPTIMALITY_TOLERANCE = 1e-9
# Figures of a stage that a plan shows.
_SHOWN = ("compute_s", "receive_s", "gradient_sync_s", "memory_bytes")
# Allows a stage or not, by the devices of each replica, the first and the last layer. It treats equal devices alike,
# because searches ask it about one of each class.
StageRule = Callable[[Sequence[Sequence[Device]], int, int], bool]
# Device ids that may run a layer, for each layer that is not free; the layers counted from 0.
Pins = Mapping[int, Tuple[str, ...]]


class Problem(NamedTuple):
    """Ask a solver where to run a workload on a cluster; fields without a comment are as in `hwaware.plan`."""

    costs: PreparedCosts  # the workload on the devices that may be used, under one schedule
    num_microbatches: int
    objective: Objective = "step"
    time_limit_s: float = 60.0
    target: str = "alpa"
    most_devices: Optional[int] = None  # of one stage
    seed: int = 0
    pins: Pins = {}
    judge: Optional[Callable[[Plan], float]] = None
    rule: Optional[StageRule] = None
    microbatch_size: Optional[int] = None  # of the plans; None if the caller gave the number of microbatches
    has_plan: bool = False  # the caller has a plan already, so that no solver must find one whatever the time

    def plan(self, stages: Iterable[LocatedStage]) -> Plan:
        """Return the plan of these stages, without a price."""
        made = tuple(stage.plan_stage() for stage in stages)
        return Plan(
            num_microbatches=self.num_microbatches,
            schedule=self.costs.schedule,
            stages=made,
            microbatch_size=self.microbatch_size,
        )

    def cost(self, plan: Plan) -> Optional[Cost]:
        """Return the cost of a plan; None if it lacks a link."""
        try:
            return evaluate(plan, self.costs.workload, self.costs.profile, self.costs)
        except PlanError:
            return None

    def value(self, plan: Optional[Plan]) -> float:
        """Return the objective; infinite for no plan, or one that lacks a link or memory or misses a pin."""
        cost = None if plan is None or self.missed_in(plan) else self.cost(plan)
        return math.inf if cost is None or not cost.fits else cost.objective_s(self.objective)

    def allows(self, stage: LocatedStage) -> bool:
        """Return True if no rule forbids the stage."""
        if self.rule is None:
            return True
        devices = [[self.costs.hardware[name] for name in replica.devices] for replica in stage.replicas]
        return self.rule(devices, stage.first, stage.last)

    def missed_pins(self, stage: LocatedStage) -> Tuple[int, ...]:
        """Return a stage's pinned layers that not all of its devices may run; all layers if the rule forbids it."""
        if not self.allows(stage):
            return tuple(range(stage.first, stage.last + 1))
        return tuple(
            layer
            for layer, allowed in self.pins.items()
            if stage.first <= layer <= stage.last and not set(stage.devices) <= set(allowed)
        )

    def missed_in(self, plan: Plan) -> List[int]:
        """Return the layers of a plan that `missed_pins` names for its stages."""
        return sorted({layer for stage in located(plan) for layer in self.missed_pins(stage)})

    def pin_row(self, device: str) -> Tuple[bool, ...]:
        """Return for each pinned layer if the device may run it."""
        return tuple(device in allowed for allowed in self.pins.values())


class Answer(NamedTuple):
    """Hold the findings of a solver."""

    plan: Optional[Plan]  # not priced yet
    bound_s: Optional[float] = None  # on the objective of all plans; infinity proves that no plan exists
    reason: Optional[str] = None  # why no plan exists


class Solver(NamedTuple):
    """Name a way to choose a plan, by its key in `SOLVERS`."""

    name: str
    module: str
    function: str  # answers a problem; loaded on first use, as it may need numba or JAX

    def answer(self, problem: Problem) -> Answer:
        """Return stages without a price, and the proved bound."""
        function: Callable[[Problem], Answer] = getattr(importlib.import_module(self.module), self.function)
        return function(problem)

    def solve(self, problem: Problem) -> Plan:
        """Return a priced plan within about `problem.time_limit_s`; its status may be "infeasible"."""
        started = time.monotonic()
        return self.signed(priced(self.answer(problem), problem), problem, started)

    def signed(self, plan: Plan, problem: Problem, started: float) -> Plan:
        """Return the plan with the name of its solver, its objective, and the seconds since the start."""
        search_s = time.monotonic() - started
        return msgspec.structs.replace(plan, solver=self.name, objective=problem.objective, search_s=search_s)


SOLVERS: Dict[str, Solver] = {
    name: Solver(name, f"hwaware.placement.{module}", function)
    for name, module, function in (
        ("exact", "exact", "solve"),
        ("annealing", "improve", "solve"),
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
        count, schedule = problem.num_microbatches, problem.costs.schedule
        return Plan(num_microbatches=count, schedule=schedule, stages=(), status="infeasible", reason=answer.reason)
    workload, profile, missed = problem.costs.workload, problem.costs.profile, problem.missed_in(answer.plan)
    if missed:
        names, what = ", ".join(map(str, missed)), "what is pinned" if problem.rule is None else "pins and rule"
        reason = f"This mapping does not keep {what}: layers {names}. To fix: use the exact solver."
        return priced(Answer(None, None, reason), problem)
    try:
        cost = evaluate(answer.plan, workload, profile, problem.costs)
    except PlanError as error:  # a baseline does not look at links
        return priced(Answer(None, None, str(error)), problem)
    objective_s, bound_s = cost.objective_s(problem.objective), answer.bound_s
    interval = step_interval(answer.plan, workload, profile, cost.step_s)
    found = with_figures(msgspec.structs.replace(answer.plan, objective=problem.objective), cost, interval)
    if bound_s is None or (cost.fits and objective_s < bound_s * (1 - OPTIMALITY_TOLERANCE)):
        return found  # a larger bound is not one of all plans
    is_optimal = cost.fits and objective_s <= bound_s * (1 + OPTIMALITY_TOLERANCE)
    status: Status = "optimal" if is_optimal else found.status
    return msgspec.structs.replace(found, status=status, bound_s=min(bound_s, objective_s))


def with_figures(plan: Plan, cost: Cost, interval: Interval) -> Plan:
    """Return a plan with its objective, the step time, its interval and the stages' figures, and without a bound."""
    return msgspec.structs.replace(
        plan,
        status="feasible" if cost.fits else "infeasible",
        reason=None if cost.fits else _over_memory(cost),
        objective_s=cost.objective_s(plan.objective),
        bound_s=None,
        stages=tuple(
            msgspec.structs.replace(stage, **{name: getattr(price, name) for name in _SHOWN})
            for stage, price in zip(plan.stages, cost.stages)
        ),
        predicted_step_s=cost.step_s,
        step_interval_s=(interval.low_s, interval.high_s),
        layer_times=interval.source,
    )


def _over_memory(cost: Cost) -> str:
    worst = max(range(len(cost.stages)), key=lambda index: cost.stages[index].memory_excess_bytes)
    stage = cost.stages[worst]
    return (
        f"Memory: stage {worst} on {', '.join(stage.devices)} needs {stage.memory_bytes / 2**20:,.1f} MiB of "
        f"{stage.memory_limit_bytes / 2**20:,.1f} MiB: {stage.memory_excess_bytes / 2**20:,.1f} MiB too much. "
        "To fix: use a solver that looks at memory (exact), or smaller microbatches."
    )
