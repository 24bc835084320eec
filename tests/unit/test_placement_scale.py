"""The search for large clusters: its bounds hold, its prices are those of `evaluate`, its plans are good."""

from __future__ import annotations

import itertools
import math
import os
import random
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest
from builders import (
    card,
    cluster,
    device,
    link,
    plan,
    random_workload,
    seeds,
    stage,
    thinned,
    with_cards,
    with_devices,
    with_links,
)

import hwaware
from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import PlanError
from hwaware.placement import exact, scale
from hwaware.placement.bounds import fluid_bound_s, fluid_period_s
from hwaware.placement.fleet import fastest_inside_hosts, make_fleet, optimistic
from hwaware.placement.infeasible import short_of_memory
from hwaware.placement.problem import OPTIMALITY_TOLERANCE, Problem


def random_cluster(rng, hosts, per_host, kinds=2, alike=True):
    """Hosts of several kinds; links alike between two kinds unless told otherwise."""
    speeds = [rng.uniform(0.3, 1.0) for _ in range(kinds)]
    devices = [
        device(f"h{h}:{d}", speeds[h % kinds], kind=f"k{h % kinds}", memory_bandwidth_bytes_per_s=1e11)
        for h in range(hosts)
        for d in range(per_host)
    ]
    rates = {(a, b): rng.uniform(0.2, 3) * 1e9 for a in range(kinds) for b in range(a, kinds)}
    links = [link(f"h{h}", f"h{h}", 5e9, 1e-4) for h in range(hosts)]
    for a, b in itertools.combinations(range(hosts), 2):
        one, other = sorted((a % kinds, b % kinds))
        rate = rates[one, other] if alike else rng.uniform(0.2, 3) * 1e9
        links.append(link(f"h{a}", f"h{b}", rate, 1e-3))
    return cluster(devices, links)


def every_plan(workload, profile, microbatches, schedule="1f1b"):
    """Every plan whose stages are like devices of one host or all devices of several hosts, in equal replicas."""
    hosts = {h.name: [d for d in profile.devices if d.host == h.name] for h in profile.hosts}
    sets = [
        c for devices in hosts.values() for n in range(1, len(devices) + 1) for c in itertools.combinations(devices, n)
    ]
    for count in range(2, len(hosts) + 1):
        for chosen in itertools.combinations(hosts.values(), count):
            if len({devices[0].kind for devices in chosen}) == 1:
                sets.append(tuple(d for devices in chosen for d in devices))
    layers, samples = len(workload.layers), workload.microbatch_size

    def built(used, first):
        if first == layers:
            yield ()
            return
        for chosen in sets:
            names = [d.id for d in chosen]
            if used & set(names):
                continue
            for replicas in range(1, len(names) + 1):
                group = len(names) // replicas
                if len(names) % replicas or samples % replicas:
                    continue
                parts = [names[k * group : (k + 1) * group] for k in range(replicas)]
                for last in range(first, layers):
                    for rest in built(used | set(names), last + 1):
                        yield (stage(first, last, *parts), *rest)

    for stages in built(set(), 0):
        yield plan(*stages, num_microbatches=microbatches, schedule=schedule)


def brute_force(workload, profile, microbatches):
    costs, best = PreparedCosts(workload, profile), math.inf
    for candidate in every_plan(workload, profile, microbatches):
        cost = evaluate(candidate, workload, profile, costs)
        if cost.fits:
            best = min(best, cost.step_s)
    return best


@pytest.mark.parametrize(
    ("card_bytes_per_s", "head_start_s"), [(None, None), (2e8, None), (None, 0.01), (None, 0.1), (None, 5.0)]
)
@pytest.mark.parametrize("seed", seeds(8, every=4))
def test_the_bound_holds_and_the_plan_is_near(monkeypatch, seed, card_bytes_per_s, head_start_s):
    monkeypatch.setattr(exact, "MAX_STATES", 0)
    rng = random.Random(seed)
    profile = random_cluster(rng, hosts=2, per_host=2, kinds=rng.choice([1, 2]), alike=seed % 4 != 3)
    if card_bytes_per_s is not None:
        profile = with_cards(profile, card_bytes_per_s, 2 * card_bytes_per_s)
    profile = with_devices(profile, head_start_s=head_start_s)
    workload, microbatches = random_workload(rng, rng.choice([2, 3]), rng.choice([2, 4])), rng.choice([1, 2, 4, 16])
    best = brute_force(workload, profile, microbatches)
    found = hwaware.plan(workload, profile, num_microbatches=microbatches, time_limit_s=3)
    assert found.bound_s <= best * (1 + 1e-12)
    assert found.predicted_step_s <= 1.02 * best
    boxes = {device.id: device for device in profile.devices}
    stages = [[boxes[name] for name in stage.devices] for stage in found.stages]
    listed = [len(own) == len(boxes) or len({box.host for box in own}) == 1 for own in stages]
    if all(listed) and all(len({box.kind for box in own}) == 1 for own in stages):  # as `every_plan` has them
        assert found.predicted_step_s >= best * (1 - 1e-12)
    assert fluid_bound_s(PreparedCosts(workload, profile), microbatches) <= best


def test_prices_are_those_of_evaluate(monkeypatch):
    monkeypatch.setattr(exact, "MAX_STATES", 0)
    rng = random.Random(3)
    every = (("step", "gpipe"), ("step", "1f1b"), ("alpa", "1f1b"), ("step", "inference"))
    for objective, schedule in thinned(every):
        profile, workload = random_cluster(rng, 4, 4), random_workload(rng, 12, 8)
        found = hwaware.plan(
            workload, profile, num_microbatches=32, objective=objective, schedule=schedule, time_limit_s=2
        )
        assert found.bound_s <= found.objective_s <= 1.2 * found.bound_s
        proved = found.objective_s <= found.bound_s * (1 + OPTIMALITY_TOLERANCE)
        assert found.status == ("optimal" if proved else "feasible")
        for baseline in ("even", "proportional", "alpa", "megatron"):
            other = hwaware.plan(
                workload, profile, num_microbatches=32, objective=objective, schedule=schedule, solver=baseline
            )
            assert other.objective_s is None or other.objective_s >= found.objective_s * (1 - 1e-12)


@pytest.mark.parametrize("head_start_s", [None, 0.3])
@pytest.mark.parametrize(("objective", "schedule"), [("step", "1f1b"), ("alpa", "1f1b"), ("step", "gpipe")])
def test_its_own_prices_are_those_without_head_starts(objective, schedule, head_start_s):
    rng = random.Random(6)
    cluster, workload = random_cluster(rng, 4, 4), random_workload(rng, 8, 8)
    profile = with_devices(cluster, head_start_s=head_start_s)
    problem = Problem(PreparedCosts(workload, profile, schedule), 32, objective)
    exact._load_kernels(exact=False, at_scale=True)  # compiling does not count
    search = scale._Scale(problem, make_fleet(problem), time.monotonic() + 1.0)
    scale._intervals(search, fluid_period_s(problem.costs))
    value, stages = search.found
    cost = evaluate(search.plan(stages), workload, cluster)
    assert cost.objective_s(objective) == pytest.approx(value, rel=1e-9)
    assert cost.fits


def test_the_large_search_counts_sends_through_one_card():
    rng = random.Random(2)
    profile, workload = random_cluster(rng, 6, 8, kinds=3), random_workload(rng, 12, 16)
    slow = with_cards(profile, 3e8, 6e8)
    problem = Problem(PreparedCosts(workload, slow), 32)
    freely = make_fleet(Problem(PreparedCosts(workload, profile), 32))
    blind = make_fleet(problem)._replace(of_units=freely.of_units)
    best = []
    for fleet in (blind, make_fleet(problem)):
        search = scale._Scale(problem, fleet, time.monotonic() + 1e9)
        scale._first_intervals(search, fluid_period_s(problem.costs))
        best.append(evaluate(search.plan(search.found[1]), workload, slow, problem.costs).step_s)
    assert best[1] < best[0]


@pytest.mark.parametrize("rates", [(1e11, 1.01e11), (2e8, 3e8)])
def test_hosts_with_unlike_cards_still_make_a_stage_together(rates):
    rng = random.Random(4)
    profile, workload = random_cluster(rng, 2, 2, kinds=1), random_workload(rng, 3, 4)
    cards = tuple(card(f"h{k}:0", f"h{k}:1", send=rate) for k, rate in enumerate(rates))
    profile = msgspec.structs.replace(profile, shared_cards=cards)
    problem = Problem(PreparedCosts(workload, profile), 4)
    assert make_fleet(problem).of_units.kind.tolist() == [0, 0]
    assert scale.solve_at_scale(problem, time.monotonic() + 3).bound_s <= brute_force(workload, profile, 4) * (
        1 + 1e-12
    )


@pytest.mark.parametrize("seed", seeds(4, 8, every=2))
def test_of_an_inference_only_the_way_there_is_in_the_bound(seed):
    rng = random.Random(seed)
    profile = random_cluster(rng, 2, 1, kinds=rng.choice([1, 2]))
    workload = random_workload(rng, rng.choice([2, 3, 4]), 4)
    profile = msgspec.structs.replace(profile, links=(*profile.links, link("h1", "h0", 2e7, 0.01)))
    problem = Problem(PreparedCosts(workload, profile, "inference"), 8)
    best = min(
        evaluate(one, workload, profile, problem.costs).step_s
        for one in every_plan(workload, profile, 8, schedule="inference")
    )
    assert scale.solve_at_scale(problem, time.monotonic() + 3).bound_s <= best * (1 + 1e-12)


def test_more_freedom_gives_no_worse_plan():
    rng = random.Random(1)
    profile, workload = random_cluster(rng, 9, 8, kinds=3), random_workload(rng, 16, 16)
    for target in ("alpa", "any"):
        hwaware.plan(workload, profile, num_microbatches=64, time_limit_s=0.1, target=target)  # compiles
    alpa, free = (
        hwaware.plan(workload, profile, num_microbatches=64, time_limit_s=limit_s, target=target)
        for limit_s, target in ((3, "alpa"), (9, "any"))
    )
    assert free.objective_s <= alpa.objective_s * 1.01
    assert free.bound_s <= alpa.objective_s


def test_throughput_per_device_takes_few_of_many_devices():
    rng = random.Random(1)
    profile, workload = random_cluster(rng, 9, 8, kinds=3), random_workload(rng, 6, 4)
    found = hwaware.plan(workload, profile, num_microbatches=8, time_limit_s=1, objective="per-device")
    devices = sum(len(stage.devices) for stage in found.stages)
    assert found.objective_s == pytest.approx(devices * found.predicted_step_s)
    assert devices == 1
    assert found.bound_s <= found.objective_s


def test_parts_with_too_little_memory_take_no_time_from_others(monkeypatch):
    """Only 48 of 96 devices have enough memory: a search that tries smaller parts first may not come so far."""
    rng = random.Random(1)
    profile, workload = random_cluster(rng, 24, 4, kinds=2), random_workload(rng, 12, 8)
    need = sum(4 * layer.parameter_bytes + 3 * layer.activation_bytes for layer in workload.layers)
    profile = with_devices(profile, memory_bytes=int(0.08 * need))
    tried, solved = [], exact._solved
    monkeypatch.setattr(exact, "_solved", lambda part, started: tried.append(part) or solved(part, started))
    found = hwaware.plan(workload, profile, num_microbatches=32, objective="per-device", time_limit_s=2.0)
    assert found.status == "feasible"
    _, first, *others = tried
    assert all(short_of_memory(part) is None for part in (first, *others))
    assert len(first.costs.devices) == max(len(part.costs.devices) for part in (first, *others)) < 96


def test_a_large_cluster_is_planned_in_time():
    rng = random.Random(1)
    profile, workload = random_cluster(rng, 8, 8, kinds=4), random_workload(rng, 24, 16)
    hwaware.plan(workload, profile, num_microbatches=64, time_limit_s=0.1)  # compiles
    start_s = time.process_time()
    found = hwaware.plan(workload, profile, num_microbatches=64, time_limit_s=8)
    assert time.process_time() - start_s < 20  # the limit is looked at between steps of the search
    assert 0.8 * found.objective_s < found.bound_s <= found.objective_s
    assert len({d for stage in found.stages for d in stage.devices}) <= 64


def test_a_cluster_of_medium_size_is_nearly_proved():
    # Two kinds with links of their own inside hosts: too many orders of like devices to list them all.
    rng = random.Random(1)
    workload, profile = random_workload(rng, 12, 16), random_cluster(rng, 4, 8)
    found = hwaware.plan(workload, profile, num_microbatches=16)
    assert found.objective_s <= found.bound_s * (1 + scale.GOOD_ENOUGH)
    assert found.objective_s == pytest.approx(evaluate(found, workload, profile).step_s, rel=1e-12)


def test_groups_over_hosts_are_looked_for_where_they_are_faster():
    rng = random.Random(5)
    workload, profile = random_workload(rng, 12, 16), random_cluster(rng, 4, 8)
    assert fastest_inside_hosts(PreparedCosts(workload, profile))
    inverted = with_links(profile, bandwidth_bytes_per_s=lambda one: 1e8 if one.source == one.target else 5e9)
    assert not fastest_inside_hosts(PreparedCosts(workload, inverted))
    # Also where devices are so far ahead that no message takes anything of a step.
    assert not fastest_inside_hosts(PreparedCosts(workload, with_devices(inverted, head_start_s=10.0)))


def test_memory_that_cannot_be_met_is_said():
    rng = random.Random(1)
    profile, workload = random_cluster(rng, 8, 8, kinds=4), random_workload(rng, 24, 16)
    found = hwaware.plan(workload, with_devices(profile, memory_bytes=1000), time_limit_s=1)
    assert found.status == "infeasible"
    assert found.reason.startswith("Memory: layer ")
    assert "To fix:" in found.reason


def test_optimistic_links_are_never_slower():
    rng = random.Random(4)
    profile = random_cluster(rng, 4, 2, alike=False)
    workload = random_workload(rng, 4, 4)
    costs = PreparedCosts(workload, profile)
    better = optimistic(costs)
    for _ in range(20):
        names = rng.sample([device.id for device in profile.devices], 2)
        placed = plan(*((2 * k, 2 * k + 1, name) for k, name in enumerate(names)))
        assert evaluate(placed, workload, profile, better).step_s <= evaluate(placed, workload, profile, costs).step_s


def test_units_are_like_devices_of_one_host():
    profile = random_cluster(random.Random(5), 3, 4)
    fleet = make_fleet(Problem(PreparedCosts(random_workload(random.Random(5), 4, 8), profile), 4, "step", 1.0))
    assert sorted(len(unit) for unit in fleet.units) == [4, 4, 4]
    assert fleet.counts.tolist() == [8, 4]
    assert fleet.of_units.alike
    assert {t.devices for t in fleet.templates} == {1, 2, 4, 8} | ({3} & {t.devices for t in fleet.templates})
    with pytest.raises(PlanError):
        evaluate(plan((0, 9, "x")), random_workload(random.Random(5), 4, 8), profile)


def all_pipelines(search, of, prices):
    """Return all pipelines of an interval with their bounds, as (priced, without prices, used devices, stages)."""
    weight, less, fixed, per_longer = search._rules(of.low)
    stages, ways, layers = of.stages, search.ways, len(of.stages.at) - 2
    by_end = {end: range(stages.at[end], stages.at[end + 1]) for end in range(1, layers + 1)}

    def rear_parts(cut, behind):
        if cut == 0:
            yield behind
        for k in by_end.get(cut, ()):
            if stages.turn[k] <= of.high and stages.most[k] >= ways.in_flight[len(behind)]:
                yield from rear_parts(int(stages.rows[k, 0]), (k, *behind))

    for made in rear_parts(layers, ()):
        template = stages.rows[list(made), 2]
        sends = [
            ways.link[ways.port[one], ways.port[other], stages.rows[k, 1] - 1]
            for k, one, other in zip(made, template, template[1:])
        ]
        used = np.bincount(ways.kind[template], ways.devices[template], minlength=len(prices))
        sums = [math.inf]
        for place, slowest in enumerate(made):
            if stages.turn[slowest] >= of.low:
                front, behind = list(made[:place]), list(made[place + 1 :])
                sums.append(
                    sum(stages.once[list(made)])
                    + sum(stages.turn[front]) + sum(sends[:place])
                    + fixed + per_longer * stages.longer[slowest]
                    + weight * (sum(stages.turn[behind]) + sum(sends[place:])) - less * len(behind)
                )  # fmt: skip
        if min(sums) < math.inf:
            yield min(sums) + prices @ (used - search.fleet.counts), min(sums), used, made


@pytest.mark.parametrize("num_microbatches", [3, 16])
@pytest.mark.parametrize("seed", seeds(8, every=2))
def test_bounds_are_those_of_all_pipelines_one_by_one(seed, num_microbatches):
    """Least bounds, stages that a better pipeline can have, and pipelines that have enough devices."""
    rng = random.Random(seed)
    profile, workload = random_cluster(rng, 3, 2, kinds=2), random_workload(rng, 4, 4)
    problem = Problem(PreparedCosts(workload, profile), num_microbatches)
    search = scale._Scale(problem, make_fleet(problem), time.monotonic() + 1e9)
    stages = search.fleet.stages
    stages.most[:] = [min(most, rng.choice([1.0, 3.0, 99.0])) for most in stages.most]  # some memory is scarce
    turns = sorted(stages.turn)
    prices = np.array([rng.uniform(0, 0.1) * turns[-1] for _ in search.fleet.counts])
    low, high = turns[len(turns) // 4], turns[-2]
    of = search.everything._replace(low=low, high=high, prices=prices)
    found = list(all_pipelines(search, of, prices))
    assert search.lower(of, prices)[0] == pytest.approx(min(found)[0])

    values = sorted(value for value, *_ in found)
    search.best = (values[len(values) // 3] + values[len(values) // 3 + 1]) / 2
    better = [one for one in found if one[0] < search.best]
    kept = search.without_worse(of)
    needed = {tuple(stages.rows[k]) for *_, made in better for k in made}
    assert needed <= set(map(tuple, kept.stages.rows.tolist())) < set(map(tuple, stages.rows.tolist()))
    assert search.lower(kept, prices)[0] == pytest.approx(min(found)[0])

    bounds, parts, _ = scale.kernels.pipelines_below(
        search.best, 10**6, search.ways, kept.stages, prices, search.fleet.counts, low, high, search._rules(low),
        search.lower(kept, prices)[2],
    )  # fmt: skip
    fitting = [bound for _, bound, used, _ in better if (used <= search.fleet.counts).all()]
    assert 0 < len(fitting) < len(better)
    # One pipeline counts once for each stage that can be its slowest: the least counts.
    assert min(bounds) == pytest.approx(min(fitting))
    assert len(fitting) <= len(parts)
    assert all(any(bound == pytest.approx(one) for one in bounds) for bound in fitting)


def test_counted_devices_make_a_bound_no_smaller(monkeypatch):
    monkeypatch.setattr(scale, "MOST_PARTS", 10**6)
    rng = random.Random(2)
    profile, workload = random_cluster(rng, 4, 4), random_workload(rng, 8, 8)
    problem = Problem(PreparedCosts(workload, profile), 16)
    search = scale._Scale(problem, make_fleet(problem), time.monotonic() + 1e9)
    best = hwaware.plan(workload, profile, num_microbatches=16).objective_s
    # Free devices: only counting keeps a pipeline from taking them twice.
    of = search.everything._replace(low=fluid_period_s(problem.costs))
    free, stages, _ = search.lower(of, of.prices)
    used = np.bincount(search.ways.kind[stages[:, 2]], search.ways.devices[stages[:, 2]])
    assert (used > search.fleet.counts).any()
    search.best = 1.01 * best
    assert free < search.count(of).bound <= best


def test_a_known_plan_that_none_betters_leaves_only_a_bound():
    rng = random.Random(2)
    profile, workload = random_cluster(rng, 4, 4), random_workload(rng, 8, 8)
    problem = Problem(PreparedCosts(workload, profile), 16)
    known_s = 0.9 * scale.solve_at_scale(problem, time.monotonic() + 20.0).bound_s
    assert scale.solve_at_scale(problem, time.monotonic() + 20.0, known_s) == (None, pytest.approx(known_s), None)


def test_more_pipelines_than_can_be_listed_leave_a_bound_as_it_is(monkeypatch):
    rng = random.Random(2)
    problem = Problem(PreparedCosts(random_workload(rng, 8, 8), random_cluster(rng, 4, 4)), 16)
    search = scale._Scale(problem, make_fleet(problem), time.monotonic() + 1e9)
    monkeypatch.setattr(scale, "MOST_PARTS", 100)
    assert search.count(search.everything._replace(bound=0.25)).bound == 0.25
    assert search.found == (math.inf, [])


def test_a_bound_knows_how_many_stages_must_follow():
    """Each stage keeps two microbatches, so pipelines of 1F1B have at most two stages."""
    rng = random.Random(3)
    profile, workload = random_cluster(rng, 4, 2), random_workload(rng, 6, 4)
    problem = Problem(PreparedCosts(workload, profile), 16)
    search = scale._Scale(problem, make_fleet(problem), time.monotonic() + 1e9)
    np.minimum(search.fleet.stages.most, 2.0, out=search.fleet.stages.most)
    quickest = np.full((6, 7), math.inf)
    for (first, end, _), turn in zip(search.fleet.stages.rows.tolist(), search.fleet.stages.turn):
        quickest[first, end] = min(quickest[first, end], turn)
    of_two = min(max(quickest[0, cut], quickest[cut, 6]) for cut in range(1, 6))
    of_three = min(max(quickest[0, a], quickest[a, b], quickest[b, 6]) for a in range(1, 5) for b in range(a + 1, 6))
    high, everything = min(of_two, quickest[0, 6]) * 0.999, search.everything
    assert of_three < high
    assert math.isinf(search.lower(everything._replace(low=0.1 * high, high=high), everything.prices)[0])
    of_both = everything._replace(low=0.1 * high, high=high * 1.002)
    assert math.isfinite(search.lower(of_both, everything.prices)[0])


def test_no_kernel_is_compiled_while_the_clock_runs():
    """In a process of its own: other tests load kernels too."""
    code = """
import random, numba
from test_placement_scale import random_cluster, random_workload
import hwaware
from hwaware.costs import PreparedCosts
from hwaware.placement import exact, kernels, scale_kernels
from hwaware.placement.problem import Problem

def compiled():
    rooms = vars(kernels), vars(scale_kernels)
    found = (one for room in rooms for one in room.items())
    return {name: one.signatures for name, one in found if isinstance(one, numba.core.dispatcher.Dispatcher)}

for hosts in (20, 3):
    rng = random.Random(1)
    profile, workload = random_cluster(rng, hosts, 4), random_workload(rng, 8, 8)
    exact.load_kernels(Problem(PreparedCosts(workload, profile), 16))
    before = compiled()
    assert sum(map(bool, before.values())) >= 4
    assert hwaware.plan(workload, profile, num_microbatches=16, time_limit_s=5).stages
    assert compiled() == before
"""
    line = [sys.executable, "-c", code]
    paths = os.pathsep.join([*sys.path, os.path.dirname(__file__)])
    done = subprocess.run(line, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_free_device_ends_the_search_of_a_large_cluster():
    """Work without FLOPs takes no time on any device: intervals of the slowest stage begin at 0."""
    rng = random.Random(1)
    profile = random_cluster(rng, 10, 4)
    workload = msgspec.structs.replace(
        random_workload(rng, 6, 4),
        layers=tuple(
            msgspec.structs.replace(one, forward_flops=0.0, backward_flops=0.0)
            for one in random_workload(rng, 6, 4).layers
        ),
    )
    found = hwaware.plan(workload, profile, num_microbatches=8, time_limit_s=20.0)
    assert found.status in ("optimal", "feasible")
    assert found.bound_s <= found.objective_s
