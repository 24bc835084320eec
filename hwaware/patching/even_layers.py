"""Cut a loss into the layers of AutoLayerOption. If Alpa's limit allows no cut, make them as even as possible."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple

import numpy as np

from hwaware.errors import AlpaError
from hwaware.tracing.cutting import least_limit

_FEWEST_PRODUCTS = 3  # Alpa's LAYER_HEAVY_OP_LOWER_BOUND
_MORE_PRODUCTS = 5  # where Alpa counts products, a layer may have this many more than the mean
# Room for rounding, because the search compares a layer's limit with sums of floating-point numbers.
_SLACK = 1e-6


def cluster_jaxpr_by_cost(_original: Any) -> Callable[..., Any]:
    """Replace Alpa's function: cut as Alpa does, else take the lowest limit that allows a cut.

    Alpa limits a layer to 1.5 times the mean cost. Four equal blocks do not make three such layers. Alpa's search then
    ends with an assertion, or with layers that overlap. Besides, Alpa compiles its loops again for each program.
    """

    def replacement(jaxpr: Any, layer_num: Any, eps: float, costs: Any, cost_criteria: str) -> Any:
        count, (products, _, flops) = int(layer_num), costs
        heavy = [float(cost) for cost, product in zip(flops, products) if product]
        found, mean = None, flops.sum() / max(count, 1)
        if count > 0:
            limit = mean * (1 + eps)
            found = _cut(jaxpr, count, costs, max(limit, mean + _MORE_PRODUCTS) if cost_criteria == "count" else limit)
        if found is None:
            limit = least_limit(heavy, count, min(_FEWEST_PRODUCTS, len(heavy) // count)) if count > 0 else math.inf
            found = _cut(jaxpr, count, costs, limit * (1 + _SLACK)) if limit < math.inf and mean > 0 else None
        if found is None:
            raise AlpaError(
                f"AutoLayerOption(layer_num={layer_num}) cannot cut the loss, which has {len(jaxpr.eqns)} operations, "
                f"{len(heavy)} of them matrix products or convolutions.",
                f"choose layer_num from 1 to {max(1, len(heavy))}, or mark the layers by alpa.mark_pipeline_boundary() "
                "and use alpa.ManualLayerOption().",
                found=layer_num,
                expected=len(heavy),
            )
        return found

    return replacement


def _cut(jaxpr: Any, count: int, costs: Any, limit: float) -> Optional[Tuple[Any, Any]]:
    """Return the operations of each layer, and their cost in Alpa's form; None if the limit allows no cut."""
    from hwaware.tracing.cutting_kernels import layer_ends

    products, crossing_bytes, work = costs
    fewest = min(_FEWEST_PRODUCTS, int(sum(products) / count))
    ends, cost = layer_ends(products, work, crossing_bytes, count, fewest, float(limit))
    if ends[0] != 0 or min(np.diff(ends)) < 1:
        return None
    return [jaxpr.eqns[first:end] for first, end in zip(ends, ends[1:])], {"total_cost": cost}
