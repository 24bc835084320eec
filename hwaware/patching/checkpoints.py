"""Alpa's `save_checkpoint` and `restore_checkpoint` on hwaware's runtime.

Alpa's own returns before its workers have written anything, marks the checkpoint as there at once, and writes every
step over the files of the one before. Here each step has a folder, workers write their own parts, and the file
`checkpoint_STEP` that makes a checkpoint one appears when everything is written: an interrupted save leaves the earlier
checkpoints whole and none of its own. The format of arrays and of that file is Alpa's. As with Alpa, the folder is one
that every host reaches under the same path.
"""

from __future__ import annotations

import os
import shutil
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

from hwaware.errors import MeasurementError, RecordError
from hwaware.runtime.checkpoints import save_parts

# Writing a checkpoint takes as long as the disk needs; beyond an hour something is wrong.
_LIMIT_S = 3600.0


def compile_input_placement_spec(original: Any) -> Callable[..., Any]:
    """Alpa's own, and every spec knows the workers that it is about: those of `alpa.init` need not be there."""

    def replacement(self: Any, *args: Any) -> Any:
        specs = original(self, *args)
        for spec in specs:
            if spec is not None:  # part of the state that the program never reads
                spec.mesh_group = self.mesh_group
        return specs

    return replacement


def save_checkpoint(_original: Any) -> Callable[..., None]:
    """Alpa's `save_checkpoint`, which returns when the checkpoint is whole."""

    def replacement(ckpt_dir: Any, target: Any, step: int, local_cache_dir: Any = None) -> None:
        from flax.serialization import to_state_dict

        folder = os.fspath(ckpt_dir)
        os.makedirs(folder, exist_ok=True)
        complete = os.path.join(folder, f"checkpoint_{step}")
        if os.path.exists(complete):
            os.remove(complete)
        # What an earlier save of this step wrote, perhaps by other workers, would be read along with the new parts.
        shutil.rmtree(os.path.join(folder, f"step_{step}"), ignore_errors=True)
        writes: List[Any] = []
        metadata = _saved(to_state_dict(target), f"step_{step}", (folder, local_cache_dir), writes)
        _wait(writes, f"Saving step {step} to {folder}")
        _write_metadata(complete, metadata)

    return replacement


def _wait(work: List[Any], what: str) -> None:
    import ray

    try:
        ray.get(work, timeout=_LIMIT_S)
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None) or error
        raise MeasurementError(
            f"{what} failed within {_LIMIT_S:g} s: {cause}", "check that every host can use that folder and has space."
        ) from error


def _write_metadata(path: str, metadata: Any) -> None:
    import msgpack

    with open(path + ".part", "wb") as file:
        file.write(msgpack.packb(metadata))
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".part", path)


def _saved(value: Any, name: str, folders: Tuple[str, Optional[str]], writes: List[Any]) -> Any:
    """Begin to write a state's arrays; returns the state with names of folders in the place of the arrays."""
    import jax
    import numpy
    from alpa.device_mesh import DistributedArray, ReplicatedDistributedArray

    if isinstance(value, dict):
        first = os.path.join(name, "state") if os.sep not in name else name
        return {key: _saved(inner, f"{first}.{key}", folders, writes) for key, inner in value.items()}
    if isinstance(value, ReplicatedDistributedArray):
        value = value.replica
    path, cache = (None if each is None else os.path.join(os.fspath(each), name) for each in folders)
    assert path is not None  # only the cache may be
    if isinstance(value, DistributedArray):
        writes.extend(_save_remote(value, path, cache))
        return name
    if isinstance(value, (numpy.ndarray, numpy.generic, jax.Array)):
        save_parts(path, None, 0, [numpy.asarray(value)], [...], value.shape)
        return name
    return value


def _save_remote(array: Any, path: str, cache: Optional[str]) -> Iterator[Any]:
    by_host: Dict[int, List[Tuple[int, Any]]] = {}
    for (host, device), index in zip(array.one_replica_host_local_ids, array.one_replica_buffer_ids):
        by_host.setdefault(host, []).append((device, array.indices[index]))
    for host, parts in by_host.items():
        devices, indices = [device for device, _ in parts], [index for _, index in parts]
        worker = array.device_mesh.workers[host]
        yield worker.save_array.remote(path, cache, array.remote_ref.uuid, devices, indices, array.shape)


def restore_checkpoint(_original: Any) -> Callable[..., Any]:
    """Alpa's `restore_checkpoint`: to the meshes of the placement specs, however the stages lay when it was saved."""

    def replacement(ckpt_dir: Any, step: int, placement_specs: Any) -> Any:
        import jax
        from flax.serialization import from_state_dict

        folder = os.fspath(ckpt_dir)
        # A part of the state that the program never reads has no place.
        specs, tree = jax.tree_util.tree_flatten(placement_specs, is_leaf=lambda leaf: leaf is None)
        saved = tree.flatten_up_to(from_state_dict(placement_specs, _read_metadata(folder, step)))
        reads: List[Any] = []
        restored = [_restored(folder, name, spec, reads) for name, spec in zip(saved, specs)]
        _wait(reads, f"Restoring step {step} from {folder}")
        return tree.unflatten(restored)

    return replacement


def _read_metadata(folder: str, step: int) -> Any:
    import msgpack

    try:
        with open(os.path.join(folder, f"checkpoint_{step}"), "rb") as file:
            return msgpack.unpackb(file.read())
    except FileNotFoundError:
        names = os.listdir(folder) if os.path.isdir(folder) else []
        whole = sorted(name for name in names if name.startswith("checkpoint_") and not name.endswith(".part"))
        raise RecordError(
            f"{folder} holds no whole checkpoint of step {step}; whole ones: {', '.join(whole) or 'none'}.",
            "name one of these; a save that was interrupted is not one.",
        ) from None


def _restored(folder: str, name: Any, spec: Any, reads: List[Any]) -> Any:
    from alpa.device_mesh import ReplicatedDistributedArray

    if spec is None or not isinstance(name, str):
        return None if spec is None else name
    meshes = [spec.mesh_group[mesh] for mesh in spec.mesh_ids]
    path = os.path.join(folder, name)
    arrays = [
        _load_remote(path, spec.aval, mesh, sharding, reads) for mesh, sharding in zip(meshes, spec.sharding_specs)
    ]
    return arrays[0] if len(arrays) == 1 else ReplicatedDistributedArray(meshes, arrays)


def _load_remote(path: str, aval: Any, mesh: Any, sharding: Any, reads: List[Any]) -> Any:
    from alpa.device_mesh import DistributedArray, RemoteArrayRef
    from jax.interpreters import pxla

    reference, width = RemoteArrayRef(mesh), mesh.num_devices_per_host
    indices = pxla.spec_to_indices(aval.shape, sharding)
    for host, worker in enumerate(mesh.workers):
        part = indices[host * width : (host + 1) * width]
        reads.append(worker.load_array.remote(path, reference.uuid, part, aval.shape, aval.dtype))
    return DistributedArray(mesh, aval, sharding, reference, indices)
