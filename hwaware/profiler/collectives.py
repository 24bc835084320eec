"""Measure collectives over the groups of devices that a submesh can have."""

from __future__ import annotations

import statistics
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

from hwaware.cluster import Collective, LinkSample
from hwaware.profiler.crew import Failure
from hwaware.profiler.devices import Subject
from hwaware.profiler.links import Ends, by_host
from hwaware.profiler.rings import OPERATIONS
from hwaware.profiler.survey import Survey

_REPEATS = 3
_DTYPE = "float32"


class Measured:
    """Hold the collectives measured so far."""

    def __init__(self) -> None:
        self.points: Dict[Tuple[str, Tuple[str, ...]], List[LinkSample]] = {}

    def records(self) -> Tuple[Collective, ...]:
        """Return one record for each operation and group."""
        return tuple(
            Collective(op=op, devices=devices, dtype=_DTYPE, points=tuple(points))
            for (op, devices), points in self.points.items()
        )


def groups(hosts: Mapping[str, Sequence[Subject]]) -> List[Tuple[Subject, ...]]:
    """Return the groups to measure: the first 2, 4, 8, ... devices of each host, and groups of 2, 4, 8, ... hosts.

    A group of hosts has one device of each host, or all. The first hosts stand for all groups of as many hosts.
    """
    found: List[Tuple[Subject, ...]] = []
    for members in hosts.values():
        found.extend(tuple(members[:count]) for count in _powers(len(members)))
    lists = list(hosts.values())
    for count in _powers(len(lists)):
        found.append(tuple(members[0] for members in lists[:count]))
        found.append(tuple(member for members in lists[:count] for member in members))
    return list({tuple(subject.id for subject in group): group for group in found}.values())


def _powers(limit: int) -> List[int]:
    return [1 << bit for bit in range(1, limit.bit_length()) if 1 << bit <= limit]


def measure(survey: Survey, subjects: Sequence[Subject], ends: Ends, measured: Measured) -> None:
    """Time every operation over every group in growing sizes, until a size would take too long."""
    if not survey.policy.collective_bytes or len(subjects) < 2:
        return
    chosen = groups(by_host(subjects))
    survey.phase("Timing collectives", len(chosen))
    for group in chosen:
        for op in OPERATIONS:
            _time_sizes(survey, group, op, ends, measured)
        survey.step()


def _time_sizes(survey: Survey, group: Sequence[Subject], op: str, ends: Ends, measured: Measured) -> None:
    points = measured.points.setdefault((op, tuple(subject.id for subject in group)), [])
    for nbytes in survey.policy.collective_bytes:
        if _expected_s(points, nbytes) > survey.policy.longest_message_s:
            break
        point = _time(survey, group, op, nbytes, ends)
        if point is None:
            break
        points.append(point)
    if not points:
        del measured.points[op, tuple(subject.id for subject in group)]


def _expected_s(points: Sequence[LinkSample], nbytes: int) -> float:
    """Return the expected time of a size [s], on the line through the two longest sizes; 0 for the first two sizes.

    Short arrays take about their latency, so one point alone tells nothing about longer arrays.
    """
    if len(points) < 2:
        return 0.0
    before, last = points[-2:]
    per_byte = max(0.0, (last.seconds - before.seconds) / (last.bytes - before.bytes))
    return last.seconds + per_byte * (nbytes - last.bytes)


def _time(survey: Survey, group: Sequence[Subject], op: str, nbytes: int, ends: Ends) -> Optional[LinkSample]:
    """Return the size and time of a collective, or None if it failed or a clock jumped in every repeat."""
    if any(survey.is_lost(subject.member) for subject in group):
        return None
    limit_s = survey.policy.message_limit_s
    name = f"{op} {nbytes} {'+'.join(subject.id for subject in group)}"
    addresses = [ends.address(subject) for subject in group]
    pending = [
        survey.begin(subject.member, "collective", name, rank, addresses, limit_s, op, nbytes, _REPEATS)
        for rank, subject in enumerate(group)
    ]
    results = survey.gather(pending, survey.policy.direction_limit_s)
    failures = [result for result in results if isinstance(result, Failure)]
    for failure in failures:
        survey.flag_failure(failure, tuple(subject.id for subject in group), ())
    if failures:
        ends.renew(survey, group)
        return None
    # A collective ends when its slowest member ends.
    each = [max(times) for times in zip(*(result["seconds"] for result in results)) if None not in times]
    return LinkSample(bytes=results[0]["bytes"], seconds=statistics.median(each)) if each else None
