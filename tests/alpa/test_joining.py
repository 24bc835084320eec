"""A program that survives takes in a host whose Ray starts later; its losses and its state stay the same."""

import json
import os
import subprocess
import sys
import time

import pytest

from hwaware.bench import testbed

pytestmark = [pytest.mark.alpa, pytest.mark.thorough]  # three Rays start, which a busy machine delays too long
STEPS, PAUSE_S = 300, 1.0  # of the first, at most
SCENARIO = """
shares = { a = 1.0, b = 1.0, c = 1.0 }
default_mbit = 400
"""
# Makes a step for each line that it reads, and prints a line of JSON about it.
DRIVER = """
import hashlib, json, sys, warnings
warnings.simplefilter("ignore")
from hwaware.bench import testbed
bed = testbed.find(sys.argv[1])
import ray
ray.init(address=sys.argv[1], _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
import jax, numpy
import hwaware, hwaware.models
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

# So slow that the host that joins, which is measured, pays at once.
curve = {"float32": (MatrixProduct(flops=1e9, seconds=100.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "ab"),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in "ab"),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in "ab" for y in "ab"),
)
hwaware.enable(profile, costs="model", survive=sys.argv[2] == "survive", steps=10**6)
import alpa

alpa.init(cluster="ray")
model = hwaware.models.make(hwaware.models.MlpConfig(blocks=4, hidden=64))
method = alpa.PipeshardParallel(
    num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=4), stage_option="auto"
)
step = alpa.parallelize(
    lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
)
state = model.initial_state(0)
# Four microbatches of seven samples: no stage can have replicas, so every placement is a chain.
for number, _ in enumerate(sys.stdin):
    state, loss = step(state, model.batch(number % 8, 28))
    loss, digest = float(loss._value), hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(state):
        digest.update(numpy.asarray(leaf._value).tobytes())
    places = sorted({device for stage in hwaware.last_plan().stages for device in stage.devices})
    history = hwaware.last_history()
    events = [event.kind for event in history.events] if history else []
    found = {"loss": loss, "digest": digest.hexdigest(), "places": places, "events": events}
    print(json.dumps(found), flush=True)
alpa.shutdown()
"""


class Program:
    """The program on a testbed, and what it says."""

    def __init__(self, bed, survive):
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        line = [sys.executable, "-c", DRIVER, bed.address, survive]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.found = []

    def train(self):
        """Let the program make a step; return what it says."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):  # Ray prints there too
                self.found.append(json.loads(line))
                return self.found[-1]
        raise AssertionError(self.process.stderr.read())

    def end(self):
        self.process.kill()
        return self.process.communicate()[1]


def test_a_host_that_joins_later(tmp_path):
    path = tmp_path / "joining.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path), kind="loopback", late=["c"]) as bed:
        calm = Program(bed, "plain")
        try:
            for _ in range(STEPS):
                calm.train()
        finally:
            calm.end()
        program = Program(bed, "survive")
        try:
            assert program.train()["places"] == ["a:0", "b:0"]
            bed.start_host("c")
            while "c:0" not in program.train()["places"]:
                assert len(program.found) < STEPS
                time.sleep(PAUSE_S)
            program.train()
        finally:
            said = program.end()
            print(said)  # shown where the test fails, or with -s
    assert program.found[-1]["events"] == ["joined", "decided", "moved"]
    assert "It is measured for at most" in said
    for each, other in zip(program.found, calm.found):
        assert (each["loss"], each["digest"]) == (other["loss"], other["digest"])
