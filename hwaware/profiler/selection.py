"""Choose the devices and links to measure: all, the named ones, or the missing ones."""

from __future__ import annotations

from typing import Collection, Dict, FrozenSet, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

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
        names: Named hosts and devices. If `names` and `pairs` are empty, the selection is all.
        pairs: Pairs of hosts whose links are named.
        devices: Maps each device that an earlier run measured to its host.
        links: Directed links that an earlier run measured.
        resumed: True if earlier measurements exist.
        symmetric: True if one pair of hosts stands for all pairs whose devices are of the same kinds.
    """

    names: FrozenSet[str]
    pairs: FrozenSet[FrozenSet[str]]
    devices: Mapping[str, str]
    links: FrozenSet[Tuple[str, str]]
    resumed: bool
    symmetric: bool = False

    @classmethod
    def of(cls, only: Sequence[str], earlier: Optional[PartialProfile], symmetric: bool = False) -> Selection:
        """Return the selection of `--only` and `--resume`.

        Args:
            only: Hosts, devices, or HOST+HOST for the links between two hosts.
            earlier: Earlier measurements.
            symmetric: See the attribute.

        Raises:
            UnusableInputError: `only` has a name such as HOST+ or A+B+C, or only links without earlier measurements.
        """
        names, pairs = set(), set()
        for one in only:
            ends = one.split(LINK_SIGN)
            if len(ends) == 1 and one:
                names.add(one)
            elif len(ends) == 2 and all(ends):  # the same host twice: the links inside it
                pairs.add(frozenset(ends))
            else:
                raise UnusableInputError(
                    f"--only {one!r} names nothing.", "give a host, a device, or HOST+HOST for the links between them."
                )
        if pairs and not names and earlier is None:
            raise UnusableInputError(
                f"--only {' '.join(only)} measures links alone, and a profile needs the devices at their ends.",
                f"add --resume FILE, a profile with these devices. Or measure the devices too: --only "
                f"{' --only '.join(sorted({host for pair in pairs for host in pair}))}.",
            )
        devices = {device.id: device.host for device in earlier.devices} if earlier else {}
        links = frozenset((link.source, link.target) for link in earlier.links) if earlier else frozenset()
        return cls(frozenset(names), frozenset(pairs), devices, links, earlier is not None, symmetric)

    @property
    def is_all(self) -> bool:
        """Return True if the user named nothing."""
        return not self.names and not self.pairs

    def participants(self, devices: Mapping[str, Sequence[Optional[str]]]) -> FrozenSet[str]:
        """Return the hosts that take part: all, unless the user named only links.

        Args:
            devices: See `check`. Earlier measurements fill in unknown ids.

        Raises:
            UnusableInputError: As in `check`.
        """
        earlier: Dict[str, List[str]] = {}
        for device, host in self.devices.items():
            earlier.setdefault(host, []).append(device)
        known = {
            host: earlier[host] if None in ids and len(earlier.get(host, ())) == len(ids) else ids
            for host, ids in devices.items()
        }
        self.check(known, "which the cluster does not have")
        return frozenset(devices if self.is_all or self.names else {host for pair in self.pairs for host in pair})

    def check(self, devices: Mapping[str, Sequence[Optional[str]]], lacks: str) -> None:
        """Refuse names that the cluster does not have.

        Args:
            devices: Maps each host to the ids of its devices. An id is None while it is unknown.
            lacks: Reason for the refusal, for the message.

        Raises:
            UnusableInputError: A name is neither a host nor a device of the cluster, or a pair has no link.
        """
        ids = {one for own in devices.values() for one in own}
        known = {one for one in (*devices, *ids) if one is not None}
        names = set() if None in ids else self.names
        paired = sorted({one for pair in self.pairs for one in pair} & (known - set(devices)))
        if paired:
            raise UnusableInputError(
                f"--only names links of {', '.join(paired)}, which are devices, expected hosts.",
                f"name some of {', '.join(sorted(devices))}{_link_form(devices)}.",
            )
        unknown = sorted((names - known) | {host for pair in self.pairs for host in pair.difference(devices)})
        if unknown:
            raise UnusableInputError(
                f"--only names {', '.join(unknown)}, {lacks}.",
                f"name some of {', '.join(sorted(known))}{_link_form(devices)}.",
                found=tuple(unknown),
                expected=tuple(sorted(known)),
            )
        alone = sorted(host for pair in self.pairs if len(pair) == 1 for host in pair if len(devices[host]) < 2)
        if alone:
            raise UnusableInputError(
                f"--only names the links inside {', '.join(alone)}, where there is one device and no link.",
                "name a host with several devices, or HOST+HOST for the links between two.",
            )

    def asks_for(self, subject: Subject) -> bool:
        """Return True if the selection is all, or names that device, its host or a link of its host."""
        host = subject.member.host
        return self.is_all or bool(self.names & {subject.id, host}) or any(host in pair for pair in self.pairs)

    def wants_device(self, subject: Subject) -> bool:
        """Return True if the profiler shall measure that device."""
        if self.is_all:
            return subject.id not in self.devices
        return bool(self.names & {subject.id, subject.member.host})

    def wants_link(self, source: Subject, target: Subject) -> bool:
        """Return True if the profiler shall measure the links between the hosts of these two, in both directions."""
        hosts = source.member.host, target.member.host
        if frozenset(hosts) in self.pairs:
            return True
        known = hosts in self.links and hosts[::-1] in self.links
        if self.is_all or known:
            return self.is_all and not known
        named: List[Set[str]] = [{one.member.host, one.id} & self.names for one in (source, target)]
        return any(named) if self.resumed else all(named)
