"""What happens once per step: gradients are summed over the replicas, and the optimizer updates the parameters."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import Link
from hwaware.costs.curves import FloatArray
from hwaware.costs.links import send_time_s
from hwaware.workload import Layer


def ring_pairs(members: Sequence[str]) -> List[Tuple[str, str]]:
    """Return the source and target of each message in a ring, where each member sends to the one before it.

    gloo's ring does so: where links are slow in one direction only, an all-reduce over four hosts took four times as
    long as the other direction's links would have it.

    Example:
        >>> ring_pairs(("a", "b", "c")), ring_pairs(("a",))
        ([('a', 'c'), ('b', 'a'), ('c', 'b')], [])
    """
    return [(member, members[k - 1]) for k, member in enumerate(members)] if len(members) > 1 else []


def position_rings(placed: Sequence[Sequence[str]]) -> List[List[str]]:
    """Return for each position in the replicas' groups the devices that sum their gradients in one ring.

    Example:
        >>> position_rings([("a:0", "a:1"), ("b:0", "b:1")])
        [['a:0', 'b:0'], ['a:1', 'b:1']]
    """
    return [[devices[k % len(devices)] for devices in placed] for k in range(max(map(len, placed)))]


def ring_all_reduces_s(nbytes: FloatArray, members: int, links: Sequence[Link]) -> FloatArray:
    """Return the times of ring all-reduces of n bytes over N members, for several sums at once.

    t = 2 (N - 1) max_k send_k(n / N)  =  2 (N - 1) / N  n / W_slowest + 2 (N - 1) L   on straight links

    Each of the 2 (N - 1) rounds moves n / N bytes over every link of the ring at once and ends with the slowest link.

    Args:
        nbytes: n, the bytes of the operand on one member.
        members: N.
        links: The directed links of the ring; links that it has more than once may be given once.

    Returns:
        Seconds; 0 for one member and for no bytes.

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
    result: FloatArray = np.where(nbytes > 0, 2 * (members - 1) * slowest, 0.0)
    return result


def adding_time_s(nbytes: FloatArray, bytes_per_s: Sequence[Optional[float]]) -> FloatArray:
    """What the members of a ring all-reduce of n bytes compute beside the network, which waits for it.

    t = 2 (N - 1) / N  n / min_k R_k

    R_k is what member k hands on a second if the network takes no time; members without one count for nothing.

    Args:
        nbytes: n, for several sums at once.
        bytes_per_s: R of each of the N members.

    Example:
        >>> adding_time_s(np.array([0.0, 3e6]), [3e8, 1e8, None]).tolist()
        [0.0, 0.04]

    Source: measured. Sums of 29 MB by gloo took 0.1 s longer than the ring over 0.8 and over 1.6 Gbit/s.
    """
    known = [rate for rate in bytes_per_s if rate is not None]
    if not known:
        return np.zeros(len(nbytes))
    result: FloatArray = ring_all_reduce_volume(1.0, len(bytes_per_s)) * nbytes / min(known)
    return result


def update_time_s(layer: Layer, memory_bandwidth_bytes_per_s: Optional[float], group: int = 1) -> float:
    """Time of the optimizer's update of one layer on one device, bound by memory traffic.

    t = (2 min(p, g) + g + 2 o) / (TP M)

    Parameters p with a gradient and optimizer state o are read and written, gradients g are read, frozen parameters are
    left alone. M is the rate of device memory with reads and writes counted. Not known (None): 0, the update is then
    left out of the prediction.

    Example:
        >>> from hwaware.workload import Workload
        >>> layer = Workload.uniform(parameter_bytes=1e6).layers[0]
        >>> update_time_s(layer, 7e9), update_time_s(layer, None)
        (0.001, 0.0)

    Source: element-wise updates (SGD, Adam) do a few operations per byte, far below what any device can compute.
    """
    if memory_bandwidth_bytes_per_s is None:
        return 0.0
    updated = min(layer.parameter_bytes, layer.gradient_size_bytes)
    moved = 2 * updated + layer.gradient_size_bytes + 2 * layer.optimizer_size_bytes
    return moved / group / memory_bandwidth_bytes_per_s


def ring_all_reduce_volume(size: float, members: int) -> float:
    """What every member of a ring all-reduce sends, in the unit of `size` (bytes, or parameters): 2 (N - 1) / N size.

    Example:
        >>> ring_all_reduce_volume(100.0, 4), ring_all_reduce_volume(100.0, 1)
        (150.0, 0.0)

    Source: Patarasuk and Yuan, 2009.
    """
    return 2 * (members - 1) / members * size
