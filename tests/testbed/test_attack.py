"""A program in the cluster's network that knows the protocol, but not the secret, changes nothing in a training."""

import json
import os
import subprocess
import sys

import pytest
from drivers import TWO_STAGES

from hwaware.bench import testbed

pytestmark = [pytest.mark.testbed, pytest.mark.thorough]

SCENARIO = """
shares = { a = 0.5, b = 0.5 }
default_mbit = 400
"""
# A step of this model takes well below a second; a step that stalls takes minutes.
STALL_S = 20.0
DRIVER = (
    TWO_STAGES
    + """
import json, time
model = hwaware.models.make(hwaware.models.MlpConfig(blocks=2, hidden=256))
longest = 0.0
for number in range(2):  # alone, encrypted and with digests, and under attack without
    with hwaware.runtime_settings(message_digests=number == 0, encrypt=number == 0):
        run = TrainingRun("attacked", model, profile, 2, 4, 16, plan)
    run.step()
    if number:
        workers = [mesh.workers[0] for mesh in run._mesh.launched_physical_mesh_group.meshes]
        print(json.dumps(ray.get([worker.mailbox_address.remote() for worker in workers], timeout=60)), flush=True)
        sys.stdin.readline()
    for _ in range(20):
        longest = max(longest, run.step())
    print(json.dumps([run.losses, longest]), flush=True)
    run.close()
"""
)
ATTACKER = """
import contextlib, itertools, json, socket, struct, sys
from hwaware.bench import testbed
testbed.find(sys.argv[1]).enter()
addresses = [tuple(address) for address in json.loads(sys.argv[2])]

def message(key, payload=b""):
    return struct.pack("<IQ", len(key), len(payload)) + key + payload

group = "{0}:0,{1}:0".format(*(host for host, _ in addresses)).encode()
said = [message(b"!failure", b"out of memory"), message(b"!hello", b"stage 0"), b"GET / HTTP/1.1\\r\\n\\r\\n"]
said += [message(group + b"|0.0>1.0#%d" % number, bytes(16384)) for number in range(200, 210)]
idle = []
print("attacks", flush=True)
for number in itertools.count():
    for address in addresses:
        with contextlib.suppress(OSError):
            connection = socket.create_connection(address, timeout=1.0)
            idle.append(connection)
            if number % 2:
                greeting = connection.recv(40)
                lie = greeting + struct.pack("<H", 3) + b"abc" + greeting[8:]  # its own nonce, reflected as a proof
                connection.sendall(lie * (number % 4 == 1) + said[number % len(said)])
    if len(idle) > 300:
        idle.pop(0).close()
"""


def test_a_stranger_changes_nothing(tmp_path):
    path = tmp_path / "attack.toml"
    path.write_text(SCENARIO)
    with testbed.running(str(path)) as bed:
        environment = {**os.environ, **bed.driver_environment(), "JAX_PLATFORMS": "cpu"}
        options = {"env": environment, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen([sys.executable, "-c", DRIVER, bed.address], **options) as driver:
            try:
                alone, _ = json.loads(driver.stdout.readline())
                addresses = driver.stdout.readline()
                line = [sys.executable, "-c", ATTACKER, bed.address, addresses]
                with subprocess.Popen(line, **options) as attacker:
                    try:
                        assert attacker.stdout.readline().strip() == "attacks"
                        driver.stdin.write("go on\n")
                        driver.stdin.flush()
                        attacked, longest_s = json.loads(driver.stdout.readline())
                        assert attacker.poll() is None, "the attack ended before the training"
                    finally:
                        attacker.kill()
            finally:
                driver.kill()
    assert attacked == alone
    assert len(attacked) == 21
    assert longest_s < STALL_S
