"""Find the links between devices, and price messages over them."""

from __future__ import annotations

from typing import Dict, List, Optional, Sequence, Tuple

import numpy as np
from msgspec.structs import replace

from hwaware.cluster import ClusterProfile, Device, Link, LinkTable
from hwaware.costs.curves import BoolArray, FloatArray, IntArray, log_log_interpolate, monotone_curve


class Links(LinkTable):
    """Find the links of a cluster, one by one or all at once."""

    def __init__(self, profile: ClusterProfile) -> None:
        super().__init__(profile)
        self.by_device = any(source in self._hosts for source, _ in self._links)  # a link joins devices, not hosts

    def numbered(self, names: Sequence[str]) -> Tuple[IntArray, List[Link]]:
        """Return the links, and for all pairs of devices `between` as places among them, [n, n]; -1 without a link.

        The diagonal holds what `between` returns for a device and itself.
        """
        hosts = list(dict.fromkeys(self._hosts[name] for name in names))
        own = {host: place for place, host in enumerate(hosts)}
        at = np.array([own[self._hosts[name]] for name in names], dtype=np.int64)
        between = self._places(hosts)[at[:, None], at[None, :]]
        if self.by_device:
            direct = self._places(names)
            between = np.where(direct >= 0, direct, between)
        return between, list(self._links.values())

    def on_one_host(self, names: Sequence[str]) -> BoolArray:
        """Return for all pairs of devices if both are on one host, [n, n]."""
        hosts = np.unique([self._hosts[name] for name in names], return_inverse=True)[1].reshape(-1)
        same: BoolArray = hosts[:, None] == hosts[None, :]
        return same

    def _places(self, ends: Sequence[str]) -> IntArray:
        places = np.full((len(ends), len(ends)), -1, dtype=np.int64)
        own = {end: place for place, end in enumerate(ends)}
        for place, (source, target) in enumerate(self._links):
            if source in own and target in own:
                places[own[source], own[target]] = place
        return np.where(places >= 0, places, places.T)


class BestOfKinds(Links):
    """Make every link as good as the best one between devices of the same two kinds.

    With `inside_hosts_apart`, links inside hosts and links between hosts do not count as one another.
    """

    def __init__(self, profile: ClusterProfile, inside_hosts_apart: bool = True) -> None:
        super().__init__(profile)
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(d.kind for d in profile.devices))}
        self._kinds = {device.id: kinds[device.kind] for device in profile.devices}
        self._apart = inside_hosts_apart
        names = list(self._kinds)
        places, links = super().numbered(names)
        self.by_device = False
        np.fill_diagonal(places, -1)
        # A link joins many devices: one pair of each two kinds stands for all.
        one, other, inside = self._keys(names)
        keys = ((places * len(kinds) + one) * len(kinds) + other) * 2 + inside
        known = places >= 0
        _, firsts = np.unique(keys[known], return_index=True)
        best: Dict[Tuple[int, int, int], Link] = {}
        for i, j in np.argwhere(known)[firsts].tolist():
            link, at = links[places[i, j]], (one[i, 0], other[0, j], inside[i, j])
            rate = max([link.bandwidth_bytes_per_s, *(x.bytes / x.seconds for x in link.samples)])
            latency = 0.0 if link.samples else link.latency_s
            if at in best:
                rate, latency = max(rate, best[at].bandwidth_bytes_per_s), min(latency, best[at].latency_s)
            best[at] = Link(source=names[i], target=names[j], latency_s=latency, bandwidth_bytes_per_s=rate)
        self._links_of_kinds = list(best.values())
        self._best = np.full((len(kinds), len(kinds), 2), -1, dtype=np.int64)
        self._best[tuple(np.array(list(best), dtype=np.int64).reshape(-1, 3).T)] = np.arange(len(best))

    def _keys(self, names: Sequence[str]) -> Tuple[IntArray, IntArray, IntArray]:
        """Return the kinds of both devices of all pairs, and 1 where they count as inside a host."""
        kinds = np.array([self._kinds[name] for name in names], dtype=np.int64)
        inside = self.on_one_host(names) & self._apart
        return kinds[:, None], kinds[None, :], inside.astype(np.int64)

    def between(self, source: str, target: str) -> Optional[Link]:
        """Return the best link between devices of these two kinds; None if they have none."""
        inside = int(self._apart and self._hosts[source] == self._hosts[target])
        place = int(self._best[self._kinds[source], self._kinds[target], inside])
        return None if place < 0 else self._links_of_kinds[place]

    def numbered(self, names: Sequence[str]) -> Tuple[IntArray, List[Link]]:
        """Return `between` of all pairs, as `Links.numbered` does."""
        return self._best[self._keys(names)], self._links_of_kinds

    def pairs(self, names: Sequence[str]) -> Tuple[Link, ...]:
        """Return a link for each pair of devices, for a small cluster."""
        found = [(one, other, self.between(one, other)) for one in names for other in names if one != other]
        return tuple(replace(link, source=one, target=other) for one, other, link in found if link is not None)


def send_time_s(link: Link, nbytes: FloatArray) -> FloatArray:
    """Return the seconds of messages of n bytes over a directed link that carries nothing else.

        t(n) = log-log interpolation of the samples (n_k, t_k)     for n_1 <= n <= n_m
        t(n) = min(L + n / W, t_1)  below,   max(L + n / W, t_m)  above
        t(n) = L + n / W  without samples

    L is `latency_s` and W `bandwidth_bytes_per_s`. Samples are made monotone first, so more bytes never take less time.

    Example:
        >>> from hwaware.cluster import LinkSample
        >>> link = Link(source="a", target="b", latency_s=1e-3, bandwidth_bytes_per_s=1e6)
        >>> send_time_s(link, np.array([0.0, 1e6])).tolist()
        [0.001, 1.001]
        >>> samples = (LinkSample(bytes=1e4, seconds=0.02), LinkSample(bytes=1e6, seconds=2.0))
        >>> sampled = Link(source="a", target="b", latency_s=1e-3, bandwidth_bytes_per_s=1e6, samples=samples)
        >>> send_time_s(sampled, np.array([1e2, 1e5, 1e7])).round(9).tolist()
        [0.0011, 0.2, 10.001]

    Source: interpolation between measured sizes is within 1 to 3 % on the recorded NCCL curves.
    """
    at = np.asarray(nbytes, dtype=np.float64)
    straight: FloatArray = link.latency_s + at / link.bandwidth_bytes_per_s
    samples = [(sample.bytes, sample.seconds) for sample in link.samples if sample.bytes > 0]
    if not samples:
        return straight
    sizes, seconds = monotone_curve(samples)
    inside = log_log_interpolate(np.maximum(at, sizes[0]), sizes, seconds)
    below = np.minimum(straight, seconds[0])
    above = np.maximum(straight, seconds[-1])
    return np.where(at < sizes[0], below, np.where(at > sizes[-1], above, inside))


def exposed_time_s(link: Link, nbytes: FloatArray, source: Device, target: Device) -> FloatArray:
    """Return the seconds of messages of n bytes, less the head start of the device that waits for them.

        t(n) = send(n) - max(0, h - n / R_s - n / R_t)

    send is `send_time_s`, and h the target's `head_start_s`. A pass that waited for its message takes up to h less, so
    t may be below 0. But no pass gains more than its own time: see `hwaware.costs.evaluate.price_stages`. To process n
    bytes, source and target use up n / R of h. R is `sum_bytes_per_s`. An end without R uses up nothing.

    Example:
        >>> link = Link(source="a", target="b", latency_s=1e-3, bandwidth_bytes_per_s=1e6)
        >>> device = replace(ClusterProfile.uniform().devices[0], head_start_s=8e-3, sum_bytes_per_s=1e7)
        >>> exposed_time_s(link, np.array([5e3, 2e4, 1e6]), device, device).round(6).tolist()
        [-0.001, 0.017, 1.001]

    Source: a quota of processor time is a token bucket (Turner, Rao and Rao, "CPU bandwidth control for CFS", 2010).
    """
    seconds = send_time_s(link, nbytes)
    if not target.head_start_s:
        return seconds
    per_byte_s = sum(1.0 / end.sum_bytes_per_s for end in (source, target) if end.sum_bytes_per_s is not None)
    ahead = np.maximum(0.0, target.head_start_s - np.asarray(nbytes, dtype=np.float64) * per_byte_s)
    return seconds - ahead
