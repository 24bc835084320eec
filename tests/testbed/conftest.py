"""Testbeds for the tests. They need root; whatever a test leaves is taken down."""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest

from hwaware.bench import testbed
from hwaware.bench.testbed import processes
from hwaware.bench.testbed.state import State, state_path

# Hosts may have names that the testbed's own files and processes could have.
SMALL = """
shares = { head = 0.8, r = 0.2 }
default_mbit = 400
mbit = { "head->r" = 100 }
devices = { r = 2 }
inside_mbit = 200
"""
DRIVER = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
from hwaware.bench import testbed
testbed.find(sys.argv[1]).enter()
import ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=1)
def spin():
    import os, socket, time
    from hwaware import host_devices
    with open("/proc/self/cgroup") as stream:
        group = stream.read()
    started, used = time.monotonic(), time.process_time()
    while time.monotonic() - started < 1.5:
        pass
    share = (time.process_time() - used) / (time.monotonic() - started)
    with host_devices.unthrottled():
        with open("/proc/self/cgroup") as stream:
            setup = stream.read()
    host_devices.join(0)
    with open("/proc/self/cgroup") as stream:
        joined = stream.read()
    return {"host": socket.gethostname(), "address": socket.gethostbyname(socket.gethostname()), "share": share,
            "group": group, "setup": setup, "joined": joined, "nproc": os.environ["NPROC"]}

nodes = {n["NodeManagerHostname"]: n["Resources"] for n in ray.nodes() if n["Alive"]}
found = [ray.get(spin.options(resources={host: 1}).remote(), timeout=60) for host in sys.argv[2:]]
print(json.dumps({"nodes": nodes, "tasks": found}))
"""


class Traces:
    """What a testbed has on the machine, as far as it can be told from everyone else's."""

    def __init__(self, state):
        self.state = state

    def found(self):
        state, trees = self.state, (self.state.cpu_groups(), self.state.memory_groups())
        names = {state.bridge(), *(state.veth(host) for host in state.hosts)}
        found = {
            "links": sorted(names & set(os.listdir("/sys/class/net"))),
            "processes": sorted(processes.marked(state.mark()) | processes.in_networks(state.networks)),
            "groups": [str(root) for tree in trees if tree is not None for root in tree.roots if root.exists()],
            "files": [p for p in (state.temp_dir, str(state_path(state.name))) if os.path.exists(p)],
            "mounts": [line for line in Path("/proc/mounts").read_text().splitlines() if state.temp_dir in line],
        }
        return {key: value for key, value in found.items() if value}


@pytest.fixture(scope="session", autouse=True)
def _needs_root():
    if os.geteuid() != 0:
        pytest.skip("needs root: network namespaces and CPU quotas")


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "small.toml"
    path.write_text(SMALL)
    return str(path)


@pytest.fixture(scope="session")
def directed():
    with testbed.running("directed") as bed:
        yield bed


@pytest.fixture
def own_name():
    """Give a testbed's name that no other run on this machine has; take the testbed down, whatever happens."""
    name = f"test-{secrets.token_hex(3)}"
    yield name
    testbed.down(name)


@pytest.fixture(scope="session")
def traces_of():
    return lambda name: Traces(State.load(state_path(name)))


@pytest.fixture(scope="session")
def run_driver():
    def run(bed, hosts):
        line = [sys.executable, "-c", DRIVER, bed.address, *hosts]
        environment = {**os.environ, **bed.driver_environment()}
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=90, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
