"""Read the output of nccl-tests or rccl-tests, its tables or its JSON, as collectives and links.

nccl-tests counts bytes of the full logical array for all-reduce, all-gather and reduce-scatter. For all-to-all it
counts bytes of one device's operand, and for sendrecv bytes of the message. `bus_factor` says how its two bandwidths,
algbw and busbw, relate. Times are those of the operation out of place, in place where a table has no others.

In sendrecv, each rank sends to the next and receives from the previous one, all at once (src/sendrecv.cu). So the time
is that of the slowest link of the ring. In a ring of two ranks, the link is busy in both directions.
"""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from hwaware.cluster import LinkSample
from hwaware.errors import RecordError
from hwaware.interop.nccl_tables import FIX, OPERATIONS, Rank, Table, tables_of, wrong_values
from hwaware.interop.readings import Documents, End, FoundCollective, FoundDevice, FoundLink, Reading, positive

PROGRAM = "nccl-tests"


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
    tables, remarks = tables_of(path, text, found)
    known, left = _chosen(path, tables, op, only)
    remarks += [f"{path}: left out {one.shown()}: hwaware does not price {one.op}." for one in left]
    remarks += [
        f"{path}: {one.shown()} ends after {len(one.rows)} rows, without the line "
        '"Out of bounds values"; hwaware took the rows that are whole.'
        for one in known
        if not one.is_checked
    ]
    _require_no_clash(path, known)
    devices: Dict[End, FoundDevice] = {}
    links: List[Tuple[Table, FoundLink]] = []
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


def _chosen(
    path: str, tables: Sequence[Table], op: Optional[str], only: Optional[int]
) -> Tuple[List[Table], List[Table]]:
    """Return the tables to use, and those of operations that hwaware does not price."""
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
        raise RecordError(f"{path} has {left[0].op}, an operation that hwaware does not price.", FIX)
    known = [one for one in known if one.rows]
    if not known or not any(one.ranks for one in known):
        raise RecordError(f"{path} holds no device or no result of nccl-tests.", FIX)
    return known, left


def _with_op(path: str, one: Table, op: Optional[str]) -> Table:
    if one.op is None and op is None:
        raise RecordError(
            f"{path} is not usable alone: it names 0 programs of nccl-tests, so its operation is unknown.",
            f"add --op all-reduce, or another of {', '.join(OPERATIONS.values())}.",
        )
    return one._replace(op=one.op or op)


def _require_no_clash(path: str, tables: Sequence[Table]) -> None:
    """Refuse two tables of one operation on the same devices: they are of two settings."""
    seen: Dict[Any, Table] = {}
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


def _groups(path: str, one: Table) -> List[Tuple[Tuple[End, ...], Tuple[str, ...]]]:
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
    by_group: Dict[int, List[Rank]] = {}
    for rank in sorted(one.ranks, key=lambda rank: rank.rank):
        by_group.setdefault(rank.group, []).append(rank)
    for _, own in sorted(by_group.items()):
        ends = tuple(End((rank.host,), device=indices[rank.rank]) for rank in own)
        if len(ends) > 1:
            found.append((ends, tuple(rank.kind for rank in own)))
    if not found:
        raise RecordError(f"{path} is not usable: every group of {one.shown()} has one device.", FIX)
    return found


def _indices(path: str, ranks: Sequence[Rank]) -> Dict[int, int]:
    """Return the device's index on its host for each rank.

    Where every process sees one device alone, all say "device 0". Then devices have the order of their bus ids.
    """
    found = {rank.rank: rank.device for rank in ranks}
    by_host: Dict[str, List[Rank]] = {}
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


def _curves(path: str, one: Table) -> Dict[str, Tuple[Tuple[float, float], ...]]:
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
            raise wrong_values(path, row.wrong, f"at {row.size} bytes")
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


def _once(path: str, found: Sequence[Tuple[Table, FoundLink]]) -> Tuple[FoundLink, ...]:
    """Return one link for each pair of ends: of several data types, the one with the most sizes."""
    best: Dict[Tuple[End, End], Tuple[Table, FoundLink]] = {}
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
    return {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": share, "all-to-all": share}.get(op)
