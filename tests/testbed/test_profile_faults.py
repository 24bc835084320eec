"""Faults planted in a running testbed: the profile names them, keeps the rest, and ends in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hwaware.bench import testbed
from hwaware.bench.testbed.state import State, state_path
from hwaware.cluster import ClusterProfile

pytestmark = pytest.mark.testbed

# Alike, but for a link at half rate and one direction of another.
FAULTY = """
shares = { h0 = 0.4, h1 = 0.4, h2 = 0.4, h3 = 0.4 }
default_mbit = 400
mbit = { "h1-h2" = 200, "h3->h0" = 200 }
"""
LIMIT_S = 150


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    if os.geteuid() != 0:
        pytest.skip("shares and rates are set as root only")
    path = tmp_path_factory.mktemp("scenario") / "faulty.toml"
    path.write_text(FAULTY)
    with testbed.running(str(path)) as made:
        yield made


def profile(bed, path, phase=None, fault=lambda: None, delay_s=0.0, said=None):
    """A quick profile; `fault` happens when the phase of that name begins, `said` gets the lines of standard error."""
    line = [
        sys.executable,
        "-m",
        "hwaware",
        "profile",
        "--address",
        bed.address,
        "-o",
        str(path),
        "--quick",
        "--no-runtime",
    ]
    with subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as command:
        watchdog = threading.Timer(LIMIT_S, command.kill)
        watchdog.start()
        lines = [] if said is None else said
        for text in command.stderr:
            lines.append(text)
            if phase is not None and text.startswith(phase):
                time.sleep(delay_s)
                fault()
        watchdog.cancel()
    assert command.wait() == 0, lines
    assert "Traceback" not in "".join(lines)
    return ClusterProfile.load(path)


def flagged(found, kind):
    return {flag.subjects: flag for flag in found.flags if flag.kind == kind}


def host_processes(bed, host):
    """The processes of a host but for the one that holds its network namespace."""
    holder = State.load(state_path(bed.name)).holders[host]
    network = os.readlink(f"/proc/{holder}/ns/net")
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != holder:
            try:
                if os.readlink(entry / "ns" / "net") == network:
                    found[int(entry.name)] = (entry / "cmdline").read_bytes().decode(errors="replace")
            except OSError:
                continue  # it has just ended
    return found


def test_slow_links_and_a_share_that_drops_are_named(bed, tmp_path):
    """Between the timing of devices and their second timing, h2 falls from 0.4 to 0.1 of a core.

    Other work on a busy machine hides a smaller fall.
    """
    try:
        found = profile(bed, tmp_path / "cluster.json", "Timing links", lambda: bed.set_share("h2", 0.1))
    finally:
        bed.set_share("h2", 0.4)
    slow = flagged(found, "slow")
    assert {("h1", "h2"), ("h2", "h1"), ("h3", "h0")} <= set(slow)
    assert ("h3", "h0") in flagged(found, "asymmetric")
    assert ("h2:0",) in flagged(found, "slowed")
    assert slow["h1", "h2"].only == ("h1+h2",)


@pytest.mark.thorough
def test_a_host_that_hangs_is_named_and_the_rest_is_kept(bed, tmp_path):
    workers = []

    def hang():
        workers.extend(pid for pid, line in host_processes(bed, "h3").items() if line.startswith("ray::Worker"))
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)

    start = time.monotonic()
    try:
        found = profile(bed, tmp_path / "cluster.json", "Timing links", hang)
    finally:
        for pid in workers:
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGCONT)
    assert workers
    assert [host.name for host in found.hosts] == ["h0", "h1", "h2"]
    assert len(found.links) == 6
    assert "Not done within" in flagged(found, "failed")["h3",].what
    assert time.monotonic() - start < LIMIT_S


@pytest.mark.thorough
def test_a_host_that_is_killed_is_named_and_the_rest_is_kept(bed, tmp_path):
    """The last test: the host does not come back."""

    def kill():
        for pid in host_processes(bed, "h3"):
            os.kill(pid, signal.SIGKILL)

    said = []
    found = profile(bed, tmp_path / "cluster.json", "Timing devices ...", kill, delay_s=1.0, said=said)
    [line] = [line for line in said if "missing from the profile" in line]
    assert line.startswith("Host h3 is missing from the profile: ")
    assert [host.name for host in found.hosts] == ["h0", "h1", "h2"]
    assert len(found.links) == 6
    flag = flagged(found, "failed")["h3",]
    assert "died during" in flag.what or "Not done within" in flag.what
    assert flag.only == ("h3",)
