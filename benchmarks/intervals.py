#!/usr/bin/env python
"""Compute the errors behind the intervals of predicted steps, and how many measured steps the intervals hold.

    python benchmarks/intervals.py [--output benchmarks/results/intervals.json]

Reads all results of `hwaware bench`, benchmarks/results/programs.json and testbed_steps.jsonl. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import math
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile
from hwaware.costs import evaluate
from hwaware.costs.intervals import Errors, late_s
from hwaware.costs.speed import prediction_at_speed_s
from hwaware.errors import HwawareError
from hwaware.plans import Plan
from hwaware.result import BenchmarkResult
from hwaware.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
STEPS, PROGRAMS = RESULTS / "testbed_steps.jsonl", RESULTS / "programs.json"
# Measured before its cluster changed, while the result holds the profile of after that.
BEFORE = "hwaware-before"


class Row(NamedTuple):
    """The errors of one measured mapping, as logarithms of measured over predicted time.

    `step` is that of the prediction with the waits for late passes; `at_speed` that of one for the machine's speed
    while it ran; None where nothing tells this speed.
    """

    result: str
    scenario: str
    step: float
    at_speed: Optional[float]


def rows(source: str) -> List[Row]:
    """Return a row for each measured mapping, by the prices that the code has now."""
    found = list(_results(source))
    return [*found, *_programs(), *_testbed_steps()] if source == "measured" else found


def _results(source: str) -> Iterator[Row]:
    for path in sorted(RESULTS.glob("**/*.json")):
        if json.loads(path.read_text()).get("schema") != BenchmarkResult.SCHEMA:
            continue
        result = BenchmarkResult.load(path)
        if source == "model":
            result = _unmeasured(result)
        workload, profile = _inputs(result)
        for mapping in {one.name: one for one in (*result.enumerated, *result.mappings)}.values():
            if mapping.name == BEFORE:
                continue
            try:
                step_s = evaluate(mapping.plan, workload, profile).step_s
            except HwawareError as error:
                print(f"left out: {path.name} {mapping.name}: {error}", file=sys.stderr)
                continue
            priced = msgspec.structs.replace(mapping, predicted_step_s=step_s)
            measured_s, at_speed_s = mapping.typical(mapping.predictable_s), prediction_at_speed_s(priced, result)
            usual_s = step_s + late_s(mapping.plan, workload, profile)
            name = str(path.relative_to(RESULTS))
            yield Row(name, result.scenario, math.log(measured_s / usual_s), math.log(measured_s / at_speed_s))


def _inputs(result: BenchmarkResult) -> Tuple[Workload, ClusterProfile]:
    assert result.workload is not None
    assert result.profile is not None
    return result.workload, result.profile


def _unmeasured(result: BenchmarkResult) -> BenchmarkResult:
    """Return the result as if nobody had measured layers, or what the runtime adds to them."""
    workload, profile = _inputs(result)
    layers = tuple(msgspec.structs.replace(layer, measured=None) for layer in workload.layers)
    devices = tuple(
        msgspec.structs.replace(device, pass_s=None, sum_bytes_per_s=None, head_start_s=None)
        for device in profile.devices
    )
    return msgspec.structs.replace(
        result,
        workload=msgspec.structs.replace(workload, layers=layers),
        profile=msgspec.structs.replace(profile, devices=devices),
    )


def _programs() -> Iterator[Row]:
    """Yield a row for each start of a program with default settings."""
    for row in json.loads(PROGRAMS.read_text())["rows"]:
        starts = [start for one in row["rounds"] for start in one.values() if isinstance(start, dict)]
        for number, start in enumerate(one for one in starts if "workload" in one):
            name = f"{PROGRAMS.name} {row['testbed']} {row['program']} {number}"
            measured_s = float(np.median(start["step_s"])) - row["profile"].get("driver_s", 0.0)
            error = _error(start["plan"], start["workload"], row["profile"], measured_s)
            yield Row(name, f"programs on {row['testbed']}", error, None)


def _testbed_steps() -> Iterator[Row]:
    """Yield a row for each plan of benchmarks/testbed_steps.py."""
    for one in map(json.loads, STEPS.read_text().splitlines()):
        if one["sends"] == "overlapped":  # the order of sending that `evaluate` prices
            name = f"{STEPS.name} {one['scenario']} {one['model']}"
            measured_s = float(np.median(one.get("pipeline_s") or one["step_s"]))
            yield Row(name, one["scenario"], _error(one["plan"], one["workload"], one["cluster"], measured_s), None)


def _error(plan: Any, workload: Any, profile: Any, measured_s: float) -> float:
    """Return the logarithm of a measured time over the usual step of recorded documents."""
    given = msgspec.convert(plan, Plan), msgspec.convert(workload, Workload), msgspec.convert(profile, ClusterProfile)
    return math.log(measured_s / (evaluate(*given).step_s + late_s(*given)))


def errors(found: Sequence[Row]) -> Errors:
    """Return the median and the middle 90 % of errors, and of differences between two mappings of a result.

    Every result has the same weight, whether it has one mapping or 63. Quantiles of k results are taken a little
    farther out, at 0.95 (1 + 1 / k), so that a further result lies inside as often (Lei et al., "Distribution-free
    predictive inference for regression", 2018).
    """
    by_result: Dict[str, List[Row]] = collections.defaultdict(list)
    for row in found:
        by_result[row.result].append(row)
    steps = [(row.step, 1 / len(group)) for group in by_result.values() for row in group]
    differences = []
    for group in by_result.values():
        known = [row.at_speed for row in group if row.at_speed is not None]
        pairs = list(itertools.combinations(known, 2))
        differences += [(abs(one - other), 1 / len(pairs)) for one, other in pairs]
    farther = 1 + 1 / len(by_result)
    high = min(1.0, 0.95 * farther)
    low, middle, most = (_quantile(steps, part) for part in (1 - high, 0.5, high))
    return Errors(low, middle, most, _quantile(differences, min(1.0, 0.9 * farther)))


def _quantile(weighted: Sequence[Tuple[float, float]], part: float) -> float:
    values, weights = (np.array(each) for each in zip(*sorted(weighted)))
    place = int(np.searchsorted(np.cumsum(weights) / weights.sum(), part))
    return float(values[min(place, len(values) - 1)])


def coverage(found: Sequence[Row], interval: Errors) -> float:
    """Return the part of steps inside the interval."""
    return float(np.mean([interval.low <= row.step <= interval.high for row in found]))


def left_out(found: Sequence[Row]) -> Dict[str, float]:
    """Return for each scenario the coverage by the errors of all other scenarios, and "all" over all rows."""
    scenarios: Dict[str, List[Row]] = collections.defaultdict(list)
    for row in found:
        scenarios[row.scenario].append(row)
    parts = {
        name: coverage(group, errors([row for row in found if row.scenario != name]))
        for name, group in scenarios.items()
    }
    whole = sum(part * len(scenarios[name]) for name, part in parts.items()) / len(found)
    return {**parts, "all": whole}


def main(arguments: Sequence[str] = ()) -> int:
    """Compute both sources, print and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULTS / "intervals.json")
    chosen = parser.parse_args(arguments)
    document = {}
    for source in ("measured", "model"):
        found = rows(source)
        made = errors(found)
        document[source] = {
            "mappings": len(found),
            "results": len({row.result for row in found}),
            **made._asdict(),
            "coverage": coverage(found, made),
            "left_out": left_out(found),
        }
    text = json.dumps({"command": "python benchmarks/intervals.py", **document}, indent=2) + "\n"
    print(text, end="")
    chosen.output.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
