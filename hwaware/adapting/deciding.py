"""Decide when to leave a placement for a better one, and price the switch."""

from __future__ import annotations

import collections
import math
from typing import Dict, NamedTuple, Optional, Set, Tuple

import numpy as np

from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.costs.intervals import RECORDED
from hwaware.costs.links import send_time_s
from hwaware.plans import Plan, Stage
from hwaware.workload import Workload

# Below this gain, another placement is not worth a switch, however long it is kept.
LEAST_GAIN = 0.05
# Part of the cost by which the known rest of a training must exceed it.
MARGIN = 0.1


class Decision(NamedTuple):
    """Numbers behind a decision.

    Attributes:
        switch: True to take the other placement now.
        kept_s, best_s: Step of the placement that runs, and predicted step of the other one.
        cost_s: Predicted time of the switch.
        lost_s: Time lost since the better placement has been known.
        reason: The decision in words.
    """

    switch: bool
    kept_s: float
    best_s: float
    cost_s: float
    lost_s: float
    reason: str


class Rent:
    """Switch when the time lost by staying has reached the cost of the switch.

    Nobody knows how long a load lasts. To stay costs kept - best in each step, as rent. A switch costs C once. The
    switch comes when the paid rent reaches C. This costs at most twice the least cost, which needs to know the future.
    After a switch, the rent begins at 0 again. If n remaining steps are known, the switch comes at once if
    n (kept - best) > 1.1 C, else never.

    Source: Karlin et al., "Competitive snoopy caching", 1988 (ski rental).

    Example:
        >>> rent = Rent()
        >>> [rent.decide(kept_s=1.2, best_s=1.0, cost_s=0.5).switch for _ in range(4)]
        [False, False, True, False]
        >>> Rent().decide(kept_s=1.2, best_s=1.0, cost_s=0.5, steps_left=100).switch
        True
        >>> Rent().decide(kept_s=1.04, best_s=1.0, cost_s=0.0).reason
        'the gain of 4.0 % is below 9.0 %'
    """

    def __init__(self) -> None:
        self._lost_s = 0.0

    def decide(self, *, kept_s: float, best_s: float, cost_s: float, steps_left: Optional[int] = None) -> Decision:
        """Take one step, and decide.

        Args:
            kept_s: Step of the placement that runs.
            best_s: Predicted step of the best placement for the cluster of now.
            cost_s: Cost of the switch to it.
            steps_left: Remaining steps of the training, if they are known.
        """
        gain = kept_s / best_s - 1.0 if best_s > 0 else 0.0
        least = least_gain()
        if gain < least:
            self._lost_s = 0.0
            return Decision(
                False, kept_s, best_s, cost_s, 0.0, f"the gain of {100 * gain:.1f} % is below {100 * least:.1f} %"
            )
        self._lost_s += kept_s - best_s
        lost_s = self._lost_s
        if steps_left is not None:
            pays = steps_left * (kept_s - best_s) > (1 + MARGIN) * cost_s
            reason = f"{steps_left} steps are left, which gain {steps_left * (kept_s - best_s):,.1f} s"
        else:
            pays = lost_s >= cost_s
            reason = f"{lost_s:.3g} s were lost so far"
        if pays:
            self._lost_s = 0.0
        return Decision(pays, kept_s, best_s, cost_s, lost_s, f"{reason}; the switch takes {cost_s:.3g} s")


def least_gain() -> float:
    """Return the smallest gain that counts: 5 %, or the recorded error of a difference of two predictions."""
    return max(LEAST_GAIN, math.expm1(RECORDED["measured"].difference))


def switch_cost_s(
    before: Plan, after: Plan, workload: Workload, profile: ClusterProfile, *, compile_s: float, fixed_s: float = 0.0,
    start_s: float = 0.0,
) -> float:  # fmt: skip
    """Predict what the switch from one plan to another takes.

    cost = fixed + compile + start + max over pairs of devices of (latency + state bytes / rate)

    Only a plan with a new stage compiles: no old stage has its layers. Another schedule of the same stages costs
    nothing.

    Only a plan with a device that the other one leaves idle starts a process.

    State is parameters and optimizer state of the layers whose new devices do not hold them. Pairs without a link are
    left out, as their state travels over other hosts. The drain of a switch at a step's boundary is part of `fixed_s`.

    Args:
        before: The plan that runs.
        after: The other plan.
        workload: The model's layers.
        profile: The cluster.
        compile_s: Time to compile the stages; they compile beside each other.
        fixed_s: All else that every switch takes.
        start_s: Time to start processes; they start beside each other.

    Example:
        >>> from hwaware.plans import Replica, Stage
        >>> from hwaware.workload import Layer
        >>> layer = Layer(name="0", forward_flops=1, backward_flops=2, parameter_bytes=1e6, output_bytes=0,
        ...               activation_bytes=0, optimizer_bytes=2e6)
        >>> workload = Workload(name="one", microbatch_size=1, dtype="float32", layers=(layer,))
        >>> profile = ClusterProfile.uniform(hosts=2, flops_per_s=1e10, bandwidth_bytes_per_s=1e8, latency_s=0.0)
        >>> plans = [Plan(num_microbatches=1, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=(name,)),)),))
        ...          for name in ("h0:0", "h1:0")]
        >>> round(switch_cost_s(*plans, workload, profile, compile_s=5.0), 3)
        0.03
    """
    if before.stages == after.stages:
        return 0.0
    table = LinkTable(profile)
    holders = {layer: stage.devices for stage in before.stages for layer in _layers(stage.layers)}
    moved: Dict[Tuple[str, str], float] = collections.defaultdict(float)
    for stage in after.stages:
        for layer in _layers(stage.layers):
            source = holders[layer][0]
            one = workload.layers[layer]
            for device in stage.devices:
                if device not in holders[layer]:
                    moved[source, device] += one.parameter_bytes + one.optimizer_size_bytes
    seconds = 0.0
    for (source, target), nbytes in moved.items():
        link = table.between(source, target)
        if link is not None:
            seconds = max(seconds, float(send_time_s(link, np.array([nbytes]))[0]))
    is_new = not {_program(stage) for stage in after.stages} <= {_program(stage) for stage in before.stages}
    start_s = start_s if starts_processes(before, after) else 0.0
    return fixed_s + seconds + (compile_s if is_new else 0.0) + start_s


def first_switch_s(compile_s: float, start_s: float) -> float:
    """Return the price of a training's first switch: its own compilation, without the start of its processes.

    A switch within the same devices starts no process.

    Args:
        compile_s: Time that the compilation took, with the start of processes.
        start_s: Time that the start took.

    Example:
        >>> first_switch_s(22.0, 9.0)
        13.0
    """
    return max(0.0, compile_s - start_s)


def starts_processes(before: Plan, after: Plan) -> bool:
    """Return True if a switch starts processes: a device that the plan before leaves idle has none."""
    return not _devices(after) <= _devices(before)


def _devices(plan: Plan) -> Set[str]:
    return {device for stage in plan.stages for device in stage.devices}


def _program(stage: Stage) -> Tuple[Tuple[int, int], Tuple[int, ...]]:
    """Return what tells the programs of two stages apart."""
    return stage.layers, tuple(len(replica.devices) for replica in stage.replicas)


def _layers(ends: Tuple[int, int]) -> range:
    return range(ends[0], ends[1] + 1)
