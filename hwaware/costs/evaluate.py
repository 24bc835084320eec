"""Price plans by one function, `evaluate`, for every solver, bound and comparison."""

from __future__ import annotations

import collections
from typing import Deque, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile
from hwaware.costs.memory import all_in_flight
from hwaware.costs.pipeline import alpa_objective_s, pipeline_and_period_s, tail_s
from hwaware.costs.prepared import PreparedCosts
from hwaware.costs.stages import LocatedStage, StagePrice, boundary_s, check_plan, price_stage
from hwaware.plans import Objective, Plan, Schedule
from hwaware.records import Record, require_kind
from hwaware.workload import Workload


class StageCost(Record, frozen=True, kw_only=True):
    """Hold the price of one stage.

    Attributes:
        layers: First and last layer, inclusive.
        devices: Device ids, replica by replica.
        compute_s: forward_s + backward_s.
        forward_s, backward_s: Time of one microbatch on the slowest replica.
        receive_s: Time to receive activations and gradients, per microbatch. `exposed_time_s` subtracts the head starts
            of the devices from this time.
        gradient_sync_s: All-reduce over the replicas, once per step.
        update_s: The optimizer's update, once per step; 0 without a measured memory bandwidth.
        memory_bytes: Memory that the fullest device needs, the one with the least room left.
        memory_limit_bytes: Memory of that device.

    Example:
        >>> from hwaware import StageCost
        >>> times = dict(compute_s=0.3, forward_s=0.1, backward_s=0.2, receive_s=0.0, gradient_sync_s=0.0, update_s=0.0)
        >>> stage = StageCost(layers=(0, 3), devices=("h0:0",), memory_bytes=5e9, memory_limit_bytes=4e9, **times)
        >>> stage.memory_excess_bytes
        1000000000.0
    """

    layers: Tuple[int, int]
    devices: Tuple[str, ...]
    compute_s: float
    forward_s: float
    backward_s: float
    receive_s: float
    gradient_sync_s: float
    update_s: float
    memory_bytes: float
    memory_limit_bytes: float

    @property
    def memory_excess_bytes(self) -> float:
        """Return the bytes above the limit; 0 if the stage fits."""
        return max(0.0, self.memory_bytes - self.memory_limit_bytes)


class Cost(Record, frozen=True, kw_only=True):
    """Hold the price of a plan.

    Attributes:
        step_s: Time from the first microbatch's start to the end of the last update, in the steady state.
        period_s: Time between two microbatches while the pipeline is full.
        pipeline_s: The part of step_s until the first stage's last backward pass.
        alpa_objective_s: Alpa's own objective, sum t + (B - 1) max t.
        fits: True if every device has enough memory.
        stages: Prices of the stages, in pipeline order.

    Example:
        >>> from hwaware import Cost
        >>> cost = Cost(step_s=2.0, period_s=0.1, pipeline_s=1.9, alpa_objective_s=1.8, fits=True, stages=())
        >>> cost.objective_s("step"), cost.objective_s("alpa")
        (2.0, 1.8)
    """

    step_s: float
    period_s: float
    pipeline_s: float
    alpa_objective_s: float
    fits: bool
    stages: Tuple[StageCost, ...]

    def objective_s(self, objective: Objective) -> float:
        """Return the figure that a search minimises; "per-device" is step_s times the number of used devices."""
        if objective == "alpa":
            return self.alpa_objective_s
        devices = sum(len(stage.devices) for stage in self.stages) if objective == "per-device" else 1
        return self.step_s * devices


class Priced(NamedTuple):
    """Hold the prices of a plan's parts, before `evaluate` adds them up."""

    schedule: Schedule
    num_microbatches: int
    stages: Sequence[StagePrice]  # in pipeline order
    forward_s: List[float]  # of each stage
    backward_s: List[float]
    once_s: List[float]  # gradient sums and update
    there_s: List[float]  # activations, between neighbours, less what their receivers gain by waiting
    back_s: List[float]
    sent_s: Tuple[List[float], List[float]]  # the same without these gains

    def times_s(self) -> Tuple[float, float, float]:
        """Return `pipeline_and_period_s`, and `tail_s`."""
        schedule, count, backward, back = self.schedule, self.num_microbatches, self.backward_s, self.back_s
        pipeline, period = pipeline_and_period_s(
            schedule, self.forward_s, backward, self.there_s, back, count, self.sent_s
        )
        return pipeline, period, tail_s(schedule, backward, back, self.once_s, count, self.sent_s[1])

    def objective_s(self, objective: Objective, devices: int) -> float:
        """Return `Cost.objective_s` of a plan with that many devices."""
        if objective == "alpa":
            return alpa_objective_s(self.forward_s, self.backward_s, self.num_microbatches)
        pipeline, _, tail = self.times_s()
        return (pipeline + tail) * (devices if objective == "per-device" else 1)


def price_stages(located: Sequence[LocatedStage], num_microbatches: int, costs: PreparedCosts) -> Priced:
    """Price the stages of a plan, and the boundaries between them.

    A pass gains at most its own time p by waiting for a message. So the message counts max(t, send - p). t is its
    `hwaware.costs.links.exposed_time_s`.
    """
    in_flight = all_in_flight(costs.schedule, num_microbatches, len(located))
    prices = [price_stage(stage, costs, num_microbatches, held) for stage, held in zip(located, in_flight)]
    forward, backward = [price.forward_s for price in prices], [price.backward_s for price in prices]
    there, back = _boundaries_s(located, costs)
    whole = there, back
    if costs.without_head_starts is not costs:
        whole = _boundaries_s(located, costs.without_head_starts)
        there = [max(least, sent - gained) for least, sent, gained in zip(there, whole[0], forward[1:])]
        back = [max(least, sent - gained) for least, sent, gained in zip(back, whole[1], backward)]
    once = [price.gradient_sync_s + price.update_s for price in prices]
    return Priced(costs.schedule, num_microbatches, prices, forward, backward, once, there, back, whole)


def _boundaries_s(located: Sequence[LocatedStage], costs: PreparedCosts) -> Tuple[List[float], List[float]]:
    """Return the times of messages between neighbours, there and back; nothing comes back in inference."""
    found = [boundary_s(one.last, one.replicas, other.replicas, costs) for one, other in zip(located, located[1:])]
    there, back = map(list, zip(*found)) if found else ([], [])
    return there, back if costs.schedule != "inference" else [0.0] * len(back)


# The newest costs, a few, since a comparison alternates between two profiles, workloads or schedules.
_RECENT: Deque[Tuple[Workload, ClusterProfile, int, PreparedCosts]] = collections.deque(maxlen=4)


def prepared_for(
    plan: Plan, workload: Workload, profile: ClusterProfile, costs: Optional[PreparedCosts] = None
) -> PreparedCosts:
    """Return the costs that price a plan: the given ones if they fit it, or else recent or new ones.

    To prepare new ones takes as long as to price tens to hundreds of plans.

    Raises:
        UnusableInputError: An argument is no such record.
    """
    require_kind("plan", plan, Plan)
    require_kind("workload", workload, Workload)
    require_kind("profile", profile, ClusterProfile)
    samples = plan.microbatch_size or workload.microbatch_size
    if costs is not None and costs.schedule == plan.schedule and costs.workload.microbatch_size == samples:
        return costs
    for known, cluster, size, found in tuple(_RECENT):  # to compare large records takes longer than to price them
        if known is workload and cluster is profile and size == samples and found.schedule == plan.schedule:
            return found
    made = PreparedCosts(workload, profile, plan.schedule).of_size(samples)
    _RECENT.append((workload, profile, samples, made))
    return made


def evaluate(plan: Plan, workload: Workload, profile: ClusterProfile, costs: Optional[PreparedCosts] = None) -> Cost:
    """Price a plan from any source. A plan that needs too much memory has a price too, and `fits` is False.

    step_s is pipeline_s plus the tail; `hwaware.costs.pipeline` has both formulas.

    Args:
        plan: The plan.
        workload: The model's layers.
        profile: The cluster.
        costs: Prepared costs of the same inputs. `evaluate` itself keeps only the last four that it prepared. Give
            them if you alternate between more workloads, clusters, microbatch sizes or schedules.

    Raises:
        PlanError: Layers, devices, links or shares of the plan do not fit the workload or the cluster.
        UnusableInputError: A device was not measured with the workload's data type. Or an argument is no such record.

    Example:
        >>> from hwaware import ClusterProfile, Plan, Workload, evaluate
        >>> from hwaware.plans import Replica, Stage
        >>> workload = Workload.uniform()
        >>> profile = ClusterProfile.uniform(hosts=1, flops_per_s=1e10)
        >>> plan = Plan(num_microbatches=4, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("h0:0",)),)),))
        >>> round(evaluate(plan, workload, profile).step_s, 9)
        1.2
    """
    costs = prepared_for(plan, workload, profile, costs)
    priced = price_stages(check_plan(plan, costs), plan.num_microbatches, costs)
    pipeline, period, tail = priced.times_s()
    # Lists: generators take longer.
    both = zip([0.0, *priced.there_s], [*priced.back_s, 0.0])
    received = [(there if there > 0.0 else 0.0) + (back if back > 0.0 else 0.0) for there, back in both]
    return Cost(
        step_s=pipeline + tail,
        period_s=period,
        pipeline_s=pipeline,
        alpa_objective_s=priced.objective_s("alpa", 1),
        fits=all(price.memory_bytes <= price.memory_limit_bytes for price in priced.stages),
        stages=tuple(
            [
                StageCost(
                    layers=stage.layers,
                    devices=stage.devices,
                    compute_s=price.forward_s + price.backward_s,
                    forward_s=price.forward_s,
                    backward_s=price.backward_s,
                    receive_s=received_s,
                    gradient_sync_s=price.gradient_sync_s,
                    update_s=price.update_s,
                    memory_bytes=price.memory_bytes,
                    memory_limit_bytes=price.memory_limit_bytes,
                )
                for stage, price, received_s in zip(plan.stages, priced.stages, received)
            ]
        ),
    )
