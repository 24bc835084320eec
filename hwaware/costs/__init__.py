"""What a placement costs: one formula a function, and `evaluate`, the one judge that puts them together.

The formulas by module: compute (layer times), communication (sends), collectives and patterns (any operation over any
groups), gradient_sync (once per step), memory, pipeline (from stages to a step), iterations (whole iterations from a
few measured ones), refit (measured steps correct the prices), sureness (intervals), resize (other microbatch sizes),
speed (slower or faster devices). `PreparedCosts` holds a workload on a cluster as numbers for whoever prices many
plans.
"""

from __future__ import annotations

from hwaware.costs.collectives import CollectiveModel as CollectiveModel
from hwaware.costs.collectives import fit_collectives as fit_collectives
from hwaware.costs.evaluate import Cost as Cost
from hwaware.costs.evaluate import StageCost as StageCost
from hwaware.costs.evaluate import evaluate as evaluate
from hwaware.costs.iterations import IterationModel as IterationModel
from hwaware.costs.iterations import fit_iterations as fit_iterations
from hwaware.costs.prepared import PreparedCosts as PreparedCosts
from hwaware.costs.refit import Correction as Correction
from hwaware.costs.refit import refit as refit
from hwaware.costs.resize import with_microbatch_size as with_microbatch_size
from hwaware.costs.sureness import Interval as Interval
from hwaware.costs.sureness import step_interval as step_interval
from hwaware.costs.sureness import surely_better as surely_better

__all__ = [
    "CollectiveModel",
    "Correction",
    "Cost",
    "Interval",
    "IterationModel",
    "PreparedCosts",
    "StageCost",
    "evaluate",
    "fit_collectives",
    "fit_iterations",
    "refit",
    "step_interval",
    "surely_better",
    "with_microbatch_size",
]
