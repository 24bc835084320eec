"""An array of a checkpoint on disk: a folder with one file per part and who-has-which-part files, in Alpa's format.

Alpa writes types that NumPy does not know itself (bfloat16) so that nobody can read them back; here they are stored as
the unsigned integers of their bits.
"""

from __future__ import annotations

import os
import pickle
import shutil
from typing import Any, List, Optional, Sequence

from hwaware.errors import RecordError

Index = Any  # what NumPy takes: slices, or ... for all


def save_parts(
    folder: str, cache: Optional[str], host: int, parts: Sequence[Any], indices: Sequence[Index], shape: Sequence[int]
) -> None:
    """Write what one host has of an array.

    Args:
        folder: Of the array.
        cache: A folder on a fast disk to write to first; the files then move to `folder`.
        host: Number of the host in its mesh.
        parts: NumPy arrays.
        indices: Where each part belongs in the whole.
        shape: Of the whole.
    """
    import numpy

    target = cache or folder
    os.makedirs(target, exist_ok=True)
    names = [f"shard_{host}.{index}" for index in range(len(parts))]
    for name, part in zip(names, parts):
        numpy.save(os.path.join(target, name + ".npy"), _plain(numpy.asarray(part)))
        os.replace(os.path.join(target, name + ".npy"), os.path.join(target, name))
    metadata = {
        "global_shape": tuple(shape),
        "dtype": parts[0].dtype,
        "shard_names": names,
        "shard_indices": list(indices),
    }
    with open(os.path.join(target, f"metadata_{host}"), "wb") as file:
        pickle.dump(metadata, file)
    if cache is not None:
        os.makedirs(folder, exist_ok=True)
        for name in [*names, f"metadata_{host}"]:
            shutil.move(os.path.join(cache, name), os.path.join(folder, name))


def load_parts(folder: str, indices: Sequence[Index], shape: Sequence[int], dtype: Any) -> List[Any]:
    """Read parts of an array, cut in any way.

    Args:
        folder: Of the array.
        indices: Which parts.
        shape, dtype: What the array has to have.

    Raises:
        RecordError: There is no such array, parts of it are missing, or it has another shape or type.
    """
    whole = _load_whole(folder)
    if (whole.shape, whole.dtype) != (tuple(shape), dtype):
        raise RecordError(
            f"{folder} holds {whole.dtype}{list(whole.shape)}, expected {dtype}{list(shape)}.",
            "restore a checkpoint of the same model and optimizer.",
        )
    return [whole[index] for index in indices]


def _load_whole(folder: str) -> Any:
    import numpy

    names = sorted(name for name in os.listdir(folder) if name.startswith("metadata")) if os.path.isdir(folder) else []
    if not names:
        raise RecordError(
            f"{folder} does not hold an array of a checkpoint.",
            "put the checkpoint where every host reaches it under the same path.",
        )
    whole: Any = None
    for name in names:
        with open(os.path.join(folder, name), "rb") as file:
            metadata = pickle.load(file)
        if whole is None:
            whole = numpy.empty(metadata["global_shape"], metadata["dtype"])
            is_read = numpy.zeros(whole.shape, bool)
        # Alpa writes None where the one part is the whole.
        for part, index in zip(metadata["shard_names"], metadata["shard_indices"] or [...]):
            stored = numpy.load(os.path.join(folder, part))
            whole[index] = stored if stored.dtype == whole.dtype else stored.view(whole.dtype)
            is_read[index] = True
    if not is_read.all():
        raise RecordError(
            f"{folder} holds {is_read.sum()} of the {whole.size} numbers of its array: parts are missing.",
            "put the checkpoint where every host reaches it under the same path, and save it there again.",
        )
    return whole


def _plain(array: Any) -> Any:
    """The array, or its bits where its type is not one of NumPy's own."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")
