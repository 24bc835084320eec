"""Write the arrays of one process into one file of a checkpoint, and read blocks of arrays from many files.

A process trusts neither names nor contents that it reads. It opens files only inside the folder of the checkpoints.
Bytes count only if they have the digest in the manifest; Alpa's own files have no digests.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from typing import Any, BinaryIO, Callable, Dict, Iterable, List, NamedTuple, Sequence, Tuple, TypeVar, Union

import numpy

from hwaware.errors import DamagedCheckpointError
from hwaware.runtime.manifests import FIX, Part, SavedArray, digest_of, dtype_of

T = TypeVar("T")
# Words for a fault that tell a person what to mend; the system's own words follow in brackets.
_WORDS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EROFS: "the filesystem cannot be written to",
    errno.EACCES: "not permitted",
    errno.EPERM: "not permitted",
    errno.EIO: "the disk fails",
    errno.ESTALE: "the network filesystem is gone",
    errno.EMFILE: "too many open files",
}


class Box(NamedTuple):
    """A block of an array.

    Attributes:
        start, shape: First index and size in every dimension.
    """

    start: Tuple[int, ...]
    shape: Tuple[int, ...]


class Written(NamedTuple):
    """The place of an array's bytes in a file.

    Attributes:
        offset, bytes: Offset and size in the file.
        digest: Digest of the bytes.
    """

    offset: int
    bytes: int
    digest: str


class Fault(NamedTuple):
    """The reason why a process could not write or read.

    Workers return this value and raise nothing, because the driver takes a worker that raises for a failed one.

    Attributes:
        what: A sentence without its full stop, or whole sentences where the checkpoint is damaged.
        is_damage: True if the disk does not hold what was written.
        is_missing: True if a file is missing.
        where: The worker; empty in the driver.
    """

    what: str
    is_damage: bool = False
    is_missing: bool = False
    where: str = ""


class Load(NamedTuple):
    """The blocks of an array that a worker reads.

    Attributes:
        uuid: The worker's name for the array.
        array: The saved array, with only those parts that overlap with the blocks.
        dtype: The type to convert to.
        boxes: One block for each of the worker's devices.
    """

    uuid: Any
    array: SavedArray
    dtype: Any
    boxes: Tuple[Box, ...]


def attempt(work: Callable[[], T], where: str = "") -> Union[T, Fault]:
    """Do work with files; return a fault where the system or a damaged checkpoint stops it."""
    try:
        return work()
    except DamagedCheckpointError as error:
        return Fault(error.what, is_damage=True, is_missing=isinstance(error.__cause__, FileNotFoundError), where=where)
    except OSError as error:
        said = error.strerror or str(error)
        words = _WORDS.get(error.errno or 0)
        reason = f"{words} ({said})" if words else said
        name = f"{error.filename}: " if error.filename else ""
        return Fault(f"{name}{reason}", is_damage=error.errno == errno.EIO, where=where)


# Writing


def box_of(index: Any, shape: Sequence[int]) -> Box:
    """Return the block that an index of JAX selects: a slice for each dimension, or ... for all.

    Example:
        >>> box_of((slice(2, 4), slice(None)), (4, 6))
        Box(start=(2, 0), shape=(2, 6))
    """
    slices = [slice(None)] * len(shape) if index is ... else index
    bounds = [one.indices(size)[:2] for one, size in zip(slices, shape)]
    return Box(tuple(first for first, _ in bounds), tuple(max(0, end - first) for first, end in bounds))


def write_arrays(path: str, arrays: Iterable[Any]) -> List[Written]:
    """Write NumPy arrays into a new file, one after the other, and wait until they are on the disk."""
    written: List[Written] = []
    offset = 0
    with open(path, "xb") as file:
        for array in arrays:
            data = _bytes_of(array)
            file.write(data)
            written.append(Written(offset, len(data), digest_of(data)))
            offset += len(data)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(os.path.dirname(path))
    return written


def _bytes_of(array: Any) -> Any:
    """Return the bytes of an array, little-endian; without a copy where they are in order already."""
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    # An array without dimensions, or of JAX's own types, shows its bytes only in this form.
    flat: Any = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
    return memoryview(flat)


def sync_folder(path: str) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a network filesystem that has nothing to wait for
            raise
    finally:
        os.close(handle)


# Reading


def open_inside(folder: str, name: str) -> BinaryIO:
    """Open a regular file in a folder, or in a folder inside.

    Raises:
        DamagedCheckpointError: The name leads out of the folder, or to nothing, or to something other than a file.
    """
    path = os.path.join(folder, name)
    if os.path.isabs(name) or ".." in name.split("/") or "\0" in name:
        raise DamagedCheckpointError(f"{folder}: a file is named {name!r}, expected a name inside of this folder.", FIX)
    base, real = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([base, real]) != base:
        raise DamagedCheckpointError(f"{path} is a link to {real}, expected a file inside of {base}.", FIX)
    try:
        # O_NONBLOCK: for a pipe, the system would wait for a writer.
        handle = os.open(real, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{path} is not there, expected a file of the checkpoint.", FIX) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DamagedCheckpointError(f"{path} is a folder or a device, expected a file.", FIX)
    return os.fdopen(handle, "rb")


def check_size(folder: str, name: str, expected: int, is_least: bool = False) -> None:
    """Refuse a file that is missing, or not of the expected size; with `is_least`, it may be larger.

    Raises:
        DamagedCheckpointError: The file is missing, or has another size.
    """
    with open_inside(folder, name) as file:
        found = os.fstat(file.fileno()).st_size
    if found < expected or (found > expected and not is_least):
        size = f"at least {expected}" if is_least else expected
        raise DamagedCheckpointError(
            f"{os.path.join(folder, name)} has {found} bytes, expected {size}: it was cut or changed.",
            FIX,
            found=found,
            expected=expected,
        )


def read_boxes(folder: str, array: SavedArray, boxes: Sequence[Box]) -> List[Any]:
    """Read blocks of an array, however it was cut when it was written.

    Args:
        folder: The folder of the checkpoints, where the names of the parts' files start.
        array: The saved array, with at least the parts that overlap with the blocks.
        boxes: The blocks; equal ones are read once.

    Returns:
        NumPy arrays.

    Raises:
        DamagedCheckpointError: Bytes are missing, or are not those that were written.
    """
    dtype = dtype_of(array.dtype)
    for box in boxes:  # before memory is taken for what a file claims
        held, needed = sum(_common(part, box) for part in array.parts), math.prod(box.shape)
        if held < needed:
            raise _parts_missing(folder, array, held, needed)
    found: Dict[Box, Any] = {box: numpy.empty(box.shape, dtype) for box in boxes}
    is_read = {box: numpy.zeros(box.shape, bool) for box in found}
    for part in array.parts:
        touched = [box for box in found if overlaps(part, box)]
        if not touched:
            continue
        block = _read_part(folder, array, part, dtype)
        for box in touched:
            first = [max(a, b) for a, b in zip(part.start, box.start)]
            last = [min(a + m, b + n) for a, m, b, n in zip(part.start, part.shape, box.start, box.shape)]
            source = tuple(slice(a - start, b - start) for a, b, start in zip(first, last, part.start))
            target = tuple(slice(a - start, b - start) for a, b, start in zip(first, last, box.start))
            found[box][target] = block[source]
            is_read[box][target] = True
    for mask in is_read.values():
        if not mask.all():
            raise _parts_missing(folder, array, mask.sum(), mask.size)
    return [found[box] for box in boxes]


def _parts_missing(folder: str, array: SavedArray, held: int, needed: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"{folder} holds {held} of {needed} numbers of {array.label}: parts are missing.", FIX
    )


def _common(part: Part, box: Box) -> int:
    """Return the number of elements that two blocks have in common."""
    return math.prod(
        max(0, min(a + m, b + n) - max(a, b)) for a, m, b, n in zip(part.start, part.shape, box.start, box.shape)
    )


def overlaps(part: Any, box: Box) -> bool:
    """Return True if two blocks have an element in common."""
    return all(a < b + n and b < a + m for a, m, b, n in zip(part.start, part.shape, box.start, box.shape))


def _read_part(folder: str, array: SavedArray, part: Part, dtype: Any) -> Any:
    if part.digest is None:
        return _read_npy(folder, array, part, dtype)
    path = os.path.join(folder, part.file)
    with open_inside(folder, part.file) as file:
        file.seek(part.offset)
        data = file.read(part.bytes)
    if len(data) != part.bytes:
        raise DamagedCheckpointError(
            f"{path} ends at byte {part.offset + len(data)}, expected {part.offset + part.bytes}: it was cut.", FIX
        )
    digest = digest_of(data)
    if digest != part.digest:
        raise DamagedCheckpointError(
            f"{path}: bytes {part.offset} to {part.offset + part.bytes}, {array.label}, have digest {digest[:16]}…, "
            f"expected {part.digest[:16]}…: the file was changed or damaged.",
            FIX,
            found=digest,
            expected=part.digest,
        )
    return numpy.frombuffer(data, dtype, count=math.prod(part.shape)).reshape(part.shape)


def _read_npy(folder: str, array: SavedArray, part: Part, dtype: Any) -> Any:
    """Read a part in Alpa's format; check its header before taking memory for what it says."""
    path = os.path.join(folder, part.file)
    with open_inside(folder, part.file):
        pass
    try:
        stored: Any = numpy.load(path, mmap_mode="r", allow_pickle=False)
        kind, shape = stored.dtype, stored.shape  # an archive of several arrays has none
    # The parser of headers raises a dozen kinds of errors.
    except Exception as error:
        raise DamagedCheckpointError(
            f"{path} is not a whole .npy file of numbers, as Alpa writes them: {error}.", FIX
        ) from error
    # Types that NumPy does not know are stored as bytes or as unsigned integers.
    is_bits = dtype.isbuiltin != 1 and kind.kind in "uV" and kind.itemsize == dtype.itemsize
    if shape != part.shape or not (kind == dtype or is_bits):
        raise DamagedCheckpointError(
            f"{path} holds {kind}{list(shape)}, expected {array.dtype}{list(part.shape)}.", FIX
        )
    return numpy.array(stored).view(dtype)
