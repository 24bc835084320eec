"""benchmarks/testbed_steps.py: what is there already is not measured again, and becomes rows of the table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import msgspec
import pytest

import hwaware
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs.speed import prediction_at_speed_s
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, Workload

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def scripts():
    """Both scripts; they are files for people, not a package."""
    loaded = []
    for name in ("testbed_steps", "predictions"):
        spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        loaded.append(module)
    yield loaded
    for name in ("testbed_steps", "predictions"):
        del sys.modules[name]


SECONDS = 0.1


def profile_of(seconds):
    devices = tuple(
        Device(id=f"a:{k}", host="a", kind="cpu", memory_bytes=1 << 30,
               throughput={"float32": (MatrixProduct(flops=1e9, seconds=seconds),)}) for k in range(2)
    )  # fmt: skip
    link = Link(source="a", target="a", latency_s=0.01, bandwidth_bytes_per_s=1e9)
    return ClusterProfile(hosts=(Host(name="a"),), devices=devices, links=(link,))


def measured_row(sends, slower):
    """A row whose steps took `slower` times what is predicted for them, on a machine at half the profile's speed.

    Its two messages of 10 ms on the way there and back take as long as ever.
    """
    profile = profile_of(SECONDS)
    layer = Layer(
        name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=8, activation_bytes=0
    )
    workload = Workload(name="two", microbatch_size=4, dtype="float32", layers=(layer, layer))
    stages = tuple(Stage(layers=(k, k), replicas=(Replica(devices=(f"a:{k}",)),)) for k in range(2))
    plan = Plan(num_microbatches=3, stages=stages)
    predicted = hwaware.simulate(plan, workload, profile, sends=sends).step_s
    now = hwaware.simulate(plan, workload, profile_of(2 * SECONDS), sends=sends).step_s
    assert predicted < now < 2 * predicted
    documents = {
        name: json.loads(one.to_json()) for name, one in (("plan", plan), ("workload", workload), ("cluster", profile))
    }
    return {
        "scenario": "four-equal", "model": "gpt", "plan_name": "hwaware", "sends": sends, "simulated_s": predicted,
        "step_s": [now * slower] * 3, "reference_s": [0.06] * 3, "profile_reference_s": 0.03, **documents,
    }  # fmt: skip


def test_rows_of_the_table_come_from_what_was_recorded(scripts, tmp_path, monkeypatch):
    steps, predictions = scripts
    path = tmp_path / "steps.jsonl"
    assert steps.read(path) == []
    monkeypatch.setattr(predictions, "STEPS", path)
    assert predictions.testbed_rows() == []
    rows = [measured_row("overlapped", 1.0), measured_row("blocking", 1.25)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [steps.key_of(row)[3] for row in steps.read(path)] == ["overlapped", "blocking"]
    assert steps.corrected_s(rows[0]) == pytest.approx(rows[0]["step_s"][0])
    wrong, wrong_too, right, right_too = predictions.testbed_rows()
    assert right[1:] == right_too[1:]  # no stage of either plan has replicas
    assert "no stage with replicas" in right_too.data_set
    assert wrong[1:] == wrong_too[1:]
    assert (right.n, right.largest) == (1, pytest.approx(0, abs=1e-9))
    assert "overlapped" in right.data_set
    assert wrong.bias == pytest.approx(-0.2)


def test_plans_whose_passes_are_short_are_a_row_of_their_own(scripts, tmp_path, monkeypatch):
    steps, predictions = scripts
    path = tmp_path / "steps.jsonl"
    monkeypatch.setattr(predictions, "STEPS", path)
    long = measured_row("overlapped", 1.0)
    short = {**long, "cluster": json.loads(profile_of(SECONDS / 10).to_json())}
    assert (steps.is_short(long), steps.is_short(short)) == (False, True)
    path.write_text("".join(json.dumps(row) + "\n" for row in (long, short)))
    found = {one.data_set.split(", ")[3].split(" (")[0]: one for one in predictions.testbed_rows()}
    assert {kind: one.n for kind, one in found.items()} == {
        "all": 2, "longer passes": 1, "passes of a few quota periods": 1,
    }  # fmt: skip
    assert found["longer passes"].largest == pytest.approx(0, abs=1e-9)
    assert found["passes of a few quota periods"].bias < -0.5, "its steps are those of the long one"


def test_results_beside_another_reference_kernel_are_no_rows(scripts, tmp_path, monkeypatch):
    """Their steps are set against the kernel that ran beside their profile; today's is another one."""
    _, predictions = scripts
    old = hwaware.BenchmarkResult.load(Path(__file__).parent / "data" / "result-2026-11-20.json")
    monkeypatch.setattr(predictions, "BENCH", tmp_path)
    old.save(tmp_path / "old.json")
    assert predictions.bench_rows() == []
    for name in (predictions.LAYERS, predictions.NAME):
        environment = {**old.environment, "reference_kernel": name}
        msgspec.structs.replace(old, environment=environment).save(tmp_path / f"{name}.json")
    found = predictions.bench_rows()
    errors = [abs(prediction_at_speed_s(one, old) / one.median_step_s - 1) for one in old.mappings]
    assert [(one.n, one.largest) for one in found] == [(2 * len(errors), pytest.approx(max(errors)))] * 2
    assert ["gpt, 2 results" in one.data_set for one in found] == [True, False]  # of the model, and of all


def test_every_scenario_of_the_benchmark_exists(scripts):
    from hwaware.bench.testbed.scenarios import shipped_names

    assert set(scripts[0].SCENARIOS) <= set(shipped_names())
    assert len(scripts[0].SCENARIOS) * len(scripts[0].CASES) * len(scripts[0].PLANS) >= 30
