"""What a caller can ask for beside a solver: pins, throughput per device, open microbatches, another judge."""

from __future__ import annotations

import math
import random
import sys
from typing import NamedTuple

import instances
import numpy as np
import pytest
from builders import cluster, device, layer, seeds, timed, workload

import hwaware
from hwaware.costs import PreparedCosts, with_microbatch_size
from hwaware.errors import UnusableInputError
from hwaware.placement import SOLVERS, Problem


def random_pins(rng, one):
    names = [device.id for device in one.profile.devices]
    layers = rng.sample(range(len(one.workload.layers)), rng.randint(1, min(2, len(one.workload.layers))))
    return {layer: rng.sample(names, rng.randint(1, max(1, len(names) - 1))) for layer in layers}


def keeps(pins):
    def kept(plan):
        return all(
            set(stage.devices) <= set(allowed)
            for stage in plan.stages
            for layer, allowed in pins.items()
            if stage.layers[0] <= layer <= stage.layers[1]
        )

    return kept


@pytest.mark.parametrize("seed", seeds(16))
def test_pins_are_kept_and_nothing_better_keeps_them(seed):
    rng = random.Random(seed)
    replicas = seed % 2 == 1
    one = instances.replicated_stages(rng, 4, 3) if replicas else instances.single_device_stages(rng, 5, 4)
    pins = random_pins(rng, one)
    arranged = instances.arrangements(one, "any") if replicas else instances.alone
    best = instances.brute_force(one, arranged, keeps=keeps(pins))
    found = hwaware.plan(
        one.workload,
        one.profile,
        num_microbatches=one.num_microbatches,
        pins=pins,
        target="any" if replicas else "alpa",
    )
    if math.isinf(best):
        assert found.status == "infeasible"
        assert "To fix:" in found.reason
        return
    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(best, rel=1e-9)
    assert keeps(pins)(found)
    for solver in ("annealing", "even"):
        other = hwaware.plan(
            one.workload, one.profile, num_microbatches=one.num_microbatches, pins=pins, solver=solver, time_limit_s=2
        )
        assert other.status == "infeasible" or keeps(pins)(other)


def test_a_mapping_that_does_not_keep_pins_says_so():
    one = instances.single_device_stages(random.Random(3), alike=True)
    names = [device.id for device in one.profile.devices]
    first = hwaware.plan(one.workload, one.profile, solver="even").stages[0].devices[0]
    other = next(name for name in names if name != first)
    found = hwaware.plan(one.workload, one.profile, solver="even", pins={0: other})
    assert found.status == "infeasible"
    assert "does not keep what is pinned: layers 0" in found.reason


def test_a_rule_that_names_a_host_is_told_of_exclude():
    model, three = workload(4), cluster("abc")

    def rule(replicas, first, last):
        return all(one.host != "a" for devices in replicas for one in devices)

    found = hwaware.plan(model, three, num_microbatches=8, rule=rule)
    assert found.status == "infeasible"
    assert found.reason.startswith("Rule: the search found no ")  # a and b are equal: the rule was asked about a alone
    assert "asked the rule about one" in found.reason
    assert "To fix: allow more shapes of stages, or name devices by exclude or pins" in found.reason
    other = hwaware.plan(model, three, num_microbatches=8, exclude="a")
    assert {name for stage in other.stages for name in stage.devices} == {"b:0", "c:0"}


def test_layers_are_pinned_by_name_and_to_hosts():
    one = instances.single_device_stages(random.Random(3), alike=True)
    host = one.profile.devices[-1].host
    found = hwaware.plan(one.workload, one.profile, pins={one.workload.layers[-1].name: host})
    assert found.stages[-1].devices == (one.profile.devices[-1].id,)
    twice = {0: host, one.workload.layers[0].name: host}
    cases = (({"x": host}, "no such layer"), ({0: "nowhere"}, "no such host or device"), (twice, "0 is pinned twice"))
    for pins, said in cases:
        with pytest.raises(UnusableInputError, match=said):
            hwaware.plan(one.workload, one.profile, pins=pins)


@pytest.mark.parametrize(
    ("pinned", "count"), [("same", "2 such layers"), ("²", "no such layer"), ("-1", "no such layer")]
)
def test_the_refusal_of_a_layer_says_how_many_have_its_name(pinned, count):
    model = workload([layer(name="same"), layer(name="same"), layer(name="other")])
    with pytest.raises(UnusableInputError, match=f"the workload has {count}.* only one layer has"):
        hwaware.plan(model, cluster(), pins={pinned: "a"})


@pytest.mark.parametrize("seed", seeds(12))
def test_throughput_per_device_is_the_best_there_is(seed):
    rng = random.Random(seed)
    replicas = seed % 2 == 1
    one = instances.replicated_stages(rng, 4, 3) if replicas else instances.single_device_stages(rng, 5, 4)
    arranged = instances.arrangements(one, "any") if replicas else instances.alone
    best = instances.brute_force(one, arranged, objective="per-device")
    found = hwaware.plan(
        one.workload,
        one.profile,
        num_microbatches=one.num_microbatches,
        objective="per-device",
        target="any" if replicas else "alpa",
    )
    if math.isinf(best):
        assert found.status == "infeasible"
        return
    devices = sum(len(stage.devices) for stage in found.stages)
    assert found.status == "optimal"
    assert found.objective_s == pytest.approx(best, rel=1e-9)
    assert found.objective_s == pytest.approx(devices * found.predicted_step_s)


def test_open_microbatches_choose_the_best_for_a_global_batch():
    sizes = set()
    for seed in seeds(6, every=2):
        one = instances.replicated_stages(random.Random(seed), 4, 3)
        found = hwaware.plan(one.workload, one.profile, num_microbatches=None, global_batch=12)
        each = [
            hwaware.plan(
                with_microbatch_size(one.workload, one.profile, samples), one.profile, num_microbatches=12 // samples
            )
            for samples in (1, 2, 3, 4, 6, 12)
        ]
        best = min((plan.objective_s for plan in each if plan.status != "infeasible"), default=math.inf)
        if math.isinf(best):
            assert found.status == "infeasible"
            continue
        assert found.objective_s == pytest.approx(best, rel=1e-12)
        even = hwaware.plan(one.workload, one.profile, num_microbatches=None, global_batch=12, solver="even")
        assert even.status == "infeasible" or 0 < even.bound_s <= best * (1 + 1e-9)  # solvers without a proof too
        assert found.num_microbatches * found.microbatch_size == 12
        assert hwaware.evaluate(found, one.workload, one.profile).step_s == found.predicted_step_s
        assert found.bound_s <= best
        sizes.add(found.microbatch_size)
    assert len(sizes) > 1


def test_open_microbatches_after_the_time_limit_are_not_searched_but_bounded(monkeypatch):
    searched, even = [], SOLVERS["even"]

    class Recorder(NamedTuple):
        name: str = even.name

        def answer(self, problem):
            searched.append(problem.microbatch_size)
            return even.answer(problem)

        signed = even.signed

    monkeypatch.setitem(SOLVERS, "even", Recorder())
    model, both = workload(4, 4), cluster("ab")
    found = hwaware.plan(model, both, num_microbatches=None, global_batch=12, solver="even", time_limit_s=1e-9)
    assert searched == [4] == [found.microbatch_size]
    every = [hwaware.plan(with_microbatch_size(model, both, n), both, num_microbatches=12 // n) for n in (1, 2, 3, 6)]
    assert found.bound_s <= min(plan.objective_s for plan in every)
    assert found.status == "feasible"


def test_open_microbatches_price_devices_with_their_own_times_as_evaluate_does():
    both = cluster([device(f"{name}:0", seconds, memory_bytes=13 * 10**8) for name, seconds in (("a", 1), ("b", 2))])
    times = {**timed(0.1, 0.2), **timed(0.4, 0.8, "b:0")}
    model = workload(4, 4, measured=times, parameter_bytes=1e8)  # three layers fit on a device
    found = hwaware.plan(model, both, num_microbatches=None, global_batch=16)
    assert (found.status, found.microbatch_size) == ("optimal", 1)
    # For a sample, one layer on b takes 0.1 + 0.2 s, and three on a 0.225 s. After its second forward pass, b waits
    # 0.125 s for a's first microbatch, and before its last backward pass 0.025 s for a's last one.
    assert found.predicted_step_s == pytest.approx(16 * 0.3 + 0.125 + 0.025)
    assert hwaware.evaluate(found, model, both).step_s == found.predicted_step_s


def test_a_microbatch_size_of_its_own_does_not_change_the_price():
    one = instances.replicated_stages(random.Random(1), 4, 3)
    other = with_microbatch_size(one.workload, one.profile, 8)
    same = with_microbatch_size(other, one.profile, one.workload.microbatch_size)
    plan = hwaware.plan(one.workload, one.profile, num_microbatches=4)
    assert hwaware.evaluate(plan, same, one.profile).step_s == pytest.approx(plan.predicted_step_s, rel=1e-9)


def test_pins_that_contradict_each_other_are_named():
    one = instances.single_device_stages(random.Random(6), alike=True)
    names = [device.id for device in one.profile.devices]
    found = hwaware.plan(one.workload, one.profile, pins={0: names[0], 1: names[1], 2: names[0]})
    assert found.status == "infeasible"
    assert found.reason.startswith(f"Pins: no contiguous stages keep all of 3 pins (layer 0 to {names[0]}; ")


@pytest.mark.parametrize(
    "choices",
    [
        {"num_microbatches": None},
        {"num_microbatches": None, "global_batch": 0},
        {"num_microbatches": 4, "global_batch": 12},
    ],
)
def test_an_open_number_alone_needs_a_global_batch(choices):
    one = instances.replicated_stages(random.Random(1), 4, 3)
    with pytest.raises(UnusableInputError, match=r"microbatches is open|global_batch is 12, expected one"):
        hwaware.plan(one.workload, one.profile, **choices)


@pytest.mark.parametrize(
    "choices",
    [
        {"num_microbatches": "8"},
        {"num_microbatches": 8.0},
        {"num_microbatches": None, "global_batch": "64"},
        {"num_microbatches": None, "global_batch": 64.0},
        {"seed": "a"},
        {"max_devices_per_stage": 1.5},
        {"time_limit_s": "60"},
        {"time_limit_s": None},
        {"exclude": 5},
        {"reserve_bytes": "2GB"},
        {"pins": [0]},
        {"pins": {0: 5}},
        {"rule": 5},
        {"judge": 5, "solver": "annealing"},
        {"judge": lambda plan: None, "solver": "annealing"},
        {"judge": lambda plan: math.nan, "solver": "annealing"},
        {"workload": hwaware.ClusterProfile.uniform()},
        {"profile": "cluster.json"},
    ],
)
def test_a_value_of_the_wrong_type_is_one_message(choices):
    records = {"workload": workload(2), "profile": cluster("ab")}
    with pytest.raises(UnusableInputError, match=r"(is|returned) .*expected .* To fix: "):
        hwaware.plan(**{**records, "time_limit_s": 1.0, **choices})


def test_numbers_of_numpy_are_numbers():
    choices = {"num_microbatches": np.int64(4), "seed": np.int32(1), "time_limit_s": np.float32(5), "reserve_bytes": 0}
    judged = {"solver": "annealing", "judge": lambda plan: np.float32(len(plan.stages))}
    found = hwaware.plan(workload(2), cluster("ab"), **choices, **judged)
    assert hwaware.Plan.from_json(found.to_json()) == found
    pinned = hwaware.plan(workload(2), cluster("ab"), pins={np.int64(1): "b"})
    assert pinned.stages[-1].devices == ("b:0",)


def test_annealing_minimises_what_its_judge_says():
    one = instances.single_device_stages(random.Random(3), alike=True)

    def simulated(plan):
        return hwaware.simulate(plan, one.workload, one.profile).step_s

    found = hwaware.plan(
        one.workload, one.profile, num_microbatches=4, solver="annealing", judge=simulated, time_limit_s=1
    )
    assert simulated(found) <= 1.02 * simulated(hwaware.plan(one.workload, one.profile, num_microbatches=4))

    def fewest(plan):
        return 1.0 + len(plan.stages)

    assert (
        len(
            hwaware.plan(
                one.workload, one.profile, num_microbatches=4, solver="annealing", judge=fewest, time_limit_s=1
            ).stages
        )
        <= 2
    )
    with pytest.raises(UnusableInputError, match="knows no other judge"):
        hwaware.plan(one.workload, one.profile, judge=fewest)


def test_a_judge_sees_the_microbatches_of_each_plan():
    model, profile = workload(1, microbatch_size=4, output_bytes=1e3), cluster("abcdefgh", seconds=0.1)
    asked = {}

    def simulated(plan):
        asked[plan] = hwaware.simulate(plan, model, profile).step_s
        return asked[plan]

    def planned(judge, batch=16):
        return hwaware.plan(
            model, profile, num_microbatches=None, global_batch=batch, solver="annealing", judge=judge, time_limit_s=3
        )

    found = planned(simulated)
    assert {plan.num_microbatches * plan.microbatch_size for plan in asked} == {16}
    assert len({plan.microbatch_size for plan in asked}) == 5
    # One microbatch of 16 samples on eight devices: 16 / 4 x 0.3 s / 8.
    assert simulated(found) == min(asked.values()) == pytest.approx(0.15)
    for order in (1, -1):
        most = planned(lambda plan, order=order: 10.0 + order * plan.num_microbatches, batch=8)
        assert most.num_microbatches == (1 if order == 1 else 8)


def test_every_solver_solves_a_problem():
    one = instances.single_device_stages(random.Random(3), alike=True)
    problem = Problem(PreparedCosts(one.workload, one.profile), 8, time_limit_s=1)
    for name, solver in SOLVERS.items():
        if name != "gradient":  # needs JAX
            found = solver.solve(problem)
            assert (found.solver, found.num_microbatches) == (name, 8)
            assert found.search_s > 0


def test_the_gradient_solver_names_the_libraries_that_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    monkeypatch.delitem(sys.modules, "hwaware.placement.gradient", raising=False)
    with pytest.raises(UnusableInputError, match="To fix: pip install jax jaxlib optax"):
        hwaware.plan(workload(2), cluster("ab"), solver="gradient")


def test_the_command_offers_every_solver():
    from hwaware.cli import plan

    assert tuple(SOLVERS) == plan.SOLVERS
