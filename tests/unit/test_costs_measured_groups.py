"""Gradient sums and tensor-parallel all-reduces by measured collectives: by hand, and in every search."""

from __future__ import annotations

import itertools
import math
import random
import time

import builders
import instances
import msgspec
import numpy as np
import pytest
from builders import card, cluster, device, layer, link, links, seeds, workload

import hwaware
from hwaware.cluster import Collective, LinkSample
from hwaware.costs import PreparedCosts, evaluate
from hwaware.costs.measured_groups import with_links
from hwaware.placement import exact, kinds, scale
from hwaware.placement.problem import Problem

SIZES = (1e5, 1e6, 1e7)


def measured(*devices, seconds_per_byte=1e-8, op="all-reduce", dtype="float32", sizes=SIZES):
    """A collective whose time is proportional to its bytes."""
    points = tuple(LinkSample(bytes=size, seconds=size * seconds_per_byte) for size in sizes)
    return Collective(op=op, devices=devices, dtype=dtype, points=points)


def with_collectives(profile, *collectives):
    return msgspec.structs.replace(profile, collectives=collectives)


def replicated(*devices):
    """A plan whose one stage has one replica on each device."""
    return builders.plan((0, 0, *devices))


def sync_s(profile, *devices, nbytes=1e6):
    model = workload([layer(parameter_bytes=nbytes)], microbatch_size=len(devices))
    return evaluate(replicated(*devices), model, profile).stages[0].gradient_sync_s


FOUR = cluster("abcd")


@pytest.mark.parametrize("op", ["all-gather", "reduce-scatter"])
def test_one_size_of_another_operation_leaves_the_links_price(op):
    profile = with_collectives(FOUR, measured("a:0", "b:0", op=op, sizes=(1e6,)))
    assert sync_s(profile, "a:0", "b:0") == sync_s(FOUR, "a:0", "b:0") > 0
    assert sync_s(profile, "c:0", "d:0") == sync_s(FOUR, "c:0", "d:0")
    more = with_collectives(FOUR, measured("a:0", "b:0", op=op, sizes=(1e5, 1e6)))
    assert sync_s(more, "a:0", "b:0") != sync_s(FOUR, "a:0", "b:0")


def test_a_measured_group_takes_its_measured_time():
    profile = with_collectives(FOUR, measured("a:0", "b:0"))
    assert sync_s(FOUR, "a:0", "b:0") == pytest.approx(1e-3)  # 2 MB / 2 at 1 GB/s
    assert sync_s(profile, "a:0", "b:0") == pytest.approx(1e-2)
    assert sync_s(profile, "b:0", "a:0") == pytest.approx(1e-2)
    assert sync_s(profile, "a:0", "b:0", nbytes=3e6) == pytest.approx(3e-2)
    assert sync_s(profile, "a:0", "b:0", "c:0") == sync_s(FOUR, "a:0", "b:0", "c:0")


def test_a_like_group_takes_the_same_and_allows_for_other_links():
    profile = with_collectives(FOUR, measured("a:0", "b:0"))
    assert sync_s(profile, "c:0", "d:0") == pytest.approx(1e-2)
    slow = cluster("abcd", [*links(("ab", "ac", "ad", "bc", "bd"), 1e9), link("c", "d", 2.5e8)])
    assert sync_s(with_collectives(slow, measured("a:0", "b:0")), "c:0", "d:0") == pytest.approx(4e-2)


def test_two_like_groups_count_by_their_geometric_mean_and_each_by_itself():
    profile = with_collectives(FOUR, measured("a:0", "b:0"), measured("c:0", "d:0", seconds_per_byte=4e-8))
    assert sync_s(profile, "a:0", "b:0") == pytest.approx(1e-2)
    assert sync_s(profile, "c:0", "d:0") == pytest.approx(4e-2)
    assert sync_s(profile, "a:0", "d:0") == pytest.approx(2e-2)


def test_groups_of_other_kinds_or_of_other_numbers_a_host_are_unlike():
    mixed = cluster([device("a:0"), device("a:1"), device("b:0"), device("b:1", kind="gpu"), device("c:0")])
    profile = with_collectives(mixed, measured("a:0", "b:0"))
    assert sync_s(profile, "a:1", "c:0") == pytest.approx(1e-2)
    assert sync_s(profile, "a:0", "b:1") == sync_s(mixed, "a:0", "b:1")
    assert sync_s(profile, "a:0", "a:1") == sync_s(mixed, "a:0", "a:1")


def test_devices_with_layer_times_of_their_own_stay_of_their_kind():
    profile = with_collectives(FOUR, measured("a:0", "b:0"))
    times = {**builders.timed(1.0, 2.0), **builders.timed(2.0, 4.0, "c:0")}
    model = workload([layer(parameter_bytes=1e6, measured=times)], microbatch_size=2)
    assert evaluate(replicated("c:0", "d:0"), model, profile).stages[0].gradient_sync_s == pytest.approx(1e-2)


def test_groups_on_the_same_host_come_before_those_on_others():
    profile = cluster({"a": 3, "b": 2})
    profile = with_collectives(profile, measured("a:0", "a:1"), measured("b:0", "b:1", seconds_per_byte=9e-8))
    assert sync_s(profile, "a:1", "a:2") == pytest.approx(1e-2)


def test_curves_of_halves_and_of_other_types_tell_it_and_sends_do_not():
    halves = with_collectives(FOUR, measured("a:0", "b:0", op="all-gather"))
    assert sync_s(halves, "a:0", "b:0") > 1.5e-2  # two passes
    other = with_collectives(FOUR, measured("a:0", "b:0", dtype="bfloat16"))
    assert sync_s(other, "a:0", "b:0") == pytest.approx(1e-2)
    both = with_collectives(FOUR, measured("a:0", "b:0", dtype="bfloat16", seconds_per_byte=1), measured("a:0", "b:0"))
    assert sync_s(both, "a:0", "b:0") == pytest.approx(1e-2)
    sends = with_collectives(FOUR, measured("a:0", "b:0", op="send", seconds_per_byte=1))
    assert sync_s(sends, "a:0", "b:0") == sync_s(FOUR, "a:0", "b:0")


def test_more_bytes_never_take_less_though_a_shorter_sum_took_longer():
    points = tuple(LinkSample(bytes=size, seconds=t) for size, t in ((1e5, 0.5), (1e6, 0.1), (1e7, 0.6)))
    noisy = Collective(op="all-reduce", devices=("a:0", "b:0"), dtype="float32", points=points)
    times = [sync_s(with_collectives(FOUR, noisy), "a:0", "b:0", nbytes=size) for size in (1e5, 3e5, 1e6, 5e6)]
    assert times == sorted(times)


def test_tensor_parallel_all_reduces_take_measured_times():
    two = cluster({"a": 2})
    model = workload([layer(tensor_parallel_bytes=4e6, tensor_parallel_collectives=4)])
    whole = builders.plan((0, 0, ("a:0", "a:1")))
    by_links = evaluate(whole, model, two).stages[0].compute_s
    by_curve = evaluate(whole, model, with_collectives(two, measured("a:0", "a:1"))).stages[0].compute_s
    assert by_curve - by_links == pytest.approx(4 * (1e-2 - 1e-3))


def test_two_rings_at_once_take_at_least_their_card():
    profile = cluster({"a": 2, "b": 2}, cards=(card("a:0", "a:1", send=1e7),))
    profile = with_collectives(profile, measured("a:0", "b:0"), measured("a:1", "b:1"))
    model = workload([layer(parameter_bytes=1e6, tensor_parallel_bytes=8.0)], microbatch_size=2)
    stage = evaluate(builders.plan((0, 0, ("a:0", "a:1"), ("b:0", "b:1"))), model, profile).stages[0]
    assert stage.gradient_sync_s == pytest.approx(2 * 1e6 / 2 / 1e7)
    alone = evaluate(builders.plan((0, 0, "a:0", "b:0")), model, profile).stages[0]
    assert alone.gradient_sync_s == pytest.approx(1e-2)


def with_random_collectives(profile, rng):
    """Curves of some groups, from four times as fast as their links to ten times as slow."""
    names = [device.id for device in profile.devices]
    made = []
    for _ in range(rng.randint(1, 4)):
        if len(names) > 1:
            group = rng.sample(names, rng.randint(2, min(4, len(names))))
            rate = 10 ** rng.uniform(-10, -7.5)
            made.append(
                measured(*group, seconds_per_byte=rate, op=rng.choice(["all-reduce", "all-reduce", "all-gather"]))
            )
    return with_collectives(profile, *made)


@pytest.mark.parametrize("seed", seeds(40))
def test_the_exact_search_finds_the_best_of_all_plans(seed):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng, 4, 4)
    one = one._replace(profile=with_random_collectives(one.profile, rng))
    found = hwaware.plan(one.workload, one.profile, num_microbatches=one.num_microbatches, target="any")
    best = instances.brute_force(one, instances.arrangements(one, "any"))
    if math.isinf(best):
        assert found.status == "infeasible"
        return
    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(best, rel=1e-9)
    assert found.predicted_step_s == evaluate(found, one.workload, one.profile).step_s


@pytest.mark.parametrize("seed", seeds(100, 140))
def test_bounds_of_searches_lie_below_all_plans(seed):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng, 4, 4)
    one = one._replace(profile=with_random_collectives(one.profile, rng))
    best = instances.brute_force(one, instances.arrangements(one, "alpa"))
    problem = Problem(PreparedCosts(one.workload, one.profile), one.num_microbatches)
    bounds = [
        kinds.kinds_bound_s(problem, best, 30.0),
        exact._bound_beyond_s(problem, best),
        scale.solve_at_scale(problem, time.monotonic() + 5.0).bound_s,
    ]
    for bound in bounds:
        assert bound is None or bound <= best * (1 + 1e-12)


@pytest.mark.parametrize("solver", ["exact", "annealing", "alpa", "megatron", "even"])
def test_every_solver_gives_the_price_that_evaluate_does(solver):
    rng = random.Random(7)
    profile = with_random_collectives(cluster({"a": 2, "b": 2}, between=(1e8,)), rng)
    model = workload([layer(parameter_bytes=1e6, output_bytes=1e4, tensor_parallel_bytes=1e4) for _ in range(4)], 4)
    found = hwaware.plan(model, profile, num_microbatches=4, solver=solver, time_limit_s=3)
    assert found.predicted_step_s == evaluate(found, model, profile).step_s


def test_measured_groups_price_like_groups_at_other_microbatch_sizes():
    """A device with layer times of its own is on the network like others of its kind."""
    profile = with_collectives(FOUR, measured("a:0", "c:0"))
    times = {**builders.timed(1.0, 2.0), **builders.timed(1.2, 2.4, "b:0")}
    model = workload([layer(parameter_bytes=1e6, measured=times)], microbatch_size=4)
    asked = {"pins": {0: ["a", "b"]}, "target": "any", "num_microbatches": None, "global_batch": 2}
    found = hwaware.plan(model, profile, **asked)
    assert (found.microbatch_size, set(found.stages[0].devices)) == (2, {"a:0", "b:0"})
    assert found.stages[0].gradient_sync_s == pytest.approx(1e-2)  # as on a and c
    assert found.predicted_step_s == evaluate(found, model, profile).step_s


def test_costs_of_a_better_cluster_price_groups_at_their_least():
    costs = PreparedCosts(workload(1), with_collectives(FOUR, measured("a:0", "b:0", seconds_per_byte=1e-10)))
    least = costs.on(costs.profile, measured=costs.measured_groups.least())
    nbytes = np.array([1e6])
    assert costs.all_reduces_s(nbytes, ("c:0", "d:0")) == pytest.approx(1e-4)
    assert least.all_reduces_s(nbytes, ("c:0", "d:0")) == pytest.approx(1e-4)
    dear = PreparedCosts(workload(1), with_collectives(FOUR, measured("a:0", "b:0")))
    least = dear.on(dear.profile, measured=dear.measured_groups.least())
    assert least.all_reduces_s(nbytes, ("a:0", "b:0")) == pytest.approx(1e-3)


def test_a_faster_link_lowers_what_was_measured_over_it_and_the_price_of_like_groups():
    """The time of the measured group was kept, so that a like group looked twice as slow."""
    profile = with_collectives(FOUR, measured("a:0", "b:0"))
    both = [{"a", "b"}, {"c", "d"}]
    ends = list(itertools.permutations("abcd", 2))
    found = with_links(profile, [link(*pair, 2e9 if set(pair) in both else 1e9) for pair in ends])
    for pair in (("a:0", "b:0"), ("c:0", "d:0")):
        assert sync_s(found, *pair) == pytest.approx(sync_s(profile, *pair) / 2)
    assert sync_s(found, "a:0", "c:0") == pytest.approx(sync_s(profile, "a:0", "c:0"))
    assert with_links(profile, profile.links) == profile


def test_no_faster_link_makes_a_step_longer():
    profile = with_collectives(FOUR, measured("a:0", "b:0"))
    model = workload([layer(parameter_bytes=1e7, output_bytes=1e6)] * 2, microbatch_size=2)
    plan = builders.plan((0, 0, "a:0"), (1, 1, "c:0", "d:0"))
    assert all(change.saves_s >= 0 for change in hwaware.explain(plan, model, profile).links)
