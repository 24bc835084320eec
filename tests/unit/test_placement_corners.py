"""Corners in which searches, bounds and prices were once wrong, each against the plan that showed it."""

from __future__ import annotations

import math
import time

import builders
import pytest
from builders import layer, link, plan, with_cards

import hwaware
from hwaware.costs import PreparedCosts, evaluate
from hwaware.errors import UnusableInputError
from hwaware.placement import exact, kinds
from hwaware.placement.fleet import fastest_inside_hosts, make_fleet
from hwaware.placement.problem import Answer, Problem, priced
from hwaware.placement.scale import _Scale, solve_at_scale
from hwaware.placement.ways import prepare
from hwaware.simulator import simulate


def workload(*layers, samples=1):
    return builders.workload(layers, samples)


def cluster(devices, links=None, between=(1e9, 1e-4), **more):
    return builders.cluster(devices, links, between=between, **{"seconds": 0.1, **more})


def step_s(found, work, profile):
    return evaluate(found, work, profile).step_s


def at_scale(work, profile, count, seconds=2.0, **more):
    problem = Problem(PreparedCosts(work, profile), count, "step", seconds, **more)
    return problem, solve_at_scale(problem, time.monotonic() + seconds)


def test_devices_of_unequal_hosts_are_not_one_class():
    work, profile = workload(layer(parameter_bytes=1), samples=3), cluster({"a": 1, "b": 3})
    found = hwaware.plan(work, profile, num_microbatches=4)
    inside = step_s(plan((0, 0, "b:0", "b:1", "b:2")), work, profile)
    assert found.objective_s == pytest.approx(inside)
    assert found.bound_s <= inside


def test_outputs_without_bytes_do_not_hide_a_faster_link_from_the_bound():
    """All messages between stages take as long, and gradient sums do not."""
    work = workload(layer(parameter_bytes=1e5), samples=2)
    profile = cluster("abc", [link("a", "b", 1e6), link("a", "c", 1e6), link("b", "c", 1e9)])
    _, answer = at_scale(work, profile, 4)
    assert answer.bound_s <= step_s(plan((0, 0, "b:0", "c:0")), work, profile)


def test_sums_of_gradients_over_hosts_are_not_those_inside_one():
    work = workload(layer(parameter_bytes=1e5), samples=2)
    profile = cluster({"a": 1, "b": 2}, sum_bytes_per_s=1e6)
    found = hwaware.plan(work, profile, num_microbatches=8)
    inside = step_s(plan((0, 0, "b:0", "b:1"), num_microbatches=8), work, profile)
    assert found.objective_s == pytest.approx(inside)


def test_faster_links_between_hosts_lower_the_bound_inside_hosts():
    work = workload(layer(parameter_bytes=4e6, output_bytes=1e6), samples=6)
    profile = cluster({f"h{k}": 2 for k in range(6)}, inside=(1e7, 1e-4))
    better = evaluate(plan((0, 0, *(f"h{k}:0" for k in range(6))), num_microbatches=8), work, profile).step_s
    _, answer = at_scale(work, profile, 8)
    assert answer.bound_s <= better


def test_a_plan_below_a_bound_is_not_proved_by_it(monkeypatch):
    monkeypatch.setattr(exact, "MAX_DEVICES", 4)
    monkeypatch.setattr(kinds, "MAX_DEVICES", 4)
    work = workload(layer(parameter_bytes=4e6), samples=2)
    profile = cluster({f"h{k}": 2 for k in range(6)}, inside=(1e7, 1e-4))
    found = hwaware.plan(work, profile, num_microbatches=8, time_limit_s=3.0)
    better = step_s(plan((0, 0, "h0:0", "h1:0"), num_microbatches=8), work, profile)
    assert found.bound_s <= better * (1 + 1e-9)
    assert found.status == "feasible" or found.objective_s <= better * (1 + 1e-9)
    problem = Problem(PreparedCosts(work, profile), 8, "step", 1.0)
    doubtful = priced(Answer(plan((0, 0, "h0:0", "h1:0"), num_microbatches=8), 2 * better), problem)
    assert (doubtful.status, doubtful.bound_s) == ("feasible", None)


@pytest.mark.parametrize(("inside", "expected"), [((1e7, 1e-4), False), ((1e9, 1e-4), True)])
def test_hosts_without_outputs_still_send_gradients(inside, expected):
    work, profile = workload(layer(parameter_bytes=4e6), samples=2), cluster({"a": 2, "b": 2}, inside=inside)
    assert fastest_inside_hosts(PreparedCosts(work, profile)) is expected


def test_devices_with_links_of_their_own_are_kept_apart():
    ids = [f"{host}:{k}" for host in "ab" for k in range(3)]
    links = [
        link(a, b, 1e9, 2.0 if a[0] != b[0] else 1.0 if "0" in a + b else 1e-6) for a in ids for b in ids if a != b
    ]
    work = workload(layer(output_bytes=8), layer())
    profile = cluster({"a": 3, "b": 3}, links)
    better = step_s(builders.chain("a:1", "a:2"), work, profile)
    problem, answer = at_scale(work, profile, 4)
    assert not make_fleet(problem).of_units.alike
    assert answer.bound_s <= better


@pytest.mark.parametrize("large", [False, True])
def test_a_rule_may_forbid_short_stages_and_allow_longer_ones(large):
    work, profile = builders.workload(6), cluster({"a": 1, "b": 1})

    def rule(replicas, first, last):
        return last - first + 1 in (2, 4)

    if large:
        problem, answer = at_scale(work, profile, 4, rule=rule)
        found = priced(answer, problem)
    else:
        found = hwaware.plan(work, profile, num_microbatches=4, rule=rule)
    assert sorted(b - a + 1 for a, b in (stage.layers for stage in found.stages)) == [2, 4]


def test_whole_units_of_a_stage_are_units_of_its_size():
    work = builders.workload(2, 4, parameter_bytes=1)
    profile = cluster({"a": 2, "b": 1, "c": 2}, inside=(1e10, 1e-5))
    problem = Problem(PreparedCosts(work, profile), 8, "step", 1.0)
    scale = _Scale(problem, make_fleet(problem), math.inf)
    [whole] = [o for o, t in enumerate(scale.fleet.templates) if (t.whole, t.replicas) == (2, 4)]
    assert set(scale.plan([(0, 2, whole, 0)]).stages[0].devices) == {"a:0", "a:1", "c:0", "c:1"}
    one = next(o for o, t in enumerate(scale.fleet.templates) if t.devices == 1)
    assert step_s(scale.plan([(0, 1, whole, 0), (1, 2, one, 1)]), work, profile) > 0


def test_tensor_parallel_groups_across_units_match_their_price():
    work = builders.workload(2, 2, output_bytes=1e4, tensor_parallel_bytes=1e4, tensor_parallel_collectives=2)
    profile = cluster({"a": 2, "b": 2, "c": 2}, inside=(1e6, 1e-4))
    problem = Problem(PreparedCosts(work, profile), 4, "step", 1.0, "any")
    scale = _Scale(problem, make_fleet(problem), math.inf)
    templates = [(o, t) for o, t in enumerate(scale.fleet.templates) if t.whole > 1 and t.group > 1]
    assert any(t.across for _, t in templates)
    for o, _ in templates:
        stages = [(0, 2, o, 0)]
        assert step_s(scale.plan(stages), work, profile) == pytest.approx(scale.price(stages))


@pytest.mark.parametrize(("schedule", "count"), [("inference", 1), ("gpipe", 4), ("1f1b", 4)])
def test_waiting_gains_no_more_than_the_stages_own_pass(schedule, count):
    profile = cluster([f"h{k}" for k in range(10)], seconds={1e9: 0.01, 2e9: 0.1}, head_start_s=0.05)
    work = builders.workload([2e9] * 5, 2, backward_flops=2e9)
    stages = [(f"h{2 * k}:0", f"h{2 * k + 1}:0") for k in range(5)]
    found = builders.chain(*stages, num_microbatches=count, schedule=schedule)
    assert step_s(found, work, profile) > 0
    assert step_s(found, work, profile) == pytest.approx(simulate(found, work, profile).step_s, rel=0.15)


def test_a_message_alone_is_not_slowed_by_its_card():
    profile = with_cards(cluster([f"h{k}" for k in range(6)], between=(1e6, 0.0)), 1e6)
    work = builders.workload(3, 2, output_bytes=1e6)
    found = builders.chain(*((f"h{2 * k}:0", f"h{2 * k + 1}:0") for k in range(3)), num_microbatches=1)
    assert simulate(found, work, profile).step_s == pytest.approx(step_s(found, work, profile))


@pytest.mark.parametrize(
    "wrong", [{"schedule": "1F1B"}, {"objective": "steps"}, {"max_devices_per_stage": 0}, {"seed": -1}]
)
def test_choices_that_there_are_not_are_refused(wrong):
    with pytest.raises(UnusableInputError, match=r"To fix: "):
        hwaware.plan(workload(layer()), cluster({"a": 1}), num_microbatches=4, **wrong)


def test_a_rule_that_allows_nothing_is_named_at_scale():
    _, answer = at_scale(workload(layer()), cluster({"a": 2}), 4, 0.5, rule=lambda *_: False)
    assert answer.plan is None
    assert "rule" in answer.reason
    assert "inf" not in answer.reason


# Each pin to all devices, or all devices by a pin of their own: then no part is smaller than the cluster.
@pytest.mark.parametrize(("pins", "stages"), [({0: range(9)}, 1), ({k: [k] for k in range(9)}, 9)])
def test_pins_to_all_devices_leave_throughput_per_device_a_plan(pins, stages, monkeypatch):
    monkeypatch.setattr(exact, "MAX_STATES", 1000)
    profile = hwaware.ClusterProfile.uniform(hosts=9, flops_per_s=[1e12 * (1 + k / 10) for k in range(9)])
    named = {layer: [f"h{k}" for k in hosts] for layer, hosts in pins.items()}
    more = {"num_microbatches": 8, "objective": "per-device", "time_limit_s": 2.0}
    found = hwaware.plan(hwaware.Workload.uniform(layers=9), profile, pins=named, **more)
    assert [len(stage.devices) for stage in found.stages] == [1] * stages


def test_many_ways_to_build_a_stage_are_not_priced_beyond_the_time_limit():
    profile = hwaware.ClusterProfile.uniform(hosts=3, devices_per_host=4)
    problem = Problem(PreparedCosts(hwaware.Workload.uniform(tensor_parallel_bytes=1), profile), 1)
    unlike = [[device.id] for device in profile.devices]
    assert prepare(problem, unlike, until=0.0) is None
    assert prepare(problem._replace(most_devices=1), unlike, until=0.0) is not None
