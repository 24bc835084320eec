"""Planning a testbed: addresses, quotas, names, what hosts are told; all without making anything."""

import contextlib
import errno
import ipaddress
import itertools
import json
import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwaware.bench.testbed import kinds, layout, links, load_scenario, manager, namespaces, processes, ray_nodes
from hwaware.bench.testbed.born import sitecustomize
from hwaware.bench.testbed.cgroups import BESIDE_ARRAYS_BYTES, CpuGroups, MemoryGroups, find_cpu_groups
from hwaware.bench.testbed.keeper import WorkerMover
from hwaware.bench.testbed.manager import Testbed
from hwaware.bench.testbed.ray_nodes import (
    announcing,
    driver_environment,
    head_options,
    host_environment,
    host_options,
    patient,
    port_options,
)
from hwaware.bench.testbed.scenarios import MAX_DEVICES
from hwaware.bench.testbed.state import State, directory, user_of
from hwaware.errors import TestbedError, UnusableInputError

ROUTES = """Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010011AC\t0003\t0\t0\t0\t00000000\t0\t0\t0
hwb1\t0000400A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
eth0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


def state(**changes):
    scenario = load_scenario("fast-and-slow")
    values = {
        "name": "test-ab12",
        "scenario": scenario,
        "kind": "root",
        "token": "ab12",
        "owner_pid": os.getpid(),
        "owner_started": processes.start_ticks(os.getpid()),
        "subnet": "10.64.3.0/24",
        "address": "10.64.3.254:6400",
        "hosts": {host: f"10.64.3.{index + 1}" for index, host in enumerate(scenario.hosts())},
        "temp_dir": "/tmp/hw-ab12",
    }
    return State(**{**values, **changes})


@given(st.floats(0.01, 16))
def test_quota_is_the_share_within_the_kernels_limits(share):
    quota, period = layout.cpu_quota(share)
    assert quota >= layout.MIN_QUOTA_US
    assert layout.MIN_PERIOD_US <= period <= layout.MAX_PERIOD_US
    assert quota / period == pytest.approx(share, rel=1e-3)


def test_routes_are_read_and_default_routes_are_not():
    networks = [ipaddress.IPv4Network(text) for text in ("10.64.0.0/24", "172.17.0.0/16")]
    assert layout.routed_networks(ROUTES) == networks


def test_free_subnet_avoids_routes_and_other_testbeds():
    taken = [ipaddress.IPv4Network(text) for text in ("10.64.0.0/24", "10.64.1.0/25")]
    assert layout.free_subnet(taken) == ipaddress.IPv4Network("10.64.2.0/24")


def test_free_subnet_leaves_a_covered_range():
    taken = [ipaddress.IPv4Network("10.0.0.0/8")]
    assert layout.free_subnet(taken) == ipaddress.IPv4Network("172.16.0.0/24")


def test_no_free_subnet_says_what_to_do():
    taken = [ipaddress.IPv4Network(text) for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")]
    with pytest.raises(TestbedError, match="To fix: remove a route"):
        layout.free_subnet(taken)


def test_addresses_in_the_subnet():
    subnet = ipaddress.IPv4Network("10.64.3.0/24")
    assert layout.host_address(subnet, 0) == "10.64.3.1"
    assert layout.head_address(subnet) == "10.64.3.254"


def test_token_is_not_a_taken_one():
    tokens = iter(["aa", "bb", "cc"])
    assert layout.free_token({"aa", "bb"}.__contains__, lambda: next(tokens)) == "cc"
    with pytest.raises(TestbedError, match="100 tries"):
        layout.free_token({"aa"}.__contains__, lambda: "aa")


def test_a_directory_that_is_there_already_is_not_taken(tmp_path, monkeypatch):
    """It may be another user's testbed; a start that fails removes the directory of its token."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(layout, "MAX_TEMP_DIR_LENGTH", 1000)
    tokens = itertools.chain(["zz1"], itertools.repeat("zz2"))
    monkeypatch.setattr(manager.secrets, "token_hex", lambda nbytes: next(tokens))
    (tmp_path / "hw-zz1").mkdir()
    assert manager._reserve(load_scenario("two-racks"), None, "loopback", ()).token == "zz2"


def test_link_names_fit_the_kernel():
    names = [state().bridge(), *(state().veth(host) for host in state().hosts)]
    assert len(set(names)) == 5
    assert all(len(name) <= 15 for name in names)


def test_devices_variable_with_and_without_groups(monkeypatch):
    from hwaware import host_devices

    scenario = load_scenario("unequal-devices")
    groups = CpuGroups("/cg", "x", 1).device_groups(scenario, "h0")
    monkeypatch.setenv(
        "HWAWARE_DEVICES", layout.devices_variable(layout.describe_devices(scenario, "h0", True), groups)
    )
    first, second = host_devices.declared()
    assert (first.id, first.kind, first.memory_bytes) == ("h0:0", "cpu-0.40", 2048 << 20)
    assert second.group == "/cg/hwaware-x/h0/device-1/cgroup.procs"
    assert first.start_group == "/cg/hwaware-x/h0/start/cgroup.procs"
    assert "group" not in json.loads(layout.devices_variable(layout.describe_devices(scenario, "h1", False), None))[0]


def test_single_device_hosts_start_workers_in_the_devices_group():
    groups = CpuGroups("/cg", "x", 1).device_groups(load_scenario("fast-and-slow"), "h1")
    assert groups.start == groups.devices[0]


def test_nodes_never_use_rays_own_places():
    options = [*head_options(state(address="127.0.0.1:6400"), []), *host_options(state(), "h0", [])]
    text = " ".join(options)
    assert "--temp-dir=/tmp/hw-ab12/r" in options
    assert "--num-gpus=1" in options
    # The driver compares the kind of a host's devices with the profile's, and --only with their ids.
    kind = json.loads(host_environment(state(), "h0")["HWAWARE_DEVICES"])[0]["kind"]
    assert f'--resources={{"h0": 1, "hwaware-kind:{kind}": 1, "hwaware-device:h0:0": 1}}' in options
    assert "/tmp/ray" not in text
    assert driver_environment(state())["RAY_AUTH_TOKEN_PATH"] == "/tmp/hw-ab12/token"


def test_each_device_has_ports_that_one_mask_finds():
    """And that neither Ray nor an outgoing connection is given."""
    blocks = [layout.device_ports(index) for index in range(MAX_DEVICES)]
    for block in blocks:
        assert {port & layout.DEVICE_PORTS_MASK for port in block} == {block[0]}
    ports = [port for block in blocks for port in block]
    assert len(set(ports)) == len(ports)
    assert max(ports) < 32768
    assert layout.RAY_PORTS_FIRST not in {port & layout.RAY_PORTS_MASK for port in ports}


@pytest.mark.parametrize("kind", ["root", "loopback"])
def test_devices_have_ports_of_their_own_where_hosts_have_links(kind):
    [entry] = json.loads(host_environment(state(kind=kind), "h1")["HWAWARE_DEVICES"])
    assert entry.get("ports") == ([21504, 21567] if kind == "root" else None)


def test_worker_ports_lie_in_the_block_that_is_not_shaped():
    ports = [int(option.partition("=")[2]) for option in port_options(state())["h0"]]
    assert len(ports) == len(set(ports)) == 8
    assert {port & layout.RAY_PORTS_MASK for port in ports} == {layout.RAY_PORTS_FIRST}


@pytest.mark.parametrize("kind", ["root", "loopback"])
def test_no_port_is_given_twice_and_none_is_the_heads(kind, monkeypatch):
    taken = state(kind=kind, address="127.0.0.1:22001")
    monkeypatch.setattr(layout, "FREE_PORTS", range(22000, 22040))
    options = port_options(taken)
    ports = [option.partition("=")[2] for node in options for option in options[node] if not option.endswith("=0")]
    nodes = 1 if kind == "root" else 1 + len(taken.hosts)
    outside = [port for port in ports if 22000 <= int(port) < 22040]
    assert len(outside) == len(set(outside)) == 6 * nodes
    assert "22001" not in ports


def test_too_few_free_ports_are_an_error(monkeypatch):
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        monkeypatch.setattr(layout, "FREE_PORTS", range(port, port + 1))
        with pytest.raises(TestbedError, match=r"^0 ports .* expected 1"):
            layout.free_ports("127.0.0.1", 1)


def test_a_trial_that_does_not_end_is_an_error(monkeypatch):
    monkeypatch.setattr(kinds, "_LIMIT_S", 0.01)  # shorter than starting Python
    with pytest.raises(TestbedError, match=r"did not end within 0\.01 s"):
        kinds._succeeds("None")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_it_is_taken_down_does_not_leave_it(monkeypatch, error):
    taken_down = []

    def down(name):
        taken_down.append(name)
        if len(taken_down) == 1:
            raise error

    monkeypatch.setattr(manager, "up", lambda *_, **__: Testbed(state()))
    monkeypatch.setattr(manager, "best_kind", lambda kind, to_enter: kind)
    monkeypatch.setattr(manager, "down", down)
    with pytest.raises(error), manager.running("fast-and-slow"):
        pass
    assert taken_down == ["test-ab12", "test-ab12"]


def test_a_process_with_threads_gets_a_testbed_it_can_enter(monkeypatch):
    pytest.importorskip("ray")
    monkeypatch.setattr(kinds, "_works", lambda kind: kind != "root")
    monkeypatch.setattr(kinds.namespaces, "has_one_thread", lambda: True)
    assert (kinds.best_kind("auto"), kinds.best_kind("auto", to_enter=True)) == ("user", "user")
    monkeypatch.setattr(kinds.namespaces, "has_one_thread", lambda: False)
    assert (kinds.best_kind("auto"), kinds.best_kind("auto", to_enter=True)) == ("user", "loopback")
    assert kinds.best_kind("user", to_enter=True) == "user"
    own = {"keeper_pid": os.getpid(), "keeper_started": processes.start_ticks(os.getpid())}
    bed = Testbed(state(kind="user", ready=True, **own))
    bed.enter()  # it is there already
    assert str(os.getpid()) in bed.describe()["enter_command"]
    monkeypatch.setattr(namespaces, "shares", lambda *_: False)
    with pytest.raises(UnusableInputError, match=r"several threads.*To fix: "):
        bed.enter()


def test_a_testbed_whose_keeper_ended_cannot_be_entered():
    assert Testbed(state(kind="user", ready=True)).describe()["enter_command"] == []
    with pytest.raises(TestbedError, match=r"test-ab12 is broken.*To fix: .*hwaware testbed down test-ab12"):
        Testbed(state(kind="user", ready=True)).enter()


def test_a_user_finds_the_same_testbeds_inside_a_testbed():
    assert user_of("         0       1000          1\n") == 1000
    for elsewhere in ("0 0 4294967295\n", "0 1000 1\n1 100000 65536\n", ""):  # the machine itself; containers
        assert user_of(elsewhere) == os.geteuid()


def test_threads_are_counted():
    assert namespaces.has_one_thread() == (len(os.listdir("/proc/self/task")) == 1)
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        assert not namespaces.has_one_thread()
    finally:
        ended.set()
        other.join()


@pytest.mark.parametrize(
    ("scenario", "begin"),
    [("two racks/../x", "two-racks-..-x-"), ("-" + 60 * "ö", "testbed-"), (99 * "a", 43 * "a" + "-")],
)
def test_a_testbed_of_a_scenario_with_any_name_gets_a_name(scenario, begin, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    named = msgspec.structs.replace(load_scenario("two-racks"), name=scenario)
    made = manager._reserve(named, None, "loopback", ())
    assert made.name == begin + made.token
    with pytest.raises(UnusableInputError, match="'' is no name for a testbed"):
        manager._reserve(named, "", "loopback", ())


def test_state_survives_its_file(tmp_path):
    state().save(tmp_path / "s.json")
    assert State.load(tmp_path / "s.json") == state()


def test_state_knows_a_living_owner_from_a_dead_one():
    assert state().is_starting()
    assert not state(owner_started=1).is_starting()
    assert not state(ready=True).is_running()


def test_unknown_hosts_and_devices_are_refused():
    bed = Testbed(state())
    with pytest.raises(UnusableInputError, match=r"no host 'h9'.*h0, h1, h2, h3"):
        bed.command("h9", ["true"])
    with pytest.raises(UnusableInputError, match="no device 1"):
        bed.command("h0", ["true"], device=1)
    with pytest.raises(UnusableInputError, match="share 2"):
        bed.set_share("h0", 2)
    with pytest.raises(TestbedError, match="does not shape"):
        bed.set_share("h0", 0.5)


def test_state_directory_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert directory().parent == tmp_path
    assert stat.S_IMODE(directory().stat().st_mode) == 0o700


@pytest.mark.parametrize("version", [1, 2])
def test_quotas_are_written_and_read_back(tmp_path, version):
    scenario = load_scenario("unequal-devices")
    groups = CpuGroups(str(tmp_path), "x", version)
    for name in ("device-0", "device-1", "start"):
        group = groups.base / "h0" / name
        group.mkdir(parents=True)
        (group / "cpu.cfs_burst_us").touch()
    groups.set_share(scenario, "h0", 0.25)
    assert groups.share("h0") == 0.25
    assert groups.quota(groups.base / "h0" / "start") == layout.cpu_quota(0.5)
    if version == 1:
        assert (groups.base / "h0" / "device-1" / "cpu.cfs_quota_us").read_text() == "4000"
        assert (groups.base / "h0" / "device-1" / "cpu.cfs_burst_us").read_text() == "1000"
        assert (groups.base / "h0" / "cpu.shares").read_text() == "1448"
    else:
        assert (groups.base / "h0" / "device-1" / "cpu.max").read_text() == "4000 16000"


def test_memory_limits_are_written_for_each_device_and_each_host(tmp_path):
    scenario = load_scenario("unequal-devices")
    groups = MemoryGroups(str(tmp_path), "x")
    groups.create(scenario)
    host = groups.base / "h0"
    devices = [Path(procs).parent for procs in groups.device_groups(scenario, "h0")]
    assert devices == [host / "device-0", host / "device-1"]
    limits = [int((group / "memory.limit_in_bytes").read_text()) - BESIDE_ARRAYS_BYTES for group in (*devices, host)]
    one = scenario.memory_bytes("h0")
    assert limits == [one, one, 2 * one]
    unshaped = layout.describe_devices(scenario, "h0", False)
    variable = json.loads(layout.devices_variable(unshaped, None, groups.device_groups(scenario, "h0")))
    assert [entry["memory_group"] for entry in variable] == [str(group / "cgroup.procs") for group in devices]
    assert groups.exist()
    assert not MemoryGroups(str(tmp_path), "y").exist()


@pytest.mark.parametrize(
    ("files", "serves"),
    [
        ({"cgroup.procs": "1\n7\n"}, True),
        ({"cgroup.type": "domain\n", "cgroup.procs": "1\n7\n"}, False),  # a container's own namespace
        ({"cgroup.type": "domain\n", "cgroup.procs": ""}, True),  # its processes have moved into a group below
    ],
)
def test_a_group_with_processes_cannot_give_its_children_quotas(tmp_path, monkeypatch, files, serves):
    """Version 2 exempts the root group alone, which has no type (cgroup-v2.rst, "No Internal Process Constraint")."""
    monkeypatch.setattr("hwaware.bench.testbed.cgroups.V1_MOUNTS", ())
    monkeypatch.setattr("hwaware.bench.testbed.cgroups.V2_MOUNT", str(tmp_path))
    for name, text in {"cgroup.controllers": "cpuset cpu memory\n", **files}.items():
        (tmp_path / name).write_text(text)
    assert (find_cpu_groups("x") is not None) == serves


@pytest.mark.parametrize(("version", "name", "least"), [(1, "cpu.shares", "2"), (2, "cpu.weight", "1")])
def test_what_keeps_cores_awake_gets_what_nobody_else_wants(tmp_path, monkeypatch, version, name, least):
    """Beside the testbed's groups: inside, it would make them weigh on every core all the time."""
    groups = CpuGroups(str(tmp_path), "x", version)
    groups._make_idle()
    assert (tmp_path / "hwaware.awake-x" / name).read_text() == least
    assert groups.awake() == str(tmp_path / "hwaware.awake-x" / "cgroup.procs")
    assert groups.exist()
    groups.idle = tmp_path / "newer"
    monkeypatch.setattr(Path, "mkdir", lambda path: (os.mkdir(path), (path / "cpu.idle").touch()))
    groups._make_idle()  # a kernel that knows idle groups
    assert (tmp_path / "newer" / "cpu.idle").read_text() == "1"
    assert not (tmp_path / "newer" / name).exists()


def test_processes_lose_their_limits_before_they_are_killed(tmp_path):
    """Those of every group, with all their threads: an idle process gets no time in which to die."""
    if os.geteuid() != 0:
        pytest.skip("only root raises priorities")
    groups = CpuGroups(str(tmp_path), "x", 1)
    code = (
        "import os, threading, time; os.nice(10); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0));"
        "threading.Thread(target=time.sleep, args=(60,), daemon=True).start(); print(flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            for place, group in enumerate((groups.idle, groups.base / "h0" / "device-0")):
                group.mkdir(parents=True)
                (group / "cgroup.procs").write_text(f"{process.pid}\n" if place else "")
            groups.let_end()
            assert (tmp_path / "cgroup.procs").read_text() == str(process.pid)
            threads = [int(name) for name in os.listdir(f"/proc/{process.pid}/task")]
            assert len(threads) == 2
            assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}
            assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {0}
        finally:
            process.kill()


def test_processes_that_appear_late_lose_their_limits_too():
    order = []
    rounds = iter([{111111111}, {111111112}, set()])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_ticks", lambda pid: 1)
        patch.setattr(processes, "_kill", order.append)
        processes.end_all(lambda: next(rounds), 5.0, "x", lambda: order.append("prepared"))
    assert order == ["prepared", 111111111, "prepared", 111111112]


def test_mover_leaves_what_is_no_worker(tmp_path):
    daemons, start = tmp_path / "daemons", tmp_path / "start"
    daemons.write_text(f"{os.getpid()}\n")
    start.write_text("")
    assert WorkerMover(str(daemons), str(start)).poll(0.0) == []
    assert start.read_text() == ""


def test_mover_moves_a_worker_once(tmp_path, monkeypatch):
    monkeypatch.setattr("hwaware.bench.testbed.keeper._arguments", lambda pid: ["python", "default_worker.py"])
    daemons, start = tmp_path / "daemons", tmp_path / "start"
    daemons.write_text("4242\n")
    mover = WorkerMover(str(daemons), str(start))
    assert mover.poll(0.0) == [4242]
    assert start.read_text() == "4242"
    assert mover.poll(10.0) == []  # settled: what joins another group later is not pulled back


def test_a_worker_moves_itself_when_python_starts(tmp_path, monkeypatch):
    (tmp_path / "tasks").write_text("")
    monkeypatch.setattr(sitecustomize, "is_worker", lambda arguments: True)
    sitecustomize.move_worker(json.dumps([{"start_group": str(tmp_path / "cgroup.procs")}]))
    assert (tmp_path / "tasks").read_text() == "0"


def test_ticks_tell_processes_apart():
    assert processes.is_alive(os.getpid(), processes.start_ticks(os.getpid()))
    assert not processes.is_alive(os.getpid(), 1)
    assert processes.start_ticks(2**22 + 1) is None


@pytest.mark.parametrize(("code", "raised"), [(errno.ENODEV, False), (errno.EPERM, True)])
def test_a_link_that_goes_while_it_is_removed_is_gone(monkeypatch, code, raised):
    """The kernel takes a host's namespace down, and the link with it, some time after its last process has ended."""
    error = pytest.importorskip("pyroute2").NetlinkError

    class Route:
        def link_lookup(self, ifname):
            return [7]

        def link(self, command, index):
            raise error(code, "no")

    monkeypatch.setattr(links, "_route", lambda: contextlib.nullcontext(Route()))
    with pytest.raises(error, match="no") if raised else contextlib.nullcontext():
        links.remove_link("gone")


def test_a_node_that_joins_late_is_looked_up_again():
    left = [RuntimeError("not there"), RuntimeError("not there")]

    def get_node(address, node):
        if left:
            raise left.pop()
        return address, node

    assert patient(get_node, 10.0)("10.0.0.1:6379", "n1") == ("10.0.0.1:6379", "n1")
    left.append(RuntimeError("not there"))
    with pytest.raises(RuntimeError, match="not there"):
        patient(get_node, -1.0)("10.0.0.1:6379", "n1")


def test_an_agents_port_is_written_before_its_raylet_starts():
    done = []

    def start_raylet(gcs, node_id, session_dir, dashboard_agent_listen_port=None):
        done.append(("started", gcs))
        return "process"

    started = announcing(start_raylet, lambda *written: done.append(written), "listen")
    assert started("a:1", "n1", session_dir="/tmp/s", dashboard_agent_listen_port=7) == "process"
    assert done == [("/tmp/s", "n1", "listen", 7), ("started", "a:1")]


def test_a_host_without_raylet_is_told(tmp_path, monkeypatch):
    """This process stands for the holder of the host's namespaces."""
    raylet = tmp_path / "raylet"
    shutil.copy(shutil.which("sleep"), raylet)
    pids = [os.getpid()]
    monkeypatch.setattr(processes, "all_pids", lambda: pids)
    bed = Testbed(state(holders={"h0": os.getpid()}))

    def with_ray():
        return [host["name"] for host in bed.describe()["hosts"] if host["runs_ray"]]

    others = [host for host in bed.hosts if host != "h0"]  # no namespaces, so nobody knows
    assert with_ray() == others
    with subprocess.Popen([str(raylet), "60"]) as process:
        pids.append(process.pid)
        end_s = time.monotonic() + 20.0
        while with_ray() != ["h0", *others]:  # Popen may return before the system has changed the process's name
            assert time.monotonic() < end_s
        process.kill()


def test_shares_that_the_machine_does_not_have_are_told(monkeypatch):
    cores = load_scenario("fast-and-slow").share_cores
    assert cores == 1.8
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})
    (note,) = kinds.notes_for("root", True, cores)
    assert "add up to 1.8 cores, and this machine has 1:" in note
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert kinds.notes_for("root", True, cores) == []


@pytest.mark.parametrize("ray_has_options", [False, True])
def test_hosts_name_their_sockets_whether_or_not_ray_start_lets_them(monkeypatch, tmp_path, ray_has_options):
    """Nodes of one machine that start at once would otherwise choose the same socket. One was left by a lost node."""
    pytest.importorskip("ray")
    from ray._private import parameter, services
    from ray.scripts import scripts

    names = ("--plasma-store-socket-name", "--raylet-socket-name") if ray_has_options else ()
    monkeypatch.setattr(scripts.start, "params", [SimpleNamespace(opts=(name,)) for name in ("--address", *names)])
    monkeypatch.setattr(scripts, "main", lambda: started.append((sys.argv[2:], parameter.RayParams())))
    for module, name in (
        (parameter, "RayParams"),
        (services, "get_node"),
        (services, "start_raylet"),
        (sys, "argv"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    started = []
    plasma, raylet = tmp_path / "h.plasma", tmp_path / "h.raylet"
    plasma.touch()
    asked = ["--address=a:1", f"--plasma-store-socket-name={plasma}", f"--raylet-socket-name={raylet}"]
    ray_nodes.main([*asked, "--unknown=1"])
    ((options, parameters),) = started
    assert options == (asked if ray_has_options else asked[:1])
    found = parameters.plasma_store_socket_name, parameters.raylet_socket_name
    assert found == ((None, None) if ray_has_options else (str(plasma), str(raylet)))
    assert not plasma.exists()
