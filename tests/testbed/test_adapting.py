"""One host becomes slower while a program trains: it is noticed, the program moves, and its losses stay the same."""

import json
import os
import subprocess
import sys

import pytest

from hwaware.bench import testbed

pytestmark = [pytest.mark.testbed, pytest.mark.thorough]
SLOW_FROM, STEPS = 24, 60
# Prints a line of JSON after each step, and one with the history at the end.
DRIVER = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
from hwaware.bench import testbed
bed = testbed.find(sys.argv[1])
bed.enter()
import ray
ray.init(address=sys.argv[1], _node_ip_address=bed.head_address, log_to_driver=False, logging_level="error")
import hwaware, hwaware.models
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct

curve = {"float32": (MatrixProduct(flops=1e9, seconds=100.0),)}
profile = ClusterProfile(
    hosts=tuple(Host(name=host, address=address) for host, address in bed.hosts.items()),
    devices=tuple(Device(id=h + ":0", host=h, kind="cpu", memory_bytes=1 << 30, throughput=curve) for h in bed.hosts),
    links=tuple(
        Link(source=x, target=y, latency_s=1e-3, bandwidth_bytes_per_s=1e8) for x in bed.hosts for y in bed.hosts
    ),
)
# So many steps are left that every gain pays for a move.
hwaware.enable(profile, costs="model", adapt=sys.argv[2] == "adapt", steps=10**6)
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
for number in range(int(sys.argv[3])):
    start_s = time.monotonic()
    state, loss = step(state, model.batch(number, 4 * 61))
    loss = float(loss._value)
    print(json.dumps({"loss": loss, "took_s": time.monotonic() - start_s}), flush=True)
history = hwaware.last_history()
print(json.dumps({"events": json.loads(history.to_json()).get("events", []) if history else []}), flush=True)
alpa.shutdown()
"""


def train(bed, adapt, slow_host=None):
    """Train on a testbed, and return what each step said, and the history's events."""
    line = [sys.executable, "-c", DRIVER, bed.address, adapt, str(STEPS)]
    environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
    program = subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    found = []
    try:
        for text in program.stdout:
            if text.startswith("{"):  # Ray prints there too
                found.append(json.loads(text))
            if slow_host is not None and len(found) == SLOW_FROM:
                bed.set_share(slow_host, 0.15)
    finally:
        program.kill()
        said = program.communicate()[1]
    assert len(found) == STEPS + 1, said
    return found[:-1], found[-1]["events"]


def layers_of(device, mapping):
    """Return the number of layers that a device has in a mapping's words, where each of four has three at first."""
    part = next((part for part in mapping.split(", ") if part.endswith(f"on {device}")), None)
    if part is None:
        return 0
    first, _, last = part.replace("layers ", "").split(" ")[0].partition("-")
    return int(last or first) - int(first) + 1


def test_a_slow_host_is_noticed_and_relieved():
    with testbed.running("slows-midway") as bed:
        calm, _ = train(bed, "stay")
        slowed, events = train(bed, "adapt", slow_host="h1")
    print(*slowed, *events, sep="\n")  # shown where the test fails, or with -s
    assert [one["loss"] for one in slowed] == [one["loss"] for one in calm]
    noticed = [event for event in events if event["kind"] == "noticed" and event["numbers"].get("h1:0", 1.0) > 1.5]
    assert SLOW_FROM < noticed[0]["call"] <= SLOW_FROM + 10
    moved = [event for event in events if event["kind"] == "moved" and event["call"] >= noticed[0]["call"]]
    assert moved
    assert layers_of("h1:0", moved[0]["mapping"]) < 3
