"""A training between network namespaces whose long messages travel through UCX over TCP."""

import json
import os
import subprocess
import sys

import pytest
from drivers import TWO_STAGES

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
DRIVER = (
    TWO_STAGES
    + """
import json
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
)


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
