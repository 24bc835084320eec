"""hwaware plan and hwaware evaluate on hand-written files."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from hwaware import Plan
from hwaware.cli import main

DATA = Path(__file__).parent.parent / "data"
FILES = [str(DATA / "cluster_three.json"), str(DATA / "workload_six_layers.json")]


def run(*arguments):
    """The command's exit code and both outputs, kept apart whatever the version of click."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
        main([str(a) for a in arguments])
    return SimpleNamespace(exit_code=ended.value.code or 0, stdout=out.getvalue(), stderr=err.getvalue())


def test_plan_writes_a_plan_and_prints_it(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # a process of pytest-xdist says 80
    done = run("plan", *FILES, "-o", tmp_path / "plan.json", "--microbatches", 8)
    assert done.exit_code == 0, done.stderr
    found = Plan.load(tmp_path / "plan.json")
    assert found.status == "optimal"
    assert "forward [ms]" in done.stdout
    assert "optimal: no plan is better" in done.stdout
    assert done.stderr == ""
    assert found.predicted_step_s < Plan.from_json(run_json("plan", "--solver", "even")).predicted_step_s


def run_json(command, *options):
    done = run(command, *FILES, "--microbatches", 8, "--json", *options)
    assert done.exit_code == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "options", [(), ("--solver", "proportional"), ("--objective", "alpa"), ("--schedule", "gpipe")]
)
def test_json_is_the_plan_and_evaluate_agrees(tmp_path, options):
    document = run_json("plan", "-o", tmp_path / "plan.json", *options)
    found = Plan.from_json(document)
    priced = run("evaluate", *FILES, tmp_path / "plan.json", "--json")
    assert priced.exit_code == 0, priced.stderr
    assert json.loads(priced.stdout)["step_s"] == found.predicted_step_s


def test_a_plan_that_is_priced_elsewhere_loses_its_proof(tmp_path):
    slow = json.loads((DATA / "cluster_three.json").read_text())
    for device in slow["devices"]:
        for points in device["throughput"].values():
            for point in points:
                point["seconds"] *= 10
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    best = Plan.from_json(run_json("plan", "--objective", "per-device", "-o", tmp_path / "plan.json"))
    assert best.status == "optimal"
    done = run("evaluate", tmp_path / "slow.json", FILES[1], tmp_path / "plan.json", "-o", tmp_path / "priced.json")
    assert done.exit_code == 0, done.stderr
    priced = Plan.load(tmp_path / "priced.json")
    devices = sum(len(stage.devices) for stage in priced.stages)
    assert priced.predicted_step_s > best.predicted_step_s
    assert priced.objective_s == pytest.approx(priced.predicted_step_s * devices)
    assert (priced.status, priced.bound_s) == ("feasible", None)
    for device in slow["devices"]:
        device["memory_bytes"] = 1000
    (tmp_path / "small.json").write_text(json.dumps(slow))
    done = run("evaluate", tmp_path / "small.json", FILES[1], tmp_path / "plan.json", "-o", tmp_path / "priced.json")
    over = Plan.load(tmp_path / "priced.json")
    assert over.status == "infeasible"
    assert over.reason.startswith("Memory: ")
    done = run("evaluate", *FILES, tmp_path / "priced.json", "-o", tmp_path / "again.json")
    again = Plan.load(tmp_path / "again.json")
    assert (again.status, again.reason, again.objective_s) == ("feasible", None, best.objective_s)


def test_evaluate_prints_a_table_for_a_plan_written_by_hand(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    done = run("evaluate", *FILES, DATA / "plan_by_hand.json")
    assert done.exit_code == 0, done.stderr
    assert len(set(re.findall(r"(?:forward|backward|receive|sync|update) \[(\w*s)\]", done.stdout))) == 1
    assert len(set(re.findall(r"(?:memory|limit) \[(\w*B)\]", done.stdout))) == 1
    assert re.search(r"^Predicted step: .*, to compare plans; ", done.stdout, re.M)
    assert re.search(r"^Likely step: .*, to expect in training; ", done.stdout, re.M)
    assert "middle:0" in done.stdout
    assert "one microbatch every" in done.stdout


def test_infeasible_is_an_answer(tmp_path):
    cluster = json.loads((DATA / "cluster_three.json").read_text())
    for device in cluster["devices"]:
        device["memory_bytes"] = 1000
    (tmp_path / "small.json").write_text(json.dumps(cluster))
    done = run("plan", tmp_path / "small.json", FILES[1], "-o", tmp_path / "plan.json", "--microbatches", 8)
    assert done.exit_code == 0
    assert done.stdout == ""
    assert done.stderr.startswith("Infeasible. Memory: layer 0 ")
    assert done.stderr.count("\n") == 1
    assert Plan.load(tmp_path / "plan.json").status == "infeasible"
    refused = run("evaluate", tmp_path / "small.json", FILES[1], tmp_path / "plan.json")
    assert refused.exit_code == 2
    assert "the plan has no stages" in refused.stderr
    assert refused.stderr.count("To fix:") == 1


def test_explain_needs_no_file_to_write():
    result = run("plan", *FILES, "--microbatches", 8, "--explain")
    assert result.exit_code == 0, result.output
    assert "The step takes " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("plan", *FILES, "--microbatches", 8), "There is nowhere to write the plan to. To fix: give -o plan.json"),
        (("plan", *FILES, "--microbatches", 0, "--json"), "--microbatches is '0', expected a number of at least 1"),
        (("plan", *FILES, "--microbatches", "open", "--json"), "--microbatches is open without --global-batch."),
        (
            ("plan", *FILES, "--microbatches", 8, "--json", "--reserve", "2.1GB"),
            "reserve_bytes (--reserve) is 2.1e+09",
        ),
        (("plan", *FILES, "--microbatches", 8, "--json", "--reserve", "1..2"), "'1..2' is no number of bytes"),
        (("plan", *FILES, "--microbatches", 8, "--json", "--pin", "0=slow", "--pin", "0=fast"), "layer '0' twice"),
        (("plan", *FILES, "--microbatches", 8, "--json", "--exclude", "moon"), "cannot exclude 'moon'"),
        (("plan", FILES[0], "missing.json", "--microbatches", 8), "missing.json cannot be read"),
        (("evaluate", *FILES, FILES[0]), "has schema 'hwaware.cluster', expected 'hwaware.plan'"),
    ],
)
def test_unusable_input_is_one_message(arguments, said):
    done = run(*arguments)
    assert done.exit_code == 2
    assert said in done.stderr
    assert "To fix:" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_table_tells_replicas_from_tensor_parallel_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    stages = [{"layers": [0, 2], "replicas": [{"devices": ["fast:0"]}, {"devices": ["middle:0"]}]}]
    stages.append({"layers": [3, 5], "replicas": [{"devices": ["slow:0"]}]})
    plan = {"schema": "hwaware.plan", "schema_version": 1, "num_microbatches": 4, "stages": stages}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = run("evaluate", *FILES, tmp_path / "plan.json")
    assert "fast:0 | middle:0" in done.stdout, done.stdout
    assert "| stands between replicas (data parallelism)." in done.stdout
    assert "tensor parallelism" not in done.stdout


def test_a_reserve_leaves_memory_free(tmp_path):
    cluster = json.loads((DATA / "cluster_three.json").read_text())
    for device in cluster["devices"]:
        device["memory_bytes"] = 10**9
    (tmp_path / "cluster.json").write_text(json.dumps(cluster))
    ask = ("plan", tmp_path / "cluster.json", FILES[1], "--microbatches", 8, "--json", "--reserve")
    free, half, nearly_all = (Plan.from_json(run(*ask, size).stdout) for size in ("0", "0.5 GB", "999999kB"))
    assert max(stage.memory_bytes for stage in free.stages) <= 10**9
    assert max(stage.memory_bytes for stage in half.stages) <= 5 * 10**8
    assert nearly_all.status == "infeasible"
    assert "Each device keeps 1.000 GB free, as asked" in nearly_all.reason


def test_excluding_a_host_leaves_it_idle():
    found = Plan.from_json(run_json("plan", "--exclude", "slow"))
    assert all("slow:0" not in stage.devices for stage in found.stages)
