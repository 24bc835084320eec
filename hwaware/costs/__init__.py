"""Price placements: one formula a function, and `evaluate`, the one judge that combines them.

    compute          layer times                      pipeline     from stages to a step
    communication    sends                            intervals    of predicted steps, and of their differences
    gradient_sync    rings, and the update            resize       other microbatch sizes
    measured_groups  measured collectives instead     speed        slower or faster devices
    collectives      any operation over any groups    refit        prices corrected by measured steps
    memory           bytes of each device             iterations   whole iterations from a few measured ones
    synchronisation  parameter servers, BytePS        zero         ZeRO and offloading

Use `PreparedCosts` to price many plans quickly.
"""

from __future__ import annotations

from hwaware.costs.collectives import CollectiveModel as CollectiveModel
from hwaware.costs.collectives import fit_collectives as fit_collectives
from hwaware.costs.evaluate import Cost as Cost
from hwaware.costs.evaluate import StageCost as StageCost
from hwaware.costs.evaluate import evaluate as evaluate
from hwaware.costs.intervals import Interval as Interval
from hwaware.costs.intervals import step_interval as step_interval
from hwaware.costs.intervals import surely_better as surely_better
from hwaware.costs.iterations import IterationModel as IterationModel
from hwaware.costs.iterations import fit_iterations as fit_iterations
from hwaware.costs.prepared import PreparedCosts as PreparedCosts
from hwaware.costs.refit import Correction as Correction
from hwaware.costs.refit import refit as refit
from hwaware.costs.resize import with_microbatch_size as with_microbatch_size

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
