"""benchmarks/programs.py: a signal that ends it takes the testbed down."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
from builders import ROOT

# The script with a testbed and a profiler that are made up; the profiler does not end by itself.
PROGRAM = """
import contextlib, runpy, signal, subprocess, sys, time, types
import uuid  # runs a command in Python 3.8
from hwaware import autoload
from hwaware.bench import testbed

@contextlib.contextmanager
def running(scenario):
    try:
        yield types.SimpleNamespace(address="here:1", enter=lambda: None, driver_environment=dict)
    finally:
        print("down", flush=True)

def run(*command, **options):
    print("up", flush=True)
    time.sleep(60)

testbed.running, autoload.switch_on, subprocess.run = running, lambda folder: None, run
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup lets it be ignored
sys.argv = ["programs.py", "four"]
sys.path.insert(0, "benchmarks")
runpy.run_path("benchmarks/programs.py", run_name="__main__")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_takes_the_testbed_down(number):
    with subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout.readline() == "up\n"
        script.send_signal(number)
        assert script.communicate(timeout=60)[0] == "down\n"
    assert script.returncode != 0
