"""The compiled inner loops of Alpa's own search, in one file: numba's cache only watches the file it compiles."""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np
from numba import njit


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_sums(table: Any, cap: float, counts_stages: bool, sizes: Any, devices: int) -> Any:
    """F[l, d]: the least sum of stage costs of the layers from l on, on exactly d devices, all stages within `cap`.

    `table` is [sizes, L, L] with the cost of layers l .. e; with `counts_stages` every stage weighs 1 instead.
    """
    layers = table.shape[1]
    least = np.full((layers + 1, devices + 1), np.inf)
    least[layers, 0] = 0.0
    for first in range(layers - 1, -1, -1):
        row = least[first]
        for last in range(first, layers):
            rest = least[last + 1]
            for u in range(sizes.shape[0]):
                cost = table[u, first, last]
                size = sizes[u]
                if cost > cap or cost == np.inf or size > devices:
                    continue
                weight = 1.0 if counts_stages else cost
                for d in range(devices + 1 - size):
                    value = rest[d] + weight
                    row[d + size] = min(value, row[d + size])
    return least


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_slowest(table: Any, sizes: Any, devices: int) -> float:
    """The least cost of the slowest stage over all ways to cover all layers with exactly that many devices."""
    layers = table.shape[1]
    least = np.full((layers + 1, devices + 1), np.inf)
    least[layers, 0] = 0.0
    for first in range(layers - 1, -1, -1):
        row = least[first]
        for last in range(first, layers):
            rest = least[last + 1]
            for u in range(sizes.shape[0]):
                cost = table[u, first, last]
                size = sizes[u]
                if cost == np.inf or size > devices:
                    continue
                for d in range(devices + 1 - size):
                    value = max(rest[d], cost)
                    row[d + size] = min(value, row[d + size])
    return float(least[0, devices])


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def trace(table: Any, least: Any, cap: float, counts_stages: bool, sizes: Any, devices: int) -> Any:
    """The stages behind least[0, devices], rows of (first, last, index of the size)."""
    layers = table.shape[1]
    stages = np.empty((layers, 3), dtype=np.int64)
    count, first, left = 0, 0, devices
    while first < layers:
        found = False
        for last in range(first, layers):
            for u in range(sizes.shape[0]):
                cost = table[u, first, last]
                if found or cost > cap or cost == np.inf or sizes[u] > left:
                    continue
                if least[last + 1, left - sizes[u]] + (1.0 if counts_stages else cost) == least[first, left]:
                    stages[count] = first, last, u
                    found = True
            if found:
                break
        first, left = stages[count, 1] + 1, left - sizes[stages[count, 2]]
        count += 1
    return stages[:count]


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def _add_level(table: Any, cap: float, sizes: Any, devices: int, rest: Any, into: Any) -> None:
    """One more stage in front: into[l, d] = min over (e, u) of table[u, l, e] + rest[e + 1, d - size]."""
    layers = table.shape[1]
    for first in range(layers - 1, -1, -1):
        row = into[first]
        for last in range(first, layers):
            behind = rest[last + 1]
            for u in range(sizes.shape[0]):
                cost = table[u, first, last]
                size = sizes[u]
                if cost > cap or cost == np.inf or size > devices:
                    continue
                for d in range(devices + 1 - size):
                    value = behind[d] + cost
                    row[d + size] = min(value, row[d + size])


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def least_sums_limited(tables: Any, cap: float, sizes: Any, devices: int) -> Any:
    """F[s, l, d] with s stages from layer l on; `tables[k]` holds the stages that may have k stages behind them.

    The last table holds those without a limit: the last level stands for that many stages or more.
    """
    levels, layers = tables.shape[0], tables.shape[2]
    least = np.full((levels + 1, layers + 1, devices + 1), np.inf)
    least[0, layers, 0] = 0.0
    for count in range(1, levels):
        _add_level(tables[count - 1], cap, sizes, devices, least[count - 1], least[count])
    # With `levels` stages or more: layer by layer, behind the front stage there are levels - 1 or more.
    table = tables[levels - 1]
    for first in range(layers - 1, -1, -1):
        row = least[levels, first]
        for last in range(first, layers):
            fewer, more = least[levels - 1, last + 1], least[levels, last + 1]
            for u in range(sizes.shape[0]):
                cost = table[u, first, last]
                size = sizes[u]
                if cost > cap or cost == np.inf or size > devices:
                    continue
                for d in range(devices + 1 - size):
                    value = min(fewer[d], more[d]) + cost
                    row[d + size] = min(value, row[d + size])
    return least


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def trace_limited(tables: Any, least: Any, cap: float, sizes: Any, devices: int, level: int) -> Any:
    """The stages behind least[level, 0, devices], rows of (first, last, index of the size)."""
    levels, layers = tables.shape[0], tables.shape[2]
    stages = np.empty((layers, 3), dtype=np.int64)
    count, first, left = 0, 0, devices
    while first < layers:
        table = tables[level - 1]
        target, found, following = least[level, first, left], False, level - 1
        for last in range(first, layers):
            for u in range(sizes.shape[0]):
                cost = table[u, first, last]
                if found or cost > cap or cost == np.inf or sizes[u] > left:
                    continue
                if least[level - 1, last + 1, left - sizes[u]] + cost == target:
                    stages[count] = first, last, u
                    found = True
                elif level == levels and least[level, last + 1, left - sizes[u]] + cost == target:
                    stages[count] = first, last, u
                    found, following = True, level
            if found:
                break
        first, left, level = stages[count, 1] + 1, left - sizes[stages[count, 2]], following
        count += 1
    return stages[:count]


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def reduced(cost: Any, limit: Any, size_index: Any, size_of: Any, devices: int, kinds: int) -> Tuple[Any, int]:
    """The least cost of each (size, first, last) over shapes and configurations, and the largest limit that binds.

    A limit binds if more stages than it allows can stand behind the stage; -1 if none does.
    """
    layers = cost.shape[0]
    table = np.full((kinds, layers, layers), np.inf)
    binding = -1
    for first in range(layers):
        for last in range(first, layers):
            for m in range(cost.shape[2]):
                most = min(layers - 1 - last, devices - size_of[size_index[m]])
                for c in range(cost.shape[3]):
                    value, stages = cost[first, last, m, c], limit[first, last, m, c]
                    if not (stages >= 0 and value < np.inf) or most < 0:
                        continue
                    if stages < most:
                        binding = max(binding, int(stages))
                    table[size_index[m], first, last] = min(value, table[size_index[m], first, last])
    return table, binding


@njit(cache=True)  # type: ignore[misc]  # numba carries no types
def reduced_by_limit(
    cost: Any, limit: Any, size_index: Any, size_of: Any, devices: int, kinds: int, binding: int
) -> Any:
    """tables[k, size, first, last]: the least cost among what may have k stages behind it, k = 0 .. binding + 1."""
    layers = cost.shape[0]
    tables = np.full((binding + 2, kinds, layers, layers), np.inf)
    for first in range(layers):
        for last in range(first, layers):
            for m in range(cost.shape[2]):
                u = size_index[m]
                most = min(layers - 1 - last, devices - size_of[u])
                for c in range(cost.shape[3]):
                    value, stages = cost[first, last, m, c], limit[first, last, m, c]
                    if not (stages >= 0 and value < np.inf) or most < 0:
                        continue
                    reach = binding + 1 if stages >= most else int(stages)
                    for k in range(reach + 1):
                        tables[k, u, first, last] = min(value, tables[k, u, first, last])
    return tables
