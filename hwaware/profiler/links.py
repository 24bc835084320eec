"""Measuring every directed pair of hosts, in rounds of disjoint pairs."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from hwaware.cluster import Link
from hwaware.profiler.crew import Crew, Pending
from hwaware.profiler.devices import Subject
from hwaware.profiler.policy import Policy
from hwaware.profiler.progress import Progress
from hwaware.profiler.rounds import rounds
from hwaware.profiler.summary import link
from hwaware.reference_kernel import reference_s

# One answer, and one direction of a pair: a message of the largest size takes under a second.
_ANSWER_LIMIT_S = 30.0
DIRECTION_LIMIT_S = 120.0

Pair = Tuple[Subject, Subject]


def measure(
    crew: Crew, subjects: Sequence[Subject], policy: Policy, progress: Progress
) -> Tuple[Tuple[Link, ...], List[float]]:
    """The links, and the reference kernel's times beside the rounds."""
    by_host: Dict[str, List[Subject]] = {}
    for subject in subjects:
        by_host.setdefault(subject.member.host, []).append(subject)
    plan = schedule(by_host)
    progress.phase("Timing links", len(plan))
    links: List[Link] = []
    references: List[float] = []
    for pairs in plan:
        references.append(reference_s(repeats=1))
        links.extend(_time_pairs(crew, pairs, policy))
        progress.step()
    return tuple(sorted(links, key=lambda one: (one.source, one.target))), references


def schedule(by_host: Dict[str, List[Subject]]) -> List[List[Pair]]:
    """Which (source, target) pairs are timed at the same time, one list after another.

    Hosts meet through their first devices: each round of disjoint pairs in one direction, then in the other. At last
    each host with several devices measures from its first to its second, all hosts at once.
    """
    ends = [members[0] for members in by_host.values()]
    plan: List[List[Pair]] = []
    for pairs in rounds(ends):
        plan.append(list(pairs))
        plan.append([(target, source) for source, target in pairs])
    inside = [(members[0], members[1]) for members in by_host.values() if len(members) > 1]
    return [*plan, inside] if inside else plan


def _time_pairs(crew: Crew, pairs: Sequence[Pair], policy: Policy) -> List[Link]:
    timings: List[Pending] = []
    answers: List[Pending] = []
    for source, target in pairs:
        name = f"{source.id}>{target.id}"
        answers.append(crew.begin(target.member, "answer", name, _address(source), _ANSWER_LIMIT_S))
        timings.append(
            crew.begin(source.member, "time_messages", name, _address(target), policy.portable(), _ANSWER_LIMIT_S)
        )
    # Together: a pair of which one end fails is reported by that end, not by the other's waiting.
    results = crew.collect([*timings, *answers], DIRECTION_LIMIT_S)
    return [link(s.member.host, t.member.host, timing) for (s, t), timing in zip(pairs, results)]


def _address(subject: Subject) -> Tuple[str, int]:
    return subject.member.address, int(subject.facts["port"])
