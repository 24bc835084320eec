"""Give predicted steps an interval, and compare plans beyond it, by the errors of recorded predictions."""

from __future__ import annotations

import math
from typing import Dict, List, Literal, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import ClusterProfile
from hwaware.costs.evaluate import evaluate, prepared_for, price_stages
from hwaware.costs.own_times import with_own_kinds
from hwaware.costs.stages import check_plan
from hwaware.formatting import SECONDS, text
from hwaware.plans import Plan
from hwaware.records import MOST_PREDICTED
from hwaware.schedules import varied_steps_s
from hwaware.workload import Workload

# Part of steps that an interval holds.
PROBABILITY = 0.9
# Source of the layer times that a prediction rests on: measured on all kinds of the plan's devices, or the model.
Source = Literal["measured", "model"]


class Errors(NamedTuple):
    """Hold errors of recorded predictions, as logarithms of measured over predicted time."""

    low: float  # the middle 90 % of the errors of a step lie between low and high
    middle: float  # half of the errors are larger
    high: float
    difference: float  # 90 % of the differences between the errors of two plans on one cluster are smaller


# `python benchmarks/intervals.py` computes these from benchmarks/results, on CPUs, every result with the same weight.
# Its leave-one-scenario-out check is in docs/cost-model.md.
RECORDED: Dict[Source, Errors] = {
    "measured": Errors(low=-0.088, middle=0.0435, high=0.182, difference=0.086),
    "model": Errors(low=-0.037, middle=0.207, high=0.364, difference=0.159),
}
# Middle 90 % of a normal distribution, in standard deviations.
_TAIL = 1.645
# Steps to simulate; and the passes of one, more or less. A step of more is scaled up from one of fewer microbatches.
_STEPS, _PASSES = 200, 4000


class Interval(NamedTuple):
    """Hold a predicted step, the likely one, and the range of 90 % of steps."""

    low_s: float
    step_s: float  # the prediction, without the driver's part
    likely_s: float  # half of steps take longer: prediction and `late_s`, times the median error, and the driver's part
    high_s: float
    source: Source


def step_interval(plan: Plan, workload: Workload, profile: ClusterProfile, step_s: Optional[float] = None) -> Interval:
    """Return the range that holds a plan's step time with a probability of 90 %.

        low = d + (step + w) exp(-sqrt(l^2 + (1.645 s)^2))
        likely = d + (step + w) exp(m)
        high = d + (step + w) exp(sqrt(h^2 + (1.645 s)^2))

    d is the profile's `driver_s`, w is `late_s`, and l, m and h are the `RECORDED` errors of the source. s is the
    spread of layer times that nobody measured on such a device; 0 for all others. Without `step_s`, `evaluate` prices
    the plan.

    Raises:
        PlanError: The plan does not fit the workload or the cluster.

    Example:
        >>> from hwaware.plans import Replica, Stage
        >>> workload = Workload.uniform()
        >>> plan = Plan(num_microbatches=4, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("h0:0",)),)),))
        >>> found = step_interval(plan, workload, ClusterProfile.uniform(hosts=1, flops_per_s=1e10))
        >>> found.source, found.low_s < found.step_s < found.high_s
        ('model', True)
    """
    price_s = evaluate(plan, workload, profile).step_s if step_s is None else step_s
    usual_s = price_s + late_s(plan, workload, profile)
    source, spread = _layer_times(plan, workload, profile)
    errors, most_s = RECORDED[source], max(price_s, MOST_PREDICTED)
    low, high = (math.hypot(one, _TAIL * spread) for one in (errors.low, errors.high))
    low_s, likely_s, high_s = (
        min(most_s, (profile.driver_s or 0.0) + usual_s * math.exp(one)) for one in (-low, errors.middle, high)
    )
    return Interval(low_s, price_s, likely_s, high_s, source)


def late_s(plan: Plan, workload: Workload, profile: ClusterProfile) -> float:
    """Return the mean time [s] that varying passes add to a step."""
    return lates_s([plan], workload, profile)[0]


def lates_s(plans: Sequence[Plan], workload: Workload, profile: ClusterProfile) -> List[float]:
    """Return `late_s` of plans that differ in layers and devices alone. To simulate all at once takes hardly longer."""
    costs, given, stages = prepared_for(plans[0], workload, profile), plans[0], len(plans[0].stages)
    located = [check_plan(plan, costs) for plan in plans]
    deviations = np.array([
        [max(costs.sums(*one, len(each.replicas)).deviation_s for one in each.replicas) for each in own]
        for own in located
    ])  # fmt: skip
    if not deviations.any():
        return [0.0] * len(plans)
    count = min(given.num_microbatches, max(stages, _PASSES // (2 * stages)))
    found = (price_stages(own, count, costs) for own in located)
    times = (((one.forward_s, one.backward_s), one.sent_s, (one.there_s, one.back_s)) for one in found)
    # Both ways, by stage or boundary, a column with a row for each plan.
    passes, sent, left = (np.array(each).transpose(1, 2, 0)[..., None] for each in zip(*times))
    usual, varied = (
        varied_steps_s(given.schedule, count, passes, by, sent, sent - left, steps).mean(axis=-1)
        for by, steps in ((np.zeros(stages), 1), (deviations.T[..., None], _STEPS))
    )
    late: List[float] = (np.maximum(0.0, varied - usual) * given.num_microbatches / count).tolist()
    return late


def described(interval: Interval) -> str:
    """Return the interval in words, for a line beside a step time.

    Example:
        >>> described(Interval(0.95, 1.0, 1.1, 1.2, "model")).partition("training; ")[2]
        '90 % of steps: 950.0 ms to 1.200 s, by layer times from formulas, not measured'
    """
    likely, low, high = (text(seconds, SECONDS) for seconds in (interval.likely_s, interval.low_s, interval.high_s))
    times = "measured layer times" if interval.source == "measured" else "layer times from formulas, not measured"
    within = f"{100 * PROBABILITY:.0f} % of steps: {low} to {high}"
    return f"Likely step: {likely}, to expect in training; {within}, by {times}"


def surely_better(plan: Plan, other: Plan, workload: Workload, profile: ClusterProfile) -> bool:
    """Return True if a plan is predicted faster than another by more than the recorded differences of errors.

    Both predictions have waits for late passes, as the recorded ones have. Errors that both plans share cancel, so less
    than two intervals are needed. Plans with a `predicted_step_s` are not priced again.

    Raises:
        PlanError: A plan does not fit the workload or the cluster.
    """
    steps = [
        (evaluate(one, workload, profile).step_s if one.predicted_step_s is None else one.predicted_step_s)
        + late_s(one, workload, profile)
        for one in (plan, other)
    ]
    sources = [_layer_times(one, workload, profile) for one in (plan, other)]
    needed = max(math.hypot(RECORDED[source].difference, _TAIL * spread) for source, spread in sources)
    return steps[0] < steps[1] * math.exp(-needed)


def _layer_times(plan: Plan, workload: Workload, profile: ClusterProfile) -> Tuple[Source, float]:
    """Return the source of the layer times on the plan's devices, and the largest spread of those carried over."""
    workload, profile = with_own_kinds(workload, profile)
    kind_of = {device.id: device.kind for device in profile.devices}
    spread = 0.0
    for stage in plan.stages:
        for kind in {kind_of[device] for device in stage.devices}:
            for layer in workload.layers[stage.layers[0] : stage.layers[1] + 1]:
                times = (layer.measured or {}).get(kind)
                if not times:
                    return "model", 0.0
                spread = max(spread, *(one.spread or 0.0 for one in times.values()))
    return "measured", spread
