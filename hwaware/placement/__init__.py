"""Placement: choose who runs what. `plan` is the one way in; every solver turns a `Problem` into a priced `Plan`.

exact (proved), annealing, gradient; alpa, megatron, even and proportional are what people use today. Every plan is
priced by `hwaware.costs.evaluate`. `training_dp` and `inference_dp` are Alpa's own search, fast.
"""

from __future__ import annotations

from typing import Callable, Mapping, Optional, Sequence, Union

from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts
from hwaware.placement.alpa_dp import inference_dp as inference_dp
from hwaware.placement.alpa_dp import training_dp as training_dp
from hwaware.placement.choices import check_choices, read_pins, remaining
from hwaware.placement.microbatches import solve_open
from hwaware.placement.problem import Answer as Answer
from hwaware.placement.problem import Problem as Problem
from hwaware.placement.problem import StageRule as StageRule
from hwaware.placement.sensitivity import Explanation as Explanation
from hwaware.placement.sensitivity import explain as explain
from hwaware.placement.solver import SOLVERS as SOLVERS
from hwaware.placement.solver import Solver as Solver
from hwaware.plans import Objective, Plan, Schedule
from hwaware.workload import Workload

__all__ = [
    "SOLVERS",
    "Answer",
    "Explanation",
    "Problem",
    "Solver",
    "explain",
    "inference_dp",
    "plan",
    "training_dp",
]


def plan(
    workload: Workload,
    profile: ClusterProfile,
    num_microbatches: Optional[int] = 16,
    solver: str = "exact",
    objective: Objective = "step",
    exclude: Sequence[str] = (),
    schedule: Schedule = "1f1b",
    target: str = "alpa",
    time_limit_s: float = 60.0,
    max_devices_per_stage: Optional[int] = None,
    seed: int = 0,
    pins: Optional[Mapping[Union[int, str], Union[str, Sequence[str]]]] = None,
    global_batch: Optional[int] = None,
    judge: Optional[Callable[[Plan], float]] = None,
    rule: Optional[StageRule] = None,
) -> Plan:
    """Find the best placement of a workload on a cluster.

    Args:
        workload: What has to run.
        profile: Where.
        num_microbatches: B, microbatches per step. None leaves it open: the search chooses it together with the
            microbatch size so that `global_batch` is held; the plan then says which `microbatch_size` it is for.
        solver: One of SOLVERS.
        objective: "step" minimises the step time that `evaluate` gives, "alpa" Alpa's sum t + (B - 1) max t over the
            same placements, "per-device" the step time times the devices used (the most throughput per device).
        exclude: Hosts or devices that stay idle.
        schedule: "1f1b", "gpipe" or "inference".
        target: "alpa" for plans that Alpa can run (a stage has devices of one kind, equally many on each of its
            hosts, in equal replicas), "any" for all.
        time_limit_s: Wall time after which the best plan so far is returned, with a bound on what is left.
        max_devices_per_stage: 1 for stages of one device each; None for no limit.
        seed: Of solvers that draw random numbers (annealing, gradient); the same seed gives the same plan where no time
            limit is reached.
        pins: For some layers (their number or name), the host or device, or several, that may run them.
        global_batch: Samples per step that are held when `num_microbatches` is None.
        judge: What annealing minimises in place of `evaluate`: a function from a plan to seconds, for example
            `lambda plan: hwaware.simulate(plan, workload, profile).step_s`.
        rule: Which stages are allowed: a function from the devices of each replica, the first and the last layer to a
            truth value. All are if left out.

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
    check_choices(
        num_microbatches, global_batch, solver, target, time_limit_s, judge is not None, seed, schedule, objective,
        max_devices_per_stage,
    )  # fmt: skip
    left = remaining(profile, exclude)
    problem = Problem(
        PreparedCosts(workload, left, schedule), num_microbatches or 1, objective, time_limit_s, target,
        max_devices_per_stage, seed, read_pins(pins or {}, workload, left), judge, rule,
    )  # fmt: skip
    if num_microbatches is None and global_batch is not None:
        return solve_open(SOLVERS[solver], problem, global_batch)
    return SOLVERS[solver].solve(problem)
