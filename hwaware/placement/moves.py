"""Small changes to a plan, and a judge of the results: what annealing and polishing have in common."""

from __future__ import annotations

import math
import random
import time
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from hwaware.costs.evaluate import price_stages
from hwaware.costs.stages import LocatedStage, SharedReplica
from hwaware.errors import PlanError
from hwaware.placement.arrays import splits
from hwaware.placement.options import alpa_runs, whole_shares
from hwaware.placement.problem import Problem
from hwaware.plans import Plan, Replica, Stage

# A plan over memory costs this much more for each time that it is over the limit; it leads the search back inside.
OVER_MEMORY = 10.0
# Stages of the states whose prices are kept, some hundred MiB at most.
MOST_STAGES = 1_000_000


class Located(NamedTuple):
    """A stage: layers first .. last, and for each replica its devices and its samples of a microbatch."""

    first: int
    last: int
    replicas: Tuple[Tuple[str, ...], ...]
    samples: Tuple[int, ...]

    @property
    def devices(self) -> Tuple[str, ...]:
        """All devices, replica by replica."""
        return tuple(name for replica in self.replicas for name in replica)


State = Tuple[Located, ...]


class Price(NamedTuple):
    """What a state costs; of two prices the lesser one is the better.

    Attributes:
        misfit: Whether memory is exceeded or a pin is missed, or a link is missing.
        value: The objective, raised in proportion to what is exceeded or missed; infinite without a link.
    """

    misfit: bool
    value: float


NO_PRICE = Price(True, math.inf)


def state_of(plan: Plan, microbatch_size: int) -> State:
    """The stages of a plan."""
    made = []
    for stage in plan.stages:
        equal = microbatch_size // len(stage.replicas)
        samples = tuple(equal if r.share is None else round(r.share * microbatch_size) for r in stage.replicas)
        made.append(Located(*stage.layers, tuple(r.devices for r in stage.replicas), samples))
    return tuple(made)


def plan_of(state: State, problem: Problem) -> Plan:
    """The plan with these stages; equal shares are left out."""
    total = problem.costs.workload.microbatch_size
    stages = tuple(
        Stage(
            layers=(stage.first, stage.last),
            replicas=tuple(
                Replica(devices=devices, share=None if len(set(stage.samples)) == 1 else samples / total)
                for devices, samples in zip(stage.replicas, stage.samples)
            ),
        )
        for stage in state
    )
    return Plan(num_microbatches=problem.num_microbatches, schedule=problem.costs.schedule, stages=stages)


class Judge:
    """Prices states as `evaluate` does, and says which stages the target allows."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.samples = problem.costs.workload.microbatch_size
        self.splits = splits(problem.costs.workload)
        self.names = tuple(device.id for device in problem.costs.profile.devices)
        whole = {name: problem.costs.sums((name,)) for name in self.names}
        self.speed = {name: 1.0 / max(s.forward_s[-1] + s.backward_s[-1], 1e-30) for name, s in whole.items()}
        self._prices: Dict[State, Price] = {}
        self._stages = 0

    def price(self, state: State) -> Price:
        """What a state costs. States come back often, so prices are kept."""
        found = self._prices.get(state)
        if found is None:
            self._stages += len(state)
            if self._stages > MOST_STAGES:
                self._prices.clear()
                self._stages = 0
            found = self._prices[state] = self._price(state)
        return found

    def _price(self, state: State) -> Price:
        problem = self.problem
        try:
            cost = price_stages([self._shared(stage) for stage in state], problem.num_microbatches, problem.costs)
        except PlanError:
            return NO_PRICE
        over = sum(max(0.0, one.memory_bytes - one.memory_limit_bytes) / one.memory_limit_bytes for one in cost.stages)
        over += sum(len(problem.missed_by(stage.replicas, stage.first, stage.last)) for stage in state)
        if problem.judge is None:
            value = cost.objective_s(problem.objective, sum(len(stage.devices) for stage in state))
        else:
            value = problem.judge(plan_of(state, problem))
        return Price(over > 0, value * (1 + OVER_MEMORY * over))

    def _shared(self, stage: Located) -> LocatedStage:
        shares = [SharedReplica(devices, n / self.samples) for devices, n in zip(stage.replicas, stage.samples)]
        return LocatedStage(stage.first, stage.last, tuple(shares))

    def allows(self, stage: Located) -> bool:
        """Whether the target and the limits allow the stage."""
        most = self.problem.most_devices
        if (most is not None and len(stage.devices) > most) or min(stage.samples, default=0) < 1:
            return False
        records = self.problem.costs.devices
        groups = [[records[name] for name in replica] for replica in stage.replicas]
        return self.problem.target == "any" or alpa_runs(groups, stage.samples)

    def built(self, first: int, last: int, devices: Sequence[str], replicas: int) -> Optional[Located]:
        """The stage of these devices in that many replicas; None if not allowed.

        Shares are as equal as they can be; for target "any" in proportion to the slowest device of each replica.
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
        stage = Located(first, last, parts, whole_shares(np.array(speed), self.samples))
        return stage if self.allows(stage) else None


def neighbour(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """A random small change of a state; None if the one that was drawn is not possible."""
    return rng.choice((_shift, _shift, _swap, _replace, _split, _merge, _resize, _resize, _share))(state, judge, rng)


def _with(state: State, index: int, *stages: Optional[Located], count: int = 1) -> Optional[State]:
    made = [stage for stage in stages if stage is not None]
    if len(made) < len(stages):
        return None
    return (*state[:index], *made, *state[index + count :])


def _idle(state: State, judge: Judge) -> List[str]:
    used = {name for stage in state for name in stage.devices}
    return [name for name in judge.names if name not in used]


def _shift(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """A cut moves by a few layers."""
    if len(state) < 2:
        return None
    k = rng.randrange(len(state) - 1)
    left, right = state[k], state[k + 1]
    cut = left.last + rng.choice((-3, -2, -1, -1, 1, 1, 2, 3))
    if not left.first <= cut < right.last:
        return None
    return _with(state, k, left._replace(last=cut), right._replace(first=cut + 1), count=2)


def _swap(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Two stages exchange their devices."""
    if len(state) < 2:
        return None
    i, j = sorted(rng.sample(range(len(state)), 2))
    one, other = state[i], state[j]
    made = list(state)
    made[i] = one._replace(replicas=other.replicas, samples=other.samples)
    made[j] = other._replace(replicas=one.replicas, samples=one.samples)
    return tuple(made)


def _replace(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """A device of a stage gives way to an idle one, or to one of another stage."""
    k = rng.randrange(len(state))
    gone, names = rng.choice(state[k].devices), list(judge.names)
    new = rng.choice(names)
    swapped = {gone: new, new: gone}
    made = []
    for stage in state:
        replicas = tuple(tuple(swapped.get(name, name) for name in replica) for replica in stage.replicas)
        made.append(stage._replace(replicas=replicas))
        if not judge.allows(made[-1]):
            return None
    return tuple(made)


def _split(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """A stage is cut in two; the new one gets an idle device, or some of the stage's own."""
    k = rng.randrange(len(state))
    stage = state[k]
    if stage.first == stage.last:
        return None
    cut = rng.randrange(stage.first, stage.last)
    idle = _idle(state, judge)
    if idle and (len(stage.devices) == 1 or rng.random() < 0.5):
        kept, new = stage._replace(last=cut), judge.built(cut + 1, stage.last, [rng.choice(idle)], 1)
        if new is not None and rng.random() < 0.5:
            kept, new = (
                kept._replace(replicas=new.replicas, samples=new.samples),
                new._replace(replicas=stage.replicas, samples=stage.samples),
            )
        return _with(state, k, kept, new)
    if len(stage.devices) == 1:
        return None
    part = rng.randrange(1, len(stage.devices))
    return _with(
        state,
        k,
        judge.built(stage.first, cut, stage.devices[:part], rng.randint(1, part)),
        judge.built(cut + 1, stage.last, stage.devices[part:], rng.randint(1, len(stage.devices) - part)),
    )


def _merge(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """Two neighbours become one stage, on the devices of one of them or of both."""
    if len(state) < 2:
        return None
    k = rng.randrange(len(state) - 1)
    left, right = state[k], state[k + 1]
    devices = rng.choice((left.devices, right.devices, left.devices + right.devices))
    return _with(state, k, judge.built(left.first, right.last, devices, rng.randint(1, len(devices))), count=2)


def _resize(state: State, judge: Judge, rng: random.Random) -> Optional[State]:
    """A stage takes idle devices, or gives some up, or arranges its own otherwise."""
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
    """One sample moves from a replica to another one, where the target allows unequal shares."""
    k = rng.randrange(len(state))
    stage = state[k]
    if judge.problem.target != "any" or len(stage.replicas) < 2:
        return None
    source, target = rng.sample(range(len(stage.replicas)), 2)
    samples = list(stage.samples)
    samples[source] -= 1
    samples[target] += 1
    changed = stage._replace(samples=tuple(samples))
    return _with(state, k, changed) if judge.allows(changed) else None


def polish(state: State, judge: Judge, deadline: float, rng: random.Random, patience: int = 400) -> State:
    """Take every random change that is better until `patience` of them in a row were not."""
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


def random_state(judge: Judge, layers: int, rng: random.Random) -> State:
    """Devices in any order, each with a stage of its own, on layers that are cut anywhere."""
    count = rng.randint(1, min(layers, len(judge.names)))
    names = rng.sample(judge.names, count)
    edges = [0, *sorted(rng.sample(range(1, layers), count - 1)), layers]
    return tuple(Located(edges[k], edges[k + 1] - 1, ((name,),), (judge.samples,)) for k, name in enumerate(names))
