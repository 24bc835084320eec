"""Price plans: one formula a function, and `evaluate`, which combines them.

    compute          layer times                      pipeline     from stages to a step
    own_times        by device, by microbatch size    intervals    of predicted steps, and of their differences
    links            sends                            speed        slower or faster devices, measured steps
    gradient_sync    rings, and the update            iterations   whole iterations from a few measured ones
    measured_groups  measured collectives instead     zero         ZeRO and offloading
    collectives      any operation over any groups    synchronisation  parameter servers, BytePS
    memory           bytes of each device             stages       stages of a plan, and their boundaries
    cards            messages through one card        curves       measured curves, cleaned and fitted
    prepared         costs that plans have in common

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
from hwaware.costs.own_times import with_microbatch_size as with_microbatch_size
from hwaware.costs.prepared import PreparedCosts as PreparedCosts
from hwaware.costs.speed import Correction as Correction
from hwaware.costs.speed import refit as refit
