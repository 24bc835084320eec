"""Decide when a program copies its state, where the copies go, and to which point it can return."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.survival.pieces import Name, Piece, covers

# Share of a step's time that copies may take of the worker's thread.
MOST_OF_STEP = 0.02
# Calls between two points, at most: so many batches are kept, and so many calls are made again.
MOST_CALLS = 64


class Point(NamedTuple):
    """A place between two calls to which the program can return.

    Attributes:
        number: Number of the call after which it is; 0 is before the first.
        shapes: All arrays that the program had there, with their shapes.
    """

    number: int
    shapes: Mapping[Name, Tuple[int, ...]]


def interval(copy_s: float, step_s: float) -> int:
    """Return after how many calls to copy the state again.

    Args:
        copy_s: Seconds that copying and sending take from a worker.
        step_s: Seconds of a step.

    Example:
        Copies of 10 ms may come with every step of 0.5 s, and with every fifth of 0.1 s:

        >>> interval(0.010, 0.5), interval(0.010, 0.1)
        (1, 5)
    """
    if step_s <= 0:
        return 1
    return max(1, min(MOST_CALLS, math.ceil(copy_s / (MOST_OF_STEP * step_s) - 1e-9)))


def buddies(hosts: Sequence[str], rates: Mapping[Tuple[str, str], float]) -> Dict[str, Optional[str]]:
    """Return the host that holds each host's second copy: the one with the fastest link; None for a single host.

    Args:
        hosts: Those that have vaults.
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
