"""The whole way on one machine: testbed -> profile -> trace -> plan -> train -> compare, with nothing simulated."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Callable, Dict, Tuple

from hwaware import profiler, ray_cluster
from hwaware.bench import testbed
from hwaware.bench.comparison import OURS, Effort, compare, largest_loss_difference, median_alpa
from hwaware.bench.statistics import median_interval, ratio_interval
from hwaware.cluster import ClusterProfile
from hwaware.patching.activation import install_runtime
from hwaware.records import PathLike
from hwaware.report.plots import plot_comparison
from hwaware.result import BenchmarkResult, Mapping

SCENARIO = "fast-and-slow"
EFFORT = Effort(num_layers=8, num_microbatches=8, microbatch_size=4)
# Losses agree when they differ by less than this, relative: rounding of float32 over microbatches is smaller.
LOSS_TOLERANCE = 1e-4


def run(directory: PathLike, tell: Callable[[str], None]) -> Tuple[BenchmarkResult, ClusterProfile]:
    """Run the demo; writes cluster.json, workload.json, plan.json, result.json and result.png into `directory`.

    Raises:
        AlpaError: Alpa is missing or cannot be overridden; found before anything is started.
        HwawareError: A part of the way failed; the testbed has been taken down.
    """
    import hwaware.models

    install_runtime()
    start = time.monotonic()

    def say(message: str) -> None:
        tell(f"{time.monotonic() - start:4.0f} s  {message}")

    model = hwaware.models.make(hwaware.models.GptConfig(hidden=384, heads=6, sequence=64))
    target = Path(directory)
    say(f"starting a testbed: {SCENARIO} ...")
    with testbed.running(SCENARIO) as bed, running_environment(bed.driver_environment()):
        bed.enter()
        with ray_cluster.connect(bed.address):
            say(f"measuring the cluster at {bed.address} ...")
            profile = profiler.profile(bed.address, quick=True)
            profile.save(target / "cluster.json")
            result, workload = compare(model, profile, SCENARIO, EFFORT, environment(profile), say)
    workload.save(target / "workload.json")
    result.mapping(OURS).plan.save(target / "plan.json")
    result.save(target / "result.json")
    shown = (result.mapping(OURS), median_alpa(result))
    plot_comparison(result, profile, shown, target / "result.png")
    say(f"done; cluster, workload, plan, result and picture are in {target}/")
    return result, profile


@contextlib.contextmanager
def running_environment(variables: Dict[str, str]) -> Any:
    """Environment variables that hold inside the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment(profile: ClusterProfile) -> Dict[str, Any]:
    """What a result has to say about where it came from."""
    packages = ("hwaware", "alpa", "jax", "jaxlib", "ray", "numpy")
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in packages},
        "load_average": list(os.getloadavg()),
        "profile_reference_s": (profile.environment or {}).get("reference_s"),
    }


def summary(result: BenchmarkResult) -> Dict[str, Any]:
    """The figures of a comparison that people ask for, ready for JSON."""
    ours, alpa = result.mapping(OURS), median_alpa(result)
    ratio = ratio_interval(ours.relative_steps, alpa.relative_steps)
    return {
        "mappings": {mapping.name: _figures(mapping, result) for mapping in result.mappings},
        "median_alpa": alpa.name,
        "step_ratio": ratio._asdict(),
        "largest_relative_loss_difference": largest_loss_difference(result),
        "losses_agree": largest_loss_difference(result) <= LOSS_TOLERANCE,
    }


def _figures(mapping: Mapping, result: BenchmarkResult) -> Dict[str, Any]:
    measured = median_interval(mapping.step_s)
    reference = result.environment.get("profile_reference_s")
    predicted = mapping.corrected_prediction_s(reference) if reference else mapping.predicted_step_s
    return {
        "measured_step_s": measured._asdict(),
        "predicted_step_s": mapping.predicted_step_s,
        "corrected_prediction_s": predicted,
        "prediction_error": predicted / measured.median - 1,
    }
