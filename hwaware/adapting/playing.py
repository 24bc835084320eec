"""Play a load trace against policies that place a model again, without a cluster.

A step takes the time that `evaluate` gives for the trace's drift, times noise. A policy that measures sees the times of
stages and messages of its own placement, with noise.
"""

from __future__ import annotations

import functools
import math
import random
from concurrent.futures import Future
from typing import Callable, Dict, NamedTuple, Optional, Sequence, Tuple

import msgspec

from hwaware.adapting.deciding import switch_cost_s
from hwaware.adapting.drift import Drift
from hwaware.adapting.following import Follower
from hwaware.adapting.loads import LoadTrace
from hwaware.adapting.pace import StepTimes
from hwaware.cluster import ClusterProfile
from hwaware.costs import Cost, evaluate
from hwaware.errors import UnusableInputError
from hwaware.placement import plan as find_plan
from hwaware.plans import Plan
from hwaware.workload import Workload

# A person looks at the training now and then, and stops it, profiles, plans and starts it again.
BY_HAND_STEPS, BY_HAND_S = 500, 120.0
# Time of a switch beside compiling and the transfer of state. Measured moves took 1.8 to 2.5 s (docs/adapting.md).
_FIXED_S = 2.0
# Malleus: devices below 1.2 count as well, and a rate has to move by 0.3 (Li et al., 2024, and its published code).
_WELL, _MOVED = 1.2, 0.3
# It times 20 matrix products, whose mean has less noise than one pass.
_OF_A_MEAN = 20**-0.5
# PipeMorph: delays matter that lengthen the step by this much (Wu et al., 2025).
_PIPEMORPH_GAIN = 0.1
# Greyhound: a slow part is replaced once it has cost as much as the repair takes (Wu et al., 2025).
_GREYHOUND_GAIN = 0.1


class Played(NamedTuple):
    """Outcome of one policy on one trace.

    Attributes:
        policy: Its name.
        total_s: All steps and all switches.
        switches: Number of switches.
        switch_steps: Steps at which they came.
        steps_s: All steps without the switches.
    """

    policy: str
    total_s: float
    switches: int
    switch_steps: Tuple[int, ...]
    steps_s: float


class Stand:
    """The prices of a trace's cluster, each found once.

    Args:
        workload: The model's layers.
        profile: The cluster without load.
        plan: The placement before the trace.
        trace: The load.
        compile_s: Time to compile, as in `switch_cost_s`.
        burst: Time of a pass where the device mostly waits, over that of the profile. CPU quotas give less than 1:
            a process that waited runs as fast as the processor for a while.
        seed: Seed of the noise.

    Raises:
        UnusableInputError: The load is on a device, or between hosts, that the cluster does not have.
    """

    def __init__(
        self, workload: Workload, profile: ClusterProfile, plan: Plan, trace: LoadTrace, *, compile_s: float = 10.0,
        burst: float = 1.0, seed: int = 0,
    ) -> None:  # fmt: skip
        devices, hosts = {device.id for device in profile.devices}, {host.name for host in profile.hosts}
        unknown = {name for one in trace.changes for name in one.drift.devices if name not in devices}
        unknown |= {name for one in trace.changes for name in one.drift.links if not hosts.issuperset(name.split("->"))}
        if unknown:
            raise UnusableInputError(
                f"The load trace slows {', '.join(sorted(unknown))}, which the cluster does not have.",
                "name devices of the cluster, and links as SOURCE->TARGET, two of its hosts.",
            )
        self.workload, self.profile, self.plan, self.trace, self.burst = workload, profile, plan, trace, burst
        self._compile_s = compile_s
        self.first_switch_s = compile_s + _FIXED_S  # what a running training takes for the price of its first switch
        self._seed = seed
        self.again()
        self._known = {plan.stages: plan}
        self.cost = functools.lru_cache(maxsize=None)(self._cost)
        self.best = functools.lru_cache(maxsize=None)(self._best)

    def again(self) -> None:
        """Begin the noise again, so that every policy meets the same."""
        self._random = random.Random(self._seed)

    def _cost(self, plan: Plan, drift: _Key) -> Cost:
        return evaluate(plan, *_drift(drift).applied(self.workload, self.profile))

    def _best(self, drift: _Key) -> Plan:
        """Return the best plan for a drift; that of the profile itself is the given one."""
        if not any(drift):
            return self.plan
        workload, profile = _drift(drift).applied(self.workload, self.profile)
        found = find_plan(
            workload, profile, num_microbatches=self.plan.num_microbatches, schedule=self.plan.schedule,
            time_limit_s=10.0,
        )  # fmt: skip
        # Plans of equal stages are one plan, whatever they were predicted to take.
        return self._known.setdefault(found.stages, found)

    def switch_s(self, before: Plan, after: Plan) -> float:
        """Return the cost of a switch."""
        return switch_cost_s(before, after, self.workload, self.profile, compile_s=self._compile_s, fixed_s=_FIXED_S)

    def noisy(self, seconds: float) -> float:
        """Return a time with noise."""
        return seconds * math.exp(self._random.gauss(0.0, self.trace.noise)) if self.trace.noise else seconds


_Key = Tuple[Tuple[Tuple[str, float], ...], Tuple[Tuple[str, float], ...]]
# (the stand, the placement that runs, number of the step) -> another placement, or None to stay
Policy = Callable[[Stand, Plan, int], Optional[Plan]]


def _key(drift: Drift) -> _Key:
    return tuple(sorted(drift.devices.items())), tuple(sorted(drift.links.items()))


def _drift(key: _Key) -> Drift:
    return Drift(devices=dict(key[0]), links=dict(key[1]))


def play(stand: Stand, name: str) -> Played:
    """Play the stand's trace against a policy.

    Args:
        stand: The trace, and what it is played on.
        name: One of `POLICIES`.

    Raises:
        InfeasibleError: The model fits on no placement.
    """
    stand.again()
    if name == "clairvoyant":
        return _clairvoyant(stand)
    policy, plan, steps_s, costs_s, switched = POLICIES[name](), stand.plan, 0.0, 0.0, []
    for step in range(stand.trace.steps):
        steps_s += stand.noisy(stand.cost(plan, _key(stand.trace.drift(step))).step_s)
        other = policy(stand, plan, step)
        if other is not None and other != plan:
            costs_s += BY_HAND_S if name == "by hand" else stand.switch_s(plan, other)
            plan = other
            switched.append(step)
    return Played(name, steps_s + costs_s, len(switched), tuple(switched), steps_s)


def _clairvoyant(stand: Stand) -> Played:
    """Return the least total of all choices of a best plan in each part of the trace, by dynamic programming."""
    begins = [0, *(change.step for change in stand.trace.changes if 0 < change.step < stand.trace.steps)]
    drifts = [_key(stand.trace.drift(begin)) for begin in begins]
    plans = list(dict.fromkeys([stand.plan, *(stand.best(drift) for drift in drifts)]))
    best: Dict[Plan, Tuple[float, Tuple[int, ...]]] = {stand.plan: (0.0, ())}
    for begin, end, drift in zip(begins, [*begins[1:], stand.trace.steps], drifts):
        after: Dict[Plan, Tuple[float, Tuple[int, ...]]] = {}
        for plan in plans:
            run_s = (end - begin) * stand.cost(plan, drift).step_s
            after[plan] = min(
                (total_s + run_s + (0.0 if plan == before else stand.switch_s(before, plan)),
                 at if plan == before else (*at, begin))
                for before, (total_s, at) in best.items()
            )  # fmt: skip
        best = after
    total_s, at = min(best.values())
    return Played("clairvoyant", total_s, len(at), at, total_s)


def never() -> Policy:
    """Keep the first placement."""
    return lambda stand, plan, step: None


def always() -> Policy:
    """Take the best placement at every change of the load at once, whatever the switch costs."""
    return lambda stand, plan, step: stand.best(_key(stand.trace.drift(step)))


def by_hand() -> Policy:
    """Look every 500 steps, and start again with the best placement where it is better by 5 %."""

    def policy(stand: Stand, plan: Plan, step: int) -> Optional[Plan]:
        drift = _key(stand.trace.drift(step))
        if step % BY_HAND_STEPS != BY_HAND_STEPS - 1:
            return None
        other = stand.best(drift)
        return other if stand.cost(plan, drift).step_s > 1.05 * stand.cost(other, drift).step_s else None

    return policy


def malleus() -> Policy:
    """Place again at once where the rate of a device, of at least 1.2, has moved by 0.3 (Malleus's rule)."""
    placed: Dict[str, float] = {}

    def policy(stand: Stand, plan: Plan, step: int) -> Optional[Plan]:
        slow = stand.trace.drift(step).devices
        rates = {}
        for device in stand.profile.devices:
            rate = slow.get(device.id, 1.0) * stand.noisy(1.0) ** _OF_A_MEAN
            rates[device.id] = round(rate, 2) if rate >= _WELL else 1.0
        if all(abs(rate - placed.get(name, 1.0)) < _MOVED for name, rate in rates.items()):
            return None
        placed.update(rates)
        return stand.best(_key(Drift(devices={name: rate for name, rate in rates.items() if rate != 1.0})))

    return policy


def greyhound() -> Policy:
    """Place again once steps that are 10 % too slow have cost a switch (Greyhound's rent or buy)."""
    lost = [0.0]

    def policy(stand: Stand, plan: Plan, step: int) -> Optional[Plan]:
        drift = _key(stand.trace.drift(step))
        now_s, well_s = stand.cost(plan, drift).step_s, stand.cost(plan, _key(Drift())).step_s
        if now_s < (1 + _GREYHOUND_GAIN) * well_s:
            lost[0] = 0.0
            return None
        lost[0] += now_s - well_s
        other = stand.best(drift)
        if lost[0] < stand.switch_s(plan, other):
            return None
        lost[0] = 0.0
        return other

    return policy


def pipemorph() -> Policy:
    """Keep the placement; while messages are late, run more forwards ahead, so that delays delay no other pass.

    This is PipeMorph's (Adaptra's) schedule. Its number of forwards ahead is free, up to the memory. Plans know two
    schedules: 1F1B, and GPipe with all forwards ahead, which hides the most and is taken where it fits. PipeMorph's
    sends from the host's memory are left out: all sends of hwaware leave the devices free.

    Source: Wu et al., "Adaptra: straggler-resilient hybrid-parallel training with pipeline adaptation", 2025.
    """

    def policy(stand: Stand, plan: Plan, step: int) -> Optional[Plan]:
        late = _key(Drift(links=stand.trace.drift(step).links))
        if stand.cost(stand.plan, late).step_s < (1 + _PIPEMORPH_GAIN) * stand.cost(stand.plan, _key(Drift())).step_s:
            return stand.plan
        ahead = msgspec.structs.replace(stand.plan, schedule="gpipe")
        cost, kept = stand.cost(ahead, late), stand.cost(stand.plan, late)
        return ahead if cost.fits and cost.step_s < kept.step_s else stand.plan

    return policy


class _Ours:
    """Do what a running training does: a `Follower` notices changes, prices placements, and judges its moves."""

    def __init__(self) -> None:
        self._follower: Optional[Follower] = None

    def __call__(self, stand: Stand, plan: Plan, step: int) -> Optional[Plan]:
        if self._follower is None:
            self._follower = Follower(
                plan, stand.workload, stand.profile, lambda *_: self._found(stand), switch_s=stand.first_switch_s
            )
        follower = self._follower
        step_s = stand.noisy(stand.cost(plan, _key(stand.trace.drift(step))).step_s)
        follower.observe(StepTimes(observed(stand, plan, step), step_s))
        wanted = follower.wanted
        if wanted is not None:
            follower.moved(wanted, took_s=stand.switch_s(plan, wanted))
        return wanted

    def _found(self, stand: Stand) -> Future[Plan]:
        """Return the best placement for the drift that the follower knows, as if the search took no time."""
        assert self._follower is not None
        found: Future[Plan] = Future()
        found.set_result(stand.best(_key(self._follower.drift)))
        return found


def observed(stand: Stand, plan: Plan, step: int) -> Dict[str, float]:
    """Return what a running training measures in a step: passes of devices, and messages, each usual one as 1."""
    drift = stand.trace.drift(step)
    stages = stand.cost(plan, _key(Drift())).stages
    step_s = stand.cost(plan, _key(drift)).step_s / plan.num_microbatches
    seconds = {}
    usual_s = {name: stage.compute_s for stage in stages for name in stage.devices if stage.compute_s > 0}
    for name in usual_s:
        time_s = drift.devices.get(name, 1.0) * usual_s[name]
        seconds[name] = time_s * (1.0 - (1.0 - stand.burst) * (1.0 - time_s / step_s))
    host_of = {device.id: device.host for device in stand.profile.devices}
    for before, after in zip(stages, stages[1:]):
        ends = sorted(host_of[stage.devices[0]] for stage in (before, after))
        if ends[0] != ends[1]:
            seconds["<->".join(ends)] = sum(drift.links.get("->".join(pair), 1.0) for pair in (ends, ends[::-1]))
    return {name: stand.noisy(time_s) for name, time_s in seconds.items()}


POLICIES: Dict[str, Callable[[], Policy]] = {
    "ours": _Ours, "clairvoyant": never, "never": never, "always": always, "by hand": by_hand, "malleus": malleus,
    "greyhound": greyhound, "pipemorph": pipemorph,
}  # fmt: skip


def ratios(played: Sequence[Played]) -> Dict[str, float]:
    """Return each policy's total time over the clairvoyant's, which must be among them."""
    least_s = next(one.total_s for one in played if one.policy == "clairvoyant")
    return {one.policy: one.total_s / least_s for one in played}
