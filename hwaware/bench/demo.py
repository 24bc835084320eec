"""Show the whole way on one machine, with nothing simulated: testbed, profile, trace, plan, train, compare."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Callable, Tuple

from hwaware import ray_cluster
from hwaware.activation import install_runtime
from hwaware.bench import testbed
from hwaware.bench.benchmark import named_model
from hwaware.bench.comparison import compare
from hwaware.bench.environment import running_environment
from hwaware.bench.mappings import ALPA, OURS, Wanted
from hwaware.bench.profiling import profile as measured_profile
from hwaware.bench.summary import median_alpa
from hwaware.bench.task import Effort, opened_task
from hwaware.cluster import ClusterProfile
from hwaware.errors import MeasurementError
from hwaware.records import PathLike, save_or_keep
from hwaware.report.plots import plot_comparison
from hwaware.result import BenchmarkResult

SCENARIO = "fast-and-slow"
EFFORT = Effort(
    num_layers=8,
    num_microbatches=8,
    microbatch_size=4,
    repeats=6,
    checked_losses=3,
    wanted=Wanted(names=(OURS, ALPA)),
)


def run(directory: PathLike, tell: Callable[[str], None]) -> Tuple[BenchmarkResult, ClusterProfile]:
    """Run the demo, and return its result and the cluster's profile.

    It writes cluster.json, workload.json, plan.json, result.json and result.png into `directory`.

    Args:
        directory: Where the files go.
        tell: Called with each line of progress.

    Raises:
        AlpaError: Alpa is missing or cannot be overridden; nothing was started.
        HwawareError: A part of the way failed; the testbed is down again.
    """
    import hwaware.models

    install_runtime()
    start = time.monotonic()

    def say(message: str) -> None:
        tell(f"{time.monotonic() - start:4.0f} s  {message}")

    named = named_model("gpt-small", {})
    target = Path(directory)
    say(f"starting a testbed: {SCENARIO} ...")
    with testbed.running(SCENARIO) as bed, running_environment(bed.driver_environment()):
        for note in bed.notes:
            say(note)
        bed.enter()
        with ray_cluster.connect(bed.address):
            say(f"measuring the cluster at {bed.address} ...")
            profile = measured_profile(bed.address, quick=True, say=say)
            save_or_keep(profile, target / "cluster.json")
            with opened_task(hwaware.models.make(named.config), profile, EFFORT, say) as task:
                result = compare(task, SCENARIO, named.config.NAME)
    save_or_keep(task.workload, target / "workload.json")
    save_or_keep(result, target / "result.json")
    require_both(result)
    result.mapping(OURS).plan.save(target / "plan.json")
    shown = (result.mapping(OURS), median_alpa(result))
    plot_comparison(result, profile, shown, target / "result.png")
    say(f"done; cluster, workload, plan, result and picture are in {target}/")
    return result, profile


def require_both(result: BenchmarkResult) -> None:
    """Raise MeasurementError unless hwaware's mapping and one of Alpa's were measured."""
    measured = [name for one in result.mappings for name in one.names]
    if OURS not in measured or not any(name.startswith(ALPA) for name in measured):
        reasons = " ".join(f"{one.name}: {one.reason}" for one in result.unmeasured)
        raise MeasurementError(f"A mapping could not be measured. {reasons}", "see the first reason.")
