"""Search like Alpa, but fast: the optimum of sum(t) + (B - 1) max(t) on the same cost table.

Alpa walks through every possible cost of the slowest stage. For each, it solves a table with the number of stages in
it. This search leaves out the number of stages wherever no limit on succeeding stages binds. Branch and bound finds the
cost of the slowest stage. Take plans whose slowest stage costs from v to w. The best plan with all stages within w has
the least sum, so sum(w) + (B - 1) v is a bound.

Results differ from Alpa's in three ways:

- Sums stay in float64; Alpa rounds partial sums to float32. The optimum is the same within 1e-6 (relative).
- Alpa skips costs of the slowest stage less than 1e-6 s apart, and can miss the optimum. This search skips nothing, so
  its result is never worse.
- Of several plans with the same objective, either may return another one.
"""

from __future__ import annotations

import heapq
import math
from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from hwaware.costs.curves import FloatArray, IntArray

# ((first layer, layer after the last), index of the submesh shape, index of the sharding configuration)
DpStage = Tuple[Tuple[int, int], int, int]
DpResult = Tuple[float, Optional[List[DpStage]]]
# A plan has to be better by this part to count; it keeps rounding from splitting equal plans for ever.
MARGIN = 1.0 - 1e-12


class _Found(NamedTuple):
    """Hold the best plan with all stages within a cap: its sum and its slowest stage."""

    total: float
    slowest: float
    stages: IntArray


class _Table(NamedTuple):
    """Hold a cost table reduced to what the search needs."""

    cost: FloatArray  # [L, L, shapes, configurations] as Alpa gives it
    limit: FloatArray  # the same
    size_index: IntArray  # [shapes] index into sizes
    sizes: IntArray  # different numbers of devices
    tables: FloatArray  # [levels, sizes, L, L] least costs by the number of stages behind; one level if no limit binds
    devices: int  # how many

    def least(self, cap: float, levels: int = 1, slowest: bool = False) -> Any:
        """Return `least_costs` within the cap; limits count only with all levels."""
        from hwaware.placement.alpa_kernels import least_costs

        return least_costs(self.tables[:levels], cap, slowest, self.sizes, self.devices)

    def best(self, cap: float, least: Any) -> Optional[_Found]:
        """Return the plan of the least sum within cap and limits; None without any. `least` has one level, or all."""
        from hwaware.placement.alpa_kernels import trace

        total, every = min(least[1:, 0, self.devices].tolist()), len(self.tables)
        if math.isinf(total):
            return None
        stages = trace(self.tables[: len(least) - 1], least, cap, self.sizes, self.devices)
        costs = self._costs(stages, every)
        if len(least) <= every and costs != self._costs(stages, 1):  # a limit forbids one
            return self.best(cap, self.least(cap, every))
        return _Found(total, max(costs), stages)

    def _costs(self, stages: IntArray, levels: int) -> List[float]:
        """Return the least cost of each stage among those that may have as many stages behind."""
        behind = np.minimum(np.arange(len(stages))[::-1], levels - 1)
        costs: List[float] = self.tables[behind, stages[:, 2], stages[:, 0], stages[:, 1]].tolist()
        return costs

    def named(self, stages: IntArray) -> List[DpStage]:
        """Return the stages as Alpa writes them, each with its first cheapest allowed shape and configuration."""
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
    """Return the stages that minimise sum(t) + (B - 1) max(t) on all devices, as Alpa's `training_dp`.

    Args:
        num_layers: L.
        num_devices: Number of devices; the stages use all.
        num_microbatches: B.
        submesh_choices: Shapes (hosts, devices per host) that a stage may have.
        num_autosharding_configs: Configurations per shape.
        compute_cost: t, [L, L, shapes, configurations], seconds of layers first .. last (inclusive); inf: impossible.
        max_n_succ_stages: Most stages that may follow, the same shape; -1: does not fit in memory.

    Returns:
        The objective and the stages ((first layer, layer after the last), shape, configuration), or (inf, None).

    Example:
        >>> cost = np.full((2, 2, 1, 1), np.inf)
        >>> cost[0, 0], cost[1, 1], cost[0, 1] = 1.0, 2.0, 3.0
        >>> training_dp(2, 2, 4, [(1, 1)], 1, cost, np.full(cost.shape, 8))
        (9.0, [((0, 1), 0, 0), ((1, 2), 0, 0)])
    """
    from hwaware.placement.alpa_kernels import reduced

    del num_layers, num_autosharding_configs  # the table's own shape
    cost, limit = (np.ascontiguousarray(one, dtype=np.float64) for one in (compute_cost, max_n_succ_stages))
    devices = np.array([h * d for h, d in submesh_choices], dtype=np.int64)
    sizes, size_index = np.unique(devices, return_inverse=True)
    size_index = np.ascontiguousarray(size_index.reshape(-1), dtype=np.int64)
    tables = reduced(cost, limit, size_index, sizes, num_devices)
    return _search(_Table(cost, limit, size_index, sizes, tables, num_devices), num_microbatches)


def _search(table: _Table, num_microbatches: int) -> DpResult:
    """Branch and bound on intervals of the slowest stage's possible costs, the least bound first."""

    def objective(total: float, slowest: float) -> float:
        return total + (num_microbatches - 1) * slowest

    costs = np.unique(table.tables)
    costs = costs[(costs >= table.least(math.inf, slowest=True)[1, 0, table.devices]) & (costs < np.inf)]
    found = table.best(float(costs[-1]), table.least(float(costs[-1]))) if len(costs) else None
    if found is None:
        return math.inf, None
    best, plan = objective(found.total, found.slowest), found
    # (bound, first and last possible cost of the slowest stage, least sum with all stages within the last one)
    waiting = [(0.0, 0, int(costs.searchsorted(found.slowest)) - 1, found.total)]
    while waiting:
        _, low, high, total = heapq.heappop(waiting)
        # Up to the last cost whose bound is below the best plan.
        high = min(high, int(costs.searchsorted((best * MARGIN - total) / max(num_microbatches - 1, 1e-300))) - 1)
        if high < low:
            continue
        middle = (low + high) // 2
        cap, below = float(costs[middle]), low - 1
        least = table.least(cap)
        lower = max(total, float(least[1, 0, table.devices]))
        if objective(lower, float(costs[low])) < best * MARGIN:
            found = table.best(cap, least)
            if found is not None:
                lower = max(total, found.total)
                below = int(costs.searchsorted(found.slowest)) - 1
                value = objective(found.total, found.slowest)
                if value < best:
                    best, plan = value, found
        for start, end, least_total in ((low, below, lower), (middle + 1, high, total)):
            if start <= end:
                heapq.heappush(waiting, (objective(least_total, float(costs[start])), start, end, least_total))
    return float(best), table.named(plan.stages)
