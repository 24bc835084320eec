"""Read measurement files of other programs: clean text, JSON, and the records that every importer returns.

Launchers and log collectors put prefixes before each line: `[1,0]<stdout>:`, `0: `, a time stamp. Importers of tables
search inside the line, so a prefix does no harm. Only JSON needs the prefixes gone, and `documents` drops them.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.cluster import LinkSample
from hwaware.records import PathLike, read_bytes

# Logs of these programs have kilobytes; with NCCL_DEBUG, megabytes.
_MOST_BYTES = 1 << 26
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()][0-9A-Za-z]|[=>])")
# Halves of characters, which JSON can write but no file can hold.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
# Prefixes of launchers and log collectors before a line of JSON.
_PREFIX = re.compile(
    r"""\s*(?:
    [^"{}]{0,200}?\]\s*<(?:stdout|stderr|stddiag)>:?              # mpirun --tag-output, with or without a time stamp
    | \[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[^\s\]]*\]?(?:\s(?:stdout|stderr)\s[FP])?(?=\s)  # kubectl, docker, containerd
    | [A-Z][a-z]{2}\s+\d+\s\d\d:\d\d:\d\d\s\S+\s\S+:(?=\s|$)       # journalctl
    | \[[\w./:@,-]*[A-Za-z\d][\w./:@,-]*\](?::|(?=\s))            # mpiexec -l, torchrun, kubectl --prefix
    | \([\w\s=.,:-]+\)(?=\s)                                       # Ray
    | [\w.-]+:(?=\s|$)                                             # srun --label, pdsh, clush
    | [\w.-]+\s+\|(?=\s|$)                                         # docker compose
    )""",
    re.VERBOSE,
)
_MOST_PREFIXES = 4
_MOST_OF_LINE = 20_000
_MOST_DEPTH = 100
# Braces that begin no JSON; each costs a pass over the file.
_MOST_FAILED = 20


class End(NamedTuple):
    """One end of a link, or a member of a group.

    Attributes:
        names: The host's name and addresses, best first; empty if the file does not name the host.
        role: The name for a host without names: "host", "client" or "server".
        device: Index of the device on the host; None means the host itself.
        option: Option that names the host, such as --client; empty if the file names it.
    """

    names: Tuple[str, ...] = ()
    role: str = "host"
    device: Optional[int] = None
    option: str = ""

    def shown(self) -> str:
        """Return the end as messages name it."""
        host = self.names[0] if self.names else f"the {self.role}"
        return host if self.device is None else f"device {self.device} of host {host}"


class FoundDevice(NamedTuple):
    """A device that a file names.

    Attributes:
        end: Its host and index.
        kind: Its model; empty if the file has none.
        memory_bandwidth_bytes_per_s: Rate of copies inside its memory, read and write counted.
    """

    end: End
    kind: str = ""
    memory_bandwidth_bytes_per_s: Optional[float] = None


class FoundLink(NamedTuple):
    """A measurement of a connection from source to target.

    Attributes:
        source, target: Two hosts, or two devices.
        bytes_per_s: Rate of long messages; None if not measured.
        latency_s: Time of an empty message; None if not measured.
        samples: Times of single messages.
        nominal_bytes_per_s: Rate by the connection's kind, which applies only where nothing was measured.
        facts: Further evidence, as the file has it.
        loaded_latency_s: Time of an empty message while a stream fills the link, which includes time in queues.
    """

    source: End
    target: End
    bytes_per_s: Optional[float] = None
    latency_s: Optional[float] = None
    samples: Tuple[LinkSample, ...] = ()
    nominal_bytes_per_s: Optional[float] = None
    facts: Optional[Dict[str, Any]] = None
    loaded_latency_s: Optional[float] = None


class FoundCollective(NamedTuple):
    """Times of one collective operation; bytes are of the full logical array."""

    op: str
    members: Tuple[End, ...]
    dtype: str
    points: Tuple[LinkSample, ...]


class Reading(NamedTuple):
    """All that an importer found in one file.

    Attributes:
        program: The program that wrote the file.
        file: The path, as the user gave it.
        devices, links, collectives: The findings.
        remarks: Sentences for the user: what was left out or assumed.
    """

    program: str
    file: str
    devices: Tuple[FoundDevice, ...] = ()
    links: Tuple[FoundLink, ...] = ()
    collectives: Tuple[FoundCollective, ...] = ()
    remarks: Tuple[str, ...] = ()


def with_names(reading: Reading, roles: Mapping[str, str], renamed: Mapping[str, str]) -> Reading:
    """Return the reading with other names of hosts.

    Args:
        reading: The findings of one file.
        roles: Role -> name of the host; it wins over the name in the file.
        renamed: Name in the file -> name.
    """

    def named(end: End) -> End:
        if end.role in roles:
            return end._replace(names=(roles[end.role],), option=f"--{end.role}")
        first = sorted(end.names, key=lambda name: name not in renamed)  # a new profile takes the first name
        option = "" if renamed.keys().isdisjoint(first) else "--rename"
        return end._replace(names=tuple(renamed.get(name, name) for name in first), option=option)

    return reading._replace(
        devices=tuple(one._replace(end=named(one.end)) for one in reading.devices),
        links=tuple(one._replace(source=named(one.source), target=named(one.target)) for one in reading.links),
        collectives=tuple(one._replace(members=tuple(map(named, one.members))) for one in reading.collectives),
    )


def names_of(readings: Sequence[Reading]) -> List[str]:
    """Return the names and addresses of hosts in the files."""
    ends = [end for reading in readings for end in _ends(reading)]
    ends += [end for reading in readings for one in reading.collectives for end in one.members]
    return list(dict.fromkeys(name for end in ends for name in end.names))


def unnamed(reading: Reading) -> List[str]:
    """Return a sentence for each end that the file does not name."""
    roles = dict.fromkeys(end.role for end in _ends(reading) if not end.names)
    return [f"{reading.file} does not name the {role}; name it: --{role} NAME." for role in roles]


def _ends(reading: Reading) -> List[End]:
    devices = [device.end for device in reading.devices]
    return devices + [end for link in reading.links for end in (link.source, link.target)]


def read_text(path: PathLike) -> str:
    """Return the file as text with plain line ends, without colours and other terminal codes.

    Raises:
        RecordError: The file cannot be read, or is too large for a log of measurements.
    """
    data = read_bytes(path, _MOST_BYTES)
    is_wide = data[:2] in (b"\xff\xfe", b"\xfe\xff")  # what PowerShell's > writes
    text = data.decode("utf-16" if is_wide else "utf-8-sig", errors="replace")
    text = _SURROGATE.sub("?", text)
    return _ESCAPE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def lines(text: str) -> List[str]:
    """Return the lines of a text; those that are too long for a table are empty."""
    return [line if len(line) <= _MOST_OF_LINE else "" for line in text.split("\n")]


def positive(word: Any) -> Optional[float]:
    """Return a finite number above zero; None for anything else.

    Example:
        >>> [positive(word) for word in ("9.5", "0", "nan", "N/A", 3, True, "1_0", "9" * 400)]
        [9.5, None, None, None, 3.0, None, None, None]
    """
    if isinstance(word, str):
        if not re.fullmatch(r"\s*[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?\s*", word):
            return None
    elif isinstance(word, bool) or not isinstance(word, (int, float)):
        return None
    try:
        value = float(word)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return value if math.isfinite(value) and value > 0 else None


def whole(word: Any) -> Optional[int]:
    """Return a whole number from 0 to 10^18; None for anything else.

    Example:
        >>> [whole(word) for word in ("12", 7, "-1", "1.0", True, "9" * 30)]
        [12, 7, None, None, None, None]
    """
    if isinstance(word, str):
        return int(word) if re.fullmatch(r"[0-9]{1,18}", word) else None
    is_number = isinstance(word, int) and not isinstance(word, bool)
    return word if is_number and 0 <= word <= 10**18 else None


def table(value: Any) -> Dict[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def entries(value: Any) -> List[Any]:
    """Return a JSON list; an empty one for anything else."""
    return value if isinstance(value, list) else []


class Repeated(List[Any]):
    """Values of a key that a JSON object has more than once, in their order."""


def _object(pairs: Sequence[Tuple[str, Any]]) -> Dict[str, Any]:
    """Keep all values of a repeated key: iperf3 3.7 to 3.10 writes both directions under one name."""
    made: Dict[str, Any] = {}
    for key, value in pairs:
        if key not in made:
            made[key] = value
        elif isinstance(made[key], Repeated):
            made[key].append(value)
        else:
            made[key] = Repeated([made[key], value])
    return made


class Documents(NamedTuple):
    """JSON objects of a file.

    Attributes:
        found: The objects.
        is_cut: True if the last one was cut off and closed here.
        size: Characters that they cover.
    """

    found: Tuple[Dict[str, Any], ...]
    is_cut: bool = False
    size: int = 0


def documents(text: str) -> Documents:
    r"""Return the JSON objects in a text, without what stands before, between and after them.

    An object that was cut off keeps what is whole.

    Example:
        >>> documents('# Writing JSON\n{"a": 1}\n{"b": [{"c": 2}, {"c": ').found
        ({'a': 1}, {'b': [{'c': 2}]})
    """
    stripped = "\n".join(_without_prefixes(line) for line in text.split("\n"))
    candidates = [_documents(one) for one in dict.fromkeys((text, stripped))]
    return max(candidates, key=lambda one: one.size)


def _documents(text: str) -> Documents:
    decoder = json.JSONDecoder(object_pairs_hook=_object, parse_int=_int)
    found: List[Dict[str, Any]] = []
    end = failed = size = 0
    for match in re.finditer(r"^[^\n{]{0,200}?(\{)", text, re.MULTILINE):
        start = match.start(1)
        if start < end or failed > _MOST_FAILED:
            continue
        try:
            value, end = decoder.raw_decode(text, start)
            found.append(value)
            size += end - start
        except (ValueError, RecursionError):
            failed += 1
            value = _decoded(decoder, _closed(text[start:]))
            if value:
                return Documents((*found, value), True, size + len(text) - start)
    return Documents(tuple(found), False, size)


def _decoded(decoder: json.JSONDecoder, text: Optional[str]) -> Optional[Dict[str, Any]]:
    """Return the object in the text; None if the text is none."""
    try:
        value = decoder.decode(text) if text is not None else None
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _int(digits: str) -> float:
    """Read a whole number; one of many digits as a float, which takes no quadratic time."""
    return int(digits) if len(digits) < 20 else float(digits)


def _closed(text: str) -> Optional[str]:
    """Return a JSON text that was cut off, up to its last whole value, with its brackets closed."""
    opened: List[str] = []
    whole_until: Optional[Tuple[int, Tuple[str, ...]]] = None
    for token in re.finditer(r'"(?:[^"\\]|\\.)*"|[{}\[\],]|"', text):
        mark = token.group()
        if mark == '"':
            break  # the string was cut off
        if mark in "{[":
            opened.append("}" if mark == "{" else "]")
            if len(opened) > _MOST_DEPTH:
                return None
        elif mark in "}]":
            if not opened or opened.pop() != mark:
                return None
            whole_until = (token.end(), tuple(opened))
        elif mark == ",":
            whole_until = (token.start(), tuple(opened))
    if whole_until is None:
        return None
    end, inside = whole_until
    return text[:end] + "".join(reversed(inside))


def _without_prefixes(line: str) -> str:
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(line)
        if match is None:
            break
        line = line[match.end() :]
    return line


def matrices(listed: Sequence[str], start: int, width: int) -> Iterator[Tuple[int, List[str]]]:
    """Yield the rows of a square table: the row's index, and its `width` words.

    Args:
        listed: Lines of the file.
        start: Number of the line after the header.
        width: Number of columns beside the row's index.
    """
    for index, place in enumerate(range(start, len(listed))):
        words = listed[place].split()
        if len(words) <= width or words[-width - 1] != str(index):
            return
        yield index, words[-width:]
