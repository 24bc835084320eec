"""Flag links that are slower than others: pure functions from links to flags, for measured and imported profiles."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from typing import Any, Dict, Iterator, List, Sequence, Tuple

from hwaware.cluster import Device, Flag, Link
from hwaware.formatting import BYTES_PER_S, column

# The limit that the documentation promises: two measurements of one thing agree within 5 %.
SLOWER = 0.05
# Twice that: each direction has its own error.
ASYMMETRIC = 0.10
# A median of fewer links says little about a class.
_LEAST_LINKS = 3


def asymmetric(links: Sequence[Link]) -> Iterator[Flag]:
    """Yield a flag for each link that is slower than the link of the opposite direction."""
    known = {(link.source, link.target): link for link in links}
    for link in links:
        back = known.get((link.target, link.source))
        if back is None or link.source == link.target:
            continue
        share = link.bandwidth_bytes_per_s / back.bandwidth_bytes_per_s
        if share < 1 - ASYMMETRIC:
            what = (
                f"Link {link.source} -> {link.target} reaches {share:.0%} of the rate of the other direction "
                f"({_against(link.bandwidth_bytes_per_s, back.bandwidth_bytes_per_s)})."
            )
            yield link_flag("asymmetric", link, what)


def slow_links(devices: Sequence[Device], links: Sequence[Link]) -> Iterator[Flag]:
    """Yield a flag for each link that is slower than the median of those like it.

    Both directions between two hosts may make up half of the links that are alike. Such a median would hide them, so
    all links between hosts serve instead.
    """
    kinds = _host_kinds(devices)
    classes: Dict[Tuple[Any, ...], List[Link]] = {}
    for link in links:
        ends = sorted(kinds.get(end, (end,)) for end in (link.source, link.target))
        classes.setdefault((link.source == link.target, *ends), []).append(link)
    outside = _Peers([link for link in links if link.source != link.target], "links between hosts")
    for (is_inside, *_), members in classes.items():
        alike = _Peers(members, "links between such hosts")
        directions = Counter(frozenset((link.source, link.target)) for link in members)
        for link in members:
            own = directions[frozenset((link.source, link.target))]
            peers = alike if is_inside or 2 * own < len(members) else outside
            share = link.bandwidth_bytes_per_s / peers.median
            if peers.count >= _LEAST_LINKS and share < 1 - SLOWER:
                what = (
                    f"Link {link.source} -> {link.target} reaches {share:.0%} of the median of the {peers.count} "
                    f"{peers.named} ({_against(link.bandwidth_bytes_per_s, peers.median)}).{_steadiness(link)}"
                )
                yield link_flag("slow", link, what)


class _Peers:
    """The links that a link is compared with, and their name."""

    def __init__(self, links: Sequence[Link], named: str) -> None:
        self.count = len(links)
        self.named = named
        self.median = statistics.median(link.bandwidth_bytes_per_s for link in links) if links else math.inf


def _host_kinds(devices: Sequence[Device]) -> Dict[str, Tuple[str, ...]]:
    """Return the kinds of the devices of each host, and of each device."""
    kinds: Dict[str, Tuple[str, ...]] = {}
    for device in devices:
        kinds[device.host] = tuple(sorted((*kinds.get(device.host, ()), device.kind)))
        kinds[device.id] = (device.kind,)
    return kinds


def link_flag(kind: str, link: Link, what: str) -> Flag:
    """Return a flag of a link, with the argument that measures both of its directions again."""
    return Flag(kind=kind, subjects=(link.source, link.target), what=what, only=(f"{link.source}+{link.target}",))


def reached_percent(flag: Flag) -> float:
    """Return the percentage that a flag's subject reaches of what it is compared with; infinity if the flag has none.

    Example:
        >>> reached_percent(Flag(kind="slow", subjects=("a", "b"), what="Link a -> b reaches 7% of the median."))
        7.0
    """
    match = re.search(r"\breaches (\d+)% of ", flag.what)
    return float(match.group(1)) if match is not None else math.inf


def _steadiness(link: Link) -> str:
    """Return how steady the rates of the link's longest messages were, if the profiler noted this."""
    rates = (link.evidence or {}).get("bytes_per_s")
    cv, count = (rates.get("cv"), rates.get("n")) if isinstance(rates, dict) else (None, None)
    if not isinstance(cv, float) or not isinstance(count, int):
        return ""
    return f" The rates of its {count} longest messages differ by {cv:.1%} (coefficient of variation)."


def _against(found: float, expected: float) -> str:
    label, (own, other) = column((found, expected), BYTES_PER_S)
    return f"{own} against {other} {label}"
