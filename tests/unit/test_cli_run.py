"""What all commands share: one JSON document, Ctrl-C, no colour without a terminal, widths, completion."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hwaware import _version
from hwaware.cli import _run, main
from hwaware.cli.completion import SHELLS, completion_script

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
CLUSTER, WORKLOAD, PLAN = (
    str(DATA / name) for name in ("cluster_three.json", "workload_six_layers.json", "plan_by_hand.json")
)
RESULT = str(ROOT / "benchmarks" / "results" / "demo" / "result.json")
# Every command that needs neither JAX, Ray nor root, with arguments.
QUICK = {
    "plan": [CLUSTER, WORKLOAD, "--microbatches", "4"],
    "evaluate": [CLUSTER, WORKLOAD, PLAN],
    "simulate": [CLUSTER, WORKLOAD, PLAN, "-o", "trace.json"],
    "show": [CLUSTER],
    "compare": [RESULT, RESULT],
    "estimate": ["memory", WORKLOAD, "--devices", "2"],
    "completion": ["bash"],
    "testbed": ["list"],
}


@pytest.mark.parametrize("name", QUICK)
def test_one_document_on_standard_output(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(main, [name, *QUICK[name], "--json"])
    assert outcome.exit_code == 0, outcome.output
    assert isinstance(json.loads(outcome.stdout), dict)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("columns", ["60", "100"])
def test_tables_fit_and_have_no_colour(name, columns, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", columns)
    outcome = CliRunner().invoke(main, [name, *QUICK[name]] + (["-o", "plan.json"] if name == "plan" else []))
    assert outcome.exit_code == 0, outcome.output
    assert "\x1b" not in outcome.output
    if name in ("show", "evaluate", "compare"):
        assert max(len(line) for line in outcome.stdout.splitlines()) <= int(columns)


@click.command()
@_run.json_option
@_run.reports_errors
def noisy(as_json):
    """Prints as libraries do, and through the file descriptor as C does."""
    print("from a library")
    subprocess.run([sys.executable, "-c", "print('from a child')"], check=True)
    os.write(1, b"from C\n")
    _run.print_json({"answer": 42})


def test_noise_goes_to_standard_error():
    code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from test_cli_run import noisy; noisy()"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environment)
    assert json.loads(done.stdout) == {"answer": 42}
    assert set(done.stderr.split("\n")) >= {"from a library", "from a child", "from C"}


WAITS = """
import signal, time, click
from hwaware.cli import _run
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore it (nohup), and so its children do
@click.command()
@_run.reports_errors
def command():
    print("ready", flush=True)
    try:
        with _run.waiting("Waiting ..."):
            time.sleep(60)
    finally:
        print("cleaned up", flush=True)
command()
"""


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [(signal.SIGINT, 130, "Interrupted.\n"), (signal.SIGTERM, 143, ""), (signal.SIGHUP, 129, "")],
)
def test_ctrl_c_and_termination_clean_up(number, code, message):
    command = [sys.executable, "-c", WAITS]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as running:
        try:
            assert running.stdout.readline() == "ready\n"
            time.sleep(0.1)  # until it sleeps
            running.send_signal(number)
            done, said = running.communicate(timeout=20)
        finally:
            running.kill()
    assert (running.returncode, done, said) == (code, "cleaned up\n", message)


def test_a_long_wait_has_one_line_and_a_short_one_none(monkeypatch, capsys):
    with _run.waiting("Searching ..."):
        pass
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(_run, "_SILENT_S", 0.0)
    end_s, said = time.monotonic() + 20, ""
    with _run.waiting("Searching ..."):
        while not said and time.monotonic() < end_s:
            time.sleep(0.01)
            out, said = capsys.readouterr()
            assert out == ""
    assert said == "Searching ...\n"


SWALLOWS = """
import gc, os, signal, sys, types, click
from hwaware.cli import _run
def send():
    os.kill(os.getpid(), int(sys.argv.pop()))
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "optional":
            return importlib.util.spec_from_loader(name, self)
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        send()
        for _ in range(1000):  # handlers run between instructions
            pass
        module.whole = True
class Dropped:
    def __del__(self):
        send()
        for _ in range(1000):
            pass
import importlib.util
sys.meta_path.insert(0, Finder())
@click.command()
@_run.reports_errors
def command():
    try:
        if sys.argv[1] == "import":
            try:
                import optional
            except BaseException:
                optional = None
            print("whole" if optional and optional.whole else "broken", flush=True)
        elif sys.argv[1] == "destructor":
            Dropped()
        else:
            try:
                send()
                for _ in range(1000):
                    pass
            except BaseException as error:
                if sys.argv[1] == "as Ray":  # a call of Ray keeps KeyboardInterrupt alone
                    raise error if isinstance(error, KeyboardInterrupt) else SystemExit(1)
                raise TypeError("no such dtype") from error
        import time
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
command([])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("where", ["import", "destructor", "another error", "as Ray"])
def test_a_signal_ends_a_command_although_other_code_drops_its_exception(where, number, code):
    command = [sys.executable, "-c", SWALLOWS, where, str(int(number))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=20, check=False)
    expected = "whole\ncleaned up\n" if where == "import" else "cleaned up\n"
    assert (done.returncode, done.stdout, "SystemExit" in done.stderr) == (code, expected, False)


@pytest.mark.parametrize("shell", SHELLS)
def test_completion(shell):
    assert "_HWAWARE_COMPLETE" in completion_script(shell)


def test_completion_knows_commands_and_options():
    environment = {**os.environ, "_HWAWARE_COMPLETE": "bash_complete", "COMP_WORDS": "hwaware pl", "COMP_CWORD": "1"}
    code = "from hwaware.cli import main; main(prog_name='hwaware')"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert done.stdout.split() == ["plain,plan"]


def test_the_version_comes_from_one_place():
    assert CliRunner().invoke(main, ["--version"]).stdout == f"hwaware, version {_version.__version__}\n"
    places = [path for path in Path(_version.__file__).parent.rglob("*.py") if "__version__ = " in path.read_text()]
    assert [path.name for path in places] == ["_version.py"]
    assert "_version.py" in (ROOT / "setup.py").read_text()
