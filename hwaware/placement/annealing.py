"""MCMC search over plans, as FlexFlow does it: random changes, judged by `evaluate`, worse ones kept now and then."""

from __future__ import annotations

import math
import random
import time
from typing import List, Tuple

from hwaware.placement.baselines import starting_plans
from hwaware.placement.moves import Judge, State, neighbour, plan_of, polish, state_of
from hwaware.placement.request import Answer, Request

# Changes per start; the temperature falls geometrically between these parts of the start's price.
CHANGES = 6000
HOTTEST, COLDEST = 0.1, 1e-4
RESTARTS = 4


def solve(request: Request) -> Answer:
    """The best plan of several annealed starts; reproducible by `request.seed` unless the time limit is reached.

    Accept a change from price v to w with probability exp(-(w - v) / T) (Metropolis et al., 1953; Jia et al., "Beyond
    data and model parallelism for deep neural networks", 2019, for its use on plans).
    """
    rng, judge = random.Random(request.seed), Judge(request)
    deadline = time.monotonic() + request.time_limit_s
    starts = starting_states(request, judge)
    if not starts:
        return Answer(None, None, "No start for the search was found. To fix: use the exact solver, which says why.")
    best, value = starts[0], judge.value(starts[0])
    for k in range(RESTARTS):
        state = _annealed(starts[k % len(starts)], judge, rng, deadline)
        state = polish(state, judge, deadline, rng)
        found = judge.value(state)
        if found < value:
            best, value = state, found
        if time.monotonic() > deadline:
            break
    return Answer(plan_of(best, request))


def starting_states(request: Request, judge: Judge) -> List[State]:
    """What people use today, as starts: the best first."""
    states: List[Tuple[float, State]] = []
    for plan in starting_plans(request):
        state = state_of(plan, judge.samples)
        if all(judge.allows(stage) for stage in state):
            states.append((judge.value(state), state))
    states.sort(key=lambda one: one[0])
    return [state for _, state in states]


def _annealed(state: State, judge: Judge, rng: random.Random, deadline: float) -> State:
    value = judge.value(state)
    best, least = state, value
    scale = value if math.isfinite(value) else 1.0
    for k in range(CHANGES):
        if k % 64 == 0 and time.monotonic() > deadline:
            break
        changed = neighbour(state, judge, rng)
        if changed is None:
            continue
        found = judge.value(changed)
        temperature = scale * HOTTEST * (COLDEST / HOTTEST) ** (k / CHANGES)
        if found <= value or (math.isfinite(found) and rng.random() < math.exp((value - found) / temperature)):
            state, value = changed, found
            scale = min(scale, value)
        if value < least:
            best, least = state, value
    return best
