"""Trainings whose long messages travel through UCX: the same losses, to the bit."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

from hwaware import ucx

pytestmark = [
    pytest.mark.alpa,
    pytest.mark.skipif(ucx.version() is None, reason="UCX is not installed (pip install libucx-cu13)"),
]
# Two processes, one for each end, exchange an array in the memory of their GPUs (the same one if there is only one).
GPU_END = """
import json, os, sys
rank, secret = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
os.environ.update(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false")
import jax, numpy, time
from hwaware.greeting import Credentials
from hwaware.runtime.settings import RuntimeSettings
from hwaware.runtime.transfers import Transfers, assembled
from hwaware.transport import Mailbox
credentials = Credentials(secret, "test")
mailbox = Mailbox("127.0.0.1", credentials)
end = Transfers(mailbox, credentials, print, f"end {rank}", RuntimeSettings(receive_limit_s=60.0))
device = jax.devices()[rank % len(jax.devices())]
end.open_wire([device], "127.0.0.1")
print(json.dumps(mailbox.port), flush=True)
end.join_group("g", rank, [("127.0.0.1", port) for port in json.loads(sys.stdin.readline())])
sent = jax.device_put(numpy.arange(16 << 20, dtype=numpy.float32), device)
for number in range(5):
    if rank:
        start_s = time.monotonic()
        end.send("g", (0, 0), 0, sent + number, (slice(None),))
        end.receive("g", (0, 0), 0)
        print(json.dumps(sent.nbytes / (time.monotonic() - start_s)), flush=True)
    else:
        _, data = end.receive("g", (1, 0), 0, sent.nbytes)
        found = assembled([((slice(None),), data)], sent.shape, sent.dtype)
        assert isinstance(found, jax.Array) and found.device == device and bool((found == sent + number).all())
        end.send("g", (1, 0), 0, numpy.zeros(1), ...)
if rank:
    (peer,) = end._peers.values()
    print(json.dumps(peer._opened.takes(sent.nbytes)), flush=True)
end.close()
"""
PROGRAM = """
import sys, ray
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=sys.argv[1])
import hwaware.models
from hwaware.activation import install_runtime
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.errors import HwawareError
install_runtime()
curve = {"float32": (MatrixProduct(flops=1e9, seconds=50.0),)}
profile = ClusterProfile(
    hosts=(Host(name="here", address=ray.nodes()[0]["NodeManagerAddress"]),),
    devices=(Device(id="here:0", host="here", kind="cpu", memory_bytes=1 << 30, throughput=curve),),
    links=(),
)
try:
    TrainingRun("x", hwaware.models.make(hwaware.models.MlpConfig(blocks=2, hidden=64)), profile, 2, 2, 8).step()
except HwawareError as error:
    print(error)
ray.shutdown()
"""


def losses_of(transfers, model, profile, steps=3):
    import hwaware
    from hwaware.activation import install_runtime
    from hwaware.bench.training import TrainingRun

    install_runtime()
    with hwaware.runtime_settings(transfers=transfers):
        run = TrainingRun(transfers, model, profile, 4, 4, 64)
    try:
        for _ in range(steps):
            run.step()
        workers = [worker for mesh in run._mesh.launched_physical_mesh_group.meshes for worker in mesh.workers]
        return run.losses, used_by(workers)
    finally:
        run.close()


def used_by(workers):
    """How many connections of each worker have an endpoint of UCX."""
    import ray

    def endpoints(worker):
        return sum(peer._opened.takes(1 << 30) for peer in worker._transfers._peers.values())

    return ray.get([worker.__ray_call__.remote(endpoints) for worker in workers], timeout=60)


def test_losses_through_ucx_equal_those_on_connections(profile, own_workers):
    import hwaware.models

    model = hwaware.models.make(hwaware.models.MlpConfig(blocks=4, hidden=512))  # 128 KiB for a microbatch
    on_connections, none = losses_of("tcp", model, profile)
    through_ucx, some = losses_of("ucx", model, profile)
    assert len(some) == len(none) > 1
    assert not any(none)
    assert all(some)
    assert through_ucx == on_connections


@pytest.mark.thorough  # it starts a Ray of its own, whose workers do not find the package
def test_without_the_package_the_program_says_what_to_install(tmp_path):
    (tmp_path / "libucx.py").write_text("raise ImportError(\"No module named 'libucx'\")\n")
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "HWAWARE_TRANSFERS": "ucx", "JAX_PLATFORMS": "cpu"}
    folder = tempfile.mkdtemp(prefix="hwt")
    line = [sys.executable, "-c", PROGRAM, folder]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300)
    shutil.rmtree(folder, ignore_errors=True)
    assert "failed: transfers is 'ucx', but UCX does not run here: No module named 'libucx'. To fix: pip" in done.stdout


def gpus():
    if shutil.which("nvidia-smi") is None:
        return 0
    count = "import jax; print(len(jax.devices('cuda')))"
    environment = {**os.environ, "JAX_PLATFORMS": "cuda", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run([sys.executable, "-c", count], env=environment, capture_output=True, text=True, timeout=120)
    return int(done.stdout) if done.returncode == 0 else 0


def test_arrays_of_gpus_do_not_pass_through_the_memory_of_the_host():
    """Nobody has run this: no GPU was at hand."""
    if not gpus():
        pytest.skip("needs a GPU on which JAX runs")
    line = [sys.executable, "-c", GPU_END]
    options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    secret = os.urandom(32).hex()
    with subprocess.Popen([*line, "0", secret], **options) as first:
        with subprocess.Popen([*line, "1", secret], **options) as second:
            ends = (first, second)
            try:
                ports = [json.loads(end.stdout.readline()) for end in ends]
                for end in ends:
                    end.stdin.write(json.dumps(ports) + "\n")
                    end.stdin.flush()
                *rates, uses_ucx = map(json.loads, second.communicate(timeout=120)[0].splitlines())
                assert first.wait(60) == second.returncode == 0
            finally:
                for end in ends:
                    end.kill()
    print(f"bytes per second: {rates}")  # pytest -s shows it
    assert uses_ucx
