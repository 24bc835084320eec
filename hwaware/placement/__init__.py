"""Placement: choose who runs what. `plan` is the one way in; the solvers answer a `Request` with an `Answer`.

exact (proved), annealing, gradient; alpa, megatron, even and proportional are what people use today. Every plan is
priced by `hwaware.costs.evaluate`. `training_dp` and `inference_dp` are Alpa's own search, fast.
"""

from __future__ import annotations

import importlib
import time
from typing import Dict, Optional, Sequence, Tuple

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.costs import Cost, PreparedCosts, evaluate
from hwaware.errors import PlanError, UnusableInputError
from hwaware.placement.alpa_dp import inference_dp as inference_dp
from hwaware.placement.alpa_dp import training_dp as training_dp
from hwaware.placement.request import Answer as Answer
from hwaware.placement.request import Request as Request
from hwaware.placement.request import Solver as Solver
from hwaware.placement.sensitivity import Explanation as Explanation
from hwaware.placement.sensitivity import explain as explain
from hwaware.plans import Objective, Plan, Schedule, Status
from hwaware.workload import Workload

__all__ = [
    "SOLVERS",
    "Answer",
    "Explanation",
    "Request",
    "Solver",
    "explain",
    "inference_dp",
    "plan",
    "training_dp",
]

# name -> module and function. Imported when used: the exact search loads numba.
SOLVERS: Dict[str, Tuple[str, str]] = {
    "exact": ("hwaware.placement.exact", "solve"),
    "annealing": ("hwaware.placement.annealing", "solve"),
    "gradient": ("hwaware.placement.gradient", "solve"),
    "alpa": ("hwaware.placement.baselines", "alpa"),
    "megatron": ("hwaware.placement.baselines", "megatron"),
    "even": ("hwaware.placement.baselines", "even"),
    "proportional": ("hwaware.placement.baselines", "proportional"),
}
TARGETS = ("alpa", "any")
# `status` is "optimal" when the objective is within this of the bound; rounding stays far below it.
OPTIMALITY_TOLERANCE = 1e-9


def plan(
    workload: Workload,
    profile: ClusterProfile,
    num_microbatches: int = 16,
    solver: str = "exact",
    objective: Objective = "step",
    exclude: Sequence[str] = (),
    schedule: Schedule = "1f1b",
    target: str = "alpa",
    time_limit_s: float = 60.0,
    max_devices_per_stage: Optional[int] = None,
    seed: int = 0,
) -> Plan:
    """Find the best placement of a workload on a cluster.

    Args:
        workload: What has to run.
        profile: Where.
        num_microbatches: B, microbatches per step.
        solver: One of SOLVERS.
        objective: "step" minimises the step time that `evaluate` gives, "alpa" Alpa's sum t + (B - 1) max t over the
            same placements.
        exclude: Hosts or devices that stay idle.
        schedule: "1f1b", "gpipe" or "inference".
        target: "alpa" for plans that Alpa can run (a stage has devices of one kind, equally many on each of its
            hosts, in equal replicas), "any" for all.
        time_limit_s: Wall time after which the best plan so far is returned, with a bound on what is left.
        max_devices_per_stage: 1 where the runtime has one device a stage (Alpa on stock JAX); None for no limit.
        seed: Of solvers that draw random numbers (annealing, gradient); the same seed gives the same plan where no time
            limit is reached.

    Returns:
        A priced plan. Its status is "optimal" only if `objective_s` meets `bound_s`. "infeasible" is an answer too:
        then `reason` names what binds, by how much it is missed, and what helps. `bound_s` holds for all plans that the
        target allows; on large clusters for those whose stages are part of one host or several whole ones (see
        hwaware.placement.scale). The exact solver never answers worse than a baseline: where Alpa's or Megatron's
        mapping puts unlike devices in one stage and is better, it is the answer, with a bound that holds for all plans.

    Raises:
        UnusableInputError: An argument has no such value, nothing is left after `exclude`, or a device was not measured
            with the workload's data type.

    Example:
        >>> from hwaware.cluster import Device, Host, MatrixProduct
        >>> from hwaware.workload import Layer
        >>> layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=0,
        ...               activation_bytes=0)
        >>> workload = Workload(name="two", microbatch_size=4, dtype="float32", layers=(layer, layer))
        >>> device = Device(id="a:0", host="a", kind="cpu", memory_bytes=1,
        ...                 throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.1),)})
        >>> profile = ClusterProfile(hosts=(Host(name="a"),), devices=(device,), links=())
        >>> best = plan(workload, profile, num_microbatches=4)
        >>> best.status, best.stages[0].devices, round(best.predicted_step_s, 6)
        ('optimal', ('a:0',), 2.4)
    """
    _check(num_microbatches, solver, target, time_limit_s)
    started = time.monotonic()
    costs = PreparedCosts(workload, _remaining(profile, exclude), schedule)
    module, name = SOLVERS[solver]
    solve: Solver = getattr(importlib.import_module(module), name)
    request = Request(costs, num_microbatches, objective, time_limit_s, target, max_devices_per_stage, seed)
    answer = solve(request)
    priced = _priced(answer, request)
    return msgspec.structs.replace(priced, solver=solver, objective=objective, search_s=time.monotonic() - started)


def _check(num_microbatches: int, solver: str, target: str, time_limit_s: float) -> None:
    if num_microbatches < 1:
        raise UnusableInputError(f"num_microbatches is {num_microbatches}, expected at least 1.", "give 1 or more.")
    if solver not in SOLVERS:
        raise UnusableInputError(f"there is no solver {solver!r}.", f"choose one of {', '.join(SOLVERS)}.")
    if target not in TARGETS:
        raise UnusableInputError(f"there is no target {target!r}.", f"choose one of {', '.join(TARGETS)}.")
    if not time_limit_s > 0:
        raise UnusableInputError(f"time_limit_s is {time_limit_s}, expected more than 0.", "give a time in seconds.")


def _remaining(profile: ClusterProfile, exclude: Sequence[str]) -> ClusterProfile:
    if not exclude:
        return profile
    known = [host.name for host in profile.hosts] + [device.id for device in profile.devices]
    unknown = [name for name in exclude if name not in known]
    if unknown:
        raise UnusableInputError(
            f"cannot exclude {', '.join(map(repr, unknown))}: the cluster has no such host or device.",
            f"choose among {', '.join(known)}.",
        )
    try:
        return profile.without(tuple(exclude))
    except ValueError as error:
        raise UnusableInputError(
            f"without {', '.join(exclude)}, {error}.", "exclude fewer hosts, or measure the missing links."
        ) from error


def _priced(answer: Answer, request: Request) -> Plan:
    """The answer as a plan with every figure filled in by `evaluate`."""
    if answer.plan is None:
        return Plan(
            num_microbatches=request.num_microbatches,
            schedule=request.costs.schedule,
            stages=(),
            status="infeasible",
            reason=answer.reason,
        )
    try:
        cost = evaluate(answer.plan, request.costs.workload, request.costs.profile, request.costs)
    except PlanError as error:  # a baseline does not look at links
        return _priced(Answer(None, None, str(error)), request)
    objective_s = cost.objective_s(request.objective)
    status: Status = "feasible"
    if not cost.fits:
        status = "infeasible"
    elif answer.bound_s is not None and objective_s <= answer.bound_s * (1 + OPTIMALITY_TOLERANCE):
        status = "optimal"
    return msgspec.structs.replace(
        answer.plan,
        stages=tuple(
            msgspec.structs.replace(
                stage,
                compute_s=priced.compute_s,
                receive_s=priced.receive_s,
                gradient_sync_s=priced.gradient_sync_s,
                memory_bytes=priced.memory_bytes,
            )
            for stage, priced in zip(answer.plan.stages, cost.stages)
        ),
        status=status,
        objective_s=objective_s,
        bound_s=None if answer.bound_s is None else min(answer.bound_s, objective_s),
        predicted_step_s=cost.step_s,
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
