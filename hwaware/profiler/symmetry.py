"""Let one pair of hosts stand for all pairs that the user declares alike."""

from __future__ import annotations

from typing import Callable, Dict, List, Mapping, Sequence, Tuple

import msgspec

from hwaware.profiler.crew import Member
from hwaware.profiler.devices import Subject
from hwaware.profiler.links import Measured, Pair

# Host pair -> the measured host pair that stands for it.
Copies = Dict[Tuple[str, str], Tuple[str, str]]


def representatives(
    plan: Sequence[Sequence[Pair]], hosts: Mapping[str, Sequence[Subject]]
) -> Tuple[List[List[Pair]], Copies]:
    """Return a plan with one pair of hosts for each two kinds, and the copies that the other pairs need.

    Links inside hosts stay: all hosts measure theirs at once, and pairs of devices may differ.

    Args:
        plan: Result of `links.schedule`.
        hosts: The devices of each host.
    """
    kinds = {host: tuple(sorted(str(subject.facts["kind"]) for subject in own)) for host, own in hosts.items()}
    first: Dict[Tuple[Tuple[str, ...], Tuple[str, ...]], Tuple[str, str]] = {}
    copies: Copies = {}
    chosen: List[List[Pair]] = []
    for pairs in plan:
        kept = []
        for source, target in pairs:
            ends = source.member.host, target.member.host
            # Order the hosts by kind, as in the pair that stands for this one, so that directions correspond.
            ordered = ends if kinds[ends[0]] <= kinds[ends[1]] else ends[::-1]
            model = ends if ends[0] == ends[1] else first.setdefault((kinds[ordered[0]], kinds[ordered[1]]), ordered)
            if model == ordered:
                kept.append((source, target))
            else:
                copies[ordered] = model
        if kept:
            chosen.append(kept)
    return chosen, copies


def copy_links(copies: Copies, measured: Measured) -> Copies:
    """Copy the measured links to the unmeasured ones that they stand for; return the copies without an original.

    A copy's evidence names its original.
    """
    for ends, model in copies.items():
        for own, other in ((ends, model), (ends[::-1], model[::-1])):
            link = measured.links.get(other)
            if link is not None and own not in measured.links:
                evidence = {"copied_from": list(other)}
                measured.links[own] = msgspec.structs.replace(link, source=own[0], target=own[1], evidence=evidence)
    return {ends: model for ends, model in copies.items() if model not in measured.links}


def uncopied(plan: Sequence[Sequence[Pair]], copies: Copies, is_lost: Callable[[Member], bool]) -> List[List[Pair]]:
    """Return the pairs of a plan that lack the original of their copy, and whose hosts still answer."""

    def is_left(pair: Pair) -> bool:
        hosts = pair[0].member.host, pair[1].member.host
        is_copy = hosts in copies or hosts[::-1] in copies
        return is_copy and not any(is_lost(subject.member) for subject in pair)

    left = [[pair for pair in pairs if is_left(pair)] for pairs in plan]
    return [pairs for pairs in left if pairs]
