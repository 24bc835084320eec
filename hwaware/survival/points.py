"""Decide when a program copies its state, where the copies go, and to which point it can return."""

from __future__ import annotations

import math
import statistics
from typing import Any, Collection, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.survival.pieces import Name, Piece, covers

# Share of a step's time for which copies may hold the worker's thread.
MOST_OF_STEP = 0.02
# Calls between two points, at most: so many batches are kept, and so many calls are made again.
MOST_CALLS = 64
# An idle host takes copies if the link to it is so many times as fast: a second vault takes memory.
_FASTER = 1.5
# An assumption: mean time [s] between losses of a program that has met none.
FAILURE_S = 10800.0


class Point(NamedTuple):
    """A place between two calls to which the program can return.

    Attributes:
        number: Number of the call before this place; 0 before the first call.
        shapes: All arrays that the program had there, with their shapes.
    """

    number: int
    shapes: Mapping[Name, Tuple[int, ...]]


def young_s(copy_s: float, failure_s: float) -> float:
    """Return the time between two copies that loses the least to copies and to repeated work [s].

    It is the square root of 2 copy_s failure_s. Source: J. W. Young, "A first order approximation to the optimum
    checkpoint interval", Communications of the ACM 17(9), 1974.

    Args:
        copy_s: Seconds that a copy takes.
        failure_s: Mean seconds from one loss to the next.

    Example:
        >>> young_s(0.5, 3600.0)
        60.0
    """
    return math.sqrt(2 * copy_s * failure_s)


def interval(copy_s: float, step_s: float, failure_s: float = FAILURE_S) -> int:
    """Return after how many calls to copy the state again: each, if copies fit; else by Young's formula.

    Args:
        copy_s: Seconds that copying and sending take from a worker.
        step_s: Seconds of a step.
        failure_s: Mean seconds from one loss to the next.

    Example:
        Copies of 10 ms may come with every step of 0.5 s. Those of steps of 0.4 s come every 2 s, where a host is lost
        every 200 s:

        >>> interval(0.010, 0.5), interval(0.010, 0.4, 200.0)
        (1, 5)
    """
    if step_s <= 0 or copy_s <= MOST_OF_STEP * step_s:
        return 1
    return max(1, min(MOST_CALLS, math.ceil(young_s(copy_s, failure_s) / step_s - 1e-9)))


def interval_of(costs: Sequence[Tuple[float, float]], failure_s: float = FAILURE_S) -> int:
    """Return the interval for the medians of several points: a single one may have met a busy machine.

    Args:
        costs: For each point, the seconds that copying and sending take from a worker, and those of a step.
        failure_s: Mean seconds from one loss to the next.

    Example:
        >>> interval(0.4, 0.5), interval_of([(0.010, 0.5), (0.4, 0.5), (0.010, 0.5)])
        (64, 1)
    """
    copy_s, step_s = (statistics.median(each) for each in zip(*costs))
    return interval(copy_s, step_s, failure_s)


def buddies(hosts: Sequence[str], rates: Mapping[Tuple[str, str], float]) -> Dict[str, Optional[str]]:
    """Return the host that holds each host's second copy: the one with the fastest link; None for a single host.

    Args:
        hosts: Hosts that have vaults.
        rates: Bytes per second from host to host, as far as known.

    Example:
        >>> buddies(["a", "b", "c"], {("a", "b"): 1e8, ("a", "c"): 1e9})
        {'a': 'c', 'b': 'a', 'c': 'a'}
    """
    found: Dict[str, Optional[str]] = {}
    for host in hosts:
        others = [other for other in hosts if other != host]
        found[host] = max(others, key=lambda other: rates.get((host, other), 0.0)) if others else None
    return found


def idle_buddy(
    host: str,
    others: Collection[str],
    idle: Collection[str],
    up: Collection[str],
    rates: Mapping[Tuple[str, str], float],
) -> List[str]:
    """Return a list with the idle host for a host's second copy; empty if hosts with stages are fast enough.

    Training sends no messages over an idle host's links.

    Args:
        host: A host with a stage.
        others: The other hosts with stages.
        idle: Hosts without stages.
        up: Hosts that have vaults already.
        rates: Bytes per second from host to host, as far as known.

    Example:
        >>> idle_buddy("a", ["b"], ["c"], [], {("a", "b"): 1e8, ("a", "c"): 1e9})
        ['c']
        >>> idle_buddy("a", ["b"], ["c"], [], {}), idle_buddy("a", [], ["c"], [], {})
        ([], ['c'])
    """
    beside = max((rates.get((host, other), 0.0) for other in others), default=-1.0)
    better = [other for other in sorted(idle) if rates.get((host, other), 0.0) > _FASTER * beside]
    return [max(better, key=lambda other: (other in up, rates.get((host, other), 0.0)))] if better else []


def missing(point: Point, held: Iterable[Piece], values: Mapping[Name, Any], needed: Iterable[Name]) -> List[Name]:
    """Return the arrays of a point that neither vaults nor the driver have.

    Args:
        point: The point.
        held: The pieces in the vaults that are left.
        values: Arrays that the driver has.
        needed: The arrays that are needed.

    Example:
        >>> missing(Point(1, {(1, 0): (2,), (1, 1): ()}), [], {(1, 1): 0.5}, [(1, 0), (1, 1)])
        [(1, 0)]
    """
    by_name: Dict[Name, List[Piece]] = {}
    for piece in held:
        by_name.setdefault(piece.name, []).append(piece)
    return [
        name
        for name in needed
        if name not in values and not (name in point.shapes and covers(by_name.get(name, ()), point.shapes[name]))
    ]
