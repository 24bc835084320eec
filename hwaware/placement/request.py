"""What every solver is asked and what it answers."""

from __future__ import annotations

from typing import NamedTuple, Optional, Protocol

from hwaware.costs import PreparedCosts
from hwaware.plans import Objective, Plan


class Request(NamedTuple):
    """One question to a solver.

    Attributes:
        costs: The workload on the devices that may be used, under one schedule.
        num_microbatches: B.
        objective: What to minimise.
        time_limit_s: Wall time after which the best plan so far is the answer.
        target: "alpa" for plans that Alpa can run, "any" for all.
        most_devices: Devices of one stage at most; None for no limit.
        seed: Of solvers that draw random numbers.
    """

    costs: PreparedCosts
    num_microbatches: int
    objective: Objective
    time_limit_s: float
    target: str = "alpa"
    most_devices: Optional[int] = None
    seed: int = 0


class Answer(NamedTuple):
    """What a solver found.

    Attributes:
        plan: The stages, not priced yet; None if there are none.
        bound_s: No plan has a smaller objective; None if the solver says nothing about that.
        reason: Why there is no plan.
    """

    plan: Optional[Plan]
    bound_s: Optional[float] = None
    reason: Optional[str] = None


class Solver(Protocol):
    """A way to choose a plan."""

    def __call__(self, request: Request) -> Answer:
        """Answer within about `request.time_limit_s`."""
        ...
