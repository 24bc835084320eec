"""The one judge of plans: every solver, bound and comparison uses the price that `evaluate` puts on a plan."""

from __future__ import annotations

import functools
from typing import Generic, List, NamedTuple, Optional, Sequence, Tuple, TypeVar

from hwaware.cluster import ClusterProfile
from hwaware.costs.pipeline import alpa_objective_s, pipeline_and_period_s, tail_s
from hwaware.costs.prepared import PreparedCosts
from hwaware.costs.resize import with_microbatch_size
from hwaware.costs.stages import LocatedStage, StagePrice, boundary_s, check_plan, price_stage
from hwaware.plans import Objective, Plan, Schedule
from hwaware.records import Record
from hwaware.workload import Workload


class StageCost(Record, frozen=True, kw_only=True):
    """The price of one stage.

    Attributes:
        layers: First and last layer, inclusive.
        devices: Device ids, replica by replica.
        compute_s: forward_s + backward_s.
        forward_s, backward_s: One microbatch on the slowest replica.
        receive_s: Activations in plus gradients in, per microbatch, as far as they take more than waiting gains.
        gradient_sync_s: All-reduce over the replicas, once per step.
        update_s: The optimizer's update, once per step; 0 if the device's memory bandwidth is not known.
        memory_bytes: Of the fullest device, the one with the least room left.
        memory_limit_bytes: What that device has.
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
        """By how much the stage is over its limit; 0 if it fits."""
        return max(0.0, self.memory_bytes - self.memory_limit_bytes)


class Cost(Record, frozen=True, kw_only=True):
    """The price of a plan.

    Attributes:
        step_s: From the first microbatch's start to the end of the last update, in the steady state.
        period_s: Time between two microbatches when the pipeline is full.
        pipeline_s: The part of step_s until the first stage's last backward.
        alpa_objective_s: sum t + (B - 1) max t, what Alpa minimises.
        fits: Whether every device has the memory that the plan asks of it.
        stages: In pipeline order.
    """

    step_s: float
    period_s: float
    pipeline_s: float
    alpa_objective_s: float
    fits: bool
    stages: Tuple[StageCost, ...]

    def objective_s(self, objective: Objective) -> float:
        """The figure that a search for this objective minimises.

        "per-device" is step_s times the devices used, in device-seconds: the least is the most throughput per device.
        """
        if objective == "alpa":
            return self.alpa_objective_s
        return _objective_s(objective, self.step_s, sum(len(stage.devices) for stage in self.stages))


def _objective_s(objective: Objective, step_s: float, devices: int) -> float:
    return step_s * devices if objective == "per-device" else step_s


class Priced(NamedTuple):
    """The prices that a plan's are made of, before anything is added up.

    Attributes:
        schedule, num_microbatches: Of the plan.
        stages: In pipeline order.
        forward_s, backward_s: Of the stages.
        there_s, back_s: Sends of activations and gradients between neighbours.
    """

    schedule: Schedule
    num_microbatches: int
    stages: List[StagePrice]
    forward_s: List[float]
    backward_s: List[float]
    there_s: List[float]
    back_s: List[float]

    def fits(self) -> bool:
        """Whether every device has the memory that the plan asks of it."""
        return all(price.memory_bytes <= price.memory_limit_bytes for price in self.stages)

    def pipeline_and_period_s(self) -> Tuple[float, float]:
        """Until the first stage's last backward, and between two microbatches of a long step."""
        return pipeline_and_period_s(
            self.schedule, self.forward_s, self.backward_s, self.there_s, self.back_s, self.num_microbatches
        )

    def tail_s(self) -> float:
        """From there to the end of the last update."""
        return tail_s(self.backward_s, self.back_s, [price.gradient_sync_s + price.update_s for price in self.stages])

    def alpa_objective_s(self) -> float:
        """What Alpa minimises."""
        return alpa_objective_s(self.forward_s, self.backward_s, self.num_microbatches)

    def objective_s(self, objective: Objective, devices: int) -> float:
        """As `Cost.objective_s`, for a plan that uses so many devices."""
        if objective == "alpa":
            return self.alpa_objective_s()
        return _objective_s(objective, self.pipeline_and_period_s()[0] + self.tail_s(), devices)

    def receive_s(self) -> List[float]:
        """Activations in plus gradients in, per microbatch, of each stage: what they take beyond what waiting gains."""
        return [max(0.0, there) + max(0.0, back) for there, back in zip([0.0, *self.there_s], [*self.back_s, 0.0])]


def price_stages(located: Sequence[LocatedStage], num_microbatches: int, costs: PreparedCosts) -> Priced:
    """Price the stages of a plan, and the boundaries between them.

    What `evaluate` adds up; searches that need no more than one figure of a plan have it from here.

    Raises:
        PlanError: Two devices that have to exchange data have no link.
        UnusableInputError: A device was not measured with the workload's data type.
    """
    behind = len(located) - 1
    prices = [price_stage(stage, costs, num_microbatches, behind - index) for index, stage in enumerate(located)]
    boundaries = [
        boundary_s(stage.last, stage.replicas, follower.replicas, costs)
        for stage, follower in zip(located, located[1:])
    ]
    trains = costs.schedule != "inference"
    return Priced(
        costs.schedule,
        num_microbatches,
        prices,
        [price.forward_s for price in prices],
        [price.backward_s for price in prices],
        [there for there, _ in boundaries],
        [back if trains else 0.0 for _, back in boundaries],
    )


R = TypeVar("R", bound=Record)


class _Same(Generic[R]):
    """A record as a key that equals only itself: large ones would take longer to compare than to price."""

    __slots__ = ("record",)

    def __init__(self, record: R) -> None:
        self.record = record

    def __hash__(self) -> int:
        return id(self.record)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.record is self.record


# A few: whoever compares two profiles, workloads or schedules prices on both in turn.
@functools.lru_cache(maxsize=4)
def _kept(workload: _Same[Workload], profile: _Same[ClusterProfile], samples: int, schedule: Schedule) -> PreparedCosts:
    return PreparedCosts(with_microbatch_size(workload.record, profile.record, samples), profile.record, schedule)


def prepared_for(
    plan: Plan, workload: Workload, profile: ClusterProfile, costs: Optional[PreparedCosts] = None
) -> PreparedCosts:
    """The costs that price a plan: those given if they are of its schedule and microbatch size.

    Otherwise those of the same two records, if they were among the last, or new ones: preparing takes as long as
    pricing tens to hundreds of plans.
    """
    samples = plan.microbatch_size or workload.microbatch_size
    if costs is not None and costs.schedule == plan.schedule and costs.workload.microbatch_size == samples:
        return costs
    return _kept(_Same(workload), _Same(profile), samples, plan.schedule)


def evaluate(plan: Plan, workload: Workload, profile: ClusterProfile, costs: Optional[PreparedCosts] = None) -> Cost:
    """Price a plan, whoever wrote it; one that needs more memory than there is has a price too, with `fits` False.

    step_s = pipeline_s + tail: see hwaware.costs.pipeline for both formulas.

    Args:
        plan: The plan.
        workload: What runs.
        profile: The cluster it runs on.
        costs: Prepared costs of the same workload, profile and schedule, for whoever prices plans on many of them in
            turn; those of the last few are kept anyway.

    Raises:
        PlanError: The plan does not fit the workload or the cluster: layers, devices, links or shares.
        UnusableInputError: A device was not measured with the workload's data type.

    Example:
        >>> from hwaware.plans import Replica, Stage
        >>> from hwaware.workload import Layer
        >>> layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=0,
        ...               activation_bytes=0)
        >>> workload = Workload(name="one", microbatch_size=4, dtype="float32", layers=(layer,))
        >>> profile = ClusterProfile.uniform(hosts=1, flops_per_s=1e10)
        >>> plan = Plan(num_microbatches=4, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("h0:0",)),)),))
        >>> round(evaluate(plan, workload, profile).step_s, 9)
        1.2
    """
    costs = prepared_for(plan, workload, profile, costs)
    located = [
        LocatedStage(stage.layers[0], stage.layers[1], replicas)
        for stage, replicas in zip(plan.stages, check_plan(plan, costs))
    ]
    priced = price_stages(located, plan.num_microbatches, costs)
    (pipeline, period), tail = priced.pipeline_and_period_s(), priced.tail_s()
    return Cost(
        step_s=pipeline + tail,
        period_s=period,
        pipeline_s=pipeline,
        alpa_objective_s=priced.alpa_objective_s(),
        fits=priced.fits(),
        stages=tuple(
            [  # a list: a generator takes longer
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
                for stage, price, received_s in zip(plan.stages, priced.stages, priced.receive_s())
            ]
        ),
    )
