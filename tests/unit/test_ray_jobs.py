"""Check who uses devices of a Ray cluster, and which hosts answer, from tables as Ray gives them."""

import socket
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from hwaware import ray_cluster, ray_jobs
from hwaware.errors import ClusterUnreachableError
from hwaware.ray_cluster import Node
from hwaware.ray_jobs import Holder, users

OWN, OTHER = "01000000", "02000000"
ADDRESSES = {"n1": "10.0.0.2", "n2": "10.0.0.3"}


def found(*holders):
    return users(holders, ADDRESSES, OWN)


def test_a_placement_group_and_an_actor_of_another_job_count():
    assert found(Holder(OTHER, ("n1", "n2"), True)) == {OTHER: ("10.0.0.2", "10.0.0.3")}
    assert found(Holder(OTHER, ("n2",), True), Holder(OTHER, ("n2",), True)) == {OTHER: ("10.0.0.3",)}


def test_the_own_job_and_other_hosts_do_not_count():
    assert found(Holder(OWN, ("n1",), True), Holder(OTHER, ("n9",), True)) == {}


def test_a_worker_without_a_reservation_counts_unless_its_job_has_one_there():
    """A job with a part of a host's devices keeps its workers on these: Ray guards the others."""
    worker, kept = Holder(OTHER, ("n1",), reserves=False), Holder(OTHER, ("n2",), reserves=False)
    assert found(worker) == {OTHER: ("10.0.0.2",)}
    assert found(worker, kept, Holder(OTHER, ("n2",), True)) == {OTHER: ("10.0.0.2", "10.0.0.3")}


def test_the_error_names_hosts_and_job(monkeypatch):
    driver = "python train.py --steps 9, process 4711 on 10.0.0.1"
    monkeypatch.setattr(ray_jobs, "_drivers", lambda: {OTHER: driver})
    error = ray_jobs.in_use({OTHER: ("10.0.0.2", "10.0.0.3")})
    assert error.what == f"The devices of hosts 10.0.0.2, 10.0.0.3 are in use by Ray job 02000000 ({driver})."
    assert error.exit_code == 2


def test_a_driver_that_does_not_answer_ray_is_named_by_its_job(monkeypatch):
    monkeypatch.setattr(ray_jobs, "_DRIVERS_LIMIT_S", 0.01)
    monkeypatch.setattr(ray_jobs, "_tables", lambda: time.sleep(0.2) or (None, None))
    error = ray_jobs.in_use({OTHER: ("10.0.0.2",)})
    assert error.what == "The devices of host 10.0.0.2 are in use by Ray job 02000000."


def test_a_ray_that_does_not_tell_who_uses_devices_is_said_once(monkeypatch, caplog):
    monkeypatch.setattr(ray_jobs, "_tables", lambda: SimpleNamespace().moved)
    assert (ray_jobs._holders(), ray_jobs._holders()) == ([], [])
    (line,) = caplog.messages
    assert "does not tell hwaware which programs use devices" in line
    assert "moved" in line


def test_a_driver_is_named_on_one_line():
    job = SimpleNamespace(entrypoint="python -c 'import ray\n" + "x = 1\n" * 99 + "'", driver_pid=7)
    job.driver_address = SimpleNamespace(ip_address="10.0.0.1")
    found = ray_jobs._driver(job)
    assert found.startswith("python -c 'import ray x = 1")
    assert found.endswith(" ..., process 7 on 10.0.0.1")
    assert len(found.splitlines()) == 1
    assert len(found) < 160


def test_a_job_that_is_just_ending_is_waited_for(monkeypatch):
    answers = iter([{OTHER: ("10.0.0.2",)}, {}])
    monkeypatch.setattr(ray_jobs, "using", lambda nodes: next(answers))
    monkeypatch.setattr(ray_jobs, "_ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(ray_jobs, "_drivers", dict)
    ray_jobs.require_unused([])
    monkeypatch.setattr(ray_jobs, "using", lambda nodes: {OTHER: ("10.0.0.2",)})
    monkeypatch.setattr(ray_jobs, "PATIENCE_S", 0.01)
    with pytest.raises(ClusterUnreachableError, match=r"host 10\.0\.0\.2 are in use by Ray job 02000000"):
        ray_jobs.require_unused([])


def test_devices_that_ray_has_given_to_a_task_are_known(monkeypatch):
    """Ray tells no holder then, and leaves out a resource of which nothing is free."""
    whole, half, none = (Node(name, "10.0.0.2", "h", {"GPU": 2.0}, 1) for name in ("n1", "n2", "n3"))
    free = {"n1": {"GPU": 2.0}, "n2": {"GPU": 1.0}, "n3": {"CPU": 4.0}}
    state = SimpleNamespace(available_resources_per_node=lambda: free)
    monkeypatch.setitem(sys.modules, "ray._private.state", state)
    assert ray_jobs.partly_taken([whole, half, none]) == [half, none]
    del state.available_resources_per_node  # another version of Ray
    assert ray_jobs.partly_taken([half]) == []


@pytest.fixture
def nodes():
    """A node whose daemon answers, and one whose daemon has ended."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as closed:
        ports = listener.getsockname()[1], closed.getsockname()[1]
        closed.close()
        yield [Node(f"n{port}", "127.0.0.1", "here", {"GPU": 1.0}, port) for port in ports]


def test_silent_hosts_are_told_from_those_that_answer(nodes):
    alive, ended = nodes
    assert ray_jobs.reachable_hosts(nodes) == ([alive], {ended: "Ray has ended there"})
    assert ray_jobs.silent([]) == {}
    with pytest.raises(ClusterUnreachableError, match=r"No host with devices answers \(127\.0\.0\.1: Ray has ended"):
        ray_jobs.reachable_hosts([ended])


def test_a_host_beyond_the_network_is_silent_within_the_limit(nodes, monkeypatch):
    def lost(address, timeout):
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", lost)
    error = ray_cluster.fails_to_answer("10.0.0.2", 1)
    assert not ray_jobs.is_gone(error)
    line = ray_jobs.left_out("10.0.0.2", ray_jobs.silent(nodes[:1])[nodes[0]])
    assert line.startswith("Host 10.0.0.2 is left out: it does not answer (timed out). To fix: ")
    assert "\n" not in line


def test_a_host_that_ray_gave_up_is_asked_at_its_last_port(nodes, monkeypatch):
    alive, ended = nodes
    monkeypatch.setattr(ray_cluster, "nodes", lambda alive=True: () if alive else (ended,))
    assert ray_jobs.is_gone(ray_jobs.daemon_fails("127.0.0.1"))
    monkeypatch.setattr(ray_cluster, "nodes", lambda **_: (alive,))
    assert ray_jobs.daemon_fails("127.0.0.1") is None


def test_an_actor_that_ray_cannot_end_holds_nobody_up(monkeypatch):
    asked, for_ever = [], threading.Event()

    def kill(actor, no_restart):
        asked.append((actor, no_restart))
        for_ever.wait(30)

    errors = SimpleNamespace(RayError=RuntimeError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(kill=kill, exceptions=errors))
    monkeypatch.setattr(ray_cluster, "_END_LIMIT_S", 0.1)
    ray_cluster.end_actors(["first", "second"])
    assert asked == [("first", True)]
    for_ever.set()
