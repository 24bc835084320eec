"""Layers of AutoLayerOption: as even as can be where Alpa's limit on their size leaves no way to cut."""

from __future__ import annotations

import math
from typing import Any, Callable, Optional, Tuple

from hwaware.errors import AlpaError
from hwaware.tracing.cutting import least_limit

_FEWEST_PRODUCTS = 3  # Alpa's LAYER_HEAVY_OP_LOWER_BOUND
# The limit on a layer is compared with sums of floating-point numbers.
_SLACK = 1e-6


def cluster_jaxpr_by_cost(original: Any) -> Callable[..., Any]:
    """Alpa's own; if no layers are within its limit, the lowest limit that some layers keep.

    Alpa limits a layer to 1.5 times the mean cost. Four equal blocks do not make three such layers. Its search then
    ends with an assertion, or with layers that overlap.
    """

    def replacement(jaxpr: Any, layer_num: Any, eps: float, costs: Any, cost_criteria: str) -> Any:
        found = _tried(original, jaxpr, layer_num, eps, costs, cost_criteria)
        if found is not None:
            return found
        count, products, flops = int(layer_num), costs[0], costs[2]
        heavy = [float(cost) for cost, product in zip(flops, products) if product]
        limit = least_limit(heavy, count, min(_FEWEST_PRODUCTS, len(heavy) // count)) if count > 0 else math.inf
        mean = sum(map(float, flops)) / max(count, 1)
        if limit < math.inf and mean > 0:
            found = _tried(original, jaxpr, count, limit * (1 + _SLACK) / mean - 1, costs, cost_criteria)
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


def _tried(original: Any, jaxpr: Any, count: Any, eps: float, costs: Any, criteria: str) -> Optional[Tuple[Any, Any]]:
    """Return Alpa's layers; None if they are not each operation once."""
    try:
        slices, info = original(jaxpr, count, eps, costs, criteria)
    except (AssertionError, IndexError, ZeroDivisionError):
        return None
    return (slices, info) if sum(map(len, slices)) == len(jaxpr.eqns) and all(map(len, slices)) else None
