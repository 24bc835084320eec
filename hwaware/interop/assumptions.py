"""Mark values of a profile that no measurement gives, and flag them.

`samples` of a device and `evidence` of a link name the values that hwaware assumed.
"""

from __future__ import annotations

from typing import Any, Iterator, List, Sequence, Tuple

from hwaware.cluster import ClusterProfile, Device, Flag, Link
from hwaware.formatting import BYTES, BYTES_PER_S, FLOPS_PER_S, SECONDS, Quantity, counted, text

ASSUMED = "assumed"
# Marks a latency that a program took while its stream filled the link.
LOADED = "latency_under_load"
# Directions that one flag names.
_MOST_NAMED = 4


def assumptions(profile: ClusterProfile) -> Iterator[Flag]:
    """Yield flags for all values that hwaware assumed; their marks are in the devices and links."""
    yield from _of_devices(profile.devices)
    for name, quantity in (("bandwidth_bytes_per_s", BYTES_PER_S), ("latency_s", SECONDS)):
        marked = [link for link in profile.links if name in marks(link.evidence)]
        loaded = [link for link in marked if name == "latency_s" and is_under_load(link)]
        links = [link for link in marked if name != "latency_s" or not is_under_load(link)]
        yield from _of_links(links, name, quantity)
        if loaded:
            what = (
                f"No file measures latency_s of {counted(len(loaded), 'link')} without load, so hwaware took half the "
                f"round trip under load, which may be too long: {_range(loaded, name, SECONDS)}."
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


def _of_devices(devices: Sequence[Device]) -> Iterator[Flag]:
    names = sorted({name for device in devices for name in marks(device.samples)})
    for name in names:
        marked = [device for device in devices if name in marks(device.samples)]
        what = (
            f"No file gives {name} of {counted(len(marked), 'device')}, so hwaware assumed "
            f"{_assumed_text(name, marked[0])}. Measure the devices before you believe a plan: hwaware profile."
        )
        yield Flag(kind=ASSUMED, subjects=tuple(device.id for device in marked), what=what)


def _of_links(links: Sequence[Link], name: str, quantity: Quantity) -> Iterator[Flag]:
    if links:
        is_derived = all("derived_from" in (link.evidence or {}) for link in links)
        verb = "derived it from collectives" if is_derived else "assumed"
        shown = _range(links, name, quantity)
        what = f"No file measures {name} of {counted(len(links), 'link')}, so hwaware {verb}: {shown}."
        yield Flag(kind=ASSUMED, subjects=_ends(links), what=what)


def is_under_load(link: Link) -> bool:
    """Return True if a program took the link's latency while its stream filled the link."""
    return (link.evidence or {}).get(LOADED) is True


def _range(links: Sequence[Link], name: str, quantity: Quantity) -> str:
    """Return the smallest and the largest value of a field, with a link of each value; or their common value."""
    ordered = sorted(links, key=lambda link: float(getattr(link, name)))
    ends = {getattr(link, name): f" ({link.source} -> {link.target})" for link in (ordered[0], ordered[-1])}
    return " to ".join(f"{text(value, quantity)}{link if len(ends) > 1 else ''}" for value, link in ends.items())


def _ends(links: Sequence[Link]) -> Tuple[str, ...]:
    return tuple(dict.fromkeys(end for link in links for end in (link.source, link.target)))


def _assumed_text(name: str, device: Device) -> str:
    """Return the value that hwaware assumed for a field of a device."""
    if name == "memory_bytes":
        return text(device.memory_bytes, BYTES)
    point = next(iter(device.throughput.values()))[0]
    return text(point.flops / point.seconds, FLOPS_PER_S)


def marks(evidence: Any) -> List[str]:
    """Return the names of the values that hwaware assumed, from `samples` of a device or `evidence` of a link."""
    found = evidence.get(ASSUMED) if isinstance(evidence, dict) else None
    return [name for name in found if isinstance(name, str)] if isinstance(found, (list, tuple)) else []
