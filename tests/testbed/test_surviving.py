"""A program that survives loses a whole host, and later the link of another: its losses and its state stay the same."""

import json
import os
import signal
import subprocess
import sys
import time

import pyroute2
import pytest
from builders import ALL_CASES
from drivers import ENTER

from hwaware.bench import testbed
from hwaware.bench.testbed import processes
from hwaware.bench.testbed.state import State, state_path

pytestmark = pytest.mark.testbed

LIMIT_S = 60.0
STEPS = 24 if ALL_CASES else 16  # at most
PAUSE_S = 1.0
HOSTS = "abcd" if ALL_CASES else "abc"  # the last of four is drained
SCENARIO = f"""
shares = {{ a = 0.5, {", ".join(f"{host} = 0.4" for host in HOSTS[1:])} }}
default_mbit = 400
"""
# Makes a step for each line that it reads, and prints a line of JSON about it.
DRIVER = (
    ENTER
    + """
import hashlib, json, time
import jax, numpy
import hwaware, hwaware.models
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

hosts, curve = sorted(bed.hosts), {"float32": (MatrixProduct(flops=1e9, seconds=100.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in hosts),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in hosts),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in hosts for y in hosts),
)
hwaware.enable(profile, costs="model", survive=sys.argv[2] == "survive")
import alpa

alpa.init(cluster="ray")
blocks = int(sys.argv[3])
model = hwaware.models.make(hwaware.models.MlpConfig(blocks=blocks, hidden=256))
method = alpa.PipeshardParallel(
    num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=blocks), stage_option="auto"
)
step = alpa.parallelize(
    lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
)
state = model.initial_state(0)
# Four microbatches of seven samples: no stage can have replicas, so every placement is a chain.
for number, _ in enumerate(sys.stdin):
    start_s = time.monotonic()
    state, loss = step(state, model.batch(number, 28))
    loss, digest = float(loss._value), hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(state):
        digest.update(numpy.asarray(leaf._value).tobytes())
    places = sorted({device[0] for stage in hwaware.last_plan().stages for device in stage.devices})
    history = hwaware.last_history()
    events = [] if history is None else [[event.what, event.took_s, event.phases] for event in history.events]
    found = {"loss": loss, "digest": digest.hexdigest(), "places": places, "events": events}
    print(json.dumps({**found, "took_s": time.monotonic() - start_s}), flush=True)
alpa.shutdown()
"""
)


class Program:
    """The program on a testbed, and what it says."""

    def __init__(self, bed, *arguments):
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        line = [sys.executable, "-c", DRIVER, bed.address, *arguments]
        self.process = subprocess.Popen(
            line, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def train(self):
        """Let the program make a step; return what it says."""
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):  # Ray prints there too
                return json.loads(line)
        raise AssertionError(self.process.stderr.read())

    def end(self):
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture
def bed(tmp_path):
    path = tmp_path / "surviving.toml"
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


def drain(bed, host):
    """Ask the program to leave a host."""
    line = [sys.executable, "-m", "hwaware", "drain", host, "--address", bed.address]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def set_link(bed, host, state):
    veth = State.load(state_path(bed.name)).veth(host)
    with pyroute2.IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=veth)[0], state=state)


@pytest.mark.thorough
def test_the_only_host_in_use_is_drained_and_the_next_one_ends(bed):
    """A host without a stage holds the second copies."""
    expected, program = calm(bed, "1"), Program(bed, "survive", "1")
    try:
        found = [program.train() for _ in range(2)]
        (used,) = found[-1]["places"]
        drained = drain(bed, used)
        while found[-1]["places"] == [used]:
            assert len(found) < STEPS
            time.sleep(PAUSE_S)  # a command needs seconds to start
            found.append(program.train())
        assert drained.communicate(timeout=LIMIT_S)[0].startswith(f"The training no longer uses {used}.")
        (second,) = found[-1]["places"]
        found.append(program.train())
        end_host(bed, second)
        found += [program.train() for _ in range(2)]
        assert not {used, second} & set(found[-1]["places"])
    finally:
        program.end()
    assert_alike(found, expected)


def calm(bed, blocks):
    """Return the steps of a program whose hosts stay."""
    program = Program(bed, "plain", blocks)
    try:
        return [program.train() for _ in range(STEPS)]
    finally:
        program.end()


def assert_alike(found, expected):
    for each, other in zip(found, expected):
        assert (each["loss"], each["digest"]) == (other["loss"], other["digest"])


def test_hosts_that_are_lost(bed):
    """The link of a host goes down, and another host ends at once; with four, one is drained before and then ended."""
    expected = calm(bed, "6")
    program = Program(bed, "survive", "6")
    try:
        found = [program.train() for _ in range(2)]
        assert found[-1]["places"] == list(HOSTS)
        if "d" in HOSTS:
            drained = drain(bed, "d")
            train_until(program, found, ["a", "b", "c"])
            assert drained.communicate(timeout=LIMIT_S)[0].startswith("The training no longer uses d.")
            end_host(bed, "d")  # nobody misses it
            found += [program.train() for _ in range(2)]
        set_link(bed, "c", "down")
        train_until(program, found, ["a", "b"])
        end_host(bed, "b")
        train_until(program, found, ["a"])
        found.append(program.train())
    finally:
        said = program.end()
    events = found[-1]["events"]
    print(*events, sep="\n")  # shown where the test fails, or with -s
    assert len(events) == said.count("the program goes on with layers") == len(HOSTS) - 1
    assert all(took_s < LIMIT_S for _, took_s, _ in events)
    assert_alike(found, expected)


def train_until(program, found, places):
    """Make steps until the program is on these hosts."""
    while found[-1]["places"] != places:
        assert len(found) < STEPS
        time.sleep(PAUSE_S)  # a command needs seconds to start
        found.append(program.train())
