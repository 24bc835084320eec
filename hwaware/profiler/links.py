"""Measure directed pairs of hosts, in rounds of disjoint pairs: each direction, then both at once.

Inside a host, measure each pair of accelerators: some pairs may have a connection of their own, such as NVLink.
Devices that are shares of a processor all reach each other through its memory, so one pair stands for all.
"""

from __future__ import annotations

import time
from itertools import chain, zip_longest
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import msgspec

from hwaware.cluster import Link
from hwaware.profiler.crew import Failure
from hwaware.profiler.devices import Subject
from hwaware.profiler.flags import UNSTEADY
from hwaware.profiler.policy import MIB
from hwaware.profiler.rounds import rounds
from hwaware.profiler.summary import link
from hwaware.profiler.survey import Survey
from hwaware.reference_kernel import reference_s

Pair = Tuple[Subject, Subject]

# Number of messages of an exchange: several, so that one arrives while the next is on its way.
_EXCHANGE_COUNT = 4
_LONGEST_EXCHANGE_BYTES = 64 * MIB
# A pair of accelerators has a link of its own in the profile if its rate differs by more from the first pair's.
_ALIKE = 0.1
_STEADY_LINK = Link(source="", target="", latency_s=0.0, bandwidth_bytes_per_s=1.0)


class Ends:
    """Hold the addresses of the workers' ends of links. An end that failed gets another port."""

    def __init__(self, subjects: Sequence[Subject]) -> None:
        self._ports = {subject.id: int(subject.facts["port"]) for subject in subjects}

    def address(self, subject: Subject) -> Tuple[str, int]:
        """Return the address and port of a subject's end."""
        return subject.member.address, self._ports[subject.id]

    def renew(self, survey: Survey, subjects: Sequence[Subject]) -> None:
        """Reopen the ends of the subjects that still answer."""
        present = [subject for subject in subjects if not survey.is_lost(subject.member)]
        pending = [survey.begin(subject.member, "reopen") for subject in present]
        for subject, port in zip(present, survey.gather(pending, survey.policy.message_limit_s)):
            if isinstance(port, Failure):
                survey.flag_failure(port, (subject.member.host,), (subject.member.host,))
            else:
                self._ports[subject.id] = int(port)


class Transfer(NamedTuple):
    """Messages of `out_bytes` from source to target, and messages of `back_bytes` back at the same time."""

    source: Subject
    target: Subject
    out_bytes: int
    back_bytes: int


class Measured:
    """Hold the links measured so far, and the reference kernel's time before each round."""

    def __init__(self) -> None:
        self.links: Dict[Tuple[str, str], Link] = {}
        self.inside: Dict[Tuple[str, str], str] = {}  # two devices of one host -> the host
        self.references_s: List[float] = []
        self.unfinished: Set[str] = set()  # hosts with devices that are still to be timed with each other

    def records(self) -> Tuple[Link, ...]:
        """Return the links, sorted by their ends, without pairs inside a host that are like its first pair.

        Pairs of an unfinished host are left out, too: a pair that is absent later counts as like the first.
        """
        kept = (ends for ends, one in self.links.items() if not self._is_left_out(ends, one))
        return tuple(self.links[ends] for ends in sorted(kept))

    def _is_left_out(self, ends: Tuple[str, str], one: Link) -> bool:
        host = self.inside.get(ends)
        if {host, *ends} & self.unfinished and (host is not None or ends[0] == ends[1]):
            return True
        first = None if host is None else self.links.get((host, host))
        if first is None:
            return False
        return abs(one.bandwidth_bytes_per_s - first.bandwidth_bytes_per_s) <= _ALIKE * first.bandwidth_bytes_per_s


def by_host(subjects: Sequence[Subject]) -> Dict[str, List[Subject]]:
    """Return the subjects of each host."""
    found: Dict[str, List[Subject]] = {}
    for subject in subjects:
        found.setdefault(subject.member.host, []).append(subject)
    return found


def schedule(
    hosts: Mapping[str, Sequence[Subject]], wanted: Callable[[Subject, Subject], bool] = lambda source, target: True
) -> List[List[Pair]]:
    """Return the pairs to measure at the same time, round after round.

    The first devices of n hosts meet in n - 1 rounds (n if n is odd). Then all hosts with several devices measure
    at once: first their first two devices, then the other pairs of accelerators.
    """
    ends = [members[0] for members in hosts.values()]
    plan = [list(pairs) for pairs in rounds(ends)]
    inside = [_rounds_inside(members) for members in hosts.values() if len(members) > 1]
    plan += [list(chain.from_iterable(at_once)) for at_once in zip_longest(*inside, fillvalue=())]
    chosen = [[(a, b) for a, b in pairs if wanted(a, b)] for pairs in plan]
    return [pairs for pairs in chosen if pairs]


def _rounds_inside(members: Sequence[Subject]) -> List[List[Pair]]:
    """Return the pairs of one host's devices to measure, round after round; the first two devices come first."""
    first = members[0], members[1]
    if first[0].facts["is_processor"]:
        return [[first]]
    left = [[(a, b) for a, b in pairs if {a.id, b.id} != {one.id for one in first}] for pairs in rounds(members)]
    return [[first], *(pairs for pairs in left if pairs)]


def measure(survey: Survey, plan: Sequence[Sequence[Pair]], ends: Ends, measured: Measured) -> None:
    """Time every pair of the plan, and add the links to `measured`."""
    if not plan:
        return
    survey.phase("Timing links", len(plan))
    for number, pairs in enumerate(plan):
        measured.unfinished = {a.member.host for one in plan[number:] for a, b in one if a.member.host == b.member.host}
        measured.references_s.append(reference_s(repeats=1))
        between = [(a, b) for a, b in pairs if a.member.host != b.member.host]
        inside = [(a, b) for a, b in pairs if a.member.host == b.member.host]
        _time_pairs(survey, [*between, *inside], ends, measured)
        _time_pairs(survey, [(b, a) for a, b in between], ends, measured)
        _both_at_once(survey, between, ends, measured)
        survey.step()
    measured.unfinished = set()
    _retake(survey, plan, ends, measured)


def doubtful(link: Link) -> bool:
    """Return True if something disturbed the link's times: they scatter, or longer messages have a lower rate.

    Example:
        >>> from hwaware.cluster import LinkSample
        >>> times = (LinkSample(bytes=4e6, seconds=0.04), LinkSample(bytes=16e6, seconds=0.18))
        >>> doubtful(Link(source="a", target="b", latency_s=0.0, bandwidth_bytes_per_s=9e7, samples=times))
        True
    """
    spread = (link.evidence or {}).get("bytes_per_s", {})
    rates = [sample.bytes / sample.seconds for sample in link.samples[-2:] if sample.bytes >= MIB]
    return bool(spread.get("cv", 0.0) > UNSTEADY or (len(rates) > 1 and rates[1] < (1 - UNSTEADY) * rates[0]))


def _retake(survey: Survey, plan: Sequence[Sequence[Pair]], ends: Ends, measured: Measured) -> None:
    """Time doubtful directions once more, within the policy's `retake_s`. The steadier timing counts."""
    deadline = time.monotonic() + survey.policy.retake_s
    for pairs in plan:
        for ordered in (list(pairs), [(b, a) for a, b in pairs if a.member.host != b.member.host]):
            again = [pair for pair in ordered if doubtful(measured.links.get(_key(pair), _STEADY_LINK))]
            if not again or time.monotonic() > deadline:
                continue
            before = {_key(pair): measured.links[_key(pair)] for pair in again}
            _time_pairs(survey, again, ends, measured)
            for of, first in before.items():
                second = measured.links[of]
                if _scatter(first) <= _scatter(second):
                    measured.links[of] = first
                else:
                    both = {key: value for key, value in (first.evidence or {}).items() if key == "both_bytes_per_s"}
                    evidence = {**(second.evidence or {}), **both, "timings": 2}
                    measured.links[of] = msgspec.structs.replace(second, evidence=evidence)


def _scatter(link: Link) -> float:
    return float((link.evidence or {}).get("bytes_per_s", {}).get("cv", 0.0)) + float(doubtful(link))


def exchange(survey: Survey, transfers: Sequence[Transfer], ends: Ends) -> List[Tuple[Transfer, float]]:
    """Run all these transfers at once. Return those that succeeded, with their times [s]."""
    transfers = [t for t in transfers if not survey.is_lost(t.source.member) and not survey.is_lost(t.target.member)]
    limit_s = survey.policy.message_limit_s
    pending = []
    for number, (a, b, out_bytes, back_bytes) in enumerate(transfers):
        name = f"exchange {number} {a.id} {b.id}"
        for role, one, other, out, back in ((0, a, b, out_bytes, back_bytes), (1, b, a, back_bytes, out_bytes)):
            arguments = (name, role, ends.address(other), out, back, _EXCHANGE_COUNT, limit_s)
            pending.append(survey.begin(one.member, "exchange", *arguments))
    results = survey.gather(pending, survey.policy.direction_limit_s)
    timed = [(t, _exchange_s(survey, t, results[2 * n : 2 * n + 2], ends)) for n, t in enumerate(transfers)]
    return [(transfer, seconds) for transfer, seconds in timed if seconds is not None]


def exchange_bytes(bytes_per_s: float, seconds: float) -> int:
    """Return the size of each message [bytes] of an exchange that takes about `seconds`."""
    return max(1, min(_LONGEST_EXCHANGE_BYTES, int(bytes_per_s * seconds / _EXCHANGE_COUNT)))


def exchanged_rate(nbytes: int, seconds: float) -> float:
    """Return the rate of an exchange of messages of `nbytes` [bytes/s]."""
    return nbytes * _EXCHANGE_COUNT / seconds


def _exchange_s(survey: Survey, transfer: Transfer, both: Sequence[Any], ends: Ends) -> Optional[float]:
    source, target = transfer.source, transfer.target
    if any(isinstance(result, Failure) for result in both):
        for result in both:
            if isinstance(result, Failure):
                survey.flag_failure(result, _hosts((source, target)), _only(source, target))
        ends.renew(survey, (source, target))
        return None
    _note_corrupt(survey, target, source, both[0]["corrupt"])  # the receiver says which messages changed
    _note_corrupt(survey, source, target, both[1]["corrupt"])
    seconds: Optional[float] = both[0]["seconds"]  # None where a clock jumped
    return seconds


def _time_pairs(survey: Survey, pairs: Sequence[Pair], ends: Ends, measured: Measured) -> None:
    present = [(a, b) for a, b in pairs if not survey.is_lost(a.member) and not survey.is_lost(b.member)]
    policy = survey.policy
    timings, answers = [], []
    for source, target in present:
        name = f"{source.id}>{target.id}"
        limits = policy.message_limit_s
        answers.append(survey.begin(target.member, "answer", name, ends.address(source), limits))
        arguments = (name, ends.address(target), policy.portable(), limits)
        timings.append(survey.begin(source.member, "time_messages", *arguments))
    # Gather both ends together: then the end that failed reports the failure, not the end that waited.
    results = survey.gather([*timings, *answers], policy.direction_limit_s)
    for (source, target), timing, answered in zip(present, results, results[len(present) :]):
        _keep(survey, source, target, timing, answered, ends, measured)


def _keep(
    survey: Survey, source: Subject, target: Subject, timing: Any, answered: Any, ends: Ends, measured: Measured
) -> None:
    failures = [result for result in (timing, answered) if isinstance(result, Failure)]
    for failure in failures:
        survey.flag_failure(failure, _hosts((source, target)), _only(source, target))
    if failures:
        ends.renew(survey, (source, target))
    if not isinstance(timing, Failure):
        _note_corrupt(survey, source, target, timing.get("corrupt", ()))
        key = _key((source, target))
        measured.links[key] = link(*key, timing)
        if key == (source.id, target.id):
            measured.inside[key] = source.member.host


def _both_at_once(survey: Survey, pairs: Sequence[Pair], ends: Ends, measured: Measured) -> None:
    """Time each direction while the other is busy too, with messages that take equally long alone."""
    transfers = []
    for source, target in pairs:
        there, back = (measured.links.get(_hosts(pair)) for pair in ((source, target), (target, source)))
        if there is not None and back is not None:
            sizes = [exchange_bytes(one.bandwidth_bytes_per_s, survey.policy.exchange_s) for one in (there, back)]
            transfers.append(Transfer(source, target, sizes[0], sizes[1]))
    for transfer, seconds in exchange(survey, transfers, ends):
        hosts = _hosts((transfer.source, transfer.target))
        for ends_of, nbytes in ((hosts, transfer.out_bytes), (hosts[::-1], transfer.back_bytes)):
            one = measured.links[ends_of]
            evidence = {**(one.evidence or {}), "both_bytes_per_s": exchanged_rate(nbytes, seconds)}
            measured.links[ends_of] = msgspec.structs.replace(one, evidence=evidence)


def _note_corrupt(survey: Survey, source: Subject, target: Subject, corrupt: Sequence[Sequence[int]]) -> None:
    if corrupt:
        nbytes, place = corrupt[0]
        hosts = _hosts((source, target))
        what = (
            f"{len(corrupt)} of the messages from {hosts[0]} to {hosts[1]} arrived changed; in one of {nbytes} bytes, "
            f"byte {place} was the first that differed. Do not train over this link. To fix: check its cables, cards "
            "and drivers, and the memory of both hosts."
        )
        survey.flag("corrupt", hosts, what, _only(source, target))


def _key(pair: Pair) -> Tuple[str, str]:
    """Return the ends of a pair's link: the hosts, or two accelerators of one host beside its first two."""
    (source, target), hosts = pair, _hosts(pair)
    is_other = {source.member.device_index, target.member.device_index} != {0, 1}
    return (source.id, target.id) if hosts[0] == hosts[1] and is_other and not source.facts["is_processor"] else hosts


def _hosts(pair: Pair) -> Tuple[str, str]:
    return pair[0].member.host, pair[1].member.host


def _only(source: Subject, target: Subject) -> Tuple[str, ...]:
    return ("+".join(_hosts((source, target))),)
