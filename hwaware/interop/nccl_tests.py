"""Read the output of nccl-tests or rccl-tests, its tables or its JSON, as collectives and links.

nccl-tests counts bytes of the full logical array for all-reduce, all-gather and reduce-scatter. For all-to-all it
counts bytes of one device's operand, and for sendrecv bytes of the message. `bus_factor` says how its two bandwidths,
algbw and busbw, relate. Times are those of the operation out of place, in place where a table has no others.

In sendrecv, each rank sends to the next and receives from the previous one, all at once (src/sendrecv.cu). So the time
is that of the slowest link of the ring. In a ring of two ranks, the link is busy in both directions.

Versions differ in columns. Tables have `error`, a difference, or `#wrong`, a count, and since 2.13 `root`. The line
"Out of bounds values : 0 OK" after a table decides if results are right, and `out_of_bounds` in JSON. JSON is of
version 1 or 2 (src/util.cu). Newer versions can also count bits that differ between repetitions, "Bitwise mismatches".
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.cluster import LinkSample
from hwaware.errors import RecordError
from hwaware.interop.readings import (
    Documents,
    End,
    FoundCollective,
    FoundDevice,
    FoundLink,
    Reading,
    entries,
    lines,
    positive,
    table,
    whole,
)

PROGRAM = "nccl-tests"
# Program of nccl-tests -> operation.
OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "sendrecv": "send",
}
# Programs of nccl-tests whose operations hwaware does not price.
_OTHERS = ("broadcast", "reduce", "gather", "scatter", "hypercube", "alltoallv")
DTYPES = {
    "float": "float32",
    "half": "float16",
    "bfloat16": "bfloat16",
    "double": "float64",
    **dict.fromkeys(("f8e4m3", "fp8_e4m3"), "float8_e4m3fn"),
    **dict.fromkeys(("f8e5m2", "fp8_e5m2"), "float8_e5m2"),
    **{name: name for name in ("int8", "uint8", "int32", "uint32", "int64", "uint64")},
    "char": "int8",
    "int": "int32",
}
_PROGRAM = re.compile(r"(?<![A-Za-z_])(" + "|".join((*OPERATIONS, *_OTHERS)) + r")_perf")
_RANK = re.compile(
    r"#\s+Rank\s+(\d{1,9})\s(?:\s*Group\s+(\d{1,9})\s)?[^#\n]*?\bon\s+(\S+)\s+device\s+(\d{1,9})"
    r"(?:\s*\[\s*([0-9A-Fa-fx:.]+)\s*\])?[ \t]*([^\n]*)"
)
_HEADER = re.compile(r"\b(?:size|bytes)\s+(?:count|N)\s+type\s+(?:redop|op)\s+(root\s+)?time\s+algbw\s+busbw\s+(\S+)")
_NUMBER = r"[0-9][0-9.]*(?:e[+-]?\d+)?"
_START = re.compile(r"(?<![\w.:-])(\d{1,18})\s+(\d{1,18})\s+([A-Za-z]\w*)\s+([A-Za-z]\w*)(?:\s+(-?\d+))?(.*)")
_TIMES = re.compile(rf"\s*({_NUMBER})\s+({_NUMBER})\s+({_NUMBER})\s+(\S+)")
_VERDICT = re.compile(r"Out of bounds values\s*:\s*(\S+)\s+(OK|FAILED)")
_MISMATCHES = re.compile(r"Bitwise mismatches\s*:\s*\S+\s+FAILED")
_FIX = (
    "give the output of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf or sendrecv_perf, as text "
    "or with -J."
)
_MOST_TABLES = 1000
_MOST_RANKS = 1 << 16


class _Rank(NamedTuple):
    """A line of the list of devices."""

    rank: int
    group: int
    host: str
    device: int
    bus: str
    kind: str


class _Row(NamedTuple):
    """One size of a table; `wrong` is as the table has it."""

    size: int
    dtype: str
    redop: str
    seconds: float
    wrong: str


class _Table(NamedTuple):
    """A table with its list of devices; the first table of a file has number 1."""

    number: int
    line: int
    op: Optional[str]
    ranks: Tuple[_Rank, ...]
    rows: Tuple[_Row, ...]
    is_checked: bool = True

    def shown(self) -> str:
        return f"table {self.number} (line {self.line})"


def read(path: str, text: str, found: Documents, op: Optional[str] = None, only: Optional[int] = None) -> Reading:
    """Return the collectives, or the links for sendrecv, of a run.

    Args:
        path: The file, for messages.
        text: Its content.
        found: The JSON in it.
        op: The operation, where the file does not name the program.
        only: Number of the table to take, where a file has several of one operation.

    Raises:
        RecordError: The file is no such output, nccl-tests found wrong values, or the devices cannot be told apart.
    """
    from_json = [one for one in found.found if "results" in one or "config" in one]
    tables = _from_json(path, from_json) if from_json else _from_text(path, text)
    remarks: List[str] = []
    if from_json and found.is_cut:
        remarks.append(f"{path} ends in the middle of a document; hwaware took the results that are whole.")
    differing = (table(one.get("bitwise_mismatches")).get("okay") in (False, "false") for one in from_json)
    if any(differing) or (not from_json and _MISMATCHES.search(text)):
        remarks.append(f"{path} has bitwise mismatches: repeated operations gave other bits. hwaware took the times.")
    if only is not None:
        if not 1 <= only <= len(tables):
            raise RecordError(f"{path} has {len(tables)} tables, not a table {only}.", "give --table 1, 2, ...")
        tables = [tables[only - 1]]
    if op is not None and tables and all(one.op not in (None, op) for one in tables):
        raise RecordError(f"{path} names the operation {tables[0].op}, not {op}.", "leave out --op.")
    named = [_with_op(path, one, op) for one in tables]
    known = [one for one in named if one.op in OPERATIONS.values()]
    left = [one for one in named if one.op not in OPERATIONS.values()]
    if not known and left:
        raise RecordError(f"{path} has {left[0].op}, an operation that hwaware does not price.", _FIX)
    remarks += [f"{path}: left out {one.shown()}: hwaware does not price {one.op}." for one in left]
    known = [one for one in known if one.rows]
    if not known or not any(one.ranks for one in known):
        raise RecordError(f"{path} holds no device or no result of nccl-tests.", _FIX)
    remarks += [
        f"{path}: {one.shown()} ends after {len(one.rows)} rows, without the line "
        '"Out of bounds values"; hwaware took the rows that are whole.'
        for one in known
        if not one.is_checked
    ]
    _require_no_clash(path, known)
    devices: Dict[End, FoundDevice] = {}
    links: List[Tuple[_Table, FoundLink]] = []
    collectives: List[FoundCollective] = []
    for one in known:
        for members, kinds in _groups(path, one):
            devices.update({end: FoundDevice(end, kind) for end, kind in zip(members, kinds)})
            for dtype, points in _curves(path, one).items():
                if one.op == "send":
                    links += [(one, link) for link in _ring(members, points)]
                else:
                    unit = len(members) if one.op == "all-to-all" else 1
                    scaled = tuple(LinkSample(bytes=size * unit, seconds=seconds) for size, seconds in points)
                    collectives.append(FoundCollective(str(one.op), members, dtype, scaled))
    return Reading(
        PROGRAM, path, tuple(devices.values()), _once(path, links), tuple(collectives), tuple(dict.fromkeys(remarks))
    )


def _from_text(path: str, text: str) -> List[_Table]:
    """Return the tables of a log, which may hold several runs."""
    reader = _Log(path)
    for number, line in enumerate(lines(text), 1):
        reader.read(number, line)
    return reader.tables()


class _Log:
    """Read a log line by line.

    A line "# nThread" begins a run, with its own list of devices and its own tables. A program's name may stand before
    it, in a command or in "Collective test starting", and after it.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._drafts: List[Dict[str, Any]] = []
        self._ranks: List[_Rank] = []
        self._op: Optional[str] = None
        self._begun: Optional[Tuple[str, ...]] = None
        self._has_rows = False

    def read(self, number: int, line: str) -> None:
        """Take one line."""
        for program in _PROGRAM.findall(line):
            if self._has_rows and "concluded" not in line:
                self._next_run()
            if "concluded" not in line or self._op is None:
                self._op = OPERATIONS.get(program, program)
                self._name_tables()
        if "# nThread" in line and self._has_rows:
            self._next_run()
        rank = _RANK.search(line)
        if rank is not None:
            if self._has_rows:
                self._next_run()
            group = int(rank.group(2) or 0)
            bus, kind = rank.group(5) or "", (rank.group(6) or "").strip()
            if len(self._ranks) == _MOST_RANKS:
                raise RecordError(f"{self._path} has more than {_MOST_RANKS} ranks.", _FIX)
            self._ranks.append(_Rank(int(rank.group(1)), group, rank.group(3), int(rank.group(4)), bus, kind))
        header = _HEADER.search(line)
        if header is not None:
            self._begin_table(number, header)
        elif self._drafts and not self._drafts[-1]["done"]:
            self._read_row(line)
        verdict = _VERDICT.search(line)
        if verdict is not None:
            self._judge(verdict)

    def _next_run(self) -> None:
        self._ranks, self._op, self._has_rows, self._begun = [], None, False, None
        if self._drafts:
            self._drafts[-1]["done"] = True

    def _begin_table(self, number: int, header: Any) -> None:
        if self._drafts and not self._drafts[-1]["rows"] and self._drafts[-1]["ranks"] is self._ranks:
            self._drafts.pop()  # processes without MPI write one header each
        unit = {"has_root": header.group(1) is not None, "counts": header.group(2) == "#wrong"}
        # Before 2.0.0, columns were called bytes and N, and times were in milliseconds.
        unit["scale"] = 1e-3 if header.group().startswith("bytes") else 1e-6
        own = {"line": number, "op": self._op, "ranks": self._ranks, "rows": [], "checked": False, "done": False}
        if len(self._drafts) == _MOST_TABLES:
            raise RecordError(f"{self._path} has more than {_MOST_TABLES} tables.", "give one file for each run.")
        self._drafts.append({**unit, **own})
        self._begun = None

    def _name_tables(self) -> None:
        """Give the operation to tables of this run that were read before its name."""
        for draft in self._drafts:
            if draft["ranks"] is self._ranks and draft["op"] is None:
                draft["op"] = self._op

    def _read_row(self, line: str) -> None:
        draft = self._drafts[-1]
        start = _START.search(line)
        rest = line
        if start is not None:
            size, _, dtype, redop, root, rest = start.groups()
            if root is not None and not draft["has_root"]:
                rest = line[start.start(5) :]
            if draft["has_root"] and root is None:
                return
            self._begun = (size, dtype, redop)
        elif self._begun is None:
            return
        else:
            # With NCCL_DEBUG, messages of NCCL break a row after its first half.
            pieces = re.search(rf"(?:^|\s)(?={_NUMBER}\s+{_NUMBER}\s+{_NUMBER}\s+(?:{_NUMBER}|N/A)\s*$)", line)
            if pieces is None:
                return
            rest = line[pieces.start() :]
        times = _TIMES.match(rest)
        if times is None:
            return
        size, dtype, redop = self._begun
        if start is None and not _agree(size, draft["scale"], *times.groups()[:2]):
            return
        self._begun = None
        seconds, wrong = positive(times.group(1)), times.group(4)
        self._has_rows = True
        if dtype not in DTYPES:
            raise RecordError(f"{self._path} has data type {dtype[:40]!r}, which nccl-tests does not have.", _FIX)
        if seconds is not None and int(size) > 0:
            draft["rows"].append(
                _Row(int(size), DTYPES[dtype], redop, seconds * draft["scale"], wrong if draft["counts"] else "0")
            )

    def _judge(self, verdict: Any) -> None:
        open_ones = [draft for draft in self._drafts if not draft["checked"]]
        if verdict.group(2) == "FAILED" and open_ones:
            number = sum(bool(draft["rows"]) for draft in self._drafts) or 1  # as `tables` counts
            raise _wrong_values(self._path, verdict.group(1), f"in table {number}")
        for draft in open_ones:
            if draft["ranks"] is self._ranks:  # a run that was cut off before has no verdict
                draft["checked"] = True

    def tables(self) -> List[_Table]:
        """Return all tables with rows."""
        drafts = [draft for draft in self._drafts if draft["rows"]]
        return [
            _Table(
                number,
                draft["line"],
                draft["op"],
                tuple(draft["ranks"]),
                tuple(draft["rows"]),
                draft["checked"],
            )
            for number, draft in enumerate(drafts, 1)
        ]


def _wrong_values(path: str, count: str, place: str) -> RecordError:
    return RecordError(
        f"{path} is not usable: nccl-tests found {count[:20]} wrong values {place}.",
        "find the faulty device or link, and run nccl-tests again.",
    )


def _agree(size: str, scale: float, time: str, algbw: str) -> bool:
    """Return True if algbw is the bytes over the time, as rounded to two decimals of GB/s."""
    seconds, rate = (positive(time) or 0.0) * scale, positive(algbw) or 0.0
    return seconds > 0 and abs(int(size) / seconds / 1e9 - rate) <= 0.006 + 0.02 * rate


def _from_json(path: str, found: Sequence[Dict[str, Any]]) -> List[_Table]:
    made = []
    for number, document in enumerate(found, 1):
        if "config" not in document:
            raise RecordError(f"{path} is not the output of nccl-tests: it has no 'config'.", _FIX)
        ranks = []
        for device in map(table, entries(table(document["config"]).get("devices"))):
            values = [
                whole(device.get(key, default)) for key, default in (("rank", None), ("group", 0), ("device", None))
            ]
            host = device.get("hostname")
            if None in values or not isinstance(host, str) or not host:
                raise RecordError(f"{path} is not the output of nccl-tests: a device has no rank, host or index.", _FIX)
            rank, group, index = (int(value or 0) for value in values)
            bus, kind = (str(device.get(key) or "") for key in ("device_hex", "device_info"))
            ranks.append(_Rank(rank, group, host, index, bus, kind))
        arguments = " ".join(word for word in entries(document.get("args")) if isinstance(word, str))
        programs = list(dict.fromkeys(_PROGRAM.findall(arguments)))
        op = OPERATIONS.get(programs[0], programs[0]) if len(programs) == 1 else None
        rows = tuple(_json_rows(path, entries(document.get("results"))))
        verdict = table(document.get("out_of_bounds"))
        if verdict.get("okay") in (False, "false"):
            raise _wrong_values(path, str(verdict.get("count")), f"in table {number}")
        made.append(_Table(number, 1, op, tuple(ranks), rows))
    return made


def _json_rows(path: str, results: Iterable[Any]) -> Iterable[_Row]:
    for result in map(table, results):
        dtype, size = result.get("type"), whole(result.get("size"))
        timed = table(result.get("out_of_place")) or table(result.get("in_place"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise RecordError(f"{path} has data type {str(dtype)[:40]!r}, expected one of {', '.join(DTYPES)}.", _FIX)
        if "cpu_time" in timed:
            raise RecordError(f"{path} has CPU times (-C), not times of the operation.", "run nccl-tests without -C.")
        seconds, wrong = positive(timed.get("time")), timed.get("nwrong")
        if size == 0 or timed.get("time") == 0:
            continue  # a result without bytes or time has no rate
        if size is None or seconds is None:
            raise RecordError(
                f"{path} is not the output of nccl-tests: a result has size {str(result.get('size'))[:40]} and time "
                f"{str(timed.get('time'))[:40]}.",
                _FIX,
            )
        yield _Row(size, DTYPES[dtype], str(result.get("redop")), seconds * 1e-6, str(wrong))


def _with_op(path: str, one: _Table, op: Optional[str]) -> _Table:
    if one.op is None and op is None:
        raise RecordError(
            f"{path} is not usable alone: it names 0 programs of nccl-tests, so its operation is unknown.",
            f"add --op all-reduce, or another of {', '.join(OPERATIONS.values())}.",
        )
    return one._replace(op=one.op or op)


def _require_no_clash(path: str, tables: Sequence[_Table]) -> None:
    """Refuse two tables of one operation on the same devices: they are of two settings."""
    seen: Dict[Any, _Table] = {}
    for one in tables:
        for dtype in {row.dtype for row in one.rows}:
            members = tuple((rank.rank, rank.group, rank.host, rank.device, rank.bus) for rank in one.ranks)
            first = seen.setdefault((one.op, members, dtype), one)
            if first is not one:
                shown = ", ".join(each.shown() for each in tables if each.op == one.op and each.ranks == one.ranks)
                raise RecordError(
                    f"{path} has several tables of {one.op} on the same devices, as of unlike settings: {shown}.",
                    "choose one: --table NUMBER.",
                )


def _groups(path: str, one: _Table) -> List[Tuple[Tuple[End, ...], Tuple[str, ...]]]:
    """Return the members of each group of ranks, and their kinds of device."""
    if not one.ranks:
        raise RecordError(
            f"{path} is not usable: {one.shown()} has no list of devices before it.",
            "give the whole output; or choose another table, if the file has several: --table NUMBER.",
        )
    [(number, count)] = Counter(rank.rank for rank in one.ranks).most_common(1)
    if count > 1:
        raise RecordError(
            f"{path} is not usable: {count} processes say Rank {number} in {one.shown()}. "
            "So nccl-tests was built without MPI, and each process measured its own devices alone.",
            "build nccl-tests with MPI=1, and run it again.",
        )
    if len(one.ranks) == 1:
        raise RecordError(
            f"{path} is not usable: {one.shown()} is of a group of one device, which sends nothing.",
            "run nccl-tests on several devices; on several hosts, build it with MPI=1.",
        )
    indices = _indices(path, one.ranks)
    found = []
    by_group: Dict[int, List[_Rank]] = {}
    for rank in sorted(one.ranks, key=lambda rank: rank.rank):
        by_group.setdefault(rank.group, []).append(rank)
    for _, own in sorted(by_group.items()):
        ends = tuple(End((rank.host,), device=indices[rank.rank]) for rank in own)
        if len(ends) > 1:
            found.append((ends, tuple(rank.kind for rank in own)))
    if not found:
        raise RecordError(f"{path} is not usable: every group of {one.shown()} has one device.", _FIX)
    return found


def _indices(path: str, ranks: Sequence[_Rank]) -> Dict[int, int]:
    """Return the device's index on its host for each rank.

    Where every process sees one device alone, all say "device 0". Then devices have the order of their bus ids.
    """
    found = {rank.rank: rank.device for rank in ranks}
    by_host: Dict[str, List[_Rank]] = {}
    for rank in ranks:
        by_host.setdefault(rank.host, []).append(rank)
    for host, own in by_host.items():
        if len({rank.device for rank in own}) == len(own):
            continue
        buses = sorted({rank.bus.lower() for rank in own}, key=lambda bus: (len(bus), bus))
        place = {bus: index for index, bus in enumerate(buses)}
        if len(buses) < len(own):
            raise RecordError(
                f"{path} is not usable: two ranks on host {host} have the same device and the same bus id.",
                "run one rank on each device.",
            )
        found.update({rank.rank: place[rank.bus.lower()] for rank in own})
    return found


def _curves(path: str, one: _Table) -> Dict[str, Tuple[Tuple[float, float], ...]]:
    """Return (bytes, seconds) by data type, one for each size: the median of its rows.

    In a table of several reductions, the sum counts.
    """
    found: Dict[str, Dict[int, List[float]]] = {}
    redops = {row.redop for row in one.rows}
    if len(redops) > 1 and "sum" not in redops:
        raise RecordError(
            f"{path} is not usable: {one.shown()} has the reductions {', '.join(sorted(redops))}, but no sum.",
            "run nccl-tests with -o sum.",
        )
    for row in one.rows:
        count = positive(row.wrong)
        if count is not None or (row.wrong.startswith("-") and row.wrong != "-"):
            raise _wrong_values(path, row.wrong, f"at {row.size} bytes")
        if len(redops) == 1 or row.redop == "sum":
            found.setdefault(row.dtype, {}).setdefault(row.size, []).append(row.seconds)
    return {
        dtype: tuple((float(size), statistics.median(times)) for size, times in sorted(sizes.items()))
        for dtype, sizes in found.items()
    }


def _ring(members: Tuple[End, ...], points: Sequence[Tuple[float, float]]) -> Iterable[FoundLink]:
    """Return the links of a ring.

    All links of a ring work at once. So its time is that of the links between hosts, if it has some. Two devices of one
    host have a link of their own. A larger ring on one host tells of the slowest link inside the host.
    """
    pairs = list(zip(members, (*members[1:], members[0])))
    crossing = [(a, b) for a, b in pairs if a.names != b.names]
    if crossing:
        pairs = [(a._replace(device=None), b._replace(device=None)) for a, b in crossing]
    elif len(members) > 2:
        pairs = [(members[0]._replace(device=None), members[0]._replace(device=None))]
    samples = tuple(LinkSample(bytes=size, seconds=seconds) for size, seconds in points)
    rate = max(size / seconds for size, seconds in points)
    first_bytes, first_s = points[0]
    latency_s = max(first_s - first_bytes / rate, 0.0)
    facts = {"table": f"sendrecv over {len(members)} devices, all sending at once"}
    return [FoundLink(a, b, rate, latency_s, samples, facts=facts) for a, b in dict.fromkeys(pairs)]


def _once(path: str, found: Sequence[Tuple[_Table, FoundLink]]) -> Tuple[FoundLink, ...]:
    """Return one link for each pair of ends: of several data types, the one with the most sizes."""
    best: Dict[Tuple[End, End], Tuple[_Table, FoundLink]] = {}
    for one, link in found:
        first, before = best.setdefault((link.source, link.target), (one, link))
        if first is not one and first.ranks != one.ranks:  # neither table is better than the other
            raise RecordError(
                f"{path} has several tables of send from {link.source.shown()} to {link.target.shown()}: "
                f"{first.shown()}, {one.shown()}.",
                "choose one: --table NUMBER.",
            )
        if len(before.samples) < len(link.samples):
            best[link.source, link.target] = (one, link)
    return tuple(link for _, link in best.values())


def bus_factor(op: str, members: int) -> Optional[float]:
    """Return busbw / algbw, as nccl-tests defines them; None for other operations.

    The algorithm bandwidth, algbw, is the array's bytes over the time. The bus bandwidth, busbw, is the rate on each
    device's link. It compares with the hardware for any number n of devices. An all-reduce moves `2 (n - 1) / n` of the
    array over each link, since every byte travels to the sum and back. The others move `(n - 1) / n`, since a device
    has its own part already.

    Example:
        >>> bus_factor("all-reduce", 4), bus_factor("all-gather", 4)
        (1.5, 0.75)
    """
    share = (members - 1) / members
    factors: Dict[str, Any] = {"all-reduce": 2 * share, **dict.fromkeys(("all-gather", "reduce-scatter"), share)}
    factors["all-to-all"] = share
    found: Optional[float] = factors.get(op)
    return found
