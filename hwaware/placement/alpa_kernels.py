"""Compile the inner loops of Alpa's own search, in one file: numba's cache watches no other."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_costs(tables: Any, cap: float, slowest: bool, sizes: Any, devices: int) -> Any:
    """Return F[s, l, d], the least sum of layers l and later in s stages on d devices, within `cap`.

    `tables` is [limits, sizes, L, L], the cost of layers l .. e. `tables[k]` has the stages that may have k stages
    behind them. The last one has those without a limit, so the last s stands for that many stages or more. With
    `slowest`, F is the least slowest stage instead of the sum.
    """
    levels, layers = tables.shape[0], tables.shape[2]
    least = np.full((levels + 1, layers + 1, devices + 1), np.inf)
    least[0, layers, 0] = 0.0
    behind = np.full((layers + 1, devices + 1), np.inf)  # of the last level: as many stages or one fewer
    behind[layers] = least[levels - 1, layers]
    for level in range(1, levels + 1):
        for first in range(layers - 1, -1, -1):
            row = least[level, first]
            for last in range(first, layers):
                rest = behind[last + 1] if level == levels else least[level - 1, last + 1]
                for u in range(sizes.shape[0]):
                    cost, size = tables[level - 1, u, first, last], sizes[u]
                    if cost > cap or cost == np.inf or size > devices:
                        continue
                    for d in range(devices + 1 - size):
                        value = max(rest[d], cost) if slowest else rest[d] + cost
                        row[d + size] = min(value, row[d + size])
            if level == levels:
                behind[first] = np.minimum(least[levels - 1, first], row)
    return least


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def trace(tables: Any, least: Any, cap: float, sizes: Any, devices: int) -> Any:
    """Return the stages behind the least sum of `least_costs`, rows of (first, last, index of the size)."""
    levels, layers = tables.shape[0], tables.shape[2]
    stages = np.empty((layers, 3), dtype=np.int64)
    count, first, left, level = 0, 0, devices, 1 + np.argmin(least[1:, 0, devices])
    while first < layers:
        target, found, following = least[level, first, left], False, level - 1
        for last in range(first, layers):
            for u in range(sizes.shape[0]):
                cost = tables[level - 1, u, first, last]
                if found or cost > cap or cost == np.inf or sizes[u] > left:
                    continue
                found = least[level - 1, last + 1, left - sizes[u]] + cost == target
                if not found and level == levels and least[level, last + 1, left - sizes[u]] + cost == target:
                    found, following = True, level
                if found:
                    stages[count] = first, last, u
            if found:
                break
        first, left, level = stages[count, 1] + 1, left - sizes[stages[count, 2]], following
        count += 1
    return stages[:count]


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def reduced(cost: Any, limit: Any, size_index: Any, sizes: Any, devices: int) -> Any:
    """Return tables[k, size, first, last]: the least cost of a stage that may have k stages behind it.

    A limit binds if more stages than it allows can stand behind the stage. k goes up to one more than the largest such
    limit; without any it is 0.
    """
    layers, binding, tables = cost.shape[0], -1, np.full((1, 1, 1, 1), np.inf)
    for filling in range(2):
        if filling:
            tables = np.full((binding + 2, sizes.shape[0], layers, layers), np.inf)
        for first in range(layers):
            for last in range(first, layers):
                for m in range(cost.shape[2]):
                    u = size_index[m]
                    most = min(layers - 1 - last, devices - sizes[u])
                    for c in range(cost.shape[3]):
                        value, stages = cost[first, last, m, c], limit[first, last, m, c]
                        if not (stages >= 0 and value < np.inf) or most < 0:
                            continue
                        if not filling:
                            binding = max(binding, int(stages)) if stages < most else binding
                            continue
                        for k in range(1 + (int(stages) if stages < most else binding + 1)):
                            tables[k, u, first, last] = min(value, tables[k, u, first, last])
    return tables
