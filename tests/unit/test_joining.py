"""Which hosts are new to a running program, and by which names it knows them, without Ray."""

import sys
from types import SimpleNamespace

import pytest
from builders import cluster as a_cluster
from builders import device, timed, workload

from hwaware import ray_cluster
from hwaware.cluster import ClusterProfile, Host
from hwaware.costs.own_times import with_device_times
from hwaware.errors import UnusableInputError
from hwaware.placement.choices import remaining
from hwaware.profiler import beside
from hwaware.profiler.beside import require_same
from hwaware.ray_cluster import Node
from hwaware.survival import joining
from hwaware.workload import MeasuredTime


def node(identifier, address, devices=1):
    return Node(identifier, address, f"name-{address}", {"GPU": devices}, 1)


def mesh(*addresses):
    infos = [{"NodeManagerAddress": address} for address in addresses]
    return SimpleNamespace(num_hosts=len(addresses), host_info=infos, devices=[[0]] * len(addresses))


@pytest.fixture
def cluster(monkeypatch):
    """A cluster that a test changes, with the program's look at it."""
    made = SimpleNamespace(nodes=[], silent=set())
    monkeypatch.setattr(ray_cluster, "nodes", lambda: tuple(made.nodes))
    monkeypatch.setattr(
        ray_cluster, "fails_to_answer", lambda address, port: OSError() if address in made.silent else None
    )
    made.run = SimpleNamespace(
        calls=SimpleNamespace(group=SimpleNamespace(parent=mesh("a", "b"))), recovery=SimpleNamespace(left_out=set())
    )
    look = joining.Joining(made.run, None)._new_host
    made.look = lambda: getattr(look(), "id", None)
    return made


def test_a_host_is_new_once(cluster):
    cluster.nodes = [node("1", "a"), node("2", "b"), node("3", "driver", devices=0)]
    assert cluster.look() is None
    cluster.nodes.append(node("4", "c"))
    cluster.silent = {"c"}
    assert cluster.look() is None
    cluster.silent = set()
    assert [cluster.look(), cluster.look()] == ["4", None]


def test_the_program_looks_again_after_an_error(monkeypatch):
    """Such as one of Ray's head, which is busy for a moment."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(
        is_initialized=lambda: True, exceptions=SimpleNamespace(RaySystemError=KeyError)
    ))  # fmt: skip
    run = SimpleNamespace(is_closed=False)
    monkeypatch.setattr(joining.moving, "running", lambda: run)
    monkeypatch.setattr(joining, "_LOOK_S", 0.0)
    join, looks = joining.Joining(run, None), []

    def look():
        looks.append(True)
        if len(looks) == 1:
            raise OSError("no answer")
        return node("4", "c")

    def measured(new):
        run.is_closed = True
        return new

    monkeypatch.setattr(join, "_new_host", look)
    monkeypatch.setattr(join, "_measured", measured)
    join._look_on()
    assert join.ready.id == "4"


def test_a_lost_host_is_new_again(cluster):
    cluster.nodes = [node("1", "a"), node("2", "b")]
    assert cluster.look() is None
    cluster.run.calls.group.parent = mesh("a")
    cluster.silent = {"b"}  # its link is down
    assert cluster.look() is None
    cluster.silent = set()
    assert cluster.look() == "2"


def test_a_host_that_was_left_is_new_once_its_ray_starts_again(cluster):
    cluster.nodes = [node("1", "a"), node("2", "b")]
    assert cluster.look() is None
    cluster.run.calls.group.parent = mesh("a")
    cluster.run.recovery.left_out = {("b", 0)}
    assert [cluster.look(), cluster.look()] == [None, None]
    cluster.nodes.append(node("3", "b"))  # Ray still believes in the one before
    assert cluster.look() is None
    del cluster.nodes[1]
    assert cluster.look() == "3"


def test_a_host_takes_no_name_of_another(cluster):
    profile = ClusterProfile.uniform(hosts=2, flops_per_s=1e10)
    known = tuple(Host(name=host.name, address=address) for host, address in zip(profile.hosts, "ab"))
    profile = ClusterProfile(hosts=known, devices=profile.devices, links=profile.links)
    cluster.nodes = [Node("3", "c", "h1", {"GPU": 1.0}, 1)]
    assert joining._named(cluster.nodes[0], profile) == ("c", profile)
    cluster.nodes = [Node("4", "c", "other", {"GPU": 1.0}, 1)]
    assert joining._named(cluster.nodes[0], profile)[0] == "other"
    name, rest = joining._named(node("5", "b"), profile)
    assert (name, [host.name for host in rest.hosts]) == ("h1", ["h0"])


def test_a_host_that_joins_times_layers_on_new_kinds_alone(monkeypatch):
    def measured(layers, sources, profile, exclude, limit_s):
        times = [{"1,1": MeasuredTime(forward_s=9.0, backward_s=9.0)}]
        return with_device_times(layers, profile, {one.id: times for one in remaining(profile, exclude).devices})

    monkeypatch.setattr(joining.layer_times, "measured_within", measured)
    profile = a_cluster([device("a:0"), device("new:0"), device("new:1", kind="gpu")])
    recipe = SimpleNamespace(workload=workload(1, measured=timed(0.1, 0.2)), sources=["x"])
    (layer,) = joining._timed(recipe, profile, "new").layers
    assert {kind: times["1,1"].forward_s for kind, times in layer.measured.items()} == {"cpu": 0.1, "gpu": 9.0}
    assert joining._timed(recipe, profile.without(("new:1",)), "new") is recipe.workload


def test_a_host_that_returns_loses_the_own_times_of_the_machine_before(monkeypatch):
    def measured(layers, sources, profile, exclude, limit_s):
        times = [{"1,1": MeasuredTime(forward_s=0.3, backward_s=0.6)}]
        return with_device_times(layers, profile, {one.id: times for one in remaining(profile, exclude).devices})

    monkeypatch.setattr(joining.layer_times, "measured_within", measured)
    profile = a_cluster([device("a:0"), device("b:0"), device("c:0")])
    slow = timed(0.5, 1.0)["cpu"]
    recipe = SimpleNamespace(
        workload=workload(1, measured={**timed(0.1, 0.2), "b:0": slow, "c:0": slow}), sources=["x"]
    )
    (layer,) = joining._timed(recipe, profile, "b").layers
    found = {name: times["1,1"].forward_s for name, times in layer.measured.items()}
    assert found == {"cpu": 0.1, "b:0": 0.3, "c:0": 0.5}  # those of the kind stay: a:0 has no others


def test_a_host_with_other_versions_is_refused():
    with pytest.raises(UnusableInputError, match=r"It has jax 0\.4\.30, expected 0\.12\.0\.1"):
        require_same({"jax": "0.4.30", "python": "3.13"}, {"jax": "0.12.0.1", "python": "3.13"})


def test_a_new_host_with_many_devices_times_its_link_to_each_of_few_hosts(fakes, monkeypatch):
    crew = fakes.crew([fakes.spec(host, 1e10, kind="cpu") for host in ["new"] * 8 + ["h0", "h1"]])
    monkeypatch.setattr(beside, "_members", lambda *_: crew.members)
    monkeypatch.setattr(beside, "RayCrew", lambda *_: crew)
    monkeypatch.setattr(ray_cluster, "end_actors", lambda actors: None)
    found = beside.profile_beside(ClusterProfile.uniform(hosts=2), node("1", "address of new", 8), "new", [])
    timed = {(one.source, one.target) for one in found.links if one.evidence and "messages" in one.evidence}
    assert {("new", "h0"), ("h0", "new"), ("new", "h1"), ("h1", "new")} <= timed
