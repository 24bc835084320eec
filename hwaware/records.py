"""Read and write records as JSON files with a schema and a version, and validate them before use.

A reader accepts the one version that its record names. History of the schemas, newest last:

- hwaware.cluster 1, hwaware.workload 1, hwaware.plan 1, hwaware.benchmark 1: the first published form.
- hwaware.timeline 1: simulated and recorded steps.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import typing
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, Mapping, Optional, Tuple, Type, TypeVar, Union

import msgspec

from hwaware.errors import RecordError, UnusableInputError
from hwaware.output_files import replace_file

PathLike = Union[str, "os.PathLike[str]"]
R = TypeVar("R", bound="FileRecord")
A = TypeVar("A", bound="Record")
T = TypeVar("T")
# Bounds of the numbers in records. They are beyond any hardware and model. Products and sums of valid numbers, over the
# most layers and microbatches, stay below 1e50, so that no price overflows.
MOST_COUNT = 10**9
MOST_LAYERS = 10_000
# A million times the fastest machine that exists (1e18 FLOP/s, 1e13 bytes/s), and three years for a pass or a message.
MOST_FLOPS_PER_S = 1e24
MOST_BYTES_PER_S = 1e19
MOST_FLOPS = 1e30
MOST_BYTES = 1e21
MOST_SECONDS = 1e8
# A byte, or an operation, in a quarter of an hour.
LEAST_RATE = 1e-3
LEAST_SECONDS = 1e-15
# Predicted times and memory are such products and sums.
MOST_PREDICTED = 1e50
_MOST_OF_NAME = 1000
# A terminal would obey them.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
# Decoded, a file of this size takes about 2 GiB.
_MOST_OF_FILE_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
# Values of any kind, such as raw samples, are lists and objects inside each other; hwaware's own have four levels.
_MOST_LEVELS = 32
# What a document may be instead of an object, in the words of JSON.
_JSON_NAMES = {type(None): "null", bool: "boolean", int: "number", float: "number", str: "string", list: "array"}


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen, validated value. Subclasses check their fields in `__post_init__` with `require`."""


class FileRecord(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A record with a file of its own, which names its schema and version."""

    SCHEMA: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1
    # The most entries that hwaware reads of a list, and what helps who has more.
    MOST: ClassVar[Dict[str, Tuple[int, str]]] = {}

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
        for field, (most, fix) in cls.MOST.items():
            entries = document.get(field)
            if isinstance(entries, list) and len(entries) > most:
                problem = f"{name} has {len(entries):,} {field}, expected at most {most:,}."
                raise RecordError(problem, fix, found=len(entries), expected=most)
        try:
            return converted(document, cls)
        except msgspec.ValidationError as error:
            said = f"{error}{_choices(cls, str(error))}"
            raise RecordError(f"{name} is not a valid {cls.SCHEMA} file: {said}.", _VALIDATION_FIX) from error

    def to_json(self) -> bytes:
        """Return the record as an indented JSON document, schema and version first."""
        body: Dict[str, Any] = {"schema": self.SCHEMA, "schema_version": self.VERSION}
        body.update(msgspec.to_builtins(self))
        return msgspec.json.format(msgspec.json.encode(body), indent=2) + b"\n"

    def save(self, path: PathLike) -> None:
        """Write the record to `path`, and replace an existing file in one step or not at all."""
        write_bytes(path, self.to_json())


_VALIDATION_FIX = "correct the named value (`$` is the whole document), or write the file again with hwaware."


def require_kind(name: str, given: object, kind: Type[FileRecord]) -> None:
    """Refuse an argument that is no such record, such as one of two that the caller swapped.

    Raises:
        UnusableInputError: It is of another type.
    """
    if not isinstance(given, kind):
        what = f"{name} is a {type(given).__name__}, expected a {kind.__name__}."
        raise UnusableInputError(what, f"give the {name}, as hwaware.{kind.__name__}.load returns it.")


def _choices(record: Type[FileRecord], message: str) -> str:
    """Return the values that a field may have, if msgspec's message refuses another one; else nothing."""
    found = re.fullmatch(r"Invalid enum value .* - at `\$\.(\w+)`", message, re.DOTALL)
    if found is None:
        return ""
    hint = typing.get_type_hints(record)[found[1]]
    literals = (one for one in (hint, *typing.get_args(hint)) if typing.get_origin(one) is typing.Literal)
    known = [value for one in literals for value in typing.get_args(one)]
    return f", expected one of {', '.join(known)}"


def converted(document: Any, kind: Type[T]) -> T:
    """Return what `msgspec.convert` does, with its errors."""
    try:
        return msgspec.convert(document, kind)
    except (SystemError, OverflowError):  # of msgspec 0.18 to 0.20, on an integer that no float holds
        return msgspec.convert(_without_huge(document), kind)


def _without_huge(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_huge(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_huge(one) for one in value]
    return math.copysign(math.inf, value > 0 or -1) if isinstance(value, int) and not _is_finite(value) else value


def rebuilt(record: A, **changes: Any) -> A:
    """Return a copy with some fields changed, validated; `structs.replace` of msgspec 0.18 does not validate."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return type(record)(**{**fields, **changes})


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless `condition` holds; decoding adds the value's place in the file."""
    if not condition:
        raise ValueError(message)


def require_count(name: str, value: int, least: int = 1, most: int = MOST_COUNT) -> None:
    """Refuse a count below `least`, or one that no machine could hold."""
    if least <= value <= most:
        return
    require(value <= most, f"{name} is more than {most}, the most that hwaware accepts")
    raise ValueError(f"{name} is {_short(value)}, expected at least {least}")


def require_name(what: str, name: str) -> None:
    """Refuse an empty name, and one that no table or message could show."""
    require(bool(name), f"{what} is empty")
    require(len(name) <= _MOST_OF_NAME, f"{what} has {len(name)} characters, expected at most {_MOST_OF_NAME}")
    require_printable(what, name)


def require_printable(what: str, words: Optional[str]) -> None:
    """Refuse control characters, which would act on the reader's terminal."""
    if words and not words.isprintable():  # so that most names are checked fast
        require(_CONTROL.search(words) is None, f"{what} is {words!r}, expected no control characters")


def require_finite(name: str, value: float, minimum: float = 0.0, exclusive: bool = False) -> None:
    """Require a finite number of at least `minimum`, or of more if `exclusive`."""
    if _is_finite(value) and (value > minimum if exclusive else value >= minimum):
        return
    bound = f"more than {minimum:g}" if exclusive else f"at least {minimum:g}"
    raise ValueError(f"{name} is {_short(value)}, expected a finite number, {bound}")


def require_amount(
    name: str, value: float, most: float, *, least: float = 0.0, exclusive: bool = False, why: str = ""
) -> None:
    """Require a finite number from `least`, or above 0 if `exclusive`, to `most`; `why` says who has no more."""
    if least <= value <= most and not (exclusive and value <= 0):
        return  # large files hold millions of numbers, and to format messages takes longer than to check them
    require_finite(name, value, min(0.0, least), exclusive)
    require(value <= most, f"{name} is {_short(value)}, expected at most {most:g}{why}")
    require(value >= least, f"{name} is {_short(value)}, expected at least {least:g}")


def require_duration(name: str, value: float) -> None:
    """Require a measured time [s] above 0."""
    require_amount(name, value, MOST_SECONDS, least=LEAST_SECONDS, exclusive=True)


def require_known_facts(environment: Optional[Mapping[str, Any]]) -> None:
    """Refuse an `environment` in which a fact that hwaware reads has another type; it may hold anything else.

    Example:
        >>> require_known_facts({"reference_s": 0.025, "made_by": ["me"]})
        >>> require_known_facts({"reference_s": {"a": 1}})
        Traceback (most recent call last):
        ValueError: environment.reference_s: Expected `float | null`, got `object`
    """
    try:
        msgspec.convert(environment, Optional[_KnownFacts])
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at `$")
        raise ValueError(f"environment{place.rstrip('`')}: {reason}") from error


def require_shallow(name: str, value: Any) -> None:
    """Refuse lists and objects inside each other beyond any use, since writers call themselves for each level."""
    level = [value]
    for _ in range(_MOST_LEVELS):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return
    raise ValueError(f"{name} is nested more than {_MOST_LEVELS} levels deep, the most that hwaware accepts")


class _Testbed(Record, frozen=True, kw_only=True):
    shaped: Optional[Dict[str, Any]] = None


class _KnownFacts(Record, frozen=True, kw_only=True):
    """The facts of an environment that hwaware reads again."""

    reference_s: Optional[float] = None
    profile_reference_s: Optional[float] = None
    reference_kernel: Optional[str] = None
    load_average_during: Optional[Tuple[float, ...]] = None
    versions: Optional[Dict[str, Any]] = None
    testbed: Optional[_Testbed] = None

    def __post_init__(self) -> None:
        for name in ("reference_s", "profile_reference_s"):
            value = getattr(self, name)
            if value is not None:
                require_duration(name, value)


def _short(value: float) -> str:
    """Return a number as messages show it: Python refuses to print integers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"about {'-' if value < 0 else ''}1e{int(value.bit_length() * math.log10(2))}"
    return repr(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def require_unique(name: str, values: Tuple[Any, ...]) -> None:
    """Require that no value occurs twice."""
    seen = set()
    for value in values:
        if value in seen:
            raise ValueError(f"{name} {value!r} occurs more than once")
        seen.add(value)


def decode_document(data: Union[bytes, str], name: str) -> Dict[str, Any]:
    """Return the JSON object in `data`; messages call it `name`.

    Raises:
        RecordError: `data` is not JSON, which excludes NaN and Infinity, or it holds no object.
    """
    try:
        if isinstance(data, bytes) and data[:2] in (b"\xef\xbb", b"\xff\xfe", b"\xfe\xff"):
            data = data.decode(json.detect_encoding(data))  # programs of Windows begin with a byte order mark
        document = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise RecordError(
            f"{name} is not valid JSON: {error}.",
            "give a JSON file of hwaware, such as cluster.json. If it is one, the file is damaged or incomplete: copy "
            "it or make it again. JSON has no NaN or Infinity.",
        ) from error
    if not isinstance(document, dict):
        raise RecordError(
            f"{name} holds a JSON {_JSON_NAMES[type(document)]}, expected an object.",
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
        has = 'no "schema"' if found is None else f"schema {found!r}"
        fix = f"give a {schema} file." + " `hwaware import` reads the results of other programs." * (found is None)
        raise RecordError(f"{name} has {has}, expected {schema!r}.", fix, found=found, expected=schema)
    number = document.get("schema_version")
    if not isinstance(number, int) or isinstance(number, bool):
        fault, fix = f"expected {version}", f'add "schema_version": {version}.'
    elif number > version:
        fault = f"this hwaware reads up to {version}: the file is too new"
        fix = "update hwaware (pip install --upgrade hwaware)."
    elif number < version:
        fault = f"this hwaware reads {version}: the file is too old"
        fix = "write it again with this hwaware; the changes between versions are listed in CHANGELOG.md."
    else:
        return
    raise RecordError(f"{name} has schema_version {number!r}, {fault}.", fix, found=number, expected=version)


def read_bytes(path: PathLike, most: int = _MOST_OF_FILE_BYTES) -> bytes:
    """Return the content of the file at `path`, which has at most that many bytes.

    Raises:
        RecordError: The file cannot be read, or is larger than any such file; the message says why.
    """
    try:
        with open(path, "rb") as file:
            # A pipe or a device has size 0. To ask for `most` bytes at once would reserve them.
            parts = [file.read(min(os.fstat(file.fileno()).st_size, most) + 1)]
            while parts[-1] and sum(map(len, parts)) <= most:
                parts.append(file.read(_CHUNK_BYTES))
        data = b"".join(filter(None, parts))
    except (OSError, ValueError) as error:  # a ValueError is a path with a null byte
        reason = getattr(error, "strerror", None) or error
        raise RecordError(f"{path} cannot be read: {reason}.", "check the path and its permissions.") from error
    if len(data) > most:
        raise RecordError(
            f"{path} is larger than {most} bytes, the most that hwaware reads.",
            "give a smaller file: leave out raw samples, or write links between hosts, not between their devices.",
        )
    return data


def require_writable(path: PathLike) -> None:
    """Refuse a path that cannot be written, before a command starts work whose result goes there.

    Folders that do not exist yet are fine: `write_bytes` makes them.

    Raises:
        RecordError: The path is empty. Or the nearest existing parent is no folder, or is not writable.

    Example:
        >>> require_writable("a_new_folder/plan.json")
        >>> require_writable("/dev/null/plan.json")
        Traceback (most recent call last):
        hwaware.errors.RecordError: /dev/null/plan.json cannot be written: /dev/null is not a folder. To fix: choose ...
    """
    if not os.fspath(path):
        raise RecordError("The name of the output is empty.", "give the path of a file.")
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
        replace_file(target, data)
    except OSError as error:
        raise RecordError(
            f"{path} cannot be written: {error.strerror or error}.", "choose a path that can be written."
        ) from error


def save_or_keep(record: FileRecord, path: PathLike, show: Callable[[str], object] = print) -> None:
    """Save a record that took long to make, as `write_or_keep` does."""
    write_or_keep(path, record.to_json(), show)


def write_or_keep(path: PathLike, data: bytes, show: Callable[[str], object] = print) -> None:
    """Write data that took long to make, or keep it in the temporary folder, or else `show` it.

    Raises:
        RecordError: The file cannot be written; the message says why, and where the data is.
    """
    try:
        write_bytes(path, data)
    except RecordError as error:
        try:
            handle, kept = tempfile.mkstemp(prefix="hwaware-", suffix=f"-{Path(path).name[: _MOST_OF_NAME // 10]}")
            with os.fdopen(handle, "wb") as stream:
                stream.write(data)
        except OSError:
            show(data.decode())
            raise RecordError(f"{error.what} The content is on standard output instead.", error.fix) from error
        raise RecordError(f"{error.what} The content is kept in {kept}.", error.fix) from error


def _is_stream(path: Path) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)
