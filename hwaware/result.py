"""BenchmarkResult: mappings that were trained for real, step by step, beside what was predicted for them."""

from __future__ import annotations

import statistics
from typing import AbstractSet, Any, ClassVar, Dict, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile
from hwaware.plans import Plan
from hwaware.records import FileRecord, Record, require, require_finite, require_unique
from hwaware.timeline import Timeline
from hwaware.workload import Workload


class Mapping(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One mapping of stages to devices, predicted and measured.

    Attributes:
        name: "alpa", "hwaware", "even", "best-measured", ...
        plan: What was run.
        predicted_step_s: The prediction as the profile gives it.
        step_s: Each measured step, warm-up dropped.
        pipeline_s: Of each, from the start of the first stage's first program to the end of the last one: what a
            prediction is of. The rest is what the driver takes to start a step and to hand out its batch.
        loss: The loss of each training step from the first on, warm-up included.
        reference_s: The reference around each measured step's round: it tells a drifting machine from a slow plan.
        slowdowns: For each kind of device, how many times as long the reference took there beside each measured step as
            predictions count on; empty where the reference does not run on the devices.
        also: Other names of the same mapping: what turns out to be alike is measured once.
        hosts: For Alpa's mappings, the order of the hosts that it saw.
        profile_reference_s: What the reference takes at the speed that the prediction is for, where that is not the
            one in the result's `environment`.
        starts: For each measured step, the start of the mapping's processes that it belongs to, 1 for the first; empty
            where they were started once.
        timeline: One step more, recorded, which does not count among `step_s`.
    """

    name: str
    plan: Plan
    predicted_step_s: float
    step_s: Tuple[float, ...]
    loss: Tuple[float, ...]
    reference_s: Tuple[float, ...] = ()
    slowdowns: Dict[str, Tuple[float, ...]] = {}
    pipeline_s: Tuple[float, ...] = ()
    also: Tuple[str, ...] = ()
    hosts: Tuple[str, ...] = ()
    profile_reference_s: Optional[float] = None
    starts: Tuple[int, ...] = ()
    timeline: Optional[Timeline] = None

    def __post_init__(self) -> None:
        require_finite("predicted_step_s", self.predicted_step_s, exclusive=True)
        require(bool(self.step_s), f"mapping {self.name!r} has no measured steps")
        may_be_empty = {"references": self.reference_s, "pipeline times": self.pipeline_s, "starts": self.starts}
        beside = {name: values for name, values in may_be_empty.items() if values}
        beside.update((f"slowdowns of {kind!r}", values) for kind, values in self.slowdowns.items())
        for name, values in {"steps": self.step_s, **beside}.items():
            paired = len(values) == len(self.step_s)
            require(paired, f"mapping {self.name!r} has {len(values)} {name} for {len(self.step_s)} steps")
            for value in values:
                require_finite(f"a value of the {name}", value, exclusive=True)

    @property
    def relative_steps(self) -> Tuple[float, ...]:
        """Measured steps over the reference beside each (the steps themselves if there is none)."""
        if not self.reference_s:
            return self.step_s
        return tuple(step / reference for step, reference in zip(self.step_s, self.reference_s))

    @property
    def relative_starts(self) -> Tuple[Tuple[float, ...], ...]:
        """`relative_steps`, those of each start of the processes together."""
        return self.by_start(self.relative_steps)

    def relative_starts_of(self, rounds: AbstractSet[float]) -> Tuple[Tuple[float, ...], ...]:
        """`relative_starts` of the rounds with these references alone; all of them where none are given."""
        values = self.relative_starts
        references = self.by_start(self.reference_s or (0.0,) * len(self.step_s))
        return tuple(
            tuple(value for value, reference in zip(*both) if not rounds or reference in rounds)
            for both in zip(values, references)
        )

    def by_start(self, values: Sequence[float]) -> Tuple[Tuple[float, ...], ...]:
        """One value for each measured step, those of each start of the processes together."""
        starts = self.starts or (1,) * len(values)
        return tuple(
            tuple(value for value, start in zip(values, starts) if start == one) for one in sorted(set(starts))
        )

    @property
    def names(self) -> Tuple[str, ...]:
        """All names of the mapping."""
        return (self.name, *self.also)

    def typical(self, values: Sequence[float]) -> float:
        """The median of one value for each measured step; after several starts, the geometric mean of their medians."""
        medians = [statistics.median(one) for one in self.by_start(values)]
        return medians[0] if len(medians) == 1 else statistics.geometric_mean(medians)

    @property
    def median_step_s(self) -> float:
        """The typical measured step [s]."""
        return self.typical(self.step_s)

    @property
    def predictable_s(self) -> Tuple[float, ...]:
        """What a prediction is compared with: `pipeline_s`; the steps themselves where that was not recorded."""
        return self.pipeline_s or self.step_s


class Unmeasured(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A mapping that could not be measured.

    Attributes:
        name: As of a Mapping.
        reason: Why not.
        out_of_memory: Whether it needs more memory than a device has.
        plan: The mapping, if there is one.
        also: Other names of the same mapping.
    """

    name: str
    reason: str
    out_of_memory: bool = False
    plan: Optional[Plan] = None
    also: Tuple[str, ...] = ()

    @property
    def names(self) -> Tuple[str, ...]:
        """All names of the mapping."""
        return (self.name, *self.also)


class HostOrder(Record, frozen=True, kw_only=True, omit_defaults=True):
    """Alpa's mapping where Ray lists the hosts in one order.

    Attributes:
        hosts: The order.
        predicted_step_s: Of the mapping.
        measured_as: The name of the mapping if it was among those that were measured.
    """

    hosts: Tuple[str, ...]
    predicted_step_s: float
    measured_as: Optional[str] = None


class BenchmarkResult(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """What one benchmark run measured.

    Attributes:
        environment: Versions, time, command line, and which reference ran beside the steps.
        scenario: Name of the testbed scenario or address of the cluster.
        model: Name of the trained model.
        num_microbatches: Microbatches per step.
        repeats: Measured steps of each mapping, after each start of its processes.
        mappings: At least one.
        single_device_loss: Losses of the same training on one device by plain JAX.
        unmeasured: Mappings that were asked for and could not be measured.
        alpa_orders: Alpa's distinct mappings over the orders of the hosts, fastest predicted first.
        enumerated: Every valid mapping, each measured briefly, where that was asked for.
        profile: What was measured of the cluster.
        workload: What the model has to compute, store and send.
        ideal_step_s: By the profile, no plan is faster: a proved bound, for the speed of the machine while it was
            profiled.
        notes: What to know when reading the result.
    """

    SCHEMA: ClassVar[str] = "hwaware.benchmark"

    environment: Dict[str, Any]
    scenario: str
    model: str
    num_microbatches: int
    repeats: int
    mappings: Tuple[Mapping, ...]
    single_device_loss: Optional[Tuple[float, ...]] = None
    unmeasured: Tuple[Unmeasured, ...] = ()
    alpa_orders: Tuple[HostOrder, ...] = ()
    enumerated: Tuple[Mapping, ...] = ()
    profile: Optional[ClusterProfile] = None
    workload: Optional[Workload] = None
    ideal_step_s: Optional[float] = None
    notes: Tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require(bool(self.mappings), "the result has no mappings")
        require_unique("mapping", tuple(name for mapping in self.mappings for name in mapping.names))
        if self.ideal_step_s is not None:
            require_finite("ideal_step_s", self.ideal_step_s, exclusive=True)

    def mapping(self, name: str) -> Mapping:
        """The mapping of that name, be it its first one or another; KeyError if there is none."""
        for mapping in self.mappings:
            if name in mapping.names:
                return mapping
        raise KeyError(name)
