"""Predicted against measured training steps on testbeds, in both orders in which a runtime can send.

    python benchmarks/testbed_steps.py               (root; about half an hour; goes on where it was interrupted)
    python benchmarks/testbed_steps.py --only fast-and-slow

For each scenario and model: the cluster is profiled, the model's layers are timed on its devices, and several plans
are trained, each with overlapped and with blocking sends, in turns. Beside each round of steps the layers are timed
again, on three of four hosts at a time, and predictions are corrected by that alone: the layers' time beside the steps
over their time in the workload. Nothing is fitted to the measured steps.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence, Tuple

import msgspec

import hwaware
import hwaware.models
from hwaware import ray_cluster
from hwaware.activation import install_runtime
from hwaware.bench import alpa_mapping, testbed
from hwaware.bench.environment import environment, running_environment
from hwaware.bench.harness import measure
from hwaware.bench.profiling import profile as measured_profile
from hwaware.bench.training import TrainingRun
from hwaware.cli._run import cleaning_up_when_terminated
from hwaware.cluster import ClusterProfile
from hwaware.costs.own_times import with_own_kinds
from hwaware.costs.speed import at_speed
from hwaware.errors import HwawareError
from hwaware.plans import Plan
from hwaware.reference_kernel import Reference
from hwaware.runtime import settings
from hwaware.timeline import Sends, Timeline
from hwaware.workload import Workload

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "testbed_steps.jsonl"
SCENARIOS = ("fast-and-slow", "four-equal", "two-racks", "one-bad-link", "directed", "unequal-devices")
ORDERS: Tuple[Sends, ...] = ("overlapped", "blocking")
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
    "mlp": Case(hwaware.models.MlpConfig(blocks=16, hidden=1024), 8, 12, 192),
    "wresnet": Case(hwaware.models.WresnetConfig(blocks=6, width=32, image=32), 6, 8, 6),
    "wresnet-18": Case(hwaware.models.WresnetConfig(blocks=6, width=32, image=32), 6, 8, 18),
}
# A share of a core is a quota in periods of 20 ms. A pass of a few periods takes up to one more or less than its share
# of the time says, by where in a period it begins; replicas wait for the one that took most.
SHORT_S = 8 * 20e-3
PLANS = ("hwaware", "alpa-given")


@cleaning_up_when_terminated()
def main() -> int:
    """Measure what is not there yet; every plan's row is kept as soon as there is one. Prints the table at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="Only these scenarios.")
    parser.add_argument("--model", action="append", choices=sorted(CASES), help="Only these models.")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    chosen.output.parent.mkdir(parents=True, exist_ok=True)
    done = {key_of(row) for row in read(chosen.output)}
    missing: Dict[str, Dict[str, List[str]]] = {}
    for scenario, model, plan in itertools.product(chosen.only or SCENARIOS, chosen.model or CASES, PLANS):
        if any((scenario, model, plan, sends) not in done for sends in ORDERS):
            missing.setdefault(scenario, {}).setdefault(model, []).append(plan)
    left_s = sum(
        SCENARIO_S + sum(MODEL_S + PLAN_S * len(plans) for plans in models.values()) for models in missing.values()
    )
    print(f"about {left_s / 60:.0f} minutes", flush=True)
    install_runtime()
    for scenario, models in missing.items():
        for row in rows_of(scenario, models):
            with chosen.output.open("a") as stream:
                stream.write(json.dumps(row) + "\n")
    return 0


def read(path: Path) -> List[Dict[str, Any]]:
    """The rows that are there."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def key_of(row: Dict[str, Any]) -> Tuple[str, str, str, str]:
    """What a row is about."""
    return row["scenario"], row["model"], row["plan_name"], row["sends"]


def rows_of(scenario: str, models: Dict[str, List[str]]) -> Iterator[Dict[str, Any]]:
    """The plans of each model on one testbed."""
    with testbed.running(scenario) as bed, running_environment(bed.driver_environment()):
        bed.enter()
        with ray_cluster.connect(bed.address):
            profile = measured_profile(bed.address, quick=True, say=print)
            for model, plans in models.items():
                try:
                    for row in rows_of_model(model, plans, profile):
                        yield {"scenario": scenario, "model": model, **row}
                except HwawareError as error:  # the others can still be measured; this one is missing from the table
                    print(f"{scenario} {model}: {error}", file=sys.stderr, flush=True)


def rows_of_model(model_name: str, names: Sequence[str], profile: Any) -> Iterator[Dict[str, Any]]:
    """Plans of one model in both orders."""
    case = CASES[model_name]
    model = hwaware.models.make(case.config)
    sizes = (case.num_layers, case.num_microbatches, case.microbatch_size)
    first = TrainingRun("overlapped", model, profile, *sizes, measure=True)
    workload, profile = with_own_kinds(first.workload, profile)
    hosts = [host.name for host in profile.hosts]
    alpas = alpa_mapping.alpa_plan(workload, profile, case.num_microbatches, hosts)
    plans = dict(zip(PLANS, (first.plan, alpas)))
    with contextlib.closing(first), first.reference(workload, profile) as reference:
        for name in names:
            runs = [first] if name == "hwaware" else []
            with contextlib.ExitStack() as stack:
                for sends in ORDERS[len(runs) :]:
                    with settings.runtime_settings(sends=sends):
                        runs.append(TrainingRun(sends, model, profile, *sizes, plans[name]))
                    stack.callback(runs[-1].close)
                for run in runs:
                    run.wait_until_compiled()
                yield from measured_rows(name, runs, workload, profile, reference)


def measured_rows(
    name: str, runs: Sequence[TrainingRun], workload: Any, profile: Any, reference: Reference
) -> Iterator[Dict[str, Any]]:
    """One row for each order of sends."""
    plan = runs[0].plan
    predicted = {run.name: hwaware.simulate(plan, workload, profile, sends=order(run)).step_s for run in runs}
    for run in runs:
        run.step()  # a worker's share begins with its first step
    before_s = reference.now().seconds
    alone = tuple(runs[0].alone_s())
    facts = {
        "plan_name": name,
        "plan": json.loads(plan.to_json()),
        "evaluated_s": hwaware.evaluate(plan, workload, profile).step_s,
        "alone_s": alone,
        "alone_reference_s": (before_s + reference.now().seconds) / 2,
        "profile_reference_s": reference.usual_s,
        "cluster": slim(profile),
        "workload": json.loads(workload.to_json()),
        "environment": environment(reference),
    }
    for mapping in measure(runs, REPEATS, WARMUP, reference, predicted):
        row = {
            **facts,
            "sends": mapping.name,
            "simulated_s": mapping.predicted_step_s,
            "step_s": mapping.step_s,
            "pipeline_s": mapping.pipeline_s,
            "reference_s": mapping.reference_s,
            "slowdowns": mapping.slowdowns,
            "events": events_of(next(run for run in runs if run.name == mapping.name)),
        }
        error = corrected_s(row) / statistics.median(mapping.predictable_s) - 1
        print(
            f"  {name} {mapping.name}: {statistics.median(mapping.step_s):.3f} s, pipeline predicted {error:+.1%}",
            flush=True,
        )
        yield row


def events_of(run: TrainingRun) -> List[Tuple[str, int, int, float, float]]:
    """What one more step did, event by event: kind, stage, microbatch, start and end [s]."""
    timelines: List[Timeline] = []
    with run.recorded(timelines):
        run.step()
    return [
        (event.kind, event.stage, event.microbatch, round(event.start_s, 5), round(event.end_s, 5))
        for event in timelines[0].events
    ]


def order(run: TrainingRun) -> Sends:
    """The order in which a run sends; it is named after it."""
    return "blocking" if run.name == "blocking" else "overlapped"


def corrected_s(row: Dict[str, Any]) -> float:
    """What is predicted for the recorded plan from the recorded profile and layer times.

    At the speed that the machine had beside the steps, by the reference; links are as fast as they were.
    """
    plan = msgspec.convert(row["plan"], Plan)
    step_s: float = hwaware.simulate(plan, *beside_the_steps(row), sends=row["sends"]).step_s
    return step_s


def is_short(row: Dict[str, Any]) -> bool:
    """Whether both passes of the slowest stage take less than `SHORT_S` together, as predicted."""
    plan = msgspec.convert(row["plan"], Plan)
    stages = hwaware.evaluate(plan, *beside_the_steps(row)).stages
    return max(stage.compute_s for stage in stages) < SHORT_S


def beside_the_steps(row: Dict[str, Any]) -> Tuple[Workload, ClusterProfile]:
    """The recorded workload and profile at the speed that the machine had beside the steps."""
    workload = msgspec.convert(row["workload"], Workload)
    profile = msgspec.convert(row["cluster"], ClusterProfile)
    factor = statistics.median(row["reference_s"]) / row["profile_reference_s"]
    of_kinds = {kind: statistics.median(factors) for kind, factors in row.get("slowdowns", {}).items()}
    return at_speed(workload, profile, factor, of_kinds)


def slim(profile: Any) -> Dict[str, Any]:
    """The profile without its raw samples."""
    document: Dict[str, Any] = json.loads(profile.to_json())
    for entry in (*document["devices"], *document["links"]):
        entry.pop("samples" if "throughput" in entry else "evidence", None)
    return {name: document[name] for name in ("schema", "schema_version", "hosts", "devices", "links")}


if __name__ == "__main__":
    sys.exit(main())
