"""Join the readings of measurement files into a ClusterProfile, a new one or an existing one.

A new profile needs facts that no such file has, above all the speed of the devices. hwaware then assumes them. Each
assumed value is marked: `samples` of a device and `evidence` of a link name it, and a flag of kind "assumed" tells the
reader.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, Container, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

import msgspec

from hwaware.cluster import ClusterProfile, Collective, Flag, Link, LinkTable, collectives_beside
from hwaware.errors import RecordError, UnusableInputError
from hwaware.interop import nccl_tests
from hwaware.interop.assumptions import ASSUMED, LOADED, assumptions, is_under_load, marks
from hwaware.interop.places import INTO, KnownPlaces, NewPlaces, Speed
from hwaware.interop.readings import FoundCollective, FoundLink, Reading
from hwaware.link_flags import asymmetric, slow_links
from hwaware.records import rebuilt

# Kinds of flags that compare a link with others.
_COMPARED = ("slow", "asymmetric")
# Times of an empty message where no file gives one: of a copy between two GPUs without a direct path, and that of
# `ClusterProfile.uniform` between hosts.
INSIDE_LATENCY_S = 1e-5
BETWEEN_LATENCY_S = 1e-4
# PCIe 3.0 x16 in one direction: 16 lanes x 8 GT/s x 128/130 (PCI Express Base Specification 3.0, 4.2.2).
PCIE_BYTES_PER_S = 16 * 8e9 / 8 * 128 / 130
Pair = Tuple[str, str]


def merged(
    readings: Sequence[Reading], profile: Optional[ClusterProfile] = None, speed: Optional[Speed] = None
) -> ClusterProfile:
    """Return a profile with all links and collectives of the readings.

    Args:
        readings: One for each file.
        profile: The profile to add to; a link or collective that it has already is replaced. None makes a new one.
        speed: For a new profile, values to assume of the devices.

    Raises:
        UnusableInputError: The profile lacks a host or device, or two files disagree.
        RecordError: A number is none that hardware can have, or links do not join all devices.
    """
    try:
        places = KnownPlaces(profile) if profile is not None else NewPlaces(readings, speed or Speed())
        base = places.profile
        links = _joined_links(readings, places, base)
        collectives = _joined_collectives(readings, places)
        return _with(base, links, collectives, readings, is_new=profile is None)
    except ValueError as error:
        files = ", ".join(reading.file for reading in readings)
        raise RecordError(
            f"The results in {files} make no cluster: {error}.",
            f"import all files of the cluster in one command, or {INTO}.",
        ) from error


class _Fact(NamedTuple):
    """A rate or a latency of a link, and its origin."""

    value: float
    found: FoundLink
    reading: Reading


class _Draft:
    """Collect the findings about one link.

    Args:
        pair: The ends of the link.
    """

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._rate: Optional[_Fact] = None
        self._latency: Optional[_Fact] = None
        self._loaded_latency_s: Optional[float] = None
        self._nominal: Optional[_Fact] = None
        self.facts: Dict[str, Any] = {}

    @property
    def is_measured(self) -> bool:
        """Return True if a file measured the rate or the latency."""
        return self._rate is not None or self._latency is not None

    def add(self, found: FoundLink, reading: Reading) -> None:
        """Take a finding; refuse a second rate or latency."""
        if found.bytes_per_s is not None:
            self._require_first(self._rate, "rate", reading)
            self._rate = _Fact(found.bytes_per_s, found, reading)
        if found.latency_s is not None:
            self._require_first(self._latency, "latency", reading)
            self._latency = _Fact(found.latency_s, found, reading)
        if found.loaded_latency_s is not None:
            self._loaded_latency_s = found.loaded_latency_s
        if found.nominal_bytes_per_s is not None:
            self._nominal = _Fact(found.nominal_bytes_per_s, found, reading)
        self.facts.update(found.facts or {})

    def _require_first(self, earlier: Optional[_Fact], what: str, reading: Reading) -> None:
        if earlier is not None:
            raise _measured_twice(earlier.reading, reading, f"the {what} from {self._pair[0]} to {self._pair[1]}")

    def made(self, before: Optional[Link], is_inside: bool) -> Link:
        """Return the link; `before` has what was known about its ends."""
        rate, is_rate_assumed = self._chosen_rate(before)
        latency_s, is_latency_assumed, is_loaded = self._chosen_latency(before, is_inside)
        assumed = [*["bandwidth_bytes_per_s"] * is_rate_assumed, *["latency_s"] * is_latency_assumed]
        measured = [fact for fact in (self._rate, self._latency) if fact is not None]
        sources = measured or [fact for fact in (self._nominal,) if fact is not None]
        samples = max((fact.found.samples for fact in sources), key=len)
        if self._rate is not None and len(self._rate.found.samples) < len(samples):
            samples = ()  # times of the latency test are those of small messages; the rate prices long ones
        evidence = {
            "program": " and ".join(dict.fromkeys(fact.reading.program for fact in sources)),
            "file": " and ".join(dict.fromkeys(fact.reading.file for fact in sources)),
            **self.facts,
            **({ASSUMED: assumed} if assumed else {}),
            **({LOADED: True} if is_loaded else {}),
        }
        return Link(
            source=self._pair[0],
            target=self._pair[1],
            latency_s=latency_s,
            bandwidth_bytes_per_s=rate,
            samples=samples,
            evidence=evidence,
        )

    def _chosen_rate(self, before: Optional[Link]) -> Tuple[float, bool]:
        """Return the rate, and True if it is assumed."""
        if self._rate is not None:
            return self._rate.value, False
        if before is not None:
            return before.bandwidth_bytes_per_s, "bandwidth_bytes_per_s" in marks(before.evidence)
        if self._nominal is not None:
            return self._nominal.value, True
        assert self._latency is not None
        raise UnusableInputError(
            f"{self._latency.reading.file} has latencies from {self._pair[0]} to {self._pair[1]}, but no rate.",
            f"give a file with the rate too, in the same command; or {INTO}.",
        )

    def _chosen_latency(self, before: Optional[Link], is_inside: bool) -> Tuple[float, bool, bool]:
        """Return the latency, True if it is assumed, and True if it was measured under load."""
        if self._latency is not None:
            return self._latency.value, False, False
        is_doubtful = before is None or "latency_s" in marks(before.evidence)
        if self._loaded_latency_s is not None and is_doubtful:
            return self._loaded_latency_s, True, True
        if before is not None:
            return before.latency_s, is_doubtful, is_doubtful and is_under_load(before)
        return INSIDE_LATENCY_S if is_inside else BETWEEN_LATENCY_S, True, False


def _measured_twice(earlier: Reading, reading: Reading, what: str) -> UnusableInputError:
    return UnusableInputError(
        f"Both {earlier.file} and {reading.file} measured {what}.",
        "give one of the files, or import them one after the other with --into; the later one then counts.",
    )


def _joined_links(readings: Sequence[Reading], places: KnownPlaces, base: ClusterProfile) -> List[Link]:
    """Return the links of all readings."""
    is_new = isinstance(places, NewPlaces)
    hosts = {device.id: device.host for device in base.devices}
    drafts: Dict[Pair, _Draft] = {}
    for reading in readings:
        for found in reading.links:
            pair = _pair(found, places, reading)
            drafts.setdefault(pair, _Draft(pair)).add(found, reading)
    table = LinkTable(base)
    own = {(link.source, link.target): link for link in base.links}
    made: Dict[Pair, Link] = {}
    for pair, draft in drafts.items():
        is_inside = hosts.get(pair[0], pair[0]) == hosts.get(pair[1], pair[1])
        before = None
        if not is_new:
            before = table.between(*pair) if pair[0] in hosts else own.get(pair, own.get(pair[::-1]))
        if before is not None and not draft.is_measured:
            noted = made.get((before.source, before.target), before)
            made[before.source, before.target] = _noted(noted, pair, draft.facts)
        else:
            made[pair] = draft.made(before, is_inside)
    if is_new:
        made = {**_derived(readings, places, base, made), **made}
    return list(made.values())


def _pair(found: FoundLink, places: KnownPlaces, reading: Reading) -> Pair:
    if found.source.device is not None:
        pair = (places.device(found.source, reading), places.device(found.target, reading))
    else:
        pair = (
            places.host(found.source, reading, found.target),
            places.host(found.target, reading, found.source),
        )
    is_named_twice = found.source.device is None and found.source.names and found.source.names == found.target.names
    devices = [device for device in places.profile.devices if device.host == pair[0]]
    # Two programs of one host measure the link between its devices, if it has several.
    if pair[0] == pair[1] and not (is_named_twice and len(devices) > 1):
        raise UnusableInputError(
            f"{reading.file} measured from {pair[0]} to itself, expected two ends.",
            "measure between two hosts or devices, or name two different ends (--client NAME --server OTHER).",
        )
    return pair


def _noted(link: Link, pair: Pair, facts: Dict[str, Any]) -> Link:
    """Return the link with a note about a pair of devices that it covers; its numbers stay."""
    evidence = dict(link.evidence or {})
    if (link.source, link.target) == pair:
        evidence.update(facts)
    else:
        kinds = evidence.get("connections")
        evidence["connections"] = {
            **(kinds if isinstance(kinds, dict) else {}),
            f"{pair[0]} -> {pair[1]}": facts.get("connection"),
        }
    return msgspec.structs.replace(link, evidence=evidence)


def _derived(
    readings: Sequence[Reading], places: KnownPlaces, base: ClusterProfile, measured: Dict[Pair, Link]
) -> Dict[Pair, Link]:
    """Return links for a new profile where none was measured: by collectives, else those inside hosts."""
    hosts = {device.id: device.host for device in base.devices}
    found: Dict[Pair, Link] = {}
    for reading in readings:
        for one in reading.collectives:
            for link in _ring_links(one, [places.device(end, reading) for end in one.members], hosts, reading):
                before = found.get((link.source, link.target))
                if before is None or before.bandwidth_bytes_per_s < link.bandwidth_bytes_per_s:
                    found[link.source, link.target] = link
    joined = {(hosts.get(a, a), hosts.get(b, b)) for a, b in measured}
    for host, count in Counter(hosts.values()).items():
        if count > 1 and (host, host) not in found and (host, host) not in joined:
            found[host, host] = Link(
                source=host,
                target=host,
                latency_s=INSIDE_LATENCY_S,
                bandwidth_bytes_per_s=PCIE_BYTES_PER_S,
                evidence={ASSUMED: ["bandwidth_bytes_per_s", "latency_s"]},
            )
    directed = {pair for pair in joined if pair[0] != pair[1]}
    return {pair: link for pair, link in found.items() if pair not in measured and not {pair, pair[::-1]} & directed}


def _ring_links(one: FoundCollective, ids: Sequence[str], hosts: Dict[str, str], reading: Reading) -> Iterator[Link]:
    """Yield the links between and inside the hosts of a collective, by its times.

    A ring over all members passes the bus bandwidth over each link. So the slowest link of the group has this rate,
    and every other link has at least this rate. A member waits for as many messages as the ring has hops.
    """
    counts = Counter(hosts[identifier] for identifier in ids)
    n = len(ids)
    first, last = one.points[0], max(one.points, key=lambda point: point.bytes)
    hops = (nccl_tests.bus_factor(one.op, n) or 0.0) * n
    rate = last.bytes / n * hops / last.seconds / (n if one.op == "all-to-all" else 1)
    if rate <= 0:
        return
    for source, target in [*itertools.permutations(counts, 2), *((host, host) for host in counts if counts[host] > 1)]:
        yield Link(
            source=source,
            target=target,
            latency_s=first.seconds / hops,
            bandwidth_bytes_per_s=rate,
            evidence={
                "program": reading.program,
                "file": reading.file,
                "derived_from": f"{one.op} over {n} devices",
                ASSUMED: ["bandwidth_bytes_per_s", "latency_s"],
            },
        )


def _joined_collectives(readings: Sequence[Reading], places: KnownPlaces) -> List[Collective]:
    made: Dict[Tuple[str, Tuple[str, ...], str], Tuple[Collective, Reading]] = {}
    for reading in readings:
        for found in reading.collectives:
            devices = tuple(places.device(end, reading) for end in found.members)
            key = (found.op, devices, found.dtype)
            if key in made:
                what = f"{found.op} of {found.dtype} on {len(devices)} devices"
                raise _measured_twice(made[key][1], reading, what)
            evidence = {"program": reading.program, "file": reading.file}
            one = Collective(op=found.op, devices=devices, dtype=found.dtype, points=found.points, evidence=evidence)
            made[key] = (one, reading)
    return [one for one, _ in made.values()]


def _with(
    base: ClusterProfile,
    links: Sequence[Link],
    collectives: Sequence[Collective],
    readings: Sequence[Reading],
    is_new: bool,
) -> ClusterProfile:
    pairs = {(link.source, link.target) for link in links}
    keys = {(one.op, one.devices, one.dtype) for one in collectives}
    environment = dict(base.environment or {})
    before = environment.get("imports")
    environment["imports"] = [
        *(before if isinstance(before, list) else []),
        *({"program": reading.program, "file": reading.file} for reading in readings),
    ]
    kept = [] if is_new else [link for link in base.links if (link.source, link.target) not in pairs]
    beside = collectives_beside(base, links)
    found = rebuilt(
        base,
        links=(*kept, *links),
        collectives=(*(one for one in beside if (one.op, one.devices, one.dtype) not in keys), *collectives),
        environment=environment,
        flags=tuple(flag for flag in base.flags if flag.kind != ASSUMED and not _is_about(flag, pairs)),
    )
    flags = found.flags
    if links:  # new rates change the medians that all links are compared with
        hosts = {host.name for host in base.hosts}
        kept_flags = (flag for flag in flags if flag.kind not in _COMPARED or not _joins(flag.subjects, hosts))
        flags = (*kept_flags, *_compared(found))
    return rebuilt(found, flags=(*flags, *assumptions(found)))


def _compared(profile: ClusterProfile) -> List[Flag]:
    """Return flags of the links between hosts that are slower than others; assumed rates do not count.

    If devices are assumed, `hwaware profile --resume` would refuse the profile. So these flags name no command.
    """
    hosts = {host.name for host in profile.hosts}
    links = [
        link
        for link in profile.links
        if _joins((link.source, link.target), hosts) and "bandwidth_bytes_per_s" not in marks(link.evidence)
    ]
    flags = [*slow_links(profile.devices, links), *asymmetric(links)]
    is_measured = not any(marks(device.samples) for device in profile.devices)
    return flags if is_measured else [msgspec.structs.replace(flag, only=()) for flag in flags]


def _joins(ends: Sequence[str], hosts: Container[str]) -> bool:
    """Return True if these are the ends of a link between two hosts."""
    return len(ends) == 2 and ends[0] != ends[1] and all(end in hosts for end in ends)


def _is_about(flag: Flag, pairs: Set[Pair]) -> bool:
    """Return True if a flag is about one of these links; a "loaded" flag of two hosts is not."""
    return flag.subjects in pairs and flag.kind != "loaded"
