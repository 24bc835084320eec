"""A worker gets the device of its plan, not only the host: by index, by its share of the processor, and by its UUID."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import hwaware
from hwaware.runtime import backend

pytestmark = pytest.mark.alpa

# Two stages, the first on the second device.
PROGRAM = """
import json, os, sys
import ray
ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=sys.argv[1])
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.activation import install_runtime
from hwaware.plans import Plan, Replica, Stage
import hwaware.models

install_runtime()
def device(index, seconds):
    curve = {"float32": (MatrixProduct(flops=1e9, seconds=seconds),)}
    return Device(id=f"here:{index}", host="here", kind=f"cpu-{index}", memory_bytes=1 << 30, throughput=curve,
                  uuid=f"GPU-{index}-of-here")
profile = ClusterProfile(
    hosts=(Host(name="here", address=ray.nodes()[0]["NodeManagerAddress"]),), devices=(device(0, 1.0), device(1, 4.0)),
    links=(Link(source="here", target="here", latency_s=1e-4, bandwidth_bytes_per_s=1e9),))
def stage(first, last, name):
    return Stage(layers=(first, last), replicas=(Replica(devices=(name,)),))
plan = Plan(num_microbatches=2, stages=(stage(0, 0, "here:1"), stage(1, 1, "here:0")))
run = TrainingRun("by hand", hwaware.models.make(hwaware.models.MlpConfig(blocks=2, hidden=16)), profile, 2, 2, 4, plan)
run.step()
workers = [mesh.workers[0] for mesh in run._mesh.launched_physical_mesh_group.meshes]
seen = [worker.__ray_call__.remote(lambda self: os.environ["CUDA_VISIBLE_DEVICES"]) for worker in workers]
print(json.dumps({"visible": ray.get(seen, timeout=60),
                  "pids": ray.get([worker.process_id.remote() for worker in workers], timeout=60)}))
run.close()
ray.shutdown()
"""


@pytest.fixture
def short_folder():
    """Ray's sockets need short paths."""
    folder = tempfile.mkdtemp(prefix="hwi")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.thorough
def test_two_unlike_devices_of_one_host(tmp_path, short_folder):
    """Files stand for the control groups of a testbed, where a device is a share of the processor."""
    groups = [tmp_path / f"device-{index}" for index in range(2)]
    declared = [
        {"id": f"here:{index}", "kind": f"cpu-{index}", "memory_bytes": (index + 1) << 28, "group": str(group)}
        for index, group in enumerate(groups)
    ]
    for group in groups:
        group.touch()
    environment = {
        **os.environ,
        "HWAWARE_DEVICES": json.dumps(declared),
        "PYTHONPATH": str(Path(hwaware.__file__).parent.parent),
        "NPROC": "1",
    }
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, short_folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["visible"] == ["GPU-1-of-here", "GPU-0-of-here"]
    assert [int(groups[index].read_text()) for index in (1, 0)] == seen["pids"]


@pytest.mark.parametrize(
    ("indices", "uuids", "expected"),
    [((2,), (), "2"), ((0, 3), (), "0,3"), ((0,), ("GPU-b",), "GPU-b"), ((1, 0), ("GPU-b", "GPU-a"), "GPU-b,GPU-a")],
)
def test_what_a_worker_sees(monkeypatch, indices, uuids, expected):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    backend.show_devices(indices, uuids)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_indices_where_the_profile_does_not_know_every_uuid():
    from hwaware.patching import meshes

    class Parent:
        hwaware_uuids = [("GPU-a", "GPU-b"), ("GPU-c", None)]

    class Launched:
        parent = Parent()

    assert meshes.uuids_of(Launched(), 0) == ("GPU-a", "GPU-b")
    assert meshes.uuids_of(Launched(), 1) == ()


def test_a_worker_for_each_device_of_several_hosts():
    from hwaware.patching import meshes, unequal
    from hwaware.patching.stock_jax import install

    install()

    def stage(devices_of_host):
        whole = unequal.make_mesh(range(2), [{"NodeManagerAddress": f"10.0.0.{k}"} for k in (1, 2)], [3, 3])
        mesh = unequal.part_of(whole, devices_of_host)
        mesh.hwaware_uuids = [tuple(f"GPU-{host}{k}" for k in devices) for host, devices in devices_of_host.items()]
        return mesh

    class Launched:
        parent = meshes.one_device_a_worker(stage({1: [0, 2], 0: [1, 2]}))

    launched = Launched.parent
    assert [info["NodeManagerAddress"] for info in launched.host_info] == ["10.0.0.2"] * 2 + ["10.0.0.1"] * 2
    assert launched.devices == [[0], [2], [1], [2]]
    assert [meshes.uuids_of(Launched(), rank) for rank in range(4)] == [
        ("GPU-10",),
        ("GPU-12",),
        ("GPU-01",),
        ("GPU-02",),
    ]
    for as_it_is in (stage({0: [0, 1, 2]}), stage({0: [0], 1: [1]})):
        assert meshes.one_device_a_worker(as_it_is) is as_it_is
