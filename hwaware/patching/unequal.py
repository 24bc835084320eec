"""Support clusters whose hosts have unequal numbers of devices: Alpa's mesh, and its slicing.

`alpa.init` takes the number of devices of the first of `ray.nodes()` for all hosts. With 2, 1, 1 devices it stops.
With 1, 2, 4 it uses three devices out of seven. While hwaware is on, every host keeps its own number, in any order.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Collection, Dict, List, Sequence, Tuple

from hwaware.device_places import DevicePlace
from hwaware.errors import AlpaError
from hwaware.patching import reservation
from hwaware.patching.mechanism import Patch, Target


@functools.lru_cache(maxsize=None)
def _mesh_class() -> Any:
    """Return the class of Alpa's meshes with a number of devices for each host. The first call imports Alpa."""
    from alpa.device_mesh import VirtualPhysicalMesh

    class UnequalMesh(VirtualPhysicalMesh):  # type: ignore[misc]  # Alpa carries no types
        """An Alpa virtual mesh whose hosts need not have equally many devices."""

        def __init__(self, host_ids: Any, host_info: Any, counts: Sequence[int], parent: Any = None) -> None:
            from alpa.device_mesh import device_id_to_str

            super().__init__(host_ids, host_info, max(counts), parent)
            self.devices = [list(range(count)) for count in counts]
            self.device_strs = [
                device_id_to_str(info["NodeManagerAddress"], device)
                for info, devices in zip(host_info, self.devices)
                for device in devices
            ]

        @property
        def num_devices(self) -> int:
            """Return the number of devices of all hosts."""
            return sum(map(len, self.devices))

    return UnequalMesh


def make_mesh(host_ids: Sequence[int], host_info: Sequence[Any], counts: Sequence[int], parent: Any = None) -> Any:
    """Make an Alpa mesh of hosts with so many devices each; use Alpa's own class if all have equally many.

    Args:
        host_ids: The number of each host in Alpa's cluster.
        host_info: Ray's description of each host.
        counts: The number of devices of each host.
        parent: The cluster.
    """
    from alpa.device_mesh import VirtualPhysicalMesh

    if len(set(counts)) == 1:
        return VirtualPhysicalMesh(list(host_ids), list(host_info), counts[0], parent)
    return _mesh_class()(list(host_ids), list(host_info), list(counts), parent)


def is_unequal(virtual_mesh: Any) -> bool:
    """Return True if the hosts of an Alpa mesh have unequally many devices."""
    return len({len(devices) for devices in virtual_mesh.devices}) > 1


def part_of(virtual_mesh: Any, by_host: Dict[int, List[int]]) -> Any:
    """Return a part of an Alpa mesh. Alpa's own `slice_2d` looks for the devices on other hosts.

    Args:
        virtual_mesh: The whole mesh.
        by_host: Position of each host in the mesh -> its devices, equally many on each.
    """
    from alpa.device_mesh import VirtualPhysicalMesh

    return VirtualPhysicalMesh(
        host_ids=[virtual_mesh.host_ids[position] for position in by_host],
        host_info=[virtual_mesh.host_info[position] for position in by_host],
        num_devices_per_host=len(next(iter(by_host.values()))),
        parent=virtual_mesh,
        devices=list(by_host.values()),
    )


def shrink(virtual_mesh: Any, lost: Collection[DevicePlace]) -> None:
    """Take devices out of an Alpa mesh, in place, and hosts without any left.

    Args:
        virtual_mesh: The mesh; at least one device stays.
        lost: (address of the host, index) of each device.
    """
    addresses = [info["NodeManagerAddress"] for info in virtual_mesh.host_info]
    places = [(addresses[host], device) for host, devices in enumerate(virtual_mesh.devices) for device in devices]
    left = {
        host: [device for device in devices if (addresses[host], device) not in lost]
        for host, devices in enumerate(virtual_mesh.devices)
    }
    kept = [host for host, devices in left.items() if devices]
    ids, infos = [virtual_mesh.host_ids[host] for host in kept], [virtual_mesh.host_info[host] for host in kept]
    made = _mesh_class()(ids, infos, [len(left[host]) for host in kept], virtual_mesh.parent)
    made.devices = [left[host] for host in kept]
    made.device_strs = [text for text, place in zip(virtual_mesh.device_strs, places) if place not in lost]
    _become(virtual_mesh, made)


def grow(virtual_mesh: Any, info: Any, devices: int) -> None:
    """Add a host to an Alpa mesh, in place.

    Args:
        virtual_mesh: The mesh, which does not have the host.
        info: Ray's description of the host.
        devices: The number of its devices.
    """
    ids = [*virtual_mesh.host_ids, max(virtual_mesh.host_ids) + 1]
    counts = [*map(len, virtual_mesh.devices), devices]
    made = _mesh_class()(ids, [*virtual_mesh.host_info, info], counts, virtual_mesh.parent)
    made.devices = [*virtual_mesh.devices, list(range(devices))]
    made.device_strs = [*virtual_mesh.device_strs, *made.device_strs[sum(counts[:-1]) :]]
    _become(virtual_mesh, made)


def _become(virtual_mesh: Any, made: Any) -> None:
    """Turn an Alpa mesh into another one in place, and keep the workers and notes that it has."""
    group = virtual_mesh.launched_physical_mesh_group
    virtual_mesh.__class__ = made.__class__
    vars(virtual_mesh).update(vars(made), launched_physical_mesh_group=group)


def get_virtual_physical_mesh(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: among unequal or partly reserved hosts, each host keeps its devices."""
    from alpa.device_mesh import VirtualPhysicalMesh
    from alpa.global_env import global_config

    @functools.wraps(original)
    def replacement(self: Any, host_ids: Any = None, num_devices_per_host: Any = None) -> Any:
        # `host_num_devices` may be in another order than the hosts, so ask Ray's description of each host.
        counts = [int(info["Resources"][global_config.ray_accelerator_name]) for info in self.host_info]
        indices = reservation.indices_of(self) or [list(range(count)) for count in counts]
        hosts = list(range(len(indices))) if host_ids is None else [int(host) for host in host_ids]
        chosen, infos = [indices[host][:num_devices_per_host] for host in hosts], [self.host_info[h] for h in hosts]
        if num_devices_per_host is not None and any(len(devices) < num_devices_per_host for devices in chosen):
            raise AlpaError(
                f"The program has {', '.join(str(len(devices)) for devices in chosen)} devices on hosts "
                f"{', '.join(map(str, hosts))}, expected num_devices_per_host={num_devices_per_host} on each.",
                "ask for fewer devices, or for other hosts by host_ids.",
            )
        if len({len(devices) for devices in chosen}) == 1:
            return VirtualPhysicalMesh(hosts, infos, len(chosen[0]), self, chosen)
        return make_mesh(hosts, infos, list(map(len, chosen)), self)

    return replacement


def get_sliced_virtual_submeshes(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: on unequal hosts, give devices to the stages that a program fixes, as Alpa would.

    The largest stage comes first, and equal ones from the last to the first, as with Alpa. Each stage goes on the hosts
    with the fewest free devices that suffice. Devices that are left over stay idle.
    """

    @functools.wraps(original)
    def replacement(virtual_mesh: Any, submesh_shapes: Any) -> Any:
        are_first = all(list(devices) == list(range(len(devices))) for devices in virtual_mesh.devices)
        if are_first and not is_unequal(virtual_mesh):
            return original(virtual_mesh, submesh_shapes)
        shapes = [(int(hosts), int(width)) for hosts, width in submesh_shapes]
        slices = cut([list(devices) for devices in virtual_mesh.devices], shapes)
        return [part_of(virtual_mesh, by_host) for by_host in slices]

    return replacement


def cut(devices: List[List[int]], shapes: Sequence[Tuple[int, int]]) -> List[Dict[int, List[int]]]:
    """Return the devices of each submesh, by host.

    Args:
        devices: The free devices of each host. This function removes those that it gives away.
        shapes: (hosts, devices of each) of every submesh.

    Raises:
        AlpaError: The hosts have too few devices.

    Example:
        >>> cut([[0], [0, 1], [0, 1, 2, 3]], [(1, 1), (1, 2), (1, 3)])
        [{0: [0]}, {1: [0, 1]}, {2: [0, 1, 2]}]
    """
    have = [len(one) for one in devices]
    order = sorted(range(len(shapes)), key=lambda k: shapes[k][0] * shapes[k][1])[::-1]
    slices: List[Dict[int, List[int]]] = [{} for _ in shapes]
    for k in order:
        hosts, width = shapes[k]
        free = sorted(
            (host for host in range(len(devices)) if len(devices[host]) >= width), key=lambda h: len(devices[h])
        )
        if len(free) < hosts:
            raise AlpaError(
                f"The program fixes stages of the shapes {list(shapes)}, which hosts with {have} devices cannot hold.",
                'change the shapes, or let hwaware choose them: stage_option="auto".',
            )
        slices[k] = {host: [devices[host].pop(0) for _ in range(width)] for host in sorted(free[:hosts])}
    return slices


_STAGES = "alpa.pipeline_parallel.stage_construction"
# The digests are of Alpa 0.2.3's own sources, printed by `hwaware.patching.mechanism.source_digest`.
PATCHES = (
    Patch(
        Target("alpa.device_mesh", "DeviceCluster.get_virtual_physical_mesh", ("bf7a16c681291368",)),
        get_virtual_physical_mesh,
    ),
    Patch(Target(_STAGES, "get_sliced_virtual_submeshes", ("abbe459c8a0d8b58",)), get_sliced_virtual_submeshes),
)
