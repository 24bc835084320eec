"""Compile the loops that cut a loss into Alpa's layers, in one file: numba's cache watches no other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def layer_ends(heavy: Any, work: Any, crossing_bytes: Any, layers: int, fewest: int, limit: float) -> Any:
    """Return where AutoLayerOption cuts a loss into layers, and their cost; the first cut is at 0.

    These are Alpa's layers, operation for operation: so types and the order of comparisons are Alpa's, too. The largest
    transfer decides, then the sum of all, then how even the layers are. A layer that is not allowed costs infinity.

    Args:
        heavy: 1 for each matrix product or convolution.
        work: FLOPs of each operation.
        crossing_bytes: [first, end], what operations first .. end - 1 read of earlier ones.
        layers: Number of layers.
        fewest: Least number of heavy operations of a layer that does less work than `limit`.
        limit: A layer with more than `fewest` heavy operations does less work than this before the last one.
    """
    count = heavy.shape[0]
    cost = np.full((count + 1, count + 1), np.inf, dtype=np.float32)
    for first in range(count):
        products, done = 0, 0.0
        for end in range(first + 1, count + 1):
            is_heavy = heavy[end - 1] != 0
            if is_heavy:
                products += 1
                done += work[end - 1]
            if products >= fewest and done >= limit and is_heavy and products > fewest:
                break
            if products >= fewest or done >= limit:
                cost[first, end] = crossing_bytes[first, end]
    shape = (layers + 1, count + 1)
    largest = np.full(shape, np.inf, dtype=np.float32)
    total, uneven, start = largest.copy(), largest.copy(), np.full(shape, -1)
    largest[0, 0] = total[0, 0] = 0.0
    uneven[0] = 0.0
    near = 1 + 1e-4
    for layer in range(1, layers + 1):
        for end in range(1, count + 1):
            for first in range(end):
                most = max(largest[layer - 1, first], cost[first, end])
                both = total[layer - 1, first] + cost[first, end]
                squares = uneven[layer - 1, first] + first**2 / layer - end**2 / (layer + 1) + (end - first) ** 2
                if most > largest[layer, end] * near:
                    continue
                if most >= largest[layer, end]:
                    if both > total[layer, end] * near:
                        continue
                    if both >= total[layer, end] and not squares < uneven[layer, end]:
                        continue
                largest[layer, end], total[layer, end] = most, both
                uneven[layer, end], start[layer, end] = squares, first
    ends = np.full(layers + 1, count)
    for layer in range(layers, 0, -1):
        ends[layer - 1] = start[layer, ends[layer]]
    return ends, largest[layers, count]
