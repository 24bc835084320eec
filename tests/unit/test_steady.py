"""Plans with the shortest likely step: near the cheapest plan, with no longer a likely step, and within all limits."""

import itertools
import random

import msgspec
import pytest
from builders import cluster, device

from hwaware.costs import evaluate, step_interval
from hwaware.patching.steady import steadiest
from hwaware.placement import plan
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import MeasuredTime, Workload

SPEEDS = {"a": 1.0, "b": 2.0, "c": 2.6}


def uneven(seed, deviation):
    """Return layers of random sizes whose passes vary by this part of them, on three devices of unlike speed."""
    draw = random.Random(seed)
    workload = Workload.uniform(layers=6)
    layers = []
    for layer in workload.layers:
        size = draw.uniform(0.5, 2.0)
        whole = {name: size * speed / 50 for name, speed in SPEEDS.items()}
        measured = {
            name: {"1,1": MeasuredTime(forward_s=s / 2, backward_s=s, deviation_s=deviation * s)}
            for name, s in whole.items()
        }
        layers.append(msgspec.structs.replace(layer, measured=measured))
    return msgspec.structs.replace(workload, layers=tuple(layers))


@pytest.fixture
def three():
    return cluster([device(f"{name}:0", speed, kind=name) for name, speed in SPEEDS.items()], between=(1e9, 1e-5))


def likely_s(found, workload, profile):
    return step_interval(found, workload, profile).likely_s


def both(workload, profile, **more):
    """Return the cheapest plan, and the steadiest one near it."""
    cheapest = plan(workload, profile, num_microbatches=8, **more)
    return cheapest, steadiest(cheapest, workload, profile, more.get("rule"))


@pytest.mark.parametrize("seed", range(6))
def test_the_likely_step_is_no_longer_and_the_price_little_higher(seed, three):
    workload = uneven(seed, 0.4)
    cheapest, steady = both(workload, three)
    assert likely_s(steady, workload, three) <= likely_s(cheapest, workload, three) * (1 + 1e-9)
    assert steady.predicted_step_s <= 1.06 * cheapest.predicted_step_s
    assert steady.predicted_step_s == evaluate(steady, workload, three).step_s
    assert steady.bound_s == cheapest.bound_s
    assert (steady.status == "optimal") == (steady.predicted_step_s <= cheapest.predicted_step_s * (1 + 1e-9))


def test_some_likely_step_is_shorter(three):
    gains = []
    for seed in range(6):
        workload = uneven(seed, 0.4)
        cheapest, steady = (likely_s(one, workload, three) for one in both(workload, three))
        gains.append(1 - steady / cheapest)
    assert max(gains) > 0.005


@pytest.mark.parametrize("seed", range(12))
def test_no_chain_of_devices_has_a_shorter_likely_step(seed, three):
    workload = uneven(seed, 0.4)
    cheapest, steady = both(workload, three)
    names = [one.id for one in three.devices]
    for count in range(1, len(names) + 1):
        for inner in itertools.combinations(range(1, len(workload.layers)), count - 1):
            cuts = (0, *inner, len(workload.layers))
            for order in itertools.permutations(names, count):
                pieces = zip(cuts, cuts[1:], order)
                stages = [Stage(layers=(a, b - 1), replicas=(Replica(devices=(name,)),)) for a, b, name in pieces]
                other = Plan(num_microbatches=8, stages=tuple(stages))
                if evaluate(other, workload, three).step_s <= 1.06 * cheapest.predicted_step_s:
                    assert likely_s(other, workload, three) >= likely_s(steady, workload, three) * (1 - 1e-6)


def test_a_device_whose_passes_vary_leaves_the_middle():
    """Between two others it delays both; at the end, one."""
    profile = cluster([device(f"{name}:0", 1.0, kind=name) for name in "abc"], between=(1e12, 1e-9))
    workload = Workload.uniform(layers=3)
    measured = {
        name: {"1,1": MeasuredTime(forward_s=0.01, backward_s=0.02, deviation_s=0.01 if name == "b" else 1e-4)}
        for name in "abc"
    }
    layers = tuple(msgspec.structs.replace(layer, measured=measured) for layer in workload.layers)
    workload = msgspec.structs.replace(workload, layers=layers)
    stages = [Stage(layers=(k, k), replicas=(Replica(devices=(f"{name}:0",)),)) for k, name in enumerate("abc")]
    found = plan(workload, profile, num_microbatches=8)
    middle = msgspec.structs.replace(found, stages=tuple(stages))
    steady = steadiest(middle, workload, profile)
    assert "b:0" in (steady.stages[0].devices[0], steady.stages[-1].devices[0])
    assert likely_s(steady, workload, profile) < likely_s(middle, workload, profile)


def test_passes_that_do_not_vary_change_nothing(three):
    cheapest, steady = both(uneven(0, 0.0), three)
    assert (steady.stages, steady.status) == (cheapest.stages, "optimal")


def like_devices(own=None, slow_link=None):
    """Return two layers and four devices of one kind, some with times of their own, and one link much slower."""
    times = {kind: {"1,1": MeasuredTime(forward_s=s, backward_s=s)} for kind, s in {"cpu": 0.1, **(own or {})}.items()}
    profile = cluster([device(f"{name}:0", 1.0) for name in "abcd"], between=(1e9, 1e-5))
    links = tuple(
        msgspec.structs.replace(link, bandwidth_bytes_per_s=1e5) if {link.source, link.target} == slow_link else link
        for link in profile.links
    )
    return Workload.uniform(layers=2, output_bytes=1e5, measured=times), msgspec.structs.replace(profile, links=links)


def on_devices(*names):
    """Return a plan with a layer on each device."""
    stages = [Stage(layers=(k, k), replicas=(Replica(devices=(name,)),)) for k, name in enumerate(names)]
    return Plan(num_microbatches=8, stages=tuple(stages))


@pytest.mark.parametrize(
    ("own", "slow_link", "expected"),
    [
        ({}, None, ["a:0", "b:0"]),
        ({"d:0": 0.0999}, None, ["a:0", "b:0"]),  # less than 0.3 % of the step
        ({"a:0": 0.1001}, None, ["a:0", "b:0"]),
        ({"a:0": 0.101}, None, ["b:0", "c:0"]),
        ({}, {"a", "b"}, ["a:0", "c:0"]),
    ],
)
def test_like_devices_are_taken_in_the_order_of_the_profile(own, slow_link, expected):
    workload, profile = like_devices(own, slow_link)
    for names in (("d:0", "c:0"), ("b:0", "d:0")):
        found = steadiest(on_devices(*names), workload, profile)
        assert [stage.devices[0] for stage in found.stages] == expected
        assert found.predicted_step_s == evaluate(found, workload, profile).step_s
        assert found.predicted_step_s <= 1.003 * evaluate(on_devices(*names), workload, profile).step_s


def test_a_rule_holds(three):
    def no_layers_alone(groups, first, last):
        return last > first

    for seed in range(6):
        _, steady = both(uneven(seed, 0.4), three, rule=no_layers_alone)
        assert all(first < last for first, last in (stage.layers for stage in steady.stages))


def test_a_plan_that_does_not_fit_stays(three):
    workload = uneven(1, 0.4)
    layers = tuple(msgspec.structs.replace(layer, parameter_bytes=1e13) for layer in workload.layers)
    found, steady = both(msgspec.structs.replace(workload, layers=layers), three)
    assert found.status == "infeasible"
    assert steady is found


def test_a_hand_made_pipeline_waits_more_than_one_device():
    """The reason for all this: the same price, and more waits."""
    workload = uneven(0, 0.4)
    profile = cluster([device("a:0", 1.0, kind="a"), device("b:0", 1.0, kind="a")], between=(1e12, 1e-9))
    one = Plan(num_microbatches=8, stages=(Stage(layers=(0, 5), replicas=(Replica(devices=("a:0",)),)),))
    two = plan(workload, profile, num_microbatches=8, rule=lambda replicas, first, last: len(replicas) == 1)
    waits = [likely_s(each, workload, profile) / evaluate(each, workload, profile).step_s for each in (one, two)]
    assert len(two.stages) == 2
    assert waits[1] > waits[0]
