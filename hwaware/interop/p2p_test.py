"""Read the output of p2pBandwidthLatencyTest, a sample of NVIDIA's CUDA samples, as links between devices of one host.

Rates are in GB/s of 10^9 bytes: the program divides by 1e9. In a table of writes, device ROW copies to device COLUMN;
in a table of reads, ROW copies from COLUMN. The diagonal is a copy inside one device, read and write counted. A table
"Bidirectional" has the sum of both directions. Latencies are of small copies in microseconds; the table "GPU" is timed
on the device. With "P2P=Enabled", pairs without peer access are copied through the host, as NCCL and JAX do too.

Source: outputBandwidthMatrix, outputBidirectionalBandwidthMatrix and outputLatencyMatrix of p2pBandwidthLatencyTest.cu.
"""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Tuple

from hwaware.errors import RecordError
from hwaware.interop.readings import End, FoundDevice, FoundLink, Reading, lines, matrices, positive

PROGRAM = "p2pBandwidthLatencyTest"
_FIX = "give the output of p2pBandwidthLatencyTest."
_DEVICE = re.compile(r"Device:\s*(\d{1,6}),\s*([^\n]*?),\s*pciBusID")
_TITLE = re.compile(
    r"(?:(Unidirectional|Bidirectional) )?P2P=(Enabled|Disabled) (?:(Bandwidth)|(Latency)) "
    r"?(?:\(P2P (Writes|Reads)\) )?Matrix"
)
_COLUMNS = re.compile(r"(?:D\\D|\b(GPU|CPU))((?:\s+\d{1,6})+)\s*$")


class _Title(NamedTuple):
    """Names a table; `rank` is lower for a table that tells more about the links that training uses."""

    rank: int
    words: str
    is_latency: bool
    is_read: bool
    parts: int


def _title(match: re.Match[str]) -> _Title:
    directions, enabled, bandwidth, _, method = match.groups()
    is_read = method == "Reads"
    rank = 4 * (directions == "Bidirectional") + 2 * (enabled == "Disabled") + is_read
    return _Title(rank, match.group().strip(), bandwidth is None, is_read, 2 if directions == "Bidirectional" else 1)


def read(path: str, text: str) -> Reading:
    """Return the links that the best bandwidth table has, with the latencies of the table like it.

    Raises:
        RecordError: The file has no bandwidth table of at least two devices.
    """
    kinds = {int(number): name.strip() for number, name in _DEVICE.findall(text)}
    listed = lines(text)
    rates: Dict[Tuple[int, int], Tuple[_Title, float]] = {}
    times: Dict[Tuple[int, int], Tuple[_Title, float]] = {}
    is_cut = False
    title = None
    for number, line in enumerate(listed):
        found = _TITLE.search(line)
        title = _title(found) if found is not None else title
        columns = _COLUMNS.search(line)
        if columns is None or title is None or columns.group(1) == "CPU":
            continue
        width = len(columns.group(2).split())
        rows = list(matrices(listed, number + 1, width))
        is_cut = is_cut or len(rows) < width
        _take(rows, title, times if title.is_latency else rates)
    between = {pair: value for pair, value in rates.items() if pair[0] != pair[1]}
    if not between:
        raise RecordError(f"{path} has no table of rates between two devices.", _FIX)
    own = {pair[0]: value for pair, (_, value) in rates.items() if pair[0] == pair[1]}
    indices = sorted({index for pair in rates for index in pair})
    devices = [FoundDevice(End(device=k), kinds.get(k, ""), 1e9 * own[k] if k in own else None) for k in indices]
    links = [
        FoundLink(
            End(device=source),
            End(device=target),
            rate * 1e9 / table.parts,
            times[source, target][1] * 1e-6 if (source, target) in times else None,
            facts={"table": table.words + (", half of both directions" if table.parts == 2 else "")},
        )
        for (source, target), (table, rate) in sorted(between.items())
    ]
    remarks = [f"{path} ends in the middle of a table; hwaware took the rows that are whole."] if is_cut else []
    return Reading(PROGRAM, path, tuple(devices), tuple(links), remarks=tuple(remarks))


def _take(rows: List[Tuple[int, List[str]]], title: _Title, into: Dict[Tuple[int, int], Tuple[_Title, float]]) -> None:
    """Keep the values of a table, unless a better table had them."""
    for row, words in rows:
        for column, word in enumerate(words):
            value = positive(word)
            pair = (column, row) if title.is_read and row != column else (row, column)
            if value is not None and (pair not in into or title.rank < into[pair][0].rank):
                into[pair] = (title, value)
