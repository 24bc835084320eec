"""What every solver is asked and what it answers."""

from __future__ import annotations

from typing import Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.cluster import Device
from hwaware.costs import PreparedCosts
from hwaware.costs.stages import LocatedStage, shared_replicas
from hwaware.plans import Objective, Plan

# Whether a stage may be so: the devices of each replica, the first and the last layer.
StageRule = Callable[[Sequence[Sequence[Device]], int, int], bool]
# Device ids that may run a layer, for each layer that is not free; the layers counted from 0.
Pins = Mapping[int, Tuple[str, ...]]


class Problem(NamedTuple):
    """One question to a solver: a workload on a cluster as arrays, worked out once, and what is wanted.

    Attributes:
        costs: The workload on the devices that may be used, under one schedule.
        num_microbatches: B.
        objective: What to minimise.
        time_limit_s: Wall time after which the best plan so far is the answer.
        target: "alpa" for plans that Alpa can run, "any" for all.
        most_devices: Devices of one stage at most; None for no limit.
        seed: Of solvers that draw random numbers.
        pins: Layers that only some devices may run.
        judge: Prices a plan for annealing in place of `evaluate`, in seconds; for example the simulator.
        rule: Which stages are allowed; all if left out.
        has_plan: Whether the caller has a plan already, so that none has to be found whatever the time.
    """

    costs: PreparedCosts
    num_microbatches: int
    objective: Objective = "step"
    time_limit_s: float = 60.0
    target: str = "alpa"
    most_devices: Optional[int] = None
    seed: int = 0
    pins: Pins = {}
    judge: Optional[Callable[[Plan], float]] = None
    rule: Optional[StageRule] = None
    has_plan: bool = False

    def allows(self, stage: LocatedStage) -> bool:
        """Return True if no rule forbids the stage."""
        if self.rule is None:
            return True
        devices = [[self.costs.devices[name] for name in replica.devices] for replica in stage.replicas]
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
        stages = [LocatedStage(*stage.layers, shared_replicas(stage)) for stage in plan.stages]
        return sorted({layer for stage in stages for layer in self.missed_pins(stage)})

    def pin_row(self, device: str) -> Tuple[bool, ...]:
        """For each pinned layer whether the device may run it."""
        return tuple(device in allowed for allowed in self.pins.values())


class Answer(NamedTuple):
    """What a solver found.

    Attributes:
        plan: The stages, not priced yet; None if there are none.
        bound_s: No plan has a smaller objective; infinite if it is proved that there is none, None if the solver says
            nothing about that.
        reason: Why there is no plan.
    """

    plan: Optional[Plan]
    bound_s: Optional[float] = None
    reason: Optional[str] = None
