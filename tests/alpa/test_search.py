"""training_dp against Alpa's own on random tables, and the differentiable search (it needs JAX)."""

import os
import random

import builders
import instances
import numpy as np
import pytest
from builders import chosen, cluster, device

import hwaware
from hwaware.placement import training_dp

pytestmark = pytest.mark.alpa

# More by hand: HWAWARE_TABLES=500 pytest tests/alpa/test_search.py
TABLES = int(os.environ.get("HWAWARE_TABLES", "40"))
# Alpa rounds partial sums to float32.
FLOAT32 = 2e-6


@pytest.fixture(scope="module")
def own():
    """Alpa's own searches."""
    from hwaware.patching import stock_jax

    stock_jax.install()
    from alpa.pipeline_parallel import stage_construction

    return stage_construction


def random_table(rng):
    """Shapes, costs and limits; a part of the costs is inf, limits bind in half of the tables."""
    layers, devices, configurations = (
        int(rng.integers(1, 8)),
        int(rng.choice([1, 2, 4, 8, 16])),
        int(rng.integers(1, 3)),
    )
    shapes = [(1, 1 << k) for k in range(4) if 1 << k <= min(8, devices)]
    shapes += [(2, 8)] if devices == 16 else []
    shapes = tuple(shapes)  # numba deprecates lists, and warnings are errors here
    work, size = rng.uniform(0.5, 2, layers), np.array([h * d for h, d in shapes])
    ranges = np.cumsum(work)[None, :] - np.concatenate([[0.0], np.cumsum(work)[:-1]])[:, None]
    efficiency = size ** -rng.uniform(0.3, 1.0)
    cost = (
        ranges[:, :, None, None]
        * efficiency[:, None]
        * rng.uniform(0.6, 1.0, (layers, layers, len(shapes), configurations))
    )
    missing = rng.random(cost.shape) < rng.choice([0.0, 0.3, 0.6])
    cost = np.where(missing | (np.tri(layers, layers, -1) > 0)[:, :, None, None], np.inf, cost)
    limits = np.full(cost.shape, 4096.0)
    if rng.random() < 0.5:
        limits = rng.integers(-1, rng.choice([2, 4, 8]), cost.shape).astype(float)
    return layers, devices, shapes, configurations, cost, limits


def check(solution, layers, devices, shapes, cost, limits):
    """Whether it is a solution at all; returns the cost of each stage."""
    assert [stage[0][0] for stage in solution] == [0, *(stage[0][1] for stage in solution[:-1])]
    assert solution[-1][0][1] == layers
    assert sum(shapes[m][0] * shapes[m][1] for _, m, _ in solution) == devices
    for k, ((first, end), m, c) in enumerate(solution):
        assert limits[first, end - 1, m, c] >= len(solution) - 1 - k
    return [cost[first, end - 1, m, c] for (first, end), m, c in solution]


@pytest.mark.thorough
def test_training_dp_is_alpas_optimum(own):
    rng, solved = np.random.default_rng(0), 0
    for _ in range(TABLES):
        layers, devices, shapes, configurations, cost, limits = random_table(rng)
        microbatches = int(rng.choice([1, 2, 8, 32]))
        arguments = (layers, devices, microbatches, shapes, configurations, cost, limits)
        theirs, _ = own.training_dp(*arguments)
        ours, solution = training_dp(*arguments)
        assert ours == pytest.approx(theirs, rel=FLOAT32)
        if solution is not None:
            times = check(solution, layers, devices, shapes, cost, limits)
            assert sum(times) + (microbatches - 1) * max(times) == pytest.approx(ours, rel=1e-12)
            solved += 1
    assert solved > TABLES / 4


def test_the_gap_of_alpas_search_does_not_matter_here(own):
    cost = np.full((2, 2, 1, 1), np.inf)
    cost[0, 0], cost[1, 1] = 2e-7, 3e-7
    arguments = (2, 2, 4, ((1, 1),), 1, cost, np.full(cost.shape, 8.0))
    assert own.training_dp(*arguments)[1] is None  # all stages are below its gap of 1e-6 s
    best, solution = training_dp(*arguments)
    assert best == pytest.approx(2e-7 + 3e-7 + 3 * 3e-7)
    assert len(solution) == 2


@pytest.mark.thorough
def test_gradient_finds_a_good_plan_and_repeats_it():
    devices = [device(f"here:{k}", seconds, memory_bytes=1 << 30) for k, seconds in enumerate((0.01, 0.02, 0.02))]
    profile = cluster(devices, inside=(1e9, 1e-4))
    of_layers = {"backward_flops": 2e9, "parameter_bytes": 1e5, "output_bytes": 1e6, "activation_bytes": 1e6}
    workload = builders.workload([(1 + k % 3) * 1e9 for k in range(6)], **of_layers)
    exact = hwaware.plan(workload, profile, num_microbatches=8)
    first = hwaware.plan(workload, profile, num_microbatches=8, solver="gradient", seed=3)
    again = hwaware.plan(workload, profile, num_microbatches=8, solver="gradient", seed=3)
    assert exact.predicted_step_s <= first.predicted_step_s <= 1.05 * exact.predicted_step_s
    assert first.stages == again.stages


@pytest.mark.parametrize("seed", chosen(range(6), 0))
def test_gradient_is_within_five_percent_on_random_instances(seed):
    generate = instances.replicated_stages if seed % 2 else instances.single_device_stages
    one = generate(random.Random(seed))
    for target in ("alpa", "any"):
        best = hwaware.plan(one.workload, one.profile, num_microbatches=one.num_microbatches, target=target)
        found = hwaware.plan(
            one.workload, one.profile, num_microbatches=one.num_microbatches, target=target, solver="gradient"
        )
        if best.status != "infeasible":
            assert best.objective_s * (1 - 1e-12) <= found.objective_s <= 1.05 * best.objective_s
