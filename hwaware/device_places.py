"""Find a profile's devices on the machines of a Ray cluster."""

from __future__ import annotations

from typing import Dict, Tuple

from hwaware.cluster import ClusterProfile
from hwaware.errors import ProfileMismatchError

# (host's Ray address, index of the device on its host)
DevicePlace = Tuple[str, int]


def device_places(profile: ClusterProfile) -> Dict[str, DevicePlace]:
    """Return the place of each device; devices of a host are numbered in the order of the profile.

    Raises:
        ProfileMismatchError: A host has no address, so that nobody can tell which machine it is.

    Example:
        >>> from hwaware.cluster import Host
        >>> import msgspec
        >>> profile = ClusterProfile.uniform(hosts=1, flops_per_s=1e10)
        >>> device_places(msgspec.structs.replace(profile, hosts=(Host(name="h0", address="10.0.0.1"),)))
        {'h0:0': ('10.0.0.1', 0)}
    """
    addresses = {host.name: host.address for host in profile.hosts}
    places: Dict[str, DevicePlace] = {}
    counts: Dict[str, int] = {}
    for device in profile.devices:
        address = addresses[device.host]
        if address is None:
            raise ProfileMismatchError(
                f"Host {device.host!r} of the profile has no address.",
                "add the address under which Ray knows it (`ray status`), or profile the cluster again.",
            )
        index = counts.get(device.host, 0)
        counts[device.host] = index + 1
        places[device.id] = (address, index)
    return places
