"""Stages of several devices on a testbed: under the sum of their quotas, and over the shaped links."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from drivers import ENTER

from hwaware.bench import testbed
from hwaware.bench.testbed.state import State, state_path

pytestmark = pytest.mark.testbed

SCENARIO = """
shares = { a = 0.2, b = 0.2, c = 0.3 }
default_mbit = 200
devices = { a = 2, b = 2, c = 2 }
inside_mbit = 200
"""
# Two stages: one on the hosts a and b, on one device of each or on both, and one on both devices of c.
DRIVER = (
    ENTER
    + """
import json
import hwaware.models
from hwaware.activation import install_runtime
install_runtime()
from hwaware.bench.training import TrainingRun, single_device_losses
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.plans import Plan, Replica, Stage

curve = {"float32": (MatrixProduct(flops=1e9, seconds=1.0),)}
places = [(f"{host}:{index}", host) for host in "abc" for index in (0, 1)]
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "abc"),
    devices=tuple(Device(id=i, host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for i, h in places),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in "abc" for y in "abc"),
)
def stage(first, last, *devices):
    return Stage(layers=(first, last), replicas=tuple(Replica(devices=(device,)) for device in devices))
plan = Plan(num_microbatches=2, stages=(stage(0, 1, *sys.argv[2].split(",")), stage(2, 3, "c:0", "c:1")))
model = hwaware.models.make(hwaware.models.MlpConfig(blocks=4, hidden=256))
run = TrainingRun("wide", model, profile, 4, 2, 8, plan)
run.step()
print("started", flush=True)
sys.stdin.readline()
for _ in range(4):
    run.step()
print(json.dumps([run.losses, single_device_losses(model, 16, 5)]), flush=True)
sys.stdin.readline()
with run.at_work():
    print("working", flush=True)
    sys.stdin.readline()
print(json.dumps(list(run.alone_s())), flush=True)
run.close()
ray.shutdown()
"""
)


def sent_bytes(state, host):
    """What left a host: the outer end of its link received it."""
    return int(Path(f"/sys/class/net/{state.veth(host)}/statistics/rx_bytes").read_text())


@pytest.fixture
def driver(tmp_path, wide):
    path = tmp_path / "wide.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as bed:
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, bed.address, wide],
            env={**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with process:
            yield State.load(state_path(bed.name)), process
            process.kill()


def members(group):
    return len(group.joinpath("cgroup.procs").read_text().split())


def ask(process):
    process.stdin.write("go\n")
    process.stdin.flush()


# Each device of a and b has a process of its own, even both of one host: gloo connects one device of a process.
@pytest.mark.thorough
@pytest.mark.parametrize("wide", ["a:0,b:0", "a:0,a:1,b:0,b:1"])
def test_a_stage_of_two_hosts_and_one_of_two_devices(driver, wide):
    state, process = driver
    assert process.stdout.readline().strip() == "started"
    before = sent_bytes(state, "a"), sent_bytes(state, "b")
    ask(process)
    losses, expected = json.loads(process.stdout.readline())
    assert losses == pytest.approx(expected, rel=1e-5)
    # A ring of N devices crosses from host to host twice, each time with 2 (N - 1) / N of the gradients: two layers of
    # 256 x 256 floats, once in each of four steps.
    devices = len(wide.split(","))
    gradients = 4 * 2 * 256 * 256 * 4 * 2 * (devices - 1) / devices
    for host, sent in zip("ab", before):
        assert 0.9 < (sent_bytes(state, host) - sent) / gradients < 1.5
    groups = state.cpu_groups()
    joint = groups.base / "c" / "device-0+device-1"
    assert members(joint) == 0  # at rest
    ask(process)
    assert process.stdout.readline().strip() == "working"
    assert members(joint) == 1
    quota = groups.quota(joint)
    assert quota.quota_us / quota.period_us == pytest.approx(2 * 0.3, rel=0.02)
    memory = state.memory_groups()
    if memory is not None:  # the kernel ends who takes more than the devices have
        processes = Counter([*(device.partition(":")[0] for device in wide.split(",")), "c"])
        own = {host: [members(group) for group in memory.base.glob(f"{host}-*")] for host in processes}
        assert own == {host: [1] * count for host, count in processes.items()}
    ask(process)
    alone_s = json.loads(process.stdout.readline())  # both hosts run each program together, or neither ends
    assert [len(times) for times in alone_s] == [3, 3]
    assert all(0 < seconds < 10 for times in alone_s for seconds in times)
    assert process.wait(60) == 0
