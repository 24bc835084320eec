"""Check which devices `alpa.init` takes, and what it says if it gets none; Ray is a stand-in."""

import sys
import types

import pytest

from hwaware import ray_jobs
from hwaware.errors import ClusterUnreachableError
from hwaware.patching import reservation
from hwaware.ray_cluster import Node

OTHER = "02000000"


def node(number, devices=1):
    return Node(f"n{number}", f"10.0.0.{number}", f"h{number}", {"GPU": float(devices)}, 1)


def taken(shares):
    return [(share.node.id, share.devices) for share in shares]


def test_all_devices_are_taken_unless_the_program_asks_for_fewer():
    hosts = [node(1, 2), node(2, 4), node(3, 4)]
    assert taken(reservation.chosen(hosts, None, None)) == [("n1", 2), ("n2", 4), ("n3", 4)]
    assert taken(reservation.chosen(hosts, 2, 4)) == [("n2", 4), ("n3", 4)]
    assert taken(reservation.chosen(hosts, 5, None)) == [("n1", 2), ("n2", 4), ("n3", 4)], "after a lost host, fewer"
    with pytest.raises(ClusterUnreachableError, match=r"1 hosts have 4 devices, expected 2.*10\.0\.0\.1: 2.*To fix: "):
        reservation.chosen([node(1, 2), node(2, 4)], 2, 4)


def test_hosts_that_others_use_come_last():
    hosts = [node(1), node(2), node(3)]
    assert taken(reservation.chosen(hosts, 2, None, {OTHER: ("10.0.0.1",)})) == [("n2", 1), ("n3", 1)]
    assert taken(reservation.chosen(hosts, 3, None, {OTHER: ("10.0.0.1",)})) == [("n1", 1), ("n2", 1), ("n3", 1)]


class Group:
    """A placement group that is ready after so many looks."""

    def __init__(self, after):
        self.after, self.removed, self.asked = after, False, None

    def wait(self, _limit_s):
        self.after -= 1
        return self.after < 0


@pytest.fixture
def ray(monkeypatch):
    """Stand in for Ray: `ray(after)` makes a group that is ready after so many looks, `using` says who holds it."""
    removing = types.SimpleNamespace(remove_placement_group=lambda group: setattr(group, "removed", True))
    monkeypatch.setattr(reservation, "_RESERVE_LIMIT_S", 0.05)
    monkeypatch.setattr(ray_jobs, "PATIENCE_S", 0.0)
    monkeypatch.setattr(ray_jobs, "_drivers", dict)

    def make(after, using):
        group = Group(after)

        def placement_group(bundles, strategy, name):
            group.asked = bundles
            return group

        util = types.SimpleNamespace(placement_group=placement_group)
        for name, module in {"ray": types.SimpleNamespace(util=util), "ray.util": util}.items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setitem(sys.modules, "ray.util.placement_group", removing)
        monkeypatch.setattr(ray_jobs, "using", lambda nodes: using)
        return group

    return make


WHOLE = [reservation.Share(node(1, 2), 2), reservation.Share(node(2), 1)]
PART = [reservation.Share(node(1, 2), 1)]


def test_every_bundle_is_pinned_to_its_host(ray):
    group = ray(1, {})
    assert reservation.reserved(WHOLE) is group
    assert group.asked == [{"GPU": 2, "node:10.0.0.1": 0.001}, {"GPU": 1, "node:10.0.0.2": 0.001}]
    assert not group.removed


@pytest.mark.parametrize("shares", [WHOLE, PART])
def test_the_job_that_uses_the_devices_is_named(ray, shares):
    group = ray(10**9, {OTHER: ("10.0.0.1",)})
    with pytest.raises(ClusterUnreachableError, match=r"in use by Ray job 02000000.*To fix: "):
        reservation.reserved(shares)
    assert group.removed is (group.asked is not None)


def test_a_part_of_a_host_that_others_use_is_free_for_us(ray):
    group = ray(0, {OTHER: ("10.0.0.1",)})
    assert reservation.reserved(PART) is group


def test_a_holder_that_ray_does_not_name_ends_the_wait(ray):
    group = ray(10**9, {})
    with pytest.raises(ClusterUnreachableError, match=r"did not reserve the devices of 10\.0\.0\.1.*ray status.*"):
        reservation.reserved(PART)
    assert group.removed


def test_only_devices_other_than_the_first_need_indices():
    cluster = types.SimpleNamespace()
    assert reservation.indices_of(cluster) is None
    cluster.hwaware_indices = [[0, 1], [0]]
    assert reservation.indices_of(cluster) is None
    cluster.hwaware_indices = [[2, 3]]
    assert reservation.indices_of(cluster) == [[2, 3]]


def test_a_plan_on_a_host_that_is_gone_is_refused(monkeypatch):
    hosts = [node(1), node(2)]
    alpa = types.SimpleNamespace(device_mesh=types.SimpleNamespace(global_cluster=None))
    monkeypatch.setitem(sys.modules, "alpa", alpa)
    monkeypatch.setattr(ray_jobs, "at", lambda addresses: [one for one in hosts if one.address in addresses])
    monkeypatch.setattr(ray_jobs, "silent", lambda nodes: {hosts[1]: "timed out"})
    with pytest.raises(ClusterUnreachableError, match=r"10\.0\.0\.9 \(Ray has given it up\), 10\.0\.0\.2 \(timed out"):
        reservation.require_hosts(["10.0.0.1", "10.0.0.2", "10.0.0.9"])
    used = []
    monkeypatch.setattr(ray_jobs, "silent", lambda nodes: {})
    monkeypatch.setattr(ray_jobs, "require_unused", used.extend)
    reservation.require_hosts(["10.0.0.1"])
    assert used == hosts[:1]


@pytest.mark.parametrize(("raised", "expected"), [
    (ConnectionError("Could not find any running Ray instance."), r"no Ray cluster.*running Ray instance\..*To fix"),
    (ClusterUnreachableError("The devices are in use.", "wait."), r"The devices are in use\. To fix: wait\."),
])  # fmt: skip
def test_a_start_that_failed_can_be_tried_again(monkeypatch, raised, expected):
    """Alpa notes first that it is initialized, and computes on CPUs: a second call would do nothing."""
    api = types.SimpleNamespace(is_initialized=False)
    platforms = ["tpu"]
    jax_config = types.SimpleNamespace(read=lambda name: platforms[-1])
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(config=jax_config))
    util = types.SimpleNamespace(update_jax_platform=reservation.update_jax_platform(platforms.append))
    modules = {
        "alpa": types.SimpleNamespace(api=api, util=util),
        "alpa.api": api,
        "alpa.util": util,
        "ray": types.SimpleNamespace(is_initialized=lambda: True),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def init(cluster):
        api.is_initialized = True
        util.update_jax_platform("cpu")
        raise raised

    with pytest.raises(ClusterUnreachableError, match=expected):
        reservation.init(init)("ray")
    assert not api.is_initialized
    assert platforms == ["tpu", "cpu", "tpu"]
