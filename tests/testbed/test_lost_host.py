"""A host whose network goes away in the middle of training ends the step with its name, and leaves nothing running."""

import json
import os
import subprocess
import sys

import pyroute2
import pytest

from hwaware.bench import testbed
from hwaware.bench.testbed.state import State, state_path

pytestmark = pytest.mark.testbed

LIMIT_S = 30.0
SCENARIO = """
shares = { a = 0.5, b = 0.4, c = 0.4 }
default_mbit = 400
"""
DRIVER = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
from hwaware.bench import testbed
bed = testbed.find(sys.argv[1])
bed.enter()
import ray
ray.init(address=sys.argv[1], _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
import hwaware.models
from hwaware.patching.activation import install_runtime
install_runtime()
from hwaware.bench.training import TrainingRun
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.errors import WorkerFailedError
from hwaware.plans import Plan, Replica, Stage

curve = {"float32": (MatrixProduct(flops=1e9, seconds=1.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "abc"),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in "abc"),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in "abc" for y in "abc"),
)
stages = tuple(Stage(layers=(i, i), replicas=(Replica(devices=(h + ":0",)),)) for i, h in enumerate("abc"))
plan = Plan(num_microbatches=4, stages=stages)
run = TrainingRun("lost", hwaware.models.make(hwaware.models.MlpConfig(blocks=3, hidden=256)), profile, 3, 4, 16, plan)
run.step()
print("started", flush=True)
try:
    while True:
        start_s = time.monotonic()
        run.step()
except WorkerFailedError as error:
    print(json.dumps([error.where, error.cause, time.monotonic() - start_s]), flush=True)
run.close()
"""


def test_the_lost_host_is_named(tmp_path):
    path = tmp_path / "lost.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as bed:
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        line = [sys.executable, "-c", DRIVER, bed.address]
        with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, text=True) as driver:
            try:
                assert driver.stdout.readline().strip() == "started"
                veth = State.load(state_path(bed.name)).veth("b")
                with pyroute2.IPRoute() as route:
                    route.link("set", index=route.link_lookup(ifname=veth)[0], state="down")
                where, cause, took_s = json.loads(driver.stdout.readline())
            finally:
                driver.kill()
        assert where == f"stage 1 on host {bed.hosts['b']}, device 0"
        assert "cannot be reached" in cause
        assert took_s < LIMIT_S
