"""Read and write the manifest of a checkpoint: JSON that says where in files the bytes of a state are.

A folder of checkpoints holds, for step 12, the manifest `checkpoint_12` and the folder `step_12.TOKEN` with raw bytes.
A save renames its manifest to this name once every byte is on the disk. So a manifest with this name is a whole
checkpoint. The manifest has a digest of itself.
"""

from __future__ import annotations

import hashlib
import math
import re
from typing import Any, Callable, ClassVar, Dict, Optional, Tuple

import msgspec
import numpy

from hwaware.errors import DamagedCheckpointError, RecordError
from hwaware.records import FileRecord, Record, check_schema, decode_document, require, require_unique

Path = Tuple[str, ...]
FIX = "restore an older step, or let hwaware.restore_newest find the newest whole one."
_DIGEST = re.compile(rb'"digest": ?"([0-9a-f]{64})"')
_NO_DIGEST = "0" * 64
# A name in the step's own folder: neither a path nor hidden.
_PLAIN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\Z")
# Larger than any array, and small enough for every sum of products to be exact in 64 bits.
_MOST = 1 << 60
# NumPy 1 allows no more.
_MOST_DIMENSIONS = 32


def digest_of(data: Any) -> str:
    """Return the digest of bytes as 64 hexadecimal digits. BLAKE2b is as fast as reading from a fast disk."""
    return hashlib.blake2b(data, digest_size=32).hexdigest()


class Part(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A block of an array, and where its bytes lie: little-endian, the last dimension fastest.

    Attributes:
        file: Name of the file in the step's folder.
        offset, bytes: Offset and size in the file.
        digest: Digest of those bytes; None for a .npy file that Alpa wrote, whose header says where its bytes are.
        start, shape: First index and size in the array, in every dimension.
    """

    file: str
    offset: int
    bytes: int
    digest: Optional[str] = None
    start: Tuple[int, ...]
    shape: Tuple[int, ...]


class SavedArray(Record, frozen=True, kw_only=True, omit_defaults=True):
    """An array of the state.

    Attributes:
        path: Its keys in the nested state.
        dtype: Name of its type in NumPy or ml_dtypes.
        shape: Shape of the whole array.
        parts: Blocks that cover the array.
    """

    path: Path
    dtype: str
    shape: Tuple[int, ...]
    parts: Tuple[Part, ...]

    @property
    def label(self) -> str:
        """Return the name of the array in messages."""
        return ".".join(self.path)

    def __post_init__(self) -> None:
        """Require blocks inside the array."""
        where = f"shape of {self.label} is {list(self.shape)}"
        require(all(0 <= size < _MOST for size in self.shape), where)
        # NumPy counts a size of 0 as 1 here.
        require(math.prod(max(1, size) for size in self.shape) < _MOST, f"{where}: too large")
        require(len(self.shape) <= _MOST_DIMENSIONS, f"{where}, expected at most {_MOST_DIMENSIONS} dimensions")
        for part in self.parts:
            fits = len(part.start) == len(part.shape) == len(self.shape) and all(
                min(first, size) >= 0 and first + size <= whole
                for first, size, whole in zip(part.start, part.shape, self.shape)
            )
            where = f"starts at {list(part.start)} with shape {list(part.shape)}"
            require(fits, f"a part of {self.label} {where}, outside of {list(self.shape)}")


class SavedValue(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A value of the state that is no array: None, a truth value, a number, text or bytes, written as text."""

    path: Path
    kind: str
    text: str

    @classmethod
    def of(cls, path: Path, value: Any) -> SavedValue:
        """Return the record of a value.

        Raises:
            RecordError: Checkpoints do not hold values of this kind.
        """
        kind = type(value).__name__
        if kind not in _VALUES:
            raise RecordError(
                f"{'.'.join(path)} of the state is a {kind}, expected an array or one of {', '.join(_VALUES)}.",
                "keep it outside of the state that is saved.",
            )
        return cls(path=path, kind=kind, text=value.hex() if isinstance(value, bytes) else str(value))

    @property
    def value(self) -> Any:
        """Return the value itself."""
        return _VALUES[self.kind](self.text)

    def __post_init__(self) -> None:
        """Require text that can be read."""
        require(self.kind in _VALUES, f"kind is {self.kind!r}, expected one of {', '.join(_VALUES)}")
        require(self.kind in ("str", "bytes") or len(self.text) < 1000, f"{self.kind} of {len(self.text)} characters")
        _ = self.value


_VALUES: Dict[str, Callable[[str], Any]] = {
    "NoneType": lambda text: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float,
    "str": str,
    "bytes": bytes.fromhex,
}


class ShardFile(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A file in the step's folder."""

    name: str
    bytes: int

    def __post_init__(self) -> None:
        """Require a plain name."""
        require(
            _PLAIN.match(self.name) is not None,
            f"name is {self.name!r}, expected that of a file in the step's own folder",
        )
        require(0 <= self.bytes < _MOST, f"bytes is {self.bytes}")


class Manifest(FileRecord, frozen=True, kw_only=True, omit_defaults=True):
    """A saved state.

    Attributes:
        step: Number of the step.
        folder: Name of the folder with its files.
        files: The files in this folder.
        arrays, values: Leaves of the state.
        empty: Paths of dictionaries without keys.
    """

    SCHEMA: ClassVar[str] = "hwaware.checkpoint"

    step: int
    folder: str
    files: Tuple[ShardFile, ...]
    arrays: Tuple[SavedArray, ...]
    values: Tuple[SavedValue, ...] = ()
    empty: Tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        """Require parts that lie in the files, and have as many bytes as their numbers need."""
        require(self.step >= 0, f"step is {self.step}, expected at least 0")
        require(
            re.fullmatch(rf"step_{self.step}\.[0-9a-f]{{16}}", self.folder) is not None,
            f"folder is {self.folder!r}, expected step_{self.step}. and 16 hexadecimal digits",
        )
        require_unique("file", tuple(file.name for file in self.files))
        sizes = {file.name: file.bytes for file in self.files}
        for array in self.arrays:
            try:
                itemsize = dtype_of(array.dtype).itemsize
            except RecordError as error:
                raise ValueError(error.what) from error
            for part in array.parts:
                where = f"a part of {array.label}"
                require(part.file in sizes, f"{where} is in file {part.file!r}, which is not among the files")
                wanted = math.prod(part.shape) * itemsize
                require(part.bytes == wanted, f"{where} has {part.bytes} bytes, expected {wanted}")
                fits = part.offset >= 0 and part.offset + part.bytes <= sizes[part.file]
                require(fits, f"{where} starts at byte {part.offset} of {sizes[part.file]} bytes of {part.file}")
                require(part.digest is not None, f"{where} has no digest")
        # A small file could otherwise claim any amount of memory, part by part.
        claimed, held = sum(part.bytes for array in self.arrays for part in array.parts), sum(sizes.values())
        require(claimed <= held, f"its parts have {claimed} bytes, expected at most the {held} of its files")

    def to_json(self) -> bytes:
        """Return the document with its digest, which is that of the same bytes with zeros for the digest."""
        body: Dict[str, Any] = {"schema": self.SCHEMA, "schema_version": self.VERSION, "digest": _NO_DIGEST}
        body.update(msgspec.to_builtins(self))
        data = msgspec.json.encode(body) + b"\n"
        return data.replace(_NO_DIGEST.encode(), digest_of(data).encode(), 1)

    @classmethod
    def from_file(cls, data: bytes, name: str) -> Manifest:
        """Read a manifest; messages call it `name`.

        Raises:
            DamagedCheckpointError: The manifest was changed, or the bytes are no manifest.
            RecordError: The manifest has another version.
        """
        check_digest(data, name)
        document = decode_document(data, name)
        check_schema(document, cls.SCHEMA, cls.VERSION, name)
        try:
            return cls.from_json(data, name)
        except RecordError as error:
            raise DamagedCheckpointError(error.what, FIX) from error


def check_digest(data: bytes, name: str) -> None:
    """Refuse a document that does not have the digest that it names.

    Raises:
        DamagedCheckpointError: The document names no digest, or another one than it has.
    """
    match = _DIGEST.search(data)
    if match is None:
        raise DamagedCheckpointError(f"{name} names no digest of itself, expected 64 hexadecimal digits.", FIX)
    found = digest_of(data[: match.start(1)] + _NO_DIGEST.encode() + data[match.end(1) :])
    expected = match.group(1).decode()
    if found != expected:
        raise DamagedCheckpointError(
            f"{name} has digest {found[:16]}…, expected {expected[:16]}…: it was changed or damaged.",
            FIX,
            found=found,
            expected=expected,
        )


def dtype_of(name: str) -> Any:
    """Return the little-endian NumPy type of a name; types such as bfloat16 need ml_dtypes, which JAX brings.

    Raises:
        RecordError: No array of numbers has such a type.
    """
    try:
        found = numpy.dtype(name) if name.isalnum() else None
    except TypeError:
        found = None
    if found is not None and found.kind in "biufc" and found.name == name:
        return found.newbyteorder("<")
    if re.fullmatch(r"(bfloat|float|int|uint)[a-z0-9_]+", name):
        import ml_dtypes

        kind = vars(ml_dtypes).get(name)
        if isinstance(kind, type):
            return numpy.dtype(kind)
    raise RecordError(f"dtype is {name!r}, expected that of numbers, such as float32 or bfloat16.", FIX)


def flattened(state: Any, path: Path = ()) -> Dict[Path, Any]:
    """Return the leaves of nested dictionaries by their paths; an empty dictionary is a leaf."""
    if not isinstance(state, dict) or not state:
        return {path: state}
    return {inner: leaf for key, value in state.items() for inner, leaf in flattened(value, (*path, str(key))).items()}


def nested(leaves: Dict[Path, Any], name: str) -> Any:
    """Return the nested dictionaries that have these leaves at these paths; messages call the document `name`.

    Raises:
        DamagedCheckpointError: A path leads through a leaf, or occurs twice.
    """
    if list(leaves) == [()]:
        return leaves[()]
    root: Dict[str, Any] = {}
    for path, leaf in leaves.items():
        place: Any = root
        for key in path[:-1]:
            place = place.setdefault(key, {}) if isinstance(place, dict) else None
        if not isinstance(place, dict) or not path or path[-1] in place:
            raise DamagedCheckpointError(f"{name} holds {'.'.join(path)!r} twice, expected every path once.", FIX)
        place[path[-1]] = leaf
    return root
