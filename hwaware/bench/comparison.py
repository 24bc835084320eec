"""Alpa's mapping against hwaware's on one running cluster: trace, plan, train both, measure."""

from __future__ import annotations

import contextlib
import statistics
import time
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

from hwaware.bench import alpa_mapping
from hwaware.bench.harness import measure
from hwaware.bench.training import TrainingRun, single_device_losses
from hwaware.cluster import ClusterProfile
from hwaware.costs import evaluate
from hwaware.reference_kernel import reference_s
from hwaware.result import BenchmarkResult, Mapping
from hwaware.workload import Workload

OURS = "hwaware"
ALPA_PREFIX = "alpa-"


class Effort(NamedTuple):
    """How much is measured.

    Attributes:
        num_layers: How many layers Alpa cuts the model into.
        num_microbatches: Per step.
        microbatch_size: Samples per microbatch.
        repeats: Measured steps of each mapping.
        warmup: Steps of each mapping that come first and do not count.
        checked_losses: Steps of training on one device to compare losses with.
    """

    num_layers: int
    num_microbatches: int
    microbatch_size: int
    repeats: int = 8
    warmup: int = 1
    checked_losses: int = 5


def compare(
    model: Any,
    profile: ClusterProfile,
    scenario: str,
    effort: Effort,
    environment: Dict[str, Any],
    say: Callable[[str], None] = lambda _: None,
) -> Tuple[BenchmarkResult, Workload]:
    """Train `model` by hwaware's mapping and by Alpa's own in three host orders, step by step in turn.

    Raises:
        HwawareError: The model cannot be placed, a worker fails, or losses disagree in kind (not a number).
    """
    with _runs(model, profile, effort, say) as runs:
        say(f"measuring {effort.repeats} steps of each of {len(runs)} mappings, one each in turn ...")
        predictions = {run.name: evaluate(run.plan, run.workload, profile).step_s for run in runs}
        mappings = measure(
            runs, effort.repeats, effort.warmup, lambda: reference_s(repeats=1), predictions, _progress(say)
        )
        workload = runs[0].workload
    say("training on a single device to compare losses ...")
    result = BenchmarkResult(
        environment=environment,
        scenario=scenario,
        model=model.config.NAME,
        num_microbatches=effort.num_microbatches,
        repeats=effort.repeats,
        mappings=mappings,
        single_device_loss=single_device_losses(
            model, effort.num_microbatches * effort.microbatch_size, effort.checked_losses
        ),
    )
    return result, workload


def _progress(say: Callable[[str], None]) -> Callable[[int, int], None]:
    """Says each round, and from the second on how long the others will take."""
    started = time.monotonic()

    def told(done: int, total: int) -> None:
        left_s = (time.monotonic() - started) / done * (total - done)
        say(f"  round {done} of {total}" + (f", about {left_s:.0f} s left" if 1 < done < total else ""))

    return told


@contextlib.contextmanager
def _runs(
    model: Any, profile: ClusterProfile, effort: Effort, say: Callable[[str], None]
) -> Iterator[List[TrainingRun]]:
    """hwaware's run and Alpa's runs, compiled and ready; their workers end with the block."""
    with contextlib.ExitStack() as stack:
        say("compiling hwaware's mapping (Alpa traces the model, hwaware places it) ...")
        sizes = (effort.num_layers, effort.num_microbatches, effort.microbatch_size)
        runs = [TrainingRun(OURS, model, profile, *sizes)]
        stack.callback(runs[0].close)
        orders = alpa_mapping.host_orders([device.id for device in profile.devices])
        for name, order in orders.items():
            say(f"compiling Alpa's mapping, hosts {name} ...")
            plan = alpa_mapping.alpa_plan(runs[0].workload, profile, effort.num_microbatches, order)
            run = TrainingRun(ALPA_PREFIX + name, model, profile, *sizes, plan)
            stack.callback(run.close)
            runs.append(run)
        for run in runs:
            run.wait_until_compiled()
        yield runs


def median_alpa(result: BenchmarkResult) -> Mapping:
    """Alpa's mapping of the host order that is the median of those measured, by relative step time.

    Raises:
        ValueError: The result has no mapping of Alpa's.
    """
    candidates = [mapping for mapping in result.mappings if mapping.name.startswith("alpa")]
    if not candidates:
        raise ValueError("the result has no mapping of Alpa's")
    ranked = sorted(candidates, key=lambda mapping: statistics.median(mapping.relative_steps))
    return ranked[(len(ranked) - 1) // 2]


def largest_loss_difference(result: BenchmarkResult) -> float:
    """The largest relative difference between any mapping's loss and that of training on a single device.

    Raises:
        ValueError: The result has no losses of a single device.
    """
    expected = result.single_device_loss
    if not expected:
        raise ValueError("the result has no losses of a single device")
    return max(
        abs(found - wanted) / abs(wanted)
        for mapping in result.mappings
        for found, wanted in zip(mapping.loss, expected)
    )
