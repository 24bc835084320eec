"""Join the parts of a measurement that ended early with the parts that a later one measures."""

from __future__ import annotations

from typing import Any, Callable, Dict, Hashable, List, Optional, Sequence, Set, Tuple, TypeVar

from msgspec.structs import replace

from hwaware.cluster import ClusterProfile, Device, Link, PartialProfile, collectives_beside
from hwaware.profiler.flags import all_flags
from hwaware.records import PathLike, decode_document, read_bytes

T = TypeVar("T")
# Flags that the profiler raises while it measures, because the measurements do not show them.
_SEEN = ("failed", "corrupt", "clock")
_BUSY = ("busy_before", "busy_after")
# Facts that later speeds are compared with. They belong to the moments in which the devices were measured.
_REFERENCE = ("reference_s", "reference_kernel", "reference_samples_s")


def load_any(path: PathLike) -> PartialProfile:
    """Read the measurements in a cluster.json, or in the file of a partial profile.

    Raises:
        RecordError: The file is neither, or is not valid.
    """
    data = read_bytes(path)
    if decode_document(data, str(path)).get("schema") == PartialProfile.SCHEMA:
        return PartialProfile.from_json(data, name=str(path))
    return PartialProfile.of(ClusterProfile.from_json(data, name=str(path)))


def merge(earlier: PartialProfile, later: PartialProfile) -> PartialProfile:
    """Join two measurements. Where both measured the same thing, the later one counts.

    The function computes all flags again. Earlier failures stay until a measurement of their subjects succeeds.
    """
    hosts = _joined(earlier.hosts, later.hosts, lambda host: host.name)
    devices = _joined(earlier.devices, _with_runtime(earlier.devices, later.devices), lambda device: device.id)
    links = _joined(_beside(earlier.links, later.links, devices), later.links, lambda link: (link.source, link.target))
    links.sort(key=lambda link: (link.source, link.target))
    mended: Set[Tuple[str, ...]] = {(link.source, link.target) for link in later.links}
    mended |= {(device.id,) for device in later.devices} | {(device.host,) for device in later.devices}
    kept = collectives_beside(earlier, later.links)  # a link that is measured again may be mended
    mended |= {one.devices for one in earlier.collectives} - {one.devices for one in kept}
    mended |= {one.devices for one in later.collectives}
    old = [flag for flag in earlier.flags if flag.kind in _SEEN and flag.subjects not in mended]
    new = [flag for flag in later.flags if flag.kind in _SEEN]
    environment = _environment(earlier, later)
    return PartialProfile(
        hosts=tuple(hosts),
        devices=tuple(devices),
        links=tuple(links),
        shared_cards=tuple(_joined(earlier.shared_cards, later.shared_cards, lambda card: (card.host, card.devices))),
        collectives=tuple(_joined(kept, later.collectives, lambda c: (c.op, c.devices, c.dtype))),
        driver_s=earlier.driver_s if later.driver_s is None else later.driver_s,
        environment=environment,
        flags=(*old, *new, *all_flags(devices, links, loads(environment))),
    )


def _with_runtime(earlier: Sequence[Device], later: Sequence[Device]) -> List[Device]:
    """Return the later devices with the earlier times of the runtime, which come after all other measurements."""
    before = {device.id: device for device in earlier}
    return [
        device
        if device.id not in before or device.pass_s is not None
        else replace(device, pass_s=before[device.id].pass_s, sum_bytes_per_s=before[device.id].sum_bytes_per_s)
        for device in later
    ]


def _beside(earlier: Sequence[Link], later: Sequence[Link], devices: Sequence[Device]) -> List[Link]:
    """Return the earlier links without those between devices of a host inside which links were measured again."""
    hosts = {device.id: device.host for device in devices}
    again = {link.source for link in later if link.source == link.target}
    return [one for one in earlier if not {hosts.get(one.source)} & {hosts.get(one.target)} & again]


def loads(environment: Optional[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return how busy the hosts were before and after the measurement, in the form that `all_flags` takes."""
    hosts = _hosts(environment or {})
    return [{host: {"busy": _number(facts, key)} for host, facts in hosts.items() if key in facts} for key in _BUSY]


def _number(facts: Dict[str, Any], key: str) -> float:
    """Return the number at `key`, or 0 for anything else: a mistake in a file must not lose new measurements."""
    value = facts.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0


def _hosts(environment: Dict[str, Any]) -> Dict[str, Dict[str, Any]]:
    """Return the facts of each host, without malformed entries: a person may have edited the file."""
    hosts = environment.get("hosts")
    return {name: facts for name, facts in hosts.items() if isinstance(facts, dict)} if isinstance(hosts, dict) else {}


def _joined(earlier: Sequence[T], later: Sequence[T], key: Callable[[T], Hashable]) -> List[T]:
    """Return all values, the earlier ones first. A later value replaces the earlier value of the same key."""
    found = {key(value): value for value in earlier}
    found.update({key(value): value for value in later})
    return list(found.values())


def _environment(earlier: PartialProfile, later: PartialProfile) -> Dict[str, Any]:
    """Return the later facts. Hosts whose devices were not measured again keep their earlier facts."""
    before, after = earlier.environment or {}, later.environment or {}
    found = {**after, "earlier": _history(earlier.environment)}
    again = {device.host for device in later.devices}
    ends = {end for link in later.links for end in (link.source, link.target)}
    hosts = dict(_hosts(after))
    for name, facts in _hosts(before).items():
        if name not in again:
            now = hosts.get(name, {}) if name in ends else {}
            busier = {key: max(_number(facts, key), _number(now, key)) for key in _BUSY if key in now}
            hosts[name] = {**facts, **busier}
    if hosts:
        found["hosts"] = hosts
    if not later.devices:
        found.update({key: before[key] for key in _REFERENCE if key in before})
    return found


def _history(environment: Optional[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """Return when and how the profiler measured the earlier parts."""
    if not environment:
        return []
    earlier = environment.get("earlier", [])
    kept = ("time", "elapsed_s", "command", "reference_s", "reference_kernel")
    own = {key: environment[key] for key in kept if key in environment}
    return [*(earlier if isinstance(earlier, list) else []), own]
