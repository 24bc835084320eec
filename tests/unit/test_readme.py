"""What the README says can be run runs, and what it links to is there."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hwaware.cli import main

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()


def test_the_recorded_example_prints_what_the_readme_says():
    blocks = re.findall(r"```python\n((?:(?!```).)*)```\n+prints\n+```\n(.*?)```", TEXT, re.DOTALL)
    assert len(blocks) == 1
    code, expected = blocks[0]
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
    ).stdout
    assert found == expected


def test_every_local_link_resolves():
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", TEXT) if "://" not in link]
    assert len(links) >= 4
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_commands_are_those_of_the_makefile():
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"^make (\w+)", TEXT, re.MULTILINE)
    assert named == ["env", "demo", "test"]
    assert set(named) <= set(targets)


COMMANDS = [
    shlex.split(line, comments=True)[1:]
    for block in re.findall(r"```\n(hwaware .*?)```", TEXT, re.DOTALL)
    for line in block.splitlines()
]
# What stands in for files that a person has by then: the recorded ones.
FILES = {
    "cluster.json": "profiling/recorded/fast-and-slow.json",
    "workload.json": "profiling/recorded/gpt-8-layers.json",
    "before.json": "benchmarks/results/demo/result.json",
    "after.json": "benchmarks/results/demo/result.json",
}
# What needs a cluster, JAX or root is run by tests/ray, tests/alpa and tests/testbed; here its options have to exist.
NOT_RUN = ("profile", "trace", "testbed")


def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for name, source in FILES.items():
        shutil.copy(ROOT / source, name)
    ran = [arguments for arguments in COMMANDS if arguments[0] not in NOT_RUN]
    names = ["doctor", "plan", "evaluate", "simulate", "show", "compare", "estimate"]
    assert [arguments[0] for arguments in ran] == names
    for arguments in ran:
        outcome = CliRunner().invoke(main, arguments)
        assert outcome.exit_code == 0, f"{arguments}: {outcome.output}"
    assert {path.name for path in tmp_path.iterdir()} == {*FILES, "plan.json", "trace.json", "plan.html"}


@pytest.mark.parametrize("arguments", [each for each in COMMANDS if each[0] in NOT_RUN], ids=lambda each: each[0])
def test_the_other_commands_and_their_options_exist(arguments):
    command = main
    for word in arguments:
        if isinstance(command, click.Group):
            command = command.get_command(click.Context(command), word)
            assert command is not None, arguments
    options = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in arguments if word.startswith("-")} <= options
