"""What every command keeps to: exit codes, one message, an empty standard output when refused, progress, no colour."""

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from hwaware import errors
from hwaware.cli import COMMANDS, _run, main

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
CLUSTER, WORKLOAD, PLAN = (
    str(DATA / name) for name in ("cluster_three.json", "workload_six_layers.json", "plan_by_hand.json")
)


def leaves(name, command):
    if isinstance(command, click.Group):
        return [pair for inner, member in command.commands.items() for pair in leaves(f"{name} {inner}", member)]
    return [(name, command)]


ALL = [pair for name in COMMANDS for pair in leaves(name, main.get_command(click.Context(main), name))]


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("name", "command"), ALL, ids=[name for name, _ in ALL])
def test_every_command_takes_json_and_says_what_it_does(name, command):
    options = {option for parameter in command.params for option in parameter.opts}
    assert "--json" in options
    assert command.help
    assert all(p.help for p in command.params if isinstance(p, click.Option) and p.name not in ("solver", "schedule"))


# Arguments or files that each command cannot work with, and a word of what it says about them.
REFUSED = (
    (["profile", "--address", "nowhere", "-o", "c.json"], "nowhere"),
    (["profile", "--address", "local", "--dtype", "float7", "-o", "c.json"], "float7"),
    (["profile", "--address", "local"], "nowhere to write"),
    (["trace", "bert", "-o", "w.json"], "bert"),
    (["trace", "nosuch:thing", "-o", "w.json"], "nosuch"),
    (["trace", "gpt", "--blocks", "0", "-o", "w.json"], "blocks"),
    (["plan", CLUSTER, WORKLOAD, "--microbatches", "0", "-o", "p.json"], "--microbatches"),
    (["plan", CLUSTER, WORKLOAD, "--microbatches", "many", "-o", "p.json"], "many"),
    (["plan", CLUSTER, WORKLOAD, "--microbatches", "4", "--max-devices-per-stage", "0", "-o", "p.json"], "0"),
    (["plan", CLUSTER, WORKLOAD, "--microbatches", "4", "--time-limit", "nan", "-o", "p.json"], "nan"),
    (["plan", CLUSTER, WORKLOAD, "--microbatches", "4", "--exclude", "mars", "-o", "p.json"], "mars"),
    (["plan", CLUSTER, WORKLOAD, "--microbatches", "4", "--pin", "fast", "-o", "p.json"], "--pin"),
    (["plan", CLUSTER, WORKLOAD, "--microbatches", "4", "--solver", "oracle", "-o", "p.json"], "oracle"),
    (["evaluate", WORKLOAD, CLUSTER, PLAN], "expected 'hwaware.cluster'"),
    (["simulate", CLUSTER, PLAN, WORKLOAD, "-o", "t.json"], "expected 'hwaware.workload'"),
    (["simulate", CLUSTER, WORKLOAD, PLAN], "--output"),
    (["show", "none.json"], "none.json"),
    (["show", str(DATA)], "directory"),
    (["show", PLAN, "--picture", "map"], "--plot"),
    (["show", PLAN, "--plot", "x.svg", "--html", "./x.svg"], "x.svg and ./x.svg are one file"),
    (["compare", CLUSTER, WORKLOAD], "hwaware.workload"),
    (["estimate", "sync", WORKLOAD, "--bytes", "1GB"], "expected 'hwaware.cluster'"),
    (["estimate", "memory", CLUSTER], "expected 'hwaware.workload'"),
    (["estimate", "iterations", CLUSTER], "global_batch"),
    (["estimate", "refit", CLUSTER], "expected 'hwaware.benchmark'"),
    (["estimate", "refit", CLUSTER, "-o", "x.json", "--workload", "x.json"], "one file"),
    (["estimate", "refit", CLUSTER, "--workload", "/dev/null/x.json"], "cannot be written"),
    (["import", "alpa-db", CLUSTER, "-o", "c.json"], "pickle"),
    (["import", "nccl-tests", PLAN, "--into", CLUSTER, "-o", "c.json"], "nccl-tests"),
    (["export", "alpa-db", WORKLOAD, "-o", "db.pkl"], "expected 'hwaware.cluster'"),
    (["testbed", "up", "slow-and-fast"], "slow-and-fast"),
    (["testbed", "down", "no such testbed"], "no such testbed"),
    (["demo", "-o", CLUSTER], "is a file"),
    (["drain", "h1", "--address", "nowhere"], "nowhere"),
    (["doctor", "--address", "nowhere"], "'nowhere' is not the address of a Ray cluster"),
    (["bench", "-o", CLUSTER], "is a file"),
    (["bench", "slow-and-fast"], "slow-and-fast"),
    (["bench", "slow-and-fast", "--faults"], "slow-and-fast"),
    (["bench", "two-racks", "--mappings", "alpha"], "alpha"),
    (["completion", "tcsh"], "tcsh"),
    (["nosuch"], "nosuch"),
)


@pytest.mark.parametrize("as_json", [[], ["--json"]], ids=["words", "json"])
@pytest.mark.parametrize(("arguments", "says"), REFUSED, ids=[" ".join(case[0][:2]) for case in REFUSED])
def test_what_cannot_be_worked_with_is_one_message_and_2(arguments, says, as_json, tmp_path, monkeypatch):
    if "--address" in arguments and "nowhere" in arguments:
        pytest.importorskip("ray")
    if arguments[0] == "bench":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    needs_output = "nowhere to write" in says and as_json  # --json is a place to write to
    outcome = run(*arguments, *as_json) if not needs_output else run(*arguments)
    assert outcome.exit_code == 2, outcome.output
    assert outcome.stdout == ""
    assert [line for line in outcome.stderr.splitlines() if line.startswith("Error: ")] == outcome.stderr.splitlines()[
        -1:
    ]
    assert says in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert list(tmp_path.iterdir()) == []


REPLACING = (
    ["plan", "cluster", "workload", "--microbatches", "4", "-o", "cluster"],
    ["plan", "cluster", "workload", "--microbatches", "4", "-o", "../{folder}/workload"],
    ["evaluate", "cluster", "workload", "plan", "-o", "workload"],
    ["simulate", "cluster", "workload", "plan", "-o", "plan"],
    ["show", "cluster", "--html", "./cluster"],
    ["export", "alpa-db", "cluster", "-o", "cluster"],
    ["import", "iperf3", "workload", "plan", "-o", "plan"],
    ["import", "alpa-db", "plan", "-o", "plan"],
    ["trace", "mlp", "--measure", "cluster", "-o", "cluster"],
)


@pytest.mark.parametrize("arguments", REPLACING, ids=[" ".join(each[:2]) for each in REPLACING])
def test_no_output_replaces_what_the_command_reads(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, source in (("cluster", CLUSTER), ("workload", WORKLOAD), ("plan", PLAN)):
        (tmp_path / name).write_bytes(Path(source).read_bytes())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    outcome = run(*(word.format(folder=tmp_path.name) for word in arguments))
    assert outcome.exit_code == 2, outcome.output
    assert "which the command reads. To fix: give the output a path of its own." in outcome.stderr
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_plan_may_be_priced_in_place(tmp_path):
    plan = tmp_path / "plan.json"
    plan.write_bytes(Path(PLAN).read_bytes())
    assert run("evaluate", CLUSTER, WORKLOAD, plan, "-o", plan).exit_code == 0
    assert json.loads(plan.read_text())["predicted_step_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["mlp", "--hidden", "9" * 20], "Maximum allowed dimension exceeded"),
        (["wresnet", "--image", "4" + 6 * "0"], "Unable to allocate"),
        (["mlp", "--microbatch-size", "9" * 20], "no model has that"),
    ],
)
def test_sizes_beyond_all_models_are_refused(arguments, says, tmp_path):
    pytest.importorskip("flax")
    outcome = run("trace", *arguments, "-o", tmp_path / "w.json")
    assert outcome.exit_code == 2, outcome.output
    assert f"Error: A model {arguments[0]} of these sizes cannot be traced: " in outcome.stderr
    assert says in outcome.stderr


@pytest.mark.parametrize("name", [name for name, _ in ALL])
def test_an_unknown_option_is_2_and_help_is_0(name):
    refused = run(*name.split(), "--no-such-option")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "--no-such-option" in refused.stderr
    told = run(*name.split(), "--help")
    assert (told.exit_code, told.stderr) == (0, "")
    assert f"{name} [OPTIONS]" in told.stdout


def takes_a_file(command):
    return any(p.name == "output" and not getattr(p.type, "dir_okay", True) for p in command.params)


@pytest.mark.parametrize("name", [name for name, command in ALL if takes_a_file(command)])
def test_an_unwritable_output_is_refused_before_the_work(name, tmp_path, monkeypatch):
    """The other arguments are unusable too: had the command begun, it would have spoken of them."""
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    command = dict(ALL)[name]
    given = ["none.json" for p in command.params if isinstance(p, click.Argument)]
    given += [word for p in command.params if p.required and p.opts[0].startswith("--") for word in (p.opts[0], "none")]
    outcome = run(*name.split(), *given, "-o", "file/out.json")
    assert outcome.exit_code == 2, outcome.output
    assert outcome.stderr.startswith(f"Error: file/out.json cannot be written: {tmp_path / 'file'} is not a folder.")


OUTCOMES = (
    (errors.HwawareError("It broke.", "try again."), 1, "Error: It broke. To fix: try again.\n"),
    (errors.MeasurementError("A host is gone.", "start it."), 1, "Error: A host is gone. To fix: start it.\n"),
    (errors.UnusableInputError("It is bad.", "mend it."), 2, "Error: It is bad. To fix: mend it.\n"),
    (KeyboardInterrupt(), 130, "Interrupted.\n"),
    (
        OSError(errno.ENOSPC, "No space left on device"),
        1,
        "Error: The output cannot be written: No space left on device. To fix: free space on the disk.\n",
    ),
    (None, 0, ""),
)


@pytest.mark.parametrize(("error", "code", "words"), OUTCOMES, ids=[type(case[0]).__name__ for case in OUTCOMES])
def test_how_a_command_ends(error, code, words):
    @click.command()
    @_run.reports_errors
    def ends():
        if error is not None:
            raise error

    outcome = CliRunner().invoke(ends, [])
    assert (outcome.exit_code, outcome.stderr, outcome.stdout) == (code, words, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plan", "--help"], ["show", CLUSTER]])
def test_output_on_a_full_disk_is_one_message(arguments, unbuffered):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "hwaware", *arguments]
        shown = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    message = "Error: The output cannot be written: No space left on device. To fix: free space on the disk.\n"
    assert (shown.returncode, shown.stderr) == (1, message)


def test_characters_that_the_output_lacks_are_escaped(tmp_path):
    document = json.loads(Path(WORKLOAD).read_text())
    (tmp_path / "workload.json").write_text(json.dumps({**document, "name": "Größe"}))
    outcome = CliRunner(charset="ascii").invoke(main, ["show", str(tmp_path / "workload.json")])
    assert outcome.exit_code == 0, outcome.exception
    assert outcome.stdout.startswith(r"Workload Gr\xf6\xdfe: ")
    without_utf8 = {**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": "C", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "hwaware", "show", tmp_path / "workload.json"]
    shown = subprocess.run(command, env=without_utf8, capture_output=True, text=True, timeout=60, check=False)
    assert shown.stdout.startswith(r"Workload Gr\xf6\xdfe: "), shown.stderr


def on_a_terminal(code, *arguments):
    """What a process prints on standard output, and what it draws on the terminal that is its standard error."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True) as running:
        os.close(theirs)
        drawn = b""
        while True:
            try:
                read = os.read(ours, 1 << 16)
            except OSError:  # Linux says so when the last writer has gone
                break
            if not read:
                break
            drawn += read
        printed = running.stdout.read()
    os.close(ours)
    assert running.returncode == 0, drawn
    return printed, drawn.decode()


WAITS = """
import time
from hwaware.cli import _run
with _run.waiting("Looking ...", 60.0):
    time.sleep(0.5)
"""


def test_waiting_shows_what_for_and_how_long_on_a_terminal():
    printed, drawn = on_a_terminal(WAITS)
    assert printed == ""
    assert "Looking ..." in drawn
    assert "0:00:00" in drawn
    assert "of at most 60 s" in drawn


def test_a_terminal_for_errors_leaves_the_document_alone(tmp_path):
    code = "import sys; from hwaware.cli import main; main(sys.argv[1:])"
    printed, drawn = on_a_terminal(code, "simulate", CLUSTER, WORKLOAD, PLAN, "-o", tmp_path / "trace.json", "--json")
    assert json.loads(printed)["trace"] == str(tmp_path / "trace.json")
    assert "Simulating ..." in drawn
