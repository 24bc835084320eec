"""benchmarks/testbed_steps.py: what is there already is not measured again, and becomes rows of the table."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import msgspec
import pytest
from builders import chain, cluster, script, workload

import hwaware
from hwaware.bench.training import TrainingRun
from hwaware.costs.speed import prediction_at_speed_s
from hwaware.workload import MeasuredTime


@pytest.fixture(scope="module")
def scripts():
    return script("testbed_steps"), script("predictions")


SECONDS = 0.1


def profile_of(seconds):
    return cluster({"a": 2}, inside=(1e9, 0.01), seconds=seconds)


def measured_row(sends, slower, seconds=SECONDS):
    """A row whose steps took `slower` times what is predicted for them, on a machine at half the profile's speed.

    Its two messages of 10 ms on the way there and back take as long as ever.
    """
    profile, work = profile_of(seconds), workload(2, 4, output_bytes=8)
    plan = chain("a:0", "a:1", num_microbatches=3)
    predicted = hwaware.simulate(plan, work, profile, sends=sends).step_s
    now = hwaware.simulate(plan, work, profile_of(2 * seconds), sends=sends).step_s
    assert predicted < now < 2 * predicted
    documents = {
        name: json.loads(one.to_json()) for name, one in (("plan", plan), ("workload", work), ("cluster", profile))
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
    rows = [
        measured_row(sends, slower, seconds)
        for sends, slower in (("overlapped", 1.0), ("blocking", 1.25))
        for seconds in (SECONDS, 2 * SECONDS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [steps.key_of(row)[3] for row in steps.read(path)] == ["overlapped"] * 2 + ["blocking"] * 2
    assert steps.corrected_s(rows[0]) == pytest.approx(rows[0]["step_s"][0])
    wrong, wrong_too, right, right_too = predictions.testbed_rows()
    assert right[1:] == right_too[1:]  # no stage of either plan has replicas
    assert "no stage with replicas" in right_too.data_set
    assert wrong[1:] == wrong_too[1:]
    assert (right.n, right.largest) == (2, pytest.approx(0, abs=1e-9))
    assert "overlapped" in right.data_set
    assert wrong.bias == pytest.approx(-0.2)


def test_the_layers_beside_the_steps_are_timed_by_each_devices_own_times(scripts, monkeypatch):
    """As the runs of `hwaware bench` do: two devices of one kind whose layers take unlike times."""
    pytest.importorskip("flax")
    steps, _ = scripts
    times = {name: {"1,1": MeasuredTime(forward_s=s, backward_s=s)} for name, s in (("cpu", 1.0), ("a:1", 3.0))}
    asked = []

    class Run(TrainingRun):
        def __init__(self, name, *_, **__):
            self.name, self.plan = name, chain("a:0", "a:1", num_microbatches=3)
            self.workload = workload(2, 4, measured=times)

        @contextlib.contextmanager
        def _reference(self, *given):
            asked.append(given)
            yield None

        def reference(self, workload, profile):
            return self._reference(workload, profile)

        def wait_until_compiled(self):
            pass

        def close(self):
            pass

    monkeypatch.setattr(steps, "TrainingRun", Run)
    monkeypatch.setattr(steps.alpa_mapping, "alpa_plan", lambda *_: None)
    monkeypatch.setattr(steps, "measured_rows", lambda name, *_: [name])
    assert list(steps.rows_of_model("mlp", ["hwaware"], profile_of(SECONDS))) == ["hwaware"]
    [(work, profile)] = asked
    assert len({device.kind for device in profile.devices}) == 2
    assert {device.kind for device in profile.devices} <= set(work.layers[0].measured)


def test_plans_whose_passes_are_short_are_a_row_of_their_own(scripts, tmp_path, monkeypatch):
    steps, predictions = scripts
    path = tmp_path / "steps.jsonl"
    monkeypatch.setattr(predictions, "STEPS", path)
    long = [measured_row("overlapped", 1.0, seconds) for seconds in (SECONDS, 2 * SECONDS)]
    quick = [json.loads(profile_of(seconds / 10).to_json()) for seconds in (SECONDS, 2 * SECONDS)]
    short = [{**row, "cluster": cluster} for row, cluster in zip(long, quick)]
    assert [steps.is_short(row) for row in (*long, *short)] == [False, False, True, True]
    path.write_text("".join(json.dumps(row) + "\n" for row in (*long, *short)))
    found = {one.data_set.split(", ")[3].split(" (")[0]: one for one in predictions.testbed_rows()}
    assert {kind: one.n for kind, one in found.items()} == {
        "all": 4, "longer passes": 2, "passes of a few quota periods": 2,
    }  # fmt: skip
    assert found["longer passes"].largest == pytest.approx(0, abs=1e-9)
    assert found["passes of a few quota periods"].bias < -0.5, "its steps are those of the long ones"


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
