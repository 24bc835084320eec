"""Find a profile's devices on the machines of a Ray cluster."""

from __future__ import annotations

import functools
import logging
from typing import Any, Collection, Dict, Sequence, Set, Tuple

from hwaware.cluster import ClusterProfile, measured_kind
from hwaware.errors import ProfileMismatchError

# (host's Ray address, index of the device on its host)
DevicePlace = Tuple[str, int]
# A testbed gives each Ray node a resource of this name, with the kind of its devices.
KIND_RESOURCE = "hwaware-kind:"
# And one of this name with the id of each device.
DEVICE_RESOURCE = "hwaware-device:"
LOG = logging.getLogger("hwaware")
_FIX = "profile this cluster: hwaware profile --address HOST:PORT -o cluster.json"


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


def absent(profile: ClusterProfile, available: Collection[DevicePlace]) -> Tuple[str, ...]:
    """Return the devices of a profile that the running cluster lacks.

    Args:
        profile: The profile.
        available: The devices of the running cluster.

    Raises:
        ProfileMismatchError: The running cluster has hosts or devices that the profile does not know.
    """
    places = device_places(profile)
    known, running = ({address for address, _ in some} for some in (places.values(), available))
    if running - known:
        what = f"hosts {sorted(running - known)} run now, the profile knows {sorted(known)}"
        raise ProfileMismatchError(f"The profile is of another cluster: {what}.", _FIX)
    gone = tuple(device for device, place in places.items() if place not in available)
    missing = len(available) - (len(places) - len(gone))
    if missing:
        what = f"{missing} of the {len(available)} devices of the running cluster are not in the profile."
        raise ProfileMismatchError(what, _FIX)
    return gone


def require_same_kinds(profile: ClusterProfile, nodes: Sequence[Dict[str, Any]]) -> None:
    """Refuse the profile of another cluster with the same addresses; warn once of hosts that the cluster lacks.

    Only measured hosts are compared, because people choose the kinds in a profile that they write by hand.

    Args:
        profile: The profile.
        nodes: The hosts of the running cluster, as `ray.nodes()` describes them.

    Raises:
        ProfileMismatchError: A host has devices of another kind than the profile says.
    """
    resources = {node["NodeManagerAddress"]: node.get("Resources", {}) for node in nodes}
    measured = (profile.environment or {}).get("hosts")
    for host in profile.hosts:
        found = _kinds(resources.get(host.address, {}))
        expected = {measured_kind(device.kind) for device in profile.devices if device.host == host.name}
        if found and found != expected and isinstance(measured, dict) and host.name in measured:
            named, running = (", ".join(sorted(some)) for some in (expected, found))
            raise ProfileMismatchError(
                f"The profile names device kind {named} for host {host.name}, found {running} at {host.address}.",
                _FIX,
                found=running,
                expected=named,
            )
    used = {device.host for device in profile.devices}
    lacking = tuple(host.name for host in profile.hosts if host.name in used and host.address not in resources)
    if lacking:
        _warn_of_lacking(lacking)


def _kinds(resources: Dict[str, float]) -> Set[str]:
    return {measured_kind(name[len(KIND_RESOURCE) :]) for name in resources if name.startswith(KIND_RESOURCE)}


@functools.lru_cache(maxsize=None)  # a program compiles several functions
def _warn_of_lacking(hosts: Tuple[str, ...]) -> None:
    names = ", ".join(hosts)
    LOG.warning("The profile also has %s, which this program's cluster lacks: no stage runs there.", names)
