"""Read Alpa's arrays on workers, and make such arrays of the pieces in vaults."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from hwaware.runtime.checkpoints import Box, box_of
from hwaware.survival.pieces import Name, Piece, Wanted, bytes_of, digest_of

# A worker's host and devices.
Place = Tuple[str, Tuple[int, ...]]


def one(array: Any) -> Any:
    """Return an array on one mesh: the array itself, or one replica where several stages have it."""
    from alpa.device_mesh import ReplicatedDistributedArray

    return array.replica if isinstance(array, ReplicatedDistributedArray) else array


def shape_of(array: Any) -> Tuple[int, ...]:
    """Return an array's shape."""
    return tuple(one(array).aval.shape)


def is_distributed(value: Any) -> bool:
    """Tell if a value is an array on workers."""
    from alpa.device_mesh import DistributedArray, ReplicatedDistributedArray

    return isinstance(value, (DistributedArray, ReplicatedDistributedArray))


def is_deleted(array: Any) -> bool:
    """Tell if a call has taken an array."""
    reference = one(array).remote_ref
    return reference is None or reference.is_deleted_on_workers


def own_piece(name: Name, value: Any) -> Tuple[Piece, Any]:
    """Return a whole array of the driver as a piece."""
    data = bytes_of(value)
    return Piece(name, (0,) * value.ndim, value.shape, value.dtype.name, digest_of(data)), data


def holders(array: Any) -> Dict[Place, Tuple[Any, Tuple[Box, ...]]]:
    """Return each worker's uuid for its blocks of an array, and these blocks, by the worker's place."""
    found = {}
    for part in getattr(array, "_mesh_array_map", {None: array}).values():
        mesh, width = part.device_mesh, part.device_mesh.num_devices_per_host
        for host in range(mesh.num_hosts):
            boxes = tuple(box_of(index, part.aval.shape) for index in part.indices[host * width : (host + 1) * width])
            place = (mesh.host_info[host]["NodeManagerAddress"], tuple(mesh.devices[host]))
            found[place] = (part.remote_ref.uuid, boxes)
    return found


def placed(meshes: Sequence[Any], spec: Any, name: Name, wanted: Dict[Tuple[int, int], List[Wanted]]) -> Any:
    """Return an array on the meshes where it belongs, and add to `wanted` what each worker shall take in.

    Args:
        meshes: Alpa's launched meshes.
        spec: Alpa's placement of the array.
        name: The array's name.
        wanted: (mesh, worker) -> the arrays that the worker shall take in.
    """
    from alpa.device_mesh import DistributedArray, RemoteArrayRef, ReplicatedDistributedArray

    from hwaware.compat.specs import spec_to_indices

    arrays = []
    for mesh_id, sharding in zip(spec.mesh_ids, spec.sharding_specs):
        mesh = meshes[mesh_id]
        reference, width = RemoteArrayRef(mesh), mesh.num_devices_per_host
        indices = spec_to_indices(spec.aval.shape, sharding)
        for host in range(mesh.num_hosts):
            boxes = tuple(box_of(index, spec.aval.shape) for index in indices[host * width : (host + 1) * width])
            wanted.setdefault((mesh_id, host), []).append(Wanted(name, reference.uuid, spec.aval.dtype, boxes))
        arrays.append(DistributedArray(mesh, spec.aval, sharding, reference, indices))
    return arrays[0] if len(arrays) == 1 else ReplicatedDistributedArray([a.device_mesh for a in arrays], arrays)
