"""What happens once per step: gradients are summed over the replicas, and the optimizer updates the parameters."""

from __future__ import annotations

from typing import Optional, Sequence

import numpy as np

from hwaware.cluster import Link
from hwaware.costs.communication import send_time_s
from hwaware.workload import Layer


def ring_all_reduce_s(nbytes: float, ring: Sequence[Link]) -> float:
    """Time of a ring all-reduce of n bytes over N members.

    t = 2 (N - 1) max_k send_k(n / N)  =  2 (N - 1) / N  n / W_slowest + 2 (N - 1) L   on straight links

    Each of the 2 (N - 1) rounds moves n / N bytes over every link of the ring at once and ends with the slowest link.

    Args:
        nbytes: n, the bytes of the operand on one member.
        ring: The N directed links, member k to member k + 1 and the last one to the first; empty for one member.

    Returns:
        Seconds; 0 for one member and for no bytes.

    Example:
        >>> there = Link(source="a", target="b", latency_s=0.001, bandwidth_bytes_per_s=1e6)
        >>> back = Link(source="b", target="a", latency_s=0.001, bandwidth_bytes_per_s=2e6)
        >>> ring_all_reduce_s(1e6, [there, back])
        1.002

    Source: Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    members = len(ring)
    if members < 2 or nbytes <= 0:
        return 0.0
    chunk = np.array([nbytes / members])
    return 2 * (members - 1) * max(float(send_time_s(link, chunk)[0]) for link in ring)


def update_time_s(layer: Layer, memory_bandwidth_bytes_per_s: Optional[float], group: int = 1) -> float:
    """Time of the optimizer's update of one layer on one device, bound by memory traffic.

    t = (2 p + g + 2 o) / (TP M)

    Parameters p and optimizer state o are read and written, gradients g are read; M is the rate of device memory with
    reads and writes counted. Not known (None): 0, the update is then left out of the prediction.

    Example:
        >>> layer = Layer(name="0", forward_flops=1, backward_flops=2, parameter_bytes=1e6, output_bytes=0,
        ...               activation_bytes=0)
        >>> update_time_s(layer, 7e9), update_time_s(layer, None)
        (0.001, 0.0)

    Source: element-wise updates (SGD, Adam) do a few operations per byte, far below what any device can compute.
    """
    if memory_bandwidth_bytes_per_s is None:
        return 0.0
    moved = 2 * layer.parameter_bytes + layer.gradient_size_bytes + 2 * layer.optimizer_size_bytes
    return moved / group / memory_bandwidth_bytes_per_s
