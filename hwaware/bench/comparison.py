"""Compare mappings on one running cluster: plan them, train each, and measure their steps alternately."""

from __future__ import annotations

import functools
import math
from typing import Any, Iterator, Optional, Sequence, Tuple

from hwaware.bench.environment import environment
from hwaware.bench.groups import measure_groups
from hwaware.bench.mappings import Candidates, candidates
from hwaware.bench.task import Effort, Task, reusable
from hwaware.bench.training import single_device_losses
from hwaware.costs import PreparedCosts
from hwaware.errors import MeasurementError
from hwaware.result import BenchmarkResult, Mapping, Unmeasured

# Largest ratio between the reference beside the steps and beside the profile that needs no note.
_DRIFT = 1.15


def compare(task: Task, scenario: str, label: str) -> BenchmarkResult:
    """Train a model by every wanted mapping; the mappings take turns, one step each.

    Args:
        task: The model, its cluster and the effort.
        scenario: Name of the scenario in the result.
        label: Name of the model in the result.

    Raises:
        HwawareError: No mapping could be measured, or a worker failed in the middle.
    """
    found = plan_all(task)
    measured = measure_groups(task, found.chosen, reusable(task, found.chosen))
    return make_result(task, scenario, label, found, *measured)


def plan_all(task: Task) -> Candidates:
    """Return the candidates of a task."""
    task.say("placing it: " + ", ".join(task.effort.wanted.names) + " ...")
    return candidates(task.workload, task.profile, task.effort.num_microbatches, task.effort.wanted)


def make_result(
    task: Task,
    scenario: str,
    label: str,
    found: Candidates,
    measured: Sequence[Mapping],
    unmeasured: Sequence[Unmeasured],
    loads: Sequence[float],
) -> BenchmarkResult:
    """Return the result, after training on a single device to compare losses.

    Args:
        task: The model, its cluster and the effort.
        scenario: Name of the scenario in the result.
        label: Name of the model in the result.
        found: The candidates.
        measured: The mappings that ran.
        unmeasured: Those that could not run.
        loads: Load averages during the measurement.

    Raises:
        MeasurementError: No mapping was measured with finite losses.
    """
    diverged = [one for one in measured if not all(math.isfinite(loss) for loss in one.loss)]
    measured = [one for one in measured if one not in diverged]
    everything = (*found.unmeasured, *unmeasured, *map(_diverged, diverged))
    if not measured:
        reasons = " ".join(f"{one.name}: {one.reason}" for one in everything)
        raise MeasurementError(f"No mapping could be measured. {reasons}", "see the first reason.")
    task.say("training on a single device to compare losses ...")
    effort = task.effort
    repeats = min(effort.repeats, max(len(steps) for one in measured for steps in one.relative_starts))
    about = environment(task.reference)
    about["load_average_during"] = [round(load, 2) for load in loads]
    return BenchmarkResult(
        environment=about,
        scenario=scenario,
        model=label,
        num_microbatches=effort.num_microbatches,
        repeats=repeats,
        mappings=tuple(measured),
        single_device_loss=_expected_losses(
            task.model.config, effort.num_microbatches * effort.microbatch_size, effort.checked_losses
        ),
        unmeasured=everything,
        alpa_orders=found.orders,
        profile=task.profile,
        workload=task.workload,
        ideal_step_s=ideal_step_s(task, found.bound_s),
        notes=(*_shortened(measured, repeats, effort), *_notes(measured, about["profile_reference_s"])),
    )


def _diverged(mapping: Mapping) -> Unmeasured:
    """Return the record of a mapping whose losses became infinite or NaN."""
    reason = f"its losses are not finite: {', '.join(f'{loss:g}' for loss in mapping.loss[:8])} ..."
    return Unmeasured(name=mapping.name, reason=reason, plan=mapping.plan, also=mapping.also)


@functools.lru_cache(maxsize=None)  # the same in every scenario
def _expected_losses(config: Any, batch_size: int, steps: int) -> Tuple[float, ...]:
    import hwaware.models

    return single_device_losses(hwaware.models.make(config), batch_size, steps)


def ideal_step_s(task: Task, bound_s: Optional[float]) -> Optional[float]:
    """Return a step time that no plan can beat, by the cost model; None if it gives no bound above 0.

    The bound is the larger of two: the search's own, and all work spread over all devices by their speed.
    """
    costs = PreparedCosts(task.workload, task.profile)
    sums = [costs.sums((device.id,)) for device in task.profile.devices]
    work_s = task.effort.num_microbatches / sum(1.0 / (one.forward_s[-1] + one.backward_s[-1]) for one in sums)
    # Waiting before its first passes may speed up a stage: see `PreparedCosts.most_gained_s`.
    return max(0.0, work_s - 2.0 * costs.most_gained_s, bound_s or 0.0) or None


def _shortened(measured: Sequence[Mapping], repeats: int, effort: Effort) -> Iterator[str]:
    """Yield a note if the time limit cut steps or starts."""
    starts = max(len(one.relative_starts) for one in measured)
    if (repeats, starts) != (effort.repeats, effort.starts):
        yield (
            f"The time limit allowed {repeats} steps of each mapping in {starts} start{'s' if starts > 1 else ''} of "
            f"its processes, instead of {effort.repeats} steps in {effort.starts}: intervals are wider."
        )


def _notes(measured: Sequence[Mapping], profile_reference_s: Optional[float]) -> Iterator[str]:
    references = sorted(reference for mapping in measured for reference in mapping.reference_s)
    if not references or not profile_reference_s:
        return
    drift = references[len(references) // 2] / profile_reference_s
    if not 1 / _DRIFT < drift < _DRIFT:
        yield (
            f"The reference kernel took {drift:.2f} times as long beside the steps as beside the profile: the machine "
            "changed its speed. Predictions are corrected by this factor."
        )
