"""Compute algorithm and bus bandwidth of measured collectives, as nccl-tests defines them."""

from __future__ import annotations

from typing import List, NamedTuple, Optional

from hwaware.cluster import AnyProfile, Collective
from hwaware.interop.nccl_tests import bus_factor


class Row(NamedTuple):
    """One collective at its largest measured size.

    Attributes:
        op: The operation.
        devices: The group's device ids, joined by "+".
        dtype: Data type.
        bytes: Size of the full logical array.
        seconds: Time until the slowest member has ended.
        algbw_bytes_per_s: Bytes over time, as nccl-tests counts bytes: the full array, or one device's operand for an
            all-to-all.
        busbw_bytes_per_s: algbw times `bus_factor`, the rate that each device's link carries; None for an operation
            without such a factor.
    """

    op: str
    devices: str
    dtype: str
    bytes: float
    seconds: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: Optional[float]


def rows(profile: AnyProfile) -> List[Row]:
    """Return a row for each collective of the profile, larger groups last."""
    found = [_row(one) for one in profile.collectives if one.points and len(one.devices) > 1]
    return sorted(found, key=lambda row: (row.devices.count("+"), row.devices, row.op))


def _row(collective: Collective) -> Row:
    point = max(collective.points, key=lambda one: one.bytes)
    members = len(collective.devices)
    counted = point.bytes / members if collective.op == "all-to-all" else point.bytes
    algbw = counted / point.seconds
    factor = bus_factor(collective.op, members)
    return Row(
        op=collective.op,
        devices="+".join(collective.devices),
        dtype=collective.dtype,
        bytes=point.bytes,
        seconds=point.seconds,
        algbw_bytes_per_s=algbw,
        busbw_bytes_per_s=None if factor is None else algbw * factor,
    )
