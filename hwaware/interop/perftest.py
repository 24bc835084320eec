"""Read the output of perftest (ib_write_bw, ib_read_bw, ib_send_bw and their _lat), as links between hosts.

MB/sec are 2^20 bytes in every version; newer versions write MiB/sec for the same. So 65536 bytes at 0.176338 million
messages a second are 11021.1 MB/sec. Gb/sec (--report_gbits) are 10^9 bits. JSON (--out_json) has no unit, but the
message rate tells it. In tests of write and send, data flow from client to server; in tests of read, from server to
client. A bidirectional test reports the sum of both directions.

Times of ib_write_lat and ib_send_lat are half a round trip in microseconds, the time of one message. ib_read_lat
reports the whole round trip of a request and its answer. Rates are those of many messages in flight. So only times of
the latency tests become samples of a link.

Source: perftest_parameters.h, perftest_parameters.c and the man page of perftest 4.5 to 24.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.cluster import LinkSample
from hwaware.errors import RecordError
from hwaware.interop.readings import Documents, End, FoundLink, Reading, lines, positive, table, whole

PROGRAM = "perftest"
_FIX = "give the output of ib_write_bw, ib_read_bw or ib_send_bw, or of one of their _lat tests."
_TEST = re.compile(r"\b(RDMA_Write|RDMA_Read|Send|Atomic)[\w ]{0,40}?(?:BW|Latency) Test", re.IGNORECASE)
_COMMAND = re.compile(r"\bib_(write|read|send)_(bw|lat)\b([^\n]*)")
_HEADER = re.compile(r"#\s*bytes\s+#\s*iterations\s+([^\n]{0,300}\[[^\n]{0,300})")
_COLUMN = re.compile(r"([\w.%]+(?: [\w.]+)*)\[([^\]]+)\]")
_GID = re.compile(r"\bGID:\s*((?:\d{1,3}:){15}\d{1,3})\b")
_UNITS = {"MB/sec": 2.0**20, "MiB/sec": 2.0**20, "Gb/sec": 1e9 / 8}
# How far the product of message rate and size may be from the bandwidth: both are rounded.
_AGREE = 0.05


class _Row(NamedTuple):
    """One size: its rate in bytes a second, or its time."""

    size: int
    bytes_per_s: Optional[float] = None
    seconds: Optional[float] = None


class _Test(NamedTuple):
    """One run of a program of perftest."""

    verb: Optional[str]
    is_both: bool
    is_latency: bool
    rows: Tuple[_Row, ...]


def read(path: str, text: str, found: Documents) -> Reading:
    """Return the link that each test measured.

    Raises:
        RecordError: The file has no result of perftest, or a test that hwaware cannot use.
    """
    written = [_of_json(path, one) for one in found.found if "results" in one and "test_info" in one]
    tests = [test for test in written or _of_text(path, text) if test.rows]
    if not tests:
        raise RecordError(f"{path} has no result of perftest.", _FIX)
    client, server = _ends(text)
    remarks = []
    if any(test.verb is None for test in tests):
        remarks.append(f"{path} does not name the test; hwaware assumed one from client to server (write or send).")
    links: Dict[Tuple[End, End, bool], FoundLink] = {}
    for test in tests:
        pairs = [(server, client) if test.verb == "read" else (client, server)]
        pairs += [pairs[0][::-1]] if test.is_both else []
        for source, target in pairs:
            key = (source, target, test.is_latency)
            if key in links:
                kind = "latency" if test.is_latency else "rate"
                raise RecordError(
                    f"{path} has several tests of the {kind} from {source.shown()} to {target.shown()}.",
                    "give one file for each test.",
                )
            links[key] = _link(source, target, test)
    return Reading(PROGRAM, path, links=tuple(links.values()), remarks=tuple(remarks))


def _link(source: End, target: End, test: _Test) -> FoundLink:
    named = f"ib_{test.verb or 'write'}_{'lat' if test.is_latency else 'bw'}"
    if test.is_latency:
        trips = 2 if test.verb == "read" else 1  # a read is a request there and data back
        smallest = min(test.rows, key=lambda row: row.size)
        sizes = {row.size: row.seconds for row in test.rows if row.seconds is not None}
        samples = [LinkSample(bytes=size, seconds=seconds) for size, seconds in sorted(sizes.items())]
        latency_s = (smallest.seconds or 0.0) / trips
        return FoundLink(
            source, target, latency_s=latency_s, samples=tuple(samples) if trips == 1 else (), facts={"latency": named}
        )
    rate = max(row.bytes_per_s or 0.0 for row in test.rows) / (2 if test.is_both else 1)
    return FoundLink(source, target, rate, facts={"table": named + (", half of both directions" * test.is_both)})


def _of_text(path: str, text: str) -> List[_Test]:
    tests: List[_Test] = []
    verb: Optional[str] = None
    is_both = False
    columns: List[Tuple[str, str]] = []
    rows: List[_Row] = []

    def end() -> None:
        if rows:
            tests.append(_Test(verb, is_both, _is_latency(columns), tuple(rows)))
        rows.clear()

    for line in lines(text):
        title, command = _TEST.search(line), _COMMAND.search(line)
        if title is not None or command is not None:
            end()
            columns = []
        if title is not None:
            verb = _verb(path, title.group(1))
            is_both = "bidirectional" in line.lower()
        elif command is not None:
            verb, is_both = command.group(1), bool(re.search(r"\s(?:-b|--bidirectional)\b", command.group(3)))
        header = _HEADER.search(line)
        if header is not None:
            end()
            columns = [(name.strip(), unit.strip()) for name, unit in _COLUMN.findall(header.group(1))]
        elif columns:
            row = _row(path, line, columns)
            rows += [row] if row is not None else []
    end()
    return tests


def _verb(path: str, word: str) -> str:
    verb = word.lower().rpartition("_")[2]
    if verb == "atomic":
        raise RecordError(f"{path} has a test of atomic operations, which transfer no data.", _FIX)
    return verb


def _is_latency(columns: Sequence[Tuple[str, str]]) -> bool:
    return any(unit == "usec" for _, unit in columns)


def _row(path: str, line: str, columns: Sequence[Tuple[str, str]]) -> Optional[_Row]:
    match = re.search(r"(?<![\w.:-])(\d{1,15})\s+(\d{1,15})((?:\s+-?\d[\d.]*(?:e[+-]?\d+)?)+)\s*$", line)
    if match is None:
        return None
    values = dict(zip((name for name, _ in columns), match.group(3).split()))
    units = dict(columns)
    size = int(match.group(1))
    if _is_latency(columns):
        seconds = next((positive(values.get(name)) for name in ("t_avg", "t_typical", "t_min") if name in values), None)
        return _Row(size, seconds=seconds * 1e-6) if seconds is not None else None
    name = "BW average"
    average = positive(values.get(name))
    if units.get(name) not in _UNITS:
        raise RecordError(
            f"{path} has a rate in {units.get(name, 'no unit')}, expected one of {', '.join(_UNITS)}.", _FIX
        )
    return _Row(size, average * _UNITS[units[name]]) if average is not None and size > 0 else None


def _of_json(path: str, document: Dict[str, Any]) -> _Test:
    title = str(table(document["test_info"]).get("test", ""))
    found = re.search(r"(Write|Read|Send|Atomic)", title, re.IGNORECASE)
    verb = _verb(path, found.group(1)) if found is not None else None
    is_both = "bidirectional" in title.lower()
    listed = document["results"] if isinstance(document["results"], list) else [document["results"]]
    rows = []
    for result in map(table, listed):
        size = whole(result.get("MsgSize"))
        time = positive(result.get("t_avg", result.get("t_typical")))
        rate = positive(result.get("BW_average"))
        if size and time is not None:
            rows.append(_Row(size, seconds=time * 1e-6))
        elif size and rate is not None:
            rows.append(_Row(size, rate * _unit(path, size, rate, positive(result.get("MsgRate")))))
    return _Test(verb, is_both, bool(rows and rows[0].seconds is not None), tuple(rows))


def _unit(path: str, size: int, rate: float, million_messages: Optional[float]) -> float:
    """Return the unit in which the rate agrees with the messages a second."""
    for unit in set(_UNITS.values()):
        expected = size * (million_messages or 0.0) * 1e6 / unit
        if abs(rate - expected) <= _AGREE * rate:
            return unit
    raise RecordError(
        f"{path} has BW_average {rate:g} and MsgRate {million_messages}, which agree in no unit.",
        "give the text output of perftest.",
    )


def _ends(text: str) -> Tuple[End, End]:
    """Return client and server: by the command, else by their GIDs, in which RoCE keeps IPv4 addresses."""
    addresses = list(dict.fromkeys(_address(gid) for gid in _GID.findall(text)))
    local, remote = (addresses[0], addresses[1]) if len(addresses) == 2 else ("", "")
    if "Waiting for client to connect" in text:
        local, remote = remote, local
    command = _COMMAND.search(text)
    words = command.group(3).split() if command is not None else []
    # The server's name is the last word, if it stands alone: ib_write_bw -d mlx5_0 --report_gbits node2.
    is_named = bool(words) and not words[-1].startswith("-") and (len(words) == 1 or not _takes_value(words[-2]))
    server = [words[-1]] if is_named and re.fullmatch(r"[\w.:-]+", words[-1]) else []
    return (
        End((local,) if local else (), "client"),
        End(tuple(dict.fromkeys([*server, *([remote] if remote else [])])), "server"),
    )


def _takes_value(option: str) -> bool:
    """Return True if the word after a short option may be its value; a few short options stand alone."""
    return bool(re.fullmatch(r"-[A-Za-z]", option)) and option not in (
        "-F",
        "-a",
        "-b",
        "-R",
        "-z",
        "-N",
        "-e",
        "-H",
        "-U",
    )


def _address(gid: str) -> str:
    """Return the IPv4 address in a GID, which perftest prints as decimal bytes; empty if it has none."""
    parts = [int(part) for part in gid.split(":")]
    if parts[:12] != [0] * 10 + [255, 255] or max(parts) > 255:
        return ""
    return str(ipaddress.IPv4Address(bytes(parts[12:])))
