"""Does a testbed leave the machine as it was, however it ends?"""

import json
import os
import secrets
import signal
import subprocess
import sys
import time

import msgspec
import pytest
from builders import chosen

from hwaware.bench import testbed
from hwaware.bench.testbed import processes
from hwaware.bench.testbed.kinds import best_kind
from hwaware.bench.testbed.layout import device_ports
from hwaware.bench.testbed.manager import UP_LIMIT_S
from hwaware.bench.testbed.state import State, state_path
from hwaware.cluster import ClusterProfile
from hwaware.errors import ScenarioError, TestbedError, UnusableInputError

pytestmark = pytest.mark.testbed


def hwaware(*arguments, **options):
    line = [sys.executable, "-c", "from hwaware.cli import main; main()", "testbed", *arguments]
    return subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def wait_until(condition, what, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s} s for {what}"
        time.sleep(0.01)


def load(name):
    return State.load(state_path(name)) if state_path(name).exists() else None


@pytest.fixture(scope="module")
def beside(small, traces_of):
    """Start a testbed for the tests of this file; at the end, take it down without its keeper."""
    bed = testbed.up(small, name=f"test-beside-{secrets.token_hex(3)}")
    try:
        yield bed
        traces = traces_of(bed.name)
        os.kill(traces.state.keeper_pid, signal.SIGKILL)
        wait_until(lambda: bed.describe()["status"] == "broken", "the keeper's end")
    finally:
        testbed.down(bed.name)
    assert traces.found() == {}


def test_up_and_down_on_the_command_line_leave_nothing(small, beside, traces_of, run_driver, own_name):
    """Beside another testbed, with two devices on a host."""
    up = hwaware("up", small, "--name", own_name, "--json")
    output, errors = up.communicate(timeout=UP_LIMIT_S + 60.0)
    assert up.returncode == 0, errors
    document = json.loads(output)
    assert document["shaped"] == {"links": True, "cpu": True}
    assert [len(host["devices"]) for host in document["hosts"]] == [1, 2]
    bed = testbed.find(document["address"])
    assert bed.name == own_name
    assert not set(bed.hosts.values()) & set(beside.hosts.values())
    (task,) = run_driver(bed, ["r"])["tasks"]
    assert "/r/start\n" in task["group"]
    assert "/r/setup\n" in task["setup"]
    assert "/r/device-0\n" in task["joined"]
    assert task["share"] < 0.4 * 1.1  # both devices' shares, until it says which it serves
    traces = traces_of(own_name)
    assert set(traces.found()) == {"links", "processes", "groups", "files"}
    down = hwaware("down", own_name, "--json")
    assert json.loads(down.communicate(timeout=60)[0]) == {"down": [own_name]}
    assert traces.found() == {}
    assert beside.describe()["status"] == "running"
    assert not testbed.down(own_name)


FLOWS = """
import socket, sys, threading, time

NBYTES = 16 << 20
servers = [socket.create_server((sys.argv[1], int(port))) for port in sys.argv[2:]]
clients = [socket.create_connection(server.getsockname(), 20) for server in servers]
streams = [server.accept()[0] for server in servers]
together, seconds = threading.Barrier(2 * len(servers), timeout=20), {}

def send(client):
    together.wait()
    client.sendall(bytes(NBYTES))

def receive(stream):
    together.wait()
    started, left = time.monotonic(), NBYTES
    while left:
        left -= len(stream.recv(1 << 20))
    seconds[stream] = time.monotonic() - started

threads = [threading.Thread(target=send, args=(one,)) for one in clients]
threads += [threading.Thread(target=receive, args=(one,)) for one in streams]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*(NBYTES * 8 / seconds[stream] / 1e6 for stream in streams))
"""


def slowest_inside(bed, host, ports):
    """Mbit/s of the slowest of transfers inside a host to these ports, all at once; 0 is any port.

    A busy machine makes a transfer slower, and no transfer faster: of three tries, the fastest counts.
    """
    line = bed.command(host, [sys.executable, "-c", FLOWS, bed.hosts[host], *map(str, ports)])
    tries = [subprocess.run(line, check=True, timeout=60, capture_output=True, text=True) for _ in range(3)]
    return max(min(map(float, done.stdout.split())) for done in tries)


def test_traffic_inside_a_host_is_shaped(beside):
    assert slowest_inside(beside, "r", [0]) == pytest.approx(200, rel=0.15)
    # To each device at once: the two directions between them. To no device: all of it together.
    assert slowest_inside(beside, "r", [device_ports(0)[-1], device_ports(1)[0]]) == pytest.approx(200, rel=0.15)
    # Both have as many bytes, so the one that ends last tells the rate of all: the other may have had more than half.
    assert 2 * slowest_inside(beside, "r", [0, 0]) == pytest.approx(200, rel=0.15)


@pytest.mark.parametrize("stage", ["reserved", "hosts made", "head started"])
def test_killed_half_way(small, stage, traces_of, own_name):
    reached = {
        "reserved": lambda: load(own_name) is not None,
        "hosts made": lambda: load(own_name) is not None and load(own_name).holders,
        "head started": lambda: (
            load(own_name) is not None and os.path.exists(f"{load(own_name).temp_dir}/start-head.log")
        ),
    }[stage]
    up = hwaware("up", small, "--name", own_name)
    wait_until(reached, stage)
    up.kill()
    up.communicate()
    traces = traces_of(own_name)
    assert testbed.down(own_name)
    # A keeper that was being forked just then is not recognised as one yet; nobody says "go" to it, and it ends.
    wait_until(lambda: not traces.found(), "nothing to be left")


def test_a_keeper_that_ends_early_is_noticed_at_once(small, traces_of, own_name):
    """Its children live on; `up` does not wait for these."""
    up = hwaware("up", small, "--name", own_name)
    wait_until(lambda: load(own_name) is not None and load(own_name).holders, "the hosts")
    traces = traces_of(own_name)
    os.kill(traces.state.keeper_pid, signal.SIGKILL)
    _, errors = up.communicate(timeout=60)
    assert up.returncode == 1
    assert f"The keeper of testbed {own_name} ended early." in errors
    assert traces.found() == {}


def test_interrupted_up_cleans_after_itself(small, traces_of, own_name):
    up = hwaware("up", small, "--name", own_name)
    wait_until(lambda: load(own_name) is not None and load(own_name).holders, "the hosts")
    traces = traces_of(own_name)
    with pytest.raises(TestbedError, match="being started by process"):
        testbed.down(own_name)
    up.send_signal(signal.SIGINT)
    _, errors = up.communicate(timeout=60)
    assert (up.returncode, errors.splitlines()[-1]) == (130, "Interrupted.")
    assert traces.found() == {}


@pytest.mark.parametrize(("kind", "links"), chosen([("user", True), ("loopback", False)], 0))
def test_kinds_for_users_without_root(small, kind, links, traces_of, run_driver, own_name, tmp_path):
    if kind == "user" and not can_make_user_namespaces():
        pytest.skip("this system allows no user namespaces")
    up = hwaware("up", small, "--name", own_name, "--kind", kind, "--json")
    output, errors = up.communicate(timeout=UP_LIMIT_S + 60.0)
    assert up.returncode == 0, errors
    assert len([line for line in errors.splitlines() if line.startswith("Not shaped: CPU shares")]) == 1
    document = json.loads(output)
    assert document["shaped"] == {"links": links, "cpu": False}
    line = [sys.executable, "-c", "from hwaware.cli import main; main()"]
    about = ["--quick", "--no-runtime", "--address", document["address"], "-o", "cluster.json"]
    subprocess.run([*line, "profile", *about], cwd=tmp_path, timeout=120, check=True)
    assert [host.name for host in ClusterProfile.load(tmp_path / "cluster.json").hosts] == ["head", "r"]
    doctor = subprocess.run([*line, "doctor", "--json", *about[2:4]], stdout=subprocess.PIPE, timeout=180, check=False)
    assert len(json.loads(doctor.stdout)["ray"]["hosts"]) == 3
    # A shell in the testbed, and a program in it that has threads.
    program = "import sys, numpy; from hwaware.bench import testbed; testbed.find(sys.argv[1]).enter(); import ray"
    program = [sys.executable, "-c", f"{program}; ray.init(sys.argv[1])", document["address"]]
    environment = {**os.environ, **document["driver_environment"]}
    subprocess.run([*document["enter_command"][:-1], *program], env=environment, timeout=60, check=True)
    tasks = run_driver(testbed.find_by_name(own_name), ["head", "r"])["tasks"]
    if links:
        assert [task["host"] for task in tasks] == ["head", "r"]
    traces = traces_of(own_name)
    assert testbed.down(own_name)
    assert traces.found() == {}


def test_the_network_of_a_testbed_that_is_gone_may_be_somebody_elses_now(small, own_name):
    """The kernel numbers namespaces anew: a testbed that was killed altogether does not take others down with it."""
    up = hwaware("up", small, "--name", own_name)
    assert up.communicate(timeout=UP_LIMIT_S + 60.0) is not None
    state = load(own_name)
    processes.end_all(
        lambda: processes.with_descendants(processes.marked(state.mark()) | processes.in_networks(state.networks)),
        30.0,
        state.name,
    )
    with subprocess.Popen(["unshare", "--net", "sleep", "60"]) as other:
        try:
            wait_until(lambda: processes.networks_of([other.pid]) != processes.networks_of([os.getpid()]), "unshare")
            reused = msgspec.structs.replace(state, networks=tuple(processes.networks_of([other.pid])))
            reused.save(state_path(state.name))
            assert testbed.down(own_name)
            assert other.poll() is None
        finally:
            other.kill()


def can_make_user_namespaces():
    try:
        return best_kind("user") == "user"
    except UnusableInputError:
        return False


def test_a_node_that_cannot_start_is_reported_and_removed(small, monkeypatch, tmp_path, own_name):
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('no Ray today')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(TestbedError, match=r"(?s)node of ray-head did not start.*no Ray today.*To fix"):
        testbed.up(small, name=own_name)
    assert testbed.find_by_name(own_name) is None


def test_agents_that_start_slowly_do_not_end_their_nodes(small, monkeypatch, tmp_path, own_name):
    """A raylet of Ray 2.60 ends 15 s after its start unless it knows the port of its agent."""
    (tmp_path / "sitecustomize.py").write_text(
        'import time\nif "dashboard/agent.py" in open("/proc/self/cmdline").read():\n    time.sleep(600.0)\n'
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    bed = testbed.up(small, name=own_name)
    assert [host["runs_ray"] for host in bed.describe()["hosts"]] == [True, True]


def test_names_are_not_used_twice(beside):
    with pytest.raises(UnusableInputError, match="already"):
        testbed.up("directed", name=beside.name)
    with pytest.raises(UnusableInputError, match="is no name"):
        testbed.up("directed", name="../x")
    with pytest.raises(ScenarioError):
        testbed.up("nothing-like-it")
