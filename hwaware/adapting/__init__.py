"""Notice that a device or a link has become slower, and decide when another placement pays for the switch.

`Detector` names what has changed, from times that steps have anyway. `Drift` corrects a profile by it. `Rent` decides.
`play` compares policies on a load trace, without a cluster.
"""

from __future__ import annotations

from hwaware.adapting.deciding import Decision as Decision
from hwaware.adapting.deciding import Rent as Rent
from hwaware.adapting.deciding import switch_cost_s as switch_cost_s
from hwaware.adapting.detector import Change as Change
from hwaware.adapting.detector import Detector as Detector
from hwaware.adapting.drift import Drift as Drift
from hwaware.adapting.loads import LoadTrace as LoadTrace
from hwaware.adapting.loads import random_trace as random_trace
from hwaware.adapting.playing import POLICIES as POLICIES
from hwaware.adapting.playing import Played as Played
from hwaware.adapting.playing import Stand as Stand
from hwaware.adapting.playing import play as play
from hwaware.adapting.playing import ratios as ratios

__all__ = [
    "POLICIES", "Change", "Decision", "Detector", "Drift", "LoadTrace", "Played", "Rent", "Stand", "play",
    "random_trace", "ratios", "switch_cost_s",
]  # fmt: skip
