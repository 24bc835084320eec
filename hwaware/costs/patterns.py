"""Tell how communicating groups lie on the hosts, and how many bytes pass the slowest part."""

from __future__ import annotations

from collections import Counter
from typing import List, NamedTuple, Sequence, Tuple

from hwaware.errors import UnusableInputError

Groups = Tuple[Tuple[int, ...], ...]

# All-reduces up to the first size run as reduce-scatter and all-gather over one flat ring, from the second size on they
# sum inside the hosts first. Seen in both recorded NCCL files (two hosts, A100, V100 and A40): time over that of the
# other two operations falls from 1 to the hierarchical share between 16 and 64 MiB.
FLAT_ALL_REDUCE_BYTES, HIERARCHICAL_ALL_REDUCE_BYTES = float(1 << 25), float(1 << 27)
# Time of a hierarchical all-reduce over its share of the traffic: geometric mean of the six such patterns there.
HIERARCHICAL_ALL_REDUCE_OVERHEAD = 1.12


class Shape(NamedTuple):
    """Hold how groups that communicate at once lie on the hosts."""

    size: int  # n, devices in the group
    layout: Tuple[int, ...]  # devices of the group on each of its hosts, largest first
    crossing: int  # k, groups that leave the busiest host at once; 0 if the group stays inside its host
    stride: int  # smallest distance between two ranks of the group on one host; 1 if no host has two ranks


def checked_groups(replica_groups: Sequence[Sequence[int]], devices_per_host: int) -> Groups:
    """Return the groups as tuples.

    Raises:
        UnusableInputError: A group is empty, a rank is negative or repeated, or hosts have no devices.

    Example:
        >>> checked_groups([[0, 8], [1, 9]], 8)
        ((0, 8), (1, 9))
    """
    groups = tuple(tuple(int(rank) for rank in group) for group in replica_groups)
    ranks = [rank for group in groups for rank in group]
    if not groups or not all(groups) or min(ranks) < 0 or len(set(ranks)) != len(ranks) or devices_per_host < 1:
        raise UnusableInputError(
            f"replica_groups are {replica_groups!r} with devices_per_host {devices_per_host!r}, expected at least one "
            "group, none of them empty, every rank once, and at least one device a host.",
            "give groups of device ranks such as [[0, 1], [2, 3]]; rank r is on host r // devices_per_host.",
        )
    return groups


def shapes(groups: Groups, devices_per_host: int) -> List[Shape]:
    """Return the different shapes among groups that communicate at once; often one.

    Example:
        >>> shapes(((0, 2, 8, 10), (1, 3, 9, 11)), 8)
        [Shape(size=4, layout=(2, 2), crossing=2, stride=2)]
    """
    hosts = [Counter(rank // devices_per_host for rank in group) for group in groups]
    crossing = Counter(host for own in hosts if len(own) > 1 for host in own)
    found = []
    for group, own in zip(groups, hosts):
        ranks = sorted(group)
        gaps = [b - a for a, b in zip(ranks, ranks[1:]) if a // devices_per_host == b // devices_per_host]
        shape = Shape(
            size=len(group),
            layout=tuple(sorted(own.values(), reverse=True)),
            crossing=max(crossing[host] for host in own) if len(own) > 1 else 0,
            stride=min(gaps, default=1),
        )
        found.append(shape)
    return list(dict.fromkeys(found))


def passes(op: str, shape: Shape) -> int:
    """Return how often an operation goes through its group: twice for an all-reduce across hosts, else once.

    Inside a host, both passes share one start, as the recorded curves show.
    """
    return 2 if op == "all-reduce" and shape.crossing else 1


def traffic(op: str, shape: Shape, nbytes: float) -> float:
    """Return the bytes through the busiest card or port for each byte of the full logical array.

        all-gather, reduce-scatter: k (n - 1) / n        a flat ring passes each host border once
        all-reduce:                 2 k (n - 1) / n      ring to 32 MiB;  2 k (h - 1) / h  hierarchical from 128 MiB
        all-to-all:                 k max_h l_h (n - l_h) / n^2        l_h of the n devices on host h
        send:                       k

    Cards count across hosts. Ports count inside a host: k = 1, and (n - 1) / n^2 for all-to-all. A send among more than
    two devices counts as an all-gather. A group of one moves nothing.

    Example:
        >>> pairs = Shape(size=2, layout=(1, 1), crossing=8, stride=1)
        >>> [traffic(op, pairs, 1e6) for op in ("all-gather", "all-reduce", "all-to-all", "send")]
        [4.0, 8.0, 2.0, 8]

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    Factors as in nccl-tests' doc/PERFORMANCE.md, counted at the card instead of the device.
    """
    n, k = shape.size, max(1, shape.crossing)
    if n < 2:
        return 0.0
    if op == "send" and n == 2:
        return k
    if op == "all-to-all":
        if not shape.crossing:
            return (n - 1) / n**2
        return k * max(count * (n - count) for count in shape.layout) / n**2
    ring = k * (n - 1) / n
    if op != "all-reduce":
        return ring
    return 2 * ring * _all_reduce_share(shape, nbytes)


def _all_reduce_share(shape: Shape, nbytes: float) -> float:
    """Return the traffic of an all-reduce over that of its flat ring."""
    flat, n, h = 1.0, shape.size, len(shape.layout)
    if h < 2 or n == h or nbytes <= FLAT_ALL_REDUCE_BYTES:
        return flat
    hierarchical = min(flat, HIERARCHICAL_ALL_REDUCE_OVERHEAD * ((h - 1) / h) / ((n - 1) / n))
    steps = HIERARCHICAL_ALL_REDUCE_BYTES - FLAT_ALL_REDUCE_BYTES
    progress = min(1.0, (nbytes - FLAT_ALL_REDUCE_BYTES) / steps)
    # The time itself must not fall while the share does: the share falls no faster than 1 / nbytes.
    return max(hierarchical, flat + progress * (hierarchical - flat), FLAT_ALL_REDUCE_BYTES / nbytes)
