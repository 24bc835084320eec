"""What a placement costs: one formula a function, and `evaluate`, the one judge that puts them together.

The formulas by module: compute (layer times), communication (sends), gradient_sync (once per step), memory, pipeline
(from stages to a step). `PreparedCosts` holds a workload on a cluster as numbers for whoever prices many plans.
"""

from __future__ import annotations

from hwaware.costs.evaluate import Cost as Cost
from hwaware.costs.evaluate import StageCost as StageCost
from hwaware.costs.evaluate import evaluate as evaluate
from hwaware.costs.prepared import PreparedCosts as PreparedCosts

__all__ = ["Cost", "PreparedCosts", "StageCost", "evaluate"]
