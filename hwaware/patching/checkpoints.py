"""Save and restore states with hwaware's runtime, behind Alpa's `save_checkpoint` and `restore_checkpoint`.

Alpa's own `save_checkpoint` returns before its workers have written anything, and marks the checkpoint as there at
once. It writes every step over the files of the step before. Alpa's own `restore_checkpoint` reads pickles.

Here workers write and read their own parts of the state in hwaware's format (runtime.manifests). The driver makes a
step a checkpoint once all parts are on the disk. `restore_checkpoint` also reads steps that Alpa wrote
(patching.alpa_checkpoints). As with Alpa, every host reaches the folder under the same path.
"""

from __future__ import annotations

import functools
import operator
import os
from typing import Any, Callable, Collection, Dict, List, NamedTuple, Sequence, Tuple, TypeVar, Union

import numpy
from msgspec.structs import replace

from hwaware.errors import CheckpointError, DamagedCheckpointError, RecordError, UnusableInputError, WorkerFailedError
from hwaware.patching import alpa_checkpoints, failures, rescue
from hwaware.runtime import checkpoint_folder
from hwaware.runtime.checkpoint_folder import Unfinished
from hwaware.runtime.checkpoints import (
    Box,
    Fault,
    Load,
    Written,
    attempt,
    box_of,
    check_size,
    overlaps,
    read_boxes,
    write_arrays,
)
from hwaware.runtime.manifests import (
    FIX,
    Manifest,
    Part,
    Path,
    SavedArray,
    SavedValue,
    ShardFile,
    dtype_of,
    flattened,
    nested,
)

T = TypeVar("T")
# Writing a checkpoint takes as long as the disk needs; beyond an hour something is wrong.
_LIMIT_S = 3600.0
_OTHER_STATE = "restore a checkpoint of the same model and optimizer."
_SHARED = "put the checkpoints on a filesystem that every host reaches under the same path."


def compile_input_placement_spec(original: Any) -> Callable[..., Any]:
    """Wrap Alpa's function: each spec keeps its own workers, which may be others than those of `alpa.init`."""

    def replacement(self: Any, *args: Any) -> Any:
        specs = original(self, *args)
        for spec in specs:
            if spec is not None:  # None stands for a part of the state that the program never reads
                spec.mesh_group = self.mesh_group
        return specs

    return replacement


def _step_number(step: Any) -> int:
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UnusableInputError(
            f"The step of a checkpoint is {step!r}, expected a whole number of at least 0.",
            "count the steps in the program, and give that number.",
        )
    return number


# Saving


def save_checkpoint(_original: Any) -> Callable[..., None]:
    """Replace Alpa's `save_checkpoint` by a function that returns when the checkpoint is whole.

    Each worker writes one file into the folder itself, from beginning to end. `local_cache_dir` would save no time.
    """

    def replacement(ckpt_dir: Any, target: Any, step: int, local_cache_dir: Any = None) -> None:
        del local_cache_dir
        folder, number = os.path.abspath(ckpt_dir), _step_number(step)
        rescue.retried(lambda: save(folder, target, number))
        rescue.saved(folder, number, target)

    def save(folder: str, target: Any, number: int) -> None:
        from flax.serialization import to_state_dict

        what = f"Saving step {number} to {folder}"
        files, values, empty = _files_of(flattened(to_state_dict(target)))
        unfinished = _saved(attempt(lambda: checkpoint_folder.begin(folder, number)), what)
        try:
            manifest = _write(unfinished, files, what)
            manifest = replace(manifest, values=tuple(values), empty=tuple(empty))
            _saved(attempt(lambda: checkpoint_folder.commit(unfinished, manifest)), what)
        except BaseException:
            checkpoint_folder.abandon(unfinished)
            raise

    return replacement


class _Piece(NamedTuple):
    """Hold a block of an array that goes into a file.

    Attributes:
        path, dtype, shape: The array's path in the state, its type and its shape.
        box: The place of the block in the array.
        source: The block: a NumPy array, or the (uuid, device) by which a worker knows it.
    """

    path: Path
    dtype: str
    shape: Tuple[int, ...]
    box: Box
    source: Any


class _File(NamedTuple):
    """Hold the contents of one file, and the worker that writes it. Without a worker, the driver writes it."""

    name: str
    mesh: Any
    worker: Any
    pieces: List[_Piece]


def _files_of(leaves: Dict[Path, Any]) -> Tuple[List[_File], List[SavedValue], List[Path]]:
    """Return the files for a state's arrays, and the manifest's values and paths of empty dictionaries."""
    import jax
    from alpa.device_mesh import DistributedArray, ReplicatedDistributedArray

    files: Dict[Any, _File] = {}
    values: List[SavedValue] = []
    empty: List[Path] = []

    def add(mesh: Any, host: int, piece: _Piece) -> None:
        key = (id(mesh), host)
        if key not in files:
            if mesh is not None:
                failures.require_workers(mesh)
            worker = None if mesh is None else mesh.workers[host]
            files[key] = _File(f"{len(files)}.bin", mesh, worker, [])
        files[key].pieces.append(piece)

    for path, leaf in leaves.items():
        value = leaf.replica if isinstance(leaf, ReplicatedDistributedArray) else leaf
        if isinstance(value, DistributedArray):
            if value.remote_ref is None or value.remote_ref.is_deleted_on_workers:
                raise UnusableInputError(
                    f"{'.'.join(path)} of the state was deleted, or donated to a step.",
                    "save the state that the newest step returned.",
                )
            head = (path, numpy.dtype(value.aval.dtype).name, tuple(value.shape))
            for (host, device), index in zip(value.one_replica_host_local_ids, value.one_replica_buffer_ids):
                box = box_of(value.indices[index], value.shape)
                add(value.device_mesh, host, _Piece(*head, box, (value.remote_ref.uuid, device)))
        elif isinstance(value, (numpy.ndarray, numpy.generic, jax.Array)):
            array = numpy.asarray(value)
            dtype_of(array.dtype.name)  # refuses objects and text
            add(None, 0, _Piece(path, array.dtype.name, array.shape, box_of(..., array.shape), array))
        elif isinstance(value, dict):
            empty.append(path)
        else:
            values.append(SavedValue.of(path, value))
    return list(files.values()), values, empty


def _write(unfinished: Unfinished, files: Sequence[_File], what: str) -> Manifest:
    """Let every process write its file; return a manifest that describes the arrays alone."""
    remote = [file for file in files if file.worker is not None]
    calls = []
    for file in remote:
        path = os.path.join(unfinished.path, file.name)
        calls.append((file.mesh, file.worker.save_arrays.remote(path, [piece.source for piece in file.pieces])))
    own = [file for file in files if file.worker is None]
    written: Dict[str, Union[List[Written], Fault]] = {}
    for file in own:
        arrays = [piece.source for piece in file.pieces]
        path = os.path.join(unfinished.path, file.name)
        written[file.name] = attempt(functools.partial(write_arrays, path, arrays))
    try:
        results = failures.results_of(calls, what, _LIMIT_S)
    except WorkerFailedError as error:
        if hasattr(error, "run"):  # the program survives, and saves again
            raise
        raise WorkerFailedError(
            error.where,
            f"{error.cause} {what} ended with it; checkpoints that were saved before are untouched.",
            error.fix,
        ) from error
    written.update(zip((file.name for file in remote), results))
    done = {name: _saved(result, what) for name, result in written.items()}
    return _manifest(unfinished, files, done)


def _manifest(unfinished: Unfinished, files: Sequence[_File], written: Dict[str, List[Written]]) -> Manifest:
    arrays: Dict[Path, SavedArray] = {}
    parts: Dict[Path, List[Part]] = {}
    for file in files:
        for piece, (offset, size, digest) in zip(file.pieces, written[file.name]):
            arrays[piece.path] = SavedArray(path=piece.path, dtype=piece.dtype, shape=piece.shape, parts=())
            start, shape = piece.box
            part = Part(file=file.name, offset=offset, bytes=size, digest=digest, start=start, shape=shape)
            parts.setdefault(piece.path, []).append(part)
    return Manifest(
        step=unfinished.step,
        folder=unfinished.name,
        files=tuple(ShardFile(name=name, bytes=sum(one.bytes for one in all_)) for name, all_ in written.items()),
        arrays=tuple(replace(array, parts=tuple(parts[path])) for path, array in arrays.items()),
    )


def _saved(result: Union[T, Fault], what: str) -> T:
    """Return what a process wrote in its part of a save; raise CheckpointError for a Fault."""
    if not isinstance(result, Fault):
        return result
    cause = f"in {result.where}, {result.what}" if result.where else result.what
    if result.is_damage and not result.where:  # the driver sees other files than the workers wrote
        raise CheckpointError(f"{what} failed: {cause} Checkpoints that were saved before are untouched.", _SHARED)
    raise CheckpointError(
        f"{what} failed: {cause}. Checkpoints that were saved before are untouched.",
        "make room there or choose another folder, which every host may write to, and save again.",
    )


# Restoring


def restore_checkpoint(_original: Any) -> Callable[..., Any]:
    """Replace Alpa's `restore_checkpoint`. The placement specs name the meshes, wherever the stages once were."""

    def replacement(ckpt_dir: Any, step: int, placement_specs: Any) -> Any:
        return restored(os.path.abspath(ckpt_dir), _step_number(step), placement_specs)

    return replacement


def restored(folder: str, step: int, placement_specs: Any, keep_unread: bool = False) -> Any:
    """Restore a state to the places in the placement specs.

    Args:
        folder: The folder of the checkpoints.
        step: The step of the checkpoint.
        placement_specs: Alpa's specs; None for a part that the program never reads.
        keep_unread: Read such parts into arrays of the driver. Alpa puts None in their place.

    Raises:
        DamagedCheckpointError: The checkpoint is not as it was written.
        RecordError: The folder has no such step, or the step holds another state.
        WorkerFailedError: A worker failed.
    """
    import jax
    from flax.serialization import from_state_dict, to_state_dict

    with checkpoint_folder.readable(folder):
        saved = _read(folder, step)
    name = checkpoint_folder.manifest_path(folder, step)
    _check_paths(saved, flattened(to_state_dict(placement_specs)), name)
    specs, tree = jax.tree_util.tree_flatten(placement_specs, is_leaf=lambda leaf: leaf is None)
    leaves = tree.flatten_up_to(from_state_dict(placement_specs, nested(saved, name)))
    for leaf, spec in zip(leaves, specs):
        if isinstance(leaf, SavedArray) and spec is not None:
            _check_kind(leaf, spec.aval, name)
    found = list(leaves)
    with checkpoint_folder.readable(folder):
        for place, spec in enumerate(specs):
            if spec is None:
                found[place] = _own(folder, leaves[place]) if keep_unread else None
    loads: Dict[Tuple[int, int], Tuple[Any, Any, List[Load]]] = {}
    remote = [place for place, spec in enumerate(specs) if isinstance(leaves[place], SavedArray) and spec is not None]
    for place in remote:
        found[place] = _placed(leaves[place], specs[place], loads)
    what = f"Restoring step {step} from {folder}"
    calls = [(mesh, worker.load_arrays.remote(folder, these)) for mesh, worker, these in loads.values()]
    for result in failures.results_of(calls, what, _LIMIT_S):
        if result is not None:
            _raise_unreadable(result, what)
    rescue.brought([(specs[place].mesh_group, found[place]) for place in remote])
    return tree.unflatten(found)


def values(folder: str, step: int, paths: Collection[Path]) -> Dict[Path, Any]:
    """Return arrays of a checkpoint as NumPy arrays in the driver.

    Raises:
        DamagedCheckpointError: The checkpoint is not as it was written.
        RecordError: The checkpoint is not there any more.
    """
    with checkpoint_folder.readable(folder):
        saved = _read(folder, step)
        return {path: _own(folder, saved[path]) for path in paths}


def _read(folder: str, step: int) -> Dict[Path, Any]:
    """Return a saved state's leaves by their paths. Arrays name their files from the checkpoints' folder."""
    data, name = checkpoint_folder.read_manifest(folder, step), checkpoint_folder.manifest_path(folder, step)
    if data[:1] != b"{":
        return alpa_checkpoints.leaves(folder, data, name)
    manifest = Manifest.from_file(data, name)
    for file in manifest.files:
        check_size(folder, os.path.join(manifest.folder, file.name), file.bytes)
    found: Dict[Path, Any] = {}
    for array in manifest.arrays:
        parts = [replace(part, file=os.path.join(manifest.folder, part.file)) for part in array.parts]
        found[array.path] = replace(array, parts=tuple(parts))
    found.update((value.path, value.value) for value in manifest.values)
    found.update((path, {}) for path in manifest.empty)
    if len(found) != len(manifest.arrays) + len(manifest.values) + len(manifest.empty):
        raise DamagedCheckpointError(f"{name} holds a part of the state twice, expected every path once.", FIX)
    return found


def _check_paths(saved: Dict[Path, Any], expected: Dict[Path, Any], name: str) -> None:
    more = [f"holds {'.'.join(path)!r}, which the state does not have" for path in saved if path not in expected]
    less = [f"does not hold {'.'.join(path)!r}, which the state has" for path in expected if path not in saved]
    unlike = [
        f"holds {'nothing' if saved[path] == {} else 'a value'} as {'.'.join(path)!r}, unlike the state"
        for path in expected
        if path in saved and (saved[path] == {}) != (expected[path] == {})
    ]
    for fault in [*more, *less, *unlike][:1]:
        raise RecordError(f"{name} {fault}.", _OTHER_STATE)


def _check_kind(array: SavedArray, aval: Any, name: str) -> None:
    import jax

    # Without jax_enable_x64, JAX turns 64-bit numbers in the program's NumPy arrays into 32-bit ones.
    types = {dtype_of(array.dtype), jax.dtypes.canonicalize_dtype(dtype_of(array.dtype))}
    if array.shape != tuple(aval.shape) or aval.dtype not in types:
        raise RecordError(
            f"{name} holds {array.dtype}{list(array.shape)} as {array.label}, expected {aval.dtype}{list(aval.shape)}.",
            _OTHER_STATE,
            found=(array.dtype, array.shape),
            expected=(str(aval.dtype), tuple(aval.shape)),
        )


def _placed(array: SavedArray, spec: Any, loads: Dict[Tuple[int, int], Tuple[Any, Any, List[Load]]]) -> Any:
    """Return an array on its meshes, and add the parts that each worker has to load to `loads`."""
    meshes = [spec.mesh_group[mesh] for mesh in spec.mesh_ids]
    run = rescue.run_of(spec.mesh_group)
    if run is not None and run.ended is not None:
        raise run.ended
    if any(mesh.workers is None for mesh in meshes):
        raise UnusableInputError(
            "The placement specs are of workers that the training has left.", "ask get_input_placement_specs() again."
        )
    from alpa.device_mesh import DistributedArray, RemoteArrayRef, ReplicatedDistributedArray

    from hwaware.compat.specs import spec_to_indices

    arrays = []
    for mesh, sharding in zip(meshes, spec.sharding_specs):
        reference, width = RemoteArrayRef(mesh), mesh.num_devices_per_host
        indices = spec_to_indices(spec.aval.shape, sharding)
        for host, worker in enumerate(mesh.workers):
            boxes = tuple(box_of(index, array.shape) for index in indices[host * width : (host + 1) * width])
            needed = tuple(part for part in array.parts if any(overlaps(part, box) for box in boxes))
            load = Load(reference.uuid, replace(array, parts=needed), spec.aval.dtype, boxes)
            loads.setdefault((id(mesh), host), (mesh, worker, []))[2].append(load)
        arrays.append(DistributedArray(mesh, spec.aval, sharding, reference, indices))
    return arrays[0] if len(arrays) == 1 else ReplicatedDistributedArray(meshes, arrays)


def _own(folder: str, leaf: Any) -> Any:
    """Return a leaf; the driver itself reads it if it is an array."""
    if not isinstance(leaf, SavedArray):
        return leaf
    (whole,) = read_boxes(folder, leaf, [box_of(..., leaf.shape)])
    return whole


def _raise_unreadable(fault: Fault, what: str) -> None:
    if fault.is_missing:  # although the driver found it
        raise RecordError(f"{what} failed in {fault.where}: {fault.what} The driver finds that file.", _SHARED)
    if fault.is_damage:
        raise DamagedCheckpointError(fault.what, FIX)
    raise CheckpointError(
        f"{what} failed: in {fault.where}, {fault.what}.", "let every host read the files of the checkpoint."
    )
