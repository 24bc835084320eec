"""Read a pickle of Alpa's profiling tables without running any code in it.

A pickle is a program: it can name any function of any installed module and call it. This reader imports no name at
all. It maps the few names of such tables to harmless classes, made for each file, and refuses all others.
The result may still be any plain value, so the caller must validate it.
"""

from __future__ import annotations

import io
import pickle
import struct
from typing import Any, ClassVar, Dict, Tuple

from hwaware.errors import RecordError
from hwaware.records import PathLike, read_bytes

_FIX = "give a prof_database.pkl that Alpa or hwaware wrote; never open such a file with pickle.load."
# Numbers as NumPy pickles them: type code -> format of struct.
_FORMATS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i", "u8": "Q", "u4": "I"}


# The unpickler in Python. The one in C reserves memory for as many memo entries as the file claims, up to 32 GB.
_Unpickler: Any = pickle._Unpickler


class Table:
    """A stand-in for alpa.mesh_profiling.MeshProfilingResult, with the attributes that the file gives it."""


def load(path: PathLike) -> Any:
    """Read the pickle at `path` into plain values and `Table` objects.

    Raises:
        RecordError: The file cannot be read, is not a pickle, or names anything but such tables.
    """
    return loads(read_bytes(path), str(path))


def loads(data: bytes, name: str) -> Any:
    """Read the pickle in `data` as `load` does; messages call it `name`."""
    try:
        return _Reader(data, name).load()
    except RecordError:
        raise
    except Exception as error:
        raise RecordError(f"{name} is not a pickle of Alpa's tables: {type(error).__name__}: {error}.", _FIX) from error


class _Reader(_Unpickler):  # type: ignore[misc]  # the pickle module has no types for it
    # BYTEARRAY8 reserves as much memory as the file claims, and no table needs it.
    dispatch: ClassVar[Dict[int, Any]] = {
        code: load for code, load in _Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]
    }

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name
        self._known = _stand_ins()

    def find_class(self, module: str, name: str) -> Any:
        found = self._known.get((module, name))
        if found is None:
            raise RecordError(
                f"{self._name} names {module}.{name}, which no table of Alpa contains: reading it might run code. "
                "hwaware ran nothing of it.",
                _FIX,
            )
        return found

    def persistent_load(self, identifier: Any) -> Any:
        raise RecordError(f"{self._name} refers to something outside of itself.", _FIX)


def _stand_ins() -> Dict[Tuple[str, str], Any]:
    """Return the stand-in for each name, made for one file so that no file can change those of the next."""
    table: Any = type("Table", (Table,), {})

    class ListName:
        """A stand-in for list, the default of a defaultdict."""

    class PlainDict(Dict[Any, Any]):
        """A defaultdict without its default."""

        def __init__(self, *_: Any) -> None:
            super().__init__()

    class NumberType:
        """A stand-in for numpy.dtype, with a code such as "f8"."""

        def __init__(self, code: str = "", *_: Any) -> None:
            self.code = str(code)

        def __setstate__(self, state: Any) -> None:
            """Ignore the byte order: Alpa's numbers are little-endian."""

    def scalar(kind: NumberType, data: bytes) -> Any:
        return struct.unpack("<" + _FORMATS[kind.code], data)[0]

    numpy_names = {("numpy", "dtype"): NumberType}
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        numpy_names[module, "scalar"] = scalar  # type: ignore[assignment]
    return {
        ("alpa.mesh_profiling", "MeshProfilingResult"): table,
        ("collections", "defaultdict"): PlainDict,
        ("builtins", "list"): ListName,
        ("__builtin__", "list"): ListName,
        **numpy_names,
    }
