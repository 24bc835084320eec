"""Test that `hwaware profile` adds the runtime's own time, or says why it is missing."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import msgspec
import pytest
from builders import cluster

from hwaware import profiler, ray_cluster
from hwaware.bench import profiling
from hwaware.errors import MeasurementError

PROFILE = cluster("ab")
COMPLETE = msgspec.structs.replace(
    PROFILE, devices=tuple(msgspec.structs.replace(device, pass_s=0.001) for device in PROFILE.devices)
)


@pytest.fixture
def measured(monkeypatch):
    """Let the profiler find PROFILE, and the runtime what the test puts in."""
    found = {"devices": PROFILE, "runtime": COMPLETE}

    def with_runtime(profile, address):
        assert profile is PROFILE
        if isinstance(found["runtime"], BaseException):
            raise found["runtime"]
        return found["runtime"]

    monkeypatch.setattr(profiler, "profile", lambda *_, **__: found["devices"])
    monkeypatch.setattr(profiling, "_with_runtime", with_runtime)
    monkeypatch.setattr(ray_cluster, "connect", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(profiling.importlib.util, "find_spec", lambda name: name)
    return found


def test_the_runtime_is_measured_by_default(measured):
    said = []
    assert profiling.profile("h:1", say=said.append) is COMPLETE
    assert said == []


@pytest.mark.parametrize(
    ("address", "runtime", "installed", "reason"),
    [
        ("h:1", False, ("jax", "alpa"), "--no-runtime (runtime=False in Python) leaves them out."),
        ("local", True, ("jax", "alpa"), "measuring these needs a Ray cluster, and this profile is of one process."),
        ("h:1", True, ("jax",), "measuring these needs alpa, which this Python lacks. Predicted steps are then too "),
        ("h:1", True, (), "measuring these needs jax and alpa, which this Python lacks. "),
    ],
)
def test_one_line_says_why_it_is_missing(measured, monkeypatch, address, runtime, installed, reason):
    monkeypatch.setattr(profiling.importlib.util, "find_spec", lambda name: name if name in installed else None)
    said = []
    assert profiling.profile(address, runtime=runtime, say=said.append) is PROFILE
    (line,) = said
    assert line.startswith(f"The profile lacks pass overheads and the other times of the runtime: {reason}")
    assert ("To fix: " in line) == ("Predicted" in line)


def test_a_failure_costs_the_runtime_s_part_alone(measured):
    measured["runtime"] = MeasurementError("Host a was lost.", "look at it.")
    said = []
    assert profiling.profile("h:1", say=said.append) is PROFILE
    assert said[0].endswith("runtime. Host a was lost. To fix: look at it.")


@pytest.mark.parametrize(
    ("stop", "expected"),
    [(KeyboardInterrupt(), profiler.InterruptedMeasurement), (SystemExit(143), profiler.TerminatedMeasurement)],
)
def test_a_stop_keeps_devices_and_links(measured, stop, expected):
    measured["runtime"] = stop
    with pytest.raises(expected) as caught:
        profiling.profile("h:1")
    assert caught.value.found.complete() == PROFILE


def test_a_profile_that_has_the_figures_is_not_measured_again(measured):
    measured["devices"], measured["runtime"] = COMPLETE, AssertionError("not again")
    said = []
    assert profiling.profile("h:1", runtime=False, say=said.append) is COMPLETE
    assert said == []


def test_the_runtime_is_timed_on_hosts_that_run_and_others_keep_what_they_have(monkeypatch):
    """After --resume with a new host while an earlier one is away."""
    away = msgspec.structs.replace(PROFILE.devices[1], pass_s=0.5)
    found = msgspec.structs.replace(cluster("abc", addresses={"a": "1", "b": "2", "c": "3"}), driver_s=0.2)
    found = msgspec.structs.replace(found, devices=(found.devices[0], away, found.devices[2]))
    monkeypatch.setattr(ray_cluster, "nodes", lambda: [SimpleNamespace(address=address) for address in "193"])

    def timed(present):
        assert [host.name for host in present.hosts] == ["a", "c"]
        devices = [msgspec.structs.replace(one, pass_s=0.1, sum_bytes_per_s=1e8) for one in present.devices]
        return msgspec.structs.replace(present, devices=tuple(devices), driver_s=0.3)

    again = profiling.on_present(found, timed)
    assert [(one.pass_s, one.sum_bytes_per_s) for one in again.devices] == [(0.1, 1e8), (0.5, None), (0.1, 1e8)]
    assert (again.driver_s, again.links) == (0.3, found.links)
