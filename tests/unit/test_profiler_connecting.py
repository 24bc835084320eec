"""What can be said of an address without Ray, and of a command line without a cluster."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from hwaware import ray_cluster, reference_kernel
from hwaware.cli.profile import command
from hwaware.dtypes import MEASURED
from hwaware.errors import ClusterUnreachableError
from hwaware.ray_cluster import Node, _address_order, own_address, split_address
from hwaware.reference_kernel import processors_reference_s, reference_s


@pytest.mark.parametrize(("text", "expected"), [
    ("10.0.0.1:6379", ("10.0.0.1", 6379)),
    ("head.example:1", ("head.example", 1)),
    ("[fd00::1]:6379", ("fd00::1", 6379)),
])  # fmt: skip
def test_an_address_has_a_host_and_a_port(text, expected):
    assert split_address(text) == expected


@pytest.mark.parametrize("text", [
    "", "host", ":6379", "host:", "host:port", "host:0", "host:65536", "ray://host:port", "host:²", "host..domain:6379",
    f"{'h' * 64}.domain:6379",
])  # fmt: skip
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ClusterUnreachableError, match=r"expected HOST:PORT or auto\. To fix: ") as found:
        split_address(text)
    assert found.value.exit_code == 2


@pytest.mark.parametrize(("running", "warnings"), [({"10.0.0.1:6379"}, 0), ({"10.0.0.1:6379", "10.0.0.9:6380"}, 1)])
def test_auto_names_its_choice_among_several_clusters(running, warnings, monkeypatch, caplog):
    monkeypatch.setenv("RAY_ADDRESS", "")  # as Ray, take an empty one for none
    services = SimpleNamespace(
        canonicalize_bootstrap_address=lambda address: "10.0.0.1:6379", find_gcs_addresses=lambda: running
    )
    ray = SimpleNamespace(_private=SimpleNamespace(services=services))
    assert ray_cluster._address(ray, "auto") == "10.0.0.1:6379"
    assert len(caplog.messages) == warnings
    for message in caplog.messages:
        assert "uses the one at 10.0.0.1:6379, which Ray chose, not 10.0.0.9:6380." in message
        assert "HOST:PORT" in message


@pytest.mark.parametrize(("asked", "is_another"), [
    ("auto", False), ("192.0.2.1:6379", False), ("192.0.2.2:6379", True), ("192.0.2.1:6380", True),
])  # fmt: skip
def test_who_asks_for_another_cluster_than_the_connected_one_is_warned(asked, is_another, monkeypatch, caplog):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster, "head_address", lambda: ("192.0.2.1", 6379))
    with ray_cluster.connect(asked):
        pass
    assert len(caplog.messages) == is_another
    for message in caplog.messages:
        assert f"connected to the Ray cluster at 192.0.2.1:6379, so hwaware uses this one, not {asked}." in message


def test_names_and_addresses_of_this_machine_are_one(monkeypatch, caplog):
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster, "head_address", lambda: ("127.0.0.1", 6379))
    with ray_cluster.connect("localhost:6379"):
        pass
    assert not caplog.messages


def test_own_addresses_are_known():
    assert own_address("127.0.0.1") == "127.0.0.1"
    assert own_address("192.0.2.1") == ""  # TEST-NET-1: nobody's
    assert own_address("no-such-host.invalid") == ""


@pytest.mark.parametrize(("number", "told"), [("127.0.0.1", None), ("0.0.0.0", "0.0.0.0"), ("192.0.2.1", None)])
def test_ray_learns_the_number_of_the_own_address_and_never_its_name(number, told, monkeypatch):
    """Ray looks for a node with that very address, for a minute. A socket can bind to 0.0.0.0 on every machine."""
    asked, found = [], socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest, **options: found(number, *rest, **options))
    ray_cluster._join(SimpleNamespace(init=lambda **options: asked.append(options)), "head:6379")
    assert asked[0].get("_node_ip_address") == told


def test_addresses_sort_by_number():
    assert sorted(["10.0.0.10", "b", "10.0.0.9"], key=_address_order) == ["10.0.0.9", "10.0.0.10", "b"]


@pytest.mark.parametrize(("resources", "expected"), [({}, 0), ({"CPU": 4.0}, 0), ({"GPU": 2.0}, 2), ({"GPU": 0.5}, 0)])
def test_only_whole_gpus_are_devices(resources, expected):
    assert Node("1", "10.0.0.1", "a", resources).num_gpus == expected


def test_the_reference_kernel_is_short_and_repeats():
    times = [reference_s() for _ in range(3)]
    assert min(times) > 0.001, times
    assert max(times) < 10 * min(times), times


def test_the_reference_kernel_visits_every_processor(monkeypatch):
    allowed, visited = os.sched_getaffinity(0), []
    set_affinity = os.sched_setaffinity
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, mask: (visited.append(mask), set_affinity(pid, mask)))
    alone, spread = reference_s(), processors_reference_s()
    assert alone / 10 < spread < 10 * alone
    assert visited[:-1] == [{processor} for processor in sorted(allowed)][:8] * reference_kernel._LAPS
    assert visited[-1] == os.sched_getaffinity(0) == allowed


def test_beside_steps_the_reference_kernel_counts_processor_time(monkeypatch):
    """Waiting for a processor is none: each run takes one second of the clock that it asks."""
    seconds = itertools.count()
    clock = SimpleNamespace(thread_time=lambda: next(seconds), perf_counter=None)
    monkeypatch.setattr(reference_kernel, "time", clock)
    asked = min(len(os.sched_getaffinity(0)), 8)
    assert processors_reference_s() == pytest.approx(asked, rel=0.05)


def test_a_cluster_that_has_just_started_is_asked_again():
    answers = iter([False, False, True])
    assert ray_cluster._is_healthy(lambda address, limit_s: next(answers), "10.0.0.1:6379", 5.0)
    assert not ray_cluster._is_healthy(lambda address, limit_s: False, "10.0.0.1:6379", 0.0)


def test_a_missing_token_is_named():
    ray = pytest.importorskip("ray")

    def client(address):
        raise ray.exceptions.RaySystemError("RPC error: InvalidAuthToken: missing or incorrect")

    with pytest.raises(ClusterUnreachableError, match=r"at 10\.0\.0\.1:6379 asks for a token.*To fix: set RAY_AUTH"):
        ray_cluster._has_answer(client, "10.0.0.1:6379", 5.0)


def test_there_must_be_somewhere_to_write():
    result = CliRunner().invoke(command, ["--address", "local"])
    assert result.exit_code == 2
    assert "Error: There is nowhere to write the profile to. To fix: give -o cluster.json, or --json." in result.stderr


def test_unknown_data_type_on_the_command_line():
    result = CliRunner().invoke(command, ["--address", "local", "--dtype", "float32, float8,", "--json"])
    assert result.exit_code == 2
    assert "Data types 'float8' cannot be measured" in result.stderr


def test_help_names_every_data_type():
    assert f"separated by commas: {', '.join(MEASURED)}" in " ".join(
        CliRunner().invoke(command, ["--help"]).stdout.split()
    )


def test_importing_the_profiler_imports_neither_ray_nor_jax():
    code = "import sys, hwaware.profiler, hwaware.cli.profile; print({'ray', 'jax', 'rich'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
