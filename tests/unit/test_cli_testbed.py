"""Which testbeds a command is about: by name, by scenario, or all."""

import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hwaware.bench import testbed
from hwaware.cli import main


@pytest.fixture
def beds(monkeypatch):
    """Three testbeds that are only said to be there; returns the names that were taken down."""
    names = {"fast-and-slow-a1": "fast-and-slow", "two-racks-b2": "two-racks", "mine": "two-racks"}

    def bed(name, scenario):
        document = {
            "name": name, "scenario": scenario, "status": "running", "address": "10.0.0.1:1",
            "hosts": [{"name": "a", "address": "10.0.0.2", "devices": [], "runs_ray": name != "mine"}],
            "driver_environment": {"RAY_AUTH_MODE": "token"}, "enter_command": ["a shell"] if name == "mine" else [],
        }  # fmt: skip
        return SimpleNamespace(name=name, scenario=SimpleNamespace(name=scenario), describe=lambda: document)

    down = []
    monkeypatch.setattr(testbed, "list_testbeds", lambda: [bed(*one) for one in names.items()])
    monkeypatch.setattr(testbed, "down", lambda name: down.append(name) or True)
    return down


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["mine"], ["mine"]),
        (["fast-and-slow"], ["fast-and-slow-a1"]),
        (["two-racks", "--all"], ["two-racks-b2", "mine"]),
        (["--all"], ["fast-and-slow-a1", "two-racks-b2", "mine"]),
    ],
)
def test_testbeds_are_taken_down_by_name_or_scenario(beds, arguments, expected):
    outcome = CliRunner().invoke(main, ["testbed", "down", *arguments])
    assert (outcome.exit_code, beds) == (0, expected), outcome.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["two-racks"], "2 testbeds are up: two-racks-b2, mine."),
        ([], "3 testbeds are up"),
        (["directed"], "There is no testbed 'directed'."),
    ],
)
def test_what_could_be_several_or_none_is_refused(beds, arguments, message):
    outcome = CliRunner().invoke(main, ["testbed", "down", *arguments])
    assert (outcome.exit_code, beds) == (2, [])
    assert message in outcome.stderr
    assert "To fix: " in outcome.stderr


@pytest.mark.parametrize("scenario", ["two-racks", "two-racks.toml"])
def test_testbeds_of_a_scenario_are_listed(beds, scenario, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "two-racks.toml").write_text("shares = { a = 0.5 }\ndefault_mbit = 1")
    outcome = CliRunner().invoke(main, ["testbed", "list", scenario])
    names, hosts, exports = (outcome.stdout.splitlines()[first::3] for first in range(3))
    assert [line.partition(":")[0] for line in names] == ["two-racks-b2", "mine"]
    assert ["Ray does not run there" in line for line in hosts] == [False, True]
    commands = [line.partition(": ")[2] for line in exports]
    assert commands == [f"export RAY_ADDRESS=10.0.0.1:1 RAY_AUTH_MODE=token{then}" for then in ("", " && 'a shell'")]


ENTERS = """
import sys
from types import SimpleNamespace
from hwaware.bench import testbed
from hwaware.bench.testbed import namespaces

def enter():
    sys.exit("alone" if namespaces.has_one_thread() and "numpy" not in sys.modules else "too late")

testbed.find = lambda address: SimpleNamespace(driver_environment=dict, enter=enter)
from hwaware.cli import main
main()
"""


@pytest.mark.parametrize("command", [["profile", "--json"], ["drain", "h0"]])
def test_commands_enter_a_testbed_before_any_thread_starts(command, monkeypatch):
    """Libraries such as NumPy start threads, and Linux moves no process with threads into a user namespace."""
    line = [sys.executable, "-c", ENTERS, *command, "--address", "10.0.0.1:1"]
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == "alone\n"


def test_a_name_that_cannot_be_is_refused_before_anything_is_said(monkeypatch, tmp_path):
    pytest.importorskip("ray")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    outcome = CliRunner().invoke(main, ["testbed", "up", "two-racks", "--kind", "loopback", "--name", "../x"])
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("Error: '../x' is no name for a testbed.")


def test_scenarios_are_listed_also_beside_testbeds(beds, monkeypatch):
    said = CliRunner().invoke(main, ["testbed", "list"]).stdout.splitlines()[-1]
    assert said == f"Scenarios: {', '.join(testbed.shipped_names())}"
    monkeypatch.setattr(testbed, "list_testbeds", list)
    assert CliRunner().invoke(main, ["testbed", "list"]).stdout == f"No testbed is up. {said}\n"


def test_a_scenario_that_is_missing_is_refused_before_the_start(tmp_path):
    outcome = CliRunner().invoke(main, ["testbed", "up", str(tmp_path / "none.toml")])
    assert outcome.exit_code == 2
    assert "Starting" not in outcome.stderr


def test_a_scenario_without_testbeds_and_one_that_is_none(beds):
    outcome = CliRunner().invoke(main, ["testbed", "list", "directed"])
    assert outcome.stdout == "No testbed of directed is up. Start one with: hwaware testbed up directed\n"
    outcome = CliRunner().invoke(main, ["testbed", "list", "none.toml"])
    assert outcome.exit_code == 2
    assert "none.toml cannot be read: No such file or directory. To fix: " in outcome.stderr
