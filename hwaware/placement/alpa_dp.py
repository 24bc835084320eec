"""Alpa's own search, fast: the optimum of sum(t) + (B - 1) max(t) on the same cost table.

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
    """The best plan with all stages within a cap: its sum and its slowest stage."""

    total: float
    slowest: float
    stages: IntArray


class _Table(NamedTuple):
    """A cost table reduced to what the search needs.

    Attributes:
        cost, limit: As Alpa gives them, [L, L, shapes, configurations].
        size_index: [shapes] into sizes.
        sizes: Different numbers of devices.
        tables: [levels, sizes, L, L] least costs by the number of stages behind; one level if no limit binds.
        devices: Their number.
    """

    cost: FloatArray
    limit: FloatArray
    size_index: IntArray
    sizes: IntArray
    tables: FloatArray
    devices: int

    def least(self, cap: float, levels: int = 1, slowest: bool = False) -> Any:
        """`least_costs` within the cap, limits disregarded unless all levels are asked for."""
        from hwaware.placement.alpa_kernels import least_costs

        return least_costs(self.tables[:levels], cap, slowest, self.sizes, self.devices)

    def best(self, cap: float, least: Any) -> Optional[_Found]:
        """The plan of the least sum within the cap, limits included; None if there is none. `least` has one level."""
        stages = self._traced(cap, least)
        if stages is None:
            return None
        costs = self._costs(stages, len(self.tables))
        if len(self.tables) > 1 and costs != self._costs(stages, 1):  # a limit forbids one of them
            least = self.least(cap, len(self.tables))
            stages = self._traced(cap, least)
            if stages is None:
                return None
            costs = self._costs(stages, len(self.tables))
        return _Found(min(least[1:, 0, self.devices].tolist()), max(costs), stages)

    def _traced(self, cap: float, least: Any) -> Optional[IntArray]:
        from hwaware.placement.alpa_kernels import trace

        if math.isinf(min(least[1:, 0, self.devices].tolist())):
            return None
        stages: IntArray = trace(self.tables[: len(least) - 1], least, cap, self.sizes, self.devices)
        return stages

    def _costs(self, stages: IntArray, levels: int) -> List[float]:
        """The least cost of each stage among what may have those behind it that are."""
        behind = np.minimum(np.arange(len(stages))[::-1], levels - 1)
        costs: List[float] = self.tables[behind, stages[:, 2], stages[:, 0], stages[:, 1]].tolist()
        return costs

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
    return _search(_reduced(num_devices, submesh_choices, compute_cost, max_n_succ_stages), num_microbatches)


def _reduced(devices: int, shapes: Sequence[Tuple[int, int]], costs: Any, limits: Any) -> _Table:
    from hwaware.placement.alpa_kernels import reduced

    cost = np.ascontiguousarray(costs, dtype=np.float64)
    limit = np.ascontiguousarray(limits, dtype=np.float64)
    sizes, size_index = np.unique(np.array([h * d for h, d in shapes], dtype=np.int64), return_inverse=True)
    size_index = np.ascontiguousarray(size_index.reshape(-1), dtype=np.int64)
    tables = reduced(cost, limit, size_index, sizes, devices)
    return _Table(cost, limit, size_index, sizes, tables, devices)


def _search(table: _Table, num_microbatches: int) -> DpResult:
    """Branch and bound on the slowest stage: intervals of its possible costs, the least bound first."""

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
