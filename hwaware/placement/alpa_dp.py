"""Alpa's own search, fast: the optimum of sum(t) + (B - 1) max(t), or of max(t) x stages, on the same cost table.

Alpa walks through every possible cost of the slowest stage and solves a table with the number of stages in it for each.
Here the number of stages is left out wherever no limit on succeeding stages binds, and the cost of the slowest stage is
found by branch and bound: among the plans whose slowest stage costs between v and w, none has a smaller sum than the
best one with all stages within w, so sum(w) + (B - 1) v bounds them all.

How the results differ from Alpa's: sums are kept in float64 where Alpa rounds partial sums to float32, so the optimum
is the same within 1e-6 (relative). Alpa skips costs of the slowest stage that lie less than 1e-6 s above the one it
tried last, and can miss the optimum because of that (all stages below 1e-6 s: no solution at all); nothing is skipped
here, so the result is never worse. Of several plans with the same objective either may return another one.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# ((first layer, layer after the last), index of the submesh shape, index of the sharding configuration)
DpStage = Tuple[Tuple[int, int], int, int]
DpResult = Tuple[float, Optional[List[DpStage]]]
# A plan has to be better by this part to count; it keeps rounding from splitting equal plans for ever.
MARGIN = 1.0 - 1e-12


class _Found(NamedTuple):
    """The best plan with all stages within a cap: its weight (sum or number of stages) and slowest stage."""

    weight: float
    slowest: float
    stages: IntArray


class _Table(NamedTuple):
    """A cost table reduced to what the search needs.

    Attributes:
        cost, limit: As Alpa gives them, [L, L, shapes, configurations].
        size_index: [shapes] into sizes.
        sizes: Different numbers of devices.
        table: [sizes, L, L] least costs.
        tables: [levels, sizes, L, L] by the number of stages behind; None if no limit binds.
        devices: Their number.
        counts_stages: Whether a stage weighs 1 (inference) instead of its cost.
    """

    cost: FloatArray
    limit: FloatArray
    size_index: IntArray
    sizes: IntArray
    table: FloatArray
    tables: Optional[FloatArray]
    devices: int
    counts_stages: bool

    def relaxed(self, cap: float) -> Tuple[float, Any]:
        """The least weight within the cap, limits disregarded, and the table behind it."""
        from hwaware.placement import alpa_kernels as kernels

        least = kernels.least_sums(self.table, cap, self.counts_stages, self.sizes, self.devices)
        return float(least[0, self.devices]), least

    def best(self, cap: float, relaxed: Any) -> Optional[_Found]:
        """The plan of least weight within the cap, limits included; None if there is none."""
        from hwaware.placement import alpa_kernels as kernels

        if math.isinf(relaxed[0, self.devices]):
            return None
        stages = kernels.trace(self.table, relaxed, cap, self.counts_stages, self.sizes, self.devices)
        if self.tables is None or self._within_limits(stages):
            return _Found(float(relaxed[0, self.devices]), self._slowest(stages, self.table), stages)
        least = kernels.least_sums_limited(self.tables, cap, self.sizes, self.devices)
        ends = least[1:, 0, self.devices]
        level = int(np.argmin(ends)) + 1
        if math.isinf(ends[level - 1]):
            return None
        stages = kernels.trace_limited(self.tables, least, cap, self.sizes, self.devices, level)
        costs = [self._cost(stage, len(stages) - 1 - k) for k, stage in enumerate(stages)]
        return _Found(float(ends[level - 1]), max(costs), stages)

    def _slowest(self, stages: IntArray, table: FloatArray) -> float:
        return float(max(table[u, first, last] for first, last, u in stages))

    def _cost(self, stage: IntArray, behind: int) -> float:
        assert self.tables is not None
        first, last, u = stage
        return float(self.tables[min(behind, len(self.tables) - 1), u, first, last])

    def _within_limits(self, stages: IntArray) -> bool:
        """Whether each stage's least cost is also to be had with the number of stages that are behind it."""
        return all(
            self._cost(stage, len(stages) - 1 - k) == self.table[stage[2], stage[0], stage[1]]
            for k, stage in enumerate(stages)
        )

    def named(self, stages: IntArray) -> List[DpStage]:
        """The stages as Alpa writes them, with shape and configuration: the first cheapest one that is allowed."""
        named = []
        for k, (first, last, u) in enumerate(stages):
            allowed = (self.limit[first, last] >= len(stages) - 1 - k) & (self.size_index == u)[:, None]
            costs = np.where(allowed, self.cost[first, last], np.inf)
            shape, configuration = np.unravel_index(int(np.argmin(costs)), costs.shape)
            named.append(((int(first), int(last) + 1), int(shape), int(configuration)))
        return named


def training_dp(
    num_layers: int,
    num_devices: int,
    num_microbatches: int,
    submesh_choices: Sequence[Tuple[int, int]],
    num_autosharding_configs: int,
    compute_cost: Any,
    max_n_succ_stages: Any,
) -> DpResult:
    """The stages that minimise sum(t) + (B - 1) max(t) on exactly `num_devices` devices; Alpa's `training_dp`.

    Args:
        num_layers: L.
        num_devices: All of them are used.
        num_microbatches: B.
        submesh_choices: Shapes (hosts, devices per host) that a stage may have.
        num_autosharding_configs: Configurations per shape.
        compute_cost: t, [L, L, shapes, configurations], seconds of layers first .. last (inclusive); inf: impossible.
        max_n_succ_stages: How many stages may follow, the same shape; -1: does not fit in memory.

    Returns:
        The objective and the stages ((first layer, layer after the last), shape, configuration); (inf, None) if there
        is no solution.

    Example:
        >>> cost = np.full((2, 2, 1, 1), np.inf)
        >>> cost[0, 0], cost[1, 1], cost[0, 1] = 1.0, 2.0, 3.0
        >>> training_dp(2, 2, 4, [(1, 1)], 1, cost, np.full(cost.shape, 8))
        (9.0, [((0, 1), 0, 0), ((1, 2), 0, 0)])
    """
    del num_layers, num_autosharding_configs  # the table's own shape
    table = _reduced(num_devices, submesh_choices, compute_cost, max_n_succ_stages, False)
    best, found = _search(table, lambda weight, slowest: weight + (num_microbatches - 1) * slowest)
    return best, None if found is None else table.named(found.stages)


def inference_dp(
    num_layers: int,
    num_devices: int,
    submesh_choices: Sequence[Tuple[int, int]],
    num_autosharding_configs: int,
    compute_cost: Any,
) -> DpResult:
    """The stages that minimise max(t) x stages on exactly `num_devices` devices; Alpa's `inference_dp`.

    Arguments and result as in `training_dp`. Without a solution Alpa's raises TypeError, this one returns (inf, None).
    """
    del num_layers, num_autosharding_configs
    limits = np.full(np.shape(compute_cost), np.inf)
    table = _reduced(num_devices, submesh_choices, compute_cost, limits, True)
    best, found = _search(table, lambda weight, slowest: weight * slowest)
    return best, None if found is None else table.named(found.stages)


def _reduced(devices: int, shapes: Sequence[Tuple[int, int]], costs: Any, limits: Any, counts_stages: bool) -> _Table:
    from hwaware.placement import alpa_kernels as kernels

    cost = np.ascontiguousarray(costs, dtype=np.float64)
    limit = np.ascontiguousarray(limits, dtype=np.float64)
    sizes, size_index = np.unique(np.array([h * d for h, d in shapes], dtype=np.int64), return_inverse=True)
    size_index = np.ascontiguousarray(size_index.reshape(-1), dtype=np.int64)
    table, binding = kernels.reduced(cost, limit, size_index, sizes, devices, len(sizes))
    tables = None
    if binding >= 0:
        tables = kernels.reduced_by_limit(cost, limit, size_index, sizes, devices, len(sizes), binding)
    return _Table(cost, limit, size_index, sizes, table, tables, devices, counts_stages)


def _search(table: _Table, objective: Any) -> Tuple[float, Optional[_Found]]:
    """Branch and bound on the slowest stage: intervals of its possible costs, the least bound first."""
    from hwaware.placement import alpa_kernels as kernels

    least = kernels.least_slowest(table.table, table.sizes, table.devices)
    if math.isinf(least):
        return math.inf, None
    costs = np.unique(table.table if table.tables is None else table.tables)
    costs = costs[(costs >= least) & (costs < np.inf)]
    best, plan = math.inf, None
    weight, relaxed = table.relaxed(float(costs[-1]))
    found = table.best(float(costs[-1]), relaxed)
    if found is None:
        return math.inf, None
    best, plan = objective(found.weight, found.slowest), found
    # (bound, first and last possible cost of the slowest stage, least weight with all stages within the last one)
    waiting = [(0.0, 0, int(np.searchsorted(costs, found.slowest)) - 1, found.weight)]
    while waiting:
        _, low, high, weight = heapq.heappop(waiting)
        high = _last_below(objective, weight, costs, low, high, best)
        if high < low:
            continue
        middle = (low + high) // 2
        cap = float(costs[middle])
        lower, relaxed = table.relaxed(cap)
        below = middle
        if objective(max(lower, weight), costs[low]) < best * MARGIN:
            found = table.best(cap, relaxed)
            if found is None:
                below = low - 1
            else:
                lower = found.weight
                below = int(np.searchsorted(costs, found.slowest)) - 1
                value = objective(found.weight, found.slowest)
                if value < best:
                    best, plan = value, found
        else:
            below = low - 1
        for start, end, least_weight in ((low, below, max(lower, weight)), (middle + 1, high, weight)):
            if start <= end:
                heapq.heappush(waiting, (objective(least_weight, costs[start]), start, end, least_weight))
    return float(best), plan


def _last_below(objective: Any, weight: float, costs: FloatArray, low: int, high: int, best: float) -> int:
    """The last position whose bound is below the best plan; low - 1 if none is."""
    while low <= high:
        middle = (low + high) // 2
        if objective(weight, costs[middle]) < best * MARGIN:
            low = middle + 1
        else:
            high = middle - 1
    return high
