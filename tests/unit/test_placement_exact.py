"""The exact search against every placement there is, judged by `evaluate`."""

from __future__ import annotations

import math
import random
import re

import instances
import pytest
from builders import chain, cluster, device, layer, links, seeds, with_devices, with_layers, with_links, workload

import hwaware
from hwaware.cluster import ClusterProfile
from hwaware.costs import evaluate
from hwaware.errors import UnusableInputError
from hwaware.placement import exact, search
from hwaware.workload import Workload


def random_instance(rng, max_layers=6, max_devices=4, alike=False):
    one = instances.single_device_stages(rng, max_layers, max_devices, alike)
    return one.workload, one.profile


def brute_force(model, profile, microbatches, **choices):
    return instances.brute_force(instances.Instance(model, profile, microbatches), **choices)


def check(model, profile, microbatches, **choices):
    best = brute_force(model, profile, microbatches, **choices)
    found = hwaware.plan(model, profile, num_microbatches=microbatches, **choices)
    if math.isinf(best):
        assert found.status == "infeasible"
        assert not found.stages
        assert "To fix:" in found.reason
        return "infeasible"
    assert found.status == "optimal", found
    assert found.objective_s == pytest.approx(best, rel=1e-9)
    assert found.bound_s <= best * (1 + 1e-15)
    cost = evaluate(found, model, profile)
    assert cost.step_s == found.predicted_step_s
    assert cost.fits
    return "optimal"


@pytest.mark.parametrize("seed", seeds(50))
def test_brute_force_finds_nothing_better(seed):
    check(*instances.single_device_stages(random.Random(seed)))


@pytest.mark.parametrize("seed", seeds(110, 140))
def test_frozen_shared_and_new_state_take_memory_in_the_search(seed):
    rng = random.Random(seed)
    one = instances.with_state(instances.single_device_stages(rng, 6, 4), rng)
    check(*one, schedule=rng.choice(["1f1b", "gpipe", "inference"]))


@pytest.mark.parametrize("seed", seeds(50, 65))
def test_time_beside_the_program_is_searched_as_priced(seed):
    rng = random.Random(seed)
    one = instances.single_device_stages(rng, 6, 4)
    check(one.workload, with_devices(one.profile, pass_s=lambda _: rng.uniform(0, 1)), one.num_microbatches)


@pytest.mark.parametrize("seed", seeds(80, 95))
def test_head_starts_are_searched_as_priced(seed):
    rng = random.Random(seed)
    one = instances.single_device_stages(rng, 6, 4)
    ahead = with_devices(one.profile, head_start_s=lambda _: rng.choice([None, rng.uniform(0, 1)]), sum_bytes_per_s=1e7)
    check(one.workload, ahead, one.num_microbatches)


@pytest.mark.parametrize("seed", seeds(300, 360))
def test_slow_links_are_searched_as_priced(seed):
    rng = random.Random(seed)
    one = instances.single_device_stages(rng, 6, 4)
    slow = with_links(one.profile, bandwidth_bytes_per_s=lambda each: each.bandwidth_bytes_per_s * 0.01 ** rng.random())
    check(one.workload, slow, rng.choice([2, 3, 4, 5, 6, 8]), objective=rng.choice(["step", "per-device"]))


@pytest.mark.parametrize(("hosts", "microbatches"), [(4, 3), (4, 8), (6, 5)])
def test_no_other_place_of_a_host_behind_slow_links_runs_faster(hosts, microbatches):
    """All hosts are needed: each has memory for one layer."""
    profile = ClusterProfile.uniform(hosts=hosts, flops_per_s=1e10, memory_bytes=10**9, latency_s=0)
    profile = with_links(profile, bandwidth_bytes_per_s=lambda each: 1e6 if "h0" in (each.source, each.target) else 1e9)
    model = Workload.uniform(
        layers=hosts, microbatch_size=1, forward_flops=2e9, backward_flops=4e9, output_bytes=2e6, parameter_bytes=2e8
    )
    others = [f"h{k}:0" for k in range(1, hosts)]
    orders = [[*others[:k], "h0:0", *others[k:]] for k in range(hosts)]
    plans = [chain(*order, num_microbatches=microbatches) for order in orders]
    found = hwaware.plan(model, profile, num_microbatches=microbatches)
    fastest = min(hwaware.simulate(each, model, profile).step_s for each in plans)
    assert hwaware.simulate(found, model, profile).step_s == pytest.approx(fastest, rel=1e-9)


@pytest.mark.parametrize("seed", seeds(400, 440))
def test_updates_that_slow_stages_hide_are_searched_as_priced(seed):
    rng = random.Random(seed)
    one = instances.single_device_stages(rng, 6, 4)
    model = with_layers(one.workload, optimizer_bytes=lambda each: each.parameter_bytes * rng.choice([0, 30, 100]))
    profile = with_devices(one.profile, memory_bytes=10**12)
    check(model, profile, rng.choice([2, 3, 5, 8]), schedule="gpipe")


@pytest.mark.parametrize("seed", seeds(200, 260))
def test_gains_by_waiting_do_not_prune_the_best_plan(seed):
    """A stage in front can make the step shorter: the one behind it then waits, and gains more than the first takes."""
    rng = random.Random(seed)
    one = instances.single_device_stages(rng, 6, 4)
    profile = with_devices(one.profile, head_start_s=lambda _: rng.choice([None, rng.uniform(0, 10)]))
    model = with_layers(
        one.workload,
        forward_flops=lambda each: each.forward_flops * rng.choice([0.05, 1, 3]),
        output_bytes=lambda each: each.output_bytes * 1e-3,
    )
    check(model, profile, rng.choice([1, 2, 3, 5]))


@pytest.mark.parametrize("seed", seeds(65, 80))
def test_a_steps_samples_take_memory_in_the_search(seed):
    rng = random.Random(seed)
    one = instances.single_device_stages(rng, 6, 4)
    model = with_layers(one.workload, batch_bytes=lambda _: rng.choice([None, 5e6, 3e7]))
    check(model, one.profile, one.num_microbatches)


def test_the_instances_have_both_answers():
    rng = random.Random(0)
    assert {check(*random_instance(rng, 3, 3), microbatches=4) for _ in range(20)} == {"optimal", "infeasible"}


@pytest.mark.parametrize(
    "choices",
    [
        {"schedule": "gpipe"},
        {"schedule": "inference"},
        {"objective": "alpa"},
        {"objective": "alpa", "schedule": "gpipe"},
    ],
)
def test_other_schedules_and_objectives(choices):
    rng = random.Random(str(choices))
    for _ in seeds(12, every=3):
        check(*random_instance(rng, max_layers=5), microbatches=rng.choice([1, 3, 8]), **choices)


def test_devices_that_are_alike_are_searched_as_one_class():
    rng = random.Random(7)
    for _ in seeds(15, every=3):
        check(*random_instance(rng, alike=True), microbatches=rng.choice([1, 4, 12]))


def test_eight_unlike_devices_are_proved():
    rng = random.Random(11)
    model, profile = random_instance(rng)
    while len(profile.devices) < 8 or len(model.layers) < 16:
        model, profile = random_instance(rng, max_layers=16, max_devices=8)
    profile = with_devices(profile, memory_bytes=1 << 40)
    found = hwaware.plan(model, profile, num_microbatches=16)
    assert found.status == "optimal"
    for baseline in ("even", "proportional"):
        other = hwaware.plan(model, profile, num_microbatches=16, solver=baseline)
        if other.status == "feasible":
            assert found.objective_s <= other.objective_s


def test_renaming_gives_the_same_price():
    rng = random.Random(5)
    for _ in seeds(8, every=2):
        model, profile = random_instance(rng)
        devices = list(with_devices(profile, id=lambda one: f"other {one.id}").devices)
        rng.shuffle(devices)
        renamed = cluster(devices, profile.links)
        before, after = hwaware.plan(model, profile), hwaware.plan(model, renamed)
        assert before.status == after.status
        assert before.objective_s is after.objective_s is None or after.objective_s == pytest.approx(
            before.objective_s, rel=1e-9
        )


def test_a_narrow_search_is_never_called_optimal_without_proof(monkeypatch):
    monkeypatch.setattr(search, "PASSES", ((1, 2),))
    rng = random.Random(13)
    for _ in seeds(25):
        model, profile = random_instance(rng)
        best = brute_force(model, profile, 8)
        found = hwaware.plan(model, profile, num_microbatches=8)
        if found.objective_s is None:
            assert math.isinf(best) or "not proved" in found.reason
            continue
        assert found.bound_s <= best * (1 + 1e-15)
        if found.status == "optimal":
            assert found.objective_s == pytest.approx(best, rel=1e-9)


def test_too_many_devices_give_a_plan_and_a_valid_bound(monkeypatch):
    monkeypatch.setattr(exact, "MAX_STATES", 60)
    rng = random.Random(17)
    for _ in seeds(15, every=3):
        model, profile = random_instance(rng)
        best = brute_force(model, profile, 8)
        found = hwaware.plan(model, profile, num_microbatches=8)
        if found.objective_s is not None:
            assert found.bound_s <= best * (1 + 1e-15)
            assert found.objective_s >= best * (1 - 1e-12)


def test_the_time_limit_holds():
    rng = random.Random(19)
    model, profile = random_instance(rng)
    while len(profile.devices) < 6 or len(model.layers) < 10:
        model, profile = random_instance(rng, max_layers=12, max_devices=7)
    profile = with_devices(profile, memory_bytes=1 << 40)
    found = hwaware.plan(model, profile, time_limit_s=1e-9)
    assert found.status in ("feasible", "optimal")
    assert found.bound_s <= hwaware.plan(model, profile).objective_s <= found.objective_s


def tiny(memory_bytes=1 << 30):
    rng = random.Random(2)
    model, profile = random_instance(rng)
    while len(profile.devices) != 3 or len(model.layers) < 4:
        model, profile = random_instance(rng)
    return model, with_devices(profile, memory_bytes=memory_bytes)


def test_infeasible_names_the_layer_that_fits_nowhere():
    found = hwaware.plan(*tiny(memory_bytes=1 << 20))
    assert found.status == "infeasible"
    assert found.reason.startswith("Memory: layer ")
    assert "MiB too much. To fix: use more or larger devices" in found.reason


@pytest.mark.parametrize(
    ("sizes", "fix"),
    [
        ({"parameter_bytes": 2**20, "activation_bytes": 2**25}, "use smaller microbatches"),
        ({"parameter_bytes": 2**25, "activation_bytes": 2**10}, "use more or larger devices"),
    ],
)
@pytest.mark.parametrize(("layers", "memory_bytes"), [(1, 2**24), (9, 2**26)])
def test_the_remedy_is_microbatches_only_where_these_help(sizes, fix, layers, memory_bytes):
    found = hwaware.plan(workload([layer(**sizes)] * layers), cluster("ab", memory_bytes=memory_bytes))
    assert found.status == "infeasible"
    assert f"too much. To fix: {fix}" in found.reason


def test_infeasible_names_the_stage_that_is_closest():
    model, _ = tiny()
    largest = max(4 * layer.parameter_bytes + layer.activation_bytes for layer in model.layers)
    found = hwaware.plan(*tiny(memory_bytes=int(largest) + 1))
    assert found.status == "infeasible"
    assert "in the placement that comes closest, layers" in found.reason
    assert "too much. To fix:" in found.reason


def test_infeasible_for_want_of_a_link_says_so():
    layers = [layer(1e9, 1e9, parameter_bytes=size, output_bytes=1) for size in (10e6, 20e6)]
    boxes = [device(f"d{k}:0", memory_bytes=size) for k, size in enumerate((40_000_000, 1, 80_000_000))]
    found = hwaware.plan(workload(layers), cluster(boxes, links((("d0", "d1"), ("d1", "d2")))))
    assert found.status == "infeasible"
    assert found.reason.startswith("Memory and links: ")
    assert "38.1 MiB more memory on each device would do" in found.reason  # 40 MB: all of it on d2:0


def test_excluded_hosts_stay_idle():
    model, profile = tiny()
    found = hwaware.plan(model, profile, exclude=["h0"])
    assert all("d0" not in stage.devices for stage in found.stages)
    assert found.status == "optimal"


@pytest.mark.parametrize(
    ("choices", "said"),
    [
        ({"exclude": ["nowhere"]}, "cannot exclude 'nowhere': the cluster has no such host or device"),
        ({"exclude": ["h0", "h1", "h2"]}, "without h0, h1, h2, the cluster has no devices"),
        ({"solver": "magic"}, "there is no solver 'magic'. To fix: choose one of exact, annealing, gradient, alpa"),
        ({"target": "metis"}, "there is no target 'metis'"),
        ({"num_microbatches": 0}, "num_microbatches is 0, expected at least 1"),
        ({"time_limit_s": 0}, "time_limit_s is 0, expected more than 0"),
    ],
)
def test_unusable_arguments_are_refused(choices, said):
    with pytest.raises(UnusableInputError, match=re.escape(said)) as caught:
        hwaware.plan(*tiny(), **choices)
    assert "To fix:" in str(caught.value)


def test_baselines_are_priced_and_say_when_they_do_not_fit():
    model, profile = tiny()
    profile = cluster(profile.devices)
    even = hwaware.plan(model, profile, solver="even")
    counts = [stage.layers[1] - stage.layers[0] + 1 for stage in even.stages]
    assert max(counts) - min(counts) <= 1
    assert even.status == "feasible"
    assert even.predicted_step_s == evaluate(even, model, profile).step_s
    proportional = hwaware.plan(model, profile, solver="proportional")
    assert sum(s.layers[1] - s.layers[0] + 1 for s in proportional.stages) == len(model.layers)
    over = hwaware.plan(model, with_devices(profile, memory_bytes=1), solver="even")
    assert over.status == "infeasible"
    assert "MiB too much" in over.reason


def test_proportional_gives_layers_by_speed():
    profile = cluster([device(f"h{k}:0", seconds, kind=str(k)) for k, seconds in enumerate((1.0, 4.0, 2.0))])
    found = hwaware.plan(workload(7), profile, solver="proportional")
    assert [stage.layers for stage in found.stages] == [(0, 3), (4, 4), (5, 6)]
