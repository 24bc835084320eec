"""Faults in the middle of training end the step with the host and an advice that fits, and the next start goes on.

One program trains on four hosts and starts again after each fault, with the hosts that are left.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pyroute2
import pytest
from drivers import ENTER

from hwaware.bench import testbed
from hwaware.bench.testbed import processes
from hwaware.bench.testbed.state import State, state_path

pytestmark = [pytest.mark.testbed, pytest.mark.thorough]

LIMIT_S = 30.0
SCENARIO = """
shares = { a = 0.5, b = 0.4, c = 0.4 }
default_mbit = 400
"""
# Prints a line of JSON for each start of Alpa, first step and failure; an argument says after how many it ends.
DRIVER = (
    ENTER
    + """
import json, time
import hwaware, hwaware.models
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

curve = {"float32": (MatrixProduct(flops=1e9, seconds=100.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "abc"),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in "abc"),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in "abc" for y in "abc"),
)
hwaware.enable(profile)
import alpa

def say(**facts):
    print(json.dumps(facts), flush=True)

model = hwaware.models.make(hwaware.models.MlpConfig(blocks=3, hidden=256))
for _ in range(int(sys.argv[2])):
    start_s = time.monotonic()
    try:
        alpa.init(cluster="ray")
        init_s = time.monotonic() - start_s
        method = alpa.PipeshardParallel(
            num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=3), stage_option="auto"
        )
        step = alpa.parallelize(
            lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
        )
        state, loss = step(model.initial_state(0), model.batch(0, 64))
        loss._value
        places = {device[0] for stage in hwaware.last_plan().stages for device in stage.devices}
        workers = [worker for mesh in alpa.get_global_virtual_physical_mesh().launched_physical_mesh_group.meshes
                   for worker in mesh.workers]
        pids = ray.get([worker.process_id.remote() for worker in workers])
        say(init_s=init_s, places=sorted(places), pids=pids)
        while True:
            start_s = time.monotonic()
            state, loss = step(state, model.batch(1, 64))
            loss._value
    except hwaware.HwawareError as error:
        say(kind=type(error).__name__, where=getattr(error, "where", ""), what=error.what, fix=error.fix,
            took_s=time.monotonic() - start_s)
        if alpa.api.is_initialized:
            alpa.shutdown()
"""
)


class Driver:
    """The program on a testbed, and what it says."""

    def __init__(self, bed, starts):
        self._environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        line = [sys.executable, "-c", DRIVER, bed.address, str(starts)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, env=self._environment, stdout=pipe, stderr=pipe, text=True)

    def says(self):
        for line in self.process.stdout:
            if line.startswith("{"):  # Ray prints there too
                return json.loads(line)
        raise AssertionError(self.process.stderr.read())

    def end(self):
        """Kill the program; return what it wrote on standard error."""
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "lost.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as made:
        yield made


@pytest.fixture
def start(bed):
    started = []

    def make(starts):
        started.append(Driver(bed, starts))
        return started[-1]

    yield make
    for driver in started:
        driver.end()


def set_link(bed, host, state):
    veth = State.load(state_path(bed.name)).veth(host)
    with pyroute2.IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=veth)[0], state=state)


def head_of(bed):
    """The process of Ray's head, gcs_server."""
    for pid in processes.marked(State.load(state_path(bed.name)).mark()):
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/exe").resolve().name == "gcs_server":
                return pid
    raise AssertionError("Ray has no head")


def daemon_of(bed, host):
    """The raylet of a host."""
    holder = State.load(state_path(bed.name)).holders[host]
    for pid in processes.in_networks([os.stat(f"/proc/{holder}/ns/net").st_ino]):
        with contextlib.suppress(OSError):  # it has just ended
            if Path(f"/proc/{pid}/exe").resolve().name == "raylet":
                return pid
    raise AssertionError(f"host {host} has no raylet")


def assert_names(said, bed, host, *words):
    assert said["kind"] == "WorkerFailedError"
    assert f"on host {bed.hosts[host]}, device 0" in said["where"]
    for word in words:
        assert word in said["what"] + said["fix"]
    assert bed.hosts[host] in said["fix"]
    assert "memory" not in said["what"] + said["fix"]
    assert said["took_s"] < LIMIT_S


def test_faults_while_training_and_the_starts_after_them(bed, start):
    driver = start(4)
    first = driver.says()
    assert first["places"] == ["a", "b", "c"]
    # Another program on the same cluster.
    said = start(1).says()
    assert said["kind"] == "ClusterUnreachableError"
    assert "in use by Ray job 0" in said["what"]
    assert f"process {driver.process.pid} on {bed.head_address}" in said["what"]
    assert said["took_s"] < LIMIT_S
    # A worker is stopped for good.
    os.kill(first["pids"][1], signal.SIGSTOP)
    stopped = driver.says()
    assert "SIGSTOP" in stopped["what"]
    assert f"process {first['pids'][1]}" in stopped["what"]
    assert stopped["took_s"] < LIMIT_S
    again = driver.says()
    assert (again["places"], again["init_s"] < LIMIT_S) == (["a", "b", "c"], True)
    # Ray ends on a host.
    os.kill(daemon_of(bed, "c"), signal.SIGKILL)
    assert_names(driver.says(), bed, "c", "Ray is gone on host", "start Ray on host")
    again = driver.says()
    assert (again["places"], again["init_s"] < LIMIT_S) == (["a", "b"], True)
    # The link of a host goes down, and another program starts at once.
    set_link(bed, "b", "down")
    assert_names(driver.says(), bed, "b", "network link is down", "network link is up")
    driver.process.kill()
    other = start(1)
    again = other.says()
    assert (again["places"], again["init_s"] < LIMIT_S) == (["a"], True)
    # Ray's head ends.
    os.kill(head_of(bed), signal.SIGKILL)
    said = other.says()
    assert said["kind"] == "WorkerFailedError"
    assert said["where"] == f"Ray's head at {bed.address}"
    assert "Connection refused" in said["what"]
    assert "ray stop, then ray start" in said["fix"]
    assert said["took_s"] < LIMIT_S
    assert other.process.wait(LIMIT_S) == 0
    assert not any(processes.start_ticks(pid) for pid in again["pids"])
    lines = [line for line in other.end().splitlines() if "left out" in line]
    assert [line for line in lines if bed.hosts["b"] in line] == lines[-1:]
    assert "link is up" in lines[-1]
