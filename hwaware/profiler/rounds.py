"""Divide pairs into rounds, in which no member takes part twice, so that a round can be measured at once."""

from __future__ import annotations

from typing import List, Optional, Sequence, Tuple, TypeVar

T = TypeVar("T")


def rounds(members: Sequence[T]) -> Tuple[Tuple[Tuple[T, T], ...], ...]:
    """Return every unordered pair of `members` once, in the fewest rounds of disjoint pairs, by the circle method.

    One member keeps its place, and the others move around it, one place per round. An even number n of members gives
    n - 1 rounds of n / 2 pairs. An odd n gives n rounds, and another member rests in each.

    Example:
        >>> rounds("abcd")
        ((('a', 'd'), ('b', 'c')), (('a', 'c'), ('d', 'b')), (('a', 'b'), ('c', 'd')))
    """
    if len(members) < 2:
        return ()
    circle: List[Optional[T]] = list(members)
    if len(circle) % 2:
        circle.append(None)  # the member that meets None rests
    result = []
    for _ in range(len(circle) - 1):
        half = len(circle) // 2
        facing = zip(circle[:half], reversed(circle[half:]))
        result.append(tuple((a, b) for a, b in facing if a is not None and b is not None))
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return tuple(result)
