"""Read the output of nvbandwidth, as text or with `--format json`, as links between devices.

Rates are in GB/s of 10^9 bytes. In a test "write", device ROW copies to device COLUMN. In a test "read", ROW copies
from COLUMN. The arrows in the titles of some versions say the opposite. Tests "ce" copy by copy engines, tests "sm" by
kernels. A bidirectional test reports each direction, or their sum as "total".
The latency test is in nanoseconds. Tests between a host's memory and a device describe no link of a cluster.

Source: testcases_ce.cpp, testcases_sm.cpp and json_output.cpp of nvbandwidth 0.4 to 0.8.
"""

from __future__ import annotations

import re
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

from hwaware.errors import RecordError
from hwaware.interop.readings import (
    Documents,
    End,
    FoundDevice,
    FoundLink,
    Reading,
    entries,
    lines,
    matrices,
    positive,
    table,
)

PROGRAM = "nvbandwidth"
_FIX = "give the output of: nvbandwidth -t device_to_device_memcpy_write_ce device_to_device_latency_sm."
_DEVICE = re.compile(r"\bDevice (\d{1,6}): ([^\n(]+)")
_PROCESS = re.compile(r"\bProcess\s+(\d{1,6}) \(([^)\n]+)\): device (\d{1,6}): ([^\n(]+)")
_RUNNING = re.compile(r"\bRunning (?:benchmark )?(\w+)\.?")
_COLUMNS = re.compile(r"(?:^|\s)(0(?:\s+\d{1,6})*)\s*$")
# Text and JSON give the same: which test, its unit, its values.
_UNITS = {"(GB/s)": 1e9, "(us)": 1e-6, "(ns)": 1e-9}
# Preferred first.
_TESTS = ("memcpy_write_ce", "memcpy_read_ce", "memcpy_write_sm", "memcpy_read_sm", "bidirectional_memcpy")
Pair = Tuple[int, int]


class _Matrix(NamedTuple):
    """A table of one test."""

    test: str
    title: str
    rows: Sequence[Tuple[int, Sequence[Any]]]

    @property
    def unit(self) -> float:
        return next((size for mark, size in _UNITS.items() if mark in self.title), 0.0)


def read(path: str, text: str, found: Documents) -> Reading:
    """Return the links of the device-to-device tests.

    Raises:
        RecordError: The file has none, or nvbandwidth failed.
    """
    document = next((table(one["nvbandwidth"]) for one in found.found if "nvbandwidth" in one), None)
    tests = list(_json_tests(document) if document is not None else _text_tests(text))
    ends, devices = _ends(text, document)
    rates: Dict[Pair, Tuple[int, float, str]] = {}
    latencies: Dict[Pair, float] = {}
    for test in tests:
        if "device_to_device" not in test.test or not test.unit:
            continue
        for pair, value in _values(test):
            if test.unit == 1e9:
                # The titles "Write1" and "Read1" are of the measured direction; a total is of both.
                is_total = "total" in test.test.lower() or "total" in test.title.lower()
                share = 2.0 if is_total or ("bidirectional" in test.test and test.test.endswith("_sm")) else 1.0
                rank = next((k for k, name in enumerate(_TESTS) if _is_test(name, test.test)), len(_TESTS))
                if pair not in rates or rank < rates[pair][0]:
                    rates[pair] = (rank, value * 1e9 / share, test.test)
            elif "latency" in test.test:
                latencies.setdefault(pair, value * test.unit)
    if not rates:
        error = document.get("error") if document is not None else None
        detail = f": nvbandwidth says {str(error)[:200]!r}" if error else ""
        raise RecordError(f"{path} has no rate between two devices{detail}.", _FIX)
    links = tuple(
        FoundLink(
            ends.get(source, End(device=source)),
            ends.get(target, End(device=target)),
            rate,
            latencies.get((source, target)),
            facts={"table": test},
        )
        for (source, target), (_, rate, test) in sorted(rates.items())
    )
    is_cut = found.is_cut and document is not None
    remarks = [f"{path} ends in the middle of a document; hwaware took the results that are whole."] if is_cut else []
    return Reading(PROGRAM, path, devices, links, remarks=tuple(remarks))


def _is_test(name: str, test: str) -> bool:
    return name in test and (name.startswith("bidirectional") or "bidirectional" not in test)


def _values(test: _Matrix) -> Iterator[Tuple[Pair, float]]:
    """Yield source, target and value: data flow to the row in a read, from the row else."""
    for row, words in test.rows:
        for column, word in enumerate(words):
            value = positive(word)
            if value is not None and row != column:
                yield ((column, row) if "read" in test.test else (row, column)), value


def _ends(text: str, document: Optional[Dict[str, Any]]) -> Tuple[Dict[int, End], Tuple[FoundDevice, ...]]:
    """Return the ends by row, and the devices. With MPI, a row is a process, and the list names its host."""
    listed = "\n".join(_strings(document)) if document is not None else text
    processes = _PROCESS.findall(listed)
    if processes:
        ends = {int(row): End((host.strip(),), device=int(index)) for row, host, index, _ in processes}
        return ends, tuple(FoundDevice(ends[int(row)], kind.strip()) for row, _, _, kind in processes)
    kinds = _DEVICE.findall(listed)
    return {}, tuple(FoundDevice(End(device=int(number)), kind.strip()) for number, kind in kinds)


def _strings(document: Dict[str, Any]) -> Iterator[str]:
    """Yield texts in lists of the document, where some versions put "Device 0: NVIDIA H100 (00000000:10:00)"."""
    for value in document.values():
        yield from (one for one in entries(value) if isinstance(one, str))


def _text_tests(text: str) -> Iterator[_Matrix]:
    listed = lines(text)
    test = title = ""
    for number, line in enumerate(listed):
        running = _RUNNING.search(line)
        if running is not None:
            test, title = running.group(1), ""
        if any(unit in line for unit in _UNITS):
            title = line.strip()
        columns = _COLUMNS.search(line)
        if columns is not None and test and title:
            width = len(columns.group(1).split())
            if columns.group(1).split() == [str(k) for k in range(width)]:
                yield _Matrix(test, title, list(matrices(listed, number + 1, width)))
                title = ""


def _json_tests(document: Dict[str, Any]) -> Iterator[_Matrix]:
    for test in map(table, entries(document.get("testcases"))):
        rows: List[Tuple[int, Sequence[Any]]] = [
            (number, entries(row)) for number, row in enumerate(entries(test.get("bandwidth_matrix")))
        ]
        yield _Matrix(str(test.get("name")), str(test.get("bandwidth_description")), rows)
