"""Price a step's end: replicas sum their gradients, and the optimizer updates the parameters."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import Link
from hwaware.costs.curves import FloatArray
from hwaware.costs.links import send_time_s
from hwaware.workload import Layer


def ring_pairs(members: Sequence[str]) -> List[Tuple[str, str]]:
    """Return the source and target of each message in a ring, where each member sends to the one before it.

    gloo sends that way: of two equal links, only the one in this direction slowed its sums.

    Example:
        >>> ring_pairs(("a", "b", "c")), ring_pairs(("a",))
        ([('a', 'c'), ('b', 'a'), ('c', 'b')], [])
    """
    return [(member, members[k - 1]) for k, member in enumerate(members)] if len(members) > 1 else []


def ring_all_reduces_s(nbytes: FloatArray, members: int, links: Sequence[Link]) -> FloatArray:
    """Return the seconds of ring all-reduces of n bytes over N members, for several n at once.

        t = 2 (N - 1) max_k send_k(n / N)  =  2 (N - 1) / N  n / W_slowest + 2 (N - 1) L   on straight links

    Each of 2 (N - 1) rounds moves n / N bytes over all links at once. It ends with the slowest link. `links` are the
    directed links of the ring, equal ones once or more. No bytes and one member take no time.

    Example:
        >>> there = Link(source="a", target="b", latency_s=0.001, bandwidth_bytes_per_s=1e6)
        >>> back = Link(source="b", target="a", latency_s=0.001, bandwidth_bytes_per_s=2e6)
        >>> ring_all_reduces_s(np.array([0.0, 1e6]), 2, [there, back]).tolist()
        [0.0, 1.002]

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    if members < 2:
        return np.zeros(len(nbytes))
    unlike = {(link.latency_s, link.bandwidth_bytes_per_s, link.samples): link for link in links}
    slowest = np.max([send_time_s(link, nbytes / members) for link in unlike.values()], axis=0)
    return np.where(nbytes > 0, 2 * (members - 1) * slowest, 0.0)


def adding_time_s(nbytes: FloatArray, bytes_per_s: Sequence[Optional[float]]) -> FloatArray:
    """Return the seconds that N members of a ring all-reduce of n bytes add to the network's.

        t = 2 (N - 1) / N  n / min_k R_k

    R_k is the rate at which member k would hand on bytes without a network; None counts for nothing.

    Example:
        >>> adding_time_s(np.array([0.0, 3e6]), [3e8, 1e8, None]).tolist()
        [0.0, 0.04]

    Source: measured. Sums of 29 MB by gloo took 0.1 s longer than the ring over 0.8 and over 1.6 Gbit/s.
    """
    known = [rate for rate in bytes_per_s if rate is not None]
    if not known:
        return np.zeros(len(nbytes))
    members = len(bytes_per_s)
    return 2 * (members - 1) / members * nbytes / min(known)


def update_time_s(layer: Layer, memory_bandwidth_bytes_per_s: Optional[float], group: int = 1) -> float:
    """Return the seconds of the optimizer's update of a layer on one device of a tensor-parallel group.

        t = (2 min(p, g) + g + 2 o) / (TP M)

    Parameters with a gradient and optimizer state are read and written, gradients are read. Without a measured memory
    bandwidth M, the time is 0.

    Example:
        >>> from hwaware.workload import Workload
        >>> layer = Workload.uniform(parameter_bytes=1e6).layers[0]
        >>> update_time_s(layer, 7e9), update_time_s(layer, None)
        (0.001, 0.0)

    Source: element-wise updates (SGD, Adam) are bound by memory traffic.
    """
    if memory_bandwidth_bytes_per_s is None:
        return 0.0
    updated = min(layer.parameter_bytes, layer.gradient_size_bytes)
    moved = 2 * updated + layer.gradient_size_bytes + 2 * layer.optimizer_size_bytes
    return moved / group / memory_bandwidth_bytes_per_s
