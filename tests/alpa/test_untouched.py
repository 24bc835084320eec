"""A program that knows nothing of hwaware, run with HWAWARE_PROFILE: placed by the profile; not at all without it."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import ray
from builders import chosen, cluster, device

import hwaware
from hwaware import autoload

pytestmark = pytest.mark.alpa
ROOT = Path(hwaware.__file__).parent.parent

# Alpa wants GPUs: Ray is told that there are two. Alpa's own jaxlib is the only thing that this program lacks.
PROGRAM = """
import ray
ray.init(num_cpus=6, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=FOLDER)

import alpa
import jax
import jax.numpy as jnp

alpa.init(cluster="ray")


@alpa.parallelize(method=alpa.PipeshardParallel(num_micro_batches=2, layer_option=alpa.AutoLayerOption(layer_num=4),
                                                stage_option="auto"))
def train_step(weights, batch):
    def loss(weights):
        value = batch
        for weight in weights:
            value = jnp.tanh(value @ weight)
        return jnp.mean(value**2)

    found, gradients = alpa.value_and_grad(loss)(weights)
    return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients)], found


jax.config.update("jax_threefry_partitionable", False)  # newer JAX draws other numbers by default
keys = jax.random.split(jax.random.PRNGKey(0), 4)
weights = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
weights, found = train_step(weights, jnp.ones((8, 32)))
print("loss", float(found._value))


@ray.remote(num_cpus=0)
def in_a_worker():
    import alpa  # noqa: F401
    from hwaware import activation

    return any(patch.applied for patch in activation.patches())


print("applied in a worker", ray.get(in_a_worker.remote()))
"""
AGAIN = """
from hwaware.errors import UnusableInputError

executable = train_step.get_last_executable()
workers = [worker for mesh in executable.mesh_group for worker in mesh.workers]
train_step.get_executable(weights, jnp.ones((4, 32)))  # gets workers of its own, which Alpa calls the newest
alpa.shutdown()
for worker in workers:
    try:
        ray.get(worker.process_id.remote(), timeout=60)
    except ray.exceptions.RayActorError:
        print("ended")
try:
    executable.launch_on_driver(*weights, jnp.ones((8, 32)))
except UnusableInputError as error:
    print("refused", error)
print("devices", jax.devices())
alpa.init(cluster="ray")
weights = [jax.random.normal(key, (32, 32)) / 6 for key in keys]
print("again", float(train_step(weights, jnp.ones((8, 32)))[1]._value))
alpa.shutdown()
ray.shutdown()
"""

INSIDE = """
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

group = ray.util.placement_group([{"CPU": 1, "GPU": 2}])


@ray.remote(num_cpus=1, max_retries=0)
def trial():
    import hwaware

    hwaware.enable("cluster.json")
    import alpa

    alpa.init(cluster="ray")
    alpa.shutdown()
    ray.get(ray.remote(num_cpus=0)(lambda: 1).remote(), timeout=60)  # Ray would have ended this task by then
    return "the task went on"


inside = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
print(ray.get(trial.options(scheduling_strategy=inside).remote(), timeout=120))
ray.shutdown()
"""


def profile():
    devices = [device(f"here:{k}", seconds, memory_bytes=1 << 30) for k, seconds in enumerate((5000.0, 10000.0))]
    return cluster(devices, inside=(1e9, 1e-6), addresses={"here": ray.util.get_node_ip_address()})


@pytest.fixture
def short_folder():
    """Ray's sockets need short paths."""
    folder = tempfile.mkdtemp(prefix="hwu")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


RAY_ENDS_FIRST = (
    "ray.shutdown()\nimport gc\ndel train_step, weights, found\ngc.collect()\nassert not ray.is_initialized()\n"
)


@pytest.mark.thorough
@pytest.mark.parametrize("end", chosen(["", RAY_ENDS_FIRST], 1))
def test_a_program_that_does_not_shut_alpa_down_ends_without_another_ray(end, tmp_path, short_folder):
    autoload.switch_on(str(tmp_path))
    profile().save(tmp_path / "cluster.json")
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("FOLDER", repr(short_folder)) + end)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, autoload.VARIABLE: "cluster.json"}
    environment.pop("RAY_ENABLE_AUTO_CONNECT", None)  # as in a user's shell
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss 0.1104" in done.stdout
    assert "Started a local Ray instance" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_the_program_as_it_is(tmp_path, short_folder):
    autoload.switch_on(str(tmp_path))
    profile().save(tmp_path / "cluster.json")
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("FOLDER", repr(short_folder)) + AGAIN)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        autoload.VARIABLE: "cluster.json",
    }
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loss 0.1104" in done.stdout
    assert "applied in a worker False" in done.stdout
    assert "ended\n" in done.stdout
    assert re.search(r"^refused The workers of this .* have ended\..*To fix: .*alpa\.shutdown", done.stdout, re.M)
    assert "devices [CpuDevice(id=0)]" in done.stdout
    assert "again 0.1104" in done.stdout
    told = [line for line in done.stderr.splitlines() if line.startswith("hwaware: a step likely takes ")]
    assert len(told) == 3, done.stderr  # one for each time that Alpa has compiled the function
    assert "with hwaware's mapping" in told[0]
    assert "with Alpa's: " in told[0]


def test_a_program_inside_a_placement_group_outlives_alpa(tmp_path, short_folder):
    """A task of Ray, such as a trial of Ray Tune, reserves the devices for the Alpa program inside it."""
    profile().save(tmp_path / "cluster.json")
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.split("import alpa")[0].replace("FOLDER", repr(short_folder)) + INSIDE)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, cwd=tmp_path)
    assert done.stdout.endswith("the task went on\n"), done.stderr
