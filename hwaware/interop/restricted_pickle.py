"""Read a pickle of Alpa's profiling tables without running any code in it.

A pickle is a program: it can name any function of any installed module and call it. This reader imports no name at
all. It maps the few names of such tables to harmless classes, made for each file, and refuses all others.
The result may still be any plain value, so the caller must validate it.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, Callable, ClassVar, Dict, Mapping, Optional, Tuple

from hwaware.errors import RecordError
from hwaware.records import PathLike, read_bytes

_FIX = "give a prof_database.pkl that Alpa or hwaware wrote; never open such a file with pickle.load."
# Numbers as NumPy pickles them: type code -> format of struct.
_FORMATS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "u8": "Q", "u4": "I"}


# Limits on a file, far above any that Alpa writes: a database of 64 hosts of 8 devices has 3 million opcodes.
_MOST_FILE_BYTES = 1 << 28
_MOST_READS = 8_000_000
_MOST_OF_LINE = 1000
# Values in a tuple, those in its inner tuples included: each time that a dictionary looks a key up, it visits them all.
_MOST_IN_TUPLE = 1_000_000

# The unpickler in Python. The one in C reserves memory for as many memo entries as the file claims, up to 32 GB.
_Unpickler: Any = pickle._Unpickler


class Table:
    """A stand-in for alpa.mesh_profiling.MeshProfilingResult, with the attributes that the file gives it."""


class _NumberType:
    """A stand-in for numpy.dtype, with a code such as "f8"."""

    def __init__(self, code: str = "", *_: Any) -> None:
        if not isinstance(code, str) or len(code) > 20:  # float8_e4m3fn is the longest
            raise ValueError("a number type has no code such as f8")
        self.code = code


def load(path: PathLike) -> Any:
    """Read the pickle at `path` into plain values and `Table` objects.

    Raises:
        RecordError: The file cannot be read, is not a pickle, or names anything but such tables.
    """
    return loads(read_bytes(path, _MOST_FILE_BYTES), str(path))


def loads(data: bytes, name: str, also: Optional[Mapping[Tuple[str, str], Any]] = None) -> Any:
    """Read the pickle in `data` as `load` does; messages call it `name`.

    Args:
        data: The pickle.
        name: Its name in messages.
        also: Further harmless classes or values, by the module and name in the pickle that these stand for.
    """
    try:
        return _Reader(data, name, also or {}).load()
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"{name} is not a pickle of Alpa's tables: {type(error).__name__}: {error}.", _FIX) from error


class _Bounded(io.BytesIO):
    """A file in memory that refuses to be read without end.

    Each opcode takes one to three reads, so the number of reads bounds time and memory.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self._left = _MOST_READS

    def read(self, size: Optional[int] = -1, /) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise ValueError(f"it takes more than {_MOST_READS} steps to read")
        return super().read(size)

    def readline(self, size: Optional[int] = -1, /) -> bytes:
        line = super().readline(_MOST_OF_LINE)
        if not line.endswith(b"\n"):  # to turn a million digits into a number takes minutes
            raise ValueError(f"a line is not ended, or is longer than {_MOST_OF_LINE} bytes")
        return line


class _Opcodes(Dict[int, Any]):
    """The action of each opcode."""

    def __missing__(self, code: int) -> Any:
        raise ValueError(f"it has opcode {bytes([code])!r}, which no table of Alpa needs")


# The opcodes that write plain values, and those that make a table or a number of NumPy. Left out, among others:
# persistent ids, registered extensions, INST and OBJ, which call what they name in other ways than REDUCE does;
# BYTEARRAY8, which reserves as much memory as the file claims; LONG4, integers of more than 255 bytes; and sets.
_NEEDED = (
    "PROTO", "STOP", "MARK", "POP", "POP_MARK", "NONE", "NEWTRUE", "NEWFALSE", "INT", "BININT", "BININT1",
    "BININT2", "LONG", "LONG1", "FLOAT", "BINFLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE",
    "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "LIST",
    "EMPTY_LIST", "APPEND", "APPENDS", "TUPLE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "DICT", "EMPTY_DICT",
    "SETITEM", "SETITEMS", "GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "PUT", "BINPUT", "LONG_BINPUT",
    "MEMOIZE", "GET", "BINGET", "LONG_BINGET",
)  # fmt: skip


class _Reader(_Unpickler):  # type: ignore[misc]  # the pickle module has no types for it
    dispatch: ClassVar[Dict[int, Any]] = _Opcodes(
        (code, _Unpickler.dispatch[code]) for code in (getattr(pickle, name)[0] for name in _NEEDED)
    )

    def __init__(self, data: bytes, name: str, also: Mapping[Tuple[str, str], Any]) -> None:
        super().__init__(_Bounded(data))
        self._name = name
        self._known = {**_stand_ins(), **also}
        # Tuples that hold tuples, by identity, with the number of values in them. To keep them keeps their identity.
        self._nested: Dict[int, Tuple[Any, int]] = {}

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            raise RecordError(
                f"{self._name} names {module[:100]}.{name[:100]}, which no table of Alpa contains: reading it might "
                "run code. hwaware ran nothing of it.",
                _FIX,
            )
        return found

    def skip_frame(self) -> None:
        """Read over the length of a frame, which only tells how much to read ahead."""
        self.read(8)

    dispatch[pickle.FRAME[0]] = skip_frame

    def build(self) -> None:
        """Give a table its attributes. The original would let any object change itself, or a class."""
        state = self.stack.pop()
        made = self.stack[-1]
        if isinstance(made, Table) and isinstance(state, dict) and all(isinstance(name, str) for name in state):
            vars(made).update(state)
        elif not isinstance(made, _NumberType):  # its state is the byte order: Alpa's numbers are little-endian
            raise ValueError(f"it gives attributes to a {type(made).__name__}")

    dispatch[pickle.BUILD[0]] = build

    def weigh(self) -> None:
        """Refuse a tuple that is small in the file, where tuples may name each other, but endless to go through."""
        made = self.stack[-1]
        if not any(isinstance(one, tuple) for one in made):
            return
        weight = sum(self._weight(one) for one in made if isinstance(one, tuple)) + len(made)
        if weight > _MOST_IN_TUPLE:
            raise ValueError(f"a tuple holds more than {_MOST_IN_TUPLE} values")
        self._nested[id(made)] = made, weight

    def _weight(self, made: Tuple[Any, ...]) -> int:
        return self._nested[id(made)][1] if id(made) in self._nested else len(made)


def _weighed(load: Callable[[_Reader], None]) -> Callable[[_Reader], None]:
    def run(reader: _Reader) -> None:
        load(reader)
        reader.weigh()

    return run


for _code in (pickle.TUPLE[0], pickle.TUPLE1[0], pickle.TUPLE2[0], pickle.TUPLE3[0]):
    _Reader.dispatch[_code] = _weighed(_Reader.dispatch[_code])


def _stand_ins() -> Dict[Tuple[str, str], Any]:
    """Return the stand-in for each name, made for one file so that no file can change those of the next."""
    table: Any = type("Table", (Table,), {})

    class ListName:
        """A stand-in for list, the default of a defaultdict."""

    class PlainDict(Dict[Any, Any]):
        """A defaultdict without its default."""

        def __init__(self, *_: Any) -> None:
            super().__init__()

    def scalar(kind: _NumberType, data: bytes) -> Any:
        return struct.unpack("<" + _FORMATS[kind.code], data)[0]

    numpy_names: Dict[Tuple[str, str], Any] = {("numpy", "dtype"): _NumberType}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        numpy_names[module, "scalar"] = scalar
    return {
        ("alpa.mesh_profiling", "MeshProfilingResult"): table,
        ("collections", "defaultdict"): PlainDict,
        ("builtins", "list"): ListName,
        ("__builtin__", "list"): ListName,
        **numpy_names,
    }
