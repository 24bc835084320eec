"""Explain a plan: which stage or link limits it, and which change would help."""

from __future__ import annotations

import contextlib
import itertools
import operator
from typing import Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

import msgspec

from hwaware.cluster import ClusterProfile, Link, LinkTable
from hwaware.costs import evaluate
from hwaware.costs.evaluate import prepared_for
from hwaware.costs.measured_groups import with_links
from hwaware.costs.own_times import changed_times, scaled, with_own_kinds
from hwaware.costs.prepared import PreparedCosts
from hwaware.costs.speed import slower_card, slower_link
from hwaware.deprecation import keyword_only
from hwaware.errors import PlanError, UnusableInputError
from hwaware.formatting import SECONDS, text
from hwaware.placement.choices import read_pins
from hwaware.placement.problem import Pins, Problem
from hwaware.plans import Plan, Stage
from hwaware.records import Record
from hwaware.workload import Layer, Workload

_saves_s = operator.attrgetter("saves_s")
# Memory is said to bind where less than this part of a device's memory is left.
NEARLY_FULL = 0.05


class Change(NamedTuple):
    """Say how long the step would take after one change of cluster or plan."""

    what: str  # the change in words
    step_s: float  # after the change
    saves_s: float  # negative if the step gets longer


class Explanation(Record, frozen=True, kw_only=True):
    """Say why a plan takes as long as it does. `print` shows it as sentences.

    Attributes:
        step_s: Step time, as `evaluate` predicts it.
        binds: "stage 2" or "link 0 -> 1": the stage or link that saves most if it gets faster.
        stages: Each stage with a tenth less work, most helpful first.
        links: Each link between neighbouring stages twice as fast, most helpful first.
        full: Stages whose fullest device has less than 5 % of its memory left.
        next_best: The cheapest alternative, or None. It moves a cut, exchanges the devices of two stages, or leaves
            out the first device of the slowest stage. It needs a planner.
        one_more: A new plan with one more device like the fastest one. None without a planner.

    Example:
        >>> from hwaware import Explanation
        >>> found = Explanation(step_s=1.2, binds="stage 0", stages=(), links=(), full=(0,))
        >>> print(found)
        The step takes 1.200 s. Stage 0 limits it.
        Memory is nearly full on stage 0.
    """

    step_s: float
    binds: str
    stages: Tuple[Change, ...]
    links: Tuple[Change, ...]
    full: Tuple[int, ...]
    next_best: Optional[Change] = None
    one_more: Optional[Change] = None

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> List[str]:
        """Return the explanation in words, most important first."""
        said = [f"The step takes {text(self.step_s, SECONDS)}. {self.binds[0].upper()}{self.binds[1:]} limits it."]
        for change in (*self.stages[:1], *self.links[:1], self.one_more):
            if change is not None and change.saves_s > 0:
                said.append(f"{change.what}: the step gets {text(change.saves_s, SECONDS)} shorter.")
        if self.full:
            names = ", ".join(str(stage) for stage in self.full)
            said.append(f"Memory is nearly full on stage {names}.")
        if self.next_best is not None:
            saves_s = self.next_best.saves_s
            longer = f"{text(abs(saves_s), SECONDS)} {'shorter' if saves_s > 0 else 'longer'}"
            said.append(f"{self.next_best.what}: the step gets {longer}. This is the next-best plan.")
        return said


# Plans a workload on a changed cluster; `hwaware.plan` with everything but these two fixed.
Planner = Callable[[Workload, ClusterProfile], Plan]


@keyword_only
def explain(
    plan: Plan,
    workload: Workload,
    profile: ClusterProfile,
    *,
    planner: Optional[Planner] = None,
    pins: Optional[Mapping[Union[int, str], Union[str, Sequence[str]]]] = None,
) -> Explanation:
    """Say which stage or link limits a plan, and which change would help.

    Args:
        plan: Any plan with stages.
        workload: The model's layers.
        profile: The cluster.
        planner: Finds a plan for a workload on a changed cluster; for example
            `functools.partial(hwaware.plan, num_microbatches=16)`. It is needed for `next_best` and `one_more`.
        pins: As in `hwaware.plan`; `next_best` keeps them. Give them to the planner too.

    Raises:
        PlanError: The plan has no stages, or does not fit workload or cluster.
        UnusableInputError: `pins` names no layer or place.

    Example:
        >>> from hwaware import ClusterProfile, Plan, Workload, explain
        >>> from hwaware.plans import Replica, Stage
        >>> workload = Workload.uniform()
        >>> profile = ClusterProfile.uniform(hosts=1, flops_per_s=1e10)
        >>> plan = Plan(num_microbatches=4, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("h0:0",)),)),))
        >>> print(explain(plan, workload, profile))
        The step takes 1.200 s. Stage 0 limits it.
        A tenth less work on stage 0 (h0:0): the step gets 120.0 ms shorter.
    """
    cost = evaluate(plan, workload, profile)
    asked = _Asked(plan, workload, profile, cost.step_s)
    stages = {f"stage {k}": _faster_stage(asked, k) for k in range(len(plan.stages))}
    links = {f"link {k} -> {k + 1}": _faster_link(asked, k) for k in range(len(plan.stages) - 1)}
    every = {**stages, **links}
    full = tuple(
        k for k, stage in enumerate(cost.stages) if stage.memory_bytes > (1 - NEARLY_FULL) * stage.memory_limit_bytes
    )
    next_best = one_more = None
    if planner is not None:
        slowest = max(range(len(cost.stages)), key=lambda k: cost.stages[k].compute_s)
        others = [*_alternatives(asked, read_pins(pins or {}, workload, profile))]
        gone = plan.stages[slowest].devices[0]
        with contextlib.suppress(ValueError, UnusableInputError):  # nothing remains, or unconnected, or pinned to it
            found = asked.planned(f"Without {gone}", planner(workload, profile.without((gone,))))
            others += [found] if found is not None else []
        next_best = max(others, key=_saves_s, default=None)
        one_more = _one_more(asked, planner)
    return Explanation(
        step_s=cost.step_s,
        binds=max(every, key=lambda name: every[name].saves_s),
        stages=tuple(sorted(stages.values(), key=_saves_s, reverse=True)),
        links=tuple(sorted(links.values(), key=_saves_s, reverse=True)),
        full=full,
        next_best=next_best,
        one_more=one_more,
    )


class _Asked(NamedTuple):
    """Hold a plan and its price, which changes are compared with."""

    plan: Plan
    workload: Workload
    profile: ClusterProfile
    step_s: float

    def change(self, what: str, step_s: float) -> Change:
        """Return a change after which the step takes so long."""
        return Change(what, step_s, self.step_s - step_s)

    def planned(self, what: str, plan: Plan) -> Optional[Change]:
        """Return a change of the cluster that needs another plan; None if that plan has no price, or does not fit."""
        known = plan.predicted_step_s if plan.status != "infeasible" else None
        return None if known is None else self.change(what, known)


def _faster_stage(asked: _Asked, k: int) -> Change:
    """Take a tenth of the work off a stage's layers."""

    def lighter(layer: Layer) -> Layer:
        timed = changed_times(layer, lambda kind, sharding, time: scaled(time, forward_s=0.9, backward_s=0.9))
        return scaled(timed, forward_flops=0.9, backward_flops=0.9)

    first, last = asked.plan.stages[k].layers
    layers = [lighter(one) if first <= n <= last else one for n, one in enumerate(asked.workload.layers)]
    workload = msgspec.structs.replace(asked.workload, layers=tuple(layers))
    what = f"A tenth less work on stage {k} ({', '.join(asked.plan.stages[k].devices)})"
    return asked.change(what, evaluate(asked.plan, workload, asked.profile).step_s)


def _faster_link(asked: _Asked, k: int) -> Change:
    """Double the speed of all links between the devices of two neighbours, both ways, and of the cards they share."""
    profile, table, faster = asked.profile, LinkTable(asked.profile), {}
    front, behind = asked.plan.stages[k].devices, asked.plan.stages[k + 1].devices
    for a, b in (*itertools.product(front, behind), *itertools.product(behind, front)):
        link = table.between(a, b)
        if link is not None:
            faster[a, b] = msgspec.structs.replace(slower_link(link, 0.5), source=a, target=b)
    kept = tuple(link for link in profile.links if (link.source, link.target) not in faster)
    ends = {*front, *behind}
    cards = tuple(slower_card(card, 0.5) if ends & set(card.devices) else card for card in profile.shared_cards)
    better = with_links(msgspec.structs.replace(profile, shared_cards=cards), (*kept, *faster.values()))
    what = f"The link from stage {k} ({', '.join(front)}) to {k + 1} ({', '.join(behind)}) twice as fast"
    return asked.change(what, evaluate(asked.plan, asked.workload, better).step_s)


def _alternatives(asked: _Asked, pins: Pins) -> Iterator[Change]:
    """Move one cut by a layer, or exchange the devices of two stages, if that fits and keeps pins."""
    plan, costs = asked.plan, prepared_for(asked.plan, asked.workload, asked.profile)
    problem = Problem(costs, plan.num_microbatches, pins=pins)
    changed: List[Tuple[str, Dict[int, Stage]]] = []
    for k, (left, right) in enumerate(zip(plan.stages, plan.stages[1:])):
        for cut in (left.layers[1] - 1, left.layers[1] + 1):
            if left.layers[0] <= cut < right.layers[1]:
                front = msgspec.structs.replace(left, layers=(left.layers[0], cut))
                behind = msgspec.structs.replace(right, layers=(cut + 1, right.layers[1]))
                changed.append((f"If stage {k} ends with layer {cut}", {k: front, k + 1: behind}))
    for (i, one), (j, other) in itertools.combinations(enumerate(plan.stages), 2):
        front = msgspec.structs.replace(one, replicas=other.replicas)
        behind = msgspec.structs.replace(other, replicas=one.replicas)
        changed.append((f"If stages {i} and {j} exchange their devices", {i: front, j: behind}))
    for what, stages in changed:
        made = tuple(stages.get(k, stage) for k, stage in enumerate(plan.stages))
        candidate = msgspec.structs.replace(plan, stages=made)
        found = None if problem.missed_in(candidate) else problem.cost(candidate)
        # Devices that are alike, exchanged, are no alternative.
        if found is not None and found.fits and abs(found.step_s - asked.step_s) > 1e-9 * asked.step_s:
            yield asked.change(what, found.step_s)


def _one_more(asked: _Asked, planner: Planner) -> Optional[Change]:
    """Plan again with one more device like the fastest one, on its host and at its card."""
    # A device that the workload names by id has a kind of its own, which the new device has too.
    workload, profile = with_own_kinds(asked.workload, asked.profile)
    costs = PreparedCosts(workload, profile)
    fastest = min(profile.devices, key=lambda device: costs.whole_s(device.id))
    new = msgspec.structs.replace(fastest, id=f"{fastest.id} (one more)")
    links = list(profile.links)
    links += [msgspec.structs.replace(link, source=new.id) for link in profile.links if link.source == fastest.id]
    links += [msgspec.structs.replace(link, target=new.id) for link in profile.links if link.target == fastest.id]
    if LinkTable(profile).between(fastest.id, fastest.id) is None:
        rate = max((link.bandwidth_bytes_per_s for link in profile.links), default=1e9)
        links.append(Link(source=fastest.id, target=new.id, latency_s=0.0, bandwidth_bytes_per_s=rate))
    cards = tuple(
        msgspec.structs.replace(card, devices=(*card.devices, new.id)) if fastest.id in card.devices else card
        for card in profile.shared_cards
    )
    devices = (*profile.devices, new)
    larger = msgspec.structs.replace(profile, devices=devices, links=tuple(links), shared_cards=cards)
    try:
        found = planner(workload, larger)
    except PlanError:
        return None
    return asked.planned(f"One more device like {fastest.id} ({asked.profile.device(fastest.id).kind})", found)
