"""Stages of several devices: the exact search against every placement there is, shares and groups included."""

from __future__ import annotations

import itertools
import math
import random

import builders
import instances
import msgspec
import pytest
from builders import card, cluster, device, layer, link, seeds, thinned, timed, with_devices, with_layers, workload

import hwaware
from hwaware.costs import PreparedCosts, evaluate
from hwaware.costs.compute import UNMEASURED_SHARE
from hwaware.placement import exact, ways
from hwaware.placement.bounds import fluid_bound_s, fluid_period_s, least_objective_s
from hwaware.placement.kinds import kinds_bound_s
from hwaware.placement.problem import Problem
from hwaware.workload import MeasuredTime


def random_instance(rng, max_layers=5, max_devices=4):
    one = instances.replicated_stages(rng, max_layers, max_devices)
    return one.workload, one.profile


def brute_force(workload, profile, microbatches, target):
    one = instances.Instance(workload, profile, microbatches)
    return instances.brute_force(one, instances.arrangements(one, target))


def check(rng, target, **limits):
    workload, profile = random_instance(rng, **limits)
    microbatches = rng.choice([1, 2, 5, 16])
    best = brute_force(workload, profile, microbatches, target)
    found = hwaware.plan(workload, profile, num_microbatches=microbatches, target=target)
    kinds = {device.id: device.kind for device in profile.devices}
    if target == "alpa" and any(len({kinds[name] for name in stage.devices}) > 1 for stage in found.stages):
        # A baseline that takes unlike devices as equal was better than all plans of like ones.
        assert found.status == "feasible"
        assert found.objective_s < best
        assert found.bound_s <= found.objective_s
        return found
    if math.isinf(best):
        assert found.status == "infeasible"
        return None
    assert found.status == "optimal", found
    assert found.predicted_step_s == pytest.approx(best, rel=1e-9)
    assert found.bound_s <= best * (1 + 1e-15)
    return found


def prove(one, target="any", schedule="1f1b"):
    """The search finds the best of all plans, whose objective is returned, or that there is none."""
    asked = {"num_microbatches": one.num_microbatches, "target": target, "schedule": schedule}
    found = hwaware.plan(one.workload, one.profile, **asked)
    best = instances.brute_force(one, instances.arrangements(one, target), schedule)
    if math.isinf(best):
        assert found.status == "infeasible"
    else:
        assert found.status == "optimal"
        assert found.objective_s == pytest.approx(best, rel=1e-9)
    return best


def test_replicas_of_an_inference_need_no_link_between_them():
    unlinked = cluster(
        [device(f"{host}:{k}", 1 if host == "a" else 100) for host in "ab" for k in (0, 1)], [link("a", "b")]
    )
    model = workload(1, microbatch_size=2)
    found = hwaware.plan(model, unlinked, num_microbatches=4, schedule="inference")
    assert (found.status, found.stages[0].devices) == ("optimal", ("a:0", "a:1"))
    assert found.predicted_step_s == pytest.approx(4 * 1 / 2)  # each replica takes half of each microbatch
    assert hwaware.simulate(found, model, unlinked).step_s == pytest.approx(4 * 1 / 2)
    assert hwaware.plan(model, unlinked, num_microbatches=4).predicted_step_s == pytest.approx(4 * 3)  # training does


@pytest.mark.parametrize(("seed", "target"), [(seed, ("any", "alpa")[seed % 2]) for seed in seeds(700, 720, every=3)])
def test_inference_without_links_inside_hosts_is_searched_as_priced(seed, target):
    rng = random.Random(seed)
    boxes = [device(f"{host}:{k}", seconds) for host, seconds in (("a", 1), ("b", rng.uniform(1, 5))) for k in (0, 1)]
    boxes = [msgspec.structs.replace(one, kind=one.host, memory_bytes=5 * 10**8) for one in boxes]
    model = builders.random_workload(rng, rng.randint(1, 3), 2)
    profile = cluster(boxes, [link("a", "b", rng.uniform(0.1, 1) * 1e9)])
    prove(instances.Instance(model, profile, rng.choice([1, 4])), target, "inference")


@pytest.mark.parametrize("seed", seeds(200, 212))
def test_samples_of_replicas_take_memory_in_the_search(seed):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng)
    prove(one._replace(workload=with_layers(one.workload, batch_bytes=lambda _: rng.choice([None, 5e6, 3e7]))))


@pytest.mark.parametrize("seed", seeds(220, 232))
def test_state_of_replicas_takes_memory_in_the_search(seed):
    rng = random.Random(seed)
    prove(instances.with_state(instances.replicated_stages(rng, 4, 4), rng))


def with_cards(one, rng):
    """A slow card on each host that has several devices; sometimes one that was measured with several transfers."""
    by_host = {}
    for each in one.profile.devices:
        by_host.setdefault(each.host, []).append(each.id)
    cards = []
    for host, names in by_host.items():
        if len(names) > 1:
            send, receive = (rng.uniform(0.01, 0.3) * 1e9 for _ in range(2))
            concurrent = {1: send, 2: rng.uniform(0.3, 0.6) * send} if rng.random() < 0.5 else None
            cards.append(card(*names, host=host, send=send, receive=receive, concurrent=concurrent))
    return one._replace(profile=msgspec.structs.replace(one.profile, shared_cards=tuple(cards)))


@pytest.mark.parametrize(
    ("seed", "binds"),
    [*((seed, False) for seed in seeds(500, 505)), *((seed, True) for seed in thinned((506, 517, 529, 569, 591)))],
)
def test_what_shares_a_card_is_searched_as_it_is_priced(seed, binds):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng)
    free = hwaware.plan(one.workload, one.profile, num_microbatches=one.num_microbatches, target="any")
    best = prove(with_cards(one, rng))
    if free.stages:
        assert best >= free.objective_s * (1 - 1e-9)  # a card never makes anything faster
    assert not binds or best > free.objective_s * (1 + 1e-9)


@pytest.mark.parametrize("order", thinned(itertools.permutations(range(4))))
def test_who_shares_a_card_is_not_swapped_with_who_does_not(order):
    """Host a has two devices on a slow card and one beside it, host b one; all links are alike."""
    boxes = [
        device(name, seconds, kind=f"kind {seconds}", memory_bytes=10**9)
        for name, seconds in (("a:0", 1.0), ("a:1", 1.0), ("a:2", 2.0), ("b:0", 2.0))
    ]
    # Memory for one layer on each device; the first layer wants both devices on the card, and the next one beside them.
    layers = [layer(flops, flops, parameter_bytes=2e8, output_bytes=3e8) for flops in (8e9, 1e9, 1e9)]
    links = builders.links((("a", "a"), ("a", "b")))
    profile = cluster([boxes[k] for k in order], links, cards=[card("a:0", "a:1", send=5e7)])
    model = workload(layers, microbatch_size=2)
    prove(instances.Instance(model, profile, 4))


@pytest.mark.parametrize("seed", seeds(400, 412))
def test_compute_during_gradient_sums_is_searched_as_priced(seed):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng)
    prove(one._replace(profile=with_devices(one.profile, sum_bytes_per_s=lambda _: rng.choice([None, 1e7, 3e8]))))


@pytest.mark.parametrize("seed", seeds(300, 310))
def test_measured_shares_are_searched_as_they_are_priced(seed):
    """Whatever was measured of whole microbatches and parts of them, also if parts took less than their part."""
    rng = random.Random(seed)
    one = instances.replicated_stages(rng)
    kinds = sorted({device.kind for device in one.profile.devices})
    shardings = ["1,1", "2,1", "1,2", "2,2"][: rng.randint(2, 4)]

    def times():
        return MeasuredTime(forward_s=rng.uniform(0.01, 1), backward_s=rng.uniform(0, 2))

    def measured(_):
        return {kind: {name: times() for name in shardings} for kind in kinds}

    one = one._replace(workload=with_layers(one.workload, measured=measured))
    best = prove(one)
    assert fluid_bound_s(PreparedCosts(one.workload, one.profile), one.num_microbatches) <= best


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "inference"])
@pytest.mark.parametrize("seed", seeds(340, 350))
def test_the_bound_holds_where_each_replica_reads_all_parameters(seed, schedule):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng, 3, 4)
    rates = [1e7, 1e8, 1e9]
    one = one._replace(
        profile=with_devices(one.profile, memory_bandwidth_bytes_per_s=lambda _: rng.choice(rates)),
        workload=with_layers(one.workload, tensor_parallel_bytes=lambda _: rng.choice([None, 0.0, 1e6])),
        num_microbatches=rng.choice([4, 16, 64]),
    )
    best = instances.brute_force(one, instances.arrangements(one, "any"), schedule)
    assert 0 < fluid_bound_s(PreparedCosts(one.workload, one.profile, schedule), one.num_microbatches) <= best


def test_the_bound_counts_the_way_through_a_pipeline_that_more_replicas_cannot_shorten():
    """Four devices, and replicas for two samples: two stages at least, if all devices work."""
    model = workload([layer(output_bytes=0.0), layer(output_bytes=0.0)], microbatch_size=2)
    four = cluster({"a": 4})
    best = hwaware.plan(model, four, num_microbatches=8, target="any")
    assert [len(stage.replicas) for stage in best.stages] == [2, 2]
    costs = PreparedCosts(model, four)
    # A message without bytes takes its link's latency, which the bound leaves out.
    latency_s = sum(link.latency_s for link in four.links)
    assert fluid_bound_s(costs, 8) == pytest.approx(best.predicted_step_s, rel=1e-3, abs=20 * latency_s)
    assert fluid_bound_s(costs, 8) == pytest.approx(9 / 8 * 8 * fluid_period_s(costs))


def with_own_times(one, rng):
    """Measured times that differ by kind, and for some devices of a kind from the others."""
    kinds = sorted({each.kind for each in one.profile.devices})
    names = [*kinds, *(each.id for each in one.profile.devices if rng.random() < 0.5)]
    slower = {name: rng.choice([1.0, 1.07, 1.2, 3.0]) for name in names}
    shardings = {"1,1": 1.0, "1,2": 0.5, "2,1": 0.5}

    def times(name, seconds):
        forward_s = slower[name] * seconds * rng.uniform(0.95, 1.05)
        deviation_s = rng.choice([None, 0.05, 0.2])
        return MeasuredTime(forward_s=forward_s, backward_s=2 * forward_s, deviation_s=deviation_s)

    def measured(_):
        seconds = rng.uniform(0.2, 1)
        return {name: {one: times(name, seconds * part) for one, part in shardings.items()} for name in names}

    return one._replace(workload=with_layers(one.workload, measured=measured))


@pytest.mark.parametrize("seed", seeds(2000, 2050))
def test_devices_of_a_kind_with_own_times_may_share_a_stage(seed):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng, 4, 4)
    one = with_own_times(one._replace(profile=with_devices(one.profile, kind="cpu")), rng)
    best = prove(one, "alpa")
    bound = kinds_bound_s(Problem(PreparedCosts(one.workload, one.profile), one.num_microbatches), best, 30.0)
    assert bound is None or bound <= best * (1 + 1e-12)


def test_a_device_a_little_slower_than_its_kind_is_a_replica():
    slow = {**timed(0.1, 0.2), **timed(0.107, 0.214, "b:0"), **timed(3.0, 6.0, "c:0")}
    model, three = workload([layer(measured=slow)], microbatch_size=2), cluster("abc")
    found = hwaware.plan(model, three, num_microbatches=2)
    assert (found.status, set(found.stages[0].devices)) == ("optimal", {"a:0", "b:0"})
    # Half of each of two microbatches takes b UNMEASURED_SHARE / 2 of its time for a whole one: no time of a half is
    # known.
    assert found.predicted_step_s == pytest.approx(UNMEASURED_SHARE * 0.321)
    assert hwaware.simulate(found, model, three).step_s == pytest.approx(UNMEASURED_SHARE * 0.321)

    def rule(replicas, first, last):
        return all(one.kind == "cpu" for devices in replicas for one in devices)  # as the profile says

    assert hwaware.plan(model, three, num_microbatches=2, rule=rule).predicted_step_s == found.predicted_step_s


@pytest.mark.parametrize("seed", seeds(320, 335))
def test_groups_without_measured_times_are_searched_and_bounded_as_priced(seed):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng, 3, 3)
    devices = tuple(
        # Some products take longer in one piece than in two: no bound may take that for impossible.
        device(
            box.id, {1e8: 0.01, 5e8: 0.02, 2e9: rng.uniform(0.05, 0.9)}, host=box.host, memory_bandwidth_bytes_per_s=1e9
        )
        for box in one.profile.devices
    )
    layers = []
    for each in one.workload.layers:
        whole_s, half = rng.uniform(0.001, 2.0), rng.uniform(0.3, 1.1)
        measured = {"1,1": MeasuredTime(forward_s=whole_s, backward_s=2 * whole_s)}
        if rng.random() < 0.5:
            measured["2,1"] = MeasuredTime(forward_s=whole_s * half, backward_s=2 * whole_s * half)
        layers.append(msgspec.structs.replace(each, measured={"cpu": measured}))
    profile = msgspec.structs.replace(one.profile, devices=devices)
    one = one._replace(profile=profile, workload=msgspec.structs.replace(one.workload, layers=tuple(layers)))
    best = prove(one)
    for objective in ("step", "per-device"):
        problem = Problem(PreparedCosts(one.workload, one.profile), one.num_microbatches, objective)
        least = instances.brute_force(one, instances.arrangements(one, "any"), objective=objective)
        assert least_objective_s(problem) <= least
    assert best > 0


def test_the_bound_holds_where_a_group_makes_products_faster():
    """Two halves of the product take 0.02 s, and the whole product takes 1 s."""
    half = MeasuredTime(forward_s=0.001, backward_s=0.001)
    one = layer(4e9, 4e9, tensor_parallel_bytes=0.0, measured={"cpu": {"2,1": half}})
    model = workload([one], microbatch_size=2)
    profile = cluster({"a": 4}, seconds={1e9: 0.01, 2e9: 1.0})
    groups = builders.plan((0, 0, ("a:0", "a:1"), ("a:2", "a:3")), num_microbatches=1)
    step_s = evaluate(groups, model, profile).step_s
    assert step_s == pytest.approx(2 * 0.001 * 0.01 / 1.0)
    assert least_objective_s(Problem(PreparedCosts(model, profile), 1)) <= step_s


@pytest.mark.parametrize("seed", seeds(5))
def test_brute_force_finds_nothing_better_for_alpa(seed):
    rng = random.Random(seed)
    found = [check(rng, "alpa") for _ in range(10)]
    assert any(plan and max(len(stage.devices) for stage in plan.stages) > 1 for plan in found)


@pytest.mark.parametrize("seed", seeds(50))
def test_brute_force_finds_nothing_better_for_any(seed):
    check(random.Random(seed), "any")


@pytest.mark.parametrize("seed", thinned([107, 186, 199]))
def test_four_unlike_devices_with_four_samples_are_proved(seed):
    # Over 700 ways to build a stage, of which few find devices for both.
    one = instances.replicated_stages(random.Random(seed))
    found = hwaware.plan(one.workload, one.profile, num_microbatches=one.num_microbatches, target="any")
    best = instances.brute_force(one, instances.arrangements(one, "any"))
    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(best, rel=1e-9)


def test_tables_are_what_evaluate_says():
    rng = random.Random(3)
    for _ in range(5):
        workload, profile = random_instance(rng)
        made = ways.prepare(Problem(PreparedCosts(workload, profile), 4, target="any"))
        for k in rng.sample(range(len(made.options)), min(8, len(made.options))):
            first = rng.randrange(len(workload.layers))
            if first:
                continue
            found = made.plan([(0, len(workload.layers) - 1, k)])
            stage = evaluate(found, workload, profile).stages[0]
            assert made.tables.forward_s[k, 0, -1] == pytest.approx(stage.forward_s, rel=1e-12)
            assert made.tables.backward_s[k, 0, -1] == pytest.approx(stage.backward_s, rel=1e-12)
            assert made.tables.per_step_s[k, 0, -1] == pytest.approx(stage.gradient_sync_s + stage.update_s, rel=1e-12)
            assert made.tables.excess_bytes[k, 0, -1] == pytest.approx(
                stage.memory_bytes - stage.memory_limit_bytes, rel=1e-9
            )


def test_what_is_left_out_is_not_called_optimal(monkeypatch):
    monkeypatch.setattr(ways, "MAX_OPTIONS", 6)
    rng = random.Random(8)
    for _ in seeds(6, every=2):
        workload, profile = random_instance(rng, max_layers=3)
        best = brute_force(workload, profile, 4, "alpa")
        found = hwaware.plan(workload, profile, num_microbatches=4)
        if found.bound_s is not None:
            assert found.bound_s <= best * (1 + 1e-15)


def test_one_device_a_stage_where_asked():
    workload, profile = random_instance(random.Random(2))
    found = hwaware.plan(workload, profile, max_devices_per_stage=1)
    assert all(len(stage.devices) == 1 for stage in found.stages)
    assert exact.MAX_STATES > 0
