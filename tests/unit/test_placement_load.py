"""Check how planning bears large inputs, on small ones: parts, blocks, clocks that have run out, and refusals."""

import json
import math
import random

import numpy as np
import pytest
from builders import cluster, device, layer, link, plan, random_workload, seeds, with_devices, workload
from instances import brute_force, single_device_stages

import hwaware
from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.costs import PreparedCosts, evaluate
from hwaware.costs.links import BestOfKinds, Links
from hwaware.errors import RecordError
from hwaware.placement import blocks, exact, fleet
from hwaware.placement.baselines import _proportional_cuts, starting_plans
from hwaware.placement.blocks import BlockCosts
from hwaware.placement.infeasible import short_of_memory
from hwaware.placement.problem import Problem
from hwaware.workload import Workload


def mixed_cluster(rng, hosts=6, per_host=2, kinds=2, device_links=False):
    """Build hosts of several kinds with unlike links, some of them between devices."""
    devices = [
        device(f"h{h}:{d}", 1.0 + h % kinds, kind=f"k{h % kinds}") for h in range(hosts) for d in range(per_host)
    ]
    links = [link(f"h{a}", f"h{b}", rng.uniform(0.2, 3) * 1e9, 1e-3) for a in range(hosts) for b in range(a, hosts)]
    if device_links:
        links += [link("h0:0", "h1:0", 9e9), link("h2:1", "h0:1", 8e9), link("h1:0", "h0:0", 7e9)]
    return cluster(devices, links)


@pytest.mark.parametrize(("field", "record"), [("links", ClusterProfile), ("devices", ClusterProfile)])
def test_a_profile_with_too_many_entries_is_refused(monkeypatch, field, record):
    monkeypatch.setitem(ClusterProfile.MOST, field, (1, "give fewer."))
    with pytest.raises(RecordError, match=rf"c has \d+ {field}, expected at most 1. To fix: give fewer."):
        record.from_json(mixed_cluster(random.Random(0)).to_json(), name="c")


def test_a_workload_with_too_many_layers_is_refused(monkeypatch):
    document = json.loads(workload(1).to_json())
    document["layers"] *= 10_001
    with pytest.raises(RecordError, match=r"w has 10,001 layers, expected at most 10,000\. To fix: join"):
        Workload.from_json(json.dumps(document), name="w")


def test_a_file_that_is_too_large_is_refused_unread(tmp_path):
    with open(tmp_path / "cluster.json", "wb") as file:
        file.truncate(256 * 2**20 + 1)
    with pytest.raises(RecordError, match=r"is larger than 268435456 bytes, the most .* write links between hosts"):
        ClusterProfile.load(tmp_path / "cluster.json")


def test_the_total_of_memory_comes_before_any_search():
    long = workload([layer(parameter_bytes=2**20)] * 3000)
    found = hwaware.plan(long, cluster("abcd", memory_bytes=2**30), num_microbatches=4, time_limit_s=0.01)
    assert found.status == "infeasible"
    assert found.reason.startswith(
        "Memory: the whole model needs 12,000.0 MiB at least, all devices together have 4,096.0 MiB: "
    )


@pytest.mark.parametrize("seed", seeds(40))
def test_no_model_that_fits_is_short_of_memory(seed):
    one = single_device_stages(random.Random(seed), max_layers=4, max_devices=3)
    if math.isfinite(brute_force(one)):
        assert short_of_memory(Problem(PreparedCosts(one.workload, one.profile), one.num_microbatches)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_of_blocks_has_the_price_of_its_layers(seed):
    rng = random.Random(seed)
    profile = with_devices(mixed_cluster(rng), memory_bandwidth_bytes_per_s=1e11, head_start_s=rng.choice([None, 0.1]))
    model = random_workload(rng, 9, 4)
    costs = PreparedCosts(model, profile)
    joined = BlockCosts(costs, (2, 5, 6, 9))
    coarse = plan((0, 1, "h0:0"), (2, 2, "h1:0", "h1:1"), (3, 3, "h2:0"))
    fine = plan((0, 4, "h0:0"), (5, 5, "h1:0", "h1:1"), (6, 8, "h2:0"))
    price, whole = evaluate(coarse, joined.workload, profile, joined), evaluate(fine, model, profile, costs)
    assert price.step_s == pytest.approx(whole.step_s, rel=1e-12)
    assert [stage.memory_bytes for stage in price.stages] == pytest.approx(
        [stage.memory_bytes for stage in whole.stages], rel=1e-12
    )


def test_replicas_sum_as_many_gradients_of_a_block_as_of_its_layers():
    """Tensor parallelism splits one of the two layers."""
    model = workload([layer(parameter_bytes=1e8), layer(parameter_bytes=1e8, tensor_parallel_bytes=0.0)], 2)
    profile, groups = cluster({"a": 4}, between=(1e8, 0.0)), (("a:0", "a:1"), ("a:2", "a:3"))
    joined = BlockCosts(PreparedCosts(model, profile), (2,))
    whole_s = evaluate(plan((0, 1, *groups)), model, profile).step_s
    assert evaluate(plan((0, 0, *groups)), joined.workload, profile, joined).step_s == pytest.approx(whole_s)


def test_long_names_of_a_long_model_are_no_obstacle(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_BLOCKS", 2)
    model = workload([layer(name=str(k) * 900) for k in range(4)])
    assert hwaware.plan(model, cluster(), num_microbatches=2, time_limit_s=2).status == "feasible"


def test_long_models_are_planned_in_blocks_and_keep_pins_and_rules(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_BLOCKS", 6)
    rng = random.Random(1)
    profile, model = mixed_cluster(rng, hosts=3, per_host=1), random_workload(rng, 24, 1)
    found = hwaware.plan(
        model, profile, num_microbatches=8, time_limit_s=2, pins={5: "h1"},
        rule=lambda replicas, first, last: last - first < 14,
    )  # fmt: skip
    assert found.status == "feasible"
    for stage in found.stages:
        if stage.layers[0] <= 5 <= stage.layers[1]:
            assert stage.replicas[0].devices == ("h1:0",)
        assert stage.layers[1] - stage.layers[0] < 14
    assert found.bound_s <= found.objective_s


def test_the_reason_in_blocks_claims_no_proof(monkeypatch):
    monkeypatch.setattr(blocks, "MOST_BLOCKS", 2)
    model, profile = workload([layer(parameter_bytes=2**20)] * 9), cluster("abc", memory_bytes=13 * 2**20)
    found = hwaware.plan(model, profile, num_microbatches=2, time_limit_s=1)
    assert found.status == "feasible"  # the baselines cut it into thirds
    pins = {0: "a", 1: "b"}
    found = hwaware.plan(model, profile, num_microbatches=None, global_batch=8, time_limit_s=1, pins=pins)
    assert found.status == "infeasible"
    assert found.reason.startswith("Within the time limit, no placement was found that cuts the 9 layers only between")
    assert "it is not proved that there is none. To fix:" in found.reason


@pytest.mark.parametrize("device_links", [False, True])
def test_links_of_all_pairs_are_those_of_each_pair(device_links):
    profile = mixed_cluster(random.Random(2), device_links=device_links)
    names, pair = [one.id for one in profile.devices], LinkTable(profile)
    for table in (Links(profile), BestOfKinds(profile), BestOfKinds(profile, inside_hosts_apart=False)):
        places, links = table.numbered(names)
        for i, one in enumerate(names):
            for j, other in enumerate(names):
                if i != j:
                    best = table.between(one, other)
                    assert links[places[i, j]] == best
                    assert best.bandwidth_bytes_per_s >= pair.between(one, other).bandwidth_bytes_per_s


def test_more_devices_never_make_a_worse_plan(monkeypatch):
    for name, value in (("MOST_AT_ONCE", 4), ("PART", 2), ("LEAST_PART", 2)):
        monkeypatch.setattr(fleet, name, value)
    monkeypatch.setattr(exact, "MAX_DEVICES", 0)
    rng = random.Random(3)
    costs = PreparedCosts(random_workload(rng, 8, 4), mixed_cluster(rng))
    parts = fleet.growing_parts(Problem(costs, 8))
    sizes = [len(part.costs.devices) for part in parts]
    assert sizes == sorted(sizes)
    assert (len(parts), sizes[-1]) == (3, 12)
    for smaller, larger in zip(parts, parts[1:]):
        assert set(smaller.costs.devices) < set(larger.costs.devices)
        # Both kinds are in every part that has room for two hosts.
        assert len({one.kind for one in larger.costs.profile.devices}) == 2
    values = [
        hwaware.plan(costs.workload, part.costs.profile, num_microbatches=8, time_limit_s=0.5).objective_s
        for part in parts
    ]
    assert values[-1] <= min(values) * (1 + 1e-9)


def test_a_clock_that_has_run_out_ends_each_phase():
    rng = random.Random(4)
    problem = Problem(PreparedCosts(random_workload(rng, 8, 4), mixed_cluster(rng)), 8)
    made = fleet.make_fleet(problem, until=0.0)
    assert (len(made.templates), made.complete) == (1, False)
    assert len(starting_plans(problem, deadline=0.0)) == 1
    found = exact.solve(problem._replace(time_limit_s=1e-9))
    assert found.plan is not None
    assert evaluate(found.plan, problem.costs.workload, problem.costs.profile).fits


@pytest.mark.parametrize("seed", range(20))
def test_proportional_cuts_are_the_nearest_ones(seed):
    rng = random.Random(seed)
    work = [rng.choice([0.0, rng.random()]) for _ in range(12)]
    parts = [sum(work[:end]) / (sum(work) or 1.0) for end in range(13)]
    speeds = [rng.uniform(0.5, 2) for _ in range(rng.randint(1, 12))]
    cuts = _proportional_cuts(np.array(parts), speeds)
    assert (cuts[0], cuts[-1]) == (0, 12)
    for index, (first, end) in enumerate(zip(cuts, cuts[1:-1])):
        share = sum(speeds[: index + 1]) / sum(speeds)
        possible = range(first + 1, 12 - (len(speeds) - index - 1) + 1)
        assert end in possible
        assert abs(parts[end] - share) <= min(abs(parts[cut] - share) for cut in possible) + 1e-12
