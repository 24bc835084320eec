"""Estimate products and collectives on the slowest devices and links of a cluster, for Alpa's database."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from hwaware.cluster import ClusterProfile, LinkTable, MatrixProduct


class Estimates:
    """Prices of a cluster as if it were homogeneous: its slowest devices and links stand for all.

    Args:
        profile: The cluster.
    """

    def __init__(self, profile: ClusterProfile) -> None:
        self._profile = profile
        table = LinkTable(profile)
        self._ends: Dict[bool, List[Tuple[float, float]]] = {True: [], False: []}
        for source in profile.devices:
            for target in profile.devices:
                link = table.between(source.id, target.id) if source.id != target.id else None
                if link is not None:
                    self._ends[source.host == target.host].append((link.latency_s, link.bandwidth_bytes_per_s))

    def has(self, dtype: str) -> bool:
        """Return True if the profile measured every device with this data type."""
        return all(dtype in device.throughput for device in self._profile.devices)

    def memory_bytes(self) -> int:
        """Return the memory that the smallest device may use."""
        return min(device.memory_bytes for device in self._profile.devices)

    def products(self, dtype: str) -> List[Tuple[int, float]]:
        """Return (FLOPs, seconds) on the slowest device, for every size that the profile holds of any device."""
        curves = [device.throughput[dtype] for device in self._profile.devices]
        sizes = sorted({point.flops for curve in curves for point in curve})
        return [(int(flops), max(_product_s(curve, flops) for curve in curves)) for flops in sizes]

    def collective_s(self, op: str, groups: Sequence[Sequence[int]], per_host: int, nbytes: float) -> float:
        """Return the time of one operation on `nbytes` of the full array, by all groups at once.

        Ring algorithms take

            t = p (n - 1) (L + S / (n W))

        for n members, latency L and S bytes. p is 2 laps for an all-reduce and 1 for the others. An all-to-all sends
        S / n^2 to each of n - 1 others. W is the rate of the slowest link inside hosts if no group leaves its host.
        Otherwise W is that of the slowest link between hosts, divided by the number of groups.
        """
        members = len(groups[0])
        if members == 1:
            return 0.0
        inside = all(len({rank // per_host for rank in group}) == 1 for group in groups)
        ends = self._ends[inside] or self._ends[not inside]
        if not ends:
            return 0.0
        sharing = 1 if inside else len(groups)
        latency_s = max(latency for latency, _ in ends)
        rate = min(rate for _, rate in ends) / sharing
        laps = 2 if op == "all-reduce" else 1
        chunk = nbytes / members / (members if op == "all-to-all" else 1)
        return laps * (members - 1) * (latency_s + chunk / rate)


def _product_s(curve: Sequence[MatrixProduct], flops: float) -> float:
    """Return a product's time, scaled from the next smaller size where the device was not measured at this one."""
    smaller = [point for point in curve if point.flops <= flops]
    nearest = max(smaller, key=lambda point: point.flops) if smaller else min(curve, key=lambda point: point.flops)
    return nearest.seconds * max(1.0, flops / nearest.flops)
