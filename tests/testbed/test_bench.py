"""`hwaware bench` on a testbed of two hosts: from the command line to the result file and the report."""

import json
import os
import subprocess
import sys

import pytest

from hwaware.bench import testbed
from hwaware.result import BenchmarkResult

pytestmark = pytest.mark.testbed

# The command, but with short measurements: the test looks at the way of the figures, not at their truth.
COMMAND = """
from hwaware import profiler
from hwaware.calibration import timers, timing
from hwaware.cli import main
timers._READING_S = timing._READING_S = 0.05
profiler.QUICK = profiler.QUICK._replace(sizes=(128, 256, 512), rests=4, message_bytes=(1 << 10, 1 << 16, 1 << 22))
main()
"""
SCENARIO = """
shares = { a = 0.8, b = 0.4 }
default_mbit = 400
"""


@pytest.fixture
def run(tmp_path):
    """Runs `hwaware bench` on two hosts; returns the process, the results' directory and what it printed."""
    path = tmp_path / "pair.toml"
    path.write_text(SCENARIO)

    def run(*options):
        line = [sys.executable, "-c", COMMAND, "bench", str(path), "-o", str(tmp_path / "out"), "--json", *options]
        sizes = ["--model", "mlp", "--blocks", "3", "--hidden", "64", "--microbatches", "2"]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [*line, *sizes], env=environment, capture_output=True, text=True, timeout=400, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return tmp_path / "out", json.loads(done.stdout), done.stderr

    return run


def test_two_hosts_from_the_command_line_to_the_report(run):
    before = {bed.name for bed in testbed.list_testbeds()}
    directory, document, told = run("--mappings", "hwaware,alpa", "--orders", "1", "--repeats", "2", "--quick")
    result = BenchmarkResult.load(directory / "pair-mlp.json")
    names = [name for mapping in result.mappings for name in mapping.names]
    assert "hwaware" in names
    assert any(name.startswith("alpa-") for name in names)
    assert all(len(mapping.step_s) == len(mapping.reference_s) == 2 for mapping in result.mappings)
    assert all(mapping.timeline.events for mapping in result.mappings)
    assert len(result.alpa_orders) == 2
    assert 0 < result.ideal_step_s <= min(mapping.predicted_step_s for mapping in result.mappings) * (1 + 1e-9)
    assert {device.id for device in result.profile.devices} == {"a:0", "b:0"}
    assert len(result.environment["load_average_during"]) == 2
    figures = document["results"]["pair-mlp.json"]
    assert figures["losses_agree"]
    assert figures["speed_ups"]["alpa"]["outcome"] != "losses differ"
    assert "round 2 of 2" in told
    assert "<svg" in (directory / "index.html").read_text()
    assert {path.name for path in directory.glob("*.png")} >= {
        "speed-ups.png",
        "pair-mlp-map.png",
        "pair-mlp-steps.png",
    }
    assert {bed.name for bed in testbed.list_testbeds()} <= before
