"""Join the readings of measurement files into a ClusterProfile, a new one or an existing one.

A new profile needs facts that no such file has, above all the speed of the devices. hwaware then assumes them. Each
assumed value is marked: `samples` of a device and `evidence` of a link name it, and a flag of kind "assumed" tells the
reader.
"""

from __future__ import annotations

import itertools
import operator
import re
from typing import Any, Container, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple

import msgspec

from hwaware.cluster import ClusterProfile, Collective, Device, Flag, Host, Link, LinkTable, collectives_beside
from hwaware.dtypes import MEASURED
from hwaware.errors import RecordError, UnusableInputError
from hwaware.formatting import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS, Quantity, text
from hwaware.interop import nccl_tests
from hwaware.interop.readings import End, FoundDevice, FoundLink, Reading
from hwaware.link_flags import asymmetric, slow_links
from hwaware.records import rebuilt

ASSUMED = "assumed"
# Marks a latency that a program took while its stream filled the link.
_LOADED = "latency_under_load"
# Kinds of flags that compare a link with others.
_COMPARED = ("slow", "asymmetric")
# Times of an empty message where no file gives one: of a copy between two GPUs without a direct path, and that of
# `ClusterProfile.uniform` between hosts.
INSIDE_LATENCY_S = 1e-5
BETWEEN_LATENCY_S = 1e-4
# PCIe 3.0 x16 in one direction: 16 lanes x 8 GT/s x 128/130 (PCI Express Base Specification 3.0, 4.2.2).
PCIE_BYTES_PER_S = 16 * 8e9 / 8 * 128 / 130
_MOST_HOSTS = 512
# Directions that one flag names.
_MOST_NAMED = 4
_INTO = "import onto a measured profile instead (--into cluster.json)"
Pair = Tuple[str, str]


class Speed(NamedTuple):
    """Say what to assume of every device of a new profile.

    Attributes:
        flops_per_s: Speed; None means that of `ClusterProfile.uniform`.
        memory_bytes: Memory; None means that of the device's name, as in "A100-SXM4-40GB", else that of `uniform`.
    """

    flops_per_s: Optional[float] = None
    memory_bytes: Optional[int] = None


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
        places = _Known(profile) if profile is not None else _New(readings, speed or Speed())
        base = places.profile
        links = _joined_links(readings, places, base)
        collectives = _joined_collectives(readings, places)
        return _with(base, links, collectives, readings, is_new=profile is None)
    except ValueError as error:
        files = ", ".join(reading.file for reading in readings)
        raise RecordError(
            f"The results in {files} make no cluster: {error}.",
            f"import all files of the cluster in one command, or {_INTO}.",
        ) from error


class _Known:
    """Find the hosts and devices of an existing profile."""

    def __init__(self, profile: ClusterProfile) -> None:
        self.profile = profile

    def host(self, end: End, reading: Reading, other: Optional[End] = None) -> str:
        hosts = self.profile.hosts
        for is_same, name in itertools.product((operator.eq, _same_without_domain), end.names):
            found = [one.name for one in hosts if any(is_same(name, own) for own in (one.name, one.address) if own)]
            if len(found) > 1:
                raise UnusableInputError(
                    f"{reading.program} ran on host {name}, which could be {' or '.join(found)} of the profile.",
                    f"write the host's full name. If the file has the short name, add --rename {name}=NAME.",
                )
            if found:
                return found[0]
        if not end.names and len(hosts) == 1:
            return hosts[0].name
        if not end.names and other is not None and other.names and len(hosts) == 2:
            taken = self.host(other, reading)
            return next(host.name for host in hosts if host.name != taken)
        known = ", ".join(host.name for host in hosts)
        if not end.names:
            option = f"--{end.role}"
            raise UnusableInputError(
                f"{reading.file} does not name its {end.role}; the profile has {known}.", f"add {option} NAME."
            )
        if end.option:
            raise UnusableInputError(
                f"{end.option} names {end.names[0]}, which the profile does not have; it has {known}.",
                "name one of these hosts.",
            )
        count = f" device {end.device} of" if end.device is not None else ""
        lacks = "0 devices there" if end.device is not None else "no such host"
        renamed = reading.program == nccl_tests.PROGRAM  # its command has no option for one host
        option = f"--rename {end.names[0]}=NAME" if renamed else f"--{end.role} NAME"
        raise UnusableInputError(
            f"{reading.program} ran on{count} host {end.names[0]}, the profile has {lacks}.",
            f"give the profile of those hosts; this one has {known}. If the host has another name there, add {option}.",
        )

    def device(self, end: End, reading: Reading) -> str:
        host = self.host(end, reading)
        own = [device.id for device in self.profile.devices if device.host == host]
        index = end.device or 0
        if index >= len(own):
            raise UnusableInputError(
                f"{reading.program} ran on device {index} of host {host}, the profile has {len(own)} devices there.",
                f"give the profile of those hosts; this one has {', '.join(host.name for host in self.profile.hosts)}.",
            )
        return own[index]


def _same_without_domain(name: str, known: str) -> bool:
    """Compare host names where one may lack its domain or the end of it; never parts of addresses."""
    short, long = sorted((name, known), key=len)
    return bool(short) and long.startswith(f"{short}.") and not re.fullmatch(r"[\d.]+", long)


class _New(_Known):
    """Make hosts and devices of the names in the files."""

    def __init__(self, readings: Sequence[Reading], speed: Speed) -> None:
        self._aliases: List[List[str]] = []
        self._devices: List[Dict[int, FoundDevice]] = []
        self._speed = speed
        for reading in readings:
            named = [device.end for device in reading.devices]
            named += [end for link in reading.links for end in (link.source, link.target)]
            named += [end for one in reading.collectives for end in one.members]
            for device in reading.devices:
                self._add(device.end, device)
            for end in dict.fromkeys(named):
                self._add(end, FoundDevice(end))
        super().__init__(self._made())

    def _add(self, end: End, device: FoundDevice) -> None:
        own = self._devices[self._place(end, make=True)]
        if end.device is not None:
            own[end.device] = _either(own.get(end.device, device), device)

    def _place(self, end: End, make: bool = False) -> int:
        names = list(end.names) or [end.role]
        places = [k for k, known in enumerate(self._aliases) if not set(known).isdisjoint(names)]
        if not places:
            assert make
            places = [len(self._aliases)]
            if len(self._aliases) == _MOST_HOSTS:
                raise RecordError(f"The files name more than {_MOST_HOSTS} hosts.", f"{_INTO}.")
            self._aliases.append([])
            self._devices.append({})
        place, *same = places
        for other in reversed(same):  # the end has a name of each, so they are one host
            names += self._aliases.pop(other)
            own = self._devices[place]
            for index, device in self._devices.pop(other).items():
                own[index] = _either(own.get(index, device), device)
        self._aliases[place] += [name for name in names if name not in self._aliases[place]]
        return place

    def _made(self) -> ClusterProfile:
        """Return the hosts and devices, with a link of no meaning between each two, which the caller replaces."""
        given = {name: value for name, value in self._speed._asdict().items() if value is not None}
        [prototype] = ClusterProfile.uniform(hosts=1, **given).devices
        hosts = tuple(self._aliases[k][0] for k in range(len(self._aliases)))
        devices = tuple(
            self._device(prototype, host, index, own.get(index))
            for host, own in zip(hosts, self._devices)
            for index in sorted(own) or [0]
        )
        ends = [*itertools.combinations(hosts, 2), *((host, host) for host in hosts)]
        return ClusterProfile(
            hosts=tuple(Host(name=host) for host in hosts),
            devices=devices,
            links=tuple(Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=1.0) for a, b in ends),
        )

    def _device(self, prototype: Device, host: str, index: int, found: Optional[FoundDevice]) -> Device:
        kind = found.kind if found is not None else ""
        size = re.search(r"\b(\d{1,3})\s?GB\b", kind)
        assumed = ["throughput"]
        memory_bytes = prototype.memory_bytes
        if size is not None and self._speed.memory_bytes is None and int(size.group(1)):
            memory_bytes = int(size.group(1)) * 10**9
        else:
            assumed.append("memory_bytes")
        [curve] = prototype.throughput.values()
        return Device(
            id=f"{host}:{index}",
            host=host,
            kind=kind or "unknown",
            memory_bytes=memory_bytes,
            throughput=dict.fromkeys(MEASURED, curve),
            memory_bandwidth_bytes_per_s=found.memory_bandwidth_bytes_per_s if found is not None else None,
            samples={ASSUMED: assumed},
        )

    def host(self, end: End, reading: Reading, other: Optional[End] = None) -> str:
        return self._aliases[self._place(end)][0]

    def device(self, end: End, reading: Reading) -> str:
        return f"{self.host(end, reading)}:{end.device or 0}"


def _either(one: FoundDevice, other: FoundDevice) -> FoundDevice:
    """Return the facts of two entries for a device; where both have a fact, the first counts."""
    rate = one.memory_bandwidth_bytes_per_s or other.memory_bandwidth_bytes_per_s
    return FoundDevice(one.end, one.kind or other.kind, rate)


class _Draft:
    """Collect the findings about one link."""

    def __init__(self) -> None:
        self.rate: Optional[Tuple[FoundLink, Reading]] = None
        self.latency: Optional[Tuple[FoundLink, Reading]] = None
        self.loaded_latency_s: Optional[float] = None
        self.nominal: Optional[Tuple[FoundLink, Reading]] = None
        self.facts: Dict[str, Any] = {}

    def add(self, found: FoundLink, reading: Reading, pair: Pair) -> None:
        if found.bytes_per_s is not None:
            _require_first(self.rate, reading, f"the rate from {pair[0]} to {pair[1]}")
            self.rate = (found, reading)
        if found.latency_s is not None:
            _require_first(self.latency, reading, f"the latency from {pair[0]} to {pair[1]}")
            self.latency = (found, reading)
        if found.loaded_latency_s is not None:
            self.loaded_latency_s = found.loaded_latency_s
        if found.nominal_bytes_per_s is not None:
            self.nominal = (found, reading)
        self.facts.update(found.facts or {})

    def made(self, pair: Pair, before: Optional[Link], is_inside: bool) -> Link:
        """Return the link; `before` has what was known about its ends."""
        assumed: List[str] = []
        is_loaded = False
        main = self.rate or self.latency or self.nominal
        assert main is not None
        if self.rate is not None:
            rate = self.rate[0].bytes_per_s
        elif before is not None:
            rate = before.bandwidth_bytes_per_s
            assumed += [name for name in _marks(before.evidence) if name == "bandwidth_bytes_per_s"]
        elif self.nominal is not None:
            rate = self.nominal[0].nominal_bytes_per_s
            assumed.append("bandwidth_bytes_per_s")
        else:
            raise UnusableInputError(
                f"{main[1].file} has latencies from {pair[0]} to {pair[1]}, but no rate.",
                f"give a file with the rate too, in the same command; or {_INTO}.",
            )
        if self.latency is not None:
            latency_s = self.latency[0].latency_s
        elif self.loaded_latency_s is not None and (before is None or "latency_s" in _marks(before.evidence)):
            latency_s = self.loaded_latency_s
            assumed.append("latency_s")
            is_loaded = True
        elif before is not None:
            latency_s = before.latency_s
            assumed += [name for name in _marks(before.evidence) if name == "latency_s"]
            is_loaded = _is_under_load(before) and "latency_s" in assumed
        else:
            latency_s = INSIDE_LATENCY_S if is_inside else BETWEEN_LATENCY_S
            assumed.append("latency_s")
        sources = [found for found in (self.rate, self.latency) if found is not None] or [main]
        samples = max((found.samples for found, _ in sources), key=len)
        if self.rate is not None and len(self.rate[0].samples) < len(samples):
            samples = ()  # times of the latency test are those of small messages; the rate prices long ones
        evidence = {
            "program": " and ".join(dict.fromkeys(reading.program for _, reading in sources)),
            "file": " and ".join(dict.fromkeys(reading.file for _, reading in sources)),
            **self.facts,
            **({ASSUMED: assumed} if assumed else {}),
            **({_LOADED: True} if is_loaded else {}),
        }
        assert rate is not None
        assert latency_s is not None
        return Link(
            source=pair[0],
            target=pair[1],
            latency_s=latency_s,
            bandwidth_bytes_per_s=rate,
            samples=samples,
            evidence=evidence,
        )


def _require_first(earlier: Optional[Tuple[FoundLink, Reading]], reading: Reading, what: str) -> None:
    if earlier is not None:
        raise UnusableInputError(
            f"Both {earlier[1].file} and {reading.file} measured {what}.",
            "give one of the files, or import them one after the other with --into; the later one then counts.",
        )


def _joined_links(readings: Sequence[Reading], places: _Known, base: ClusterProfile) -> List[Link]:
    """Return the links of all readings."""
    is_new = isinstance(places, _New)
    hosts = {device.id: device.host for device in base.devices}
    drafts: Dict[Pair, _Draft] = {}
    for reading in readings:
        for found in reading.links:
            pair = _pair(found, places, reading)
            drafts.setdefault(pair, _Draft()).add(found, reading, pair)
    table = LinkTable(base)
    own = {(link.source, link.target): link for link in base.links}
    made: Dict[Pair, Link] = {}
    for pair, draft in drafts.items():
        is_inside = hosts.get(pair[0], pair[0]) == hosts.get(pair[1], pair[1])
        before = None
        if not is_new:
            before = table.between(*pair) if pair[0] in hosts else own.get(pair, own.get(pair[::-1]))
        if draft.rate is None and draft.latency is None and before is not None:
            noted = made.get((before.source, before.target), before)
            made[before.source, before.target] = _noted(noted, pair, draft.facts)
        else:
            made[pair] = draft.made(pair, before, is_inside)
    if is_new:
        made = {**_derived(readings, places, base, made), **made}
    return list(made.values())


def _pair(found: FoundLink, places: _Known, reading: Reading) -> Pair:
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
    readings: Sequence[Reading], places: _Known, base: ClusterProfile, measured: Dict[Pair, Link]
) -> Dict[Pair, Link]:
    """Return links for a new profile where none was measured: those that collectives ran over, else those inside hosts.

    A ring over all members passes the bus bandwidth over each link. So the slowest link of the group has this rate,
    and every other link has at least this rate. A member waits for as many messages as the ring has hops.
    """
    hosts = {device.id: device.host for device in base.devices}
    found: Dict[Pair, Link] = {}
    for reading in readings:
        for one in reading.collectives:
            ids = [places.device(end, reading) for end in one.members]
            crossed = [*dict.fromkeys(hosts[identifier] for identifier in ids)]
            pairs = list(itertools.permutations(crossed, 2))
            pairs += [(host, host) for host in crossed if [hosts[each] for each in ids].count(host) > 1]
            n = len(ids)
            first, last = one.points[0], max(one.points, key=lambda point: point.bytes)
            hops = (nccl_tests.bus_factor(one.op, n) or 0.0) * n
            rate = last.bytes / n * hops / last.seconds / (n if one.op == "all-to-all" else 1)
            for pair in pairs:
                before = found.get(pair)
                if rate > 0 and (before is None or before.bandwidth_bytes_per_s < rate):
                    found[pair] = Link(
                        source=pair[0],
                        target=pair[1],
                        latency_s=first.seconds / hops,
                        bandwidth_bytes_per_s=rate,
                        evidence={
                            "program": reading.program,
                            "file": reading.file,
                            "derived_from": f"{one.op} over {n} devices",
                            ASSUMED: ["bandwidth_bytes_per_s", "latency_s"],
                        },
                    )
    counts = {host.name: sum(device.host == host.name for device in base.devices) for host in base.hosts}
    joined = {(hosts.get(a, a), hosts.get(b, b)) for a, b in measured}
    for host, count in counts.items():
        if count > 1 and (host, host) not in found and (host, host) not in joined:
            evidence = {ASSUMED: ["bandwidth_bytes_per_s", "latency_s"]}
            found[host, host] = Link(
                source=host,
                target=host,
                latency_s=INSIDE_LATENCY_S,
                bandwidth_bytes_per_s=PCIE_BYTES_PER_S,
                evidence=evidence,
            )
    directed = {pair for pair in joined if pair[0] != pair[1]}
    return {pair: link for pair, link in found.items() if pair not in measured and not {pair, pair[::-1]} & directed}


def _joined_collectives(readings: Sequence[Reading], places: _Known) -> List[Collective]:
    made: Dict[Tuple[str, Tuple[str, ...], str], Tuple[Collective, Reading]] = {}
    for reading in readings:
        for found in reading.collectives:
            devices = tuple(places.device(end, reading) for end in found.members)
            key = (found.op, devices, found.dtype)
            if key in made:
                raise UnusableInputError(
                    f"Both {made[key][1].file} and {reading.file} measured {found.op} of {found.dtype} on "
                    f"{len(devices)} devices.",
                    "give one of the files, or import them one after the other with --into; the later one then counts.",
                )
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
    return rebuilt(found, flags=(*flags, *_assumptions(found)))


def _compared(profile: ClusterProfile) -> List[Flag]:
    """Return flags of the links between hosts that are slower than others; assumed rates do not count.

    If devices are assumed, `hwaware profile --resume` would refuse the profile. So these flags name no command.
    """
    hosts = {host.name for host in profile.hosts}
    links = [
        link
        for link in profile.links
        if _joins((link.source, link.target), hosts) and "bandwidth_bytes_per_s" not in _marks(link.evidence)
    ]
    flags = [*slow_links(profile.devices, links), *asymmetric(links)]
    is_measured = not any(_marks(device.samples) for device in profile.devices)
    return flags if is_measured else [msgspec.structs.replace(flag, only=()) for flag in flags]


def _joins(ends: Sequence[str], hosts: Container[str]) -> bool:
    """Return True if these are the ends of a link between two hosts."""
    return len(ends) == 2 and ends[0] != ends[1] and all(end in hosts for end in ends)


def _is_about(flag: Flag, pairs: Set[Pair]) -> bool:
    """Return True if a flag is about one of these links; a "loaded" flag of two hosts is not."""
    return flag.subjects in pairs and flag.kind != "loaded"


def _assumptions(profile: ClusterProfile) -> Iterable[Flag]:
    """Return flags for all values that hwaware assumed; their marks are in the devices and links."""
    devices = [device for device in profile.devices if _marks(device.samples)]
    if devices:
        names = sorted({name for device in devices for name in _marks(device.samples)})
        assumed = [_assumed_text(name, devices) for name in names]
        what = (
            f"No file gives {' and '.join(names)} of {len(devices)} devices, so hwaware assumed "
            f"{' and '.join(assumed)}. Measure the devices before "
            "you believe a plan: hwaware profile."
        )
        yield Flag(kind=ASSUMED, subjects=tuple(device.id for device in devices), what=what)
    for name, quantity in (("bandwidth_bytes_per_s", BYTES_PER_S), ("latency_s", SECONDS)):
        marked = [link for link in profile.links if name in _marks(link.evidence)]
        loaded = [link for link in marked if name == "latency_s" and _is_under_load(link)]
        links = [link for link in marked if name != "latency_s" or not _is_under_load(link)]
        if links:
            is_derived = all("derived_from" in (link.evidence or {}) for link in links)
            verb = "derived it from collectives" if is_derived else "assumed"
            shown = _range(links, name, quantity)
            what = f"No file measures {name} of {_links(links)}, so hwaware {verb}: {shown}."
            yield Flag(kind=ASSUMED, subjects=_ends(links), what=what)
        if loaded:
            what = (
                f"No file measures latency_s of {_links(loaded)} without load, so hwaware took half the round trip "
                f"under load, which may be too long: {_range(loaded, name, SECONDS)}."
            )
            yield Flag(kind=ASSUMED, subjects=_ends(loaded), what=what)
    known = {(link.source, link.target) for link in profile.links}
    one_way = [
        link
        for link in profile.links
        if "file" in (link.evidence or {}) and link.source != link.target and (link.target, link.source) not in known
    ]
    if one_way:
        backs = ", ".join(f"{link.target} -> {link.source}" for link in one_way[:_MOST_NAMED])
        more = f" and {len(one_way) - _MOST_NAMED} more" if len(one_way) > _MOST_NAMED else ""
        what = f"No file measures {backs}{more}, so hwaware uses the rate and latency of the opposite direction."
        yield Flag(kind=ASSUMED, subjects=_ends(one_way), what=what)


def _is_under_load(link: Link) -> bool:
    return (link.evidence or {}).get(_LOADED) is True


def _links(links: Sequence[Link]) -> str:
    return f"{len(links)} link{'s' if len(links) > 1 else ''}"


def _range(links: Sequence[Link], name: str, quantity: Quantity) -> str:
    """Return the smallest and the largest value of a field, with a link of each value; or their common value."""
    ordered = sorted(links, key=lambda link: float(getattr(link, name)))
    ends = {getattr(link, name): f" ({link.source} -> {link.target})" for link in (ordered[0], ordered[-1])}
    return " to ".join(f"{text(value, quantity)}{link if len(ends) > 1 else ''}" for value, link in ends.items())


def _ends(links: Sequence[Link]) -> Tuple[str, ...]:
    return tuple(dict.fromkeys(end for link in links for end in (link.source, link.target)))


def _assumed_text(name: str, devices: Sequence[Device]) -> str:
    """Return the value that hwaware assumed for a field of devices."""
    device = next(device for device in devices if name in _marks(device.samples))
    if name == "memory_bytes":
        return text(device.memory_bytes, BYTES)
    point = next(iter(device.throughput.values()))[0]
    return text(point.flops / point.seconds, FLOPS_PER_S)


def _marks(evidence: Any) -> List[str]:
    found = evidence.get(ASSUMED) if isinstance(evidence, dict) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, (list, tuple)) else []
