"""What users meet first when something is wrong: one message with "To fix:", exit code 2, nothing left running."""

import json
from importlib import metadata

import pytest
from click.testing import CliRunner

from hwaware.cli import main


def refused(*arguments, code=2):
    outcome = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert outcome.exit_code == code, outcome.output
    assert outcome.stdout == ""
    message = outcome.stderr.splitlines()[-1]  # lines of progress may come before it
    assert message.startswith("Error: ")
    assert outcome.stderr.count("To fix:") == 1
    assert "Traceback" not in outcome.output
    return message


def test_an_unknown_scenario():
    message = refused("testbed", "up", "slow-and-fast")
    assert "'slow-and-fast'" in message
    assert "fast-and-slow" in message


def test_no_ray_at_the_address(tmp_path):
    pytest.importorskip("ray")
    message = refused("profile", "--address", "127.0.0.1:1", "-o", tmp_path / "cluster.json")
    assert "127.0.0.1:1" in message
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_is_none(tmp_path):
    pytest.importorskip("ray")
    assert "nowhere" in refused("profile", "--address", "nowhere", "-o", tmp_path / "cluster.json")


def version_of(found):
    def version(name):
        if name == "alpa":
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found
        return "1"

    return version


@pytest.mark.parametrize(("found", "words"), [(None, "Alpa is not installed"), ("0.1.7", "Alpa 0.1.7 is installed")])
def test_alpa_is_missing_or_of_another_version(found, words, monkeypatch, tmp_path):
    pytest.importorskip("pyroute2")
    monkeypatch.setattr(metadata, "version", version_of(found))
    message = refused("demo", "--output", tmp_path / "demo")
    assert words in message
    assert "expected version 0.2.3" in message
    assert not (tmp_path / "demo").exists()


@pytest.fixture
def files(tmp_path):
    curve = {"float32": [{"flops": 1e9, "seconds": 0.01}]}
    device = {"kind": "cpu", "memory_bytes": 1 << 30, "throughput": curve}
    link = {"source": "a", "target": "b", "latency_s": 1e-4, "bandwidth_bytes_per_s": 1e8}
    layer = {"name": "0", "forward_flops": 1e9, "backward_flops": 2e9, "parameter_bytes": 4e6, "output_bytes": 1e5}
    documents = {
        "cluster": {
            "schema": "hwaware.cluster",
            "schema_version": 1,
            "hosts": [{"name": "a"}, {"name": "b"}],
            "devices": [{"id": "a:0", "host": "a", **device}, {"id": "b:0", "host": "b", **device}],
            "links": [link],
        },
        "workload": {
            "schema": "hwaware.workload",
            "schema_version": 1,
            "name": "m",
            "microbatch_size": 4,
            "dtype": "float32",
            "layers": [{**layer, "activation_bytes": 1e6}, {**layer, "activation_bytes": 1e6}],
        },
        "plan": {
            "schema": "hwaware.plan",
            "schema_version": 1,
            "num_microbatches": 4,
            "stages": [{"layers": [0, 1], "replicas": [{"devices": ["mars:0"]}]}],
        },
    }
    for name, document in documents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    return {name: tmp_path / f"{name}.json" for name in documents}


def test_a_plan_that_names_an_unknown_device(files):
    message = refused("evaluate", files["cluster"], files["workload"], files["plan"])
    assert "mars:0" in message


def test_files_in_the_wrong_order(files):
    message = refused("evaluate", files["workload"], files["cluster"], files["plan"])
    assert "has schema 'hwaware.workload', expected 'hwaware.cluster'" in message


def test_a_file_that_is_not_there(files, tmp_path):
    assert "none.json" in refused("show", tmp_path / "none.json")


def test_a_model_that_fits_on_no_device_is_an_answer(files, tmp_path):
    """Status in the file, one line on standard error, exit code 0."""
    workload = json.loads(files["workload"].read_text())
    workload["layers"][1]["parameter_bytes"] = 1e12
    files["workload"].write_text(json.dumps(workload))
    arguments = ["plan", files["cluster"], files["workload"], "-o", tmp_path / "plan.json", "--microbatches", 4]
    outcome = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert outcome.exit_code == 0
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["status"], plan["stages"]) == ("infeasible", [])
    assert outcome.stderr.count("\n") == 1
    assert "To fix:" in outcome.stderr


@pytest.mark.parametrize(
    "arguments", [("bench", "127.0.0.1:1", "--within"), ("drain", "host", "--address", "127.0.0.1:1", "--timeout")]
)
def test_nan_is_in_no_range(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, [*arguments, "nan"])
    assert outcome.exit_code == 2
    assert "nan is not a number" in outcome.stderr
    assert list(tmp_path.iterdir()) == []
