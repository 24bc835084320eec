"""A host starts later, is lost, and comes back: a program uses it each time, and its losses and state stay the same."""

import json
import os
import signal
import statistics
import subprocess
import sys
import time

import pyroute2
import pytest
from drivers import ENTER

from hwaware.bench import testbed
from hwaware.bench.testbed import processes
from hwaware.bench.testbed.state import State, state_path

pytestmark = [pytest.mark.testbed, pytest.mark.thorough]

# Steps at most, and those that a median takes after a pause.
STEPS, FEW, PAUSE_S = 240, 8, 0.5
SCENARIO = """
shares = { a = 0.3, b = 0.3, c = 0.7 }
default_mbit = 800
"""
# Makes a step for each line that it reads, and prints a line of JSON about it.
DRIVER = (
    ENTER
    + """
import hashlib, json, time
import jax, numpy
import hwaware, hwaware.models

# So many steps are left that every gain pays for a move.
hwaware.enable(sys.argv[2], costs="auto", survive=sys.argv[3] == "survive", steps=10**6)
import alpa

alpa.init(cluster="ray")
model = hwaware.models.make(hwaware.models.MlpConfig(blocks=12, hidden=512))
method = alpa.PipeshardParallel(
    num_micro_batches=4, layer_option=alpa.AutoLayerOption(layer_num=12), stage_option="auto"
)
step = alpa.parallelize(
    lambda state, batch: model.train_step(state, batch, value_and_grad=alpa.value_and_grad), method=method
)
state = model.initial_state(0)
# Four microbatches of 61 samples: no stage can have replicas, so every placement is a chain.
for number, line in enumerate(sys.stdin):
    start_s = time.monotonic()
    state, loss = step(state, model.batch(number, 4 * 61))
    loss, took_s, digest = float(loss._value), time.monotonic() - start_s, hashlib.sha256()
    for leaf in jax.tree_util.tree_leaves(state):
        digest.update(numpy.asarray(leaf._value).tobytes())
    places = sorted({device[0] for stage in hwaware.last_plan().stages for device in stage.devices})
    history = hwaware.last_history()
    events = [] if history is None else [[event.kind, event.what, event.took_s] for event in history.events]
    found = {"loss": loss, "digest": digest.hexdigest(), "places": places, "events": events, "took_s": took_s}
    if line.strip():
        hwaware.last_profile().save(line.strip())
    print(json.dumps(found), flush=True)
alpa.shutdown()
"""
)


class Program:
    """The program on a testbed, and what it says."""

    def __init__(self, bed, *arguments):
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu", "HWAWARE_COSTS": "auto"}
        line = [sys.executable, "-c", DRIVER, bed.address, *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(line, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self.found = []

    def train(self, path=""):
        """Let the program make a step, and save its profile there, if anywhere."""
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):  # Ray prints there too
                self.found.append(json.loads(line))
                return self.found[-1]
        raise AssertionError(self.process.stderr.read())

    def train_until(self, uses):
        """Make steps until the program uses the third host, or does not."""
        while ("c" in self.train()["places"]) != uses:
            assert len(self.found) < STEPS
            time.sleep(PAUSE_S)

    def step_s(self):
        """Return the median of some steps without the first two."""
        return statistics.median([self.train()["took_s"] for _ in range(2 + FEW)][2:])

    def end(self):
        self.process.kill()
        return self.process.communicate()[1]


def end_host(bed, host):
    """End every process of a host at once, as a power failure does, and its network with them."""
    set_link(bed, host, "down")
    holder = State.load(state_path(bed.name)).holders[host]
    for pid in processes.in_networks([os.stat(f"/proc/{holder}/ns/net").st_ino]):
        if pid != holder:
            os.kill(pid, signal.SIGKILL)


def set_link(bed, host, state):
    veth = State.load(state_path(bed.name)).veth(host)
    with pyroute2.IPRoute() as route:
        route.link("set", index=route.link_lookup(ifname=veth)[0], state=state)


def profiled(bed, path):
    line = [sys.executable, "-m", "hwaware", "profile", "--quick", "--no-runtime", "--address", bed.address, "-o", path]
    subprocess.run(line, env={**os.environ, **bed.driver_environment()}, check=True, timeout=120)


def test_a_host_joins_and_is_lost_and_comes_back(tmp_path):
    path = tmp_path / "joining.toml"
    path.write_text(SCENARIO)
    before, after = str(tmp_path / "before.json"), str(tmp_path / "after.json")
    with testbed.running(str(path), kind="root", late=["c"]) as bed:
        profiled(bed, before)
        program = Program(bed, before, "survive")
        try:
            program.train()
            slow_s = program.step_s()
            bed.start_host("c")
            program.train_until(uses=True)
            fast_s = program.step_s()
            end_host(bed, "c")
            program.train_until(uses=False)
            set_link(bed, "c", "up")
            bed.start_host("c")
            program.train_until(uses=True)
            program.train(after)
        finally:
            said = program.end()
        print(slow_s, fast_s, said, sep="\n")  # shown where the test fails, or with -s
        calm = Program(bed, after, "plain")
        try:
            for each in program.found:
                same = calm.train()
                assert (each["loss"], each["digest"]) == (same["loss"], same["digest"])
        finally:
            calm.end()
    kinds = [kind for kind, *_ in program.found[-1]["events"]]
    assert kinds.count("joined") == 2
    assert kinds.count("recovered") == 1
    assert kinds.count("moved") >= 2
    assert fast_s < slow_s
