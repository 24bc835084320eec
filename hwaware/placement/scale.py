"""Search clusters too large to list every set of devices: a beam for plans, prices on devices for bounds.

A price per device of each type turns "at most N devices" into a term of the objective. For any prices the cheapest
pipeline is a lower bound (Lagrange), and the best prices make it tight. The search divides the possible times of the
slowest stage into intervals. The bound of an interval is the cheapest pipeline with all stages below its end and one
above its begin. Prices also show which stages no better pipeline has. If few stages are left, the search lists all
pipelines of these that have enough devices. If not, a beam search from the last stage to the first finds plans, guided
by the same prices. hwaware.costs prices all plans.

The bound holds for stages of like devices inside one host or on several whole hosts. Tensor-parallel groups wider than
a host count only where links between hosts are as fast as inside. Links that differ between like hosts count as the
best one. Three cases need the bound of hwaware.placement.bounds, which holds for every plan. Like devices stand in
hosts of several sizes, devices of one kind differ, or a stage may mix kinds.
"""

from __future__ import annotations

import math
import time
from typing import Any, List, NamedTuple, Sequence, Tuple

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
ROUNDS = ((1.03, 24, 25), (1.01, 60, 40), (1.003, 150, 60), (1.001, 150, 100), (1.0003, 400, 100))
# Steps of the prices between two tries of larger ones.
RAY_EVERY = 12
# An interval keeps its prices if, from one such try to the next, its bound rose by less than this part of its gap.
WORTH = 0.1
# The search lists an interval's pipelines if they have no more parts than this: some milliseconds.
MOST_PARTS = 50_000
# So many of the listed pipelines are priced on devices.
MOST_PRICED = 40
# Numbers of used devices that the labels of one beam hold: 0.1 GiB.
MOST_USED = 64_000_000
# So many of the newest plans are priced by hwaware.costs at the end: links inside a stage may differ from its units'.
NEWEST = 8
# Part of the time that goes into plans where the bound needs a search of its own.
PLANS_PART = 0.5
# Width of the beam for any plan at all.
LAST_RESORT = 60
# It takes so many seconds at least, or a search of few milliseconds would find none.
LAST_RESORT_S = 1.0
# The search ends when it is proved to be this close.
GOOD_ENOUGH = 2e-4
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
    stages: kernels.Stages  # all that a better pipeline can have


class _Scale:
    """Hold one search: the fleet, the best plan so far, and the ways and units as the kernels read them."""

    def __init__(
        self, problem: Problem, fleet: Fleet, deadline: float, bounds_only: bool = False, known_s: float = math.inf
    ) -> None:
        self.problem, self.fleet, self.ways, self.deadline = problem, fleet, fleet.ways, deadline
        self.bounds_only, self.counting, self.newest = bounds_only, True, []  # type: Tuple[bool, bool, List[Built]]
        self.layers = fleet.tables.forward_s.shape[1]
        self.best, self.found = known_s, (math.inf, [])  # type: Tuple[float, Tuple[float, Built]]
        self.most_stages = min(self.layers, int(fleet.counts.sum()))
        self.everything = _Interval(0.0, math.inf, 0.0, np.zeros(len(fleet.counts)), fleet.stages)
        self.turns = problem.costs.schedule == "1f1b" and problem.objective == "step"

    @property
    def good(self) -> float:
        """Return the bound at which an interval needs no more work."""
        return self.best * (1 - GOOD_ENOUGH)

    def time_left(self) -> bool:
        return time.monotonic() < self.deadline

    def _rules(self, low: float) -> Tuple[float, float, float, float]:
        """Return how stages behind the slowest count (weight, less), and it (fixed, per longer)."""
        count = self.problem.num_microbatches
        if self.turns and count > self.most_stages:
            # one_f_one_b_s with i = j = the slowest stage: fill + 2 R + c (B - w + 1).
            return 2.0, low, count * low, 0.0
        # 1F1B takes in every case fill + c + R + (B - 1) max(f, b).
        return (1.0, 0.0, low, float(count - 1)) if self.turns else (1.0, 0.0, count * low, 0.0)

    def lower(self, of: _Interval, prices: FloatArray) -> Tuple[float, Any, Any]:
        """Return an interval's bound at these prices, its pipeline, and the costs in front of each cut."""
        paid, rules = prices[self.ways.kind] * self.ways.devices, self._rules(of.low)
        value, stages, at_port = kernels.least_priced(self.ways, of.stages, paid, of.low, of.high, rules)
        return float(value - prices @ self.fleet.counts), stages, at_port

    def without_worse(self, of: _Interval) -> _Interval:
        """Leave out each stage that, as the interval's prices show, no better pipeline has."""
        paid, at_port = of.prices[self.ways.kind] * self.ways.devices, self.lower(of, of.prices)[2]
        least = kernels.least_through(self.ways, of.stages, paid, of.low, of.high, self._rules(of.low), at_port)
        return of._replace(stages=of.stages.only(least - of.prices @ self.fleet.counts < self.best))

    def ascend(self, interval: _Interval, steps: int) -> _Interval:
        """Improve an interval's prices by steps along the devices used too much or too little (Polyak)."""
        prices, best, before = interval.prices, self.without_worse(interval), -math.inf
        for k in range(steps):
            value, stages, _ = self.lower(best, prices)
            if value > best.bound or k == 0:
                best = best._replace(bound=max(value, interval.bound), prices=prices)
            if value >= self.good or math.isinf(value):
                return best._replace(bound=max(value, best.bound))
            kind, devices = self.ways.kind[stages[:, 2]], self.ways.devices[stages[:, 2]]
            over = np.bincount(kind, weights=devices, minlength=len(self.fleet.counts)) - self.fleet.counts
            if self.counting and np.all(over <= 0):
                self.keep(self.in_units(stages.tolist()))
            over = np.where((prices <= 0) & (over < 0), 0.0, over)
            norm = float(over @ over)
            if norm == 0:
                return best
            target = self.best if math.isfinite(self.best) else 1.1 * value
            prices = np.maximum(0.0, prices + (target - value) / norm * over * (1.0 if k < steps / 2 else 0.5))
            if k % RAY_EVERY == RAY_EVERY - 1:
                best = self._along_the_ray(best)
                prices, best = best.prices, self.without_worse(best)
                if best.bound - before < WORTH * (self.good - best.bound):
                    break
                before = best.bound
            if best.bound >= self.good or not self.time_left():
                break
        return best

    def count(self, of: _Interval) -> _Interval:
        """Improve an interval's bound by all pipelines that may be better and have enough devices, if these are few."""
        if not self.counting or of.bound >= self.good or not self.time_left():
            return of
        of = self.without_worse(of)
        counts, rules, at_port = self.fleet.counts, self._rules(of.low), self.lower(of, of.prices)[2]
        bounds, parts, made = kernels.pipelines_below(
            self.best, MOST_PARTS, self.ways, of.stages, of.prices, counts, of.low, of.high, rules, at_port
        )
        for k in np.argsort(bounds)[: min(MOST_PRICED, len(parts))]:
            stages, part = [], parts[k]
            while part > 0:
                stages.append(of.stages.rows[made[part, 1]].tolist())
                part = made[part, 2]
            bounds[k] = max(bounds[k], self.price(stages))
            self.keep(self.in_units(stages))
        return of._replace(bound=max(of.bound, bounds.min(initial=math.inf)))

    def _along_the_ray(self, best: _Interval) -> _Interval:
        """Raise all prices by the same factor, without limit if the interval has no plan at all."""
        factor, tried = 1.5, best.prices
        while best.bound < self.good and factor > 1.02:
            value = self.lower(best, tried * factor)[0]
            if value > best.bound:
                tried = tried * factor
                best = best._replace(bound=value, prices=tried)
                factor *= factor
            else:
                factor = 1 + (factor - 1) / 3
            if math.isinf(self.best) or tried.max() > 1e3 * self.best:
                break
        return best

    def find(self, of: _Interval, width: int) -> None:
        """Look for plans of an interval's stages; find none if time runs out."""
        if self.bounds_only:
            return
        # The costs in front of each cut, once a step included, whatever the slowest stage.
        front = self.lower(of._replace(low=0.0), of.prices)[2][0]
        units, paid = len(self.fleet.units), of.prices[self.ways.kind] * self.ways.devices
        width = max(1, min(width, MOST_USED // (6 * units * (self.layers + 1))))
        labels = kernels.beam_labels(6 * width, self.layers, units)
        for cut in range(self.layers, 0, -1):
            if not self.time_left():
                return
            kernels.beam(cut, self.ways, of.stages, self.fleet.of_units, paid, front, of.high, width, labels)
        for label in np.argsort(labels.score[: labels.counts[0]])[:40].tolist():
            made = []
            while labels.integers[label, 0] < self.layers:
                first, end, template, unit, label, _ = labels.integers[label].tolist()
                made.append((first, end, template, unit))
            self.keep(made)

    def keep(self, stages: Built) -> None:
        """Keep these stages if they cost less than the best ones so far."""
        value = self.price(stages) if stages and not self.bounds_only else math.inf
        if value < self.found[0]:
            self.found, self.best = (value, stages), min(self.best, value)
            self.newest = [*self.newest[1 - NEWEST :], stages]

    def in_units(self, stages: List[List[int]]) -> Built:
        """Return a pipeline of rows (first, end, template) on the fullest units with room; none if one finds none."""
        ways, units, room, found = self.ways, self.fleet.of_units, self.fleet.of_units.size.copy(), {}
        for first, end, o in sorted(stages, key=lambda row: -int(ways.devices[row[2]])):
            number, own = max(1, int(ways.whole[o])), np.arange(*units.first[ways.kind[o] :][:2])
            need = ways.devices[o] // number
            own = own[(room[own] == units.size[own]) & (units.size[own] == need) if number > 1 else room[own] >= need]
            if len(own) < number:
                return []
            own = own[np.argsort(room[own], kind="stable")][:number]
            room[own] -= need
            found[first] = first, end, o, int(own[0])
        return [found[first] for first in sorted(found)]

    def price(self, stages: Sequence[Sequence[int]]) -> float:
        """Return the objective of stages without head starts; infinite if memory or a link is missing.

        For rows without units, return a bound on the objectives on any units. Only the first stage counts what happens
        once a step: shorter sends could hide less of the others.
        """
        first, end, o, *units = np.array(stages).T
        fleet, ways, cut = self.fleet, self.ways, end[:-1] - 1
        if np.any(ways.in_flight[: len(stages)][::-1] > fleet.tables.most_in_flight[o, first, end]):
            return math.inf
        tables = fleet.tables.forward_s, fleet.tables.backward_s, fleet.tables.per_step_s
        f, b, once = (table[o, first, end].tolist() for table in tables)
        if units:
            share, between = ways.share[o], fleet.of_units.between[units[0][:-1], units[0][1:]]
            sends = np.maximum(share[:-1], share[1:]), cut, between
            both = fleet.of_units.there[sends].tolist(), fleet.of_units.back[sends].tolist()
        else:
            there, back = fleet.least_s[:, ways.port[o[:-1]], ways.port[o[1:]], cut].tolist()
            both, once = (there, back), [once[0], *(0.0 for _ in there)]
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
    """Return the best plan found by the deadline, with a bound.

    A plan that costs `known_s` is known: where none costs less, the answer may have only a bound.
    """
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
    scale.counting = own
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
        scale.find(scale.everything, LAST_RESORT)
    if math.isinf(scale.best):
        return Answer(None, None, why_infeasible_at_scale(problem, fleet.tables))
    return Answer(min(map(scale.plan, scale.newest), key=problem.value, default=None), min(bound, scale.best))


def load_at_scale(problem: Problem) -> None:
    """Call each kernel once for a small problem: numba compiles it, or reads it from its cache."""
    scale = _Scale(problem, make_fleet(problem), math.inf)
    scale.count(scale.everything)
    scale.find(scale.everything, 1)


def _intervals(scale: _Scale, period: float) -> float:
    """Refine the intervals of the slowest stage that may have better plans; return the least bound of all."""
    waiting = _first_intervals(scale, period)
    for ratio, width, steps in ROUNDS[1:]:
        waiting = _refined(scale, waiting, ratio, width, steps)
        bound = min(one.bound for one in waiting)
        if scale.best > bound * (1 + HOPELESS * (ratio - 1)) or not scale.time_left() or bound >= scale.good:
            break
    return min([scale.best, *(one.bound for one in waiting)])


def _first_intervals(scale: _Scale, period: float) -> List[_Interval]:
    """Return intervals up to a slowest stage that no better plan can have, or while time lasts.

    Where a plan is found, bisection of its slowest stage finds better ones: these prove more bounds.
    """
    ratio, width, steps = ROUNDS[0]
    rest, high, made = scale.everything._replace(low=period), 0.0, []  # type: _Interval, float, List[_Interval]
    # Everything slower at once: when that cannot be better, no more intervals are needed.
    while scale.time_left() and scale.lower(rest, rest.prices)[0] < scale.best and len(made) < 60:
        low, least = rest.low, scale.found[0]
        # The first interval begins at 0 where a device is free.
        end = math.sqrt(low * high) if high > low * ROUNDS[1][0] > 0 else low * ratio or 1e-9
        found = scale.ascend(rest._replace(high=end), steps)
        if found.bound < scale.good:
            scale.find(found, width)
        if scale.found[0] < least:
            f, b = scale.fleet.tables.forward_s, scale.fleet.tables.backward_s
            high = max(float(f[o, first, last] + b[o, first, last]) for first, last, o, _ in scale.found[1])
            ratio, rest = ROUNDS[0][0], rest._replace(prices=found.prices)
        else:
            made.append(found)
            rest = rest._replace(low=end, prices=rest.prices if scale.found[1] else found.prices)
            ratio = ROUNDS[0][0] if found.bound < scale.good and scale.found[1] else min(2.0, ratio * 1.1)
    return [*made, rest._replace(bound=scale.lower(rest, rest.prices)[0])]


def _refined(scale: _Scale, waiting: List[_Interval], ratio: float, width: int, steps: int) -> List[_Interval]:
    """Split the open intervals by that ratio; improve the prices of each part, and search it with a wider beam.

    The slowest stage gets faster from part to part. The prices of a part often fit the next one. They may also show
    that no part behind it has a better plan.
    """
    made, parts = [], []  # type: Tuple[List[_Interval], List[_Interval]]
    for one in sorted(waiting, key=lambda one: -one.low):
        if one.bound >= scale.good or one.low == 0 or math.isinf(one.high):
            made.append(one)
        else:
            ends = np.geomspace(one.high, one.low, 2 + int(math.log(one.high / one.low, ratio))).tolist()
            parts += [one._replace(low=low, high=high) for high, low in zip(ends, ends[1:])]
    rest, above = scale.everything, math.inf
    if parts:
        rest = rest._replace(low=parts[-1].low, high=parts[0].high, prices=parts[0].prices)
    for k, (low, high, bound, own, _) in enumerate(parts):
        if not scale.time_left():
            return made + parts[k:]
        rest = scale.without_worse(rest._replace(high=high))
        rest = rest._replace(bound=scale.lower(rest, rest.prices)[0])
        if rest.bound >= scale.good:
            return [*made, rest]
        part = rest._replace(low=low, bound=bound)
        prices = max((own, rest.prices), key=lambda one: scale.lower(part, one)[0])
        made.append(scale.count(scale.ascend(part._replace(prices=prices), steps)))
        rest = rest._replace(prices=made[-1].prices)
        # A wide beam for this part also finds plans whose slowest stage is faster.
        if made[-1].bound < scale.good and (above >= scale.good or width <= ROUNDS[1][1]):
            scale.find(rest, width)
        above = made[-1].bound
    return made
