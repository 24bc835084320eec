#!/usr/bin/env python
"""The fastest mappings of a best-measured result once more, in several starts of their processes. Needs root.

    python benchmarks/fastest_again.py benchmarks/results/best-measured/three-hosts-gpt-small.json \
        -o benchmarks/results/best-measured/starts/three-hosts-gpt-small.json

The cluster is profiled anew and hwaware places anew; beside its mapping run those that the result measured at full
length, Alpa's left out. Takes five minutes for three mappings in three starts.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Callable, List, Sequence

import hwaware.models
from hwaware import ray_cluster
from hwaware.activation import install_runtime
from hwaware.bench import testbed
from hwaware.bench.alpa_mapping import identity
from hwaware.bench.benchmark import named_model
from hwaware.bench.comparison import make_result, plan_all
from hwaware.bench.enumeration import name_best
from hwaware.bench.environment import running_environment
from hwaware.bench.groups import measure_groups
from hwaware.bench.mappings import ALPA, OURS, Candidate, Wanted
from hwaware.bench.profiling import profile as measured_profile
from hwaware.bench.task import Effort, opened_task, reusable
from hwaware.cli._run import cleaning_up_when_terminated
from hwaware.costs import evaluate
from hwaware.plans import Plan
from hwaware.result import BenchmarkResult


def with_earlier(
    chosen: Sequence[Candidate], earlier: BenchmarkResult, price_s: Callable[[Plan], float]
) -> List[Candidate]:
    """The mappings placed now, and the earlier result's that are none of them; Alpa's are left out."""
    known = {identity(one.plan) for one in chosen}
    others = [
        Candidate("earlier" if mapping.name == OURS else mapping.name, mapping.plan, price_s(mapping.plan))
        for mapping in earlier.mappings
        if not mapping.name.startswith(ALPA) and identity(mapping.plan) not in known
    ]
    return [*chosen, *others]


def again(earlier: BenchmarkResult, starts: int, repeats: int) -> BenchmarkResult:
    """Measure hwaware's mapping beside the earlier result's, on a new testbed of the same scenario."""
    assert earlier.workload is not None
    blocks, size = len(earlier.workload.layers), earlier.workload.microbatch_size
    named = named_model(earlier.model, {"blocks": blocks})
    effort = Effort(
        num_layers=blocks, num_microbatches=earlier.num_microbatches, microbatch_size=size, repeats=repeats,
        starts=starts, checked_losses=5, wanted=Wanted(names=(OURS,), orders=1),
    )  # fmt: skip
    install_runtime()
    with testbed.running(earlier.scenario) as bed, running_environment(bed.driver_environment()):
        bed.enter()
        with ray_cluster.connect(bed.address):
            profile = measured_profile(bed.address, quick=True, say=print)
            with opened_task(hwaware.models.make(named.config), profile, effort, print) as task:
                found = plan_all(task)
                chosen = with_earlier(found.chosen, earlier, lambda plan: evaluate(plan, task.workload, profile).step_s)
                measured, left_out, loads = measure_groups(task, chosen, reusable(task, chosen))
                return make_result(task, earlier.scenario, earlier.model, found, name_best(measured), left_out, loads)


@cleaning_up_when_terminated()
def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=8)
    given = parser.parse_args()
    again(BenchmarkResult.load(given.result), given.starts, given.repeats).save(given.output)


if __name__ == "__main__":
    main()
