"""Read and write records as JSON files with a schema and a version, and validate them before use.

A reader accepts the one version that its record names. History of the schemas, newest last:

- hwaware.cluster 1, hwaware.workload 1, hwaware.plan 1, hwaware.benchmark 1: the first published form.
- hwaware.timeline 1: simulated steps.
"""

from __future__ import annotations

import math
import os
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Dict, Tuple, Type, TypeVar, Union

import msgspec

from hwaware.errors import RecordError

PathLike = Union[str, "os.PathLike[str]"]
R = TypeVar("R", bound="FileRecord")
_MOST_COUNT = 10**9


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen, validated value. Subclasses check their fields in `__post_init__` with `require`."""


class FileRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A record with a file of its own, which names its schema and version."""

    SCHEMA: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1

    @classmethod
    def load(cls: Type[R], path: PathLike) -> R:
        """Read and validate the file at `path`.

        Raises:
            RecordError: The file is missing, is not JSON, is of another schema or version, or holds invalid values.
        """
        return cls.from_json(read_bytes(path), name=str(path))

    @classmethod
    def from_json(cls: Type[R], data: Union[bytes, str], name: str = "the document") -> R:
        """Read and validate a JSON document; error messages call it `name`.

        Raises:
            RecordError: As `load` does.
        """
        document = decode_document(data, name)
        check_schema(document, cls.SCHEMA, cls.VERSION, name)
        try:
            return msgspec.convert(document, cls)
        except msgspec.ValidationError as error:
            raise RecordError(f"{name} is not a valid {cls.SCHEMA} file: {error}.", _VALIDATION_FIX) from error
        except SystemError as error:  # msgspec 0.18, the last for Python 3.8, on a number that no float holds
            cause = error.__cause__ or error
            raise RecordError(f"{name} is not a valid {cls.SCHEMA} file: {cause}.", _VALIDATION_FIX) from error

    def to_json(self) -> bytes:
        """Return the record as an indented JSON document, schema and version first."""
        body: Dict[str, Any] = {"schema": self.SCHEMA, "schema_version": self.VERSION}
        body.update(msgspec.to_builtins(self))
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"

    def save(self, path: PathLike) -> None:
        """Write the record to `path`, and replace an existing file in one step or not at all."""
        write_bytes(path, self.to_json())


_VALIDATION_FIX = "correct the named value (`$` is the whole document), or write the file again with hwaware."


def rebuilt(record: R, **changes: Any) -> R:
    """Return a copy with some fields changed, validated; `structs.replace` of msgspec 0.18 does not validate."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return type(record)(**{**fields, **changes})


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless `condition` holds; decoding adds the value's place in the file."""
    if not condition:
        raise ValueError(message)


def require_count(name: str, value: int) -> None:
    """Refuse a count below one, or one that no machine could hold."""
    require(value <= _MOST_COUNT, f"{name} is more than {_MOST_COUNT}, the most that hwaware accepts")
    require(value >= 1, f"{name} is {value}, expected at least 1")


def require_finite(name: str, value: float, minimum: float = 0.0, exclusive: bool = False) -> None:
    """Require a finite number of at least `minimum`, or of more if `exclusive`."""
    fits = _is_finite(value) and (value > minimum if exclusive else value >= minimum)
    bound = f"more than {minimum:g}" if exclusive else f"at least {minimum:g}"
    require(fits, f"{name} is {value!r}, expected a finite number, {bound}")


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def require_unique(name: str, values: Tuple[Any, ...]) -> None:
    """Require that no value occurs twice."""
    seen = set()
    for value in values:
        require(value not in seen, f"{name} {value!r} occurs more than once")
        seen.add(value)


def decode_document(data: Union[bytes, str], name: str) -> Dict[str, Any]:
    """Return the JSON object in `data`; messages call it `name`.

    Raises:
        RecordError: `data` is not JSON, which excludes NaN and Infinity, or it holds no object.
    """
    try:
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordError(
            f"{name} is not valid JSON: {error}.",
            "write it as JSON with finite numbers; NaN and Infinity are not JSON.",
        ) from error
    if not isinstance(document, dict):
        raise RecordError(
            f"{name} holds a JSON {type(document).__name__}, expected an object.",
            'start the file with {"schema": ..., "schema_version": ...}.',
        )
    return document


def check_schema(document: Dict[str, Any], schema: str, version: int, name: str) -> None:
    """Refuse a document of another schema, or of a version that this hwaware does not read.

    Raises:
        RecordError: The message names the expected schema or version, and how to get there.
    """
    found = document.get("schema")
    if found != schema:
        raise RecordError(
            f"{name} has schema {found!r}, expected {schema!r}.",
            f'give a {schema} file, or add "schema": "{schema}", "schema_version": {version} if it is one.',
            found=found,
            expected=schema,
        )
    found_version = document.get("schema_version")
    if not isinstance(found_version, int) or isinstance(found_version, bool):
        raise RecordError(
            f"{name} has schema_version {found_version!r}, expected {version}.",
            f'add "schema_version": {version}.',
            found=found_version,
            expected=version,
        )
    if found_version > version:
        raise RecordError(
            f"{name} has schema_version {found_version}, this hwaware reads up to {version}: the file is too new.",
            "update hwaware (pip install --upgrade hwaware).",
            found=found_version,
            expected=version,
        )
    if found_version < version:
        raise RecordError(
            f"{name} has schema_version {found_version}, this hwaware reads {version}: the file is too old.",
            "write it again with this hwaware; the changes between versions are listed in CHANGELOG.md.",
            found=found_version,
            expected=version,
        )


def read_bytes(path: PathLike) -> bytes:
    """Return the content of the file at `path`.

    Raises:
        RecordError: The file cannot be read; the message says why.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise RecordError(
            f"{path} cannot be read: {error.strerror or error}.", "check the path and its permissions."
        ) from error


def require_writable(path: PathLike) -> None:
    """Refuse a path that cannot be written, before a command starts work whose result goes there.

    Folders that do not exist yet are fine: `write_bytes` makes them.

    Raises:
        RecordError: The nearest existing parent is no folder, or is not writable.

    Example:
        >>> require_writable("a_new_folder/plan.json")
        >>> require_writable("/dev/null/plan.json")
        Traceback (most recent call last):
        hwaware.errors.RecordError: /dev/null/plan.json cannot be written: /dev/null is not a folder. To fix: choose ...
    """
    if _is_stream(Path(path)):
        return
    place = Path(os.path.realpath(path)).parent
    while not os.path.lexists(place):
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK):
        problem = "may not be written into" if place.is_dir() else "is not a folder"
        raise RecordError(f"{path} cannot be written: {place} {problem}.", "choose a path that can be written.")


def write_bytes(path: PathLike, data: bytes) -> None:
    """Write `data` to `path` through a temporary file beside it, so that a reader never sees half a file.

    Links, devices and pipes stay. Data for a link goes to its target, and data for /dev/null into that device.

    Raises:
        RecordError: The file cannot be written; the message says why.
    """
    target = Path(os.path.realpath(path))
    try:
        if _is_stream(Path(path)):
            Path(path).write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=str(target.parent), prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, target)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written: {error.strerror or error}.", "choose a path that can be written."
        ) from error


def _is_stream(path: Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
