"""Hosts with unequally many devices: Alpa's mesh of them, whatever the order in which Ray names them."""

import itertools

import builders
import pytest

pytestmark = pytest.mark.alpa
ADDRESSES = {"a": "10.9.0.1", "b": "10.9.0.2", "c": "10.9.0.3"}


class Cluster:
    """What `alpa.init` makes of Ray's nodes."""

    def __init__(self, counts):
        self.host_info = [{"NodeManagerAddress": ADDRESSES[h], "Resources": {"GPU": float(n)}} for h, n in counts]
        self.host_num_devices = [count for _, count in counts]


@pytest.fixture
def mesh_of():
    """The mesh that `alpa.init` makes of hosts with these devices, while hwaware is enabled."""
    import hwaware

    with hwaware.enabled(cluster_profile(a=1)):
        from alpa.device_mesh import DeviceCluster, VirtualPhysicalMesh

        def make(counts):
            mesh = DeviceCluster.get_virtual_physical_mesh(Cluster(counts))
            assert isinstance(mesh, VirtualPhysicalMesh)
            return mesh

        yield make


def cluster_profile(**counts):
    """Build hosts with so many devices; those of later hosts are faster."""
    devices = [
        builders.device(
            f"{host}:{k}", 1.0 / (1 + place), kind=f"cpu-{host}", memory_bytes=1 << 30, uuid=f"GPU-{host}{k}"
        )
        for place, (host, count) in enumerate(counts.items())
        for k in range(count)
    ]
    return builders.cluster(devices, between=(1e9, 1e-4), addresses=ADDRESSES)


def placed(mesh, plan, profile):
    """(address, devices, UUIDs) of each stage."""
    from hwaware.patching import meshes

    found = []
    for part in meshes.slice_mesh(mesh, plan, meshes.restrict(profile, mesh)):
        uuids = [uuid for host in part.hwaware_uuids for uuid in host]
        found.append(([info["NodeManagerAddress"] for info in part.host_info], part.devices, uuids))
    return found


@pytest.mark.parametrize("counts", [{"a": 2, "b": 1, "c": 1}, {"a": 1, "b": 2, "c": 4}, {"a": 3, "b": 5}])
def test_every_host_keeps_its_devices_in_any_order(mesh_of, counts):
    from hwaware.placement import plan

    workload = builders.workload(6, 60, output_bytes=4)
    profile, answers = cluster_profile(**counts), []
    best = plan(workload, profile, num_microbatches=8)
    for order in itertools.permutations(counts.items()):
        mesh = mesh_of(order)
        assert mesh.num_devices == sum(counts.values())
        assert [len(devices) for devices in mesh.devices] == [count for _, count in order]
        assert len(set(mesh.device_strs)) == sum(counts.values())
        answers.append(placed(mesh, best, profile))
    assert all(answer == answers[0] for answer in answers)
    for (addresses, devices, uuids), stage in zip(answers[0], best.stages):
        hosts = list(dict.fromkeys(device.split(":")[0] for device in stage.devices))
        assert addresses == [ADDRESSES[host] for host in hosts]
        assert [int(device.split(":")[1]) for device in stage.devices] == [k for ones in devices for k in ones]
        assert uuids == [f"GPU-{device.replace(':', '')}" for device in stage.devices]


def test_equal_hosts_are_alpas_own_mesh(mesh_of):
    from alpa.device_mesh import VirtualPhysicalMesh

    mesh = mesh_of([("a", 2), ("b", 2)])
    assert type(mesh) is VirtualPhysicalMesh
    assert (mesh.shape, mesh.num_devices) == ((2, 2), 4)


def test_a_program_that_has_the_last_devices_of_a_host_uses_these(mesh_of):
    """Ray chose them: another job has the first ones."""
    import hwaware
    from hwaware.patching import meshes
    from hwaware.placement import plan

    profile = cluster_profile(a=4)
    with hwaware.enabled(profile):
        from alpa.device_mesh import DeviceCluster

        cluster = Cluster([("a", 2)])
        cluster.hwaware_indices = [[2, 3]]
        mesh = DeviceCluster.get_virtual_physical_mesh(cluster)
    part = meshes.restrict(profile, mesh)
    assert [device.id for device in part.devices] == ["a:2", "a:3"]
    best = plan(builders.workload(4, 60, output_bytes=4), part, num_microbatches=4)
    used = [device for stage in meshes.slice_mesh(mesh, best, profile) for host in stage.devices for device in host]
    assert sorted(used) == [2, 3]


@pytest.mark.parametrize(
    ("host_ids", "num_devices", "expected"),
    [([0], None, [[2, 3]]), ([1], None, [[0, 1]]), ([0, 1], 1, [[2], [0]]), (None, 1, [[2], [0]])],
)
def test_a_part_of_what_a_program_has_is_of_its_own_devices(mesh_of, host_ids, num_devices, expected):
    from alpa.device_mesh import DeviceCluster

    cluster = Cluster([("a", 2), ("b", 2)])
    cluster.hwaware_indices = [[2, 3], [0, 1]]
    mesh = DeviceCluster.get_virtual_physical_mesh(cluster, host_ids, num_devices)
    assert mesh.devices == expected
    assert mesh.num_devices == sum(map(len, expected))


def test_a_part_of_unequal_hosts_has_the_devices_of_each(mesh_of):
    from alpa.device_mesh import DeviceCluster

    from hwaware.errors import AlpaError

    cluster = Cluster([("a", 2), ("b", 1), ("c", 4)])
    mesh = DeviceCluster.get_virtual_physical_mesh(cluster, host_ids=[1, 2])
    assert [len(devices) for devices in mesh.devices] == [1, 4]
    assert [info["NodeManagerAddress"] for info in mesh.host_info] == [ADDRESSES["b"], ADDRESSES["c"]]
    with pytest.raises(AlpaError, match=r"2, 1 devices on hosts 0, 1, expected num_devices_per_host=2"):
        DeviceCluster.get_virtual_physical_mesh(cluster, [0, 1], 2)


def test_a_mesh_that_loses_a_host_and_gets_it_back(mesh_of):
    """Each device keeps its place; the host's number is another one."""
    from hwaware.patching import meshes, unequal

    profile, mesh = cluster_profile(a=2, b=1, c=2), mesh_of([("a", 2), ("b", 1), ("c", 2)])
    before, mesh.hwaware_functions = set(mesh.device_strs), ["step"]
    unequal.shrink(mesh, {(ADDRESSES["b"], 0), (ADDRESSES["c"], 0)})
    unequal.grow(mesh, {"NodeManagerAddress": ADDRESSES["b"]}, 1)
    assert meshes.mesh_places(mesh) == {
        (ADDRESSES["a"], 0): 0, (ADDRESSES["a"], 1): 0, (ADDRESSES["c"], 1): 1, (ADDRESSES["b"], 0): 2
    }  # fmt: skip
    assert before - set(mesh.device_strs) == {f"{ADDRESSES['c']}:gpu:0"}
    assert len(set(mesh.host_ids)) == 3
    assert mesh.hwaware_functions == ["step"]
    assert [device.id for device in meshes.restrict(profile, mesh).devices] == ["a:0", "a:1", "b:0", "c:1"]


def test_stages_that_the_program_fixes_leave_devices_idle(mesh_of):
    from alpa.pipeline_parallel import stage_construction

    from hwaware.errors import AlpaError

    mesh = mesh_of([("a", 1), ("b", 2), ("c", 4)])
    slices = stage_construction.get_sliced_virtual_submeshes(mesh, [(1, 3), (1, 1), (1, 2)])
    assert [(part.host_info[0]["NodeManagerAddress"], part.devices) for part in slices] == [
        (ADDRESSES["c"], [[0, 1, 2]]),
        (ADDRESSES["a"], [[0]]),
        (ADDRESSES["b"], [[0, 1]]),
    ]
    with pytest.raises(AlpaError, match=r"hosts with \[1, 2, 4\] devices cannot hold.*To fix:"):
        stage_construction.get_sliced_virtual_submeshes(mesh, [(1, 4), (1, 4)])


def test_without_hwaware_alpa_stops_or_leaves_devices_out(nothing_overridden):
    from alpa.device_mesh import DeviceCluster

    with pytest.raises(AssertionError):
        DeviceCluster.get_virtual_physical_mesh(Cluster([("a", 2), ("b", 1)]))
    assert DeviceCluster.get_virtual_physical_mesh(Cluster([("a", 1), ("b", 2)])).num_devices == 2
