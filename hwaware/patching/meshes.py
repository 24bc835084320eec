"""Convert the devices of a profile to Alpa's meshes, and back."""

from __future__ import annotations

import collections
import itertools
from typing import Any, Dict, List, Optional, Sequence, Tuple

from hwaware.cluster import ClusterProfile
from hwaware.device_places import DevicePlace, absent, device_places
from hwaware.errors import PlanError
from hwaware.patching import unequal
from hwaware.plans import Plan, Replica, Stage

# Attribute of Alpa's meshes: the hardware identities of each host's devices.
_UUIDS = "hwaware_uuids"
# Attribute of Alpa's meshes: the profile of the cluster, once a host has joined.
_GROWN = "hwaware_grown"


def mesh_places(virtual_mesh: Any) -> Dict[DevicePlace, int]:
    """Return each device of an Alpa mesh -> the position of its host in the mesh."""
    return {
        (virtual_mesh.host_info[position]["NodeManagerAddress"], device): position
        for position in range(virtual_mesh.num_hosts)
        for device in virtual_mesh.devices[position]
    }


def restrict(profile: ClusterProfile, virtual_mesh: Any) -> ClusterProfile:
    """Return the part of a profile that an Alpa mesh has; the profile itself if that is all.

    Raises:
        ProfileMismatchError: The mesh has hosts or devices that the profile does not know.
    """
    gone = absent(profile, mesh_places(virtual_mesh))
    return profile.without(gone) if gone else profile


def grow(virtual_mesh: Any, info: Any, devices: int, profile: ClusterProfile) -> None:
    """Add a host to an Alpa mesh, in place, for all functions that use the mesh.

    Args:
        virtual_mesh: The mesh, which does not have the host.
        info: Ray's description of the host.
        devices: The number of its devices.
        profile: The profile of the cluster with the host.
    """
    setattr(virtual_mesh, _GROWN, profile)  # first: other threads find no host that the profile lacks
    unequal.grow(virtual_mesh, info, devices)


def whole(profile: ClusterProfile, virtual_mesh: Any) -> ClusterProfile:
    """Return the profile of an Alpa mesh's cluster: the given one, or the one with the hosts that have joined."""
    found: ClusterProfile = getattr(virtual_mesh, _GROWN, profile)
    return found


def slice_mesh(virtual_mesh: Any, plan: Plan, profile: ClusterProfile) -> List[Any]:
    """Return one Alpa mesh for each stage of the plan, on the plan's own hosts and devices.

    Args:
        virtual_mesh: The mesh of the running cluster.
        plan: The plan with the stages.
        profile: The whole profile, also if the mesh has only a part of it: it numbers each host's devices.

    Raises:
        PlanError: A stage names a device that the mesh does not have, or devices that no Alpa mesh can hold.
    """
    places = device_places(profile)
    available = mesh_places(virtual_mesh)
    for stage in plan.stages:
        for device in stage.devices:
            if places.get(device) not in available:
                raise PlanError(
                    f"The plan uses device {device!r}, which the running cluster does not have.",
                    "make the plan from a profile of this cluster.",
                )
    uuids = {places[device.id]: device.uuid for device in profile.devices}
    return [_stage_mesh(virtual_mesh, stage, places, available, uuids) for stage in plan.stages]


def _stage_mesh(
    virtual_mesh: Any,
    stage: Stage,
    places: Dict[str, DevicePlace],
    available: Dict[DevicePlace, int],
    uuids: Dict[DevicePlace, Optional[str]],
) -> Any:
    by_host: Dict[int, List[int]] = {}
    for device in stage.devices:
        place = places[device]
        by_host.setdefault(available[place], []).append(place[1])
    _require_mesh(stage, [available[places[device]] for device in stage.devices])
    mesh = unequal.part_of(virtual_mesh, by_host)
    addresses = [info["NodeManagerAddress"] for info in mesh.host_info]
    named = [tuple(uuids[address, device] for device in devices) for address, devices in zip(addresses, mesh.devices)]
    setattr(mesh, _UUIDS, named)
    return mesh


def uuids_of(mesh: Any, rank: int) -> Tuple[str, ...]:
    """Return the hardware identities of the devices that one worker of a launched mesh has.

    Args:
        mesh: Alpa's launched mesh.
        rank: The number of the worker in the mesh.

    Returns:
        One identity for each device, in their order; none if the profile does not know them all.
    """
    named = getattr(mesh.parent, _UUIDS, None)
    found = named[rank] if named is not None else ()
    return tuple(uuid for uuid in found if uuid) if all(found) else ()


def one_device_a_worker(mesh: Any) -> Any:
    """Return the mesh that Alpa launches, with a worker for each "host"; on several hosts, each device becomes a host.

    At least in JAX 0.4.30, gloo connects one device of a process. Two devices of a process wait for each other until
    gloo gives up. NCCL takes either. Within one host, a process holds all devices of a stage.

    Args:
        mesh: Alpa's virtual mesh of one stage.

    Returns:
        The mesh itself, or one that names each host once for each device.
    """
    from alpa.device_mesh import VirtualPhysicalMesh

    if mesh.num_hosts == 1 or mesh.num_devices_per_host == 1:
        return mesh
    workers = [(position, device) for position, devices in enumerate(mesh.devices) for device in devices]
    made = VirtualPhysicalMesh(
        host_ids=[mesh.host_ids[position] for position, _ in workers],
        host_info=[mesh.host_info[position] for position, _ in workers],
        num_devices_per_host=1,
        parent=mesh.parent,
        devices=[[device] for _, device in workers],
    )
    named = getattr(mesh, _UUIDS, None)
    if named is not None:
        setattr(made, _UUIDS, [(uuid,) for uuids in named for uuid in uuids])
    return made


def _require_mesh(stage: Stage, hosts: Sequence[int]) -> None:
    """Refuse a stage whose devices form no Alpa mesh: hosts with equally many devices, and equal replicas, in order."""
    widths = sorted({hosts.count(host) for host in hosts})
    sizes = sorted({len(replica.devices) for replica in stage.replicas})
    shares = {replica.share for replica in stage.replicas}
    if len(widths) > 1:
        found = f"{widths} devices on its hosts; an Alpa mesh has equally many on each"
    elif len(sizes) > 1:
        found = f"replicas of {sizes} devices; under Alpa all have equally many"
    elif len(shares) > 1:
        found = f"replicas with the shares {[replica.share for replica in stage.replicas]}; under Alpa all are equal"
    elif len([host for host, _ in itertools.groupby(hosts)]) > len(set(hosts)):
        found = "its hosts' devices mixed; an Alpa mesh goes through its hosts one after the other"
    else:
        return
    raise PlanError(
        f"The stage of the layers {list(stage.layers)} has {found}.",
        "plan with --target alpa, or change the stage's devices.",
    )


def plan_of(option: Any, sliced: Sequence[Any], profile: ClusterProfile, num_microbatches: int, schedule: Any) -> Plan:
    """Return Alpa's own stages, on its own slices of the cluster, as a Plan.

    Args:
        option: The ManualStageOption that Alpa's stage construction returns.
        sliced: The mesh of each stage.
        profile: The whole profile, as for `slice_mesh`.
        num_microbatches: The number of microbatches per step.
        schedule: The schedule of the plan.
    """
    names = {place: device for device, place in device_places(profile).items()}
    stages = []
    for layers, mesh, logical in zip(option.forward_stage_layer_ids, sliced, option.submesh_logical_shapes):
        devices = [names[place] for place in mesh_places(mesh)]
        width = int(logical[1])
        replicas = [Replica(devices=tuple(devices[k : k + width])) for k in range(0, len(devices), width)]
        stages.append(Stage(layers=(layers[0], layers[-1]), replicas=tuple(replicas)))
    return Plan(num_microbatches=num_microbatches, schedule=schedule, stages=tuple(stages))


def require_runnable(plan: Plan, profile: ClusterProfile) -> None:
    """Refuse a plan that this JAX cannot run.

    Raises:
        AlpaError: A stage is on the CPUs of several hosts, and this JAX is too old for that.
    """
    from hwaware.runtime.backend import require_gloo

    host_of = {device.id: device.host for device in profile.devices}
    cpus = {device.id for device in profile.devices if device.kind.startswith("cpu")}
    for stage in plan.stages:
        if cpus.issuperset(stage.devices) and len({host_of[device] for device in stage.devices}) > 1:
            require_gloo()


def cluster_mesh(nodes: Sequence[Tuple[str, int]]) -> Any:
    """Make an Alpa mesh of hosts that need not have equally many devices.

    `alpa.init` takes the first host's number of devices for all hosts. Here every host keeps its own number.

    Args:
        nodes: (Ray address, number of devices) of each host.
    """
    info = [{"NodeManagerAddress": address} for address, _ in nodes]
    return unequal.make_mesh(range(len(nodes)), info, [count for _, count in nodes])


def device_counts(profile: ClusterProfile) -> Tuple[Tuple[str, int], ...]:
    """Return (Ray address, number of devices) of each host that has devices, in the order of the profile."""
    return tuple(collections.Counter(address for address, _ in device_places(profile).values()).items())
