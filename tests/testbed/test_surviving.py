"""A program that survives loses a whole host, and later the link of another: its losses and its state stay the same."""

import json
import os
import signal
import subprocess
import sys

import pyroute2
import pytest

from hwaware.bench import testbed
from hwaware.bench.testbed import processes
from hwaware.bench.testbed.state import State, state_path

pytestmark = pytest.mark.testbed

LIMIT_S = 60.0
STEPS = 8
SCENARIO = """
shares = { a = 0.5, b = 0.4, c = 0.4 }
default_mbit = 400
"""
# Prints a line of JSON after each step, and one with a digest of the state at the end.
DRIVER = """
import hashlib, json, sys, time, warnings
warnings.simplefilter("ignore")
from hwaware.bench import testbed
bed = testbed.find(sys.argv[1])
bed.enter()
import ray
ray.init(address=sys.argv[1], _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
import jax, numpy
import hwaware, hwaware.models
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

curve = {"float32": (MatrixProduct(flops=1e9, seconds=100.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "abc"),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in "abc"),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in "abc" for y in "abc"),
)
hwaware.enable(profile, costs="model", survive=sys.argv[2] == "survive")
import alpa

alpa.init(cluster="ray")
model = hwaware.models.make(hwaware.models.MlpConfig(blocks=6, hidden=256))
method = alpa.PipeshardParallel(
    num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=6), stage_option="auto"
)
step = alpa.parallelize(
    lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
)
state = model.initial_state(0)
# Four microbatches of seven samples: no stage can have replicas, so every placement is a chain.
for number in range(int(sys.argv[3])):
    start_s = time.monotonic()
    state, loss = step(state, model.batch(number, 28))
    loss = float(loss._value)
    places = sorted({device[0] for stage in hwaware.last_plan().stages for device in stage.devices})
    print(json.dumps({"loss": loss, "places": places, "took_s": time.monotonic() - start_s}), flush=True)
digest = hashlib.sha256()
for leaf in jax.tree_util.tree_leaves(state):
    digest.update(numpy.asarray(leaf._value).tobytes())
history = hwaware.last_history()
events = [] if history is None else [[event.what, event.took_s, event.phases] for event in history.events]
print(json.dumps({"digest": digest.hexdigest(), "events": events}), flush=True)
alpa.shutdown()
"""


class Program:
    """The program on a testbed, and what it says."""

    def __init__(self, bed, *arguments):
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        line = [sys.executable, "-c", DRIVER, bed.address, *arguments]
        self.process = subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def says(self):
        for line in self.process.stdout:
            if line.startswith("{"):  # Ray prints there too
                return json.loads(line)
        raise AssertionError(self.process.stderr.read())

    def end(self):
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture(scope="module")
def bed(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "surviving.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as made:
        yield made


def end_host(bed, host):
    """End every process of a host at once, as a power failure does, and its network with them."""
    state = State.load(state_path(bed.name))
    set_link(bed, host, "down")
    holder = state.holders[host]
    for pid in processes.in_networks([os.stat(f"/proc/{holder}/ns/net").st_ino]):
        if pid != holder:
            os.kill(pid, signal.SIGKILL)


def set_link(bed, host, state):
    veth = State.load(state_path(bed.name)).veth(host)
    with pyroute2.IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=veth)[0], state=state)


def test_hosts_that_are_lost(bed):
    calm = Program(bed, "plain", str(STEPS))
    expected = [calm.says() for _ in range(STEPS + 1)]
    calm.end()
    program = Program(bed, "survive", str(STEPS))
    try:
        found = [program.says() for _ in range(2)]
        assert found[-1]["places"] == ["a", "b", "c"]
        set_link(bed, "c", "down")
        found += [program.says() for _ in range(2)]
        assert found[-1]["places"] == ["a", "b"]
        end_host(bed, "b")
        found += [program.says() for _ in range(STEPS + 1 - len(found))]
        assert found[-2]["places"] == ["a"]
    finally:
        said = program.end()
    assert [each["loss"] for each in found[:-1]] == [each["loss"] for each in expected[:-1]]
    assert found[-1]["digest"] == expected[-1]["digest"]
    print(*found[-1]["events"], sep="\n")  # shown where the test fails, or with -s
    assert len(found[-1]["events"]) == 2
    assert all(took_s < LIMIT_S for _, took_s, _ in found[-1]["events"])
    assert said.count("the program goes on with layers") == 2
