"""A training between network namespaces whose long messages travel through UCX over TCP."""

import json
import os
import subprocess
import sys

import pytest

from hwaware import ucx
from hwaware.bench import testbed

pytestmark = [
    pytest.mark.testbed,
    pytest.mark.skipif(ucx.version() is None, reason="UCX is not installed (pip install libucx-cu13)"),
]
SCENARIO = """
shares = { a = 0.5, b = 0.5 }
default_mbit = 400
"""
DRIVER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from hwaware.bench import testbed
bed = testbed.find(sys.argv[1])
bed.enter()
import ray
ray.init(address=sys.argv[1], _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
import hwaware
import hwaware.models
from hwaware.activation import install_runtime
install_runtime()
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.plans import Plan, Replica, Stage

curve = {"float32": (MatrixProduct(flops=1e9, seconds=1.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "ab"),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in "ab"),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in "ab" for y in "ab"),
)
stages = tuple(Stage(layers=(i, i), replicas=(Replica(devices=(h + ":0",)),)) for i, h in enumerate("ab"))
plan = Plan(num_microbatches=4, stages=stages)
model = hwaware.models.make(hwaware.models.MlpConfig(blocks=2, hidden=512))

def endpoints(worker):
    return [peer._opened.takes(1 << 17) for peer in worker._transfers._peers.values()]

for transfers in ("tcp", "ucx"):
    with hwaware.runtime_settings(transfers=transfers):
        run = TrainingRun(transfers, model, profile, 2, 4, 64, plan)
    times = [run.step() for _ in range(6)]
    workers = [mesh.workers[0] for mesh in run._mesh.launched_physical_mesh_group.meshes]
    used = ray.get([worker.__ray_call__.remote(endpoints) for worker in workers], timeout=60)
    print(json.dumps([run.losses, used, times]), flush=True)
    run.close()
"""


def test_losses_through_ucx_equal_those_on_connections(tmp_path):
    path = tmp_path / "transfers.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as bed:
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        line = [sys.executable, "-c", DRIVER, bed.address]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (on_connections, none, _), (through_ucx, both, times) = map(json.loads, done.stdout.splitlines())
    assert (none, both) == ([[False], [False]], [[True], [True]])
    assert len(through_ucx) == 6
    assert through_ucx == on_connections
    assert len(times) == 6
