"""Make plans better by random small changes that `evaluate` judges: polish and anneal.

Annealing searches as FlexFlow does (MCMC): it keeps worse changes now and then.
"""

from __future__ import annotations

import functools
import math
import random
import time
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from msgspec.structs import replace as _changed

from hwaware.costs.evaluate import price_stages
from hwaware.costs.stages import LocatedStage, SharedReplica, located
from hwaware.errors import PlanError, UnusableInputError
from hwaware.placement.baselines import starting_plans
from hwaware.placement.problem import Answer, Problem
from hwaware.placement.ways import alpa_runs, splits, whole_shares

# A plan over memory costs this much more for each time that it is over the limit; it leads the search back inside.
OVER_MEMORY = 10.0
# Stages of the states whose prices are kept, some hundred MiB at most.
MOST_STAGES = 1_000_000
# Changes per start; the temperature falls geometrically between these parts of the start's price.
CHANGES = 6000
HOTTEST, COLDEST = 0.1, 1e-4
# Starts in a row that find nothing better, after which the search ends.
PATIENCE = 8
# How often a plan that is not proved is annealed, time permitting, as long as it becomes better by this part of it.
ANNEALED, WORTHWHILE = 3, 0.005

State = Tuple[LocatedStage, ...]


class Price(NamedTuple):
    """Hold the price of a state; the lesser of two prices is the better."""

    misfit: bool  # memory is exceeded, a pin is missed, or a link is missing
    value: float  # the objective, raised in proportion to the excess; infinite without a link


class Judge:
    """Price states as `evaluate` does, and say which stages the target allows."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.samples = problem.costs.workload.microbatch_size
        self.splits = splits(problem.costs)
        self.names = tuple(device.id for device in problem.costs.profile.devices)
        self.speed = {name: 1.0 / max(problem.costs.whole_s(name), 1e-30) for name in self.names}
        most = min(len(problem.costs.workload.layers), len(self.names))  # stages of a state
        # States come back often, so prices are kept.
        self.price: Callable[[State], Price] = functools.lru_cache(MOST_STAGES // most)(self._price)

    def _price(self, state: State) -> Price:
        """Return the price of a state."""
        problem = self.problem
        try:
            cost = price_stages(state, problem.num_microbatches, problem.costs)
        except PlanError:
            return Price(True, math.inf)
        over = sum(max(0.0, one.memory_bytes - one.memory_limit_bytes) / one.memory_limit_bytes for one in cost.stages)
        over += sum(len(problem.missed_pins(stage)) for stage in state)
        if problem.judge is None:
            value = cost.objective_s(problem.objective, sum(len(stage.devices) for stage in state))
        else:
            value = problem.judge(problem.plan(state))
            if value is None or math.isnan(value):
                what = f"the judge returned {value!r} for a plan, expected seconds."
                raise UnusableInputError(what, "let it return a number for every plan.")
        return Price(over > 0, value * (1 + OVER_MEMORY * over))

    def allows(self, stage: LocatedStage) -> bool:
        """Return True if the target and the limits allow the stage."""
        most = self.problem.most_devices
        if (most is not None and len(stage.devices) > most) or min(share for _, share in stage.replicas) <= 0:
            return False
        return self.problem.target == "any" or alpa_runs(stage.replicas, self.problem.costs.hardware)

    def baselines(self) -> List[State]:
        """Return the baselines, the best first, even if the target forbids them."""
        return sorted(dict.fromkeys(located(plan) for plan in starting_plans(self.problem)), key=self.price)

    def may_run(self, state: State) -> bool:
        """Return True if the target and the limits allow all stages."""
        return all(map(self.allows, state))

    def built(self, first: int, last: int, devices: Sequence[str], replicas: int) -> Optional[LocatedStage]:
        """Return the stage of these devices in that many replicas; None if not allowed.

        Shares are as equal as they can be. For target "any" they follow the slowest device of each replica.
        """
        if replicas < 1 or len(devices) % replicas or replicas > self.samples:
            return None
        group = len(devices) // replicas
        if group > 1 and not self.splits:
            return None
        parts = tuple(tuple(devices[k * group : (k + 1) * group]) for k in range(replicas))
        speed = [1.0] * replicas
        if self.problem.target == "any":
            speed = [min(self.speed[name] for name in part) for part in parts]
        samples = whole_shares(np.array(speed), self.samples)
        shared = [SharedReplica(part, n / self.samples) for part, n in zip(parts, samples)]
        stage = LocatedStage(first, last, tuple(shared))
        return stage if self.allows(stage) else None


def neighbour(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Return a random small change of a state; None if the drawn one is not possible."""
    change = rng.choice((_shift, _shift, _swap, _replace, _split, _merge, _resize, _resize, _share))
    return None if len(state) < 2 and change in (_shift, _swap, _merge) else change(state, judge, rng)


def _with(state: State, index: int, *stages: Optional[LocatedStage], count: int = 1) -> Optional[State]:
    made = [stage for stage in stages if stage is not None]
    if len(made) < len(stages):
        return None
    return (*state[:index], *made, *state[index + count :])


def _idle(state: State, judge: Judge) -> List[str]:
    used = {name for stage in state for name in stage.devices}
    return [name for name in judge.names if name not in used]


def _shift(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Move a cut by a few layers."""
    k = rng.randrange(len(state) - 1)
    left, right = state[k], state[k + 1]
    cut = left.last + rng.choice((-3, -2, -1, -1, 1, 1, 2, 3))
    if not left.first <= cut < right.last:
        return None
    return _with(state, k, _changed(left, last=cut), _changed(right, first=cut + 1), count=2)


def _swap(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Let two stages exchange their devices."""
    i, j = rng.sample(range(len(state)), 2)
    made = list(state)
    made[i], made[j] = _changed(state[i], replicas=state[j].replicas), _changed(state[j], replicas=state[i].replicas)
    return tuple(made)


def _replace(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Replace a device of a stage by an idle one, or exchange it with one of another stage."""
    gone, new = rng.choice(rng.choice(state).devices), rng.choice(judge.names)
    swapped = {gone: new, new: gone}
    made = []
    for stage in state:
        replicas = [SharedReplica(tuple(swapped.get(x, x) for x in names), share) for names, share in stage.replicas]
        made.append(_changed(stage, replicas=tuple(replicas)))
    return tuple(made) if all(map(judge.allows, made)) else None


def _split(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Cut a stage in two; give the new one an idle device, or some of the stage's own."""
    k = rng.randrange(len(state))
    stage = state[k]
    if stage.first == stage.last:
        return None
    cut = rng.randrange(stage.first, stage.last)
    idle = _idle(state, judge)
    if idle and (len(stage.devices) == 1 or rng.random() < 0.5):
        kept, new = _changed(stage, last=cut), judge.built(cut + 1, stage.last, [rng.choice(idle)], 1)
        if new is not None and rng.random() < 0.5:
            kept, new = _changed(kept, replicas=new.replicas), _changed(new, replicas=stage.replicas)
        return _with(state, k, kept, new)
    if len(stage.devices) == 1:
        return None
    part = rng.randrange(1, len(stage.devices))
    front = judge.built(stage.first, cut, stage.devices[:part], rng.randint(1, part))
    behind = judge.built(cut + 1, stage.last, stage.devices[part:], rng.randint(1, len(stage.devices) - part))
    return _with(state, k, front, behind)


def _merge(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Make two neighbours one stage, on the devices of one or both."""
    k = rng.randrange(len(state) - 1)
    left, right = state[k], state[k + 1]
    devices = rng.choice((left.devices, right.devices, left.devices + right.devices))
    return _with(state, k, judge.built(left.first, right.last, devices, rng.randint(1, len(devices))), count=2)


def _resize(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Give a stage idle devices, take some away, or arrange its own otherwise."""
    k = rng.randrange(len(state))
    stage, idle = state[k], _idle(state, judge)
    devices = list(stage.devices)
    change = rng.choice(("more", "less", "other"))
    if change == "more" and idle:
        devices += rng.sample(idle, rng.randint(1, min(len(idle), len(devices))))
    elif change == "less" and len(devices) > 1:
        devices = devices[: rng.randrange(1, len(devices))]
    elif change == "other":
        rng.shuffle(devices)
    return _with(state, k, judge.built(stage.first, stage.last, devices, rng.randint(1, len(devices))))


def _share(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Move one sample from a replica to another one, where the target allows unequal shares."""
    k = rng.randrange(len(state))
    stage = state[k]
    if judge.problem.target != "any" or len(stage.replicas) < 2:
        return None
    source, target = rng.sample(range(len(stage.replicas)), 2)
    replicas = list(stage.replicas)
    for place, more in ((source, -1), (target, 1)):
        samples = round(replicas[place].share * judge.samples) + more
        replicas[place] = replicas[place]._replace(share=samples / judge.samples)
    changed = _changed(stage, replicas=tuple(replicas))
    return _with(state, k, changed) if judge.allows(changed) else None


def polish(state: State, judge: Judge, rng: random.Random, deadline: float, patience: int = 400) -> State:
    """Take every random change that is better until `patience` changes in a row were not."""
    price, misses = judge.price(state), 0
    while misses < patience and time.monotonic() < deadline:
        changed = neighbour(state, judge, rng)
        misses += 1
        if changed is None:
            continue
        found = judge.price(changed)
        if found.misfit < price.misfit or (found.misfit == price.misfit and found.value < price.value * (1 - 1e-12)):
            state, price, misses = changed, found, 0
    return state


def random_state(judge: Judge, rng: random.Random) -> State:
    """Return stages of one device each, in any order, on layers cut anywhere."""
    layers = len(judge.problem.costs.workload.layers)
    count = rng.randint(1, min(layers, len(judge.names)))
    names = rng.sample(judge.names, count)
    edges = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    return tuple(
        LocatedStage(edges[k], edges[k + 1] - 1, (SharedReplica((name,), 1.0),)) for k, name in enumerate(names)
    )


def solve(problem: Problem) -> Answer:
    """Return the best plan of several annealed starts; `problem.seed` reproduces it if time does not run out.

    A change from price v to w is accepted with probability exp(-(w - v) / T) (Metropolis et al., 1953). Jia et al.,
    "Beyond data and model parallelism for deep neural networks", 2019, use it on plans. Starts are the baselines, then
    random plans and the best plan so far by turns.
    """
    rng, judge = random.Random(problem.seed), Judge(problem)
    deadline = time.monotonic() + problem.time_limit_s
    today = judge.baselines()
    starts, best = list(filter(judge.may_run, today)), today[0] if today else random_state(judge, rng)
    price, misses, k = judge.price(best), 0, 0
    while misses < PATIENCE and time.monotonic() < deadline:
        state = starts[k] if k < 2 and k < len(starts) else best
        if k >= min(2, len(starts)) and not (k % 2 and judge.may_run(best)):
            state = random_state(judge, rng)
        state = polish(annealed(state, judge, rng, deadline), judge, rng, deadline)
        found = judge.price(state)
        better = found.misfit < price.misfit or found.value < price.value * (1 - 1e-9)
        misses = 0 if better and not found.misfit else misses + 1
        if found < price:
            best, price = state, found
        k += 1
    return Answer(problem.plan(best))


def improved(state: State, judge: Judge, rng: random.Random, deadline: float) -> State:
    """Return the state annealed as often as that is worthwhile, then polished."""
    for _ in range(ANNEALED):
        before = judge.price(state)
        state = min(state, annealed(state, judge, rng, deadline), key=judge.price)
        if judge.price(state).value > before.value * (1 - WORTHWHILE):
            break
    return polish(state, judge, rng, deadline)


def annealed(state: State, judge: Judge, rng: random.Random, deadline: float) -> State:
    """Return the best of `CHANGES` random changes, one after the other, as the temperature falls."""
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
        temperature = max(1e-300, scale * HOTTEST * (COLDEST / HOTTEST) ** (k / CHANGES))
        worse = found.value - price.value if math.isfinite(price.value) else -1.0
        if worse <= 0 or (math.isfinite(found.value) and rng.random() < math.exp(-worse / temperature)):
            state, price = changed, found
            scale = min(scale, price.value)
        if price < least:
            best, least = state, price
    return best
