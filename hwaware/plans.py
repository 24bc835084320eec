"""Define `Plan`: which devices run which layers, in pipeline order, and the predicted cost."""

from __future__ import annotations

from typing import ClassVar, Literal, Optional, Tuple, cast

from hwaware.records import (
    MOST_LAYERS,
    MOST_PREDICTED,
    MOST_SECONDS,
    FileRecord,
    Record,
    require,
    require_amount,
    require_count,
    require_finite,
    require_name,
    require_printable,
    require_unique,
)

Schedule = Literal["1f1b", "gpipe", "inference"]
Objective = Literal["step", "alpa", "per-device"]
Status = Literal["optimal", "feasible", "infeasible"]
LayerTimes = Literal["measured", "model"]
# For readers of tables with `receive_s`.
RECEIVE_MEANS = "receive: time to get one microbatch's activations and gradients from other stages, less head starts."


# A bound and an objective that are equal may come from sums in another order.
_ROUNDING = 1.001


def _require_predicted(name: str, value: Optional[float]) -> None:
    if value is not None:
        require_amount(name, value, MOST_PREDICTED)


def schedule_of(pipeline_schedule: str) -> Schedule:
    """Return the plan's name of one of Alpa's pipeline schedules.

    Example:
        >>> schedule_of("1f1b_overlap_friendly")
        '1f1b'
    """
    return "1f1b" if pipeline_schedule.startswith("1f1b") else cast(Schedule, pipeline_schedule)


class Replica(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One tensor-parallel group of devices that works on a share of each microbatch.

    Attributes:
        devices: The device ids.
        share: Part of each microbatch; equal parts if left out. share x microbatch_size is a whole number of samples.
    """

    devices: Tuple[str, ...]
    share: Optional[float] = None

    def __post_init__(self) -> None:
        require(bool(self.devices), "a replica has no devices")
        for device in self.devices:
            require_name("device id", device)
        if self.share is not None:
            require_finite("share", self.share, exclusive=True)
            require(self.share <= 1.0, f"share is {self.share}, expected at most 1")


class Stage(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One pipeline stage: layers `first` to `last` (inclusive) on one or more data-parallel replicas.

    Attributes:
        layers: First and last layer.
        replicas: The data-parallel replicas, at least one.
        compute_s: Forward and backward of one microbatch on the slowest replica.
        receive_s: Transfers of activations and gradients to the stage, per microbatch, less the time that its devices
            gain while they wait. Plans of older versions may have less than 0.
        gradient_sync_s: Gradient synchronisation, once per step.
        memory_bytes: Memory of the fullest device.
    """

    layers: Tuple[int, int]
    replicas: Tuple[Replica, ...]
    compute_s: Optional[float] = None
    receive_s: Optional[float] = None
    gradient_sync_s: Optional[float] = None
    memory_bytes: Optional[float] = None

    def __post_init__(self) -> None:
        first, last = self.layers
        require(0 <= first <= last, f"layers are [{first}, {last}], expected 0 <= first <= last")
        require_count("layers", last + 1, most=MOST_LAYERS)
        require(bool(self.replicas), "a stage has no replicas")
        for name in ("compute_s", "gradient_sync_s", "memory_bytes"):
            _require_predicted(name, getattr(self, name))
        if self.receive_s is not None:
            require_amount("receive_s", self.receive_s, MOST_PREDICTED, least=-MOST_SECONDS)

    @property
    def devices(self) -> Tuple[str, ...]:
        """Return all device ids of the stage, replica by replica."""
        if len(self.replicas) == 1:
            return self.replicas[0].devices
        return tuple(device for replica in self.replicas for device in replica.devices)


class Plan(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A placement of layers on devices, and how close to optimal the solver proved it.

    Attributes:
        num_microbatches: Microbatches per step; the global batch is num_microbatches x microbatch_size.
        schedule: Order of forward and backward passes.
        stages: Stages in pipeline order; empty only if `status` is "infeasible".
        solver: Name of the solver; "hand" for a plan that a person wrote.
        objective: The minimised figure: "step" (step time), "alpa" (sum t + (B - 1) max t), or "per-device" (step time
            times devices used).
        status: "optimal" if `objective_s` meets `bound_s`, else "feasible"; "infeasible" if no plan exists.
        objective_s, bound_s: The plan's objective, and a lower bound on that of every plan.
        search_s: Wall time of the search.
        predicted_step_s: Step time by `hwaware.evaluate`.
        step_interval_s: Two times; 90 % of steps lie between both, by the errors of recorded predictions. The
            driver's part of a step is in both times, if the profile has it, but not in `predicted_step_s`.
        layer_times: Source of the layer times behind these: "measured", or "model" for formulas; None if unknown.
        reason: For an infeasible plan, the limit that binds and by how much the model misses it.
        microbatch_size: Samples per microbatch if a solver chose the number of microbatches; None if the workload's
            size holds.

    Example:
        >>> from hwaware import Plan
        >>> from hwaware.plans import Replica, Stage
        >>> Plan(num_microbatches=4, stages=(Stage(layers=(0, 1), replicas=(Replica(devices=("a:0",)),)),)).solver
        'hand'
    """

    SCHEMA: ClassVar[str] = "hwaware.plan"

    num_microbatches: int
    stages: Tuple[Stage, ...]
    schedule: Schedule = "1f1b"
    solver: str = "hand"
    objective: Objective = "step"
    status: Status = "feasible"
    objective_s: Optional[float] = None
    bound_s: Optional[float] = None
    search_s: Optional[float] = None
    predicted_step_s: Optional[float] = None
    step_interval_s: Optional[Tuple[float, float]] = None
    layer_times: Optional[LayerTimes] = None
    reason: Optional[str] = None
    microbatch_size: Optional[int] = None

    def __post_init__(self) -> None:
        require_count("num_microbatches", self.num_microbatches)
        if self.microbatch_size is not None:
            require_count("microbatch_size", self.microbatch_size)
        require_name("solver", self.solver)
        require_printable("reason", self.reason)
        for name in ("objective_s", "bound_s", "search_s", "predicted_step_s"):
            _require_predicted(name, getattr(self, name))
        if self.step_interval_s is not None:
            for end in self.step_interval_s:
                _require_predicted("step_interval_s", end)
            low_s, high_s = self.step_interval_s
            require(low_s <= high_s, f"step_interval_s is from {low_s} to {high_s}, expected the smaller time first")
        if self.objective_s is not None and self.bound_s is not None:
            most = self.objective_s * _ROUNDING
            require(
                self.bound_s <= most, f"bound_s is {self.bound_s}, expected at most objective_s, {self.objective_s}"
            )
        require(bool(self.stages) or self.status == "infeasible", "the plan has no stages")
        expected = 0
        for index, stage in enumerate(self.stages):
            found = stage.layers[0]
            require(found == expected, f"stage {index} starts with layer {found}, expected layer {expected}")
            expected = stage.layers[1] + 1
        require_unique("device", tuple(device for stage in self.stages for device in stage.devices))
