"""A program that survives meets all faults of hosts and links, one after the other, and trains as if undisturbed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyroute2
import pytest
from drivers import ENTER

from hwaware.bench import testbed
from hwaware.bench.testbed import processes
from hwaware.bench.testbed.state import State, state_path

pytestmark = [pytest.mark.testbed, pytest.mark.thorough]

LIMIT_S = 60.0
STEPS = 40  # at most
PAUSE_S = 1.0
SCENARIO = """
shares = { a = 0.4, b = 0.3, c = 0.3, d = 0.3, e = 0.3, f = 0.3 }
default_mbit = 400
"""
# Makes a step for each line that it reads, and prints a line of JSON about it and about each phase of a recovery.
DRIVER = (
    ENTER
    + """
import hashlib, json, time
import jax, numpy
import hwaware, hwaware.models
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

hosts, curve = "abcdef", {"float32": (MatrixProduct(flops=1e9, seconds=100.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=bed.hosts[host]) for host in "abcdef"),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in "abcdef"),
    links=tuple(Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e7) for x in hosts for y in hosts),
)
hwaware.enable(profile, costs="model", survive=sys.argv[2] == "survive")
import alpa
from hwaware.survival import recovering

def told(self, phase):
    ends(self, phase)
    print(json.dumps({"phase": phase}) + "\\n", end="", flush=True)  # also from other threads

ends, recovering.Clock.ends = recovering.Clock.ends, told
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
for number, _ in enumerate(sys.stdin):
    start_s = time.monotonic()
    state, loss = step(state, model.batch(number, 28))
    loss, digest = float(loss._value), hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(state):
        digest.update(numpy.asarray(leaf._value).tobytes())
    places = sorted({device[0] for stage in hwaware.last_plan().stages for device in stage.devices})
    history = hwaware.last_history()
    events = () if history is None else history.events  # a vault may be missed before its host is
    events = [[event.what, event.took_s, event.phases] for event in events if event.kind != "vault"]
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
        self.ask()
        return self.says("loss")

    def ask(self):
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def says(self, key):
        """Return the next line that has this key."""
        for line in self.process.stdout:
            found = json.loads(line) if line.startswith("{") else {}  # Ray prints there too
            if key in found:
                return found
        raise AssertionError(self.process.stderr.read())

    def end(self):
        self.process.kill()
        return self.process.communicate()[1]


@pytest.fixture(scope="module")
def bed(tmp_path_factory, traces_of):
    path = tmp_path_factory.mktemp("scenario") / "surviving.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as made:
        traces = traces_of(made.name)
        yield made
    assert traces.found() == {}


def processes_of(bed, host):
    """Return the processes of a host, with their command lines."""
    holder = State.load(state_path(bed.name)).holders[host]
    found = {}
    for pid in processes.in_networks([os.stat(f"/proc/{holder}/ns/net").st_ino]) - {holder}:
        with contextlib.suppress(OSError):  # it has just ended
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def process_of(bed, host, name):
    """Return the one process of a host with this in its command line."""
    (pid,) = [pid for pid, line in processes_of(bed, host).items() if name in line.split(" ")[0]]
    return pid


def end_host(bed, host):
    """End every process of a host at once, as a power failure does, and its network with them."""
    set_link(bed, host, state="down")
    for pid in processes_of(bed, host):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def drain(bed, host):
    """Ask the program to leave a host."""
    line = [sys.executable, "-m", "hwaware", "drain", host, "--address", bed.address]
    return subprocess.Popen(line, stdout=subprocess.PIPE, text=True)


def set_link(bed, host, **setting):
    """Change the outer end of a host's link. Without a master it is no part of the bridge: all packets are lost."""
    veth = State.load(state_path(bed.name)).veth(host)
    with pyroute2.IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=veth)[0], **setting)


def test_all_faults(bed):
    calm = Program(bed, "plain")
    try:
        expected = [calm.train() for _ in range(STEPS)]
    finally:
        calm.end()
    program = Program(bed, "survive")
    try:
        found = [program.train() for _ in range(2)]
        assert found[-1]["places"] == ["a", "b", "c", "d", "e", "f"]
        drained = drain(bed, "d")
        train_until(program, found, ["a", "b", "c", "e", "f"])
        assert drained.communicate(timeout=LIMIT_S)[0].startswith("The training no longer uses d.")
        end_host(bed, "d")  # nobody misses it
        found += [program.train() for _ in range(2)]
        stopped = process_of(bed, "b", "ray::SurvivingWorker")
        os.kill(stopped, signal.SIGSTOP)
        found.append(program.train())
        assert f"its process {stopped} was stopped (SIGSTOP)" in found[-1]["events"][-1][0]
        assert found[-1]["places"] == ["a", "b", "c", "e", "f"]
        os.kill(process_of(bed, "e", "raylet"), signal.SIGKILL)
        train_until(program, found, ["a", "b", "c", "f"])
        assert f"Ray does not answer on host {bed.hosts['e']}" in found[-1]["events"][-1][0]
        set_link(bed, "f", master=0)
        train_until(program, found, ["a", "b", "c"])
        set_link(bed, "c", state="down")
        train_until(program, found, ["a", "b"])
        end_host(bed, "b")
        train_until(program, found, ["a"])
        found.append(program.train())
        # Ctrl-C while the last worker is replaced.
        os.kill(process_of(bed, "a", "ray::SurvivingWorker"), signal.SIGKILL)
        program.ask()
        program.says("phase")
        program.process.send_signal(signal.SIGINT)
        said = program.process.communicate(timeout=LIMIT_S)[1]
    finally:
        program.end()
    assert said.rstrip().endswith("KeyboardInterrupt")
    events = found[-1]["events"]
    print(*events, sep="\n")  # shown where the test fails, or with -s
    assert len(events) == said.count("the program goes on with layers") == 6
    assert all(took_s < LIMIT_S for _, took_s, _ in events)
    for each, other in zip(found, expected):
        assert (each["loss"], each["digest"]) == (other["loss"], other["digest"])
    # Not on c and f: hosts that are cut off end their workers only once their Ray notices. Ray's agents stay.
    end_s = time.monotonic() + LIMIT_S
    while left := [(host, line) for host in "abde" for line in processes_of(bed, host).values() if is_worker(line)]:
        assert time.monotonic() < end_s, left
        time.sleep(0.5)


def is_worker(line):
    return line.startswith("ray::") and not line.startswith(("ray::DashboardAgent", "ray::RuntimeEnvAgent"))


def train_until(program, found, places):
    """Make steps until the program is on these hosts."""
    while found[-1]["places"] != places:
        assert len(found) < STEPS
        time.sleep(PAUSE_S)  # a command needs seconds to start
        found.append(program.train())
