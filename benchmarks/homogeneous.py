"""On equal hosts, a step by hwaware's mapping against one by Alpa's own: never slower by more than 2 %.

    python benchmarks/homogeneous.py -o benchmarks/results/homogeneous.json       (root; under five minutes)

On the testbed four-equal, a small GPT and dense layers, each trained by both mappings, one step each in turn with the
reference kernel beside each step. Alpa's mapping is what its search and its slicing make of these hosts in the order in
which Alpa lists them. Where hwaware keeps Alpa's mapping, both are the same plan, and the figure is what two runs of
one plan differ by, and the bound is met whatever that is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, Dict, Iterator, NamedTuple

import hwaware.models
import hwaware.placement
from hwaware import profiler, ray_cluster
from hwaware.activation import install_runtime
from hwaware.bench import testbed
from hwaware.bench.environment import environment, running_environment
from hwaware.bench.harness import measure
from hwaware.bench.statistics import ratio_interval
from hwaware.bench.training import TrainingRun
from hwaware.cli._run import cleaning_up_when_terminated
from hwaware.patching.choosing import mapping_of
from hwaware.reference_kernel import kernel_reference

SCENARIO = "four-equal"
BOUND = 1.02
SHOWN = ("model", "same_plan", "ratio", "met", "surely_slower")


class Size(NamedTuple):
    """How much is trained: layers that Alpa cuts, microbatches of a step, samples of each."""

    layers: int
    microbatches: int
    samples: int


MODELS = {
    "gpt": (hwaware.models.GptConfig(blocks=8, hidden=256, heads=4, sequence=64), Size(8, 8, 4)),
    "mlp": (hwaware.models.MlpConfig(blocks=8, hidden=768), Size(8, 8, 32)),
}


@cleaning_up_when_terminated()
def main() -> int:
    """Measure; writes the results, prints them, and returns 1 if a bound is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", default="homogeneous.json")
    parser.add_argument("--steps", type=int, default=16, help="measured steps of each mapping")
    arguments = parser.parse_args()
    install_runtime()
    rows = []
    for profile in measured():
        origin = environment(kernel_reference(profile.environment))
        for name in MODELS:
            rows.append(against_alpa(name, profile, arguments.steps))
            print(json.dumps({key: rows[-1][key] for key in SHOWN}), flush=True)
    results = {
        "environment": origin,
        "load_average_after": list(os.getloadavg()),
        "scenario": SCENARIO,
        "bound": BOUND,
        "models": rows,
    }
    with open(arguments.output, "w") as stream:
        json.dump(results, stream, indent=1)
        stream.write("\n")
    return 0 if all(row["met"] for row in rows) else 1


def measured() -> Iterator[Any]:
    """The profile of a testbed of equal hosts, for as long as it is used."""
    with testbed.running(SCENARIO) as bed, running_environment(bed.driver_environment()):
        bed.enter()
        with ray_cluster.connect(bed.address):
            yield profiler.profile(bed.address, quick=True)


def against_alpa(name: str, profile: Any, steps: int) -> Dict[str, Any]:
    """hwaware's mapping over Alpa's, step by step in turn."""
    config, size = MODELS[name]
    model = hwaware.models.make(config)
    runs = []
    try:
        runs.append(TrainingRun("hwaware", model, profile, *size))
        alpas = hwaware.placement.plan(runs[0].workload, profile, num_microbatches=size.microbatches, solver="alpa")
        runs.append(TrainingRun("alpa", model, profile, *size, plan=alpas))
        for run in runs:
            run.wait_until_compiled()
        predictions = {run.name: hwaware.evaluate(run.plan, run.workload, profile).step_s for run in runs}
        ours, theirs = measure(runs, steps, 2, kernel_reference(profile.environment), predictions)
    finally:
        for run in runs:
            run.close()
    same_plan = mapping_of(runs[0].plan) == mapping_of(alpas)
    ratio = ratio_interval(ours.relative_steps, theirs.relative_steps)
    return {
        "model": name,
        "size": size._asdict(),
        "mappings": {run.name: mapping_of(run.plan) for run in runs},
        "same_plan": same_plan,
        "predicted_step_s": predictions,
        "step_s": {"hwaware": ours.step_s, "alpa": theirs.step_s},
        "reference_s": {"hwaware": ours.reference_s, "alpa": theirs.reference_s},
        "ratio": ratio._asdict(),
        "met": same_plan or ratio.median <= BOUND,
        # The interval tells a mapping that is slower from two runs that differ by chance.
        "surely_slower": ratio.low > BOUND,
    }


if __name__ == "__main__":
    sys.exit(main())
