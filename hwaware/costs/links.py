"""Look up the links of many pairs of devices at once, and price clusters whose links are the best of their kinds."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple

import msgspec
import numpy as np
import numpy.typing as npt

from hwaware.cluster import ClusterProfile, Link, LinkTable

IntArray = npt.NDArray[np.int64]


class Links(LinkTable):
    """Find the links of a cluster, one by one or all at once.

    Attributes:
        by_device: True if a link joins two devices, not two hosts.
    """

    def __init__(self, profile: ClusterProfile) -> None:
        super().__init__(profile)
        self.by_device = any(source in self._hosts for source, _ in self._links)

    def numbered(self, names: Sequence[str]) -> Tuple[IntArray, List[Link]]:
        """Return `between` of all pairs: places in the returned list, [n, n], and -1 where two have no link.

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

    def _places(self, ends: Sequence[str]) -> IntArray:
        places = np.full((len(ends), len(ends)), -1, dtype=np.int64)
        own = {end: place for place, end in enumerate(ends)}
        for place, (source, target) in enumerate(self._links):
            if source in own and target in own:
                places[own[source], own[target]] = place
        both: IntArray = np.where(places >= 0, places, places.T)
        return both


class BestOfKinds(Links):
    """Make every link as good as the best one between devices of the same two kinds.

    Args:
        profile: The cluster.
        inside_hosts_apart: Links inside hosts and links between hosts do not count as one another.
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
        self._best = np.full((len(kinds), len(kinds), 2), -1, dtype=np.int64)
        self._links_of_kinds: List[Link] = []
        for source, target in np.argwhere(known)[firsts].tolist():
            self._keep_best(names[source], names[target], links[int(places[source, target])])

    def _keys(self, names: Sequence[str]) -> Tuple[IntArray, IntArray, IntArray]:
        """Return the kinds of both devices of all pairs, and 1 where they count as inside a host."""
        kinds = np.array([self._kinds[name] for name in names], dtype=np.int64)
        _, hosts = np.unique([self._hosts[name] for name in names], return_inverse=True)
        hosts = hosts.reshape(-1)
        inside = (hosts[:, None] == hosts[None, :]) & self._apart
        return kinds[:, None], kinds[None, :], inside.astype(np.int64)

    def _keep_best(self, source: str, target: str, link: Link) -> None:
        one, other = self._kinds[source], self._kinds[target]
        inside = int(self._apart and self._hosts[source] == self._hosts[target])
        rate = max([link.bandwidth_bytes_per_s, *(x.bytes / x.seconds for x in link.samples)])
        latency = 0.0 if link.samples else link.latency_s
        place = int(self._best[one, other, inside])
        if place >= 0:
            known = self._links_of_kinds[place]
            rate, latency = max(rate, known.bandwidth_bytes_per_s), min(latency, known.latency_s)
        else:
            place = self._best[one, other, inside] = len(self._links_of_kinds)
            self._links_of_kinds.append(link)
        best = Link(source=source, target=target, latency_s=latency, bandwidth_bytes_per_s=rate)
        self._links_of_kinds[place] = best

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
        return tuple(
            msgspec.structs.replace(link, source=one, target=other) for one, other, link in found if link is not None
        )
