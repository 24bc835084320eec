"""Find the hosts and devices that a measurement file names: in an existing profile, or in a new one."""

from __future__ import annotations

import itertools
import operator
import re
from typing import Dict, List, NamedTuple, Optional, Sequence

from hwaware.cluster import ClusterProfile, Device, Host, Link
from hwaware.dtypes import MEASURED
from hwaware.errors import RecordError, UnusableInputError
from hwaware.interop import nccl_tests
from hwaware.interop.assumptions import ASSUMED
from hwaware.interop.readings import End, FoundDevice, Reading

_MOST_HOSTS = 512
INTO = "import onto a measured profile instead (--into cluster.json)"


class Speed(NamedTuple):
    """Say what to assume of every device of a new profile.

    Attributes:
        flops_per_s: Speed; None means that of `ClusterProfile.uniform`.
        memory_bytes: Memory; None means that of the device's name, as in "A100-SXM4-40GB", else that of `uniform`.
    """

    flops_per_s: Optional[float] = None
    memory_bytes: Optional[int] = None


class KnownPlaces:
    """Find the hosts and devices of an existing profile.

    Args:
        profile: The profile.
    """

    def __init__(self, profile: ClusterProfile) -> None:
        self.profile = profile

    def host(self, end: End, reading: Reading, other: Optional[End] = None) -> str:
        """Return the name of an end's host; for an end without names, the only host or that beside `other`.

        Raises:
            UnusableInputError: The profile has no such host, or several.
        """
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
        raise self._unknown(end, reading)

    def _unknown(self, end: End, reading: Reading) -> UnusableInputError:
        known = ", ".join(host.name for host in self.profile.hosts)
        if not end.names:
            return UnusableInputError(
                f"{reading.file} does not name its {end.role}; the profile has {known}.", f"add --{end.role} NAME."
            )
        if end.option:
            return UnusableInputError(
                f"{end.option} names {end.names[0]}, which the profile does not have; it has {known}.",
                "name one of these hosts.",
            )
        count = f" device {end.device} of" if end.device is not None else ""
        lacks = "0 devices there" if end.device is not None else "no such host"
        renamed = reading.program == nccl_tests.PROGRAM  # its command has no option for one host
        option = f"--rename {end.names[0]}=NAME" if renamed else f"--{end.role} NAME"
        return UnusableInputError(
            f"{reading.program} ran on{count} host {end.names[0]}, the profile has {lacks}.",
            f"give the profile of those hosts; this one has {known}. If the host has another name there, add {option}.",
        )

    def device(self, end: End, reading: Reading) -> str:
        """Return the id of an end's device, its first one if the end is a host.

        Raises:
            UnusableInputError: The profile has no such device.
        """
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


class NewPlaces(KnownPlaces):
    """Make hosts and devices of the names in the files.

    Args:
        readings: One for each file.
        speed: Values to assume of the devices.
    """

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
                raise RecordError(f"The files name more than {_MOST_HOSTS} hosts.", f"{INTO}.")
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
        """Return the first name of an end's host."""
        return self._aliases[self._place(end)][0]

    def device(self, end: End, reading: Reading) -> str:
        """Return the id of an end's device."""
        return f"{self.host(end, reading)}:{end.device or 0}"


def _either(one: FoundDevice, other: FoundDevice) -> FoundDevice:
    """Return the facts of two entries for a device; where both have a fact, the first counts."""
    rate = one.memory_bandwidth_bytes_per_s or other.memory_bandwidth_bytes_per_s
    return FoundDevice(one.end, one.kind or other.kind, rate)
