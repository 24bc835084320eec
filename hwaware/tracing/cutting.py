"""Cut a chain of operations into contiguous layers of about equal work, where few bytes cross the cuts."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

# A layer may exceed the smallest possible largest layer by this part if fewer bytes then cross the cuts. Alpa allows
# layers of 1.5 times the mean (`eps=0.5` of its AutoLayerOption). This smaller part keeps a GPT's cuts between blocks.
DEFAULT_SLACK = 0.3

# If possible, every layer has at least this part of the mean work. Otherwise a light cut before a model's small head
# would spend a layer on the head.
SMALLEST_PART_OF_MEAN = 0.5


def cut_chain(
    work: Sequence[float], crossing_bytes: Sequence[float], parts: int, slack: float = DEFAULT_SLACK
) -> Tuple[int, ...]:
    """Cut a chain of items into `parts` contiguous, non-empty parts.

    First find W*: the largest part of the cutting whose largest part is smallest. Then take cuttings whose parts are
    at most (1 + slack) W* and, if possible, at least half the mean part. Return the one with the least bytes over its
    cuts. If several have as few bytes, return the one with the smallest sum of squared parts.

    Args:
        work: The work of each item, at least 0.
        crossing_bytes: The bytes that cross the cut after item i, one for each item but the last.
        parts: The number of parts: at least 1, at most the number of items.
        slack: The part by which the largest part may exceed W*.

    Returns:
        The first item of each part; the first is 0.

    Example:
        >>> cut_chain([1, 1, 1, 1], [5, 5, 5], 2)
        (0, 2)
        >>> cut_chain([11, 11, 10, 12], [1, 9, 1], 2, slack=0.5)   # a lighter cut, parts of 32 and 12
        (0, 3)
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(work, dtype=float))])
    limit = least_limit(work, parts) * (1.0 + slack) * (1.0 + 1e-12)
    cut_bytes = np.concatenate([[0.0], np.asarray(crossing_bytes, dtype=float)])
    smallest = SMALLEST_PART_OF_MEAN * float(sums[-1]) / parts
    return _lightest(sums, cut_bytes, parts, smallest, limit) or _lightest(sums, cut_bytes, parts, 0.0, limit)


def least_limit(work: Sequence[float], parts: int, fewest: int = 1) -> float:
    """Return the smallest largest part of all cuttings into parts of `fewest` items or more; infinity without any.

    Example:
        >>> least_limit([1.0, 1.0, 1.0, 1.0], 3)
        2.0
    """
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(work, dtype=float))])
    best = np.full(len(sums), np.inf)  # best[i]: the least largest part of the first i items
    best[0] = 0.0
    for _ in range(parts):
        following = np.full(len(sums), np.inf)
        for end in range(fewest, len(sums)):
            starts = slice(0, end - fewest + 1)
            following[end] = np.min(np.maximum(best[starts], sums[end] - sums[starts]))
        best = following
    return float(best[-1])


def _lightest(sums: Floats, cut_bytes: Floats, parts: int, smallest: float, limit: float) -> Tuple[int, ...]:
    """Return the cutting with the least bytes among those with parts between the two bounds; () without any."""
    items = len(sums) - 1
    scale = max(float(sums[items]), 1e-300)

    def part_cost(part: Floats) -> Floats:
        # Imbalance is at most 0.5 over all parts together. So bytes decide, and balance only breaks their ties.
        return np.where((part >= smallest) & (part <= limit), 0.5 * (part / scale) ** 2, np.inf)

    cost = part_cost(sums)  # cost[i]: of the first part, if it ends before item i
    cost[0] = np.inf
    origins: List[npt.NDArray[np.int_]] = []
    for _ in range(parts - 1):
        following, origin = np.full(items + 1, np.inf), np.zeros(items + 1, dtype=int)
        for end in range(1, items + 1):
            candidates = cost[:end] + cut_bytes[:end] + part_cost(sums[end] - sums[:end])
            origin[end] = int(np.argmin(candidates))
            following[end] = candidates[origin[end]]
        cost = following
        origins.append(origin)
    return _walk_back(origins, items) if np.isfinite(cost[items]) else ()


def _walk_back(origins: List[npt.NDArray[np.int_]], items: int) -> Tuple[int, ...]:
    starts = [items]
    for origin in reversed(origins):
        starts.append(int(origin[starts[-1]]))
    return (0, *starts[:0:-1])
