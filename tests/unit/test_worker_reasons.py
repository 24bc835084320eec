"""Why a worker did not start, and which devices one uses, as far as that can be told without a cluster."""

import os
import socket
import subprocess
import sys

import pytest

from hwaware import ray_cluster
from hwaware.runtime import checkpoint_folder

TRACEBACK = """\x1b[36mray::HostWorker.__init__()\x1b[39m (pid=7, ip=10.0.0.7)
  File "worker.py", line 87, in __init__
{}"""
OWN = (
    "hwaware.errors.MeasurementError: This host does not have the address 10.0.0.7. To fix: start Ray with its own one."
)


def died_with(exceptions, cause):
    """Return Ray's error for an actor that did not start; Ray 2.9 has one class for all ends."""
    return getattr(exceptions, "ActorDiedError", exceptions.RayActorError)(cause)


@pytest.mark.parametrize(
    ("last", "said"),
    [
        (OWN, "This host does not have the address 10.0.0.7. To fix: start Ray with its own one"),
        ("ModuleNotFoundError: No module named 'jax'", "ModuleNotFoundError: No module named 'jax'"),
    ],
)
def test_an_error_of_a_workers_start_is_the_reason(last, said):
    exceptions = pytest.importorskip("ray.exceptions")
    cause = exceptions.RayTaskError("HostWorker.__init__", TRACEBACK.format(last), ValueError("cause"))
    assert ray_cluster.died(died_with(exceptions, cause)) == said


def test_the_remedy_of_a_workers_own_error_is_kept(monkeypatch):
    ray = pytest.importorskip("ray")
    cause = ray.exceptions.RayTaskError("HostWorker.__init__", TRACEBACK.format(OWN), ValueError("cause"))

    def get(references):
        raise died_with(ray.exceptions, cause)

    monkeypatch.setattr(ray, "wait", lambda waiting, **_: (waiting, []))
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray_cluster, "head_address", lambda: "127.0.0.1:1")
    with pytest.raises(ray_cluster.MeasurementError) as raised:
        ray_cluster.fetched([object()], 5.0, "Starting the worker")
    assert raised.value.what == "Starting the worker failed: This host does not have the address 10.0.0.7."
    assert raised.value.fix == "start Ray with its own one."


def test_a_host_without_accelerators_uses_cpus_whatever_jax_could_use():
    pytest.importorskip("jax")
    if any(map(os.path.exists, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/accel0"))):
        pytest.skip("this host has an accelerator")
    environment = {name: value for name, value in os.environ.items() if name not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    program = "from hwaware.runtime import backend; print(backend.uses_cpus())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.stdout.split() == ["True"], done.stderr[-2000:]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_a_stage_may_meet_at_an_address_of_either_kind(address):
    mesh = pytest.importorskip("hwaware.runtime.mesh")
    try:
        socket.create_server((address, 0), family=socket.AF_INET6 if ":" in address else socket.AF_INET).close()
    except OSError:
        pytest.skip(f"this host has no {address}")
    host, _, port = mesh.free_coordinator(address).rpartition(":")
    assert host.strip("[]") == address
    assert host.startswith("[") == (":" in address)
    assert int(port) > 0


def test_a_clean_up_that_fails_does_not_hide_the_error_of_a_save(monkeypatch, tmp_path):
    unfinished = checkpoint_folder.begin(str(tmp_path), 3)

    def stale(path):
        raise OSError(116, "Stale file handle", path)

    monkeypatch.setattr(checkpoint_folder.os, "listdir", stale)
    checkpoint_folder.abandon(unfinished)
    monkeypatch.undo()
    assert os.path.isdir(unfinished.path), "the next save removes it"
