"""Price all-reduces by measured collectives, where a profile has some of the same group or of a like one."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any, Callable, Dict, FrozenSet, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import msgspec
import numpy as np

from hwaware.cluster import ClusterProfile, Collective, Link
from hwaware.costs.collectives import fit_collectives
from hwaware.costs.curves import FloatArray, monotone_curve
from hwaware.costs.gradient_sync import ring_all_reduces_s, ring_pairs
from hwaware.costs.links import Links

# An all-reduce is a reduce-scatter and an all-gather, so curves of either tell what it takes. Sends are links.
TELLING = ("all-reduce", "all-gather", "reduce-scatter")

# Sizes whose times are kept for each group: some ten MiB at most.
MOST_SIZES = 50_000

# For each host, the kinds of a group's devices there.
Layout = FrozenSet[Tuple[str, Tuple[str, ...]]]


class _Measured(NamedTuple):
    """Hold a group with measured collectives: its devices, all-reduces by `predict_s`, and the links of its ring."""

    devices: Tuple[str, ...]
    layout: Layout
    predict_s: Callable[..., float]
    ring: Tuple[Link, ...]


class Found(NamedTuple):
    """Hold places of the measured groups that price a group, and whether one has the same devices."""

    numbers: Tuple[int, ...]
    same: bool = False


class MeasuredGroups:
    """Find the measured groups that price a group's all-reduce, and price it.

    A group takes the time of the measured groups of the first row that has some:

        the same devices                                        t(n)
        equally many devices of each kind on the same hosts     t(n) ring(n) / ring_measured(n)
        equally many devices of each kind on as many hosts      t(n) ring(n) / ring_measured(n)

    t is the measured time, the geometric mean over several groups. The links of the profile price both rings. Curves
    of other data types serve where `dtype` has none.

    Example:
        >>> from hwaware.cluster import LinkSample
        >>> import msgspec
        >>> points = tuple(LinkSample(bytes=size, seconds=size / 1e8) for size in (1e5, 1e6, 1e7))
        >>> sums = Collective(op="all-reduce", devices=("h0:0", "h1:0"), dtype="float32", points=points)
        >>> profile = msgspec.structs.replace(ClusterProfile.uniform(hosts=3, latency_s=0), collectives=(sums,))
        >>> groups = MeasuredGroups(profile, "float32")
        >>> groups.find(("h0:0", "h1:0")), groups.find(("h1:0", "h2:0")), groups.find(("h0:0", "h1:0", "h2:0"))
        (Found(numbers=(0,), same=True), Found(numbers=(0,), same=False), None)
        >>> groups.all_reduces_s(Found((0,)), np.array([0.0, 1e6]), np.array([0.0, 0.002])).round(6).tolist()
        [0.0, 0.02]

    References:
        Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """

    def __init__(self, profile: ClusterProfile, dtype: str) -> None:
        self._places = {device.id: (device.host, device.kind) for device in profile.devices}
        self._hosts = Counter(device.host for device in profile.devices)
        self._groups = _measured_groups(profile, dtype, self._places)
        self._found: Dict[FrozenSet[str], Optional[Found]] = {}
        self._is_least = False

    def __bool__(self) -> bool:
        return bool(self._groups)

    def least(self) -> MeasuredGroups:
        """Return the same groups for lower bounds: they take the least that any group of their size says.

        They take at most the time of the ring, which then has the best links of the cluster.
        """
        made = object.__new__(MeasuredGroups)
        made.__dict__.update(self.__dict__, _found={}, _is_least=True)
        return made

    def find(self, members: Sequence[str]) -> Optional[Found]:
        """Return the measured groups that price a group's all-reduce; None if links price it."""
        if not self._groups or len(members) < 2:
            return None
        key = frozenset(members)
        if key not in self._found:
            self._found[key] = self._find(key)
        return self._found[key]

    def _find(self, devices: FrozenSet[str]) -> Optional[Found]:
        if self._is_least:
            numbers = tuple(k for k, group in enumerate(self._groups) if len(group.devices) == len(devices))
            return Found(numbers) if numbers else None
        layout = _layout(devices, self._places)
        like = [k for k, group in enumerate(self._groups) if _kinds(group.layout) == _kinds(layout)]
        here = [k for k in like if self._groups[k].layout == layout]
        same = [k for k in here if devices == set(self._groups[k].devices)]
        return Found(tuple(same or here or like), bool(same)) if like else None

    def tells_apart(self, device: str) -> Tuple[int, ...]:
        """Return the measured groups for which a device cannot be swapped with a like one.

        Swaps inside a group's hosts change nothing, unless another such group was measured there.
        """
        if self._is_least:
            return ()
        found = []
        for k, group in enumerate(self._groups):
            if device not in group.devices:
                continue
            rivals = [one for one in self._groups if one is not group and _kinds(one.layout) == _kinds(group.layout)]
            alone = self._hosts[self._places[device][0]] == 1
            if any(alone or one.layout == group.layout for one in rivals):
                found.append(k)
        return tuple(found)

    def all_reduces_s(self, found: Found, nbytes: FloatArray, ring_s: FloatArray) -> FloatArray:
        """Return the seconds of all-reduces of n bytes each, by the `found` groups and the seconds of the ring."""
        sizes, places = np.unique(nbytes, return_inverse=True)
        places, groups = places.reshape(-1), [self._groups[number] for number in found.numbers]
        rings_s = np.array([ring_all_reduces_s(sizes, len(group.devices), group.ring) for group in groups])
        measured_s = np.array([[group.predict_s(nbytes=size) for size in sizes.tolist()] for group in groups])
        # Measured time over that of the ring by its links; 1 for no bytes.
        ratios = np.divide(measured_s, rings_s, out=np.ones_like(rings_s), where=sizes > 0)
        if self._is_least:
            ratio = np.minimum(1.0, ratios.min(axis=0))
        elif found.same:
            ratio, ring_s = ratios[0], rings_s[0, places]
        else:
            ratio = np.exp(np.log(ratios).mean(axis=0))
        seconds: FloatArray = ring_s * ratio[places]
        return seconds


def with_links(profile: ClusterProfile, links: Sequence[Link]) -> ClusterProfile:
    """Return the profile with other links, and its measured collectives as these would let them run.

    The ratio of both rings scales each time. Otherwise, a changed link would not change what was measured over it.

    Example:
        >>> from hwaware.cluster import LinkSample
        >>> points = (LinkSample(bytes=1e6, seconds=0.01),)
        >>> sums = Collective(op="all-reduce", devices=("h0:0", "h1:0"), dtype="float32", points=points)
        >>> profile = msgspec.structs.replace(ClusterProfile.uniform(latency_s=0), collectives=(sums,))
        >>> rate = profile.links[0].bandwidth_bytes_per_s
        >>> twice = ClusterProfile.uniform(latency_s=0, bandwidth_bytes_per_s=2 * rate).links
        >>> with_links(profile, twice).collectives[0].points[0].seconds
        0.005
    """
    changed = msgspec.structs.replace(profile, links=tuple(links))
    if not profile.collectives or changed.links == profile.links:  # tables of links take long on large clusters
        return changed
    before, after = Links(profile), Links(changed)
    collectives = []
    for one in profile.collectives:
        sizes = np.array([float(point.bytes) for point in one.points])
        ends = ring_pairs(one.devices)
        old, new = ([found for pair in ends if (found := each.between(*pair)) is not None] for each in (before, after))
        if len(old) == len(new) == len(ends):
            old_s, new_s = (ring_all_reduces_s(sizes, len(one.devices), ring) for ring in (old, new))
            ratios = np.divide(new_s, old_s, out=np.ones_like(old_s), where=old_s > 0).tolist()
            times = zip(one.points, ratios)
            points = tuple(msgspec.structs.replace(point, seconds=point.seconds * ratio) for point, ratio in times)
            one = msgspec.structs.replace(one, points=points)
        collectives.append(one)
    return msgspec.structs.replace(changed, collectives=tuple(collectives))


def _measured_groups(profile: ClusterProfile, dtype: str, places: Dict[str, Tuple[str, str]]) -> List[_Measured]:
    """Return the groups with telling curves, in the order of the profile; those without links cannot hold a stage."""
    if not profile.collectives:
        return []
    links = Links(profile)
    curves: Dict[Tuple[str, ...], List[Collective]] = {}
    for one in profile.collectives:
        if one.op in TELLING and len(one.devices) > 1 and any(point.bytes > 0 for point in one.points):
            # Groups of the same devices in another order are one group: the first one names the ranks.
            same = next((devices for devices in curves if set(devices) == set(one.devices)), one.devices)
            curves.setdefault(same, []).append(one)
    found = []
    for devices, measured in curves.items():
        between = [links.between(*ends) for ends in ring_pairs(devices)]
        ring = tuple(link for link in between if link is not None)
        if len(ring) < len(between):
            continue
        per_host, ranks = _ranks(devices, places)
        dtypes = [one.dtype for one in measured]
        curves_here: List[Dict[str, Any]] = [
            {
                "op": one.op,
                "dtype": one.dtype,
                "devices_per_host": per_host,
                "replica_groups": [ranks],
                "points": list(zip(*monotone_curve((point.bytes, point.seconds) for point in one.points))),
            }
            for one in measured
        ]
        # One size of another operation does not tell how an all-reduce grows with its bytes.
        if not any(curve["op"] == "all-reduce" or len(curve["points"]) > 1 for curve in curves_here):
            continue
        model = fit_collectives(curves_here)
        asked = dtype if dtype in dtypes else dtypes[0]
        predict_s = functools.partial(
            model.predict_s, op="all-reduce", dtype=asked, devices_per_host=per_host, replica_groups=[ranks]
        )
        # Searches ask for the same sizes again and again.
        found.append(_Measured(devices, _layout(devices, places), functools.lru_cache(MOST_SIZES)(predict_s), ring))
    return found


def _layout(devices: Iterable[str], places: Dict[str, Tuple[str, str]]) -> Layout:
    by_host: Dict[str, List[str]] = {}
    for device in devices:
        host, kind = places[device]
        by_host.setdefault(host, []).append(kind)
    return frozenset((host, tuple(sorted(kinds))) for host, kinds in by_host.items())


def _kinds(layout: Layout) -> Tuple[Tuple[str, ...], ...]:
    return tuple(sorted(kinds for _, kinds in layout))


def _ranks(devices: Sequence[str], places: Dict[str, Tuple[str, str]]) -> Tuple[int, Tuple[int, ...]]:
    """Return the most devices of a host, and ranks that put each device on its host."""
    hosts = [places[device][0] for device in devices]
    order, per_host = list(dict.fromkeys(hosts)), max(Counter(hosts).values())
    return per_host, tuple(order.index(host) * per_host + hosts[:k].count(host) for k, host in enumerate(hosts))
