"""Define `BenchmarkResult`: the measured steps of real training by several mappings, beside predictions."""

from __future__ import annotations

import statistics
from typing import AbstractSet, Any, ClassVar, Dict, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile
from hwaware.plans import Plan
from hwaware.records import (
    LEAST_SECONDS,
    MOST_PREDICTED,
    FileRecord,
    Record,
    require,
    require_amount,
    require_count,
    require_duration,
    require_known_facts,
    require_name,
    require_shallow,
    require_unique,
)
from hwaware.timeline import Timeline
from hwaware.workload import Workload

# A machine that takes a million times as long does not finish a benchmark.
_MOST_SLOWDOWN = 1e6


def _require_predicted(name: str, value: float) -> None:
    require_amount(name, value, MOST_PREDICTED, least=LEAST_SECONDS, exclusive=True)


class Mapping(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One mapping of stages to devices, predicted and measured.

    Attributes:
        name: "alpa", "hwaware", "even", "best-measured", ...
        plan: The plan that ran.
        predicted_step_s: The prediction as the profile gives it, before any scaling to the machine's speed.
        step_s: Each measured step, without warm-up.
        loss: Loss of each training step from the first, with warm-up.
        reference_s: Time of the reference around each measured step's round; it tells a drifting machine from a slow
            plan.
        slowdowns: For each kind of device, the reference's time there beside each measured step, over the time that
            predictions assume. Empty if the reference does not run on the devices.
        pipeline_s: The part of each measured step that a prediction covers. It lasts from the start of the first
            stage's first program to the end of the last program. In the rest of the step, the driver starts the step
            and hands out its batch.
        also: Other names of the same mapping; a benchmark measures equal mappings once.
        hosts: For Alpa's mappings, the order in which Alpa saw the hosts.
        profile_reference_s: The reference's time at the speed that the prediction assumes, if it differs from the one
            in the result's `environment`.
        starts: For each measured step, the number of its start of the mapping's processes, from 1; empty after a
            single start.
        timeline: One more step, recorded; `step_s` leaves it out.
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
        require_name("mapping name", self.name)
        _require_predicted("predicted_step_s", self.predicted_step_s)
        require(bool(self.step_s), f"mapping {self.name!r} has no measured steps")
        may_be_empty = {"references": self.reference_s, "pipeline times": self.pipeline_s, "starts": self.starts}
        beside = {name: values for name, values in may_be_empty.items() if values}
        beside.update((f"slowdowns of {kind!r}", values) for kind, values in self.slowdowns.items())
        for name, values in {"steps": self.step_s, **beside}.items():
            paired = len(values) == len(self.step_s)
            require(paired, f"mapping {self.name!r} has {len(values)} {name} for {len(self.step_s)} steps")
            for value in values:
                if name == "starts":
                    require_count("a value of the starts", int(value))
                elif name.startswith("slowdowns"):
                    require_amount(f"a value of the {name}", value, _MOST_SLOWDOWN, least=1 / _MOST_SLOWDOWN)
                else:
                    require_duration(f"a value of the {name}", value)
        if self.profile_reference_s is not None:
            require_duration("profile_reference_s", self.profile_reference_s)

    @property
    def relative_steps(self) -> Tuple[float, ...]:
        """Return each measured step over the reference beside it; the steps themselves without references."""
        if not self.reference_s:
            return self.step_s
        return tuple(step / reference for step, reference in zip(self.step_s, self.reference_s))

    @property
    def relative_starts(self) -> Tuple[Tuple[float, ...], ...]:
        """Return `relative_steps`, grouped by the start of the processes."""
        return self.by_start(self.relative_steps)

    def relative_starts_of(self, rounds: AbstractSet[float]) -> Tuple[Tuple[float, ...], ...]:
        """Return `relative_starts` of only the rounds with these reference times; of all rounds if none are given."""
        values = self.relative_starts
        references = self.by_start(self.reference_s or (0.0,) * len(self.step_s))
        return tuple(
            tuple(value for value, reference in zip(*both) if not rounds or reference in rounds)
            for both in zip(values, references)
        )

    def by_start(self, values: Sequence[float]) -> Tuple[Tuple[float, ...], ...]:
        """Group values, one for each measured step, by the start of the processes."""
        starts = self.starts or (1,) * len(values)
        return tuple(
            tuple(value for value, start in zip(values, starts) if start == one) for one in sorted(set(starts))
        )

    @property
    def names(self) -> Tuple[str, ...]:
        """All names of the mapping."""
        return (self.name, *self.also)

    def typical(self, values: Sequence[float]) -> float:
        """Return the median of values, one for each step; over several starts, the geometric mean of their medians."""
        medians = [statistics.median(one) for one in self.by_start(values)]
        return medians[0] if len(medians) == 1 else statistics.geometric_mean(medians)

    @property
    def median_step_s(self) -> float:
        """Return the typical measured step [s]."""
        return self.typical(self.step_s)

    @property
    def predictable_s(self) -> Tuple[float, ...]:
        """Return the times that a prediction covers: `pipeline_s`, or the steps if the result lacks it."""
        return self.pipeline_s or self.step_s


class Unmeasured(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A mapping that could not be measured.

    Attributes:
        name: Name of the mapping, as in `Mapping`.
        reason: The cause, as a sentence.
        out_of_memory: True if the mapping needs more memory than a device has.
        plan: The plan, if a solver found one.
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
    """Alpa's mapping for one order in which Ray may list the hosts.

    Attributes:
        hosts: The hosts in this order.
        predicted_step_s: Predicted step of the mapping.
        measured_as: Name of the mapping if the benchmark measured it, else None.
    """

    hosts: Tuple[str, ...]
    predicted_step_s: float
    measured_as: Optional[str] = None

    def __post_init__(self) -> None:
        _require_predicted("predicted_step_s", self.predicted_step_s)


class BenchmarkResult(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """The measurements of one benchmark run.

    Attributes:
        environment: Versions, time, command line, and the reference that ran beside the steps.
        scenario: Name of the testbed scenario or address of the cluster.
        model: Name of the trained model.
        num_microbatches: Microbatches per step.
        repeats: Measured steps of each mapping, after each start of its processes.
        mappings: The measured mappings, at least one.
        single_device_loss: Losses of the same training on one device by plain JAX.
        unmeasured: Requested mappings whose measurement failed.
        alpa_orders: Alpa's distinct mappings over the orders of the hosts, fastest predicted first.
        enumerated: Every valid mapping, each measured briefly, if requested.
        profile: The profile of the cluster.
        workload: The workload of the model.
        ideal_step_s: A proved lower bound on the predicted step of every plan, at the machine's speed while the
            profiler ran.
        notes: Remarks for the reader of the result.

    Example:
        >>> from hwaware import BenchmarkResult, Plan
        >>> from hwaware.result import Mapping
        >>> from hwaware.plans import Replica, Stage
        >>> plan = Plan(num_microbatches=4, stages=(Stage(layers=(0, 3), replicas=(Replica(devices=("a:0",)),)),))
        >>> even = Mapping(name="even", plan=plan, predicted_step_s=1.1, step_s=(1.2, 1.3, 1.1), loss=())
        >>> result = BenchmarkResult(environment={}, scenario="one host", model="mlp", num_microbatches=4, repeats=3,
        ...                          mappings=(even,))
        >>> result.mapping("even").median_step_s
        1.2
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
        require_known_facts(self.environment)
        require_shallow("environment", self.environment)
        require_count("num_microbatches", self.num_microbatches)
        require_count("repeats", self.repeats)
        require_unique("mapping", tuple(name for mapping in self.mappings for name in mapping.names))
        if self.ideal_step_s is not None:
            _require_predicted("ideal_step_s", self.ideal_step_s)

    def mapping(self, name: str) -> Mapping:
        """Return the mapping with this name, as its first name or another.

        Raises:
            KeyError: No mapping has this name.
        """
        for mapping in self.mappings:
            if name in mapping.names:
                return mapping
        raise KeyError(name)
