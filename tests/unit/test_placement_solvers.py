"""Annealing, the baselines, and Alpa's own search without Alpa."""

from __future__ import annotations

import itertools
import math
import random
import warnings

import instances
import numpy as np
import pytest
from builders import cluster, device, layer, link, seeds, thinned, timed, workload

import hwaware
from hwaware.costs import PreparedCosts
from hwaware.placement import improve, training_dp
from hwaware.placement.bounds import fluid_bound_s

BASELINES = ("alpa", "megatron", "even", "proportional")


def small_cluster(speeds=(1.0, 0.5, 0.5, 0.25), per_host=1):
    hosts = {f"h{k}": speed for k, speed in enumerate(speeds)}
    boxes = [device(f"{host}:{d}", 1 / one, kind=str(one)) for host, one in hosts.items() for d in range(per_host)]
    ends = itertools.combinations_with_replacement(range(len(speeds)), 2)
    return cluster(boxes, [link(f"h{a}", f"h{b}", (1 + (a + b) % 3) * 1e8, 1e-3) for a, b in ends])


def model(layers=10, samples=1, seed=0):
    rng = random.Random(seed)
    made = [
        layer(
            rng.uniform(0.5, 2) * 1e8, 2e8, parameter_bytes=1e6, output_bytes=rng.uniform(0, 1e7), activation_bytes=1e6
        )
        for _ in range(layers)
    ]
    return workload(made, samples)


def test_no_search_beats_the_exact_one_or_calls_itself_optimal():
    for seed in seeds(3, every=3):
        one, profile = model(seed=seed), small_cluster()
        best = hwaware.plan(one, profile)
        assert best.status == "optimal"
        for solver in ("annealing", *BASELINES):
            found = hwaware.plan(one, profile, solver=solver)
            assert found.predicted_step_s >= best.predicted_step_s * (1 - 1e-12)
            assert found.status == "feasible"
            if solver == "annealing":
                assert found.predicted_step_s <= 1.02 * best.predicted_step_s


@pytest.mark.parametrize(("seed", "target"), thinned(itertools.product(range(10), ("alpa", "any")), every=11))
def test_annealing_is_within_two_percent_on_random_instances(seed, target):
    generate = instances.replicated_stages if seed % 2 else instances.single_device_stages
    one = generate(random.Random(seed))
    best = hwaware.plan(one.workload, one.profile, num_microbatches=one.num_microbatches, target=target)
    found = hwaware.plan(
        one.workload, one.profile, num_microbatches=one.num_microbatches, target=target, solver="annealing"
    )
    assert found.status == ("infeasible" if best.status == "infeasible" else "feasible")
    if best.status != "infeasible":
        assert best.objective_s * (1 - 1e-12) <= found.objective_s <= 1.02 * best.objective_s


def test_annealing_repeats_itself_by_seed(monkeypatch):
    monkeypatch.setattr(improve, "CHANGES", 500)
    one, profile = model(layers=6), small_cluster()
    first = hwaware.plan(one, profile, solver="annealing", seed=5)
    assert first.stages == hwaware.plan(one, profile, solver="annealing", seed=5).stages


def test_annealing_keeps_to_the_target(monkeypatch):
    monkeypatch.setattr(improve, "CHANGES", 500)
    one, profile = model(layers=4, samples=4), small_cluster((1.0, 1.0, 0.5), per_host=2)
    found = hwaware.plan(one, profile, solver="annealing", target="alpa")
    for stage in found.stages:
        assert len({profile.device(name).kind for name in stage.devices}) == 1
        assert len({replica.share for replica in stage.replicas}) == 1
    single = hwaware.plan(one, profile, solver="annealing", max_devices_per_stage=1)
    assert all(len(stage.devices) == 1 for stage in single.stages)


def test_alpa_takes_hosts_in_reverse_order_and_uses_all():
    found = hwaware.plan(model(layers=8), small_cluster(), solver="alpa")
    assert [stage.devices for stage in found.stages] == [(f"h{k}:0",) for k in (3, 2, 1, 0)]
    refused = hwaware.plan(model(layers=3), small_cluster(), solver="alpa")
    assert refused.status == "infeasible"
    assert "Alpa uses all devices" in refused.reason


def test_megatron_divides_evenly():
    found = hwaware.plan(model(layers=8, samples=4), small_cluster((1.0, 1.0), per_host=2), solver="megatron")
    sizes = {len(stage.devices) for stage in found.stages}
    assert len(sizes) == 1
    assert sum(len(stage.devices) for stage in found.stages) == 4


def cheapest(cost, limits, sizes, devices, objective):
    """Every way to cut the layers and to give each stage a shape and a configuration."""
    layers, best = cost.shape[0], math.inf
    choices = list(itertools.product(range(cost.shape[2]), range(cost.shape[3])))
    for count in range(1, layers + 1):
        for cuts in itertools.combinations(range(1, layers), count - 1):
            edges = (0, *cuts, layers)
            for chosen in itertools.product(choices, repeat=count):
                if sum(sizes[m] for m, _ in chosen) != devices:
                    continue
                ranges = [(edges[k], edges[k + 1] - 1, *chosen[k]) for k in range(count)]
                times = [cost[one] for one in ranges]
                if max(times) < math.inf and all(limits[one] >= count - 1 - k for k, one in enumerate(ranges)):
                    best = min(best, objective(times))
    return best


@pytest.mark.parametrize("seed", range(3))
def test_alpas_search_finds_the_optimum(seed):
    rng = np.random.default_rng(seed)
    for _ in range(15):
        layers, devices, microbatches = int(rng.integers(1, 5)), int(rng.choice([2, 4])), int(rng.choice([1, 3, 16]))
        shapes = [(1, 1), (1, 2), (2, 2)][: 2 if devices == 2 else 3]
        cost = rng.uniform(0.1, 1, (layers, layers, len(shapes), 2)) * (1 + np.arange(layers))[None, :, None, None]
        cost[rng.random(cost.shape) < 0.2] = np.inf
        limits = rng.integers(-1, 4, cost.shape).astype(float)
        sizes = [h * d for h, d in shapes]
        found, stages = training_dp(layers, devices, microbatches, shapes, 2, cost, limits)
        best = cheapest(cost, limits, sizes, devices, lambda t, b=microbatches: sum(t) + (b - 1) * max(t))
        assert found == pytest.approx(best, rel=1e-12)
        assert (stages is None) == math.isinf(best)


def test_work_that_takes_no_time_is_annealed_and_bounded():
    """Changes of a plan that costs nothing are all worse, at no temperature. Devices may be free on unlike layers."""
    free = workload(3, forward_flops=0.0, backward_flops=0.0)
    found = hwaware.plan(free, cluster("ab", between=(1e9, 0.1)), solver="annealing")
    assert found.objective_s == 0.0
    model = workload([layer(measured={**timed(0, 0, "x"), **timed(1, 2, "y")}), layer(measured=timed(0, 0, "y"))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fluid_bound_s(PreparedCosts(model, cluster([device(kind="x"), device("b:0", kind="y")])), 8) == 0.0
