"""Read the tables of nccl-tests or rccl-tests from a log or from JSON, each with its list of devices.

Versions differ in columns. Tables have `error`, a difference, or `#wrong`, a count, and since 2.13 `root`. The line
"Out of bounds values : 0 OK" after a table decides if results are right, and `out_of_bounds` in JSON. JSON is of
version 1 or 2 (src/util.cu). Newer versions can also count bits that differ between repetitions, "Bitwise mismatches".
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.errors import RecordError
from hwaware.interop.readings import Documents, entries, lines, positive, table, whole

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
FIX = (
    "give the output of all_reduce_perf, all_gather_perf, reduce_scatter_perf, alltoall_perf or sendrecv_perf, as text "
    "or with -J."
)
_MOST_TABLES = 1000
_MOST_RANKS = 1 << 16


class Rank(NamedTuple):
    """A line of the list of devices."""

    rank: int
    group: int
    host: str
    device: int
    bus: str
    kind: str


class Row(NamedTuple):
    """One size of a table; `wrong` is as the table has it."""

    size: int
    dtype: str
    redop: str
    seconds: float
    wrong: str


class Table(NamedTuple):
    """A table with its list of devices; the first table of a file has number 1."""

    number: int
    line: int
    op: Optional[str]
    ranks: Tuple[Rank, ...]
    rows: Tuple[Row, ...]
    is_checked: bool = True

    def shown(self) -> str:
        """Return the table's place in the file, as messages name it."""
        return f"table {self.number} (line {self.line})"


def tables_of(path: str, text: str, found: Documents) -> Tuple[List[Table], List[str]]:
    """Return the tables of a file, and remarks on their completeness.

    Raises:
        RecordError: The file is no output of nccl-tests, or nccl-tests found wrong values.
    """
    documents = [one for one in found.found if "results" in one or "config" in one]
    remarks: List[str] = []
    if documents and found.is_cut:
        remarks.append(f"{path} ends in the middle of a document; hwaware took the results that are whole.")
    differing = (table(one.get("bitwise_mismatches")).get("okay") in (False, "false") for one in documents)
    if any(differing) or (not documents and _MISMATCHES.search(text)):
        remarks.append(f"{path} has bitwise mismatches: repeated operations gave other bits. hwaware took the times.")
    return _from_json(path, documents) if documents else _from_text(path, text), remarks


def _from_text(path: str, text: str) -> List[Table]:
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
        self._ranks: List[Rank] = []
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
                raise RecordError(f"{self._path} has more than {_MOST_RANKS} ranks.", FIX)
            self._ranks.append(Rank(int(rank.group(1)), group, rank.group(3), int(rank.group(4)), bus, kind))
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
            raise RecordError(f"{self._path} has data type {dtype[:40]!r}, which nccl-tests does not have.", FIX)
        if seconds is not None and int(size) > 0:
            draft["rows"].append(
                Row(int(size), DTYPES[dtype], redop, seconds * draft["scale"], wrong if draft["counts"] else "0")
            )

    def _judge(self, verdict: Any) -> None:
        open_ones = [draft for draft in self._drafts if not draft["checked"]]
        if verdict.group(2) == "FAILED" and open_ones:
            number = sum(bool(draft["rows"]) for draft in self._drafts) or 1  # as `tables` counts
            raise wrong_values(self._path, verdict.group(1), f"in table {number}")
        for draft in open_ones:
            if draft["ranks"] is self._ranks:  # a run that was cut off before has no verdict
                draft["checked"] = True

    def tables(self) -> List[Table]:
        """Return all tables with rows."""
        drafts = [draft for draft in self._drafts if draft["rows"]]
        return [
            Table(
                number,
                draft["line"],
                draft["op"],
                tuple(draft["ranks"]),
                tuple(draft["rows"]),
                draft["checked"],
            )
            for number, draft in enumerate(drafts, 1)
        ]


def wrong_values(path: str, count: str, place: str) -> RecordError:
    """Return the error of a file in which nccl-tests found wrong values."""
    return RecordError(
        f"{path} is not usable: nccl-tests found {count[:20]} wrong values {place}.",
        "find the faulty device or link, and run nccl-tests again.",
    )


def _agree(size: str, scale: float, time: str, algbw: str) -> bool:
    """Return True if algbw is the bytes over the time, as rounded to two decimals of GB/s."""
    seconds, rate = (positive(time) or 0.0) * scale, positive(algbw) or 0.0
    return seconds > 0 and abs(int(size) / seconds / 1e9 - rate) <= 0.006 + 0.02 * rate


def _from_json(path: str, found: Sequence[Dict[str, Any]]) -> List[Table]:
    made = []
    for number, document in enumerate(found, 1):
        if "config" not in document:
            raise RecordError(f"{path} is not the output of nccl-tests: it has no 'config'.", FIX)
        ranks = []
        for device in map(table, entries(table(document["config"]).get("devices"))):
            values = [
                whole(device.get(key, default)) for key, default in (("rank", None), ("group", 0), ("device", None))
            ]
            host = device.get("hostname")
            if None in values or not isinstance(host, str) or not host:
                raise RecordError(f"{path} is not the output of nccl-tests: a device has no rank, host or index.", FIX)
            rank, group, index = (int(value or 0) for value in values)
            bus, kind = (str(device.get(key) or "") for key in ("device_hex", "device_info"))
            ranks.append(Rank(rank, group, host, index, bus, kind))
        arguments = " ".join(word for word in entries(document.get("args")) if isinstance(word, str))
        programs = list(dict.fromkeys(_PROGRAM.findall(arguments)))
        op = OPERATIONS.get(programs[0], programs[0]) if len(programs) == 1 else None
        rows = tuple(_json_rows(path, entries(document.get("results"))))
        verdict = table(document.get("out_of_bounds"))
        if verdict.get("okay") in (False, "false"):
            raise wrong_values(path, str(verdict.get("count")), f"in table {number}")
        made.append(Table(number, 1, op, tuple(ranks), rows))
    return made


def _json_rows(path: str, results: Iterable[Any]) -> Iterable[Row]:
    for result in map(table, results):
        dtype, size = result.get("type"), whole(result.get("size"))
        timed = table(result.get("out_of_place")) or table(result.get("in_place"))
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise RecordError(f"{path} has data type {str(dtype)[:40]!r}, expected one of {', '.join(DTYPES)}.", FIX)
        if "cpu_time" in timed:
            raise RecordError(f"{path} has CPU times (-C), not times of the operation.", "run nccl-tests without -C.")
        seconds, wrong = positive(timed.get("time")), timed.get("nwrong")
        if size == 0 or timed.get("time") == 0:
            continue  # a result without bytes or time has no rate
        if size is None or seconds is None:
            raise RecordError(
                f"{path} is not the output of nccl-tests: a result has size {str(result.get('size'))[:40]} and time "
                f"{str(timed.get('time'))[:40]}.",
                FIX,
            )
        yield Row(size, DTYPES[dtype], str(result.get("redop")), seconds * 1e-6, str(wrong))
