"""Search for the best plan exactly: contiguous layers on stages, any devices in any order, with a proof.

The search builds the pipeline from its last stage to its first. Each stage then knows its microbatches in flight, and
so its memory. Partial plans that share first layer, devices used and front stage are compared in all that their
completions depend on. Those that cannot win are dropped. Bounds on the layers still missing prune the rest. Where the
devices are too many for that, hwaware.placement.scale searches.
"""

from __future__ import annotations

import functools
import math
import random
import time
from typing import Optional, Tuple

from hwaware.costs import PreparedCosts
from hwaware.costs.stages import located
from hwaware.placement.baselines import starting_plans
from hwaware.placement.blocks import in_blocks, most_blocks
from hwaware.placement.bounds import least_objective_s
from hwaware.placement.fleet import fastest_inside_hosts, growing_parts, like_parts, optimistic
from hwaware.placement.improve import Judge, State, improved, polish, random_state
from hwaware.placement.infeasible import short_of_memory, why_infeasible
from hwaware.placement.kinds import kinds_bound_s, likened, monotone
from hwaware.placement.problem import OPTIMALITY_TOLERANCE, Answer, Problem
from hwaware.placement.scale import GOOD_ENOUGH, load_at_scale, solve_at_scale
from hwaware.placement.search import search
from hwaware.placement.ways import Members, Space, count_states, device_classes, prepare, spaces
from hwaware.plans import Plan

# States of one search: what fits in a quarter of a GiB at 8 bytes a state. Sixteen unlike devices and 24 layers fit.
MAX_STATES = 32_000_000
# More pairs of ways to build a stage that may be neighbours than this take seconds to price.
MAX_PAIRS = 250_000
# More devices than this are not even looked through for classes.
MAX_DEVICES = 64
# Parts of the time limit for the exact search, that of a large cluster, and small changes of a plan without proof.
SEARCH_PART, SCALE_PART, POLISH_PART = 0.5, 0.9, 0.3
# For plans with like devices taken as alike, where they are too many to search as they are.
ALIKE_PART = 0.45
# For each side task: baselines, a plan to begin with, changes of large plans, bounds where not all ways are listed.
SIDE_PART = 0.1
# Searches of more states than this start from a good plan.
WARM_STATES = 300_000
# Up to so many devices, a search that is not the exact one is so unlikely that its kernels are not loaded beforehand.
FEW_DEVICES = 8


def solve(problem: Problem) -> Answer:
    """Return the best plan, never worse than a baseline, with a bound that proves it where time allows."""
    load_kernels(problem)
    started = time.monotonic()
    short = short_of_memory(problem)
    if short is not None:
        return Answer(None, math.inf, short)
    starts = starting_plans(problem, started + SIDE_PART * problem.time_limit_s)
    best = min(starts, key=problem.value, default=None)
    best_s = problem.value(best)
    problem = problem._replace(has_plan=math.isfinite(best_s))
    answer = _polished(_solved_alike(problem, started), problem, started + problem.time_limit_s)
    value = problem.value(answer.plan)
    if best_s < value * (1 - 1e-12):
        # Alpa's own mapping may put unlike devices in one stage, which the search leaves out.
        return Answer(best, least_objective_s(problem))
    return _bounded_by_kinds(answer, problem, value, started + problem.time_limit_s)


def _solved_alike(problem: Problem, started: float) -> Answer:
    """Return the search's answer; if it cannot list all ways to build a stage, first search like devices as alike."""
    found = _space(problem)
    alike = None if found is not None and found[1].complete else likened(problem)
    if alike is None:
        return _solved(problem, started)
    # The search for large clusters finds nothing better where hardly two devices are alike.
    enough = found is None and problem.objective != "per-device"
    part_s = (1 - SIDE_PART if enough else ALIKE_PART) * problem.time_limit_s
    good = _solved(alike._replace(time_limit_s=part_s), started).plan
    good_s = problem.value(good)
    if enough and math.isfinite(good_s):
        return Answer(good, least_objective_s(problem))
    left_s = max(1e-3, started + (1 - SIDE_PART) * problem.time_limit_s - time.monotonic())
    answer = _solved(problem._replace(time_limit_s=left_s), time.monotonic())
    if math.isinf(good_s) or problem.value(answer.plan) <= good_s:
        return answer
    return Answer(good, least_objective_s(problem) if answer.bound_s is None else answer.bound_s)


def _bounded_by_kinds(answer: Answer, problem: Problem, value: float, deadline: float) -> Answer:
    """Return the answer with the bound of a cluster whose kinds are alike, if that is better."""
    bound = answer.bound_s
    if problem.target != "alpa" or bound is None or value <= bound * (1 + OPTIMALITY_TOLERANCE):
        return answer
    left_s = min(SIDE_PART * problem.time_limit_s, deadline - time.monotonic())
    found = kinds_bound_s(problem, value, left_s)
    return answer if found is None else answer._replace(bound_s=max(bound, found))


def _polished(answer: Answer, problem: Problem, deadline: float) -> Answer:
    """Improve a plan without a proof by changes that help; anneal that of few devices once more.

    On many devices, a plan so close to its bound that the search ended needs no change.
    """
    value = problem.value(answer.plan)
    few = len(problem.costs.devices) <= MAX_DEVICES
    part, close = (POLISH_PART, OPTIMALITY_TOLERANCE) if few else (SIDE_PART, GOOD_ENOUGH)
    if answer.plan is None or answer.bound_s is None or value <= answer.bound_s * (1 + close):
        return answer
    found = _improved(located(answer.plan), problem, min(deadline, time.monotonic() + part * problem.time_limit_s))
    better_s = problem.value(found)
    if better_s >= value:
        return answer
    # Changes may leave the plans for which the bound was proved.
    holds = better_s >= answer.bound_s * (1 - OPTIMALITY_TOLERANCE)
    return Answer(found, answer.bound_s if holds else least_objective_s(problem), answer.reason)


def _improved(state: State, problem: Problem, until: float) -> Optional[Plan]:
    """Return the state after random changes that help; None if it does not fit."""
    judge, rng = Judge(problem._replace(judge=None)), random.Random(problem.seed)
    found = (improved if len(judge.names) <= MAX_DEVICES else polish)(state, judge, rng, until)
    return None if judge.price(found).misfit else problem.plan(found)


def _warm_start(problem: Problem, until: float) -> Answer:
    """Return a good plan, perhaps with a bound, before a large search: a better plan prunes more."""
    if problem.objective != "per-device" and len(problem.costs.devices) > FEW_DEVICES:  # its kernels are loaded
        return solve_at_scale(problem, until)
    judge = Judge(problem._replace(judge=None))
    start, *_ = [*filter(judge.may_run, judge.baselines()), random_state(judge, random.Random(0))]
    return Answer(_improved(start, problem, until))


def _solved(problem: Problem, started: float) -> Answer:
    """Search the problem as it is: in blocks, exactly, or as a large cluster."""
    found = _space(problem)
    if found is None:
        return _too_large(problem, started)
    classes, space = found
    blocks = in_blocks(problem, most_blocks(len(space.options)))
    if blocks is not None:
        return blocks.of_layers(_solved(blocks.problem, started), problem)
    large = _states(problem, classes) * len(space.options) > WARM_STATES
    warm = _warm_start(problem, time.monotonic() + SIDE_PART * problem.time_limit_s) if large else Answer(None)
    best = problem.value(warm.plan)
    good = warm.bound_s is not None and best <= warm.bound_s * (1 + GOOD_ENOUGH)
    if good and not space.complete and fastest_inside_hosts(problem.costs):
        return warm  # a search that cannot list all options would prove no more
    return _searched(problem, classes, space, started, warm.plan, best)


def _space(problem: Problem) -> Optional[Tuple[Members, Space]]:
    """Return the device classes and ways to build a stage, if these are few enough for the exact search."""
    if len(problem.costs.devices) > MAX_DEVICES:
        return None
    classes, layers = device_classes(problem), len(problem.costs.workload.layers)
    if _states(problem, classes) * len(classes) > MAX_STATES:
        return None
    fitting = (one for one in spaces(problem, classes) if one.fits(classes, layers, MAX_STATES, MAX_PAIRS))
    return next(((classes, one) for one in fitting), None)


def _states(problem: Problem, classes: Members) -> int:
    """Return the number of first layers and devices used, of one front stage."""
    return count_states(classes) * (len(problem.costs.workload.layers) + 1)


def _searched(
    problem: Problem, members: Members, space: Space, started: float, warm: Optional[Plan], best: float
) -> Answer:
    """Search exactly for something better than the plan that is known, if one is."""
    deadline = started + SEARCH_PART * problem.time_limit_s
    arrays = prepare(problem, members, space, deadline)
    found = None if arrays is None else search(arrays, deadline, best)
    if arrays is None or found is None:
        if math.isinf(best) or warm is None:
            return _too_large(problem, started)
        return Answer(_improved(located(warm), problem, deadline) or warm, least_objective_s(problem))
    known = warm if math.isfinite(best) else None
    plan = known if found.stages is None else arrays.plan(found.stages)
    if plan is None:
        proved = math.isinf(found.bound_s) and arrays.complete
        return Answer(None, math.inf if proved else None, why_infeasible(arrays, problem, proved, deadline))
    return Answer(plan, found.bound_s if arrays.complete else _bound_beyond_s(problem, found.objective_s))


def _too_large(problem: Problem, started: float) -> Answer:
    """Return the best plan on parts of the cluster, where the whole is beyond exact reach.

    Parts grow from a small one to all of the cluster, so more devices never make it worse. For throughput per device,
    the exact search takes the parts that it can search.
    """
    deadline, best, value = started + SCALE_PART * problem.time_limit_s, Answer(None), math.inf
    per_device = problem.objective == "per-device"
    parts = like_parts(problem) if per_device else growing_parts(problem)
    parts = [part for part in parts if part is problem or short_of_memory(part) is None]
    if per_device:  # the largest first: it may be the only one with enough memory
        parts = [*parts[-1:], *parts[:-1]]
    for k, part in enumerate(parts):
        now = time.monotonic()
        if k > 0 and now > deadline:
            break
        part_s = max(1e-3, deadline - now) / (len(parts) - k)
        if per_device:
            large = len(part.costs.devices) > min(MAX_DEVICES, len(problem.costs.devices) - 1)
            found = _solved(part._replace(objective="step" if large else "per-device", time_limit_s=part_s), now)
        else:
            found = solve_at_scale(part, now + part_s, value)
        price = problem.value(found.plan)
        # A proof for a part says nothing of the whole.
        bound_s = found.bound_s if part is problem else best.bound_s
        if price < value or best.plan is None:
            value, best = price, found
        best = best._replace(bound_s=bound_s)
    if best.plan is None and per_device:
        return Answer(None, None, "No part of the cluster that was tried has a plan. To fix: use objective step.")
    return best if best.plan is None or best.bound_s is not None else best._replace(bound_s=least_objective_s(problem))


def _bound_beyond_s(problem: Problem, best_s: float) -> float:
    """Bound all plans where not all were listed, by the fluid bound or the best plan over the best links."""
    bound, best = least_objective_s(problem), problem._replace(costs=optimistic(problem.costs))
    space = _space(best) if problem.target == "alpa" else None
    if space is not None and space[1].complete:
        until = time.monotonic() + SIDE_PART * problem.time_limit_s
        arrays = prepare(best, *space, until)
        found = None if arrays is None else search(monotone(arrays), until, best_s)
        bound = bound if found is None else max(bound, found.bound_s)
    return min(bound, best_s)


def load_kernels(problem: Problem) -> None:
    """Compile the kernels of a problem's searches, or read them from numba's cache, before the clock starts."""
    devices = len(problem.costs.devices)
    _load_kernels(problem.objective == "per-device" or devices <= MAX_DEVICES, devices > FEW_DEVICES)


@functools.lru_cache(maxsize=None)
def _load_kernels(exact: bool, at_scale: bool) -> None:
    from hwaware.cluster import ClusterProfile
    from hwaware.workload import Workload

    problem = Problem(PreparedCosts(Workload.uniform(microbatch_size=1), ClusterProfile.uniform(hosts=1)), 1)
    starting_plans(problem)
    arrays = prepare(problem) if exact else None
    if arrays is not None:
        search(arrays, time.monotonic() + 3600.0)
    if at_scale:
        load_at_scale(problem)
