"""Read checkpoints in the format that Alpa writes, and that hwaware 0.1.0 wrote.

Alpa keeps pickles beside its arrays. It opens these with `pickle.load`, which runs whatever somebody wrote there. The
reader here runs nothing: it takes only shapes, types and names of files from the pickles.
"""

from __future__ import annotations

import math
import os
from typing import Any, Dict, List, Tuple

import numpy

from hwaware.compat.packages import MODULES_OF_DTYPES
from hwaware.errors import DamagedCheckpointError, RecordError
from hwaware.interop import restricted_pickle
from hwaware.runtime.checkpoints import box_of, check_size, open_inside
from hwaware.runtime.manifests import FIX, Part, Path, SavedArray, dtype_of, flattened

_FIX = f"never open it with pickle.load; {FIX}"
# Types of ml_dtypes, by their names in pickles.
_TYPES = ("bfloat16", "float8_e4m3fn", "float8_e5m2")
_ALSO: Dict[Tuple[str, str], Any] = {
    ("builtins", "slice"): slice,
    ("builtins", "Ellipsis"): ...,
    **{(module, name): name for module in MODULES_OF_DTYPES for name in _TYPES},
}


def leaves(folder: str, data: bytes, name: str) -> Dict[Path, Any]:
    """Return the leaves of a state by their paths: arrays as `SavedArray`, and values as they are.

    Args:
        folder: The folder of the checkpoints.
        data: The contents of the file `checkpoint_N`, in which the name of a folder stands for each array.
        name: The name of that file in messages.

    Raises:
        DamagedCheckpointError: A file is missing, has another format, or names something that no checkpoint needs.
    """
    import msgpack

    try:
        state = msgpack.unpackb(data)
    except ValueError as error:
        raise DamagedCheckpointError(
            f"{name} is neither a manifest of hwaware nor one of Alpa (msgpack): {error}.", FIX
        ) from error
    found = flattened(state)
    return {path: _array(folder, path, leaf) if isinstance(leaf, str) else leaf for path, leaf in found.items()}


def _array(folder: str, path: Path, name: str) -> SavedArray:
    """Return the array in a folder, by all pickles there: each worker that wrote parts left one."""
    place = os.path.join(folder, name)
    names = sorted(one for one in os.listdir(place) if one.startswith("metadata")) if os.path.isdir(place) else []
    if not names:
        raise DamagedCheckpointError(
            f"{place} does not hold an array of a checkpoint, expected the file metadata_0 there.", FIX
        )
    parts: List[Part] = []
    heads = set()
    for one in names:
        where = os.path.join(place, one)
        with open_inside(folder, os.path.join(name, one)) as file:
            data = file.read()
        try:
            dtype, shape, added = _parts(_unpickled(data, where), name)
            heads.add((dtype, shape))
            parts += added
            for part in added:  # workers hear only of files that exist and are large enough
                check_size(folder, part.file, math.prod(part.shape) * dtype_of(dtype).itemsize, is_least=True)
            array = SavedArray(path=path, dtype=dtype, shape=shape, parts=tuple(parts))
        except (AttributeError, KeyError, TypeError, ValueError, RecordError) as error:
            raise DamagedCheckpointError(
                f"{where} does not describe an array: {type(error).__name__}: {error}.", _FIX
            ) from error
    if len(heads) > 1:
        raise DamagedCheckpointError(f"{place} holds parts of {len(heads)} unlike arrays, expected one.", FIX)
    return array


def _unpickled(data: bytes, name: str) -> Any:
    try:
        return restricted_pickle.loads(data, name, _ALSO)
    except RecordError as error:
        raise DamagedCheckpointError(error.what, _FIX) from error


def _parts(said: Any, name: str) -> Tuple[str, Tuple[int, ...], List[Part]]:
    """Return the type, the shape and the parts in a pickle.

    Raise AttributeError, KeyError, TypeError or ValueError if the pickle describes no array.
    """
    code = said["dtype"].code
    dtype = code if code in _TYPES else numpy.dtype(code).name
    dtype_of(dtype)
    shape = tuple(int(size) for size in said["global_shape"])
    # Alpa writes None if one part is the whole array.
    indices = said["shard_indices"] or [...] * len(said["shard_names"])
    parts = []
    if len(set(said["shard_names"])) != len(said["shard_names"]):
        raise ValueError("a file is named twice")
    for file, index in zip(said["shard_names"], indices):
        if not isinstance(file, str) or not (index is ... or len(index) == len(shape)):
            raise ValueError(f"part {file!r} lies at {index!r}")
        box = box_of(index, shape)
        parts.append(Part(file=os.path.join(name, file), offset=0, bytes=0, start=box.start, shape=box.shape))
    return dtype, shape, parts
