"""Measure the rate of each transfer while several devices of one host share its network card."""

from __future__ import annotations

import statistics
from typing import Dict, List, Mapping, Sequence, Tuple

from hwaware.cluster import ConcurrentRate, Link, SharedCard
from hwaware.profiler.devices import Subject
from hwaware.profiler.links import Ends, Transfer, exchange, exchange_bytes, exchanged_rate
from hwaware.profiler.survey import Survey


class Measured:
    """Hold the cards measured so far."""

    def __init__(self) -> None:
        self.cards: Dict[str, SharedCard] = {}

    def records(self) -> Tuple[SharedCard, ...]:
        """Return the cards, by host."""
        return tuple(self.cards.values())


def measure(
    survey: Survey,
    hosts: Mapping[str, Sequence[Subject]],
    ends: Ends,
    links: Mapping[Tuple[str, str], Link],
    measured: Measured,
) -> None:
    """Time 1, 2, 4, ... and all devices of each multi-device host while they send at once, then receive at once.

    `links` has all links between hosts, also those of earlier measurements, by their ends.
    """
    several = [host for host, members in hosts.items() if len(members) > 1 and len(hosts) > 1]
    if not several:
        return
    survey.phase("Timing shared cards", len(several))
    for host in several:
        partners = _partners(host, hosts)
        sent = _rates(survey, hosts[host], partners, ends, links, sends=True)
        received = _rates(survey, hosts[host], partners, ends, links, sends=False)
        if sent and received:
            measured.cards[host] = SharedCard(
                host=host,
                devices=tuple(subject.id for subject in hosts[host]),
                send_bytes_per_s=max(k * rate for k, rate in sent.items()),
                receive_bytes_per_s=max(k * rate for k, rate in received.items()),
                concurrent=tuple(ConcurrentRate(k=k, bytes_per_s=rate) for k, rate in sent.items()),
            )
        survey.step()


def _partners(host: str, hosts: Mapping[str, Sequence[Subject]]) -> List[Subject]:
    """Return the other hosts' devices, the first of each host first, so that transfers use many different cards."""
    others = [members for name, members in hosts.items() if name != host]
    longest = max(len(members) for members in others)
    return [members[place] for place in range(longest) for members in others if place < len(members)]


def counts(most: int) -> List[int]:
    """Return the numbers of simultaneous transfers to measure: powers of two, and `most`.

    Example:
        >>> counts(6)
        [1, 2, 4, 6]
    """
    return sorted({*(1 << bit for bit in range(most.bit_length()) if 1 << bit <= most), most})


def _rates(
    survey: Survey,
    members: Sequence[Subject],
    partners: Sequence[Subject],
    ends: Ends,
    links: Mapping[Tuple[str, str], Link],
    sends: bool,
) -> Dict[int, float]:
    """Return the rate of each transfer [bytes/s] by the number of simultaneous transfers."""
    rates: Dict[int, float] = {}
    for k in counts(min(len(members), len(partners))):
        transfers = []
        for own, partner in list(zip(members, partners))[:k]:
            hosts = own.member.host, partner.member.host
            link = links.get(hosts if sends else hosts[::-1])
            if link is not None:
                nbytes = exchange_bytes(link.bandwidth_bytes_per_s, survey.policy.exchange_s / k)
                transfers.append(Transfer(own, partner, *((nbytes, 0) if sends else (0, nbytes))))
        done = exchange(survey, transfers, ends) if len(transfers) == k else []
        if len(done) == k:
            rates[k] = statistics.fmean(exchanged_rate(max(t.out_bytes, t.back_bytes), s) for t, s in done)
    return rates
