"""Search clusters too large to list every set of devices: a beam for plans, prices on devices for bounds.

A price per device of each type turns "at most N devices" into a term of the objective. For any prices the cheapest
pipeline is a lower bound (Lagrange), and the best prices make it tight. The search divides the possible times of the
slowest stage into intervals. The bound of an interval is the cheapest pipeline with all stages below its end and one
above its begin. A beam search from the last stage to the first, guided by the same prices, finds plans; hwaware.costs
prices them.

The bound holds for stages of like devices inside one host or on several whole hosts. Tensor-parallel groups wider than
a host count only where links between hosts are as fast as inside. Links that differ between like hosts count as the
best one. Three cases need the bound of hwaware.placement.bounds, which holds for every plan. Like devices stand in
hosts of several sizes, devices of one kind differ, or a stage may mix kinds.
"""

from __future__ import annotations

import math
import time
from typing import Any, List, NamedTuple, Tuple

import numpy as np

from hwaware.costs.curves import FloatArray
from hwaware.costs.evaluate import Priced
from hwaware.costs.stages import LocatedStage, in_groups
from hwaware.placement import scale_kernels as kernels
from hwaware.placement.blocks import in_blocks, most_blocks
from hwaware.placement.bounds import fluid_bound_s, fluid_period_s
from hwaware.placement.fleet import Fleet, fastest_inside_hosts, make_fleet, optimistic, ways_to_build
from hwaware.placement.infeasible import why_infeasible_at_scale
from hwaware.placement.problem import Answer, Problem
from hwaware.plans import Plan

# Width of the intervals of the slowest stage, plans kept in the beam, steps of the prices: round after round.
ROUNDS = ((1.03, 24, 25), (1.01, 60, 40), (1.003, 150, 60), (1.001, 400, 100))
# Steps of the prices between two tries of larger ones.
RAY_EVERY = 12
# Kept by one proof, some tens of MiB.
PARTIAL_PIPELINES = 60_000
# Numbers of used devices that the labels of one beam hold: 0.1 GiB.
MOST_USED = 64_000_000
# Intervals are proved with devices counted one by one from this width on.
PROVE_FROM = 1.003
# Part of the time that goes into plans where the bound needs a search of its own.
PLANS_PART = 0.5
# Width of the beam for any plan at all.
LAST_RESORT = 60
# It takes so many seconds at least, or a search of few milliseconds would find none.
LAST_RESORT_S = 1.0
# The search ends when it is proved to be this close.
GOOD_ENOUGH = 1e-3
# It also ends when the gap is still so many times the width of the intervals: narrower ones could not close it.
HOPELESS = 20
# A proof in this space is not one for plans that hwaware could not list: never quite "optimal".
BELOW = 1.0 - 1e-8

# (first layer, layer after the last, template, unit) in pipeline order
Built = List[Tuple[int, int, int, int]]


class _Interval(NamedTuple):
    low: float
    high: float
    bound: float
    prices: FloatArray


class _Scale:
    """Hold one search: the fleet, the best plan so far, and the ways and units as the kernels read them."""

    def __init__(
        self, problem: Problem, fleet: Fleet, deadline: float, bounds_only: bool = False, known_s: float = math.inf
    ) -> None:
        self.problem, self.fleet, self.ways, self.deadline = problem, fleet, fleet.ways, deadline
        self.bounds_only = bounds_only
        self.layers = fleet.ways.turn.shape[1]
        self.best, self.found = known_s, (math.inf, [])  # type: Tuple[float, Tuple[float, Built]]
        self.most_stages = min(self.layers, int(fleet.counts.sum()))
        self.turns = problem.costs.schedule == "1f1b" and problem.objective == "step"

    def time_left(self) -> bool:
        return time.monotonic() < self.deadline

    def _rules(self, low: float) -> Tuple[float, float, float, float]:
        """Return how stages behind the slowest count (weight, less), and the slowest (fixed, per longer direction)."""
        count = self.problem.num_microbatches
        if self.turns and count > self.most_stages:
            # one_f_one_b_s with i = j = the slowest stage: fill + 2 R + c (B - w + 1).
            return 2.0, low, count * low, 0.0
        if self.turns:
            # In every case fill + c + R + (B - 1) max(f, b).
            return 1.0, 0.0, low, float(count - 1)
        return 1.0, 0.0, count * low, 0.0

    def lower(self, low: float, high: float, prices: FloatArray) -> Tuple[float, Any, Any]:
        """Return an interval's bound at these prices, its pipeline, and the costs in front of each cut."""
        rules = self._rules(low)
        paid = prices[self.ways.kind] * self.ways.devices
        value, stages, at_port = kernels.least_priced(self.ways, paid, low, high, rules)
        return float(value - prices @ self.fleet.counts), stages, at_port

    def prove(self, interval: _Interval) -> _Interval:
        """Improve an interval's bound with the devices counted one by one; return it unchanged if time runs out."""
        low, high, _, prices = interval
        counts, ports = self.fleet.counts, self.ways.link.shape[0]
        # One int64 stands for the used devices of each kind, together with the other states.
        if math.prod(count + 1 for count in counts.tolist()) * 2 * ports * (self.layers + 1) >= 2**63:
            return interval
        at_port, paid = self.lower(low, high, prices)[2], prices[self.ways.kind] * self.ways.devices
        labels, fill, bound = kernels.proof_labels(PARTIAL_PIPELINES, len(counts), self.layers), 1, self.best
        for cut in range(self.layers, 0, -1):
            if not self.time_left():
                return interval
            fill, bound = kernels.prove(
                cut, self.ways, at_port, paid, float(prices @ counts), counts, low, high,
                self._rules(low), labels, fill, bound,
            )  # fmt: skip
        return interval._replace(bound=max(interval.bound, float(bound)))

    def ascend(self, interval: _Interval, steps: int) -> _Interval:
        """Improve an interval's prices by steps along the devices used too much or too little (Polyak)."""
        prices, best = interval.prices, interval
        for k in range(steps):
            value, stages, _ = self.lower(interval.low, interval.high, prices)
            if value > best.bound or k == 0:
                best = best._replace(bound=max(value, interval.bound), prices=prices)
            if value >= self.best or math.isinf(value):
                return best._replace(bound=max(value, best.bound))
            built = stages[:, 2]
            kind, devices = self.ways.kind[built], self.ways.devices[built]
            used = np.bincount(kind, weights=devices, minlength=len(self.fleet.counts))
            over = used - self.fleet.counts
            over = np.where((prices <= 0) & (over < 0), 0.0, over)
            norm = float(over @ over)
            if norm == 0:
                return best
            target = self.best if math.isfinite(self.best) else 1.1 * value
            prices = np.maximum(0.0, prices + (target - value) / norm * over * (1.0 if k < steps / 2 else 0.5))
            if k % RAY_EVERY == RAY_EVERY - 1:
                best = self._along_the_ray(best)
                prices = best.prices
            if best.bound >= self.best or not self.time_left():
                break
        return best

    def _along_the_ray(self, best: _Interval) -> _Interval:
        """Raise all prices by the same factor, without limit if the interval has no plan at all."""
        factor, tried = 1.5, best.prices
        while best.bound < self.best and factor > 1.02:
            value = self.lower(best.low, best.high, tried * factor)[0]
            if value > best.bound:
                tried = tried * factor
                best = best._replace(bound=value, prices=tried)
                factor *= factor
            else:
                factor = 1 + (factor - 1) / 3
            if math.isinf(self.best) or tried.max() > 1e3 * self.best:
                break
        return best

    def find(self, high: float, prices: FloatArray, width: int) -> None:
        """Look for plans with all stages within `high`; find none if time runs out."""
        if self.bounds_only:
            return
        # The costs in front of each cut, once a step included, whatever the slowest stage.
        front = self.lower(0.0, high, prices)[2][0]
        units, paid = len(self.fleet.units), prices[self.ways.kind] * self.ways.devices
        width = max(1, min(width, MOST_USED // (4 * units * (self.layers + 1))))
        labels, fill = kernels.beam_labels(4 * width, self.layers, units), 1
        for cut in range(self.layers, 0, -1):
            if not self.time_left():
                return
            fill = kernels.beam(cut, self.ways, self.fleet.of_units, paid, front, high, width, labels, fill)
        complete = labels.counts[0]
        for k in np.argsort(labels.pool_score[0, :complete])[:40]:
            made, label = [], int(labels.pool_label[0, k])
            while label > 0:
                first, end, template, unit, parent, _ = labels.integers[label].tolist()
                made.append((first, end, template, unit))
                label = parent
            value = self.price(made)
            if value < self.found[0]:
                self.found, self.best = (value, made), min(self.best, value)

    def price(self, stages: Built) -> float:
        """Return the objective of stages without head starts; infinite if memory or a link is missing."""
        first, end, o, unit = np.array(stages).T
        fleet, tables = self.fleet, self.fleet.tables
        if np.any(self.ways.in_flight[: len(stages)][::-1] > self.ways.most[o, first, end]):
            return math.inf
        f, b, once = (
            table[o, first, end].tolist() for table in (tables.forward_s, tables.backward_s, tables.per_step_s)
        )
        pairs = o[:-1], o[1:]
        share = np.maximum(*(self.ways.share[one] for one in pairs))
        sends = share, end[:-1] - 1, fleet.of_units.between[unit[:-1], unit[1:]]
        both = fleet.sends_s[sends].tolist(), fleet.backs_s[sends].tolist()
        priced = Priced(self.problem.costs.schedule, self.problem.num_microbatches, (), f, b, once, *both, both)
        return priced.objective_s(self.problem.objective, 1)

    def plan(self, stages: Built) -> Plan:
        """Return the stages on devices, taken from their units in the order in which the beam took them."""
        units, like, taken = self.fleet.units, self.fleet.of_units.like, [0] * len(self.fleet.units)
        parts = {unit for _, _, o, unit in stages if self.ways.whole[o] == 0}
        made = []
        for first, end, o, unit in reversed(stages):
            template, own = self.fleet.templates[o], [unit]
            if template.whole > 1:  # this unit and the next ones like it that are free
                free = {v for v, used in enumerate(taken) if used == 0} - parts
                own = [v for v in range(unit, len(units)) if like[v] == like[unit] and v in free][: template.whole]
            each = template.devices // len(own)
            rows = [units[v][taken[v] : taken[v] + each] for v in own]
            for v in own:
                taken[v] += each
            names = [name for row in (zip(*rows) if template.across else rows) for name in row]
            made.append(LocatedStage(first, end - 1, in_groups(names, template.group)))
        return self.problem.plan(reversed(made))


def solve_at_scale(problem: Problem, deadline: float, known_s: float = math.inf) -> Answer:
    """Return the best plan found by the deadline, with a bound; a plan that costs `known_s` is known."""
    blocks = in_blocks(problem, most_blocks(ways_to_build(problem)))
    if blocks is not None:
        return blocks.of_layers(solve_at_scale(blocks.problem, deadline, known_s), problem)
    started = time.monotonic()
    fleet = make_fleet(problem, max(deadline, started + LAST_RESORT_S))
    fluid = fluid_bound_s(problem.costs, problem.num_microbatches)
    bound, period = fluid, fluid_period_s(problem.costs)
    # Devices of one kind may share a stage: where they differ, pipelines of like devices bound nothing.
    kinds_alike = len(fleet.counts) == len({device.kind for device in problem.costs.hardware.values()})
    # Nor where a stage is better off with replicas on several hosts, or where passes gain by waiting.
    alpa = problem.target == "alpa" and kinds_alike and fleet.complete and fastest_inside_hosts(problem.costs)
    alpa = alpa and not problem.costs.most_gained_s
    own = fleet.of_units.alike and alpa
    # Where the bound is that of a search of its own, half of the time finds plans.
    another = fleet.sizes_alike and alpa and not own
    until = started + PLANS_PART * (deadline - started) if another else deadline
    scale = _Scale(problem, fleet, until, known_s=known_s)
    found = _intervals(scale, period)
    if own:
        bound = max(fluid, found * BELOW)
    elif another:
        best = problem._replace(costs=optimistic(problem.costs))
        bounds = _Scale(best, make_fleet(best), deadline, bounds_only=True)
        bounds.best, bounds.found = scale.best, scale.found
        bound = max(fluid, _intervals(bounds, period) * BELOW)
    if math.isinf(scale.best) and not problem.has_plan:
        # As long again: some plan that fits, all devices and the slowest stage disregarded.
        scale.deadline = time.monotonic() + max(LAST_RESORT_S, deadline - started)
        scale.find(math.inf, np.zeros(len(fleet.counts)), LAST_RESORT)
    if not scale.found[1]:
        return Answer(None, None, why_infeasible_at_scale(problem, fleet.tables))
    return Answer(scale.plan(scale.found[1]), min(bound, scale.best))


def _intervals(scale: _Scale, period: float) -> float:
    """Refine the slowest stage's interval with the least bound again and again; return the least bound of all."""
    waiting = _first_intervals(scale, period)
    for ratio, width, steps in ROUNDS[1:]:
        done: List[_Interval] = []
        for interval in sorted(waiting, key=lambda one: one.bound):
            if interval.bound >= scale.best * (1 - GOOD_ENOUGH) or not scale.time_left():
                done.append(interval)
                continue
            done += _refined(scale, interval, ratio, width, steps)
        waiting = done
        bound = min(one.bound for one in waiting)
        hopeless = scale.best > bound * (1 + HOPELESS * (ratio - 1))
        if hopeless or not scale.time_left() or bound >= scale.best * (1 - GOOD_ENOUGH):
            break
    return min([scale.best, *(one.bound for one in waiting)])


def _first_intervals(scale: _Scale, period: float) -> List[_Interval]:
    """Return intervals up to a slowest stage that no better plan can have, or while time lasts."""
    ratio, width, steps = ROUNDS[0]
    prices, low, made = np.zeros(len(scale.fleet.counts)), period, []  # type: Tuple[FloatArray, float, List[_Interval]]
    while scale.time_left():
        found = scale.ascend(_Interval(low, low * ratio, 0.0, prices), steps)
        made.append(found)
        prices = found.prices
        if found.bound < scale.best:
            scale.find(low * ratio, prices, width)
        low *= ratio
        # Everything slower at once: when that cannot be better, no more intervals are needed.
        rest = scale.lower(low, math.inf, np.zeros_like(prices))[0]
        if rest >= scale.best or math.isinf(rest) or (scale.found[1] and len(made) > 40):
            break
        ratio = ratio if scale.found[1] else min(2.0, ratio * 1.1)
    rest = scale.lower(low, math.inf, np.zeros_like(prices))[0]
    return [*made, _Interval(low, math.inf, rest, prices)]


def _refined(scale: _Scale, interval: _Interval, ratio: float, width: int, steps: int) -> List[_Interval]:
    """Split an interval by that ratio; improve the prices of each part, and search it with a wider beam."""
    made, low = [], interval.low
    while low < interval.high:
        high = min(interval.high, low * ratio) if math.isfinite(interval.high) else math.inf
        part = interval._replace(low=low, high=high)
        if scale.time_left():
            part = scale.ascend(part, steps)
            if part.bound < scale.best * (1 - GOOD_ENOUGH) and math.isfinite(high):
                scale.find(high, part.prices, width)
                if ratio <= PROVE_FROM:
                    part = scale.prove(part)
        made.append(part)
        low = high
    return made
