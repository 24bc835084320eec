"""`alpa.init` on hosts with 1, 2 and 3 devices: Alpa alone uses three of six; under hwaware all may be used."""

import itertools
import json
import os
import subprocess
import sys

import pytest
from drivers import ENTER

from hwaware.bench import testbed

pytestmark = [pytest.mark.testbed, pytest.mark.thorough]

SCENARIO = """
shares = { a = 0.5, b = 0.5, c = 0.5 }
default_mbit = 400
devices = { b = 2, c = 3 }
inside_mbit = 400
"""
DRIVER = (
    ENTER
    + """
import json
import hwaware
hwaware.enable(sys.argv[2])
import alpa
import jax
import jax.numpy as jnp
import numpy as np

alpa.init(cluster="ray")
mesh = alpa.get_global_virtual_physical_mesh()
grid = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
weights = [jnp.asarray(np.sin(grid * (k + 1)) / 8) for k in range(6)]
batch = jnp.asarray(np.random.default_rng(0).standard_normal((24, 64)).astype(np.float32))

def step_of(value_and_grad):
    def step(weights, batch):
        def loss(weights):
            value = batch
            for weight in weights:
                value = jnp.tanh(value @ weight)
            return jnp.mean(value**2)
        found, gradients = value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients)], found
    return step

expected = jax.jit(step_of(jax.value_and_grad))(weights, batch)[1]
method = alpa.PipeshardParallel(
    num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=6), stage_option="auto")
step = alpa.parallelize(step_of(alpa.value_and_grad), method=method)
_, loss = step(weights, batch)
group = step.get_last_executable().mesh_group
names = {address: host for host, address in bed.hosts.items()}
print(json.dumps({
    "counts": {names[info["NodeManagerAddress"]]: len(devices) for info, devices in zip(mesh.host_info, mesh.devices)},
    "devices": mesh.num_devices,
    "planned": [list(stage.devices) for stage in hwaware.last_plan().stages],
    "launched": [[f"{names[info['NodeManagerAddress']]}:{device}" for info, own in zip(one.host_info, one.devices)
                  for device in own] for one in group.meshes],
    "losses": [float(loss._value), float(expected)]}))
alpa.shutdown()
ray.shutdown()
"""
)


def profile_of(hosts):
    """The device of a is slow, so that it is left idle."""
    from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

    counts, seconds = {"a": 1, "b": 2, "c": 3}, {"a": 1000.0, "b": 10.0, "c": 10.0}
    return ClusterProfile(
        hosts=tuple(Host(name=host, address=hosts[host]) for host in counts),
        devices=tuple(
            Device(
                id=f"{host}:{k}",
                host=host,
                kind=f"cpu-{host}",
                memory_bytes=1 << 30,
                throughput={"float32": (MatrixProduct(flops=1e9, seconds=seconds[host]),)},
            )
            for host, count in counts.items()
            for k in range(count)
        ),
        links=tuple(
            Link(source=x, target=y, latency_s=1e-4, bandwidth_bytes_per_s=1e8)
            for x, y in itertools.combinations_with_replacement(counts, 2)
        ),
    )


def test_all_devices_may_be_used_and_the_slow_one_stays_idle(tmp_path):
    path = tmp_path / "unequal.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as bed:
        profile_of(bed.hosts).save(tmp_path / "cluster.json")
        done = subprocess.run(
            [sys.executable, "-c", DRIVER, bed.address, str(tmp_path / "cluster.json")],
            env={**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["counts"], seen["devices"]) == ({"a": 1, "b": 2, "c": 3}, 6)
    assert seen["launched"] == seen["planned"]
    used = [device for stage in seen["launched"] for device in stage]
    assert len(used) == len(set(used))
    assert "a:0" not in used
    assert {"b", "c"} == {device.split(":")[0] for device in used}
    assert seen["losses"][0] == pytest.approx(seen["losses"][1], rel=1e-5)
