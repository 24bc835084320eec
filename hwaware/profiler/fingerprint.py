"""Compare a profile with the running cluster: hosts, devices, their identities and versions, by name."""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Union

from hwaware.cluster import ClusterProfile, PartialProfile, measured_kind
from hwaware.compat.packages import JAX_PACKAGES
from hwaware.errors import ProfileMismatchError

Profile = Union[ClusterProfile, PartialProfile]
# Facts that change the speed of a device. The rest of the environment only tells where numbers come from.
_VERSIONS = (*JAX_PACKAGES, "driver", "clock_mhz", "platform")


def fingerprint(profile: Profile) -> Dict[str, Any]:
    """Return the identity of the measured hardware and software.

    Returns:
        {"hosts": {name: {version}}, "devices": {id: {"host", "kind", "uuid"}}}
    """
    environment = profile.environment or {}
    hosts = environment.get("hosts")
    hosts = hosts if isinstance(hosts, dict) else {}  # a file may say anything here
    return {
        "hosts": {host.name: _versions(hosts.get(host.name)) for host in profile.hosts},
        "devices": {
            one.id: {"host": one.host, "kind": measured_kind(one.kind), "uuid": one.uuid} for one in profile.devices
        },
    }


def differences(measured: Mapping[str, Any], running: Mapping[str, Any]) -> List[str]:
    """Return one sentence for each difference of two fingerprints; facts that one side lacks count as equal.

    Example:
        >>> differences({"hosts": {"a": {"jax": "1"}}, "devices": {}}, {"hosts": {"a": {"jax": "2"}}, "devices": {}})
        ["host a: jax was '1', is '2'"]
    """
    found = [f"host {name} is not there" for name in measured["hosts"] if name not in running["hosts"]]
    found += [f"host {name} was not measured" for name in running["hosts"] if name not in measured["hosts"]]
    for what in ("hosts", "devices"):
        for name, facts in measured[what].items():
            now = running[what].get(name, {})
            for key, value in facts.items():
                if value is not None and now.get(key) is not None and now[key] != value:
                    found.append(f"{what[:-1]} {name}: {key} was {value!r}, is {now[key]!r}")
    missing = [name for name, facts in measured["devices"].items() if facts["host"] in running["hosts"]]
    return found + [f"device {name} is not there" for name in missing if name not in running["devices"]]


def require_same(measured: Mapping[str, Any], running: Mapping[str, Any], what: str = "The profile") -> None:
    """Refuse a profile of another cluster.

    Args:
        measured: Fingerprint of the profile.
        running: Fingerprint of the running cluster.
        what: Name of the profile in the message.

    Raises:
        ProfileMismatchError: The fingerprints differ. The message names each difference.
    """
    found = differences(measured, running)
    if found:
        raise ProfileMismatchError(
            f"{what} is not of the cluster that is running: {'; '.join(found)}.",
            "measure this cluster (hwaware profile -o cluster.json), or connect to the one that was measured.",
        )


def _versions(facts: Any) -> Dict[str, Any]:
    return {key: facts[key] for key in _VERSIONS if key in facts} if isinstance(facts, dict) else {}
