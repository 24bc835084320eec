"""MCMC search over plans, as FlexFlow does it: random changes, judged by `evaluate`, worse ones kept now and then."""

from __future__ import annotations

import math
import random
import time
from typing import List, Tuple

from hwaware.placement.baselines import starting_plans
from hwaware.placement.moves import Judge, Price, State, neighbour, plan_of, polish, random_state, state_of
from hwaware.placement.problem import Answer, Problem

# Changes per start; the temperature falls geometrically between these parts of the start's price.
CHANGES = 6000
HOTTEST, COLDEST = 0.1, 1e-4
# Starts in a row that find nothing better, after which the search ends.
PATIENCE = 8


def solve(problem: Problem) -> Answer:
    """The best plan of several annealed starts; reproducible by `problem.seed` unless the time limit is reached.

    Accept a change from price v to w with probability exp(-(w - v) / T) (Metropolis et al., 1953; Jia et al., "Beyond
    data and model parallelism for deep neural networks", 2019, for its use on plans). Starts are what people use today,
    then random plans and the best plan so far in turn.
    """
    rng, judge = random.Random(problem.seed), Judge(problem)
    deadline = time.monotonic() + problem.time_limit_s
    starts = starting_states(problem, judge)
    best = best_baseline(problem, judge) or random_state(judge, len(problem.costs.workload.layers), rng)
    price, misses, k = judge.price(best), 0, 0
    while misses < PATIENCE and time.monotonic() < deadline:
        state = polish(annealed(_start(k, starts, best, judge, rng), judge, rng, deadline), judge, deadline, rng)
        found = judge.price(state)
        better = found.misfit < price.misfit or found.value < price.value * (1 - 1e-9)
        misses = 0 if better and not found.misfit else misses + 1
        if found < price:
            best, price = state, found
        k += 1
    return Answer(plan_of(best, problem))


def _start(k: int, starts: List[State], best: State, judge: Judge, rng: random.Random) -> State:
    if k < 2 and k < len(starts):
        return starts[k]
    if k % 2 and all(judge.allows(stage) for stage in best):
        return best
    return random_state(judge, best[-1].last + 1, rng)


def best_baseline(problem: Problem, judge: Judge) -> State:
    """The best of what people use today, whether or not the target allows it; no stages if there is none."""
    states = [state_of(plan, judge.samples) for plan in starting_plans(problem)]
    return min(states, key=judge.price, default=())


def starting_states(problem: Problem, judge: Judge) -> List[State]:
    """What people use today, as starts: those that the target allows, the best first, without repetitions."""
    states: List[Tuple[Price, State]] = []
    for plan in starting_plans(problem):
        state = state_of(plan, judge.samples)
        if all(judge.allows(stage) for stage in state) and all(state != other for _, other in states):
            states.append((judge.price(state), state))
    states.sort(key=lambda one: one[0])
    return [state for _, state in states]


def annealed(state: State, judge: Judge, rng: random.Random, deadline: float) -> State:
    """The best of `CHANGES` random changes, one after the other, as the temperature falls."""
    price = judge.price(state)
    best, least = state, price
    scale = price.value if math.isfinite(price.value) else 1.0
    for k in range(CHANGES):
        if time.monotonic() > deadline:
            break
        changed = neighbour(state, judge, rng)
        if changed is None:
            continue
        found = judge.price(changed)
        temperature = scale * HOTTEST * (COLDEST / HOTTEST) ** (k / CHANGES)
        worse = found.value - price.value if math.isfinite(price.value) else -1.0
        if worse <= 0 or (math.isfinite(found.value) and rng.random() < math.exp(-worse / temperature)):
            state, price = changed, found
            scale = min(scale, price.value)
        if price < least:
            best, least = state, price
    return best
