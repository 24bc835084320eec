"""Choose which devices run which layers. `plan` is the entry; every solver turns a `Problem` into a priced `Plan`.

The searches are exact (with a proof), annealing and gradient. The baselines are alpa, megatron, even and proportional.
`hwaware.costs.evaluate` prices every plan. `training_dp` replaces Alpa's own search, faster.

    problem       questions and answers            exact         the search with a proof, and which search fits
    choices       checks of a caller's choices     ways          ways to build one stage, as arrays of their costs
    microbatches  how many microbatches            search        layer by layer, with a beam (kernels: inner loops)
    baselines     mappings without measurements    bounds        lower bounds for any plan
    alpa_mapping  the mapping that Alpa chooses    kinds         devices of one kind that are nearly alike
    alpa_dp       Alpa's optimum, faster           scale, fleet  large clusters (scale_kernels: inner loops)
    infeasible    why no plan exists               blocks        long models
    sensitivity   what limits a plan               improve, regroup, gradient  small changes, groups, gradients
"""

from __future__ import annotations

from typing import Callable, Mapping, Optional, Sequence, Union

import msgspec

from hwaware.cluster import ClusterProfile
from hwaware.costs import PreparedCosts
from hwaware.deprecation import keyword_only
from hwaware.formatting import BYTES, text
from hwaware.placement.alpa_dp import training_dp
from hwaware.placement.choices import check_choices, read_pins, remaining, with_reserve
from hwaware.placement.microbatches import solve_open
from hwaware.placement.problem import SOLVERS, Answer, Problem, Solver
from hwaware.placement.problem import StageRule as StageRule
from hwaware.placement.sensitivity import Explanation, explain
from hwaware.plans import Objective, Plan, Schedule
from hwaware.records import require_kind
from hwaware.workload import Workload

__all__ = ["SOLVERS", "Answer", "Explanation", "Problem", "Solver", "explain", "plan", "training_dp"]


@keyword_only
def plan(
    workload: Workload,
    profile: ClusterProfile,
    *,
    num_microbatches: Optional[int] = 16,
    solver: str = "exact",
    objective: Objective = "step",
    exclude: Union[str, Sequence[str]] = (),
    schedule: Schedule = "1f1b",
    target: str = "alpa",
    time_limit_s: float = 60.0,
    max_devices_per_stage: Optional[int] = None,
    seed: int = 0,
    pins: Optional[Mapping[Union[int, str], Union[str, Sequence[str]]]] = None,
    global_batch: Optional[int] = None,
    judge: Optional[Callable[[Plan], float]] = None,
    rule: Optional[StageRule] = None,
    reserve_bytes: float = 0.0,
) -> Plan:
    """Find the best placement of a workload on a cluster.

    Args:
        workload: The model's layers.
        profile: The measured cluster.
        num_microbatches: Microbatches per step, B. With None, the search chooses B and the microbatch size. The samples
            per step are then `global_batch`, and the plan names its `microbatch_size`.
        solver: "exact", "annealing", "gradient", "alpa", "megatron", "even" or "proportional".
        objective: "step" minimises the step time that `evaluate` gives. Alpa's own sum t + (B - 1) max t is "alpa", and
            step time times devices is "per-device".
        exclude: Hosts or devices that stay idle.
        schedule: "1f1b", "gpipe" or "inference".
        target: "alpa" for plans that Alpa can run, "any" for all plans. Alpa's stages have devices of one kind,
            equally many on each host, in equal replicas.
        time_limit_s: Seconds to search. The search then returns its best plan, with a bound on the rest.
        max_devices_per_stage: 1 for stages of one device each; None for no limit.
        seed: Seed of the annealing and gradient searches. The same seed gives the same plan if the search ends before
            the time limit.
        pins: Where layers must run. A key is a layer's number or name. Its value names one or several hosts or devices.
        global_batch: Samples per step. If `num_microbatches` is None, every plan of the search has so many.
        judge: A function from a plan to seconds, which annealing minimises instead of `evaluate`; for example
            `lambda plan: hwaware.simulate(plan, workload, profile).step_s`.
        rule: A function that says if a stage is allowed. It takes the devices of each replica, the first and the last
            layer. By default every stage is allowed. The rule must treat equal devices alike: it may look at kinds and
            counts, but not at names. Searches ask it about one of several equal devices. To keep layers away from
            some of these, use `exclude` or `pins`.
        reserve_bytes: Memory that each device keeps free for other uses than the plan's.

    Returns:
        A priced plan. Its status is "optimal" only if `objective_s` meets `bound_s`. With the status "infeasible",
        `reason` names the limit that binds, by how much the workload misses it, and a remedy.

        `bound_s` holds for all plans that the target allows. On large clusters it holds for those whose stages are
        part of one host or several whole hosts (see hwaware.placement.scale). The exact solver never answers worse
        than a baseline. Alpa's mapping may combine different kinds of devices in one stage. The search makes no such
        stages. If Alpa's mapping is better than all plans of the search, `plan` returns Alpa's mapping. `bound_s` then
        holds for all plans of the target "any".

    Raises:
        UnusableInputError: An argument has no such value, `exclude` leaves nothing, or a device was not measured with
            the workload's data type.

    Example:
        >>> from hwaware import ClusterProfile, Workload, plan
        >>> workload = Workload.uniform(layers=2)
        >>> profile = ClusterProfile.uniform(hosts=1, flops_per_s=1e10)
        >>> best = plan(workload, profile, num_microbatches=4)
        >>> best.status, best.stages[0].devices, round(best.predicted_step_s, 6)
        ('optimal', ('h0:0',), 2.4)
    """
    check_choices(
        num_microbatches, global_batch, solver, target, time_limit_s, judge, rule, seed, schedule, objective,
        max_devices_per_stage,
    )  # fmt: skip
    require_kind("workload", workload, Workload)
    require_kind("profile", profile, ClusterProfile)
    left = with_reserve(remaining(profile, exclude), reserve_bytes)
    problem = Problem(
        PreparedCosts(workload, left, schedule), int(num_microbatches or 1), objective, time_limit_s, target,
        max_devices_per_stage, int(seed or 0), read_pins(pins or {}, workload, left), judge, rule,
    )  # fmt: skip
    if num_microbatches is None and global_batch is not None:
        found = solve_open(SOLVERS[solver], problem, int(global_batch))
    else:
        found = SOLVERS[solver].solve(problem)
    if found.status != "infeasible" or not reserve_bytes:
        return found
    hint = (
        f"Each device keeps {text(reserve_bytes, BYTES)} free, as asked: a smaller reserve leaves more for the model."
    )
    return msgspec.structs.replace(found, reason=" ".join(filter(None, (found.reason, hint))))
