"""Read the output of nccl-tests, its table or its JSON, as collectives of a cluster.

nccl-tests counts bytes of the full logical array for all-reduce, all-gather and reduce-scatter. For all-to-all it
counts bytes of one device's operand. `bus_factor` says how its two bandwidths, algbw and busbw, relate. Times are those
of the operation out of place.
"""

from __future__ import annotations

import re
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.cluster import ClusterProfile, Collective, LinkSample
from hwaware.errors import RecordError, UnusableInputError
from hwaware.records import PathLike, read_bytes, rebuilt

# Program of nccl-tests -> operation.
OPERATIONS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
DTYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64"}
_PROGRAM = re.compile(r"\b(" + "|".join(OPERATIONS) + r")_perf")
_RANK = re.compile(r"#\s+Rank\s+(\d+)\s.*?\bon\s+(\S+)\s+device\s+(\d+)")
_FIX = "give the output of all_reduce_perf, all_gather_perf, reduce_scatter_perf or alltoall_perf, as text or with -J."


class Rank(NamedTuple):
    """Host and device index of a member of the group."""

    host: str
    device: int


class Output(NamedTuple):
    """One run of nccl-tests.

    Attributes:
        op: The operation.
        ranks: The members, by rank.
        points: Data type -> (bytes as nccl-tests counts them, seconds).
    """

    op: str
    ranks: Tuple[Rank, ...]
    points: Dict[str, Tuple[Tuple[float, float], ...]]


def read_nccl_tests(path: PathLike) -> Output:
    """Read what a run of nccl-tests measured.

    Raises:
        RecordError: The file is no such output, or nccl-tests itself found wrong values in a result.
    """
    data = read_bytes(path)
    try:
        output = _from_json(data) if data.lstrip()[:1] == b"{" else _from_text(data.decode("utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, msgspec.MsgspecError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise RecordError(f"{path} is not the output of nccl-tests: {reason}.", _FIX) from error
    if not output.ranks or not any(output.points.values()):
        raise RecordError(f"{path} holds no device or no result of nccl-tests.", _FIX)
    return output


def _from_text(text: str) -> Output:
    ranks = {int(rank): Rank(host, int(device)) for rank, host, device in _RANK.findall(text)}
    rows: List[Tuple[str, float, float, str]] = []
    time_column = None
    for line in text.splitlines():
        words = line.lstrip("# ").split()
        if words[:3] == ["size", "count", "type"]:
            time_column = words.index("time")
        elif time_column is not None and not line.startswith("#") and words and words[0].isdigit():
            rows.append((words[2], float(words[0]), float(words[time_column]), words[time_column + 3]))
    return Output(_operation(text), tuple(ranks[rank] for rank in sorted(ranks)), _points(rows))


def _from_json(data: bytes) -> Output:
    document = msgspec.json.decode(data)
    devices = sorted(document["config"]["devices"], key=lambda device: int(device["rank"]))
    ranks = tuple(Rank(str(device["hostname"]), int(device["device"])) for device in devices)
    rows = [
        (row["type"], float(row["size"]), float(result["time"]), str(result.get("nwrong")))
        for row in document["results"]
        for result in [row.get("out_of_place") or row["in_place"]]
    ]
    return Output(_operation(" ".join(str(word) for word in document["args"])), ranks, _points(rows))


def _operation(text: str) -> str:
    programs = set(_PROGRAM.findall(text))
    if len(programs) != 1:
        raise ValueError(f"it names {len(programs)} programs of nccl-tests, expected one")
    return OPERATIONS[programs.pop()]


def _points(rows: Sequence[Tuple[str, float, float, str]]) -> Dict[str, Tuple[Tuple[float, float], ...]]:
    found: Dict[str, List[Tuple[float, float]]] = {}
    for name, size, microseconds, wrong in rows:
        if wrong not in ("0", "0.0", "N/A", "None", "0e+00"):
            raise ValueError(f"nccl-tests found {wrong} wrong values at {size:g} bytes")
        if size > 0 and microseconds > 0:
            found.setdefault(DTYPES.get(name, name), []).append((size, microseconds * 1e-6))
    return {dtype: tuple(sorted(points)) for dtype, points in found.items()}


def add_collectives(profile: ClusterProfile, output: Output) -> ClusterProfile:
    """Return the profile with the curves of a run, which replace those of the same operation, group and dtype.

    Raises:
        UnusableInputError: The profile lacks a host or device of the run.
        RecordError: A time or size is not valid.
    """
    devices = tuple(_device(profile, rank) for rank in output.ranks)
    unit = len(devices) if output.op == "all-to-all" else 1
    try:
        made = tuple(
            Collective(
                op=output.op,
                devices=devices,
                dtype=dtype,
                points=tuple(LinkSample(bytes=size * unit, seconds=seconds) for size, seconds in points),
            )
            for dtype, points in output.points.items()
        )
    except ValueError as error:
        raise RecordError(f"A result of nccl-tests is not valid: {error}.", _FIX) from error
    replaced = {(one.op, one.devices, one.dtype) for one in made}
    kept = tuple(one for one in profile.collectives if (one.op, one.devices, one.dtype) not in replaced)
    return rebuilt(profile, collectives=(*kept, *made))


def _device(profile: ClusterProfile, rank: Rank) -> str:
    """Return the id of the device with this index on this host."""
    own = [device.id for device in profile.devices if _same_host(device.host, rank.host)]
    if rank.device >= len(own):
        raise UnusableInputError(
            f"nccl-tests ran on device {rank.device} of host {rank.host}, the profile has {len(own)} devices there.",
            f"give the profile of those hosts; this one has {', '.join(host.name for host in profile.hosts)}.",
        )
    return own[rank.device]


def _same_host(name: str, hostname: str) -> bool:
    """Compare host names without their domains, which nccl-tests leaves out."""
    return name == hostname or name.partition(".")[0] == hostname.partition(".")[0]


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
