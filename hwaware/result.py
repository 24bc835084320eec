"""BenchmarkResult: mappings that were trained for real, step by step, beside what was predicted for them."""

from __future__ import annotations

import statistics
from typing import Any, ClassVar, Dict, Optional, Tuple

from hwaware.plans import Plan
from hwaware.records import FileRecord, Record, require, require_finite, require_unique


class Mapping(Record, frozen=True, kw_only=True, omit_defaults=True):
    """One mapping of stages to devices, predicted and measured.

    Attributes:
        name: "alpa", "hwaware", "even", "best-measured", ...
        plan: What was run.
        predicted_step_s: The prediction as the profile gives it.
        step_s: Each measured step, warm-up dropped.
        loss: The loss of each training step from the first on, warm-up included.
        reference_s: The reference kernel beside each measured step: it tells a drifting machine from a slow plan.
    """

    name: str
    plan: Plan
    predicted_step_s: float
    step_s: Tuple[float, ...]
    loss: Tuple[float, ...]
    reference_s: Tuple[float, ...] = ()

    def __post_init__(self) -> None:
        require_finite("predicted_step_s", self.predicted_step_s, exclusive=True)
        require(bool(self.step_s), f"mapping {self.name!r} has no measured steps")
        for value in self.step_s + self.reference_s:
            require_finite("step_s or reference_s", value, exclusive=True)
        paired = not self.reference_s or len(self.reference_s) == len(self.step_s)
        require(paired, f"mapping {self.name!r} has {len(self.reference_s)} references for {len(self.step_s)} steps")

    @property
    def relative_steps(self) -> Tuple[float, ...]:
        """Measured steps over the reference kernel beside each (the steps themselves if no reference was run)."""
        if not self.reference_s:
            return self.step_s
        return tuple(step / reference for step, reference in zip(self.step_s, self.reference_s))

    def corrected_prediction_s(self, profile_reference_s: float) -> float:
        """The predicted step [s] at the speed that the machine had while the mapping ran.

        The prediction is multiplied by the reference kernel's median beside the steps over its time beside the profile.
        """
        if not self.reference_s:
            return self.predicted_step_s
        return self.predicted_step_s * statistics.median(self.reference_s) / profile_reference_s

    @property
    def median_step_s(self) -> float:
        """Median of the measured steps [s]."""
        return statistics.median(self.step_s)


class BenchmarkResult(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """What one benchmark run measured.

    Attributes:
        environment: Versions, time, command line, and the reference kernel's time when the cluster was profiled.
        scenario: Name of the testbed scenario or address of the cluster.
        model: Name of the trained model.
        num_microbatches: Microbatches per step.
        repeats: Measured steps of each mapping.
        mappings: At least one.
        single_device_loss: Losses of the same training on one device by plain JAX.
    """

    SCHEMA: ClassVar[str] = "hwaware.benchmark"

    environment: Dict[str, Any]
    scenario: str
    model: str
    num_microbatches: int
    repeats: int
    mappings: Tuple[Mapping, ...]
    single_device_loss: Optional[Tuple[float, ...]] = None

    def __post_init__(self) -> None:
        require(bool(self.mappings), "the result has no mappings")
        require_unique("mapping", tuple(mapping.name for mapping in self.mappings))

    def mapping(self, name: str) -> Mapping:
        """The mapping of that name; KeyError if there is none."""
        for mapping in self.mappings:
            if mapping.name == name:
                return mapping
        raise KeyError(name)
