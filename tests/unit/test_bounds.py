"""Numbers that no cluster, model or step has: each is refused by one message that names file, place and bound."""

import copy
import json
import math
import sys

import pytest
from builders import DATA, ROOT, chain, cluster, layer, workload
from click.testing import CliRunner

import hwaware
from hwaware import ClusterProfile, Plan, Timeline, Workload, evaluate, simulate
from hwaware.cli import main
from hwaware.cli.show import load_any
from hwaware.costs import with_microbatch_size
from hwaware.costs.speed import at_speed
from hwaware.errors import RecordError, UnusableInputError
from hwaware.placement.microbatches import _sizes
from hwaware.records import MOST_PREDICTED
from hwaware.result import BenchmarkResult


def documents():
    """Valid files as JSON, one a record."""
    placed, model, profile = chain("a:0", "b:0"), workload(), cluster()
    made = json.loads(profile.to_json())
    made["collectives"] = [
        {"op": "all-reduce", "devices": ["a:0", "b:0"], "dtype": "float32", "points": [{"bytes": 1e3, "seconds": 1e-3}]}
    ]
    mapping = {"name": "hwaware", "plan": json.loads(placed.to_json()), "predicted_step_s": 1.0}
    mapping.update(step_s=[1.0, 1.1], loss=[1.0], reference_s=[0.1, 0.1])
    result = {"schema": "hwaware.benchmark", "schema_version": 1, "environment": {}, "scenario": "s", "model": "m"}
    result.update(num_microbatches=4, repeats=2, mappings=[mapping])
    timeline = simulate(placed, model, profile)
    return {
        ClusterProfile: made,
        Workload: json.loads(model.to_json()),
        Plan: json.loads(placed.to_json()),
        BenchmarkResult: result,
        Timeline: json.loads(timeline.to_json()),
    }


DOCUMENTS = documents()
DEEP = json.loads("[" * 100 + "]" * 100)
CASES = [
    (Workload, ("layers", 0, "parameter_bytes"), 1.7e308, "at most 1e+21: no model has that"),
    (Workload, ("layers", 0, "output_bytes"), 1.7e308, "at most 1e+21"),
    (Workload, ("layers", 1, "forward_flops"), 1e31, "at most 1e+30"),
    # msgspec 0.18 and 0.20, the last for Python 3.8 and 3.9, leave the number to the record, which names the field.
    (
        Workload,
        ("layers", 1, "forward_flops"),
        10**400,
        "at `$.layers[1].forward_flops`" if sys.version_info >= (3, 10) else "forward_flops of layer '1' is inf",
    ),
    (Workload, ("layers", 0, "tensor_parallel_collectives"), 1e10, "at most 1e+09"),
    (Workload, ("layers", 0, "measured"), {"cpu": {"1,1": {"forward_s": 1e9, "backward_s": 1}}}, "at most 1e+08"),
    (Workload, ("layers", 0, "name"), "x" * 2000, "has 2000 characters, expected at most 1000"),
    (Plan, ("predicted_step_s",), -1.0, "predicted_step_s is -1.0"),
    (Plan, ("bound_s",), 1e300, "at most 1e+50"),
    (Plan, ("stages", 0, "compute_s"), -1.0, "compute_s is -1.0"),
    (Plan, ("stages", 0, "gradient_sync_s"), -1.0, "gradient_sync_s is -1.0"),
    (Plan, ("stages", 0, "memory_bytes"), -1.0, "memory_bytes is -1.0"),
    (Plan, ("stages", 0, "receive_s"), -1e9, "receive_s is -1000000000.0"),
    (Plan, ("stages", 1, "layers", 1), 10**400, "layers is more than 10000"),
    (Plan, ("microbatch_size",), 10**400, "microbatch_size is more than"),
    (ClusterProfile, ("devices", 0, "throughput", "float32", 0), {"flops": 1e30, "seconds": 1e-15}, "at most 1e+24"),
    (ClusterProfile, ("collectives", 0, "op"), "dance", "op is 'dance', expected one of send, all-reduce"),
    (ClusterProfile, ("collectives", 0, "devices"), ["a:0", "a:0"], "'a:0' occurs more than once"),
    (ClusterProfile, ("collectives", 0, "devices"), [], "a collective has no devices"),
    (ClusterProfile, ("environment",), {"reference_s": {"a": 1}}, "environment.reference_s: Expected `float | null`"),
    (ClusterProfile, ("environment",), {"x": DEEP}, "environment is nested more than 32 levels deep"),
    (ClusterProfile, ("devices", 0, "samples"), DEEP, "samples of device 'a:0' is nested"),
    (ClusterProfile, ("links", 0, "evidence"), {"x": DEEP}, "evidence of link 'a' -> 'b' is nested"),
    (BenchmarkResult, ("environment",), {"profile_reference_s": "x"}, "environment.profile_reference_s: Expected"),
    (BenchmarkResult, ("environment",), {"testbed": {"shaped": 7}}, "environment.testbed.shaped: Expected"),
    (BenchmarkResult, ("num_microbatches",), -4, "num_microbatches is -4"),
    (BenchmarkResult, ("repeats",), -4, "repeats is -4"),
    (BenchmarkResult, ("alpa_orders",), [{"hosts": ["a"], "predicted_step_s": -1.0}], "predicted_step_s is -1.0"),
    (BenchmarkResult, ("mappings", 0, "step_s", 1), 1e300, "at most 1e+08"),
    (BenchmarkResult, ("mappings", 0, "starts"), [1, -1], "a value of the starts is -1"),
    (BenchmarkResult, ("mappings", 0, "slowdowns"), {"cpu": [1.0, 1e300]}, "at most 1e+06"),
    (BenchmarkResult, ("mappings", 0, "profile_reference_s"), -0.1, "profile_reference_s is -0.1"),
    (Timeline, ("events", 0, "end_s"), -1.0, "end_s is -1.0, expected at least start_s, 0.0"),
    (Timeline, ("events", 0, "start_s"), -1e9, "start_s is -1000000000.0"),
    (Timeline, ("events", 0, "stage"), 2, "event 0 is of stage 2, expected 0 to 1"),
    (Timeline, ("events", 0, "microbatch"), 10**400, "microbatch is more than"),
    (Timeline, ("num_microbatches",), -1, "num_microbatches is -1"),
    (Timeline, ("step_s",), 1e300, "at most 1e+50"),
]


def replaced(document, path, value):
    changed = copy.deepcopy(document)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize(("record", "path", "value", "expected"), CASES, ids=lambda value: str(value)[:30])
def test_a_number_beyond_sense_is_refused_by_name(record, path, value, expected):
    assert record.from_json(json.dumps(DOCUMENTS[record]))
    with pytest.raises(RecordError) as caught:
        record.from_json(json.dumps(replaced(DOCUMENTS[record], path, value)), name="file.json")
    message = str(caught.value)
    assert message.startswith(f"file.json is not a valid {record.SCHEMA} file: ")
    assert expected in message
    assert len(path) == 1 or " at `$" in message or "event 0" in message
    assert "To fix:" in message
    assert len(message) < 600


def test_a_bound_above_the_objective_is_refused():
    document = {**DOCUMENTS[Plan], "objective_s": 1.0, "bound_s": 1.1}
    with pytest.raises(RecordError, match=r"bound_s is 1.1, expected at most objective_s, 1.0"):
        Plan.from_json(json.dumps(document))
    assert Plan.from_json(json.dumps({**document, "bound_s": 1.0 + 1e-9})), "rounding"


@pytest.mark.parametrize("key", ["ts", "dur"])
def test_a_timestamp_of_hundreds_of_digits(key, tmp_path):
    trace = Timeline.from_json(json.dumps(DOCUMENTS[Timeline])).trace()
    trace["traceEvents"][-1][key] = 10**400
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    outcome = CliRunner().invoke(main, ["show", str(tmp_path / "trace.json")])
    assert outcome.exit_code == 2, outcome.output
    assert "trace.json is not a trace that hwaware wrote: " in outcome.stderr
    assert "at `$.traceEvents[" in outcome.stderr


def test_the_largest_valid_numbers_have_a_finite_price():
    """Bounds are so chosen that no sum of them overflows."""
    layers = dict.fromkeys(("parameter_bytes", "output_bytes", "activation_bytes", "batch_bytes"), 1e21)
    model = json.loads(workload(2).to_json())
    model["layers"] = [{**layer, **layers, "forward_flops": 1e30, "backward_flops": 1e30} for layer in model["layers"]]
    profile = json.loads(cluster().to_json())
    for device in profile["devices"]:
        device["throughput"] = {"float32": [{"flops": 1e5, "seconds": 1e8}]}
    for link in profile["links"]:
        link.update(bandwidth_bytes_per_s=1e-3, latency_s=1e8)
    placed = chain("a:0", "b:0", num_microbatches=10**9)
    cost = evaluate(placed, Workload.from_json(json.dumps(model)), ClusterProfile.from_json(json.dumps(profile)))
    # Ten thousand such layers instead of two.
    assert math.isfinite(cost.step_s)
    assert cost.step_s * 5_000 < MOST_PREDICTED
    assert cost.stages[0].memory_bytes * 5_000 < MOST_PREDICTED


def test_a_billion_microbatches_are_priced_and_not_simulated():
    placed = chain("a:0", "b:0", num_microbatches=10**9)
    assert evaluate(placed, workload(), cluster()).step_s > 1e9
    with pytest.raises(UnusableInputError, match="6000000000 passes and messages, the simulator runs at most 300000"):
        simulate(placed, workload(), cluster())


def test_every_recorded_file_still_loads():
    files = [path for folder in ("benchmarks", "profiling", "docs") for path in (ROOT / folder).rglob("*.json")]
    schemas = (b'"hwaware.', b"traceEvents")
    ours = [path for path in [*files, *DATA.glob("*.json")] if any(one in path.read_bytes()[:200] for one in schemas)]
    assert len(ours) > 20
    for path in ours:
        load_any(str(path))


def test_an_open_number_of_microbatches_keeps_to_the_bounds():
    """Layers grow with the microbatches, and a billion has few divisors."""
    large = workload([layer(output_bytes=1e21)])
    with pytest.raises(
        UnusableInputError, match=r"no model has microbatches of 8 samples like those of 'model': output_"
    ):
        with_microbatch_size(large, cluster(), 8)
    assert sorted(_sizes(10**9, 1))[-2:] == [5 * 10**8, 10**9]
    assert sorted(_sizes(12, 1)) == [1, 2, 3, 4, 6, 12]
    for choices in ({"num_microbatches": None, "global_batch": 10**18}, {"num_microbatches": 10**10}):
        with pytest.raises(UnusableInputError, match=str(10**9)):
            hwaware.plan(workload(), cluster(), **choices)


def test_references_beyond_sense_are_one_message():
    with pytest.raises(RecordError, match=r"no machine was 1e\+17 times as slow"):
        at_speed(workload(), cluster(), 1e17)
