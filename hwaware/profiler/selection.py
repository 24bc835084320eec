"""Which devices and links are to be measured: all, what is named, or what is missing."""

from __future__ import annotations

from typing import Collection, FrozenSet, List, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.cluster import PartialProfile
from hwaware.errors import UnusableInputError
from hwaware.profiler.devices import Subject

LINK_SIGN = "+"


def _link_form(hosts: Collection[str]) -> str:
    """Return how to name the links between two hosts, with the cluster's own hosts as the example."""
    if len(hosts) < 2:
        return ""
    return f", or {LINK_SIGN.join(sorted(hosts)[-2:])} for the links between two hosts"


class Selection(NamedTuple):
    """Choose the devices and links to measure.

    Attributes:
        names: Hosts and devices that were named; none means all.
        pairs: Pairs of hosts whose links were named.
        devices: Devices that are measured already.
        links: Directed links that are measured already.
        resumed: Whether there are earlier measurements at all.
        symmetric: Whether one pair of hosts stands for all whose devices are of the same kinds.
    """

    names: FrozenSet[str]
    pairs: FrozenSet[FrozenSet[str]]
    devices: FrozenSet[str]
    links: FrozenSet[Tuple[str, str]]
    resumed: bool
    symmetric: bool = False

    @classmethod
    def of(cls, only: Sequence[str], earlier: Optional[PartialProfile], symmetric: bool = False) -> Selection:
        """Return the selection of `--only` and `--resume`.

        Args:
            only: Hosts, devices, or HOST+HOST for the links between two hosts.
            earlier: What was measured before.
            symmetric: See above.

        Raises:
            UnusableInputError: Something like HOST+ or A+B+C was named, or links alone with nothing measured before.
        """
        names, pairs = set(), set()
        for one in only:
            ends = one.split(LINK_SIGN)
            if len(ends) == 1 and one:
                names.add(one)
            elif len(ends) == 2 and all(ends):  # HOST+HOST with the same one twice: the links inside it
                pairs.add(frozenset(ends))
            else:
                raise UnusableInputError(
                    f"--only {one!r} names nothing.", "give a host, a device, or HOST+HOST for the links between them."
                )
        if pairs and not names and earlier is None:
            raise UnusableInputError(
                f"--only {' '.join(only)} measures links alone, and a profile needs the devices at their ends.",
                "add --resume FILE with these, or name the hosts: their devices and the links between them.",
            )
        devices = frozenset(device.id for device in earlier.devices) if earlier else frozenset()
        links = frozenset((link.source, link.target) for link in earlier.links) if earlier else frozenset()
        return cls(frozenset(names), frozenset(pairs), devices, links, earlier is not None, symmetric)

    @property
    def is_all(self) -> bool:
        """Return True if nothing was named."""
        return not self.names and not self.pairs

    def hosts(self) -> Optional[FrozenSet[str]]:
        """Return the only hosts that take part; None if that is known only when all have answered."""
        if self.is_all or self.names:
            return None
        return frozenset(host for pair in self.pairs for host in pair)

    def check(self, subjects: Sequence[Subject]) -> None:
        """Refuse names that nobody has.

        Raises:
            UnusableInputError: A name is neither a host nor a device of the cluster.
        """
        hosts = {subject.member.host for subject in subjects}
        known = hosts | {subject.id for subject in subjects}
        unknown = sorted((self.names - known) | {host for pair in self.pairs for host in pair - hosts})
        if unknown:
            raise UnusableInputError(
                f"--only names {', '.join(unknown)}, which the cluster does not have or which does not answer.",
                f"name some of {', '.join(sorted(known))}{_link_form(hosts)}.",
            )
        on = [subject.member.host for subject in subjects]
        alone = sorted(host for pair in self.pairs if len(pair) == 1 for host in pair if on.count(host) < 2)
        if alone:
            raise UnusableInputError(
                f"--only names the links inside {', '.join(alone)}, where there is one device and no link.",
                "name a host with several devices, or HOST+HOST for the links between two.",
            )

    def asks_for(self, subject: Subject) -> bool:
        """Return True if the selection names that device, its host or a link of its host; also if it names nothing."""
        host = subject.member.host
        return self.is_all or bool(self.names & {subject.id, host}) or any(host in pair for pair in self.pairs)

    def wants_device(self, subject: Subject) -> bool:
        """Return True if that device is to be measured."""
        if self.is_all:
            return subject.id not in self.devices
        return bool(self.names & {subject.id, subject.member.host})

    def wants_link(self, source: Subject, target: Subject) -> bool:
        """Return True if the links between the hosts of these two are to be measured, in both directions."""
        hosts = source.member.host, target.member.host
        if frozenset(hosts) in self.pairs:
            return True
        known = hosts in self.links and hosts[::-1] in self.links
        if self.is_all or known:
            return self.is_all and not known
        named: List[Set[str]] = [{one.member.host, one.id} & self.names for one in (source, target)]
        return any(named) if self.resumed else all(named)
