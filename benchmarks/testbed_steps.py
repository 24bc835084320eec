"""Predicted against measured training steps on testbeds, in both orders in which a runtime can send.

    python benchmarks/testbed_steps.py               (root; about half an hour; goes on where it was interrupted)
    python benchmarks/testbed_steps.py --only fast-and-slow

For each scenario and model: the cluster is profiled, the model's layers are timed once on its fastest device and
carried over to the others, and several plans are trained, each with overlapped and with blocking sends, in turns with
the reference kernel beside each step. A prediction is corrected by the reference kernel alone: its time beside the
steps over its time beside the profile. Nothing is fitted to the measured steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

import hwaware
import hwaware.models
from hwaware import profiler, ray_cluster
from hwaware.bench import alpa_mapping, testbed
from hwaware.bench.demo import environment, running_environment
from hwaware.bench.harness import measure
from hwaware.bench.training import TrainingRun
from hwaware.patching.activation import install_runtime
from hwaware.plans import Plan
from hwaware.reference_kernel import reference_s
from hwaware.runtime import settings

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "testbed_steps"
SCENARIOS = ("fast-and-slow", "four-equal", "two-racks", "one-bad-link", "directed", "small-memory")
ORDERS = ("overlapped", "blocking")
REPEATS, WARMUP = 6, 1
# Seen on two cores: a testbed with its profile, a model with its layers timed, a plan in both orders.
SCENARIO_S, MODEL_S, PLAN_S = 60, 25, 40


class Case(NamedTuple):
    """A model, cut into layers and microbatches."""

    config: Any
    num_layers: int
    num_microbatches: int
    microbatch_size: int


CASES: Dict[str, Case] = {
    "gpt": Case(hwaware.models.GptConfig(hidden=384, heads=6, sequence=64), 8, 8, 4),
    "mlp": Case(hwaware.models.MlpConfig(blocks=16, hidden=1024), 8, 12, 64),
    "wresnet": Case(hwaware.models.WresnetConfig(blocks=6, width=32, image=32), 6, 6, 4),
}
PLANS = ("hwaware", "alpa-given")


def main() -> int:
    """Measure what is not there yet; prints every row as it comes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="Only these scenarios.")
    parser.add_argument("--model", action="append", choices=sorted(CASES), help="Only these models.")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    chosen.output.mkdir(parents=True, exist_ok=True)
    models = chosen.model or list(CASES)
    wanted = {scenario: missing(chosen.output, scenario, models) for scenario in chosen.only or SCENARIOS}
    left_s = sum(SCENARIO_S * bool(names) + len(names) * (MODEL_S + PLAN_S * len(PLANS)) for names in wanted.values())
    print(f"about {left_s / 60:.0f} minutes", flush=True)
    install_runtime()
    for scenario, names in wanted.items():
        if names:
            measure_scenario(scenario, names, chosen.output)
    return 0


def missing(output: Path, scenario: str, models: Sequence[str]) -> List[str]:
    """The models that were not measured to the end on that scenario."""
    return [model for model in models if not (output / f"{scenario}-{model}.json").exists()]


def measure_scenario(scenario: str, models: Sequence[str], output: Path) -> None:
    """Each model on one testbed; its file is written when all of its plans are measured."""
    with testbed.running(scenario) as bed, running_environment(bed.driver_environment()):
        bed.enter()
        with ray_cluster.connect(bed.address):
            profile = profiler.profile(bed.address, quick=True)
            for model in models:
                start = time.monotonic()
                document = measure_model(scenario, model, profile)
                (output / f"{scenario}-{model}.json").write_text(json.dumps(document, indent=1) + "\n")
                print(f"{scenario} {model}: {time.monotonic() - start:.0f} s", flush=True)


def measure_model(scenario: str, model_name: str, profile: Any) -> Dict[str, Any]:
    """All plans of one model in both orders."""
    case = CASES[model_name]
    model = hwaware.models.make(case.config)
    sizes = (case.num_layers, case.num_microbatches, case.microbatch_size)
    first = TrainingRun("overlapped", model, profile, *sizes, measure=True)
    workload, rows = first.workload, []
    plans = {"hwaware": first.plan, **alpas(workload, profile, case.num_microbatches)}
    for name, plan in plans.items():
        runs = [first] if name == "hwaware" else []
        try:
            for sends in ORDERS[len(runs) :]:
                with settings.using(sends=sends):
                    runs.append(TrainingRun(sends, model, profile, *sizes, plan))
            for run in runs:
                run.wait_until_compiled()
            rows += measured_rows(name, plan, runs, workload, profile)
        finally:
            for run in runs:
                run.close()
    return {
        "scenario": scenario,
        "model": model_name,
        "environment": environment(profile),
        "cluster": json.loads(profile.to_json()),
        "workload": json.loads(workload.to_json()),
        "rows": rows,
    }


def alpas(workload: Any, profile: Any, num_microbatches: int) -> Dict[str, Plan]:
    """Alpa's own mapping in some host orders."""
    orders = alpa_mapping.host_orders([device.id for device in profile.devices])
    return {
        f"alpa-{name}": alpa_mapping.alpa_plan(workload, profile, num_microbatches, order)
        for name, order in orders.items()
        if f"alpa-{name}" in PLANS
    }


def measured_rows(
    name: str, plan: Plan, runs: Sequence[TrainingRun], workload: Any, profile: Any
) -> Iterator[Dict[str, Any]]:
    """One row for each order of sends."""
    predicted = {run.name: hwaware.simulate(plan, workload, profile, sends=run.name).step_s for run in runs}
    before = reference_s(repeats=3)
    alone = runs[0].alone_s()
    beside = (before + reference_s(repeats=3)) / 2
    closed_form = hwaware.evaluate(plan, workload, profile).step_s
    for mapping in measure(runs, REPEATS, WARMUP, lambda: reference_s(repeats=1), predicted):
        reference = (profile.environment or {})["reference_s"]
        corrected = mapping.corrected_prediction_s(reference)
        row = {
            "plan_name": name,
            "sends": mapping.name,
            "plan": json.loads(plan.to_json()),
            "evaluated_s": closed_form,
            "simulated_s": mapping.predicted_step_s,
            "alone_s": alone,
            "alone_reference_s": beside,
            "profile_reference_s": reference,
            "step_s": mapping.step_s,
            "reference_s": mapping.reference_s,
        }
        error = corrected / statistics.median(mapping.step_s) - 1
        print(f"  {name} {mapping.name}: {statistics.median(mapping.step_s):.3f} s, predicted {error:+.1%}", flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
