"""Memory: ZeRO's shares of parameters, gradients and optimizer state, and what they send."""

import msgspec
import pytest
from builders import cluster, device, layer, timed, workload

from hwaware.costs import evaluate
from hwaware.costs.compute import layer_times_s
from hwaware.costs.zero import zero_resident_bytes, zero_traffic_bytes
from hwaware.errors import UnusableInputError
from hwaware.placement import plan
from hwaware.plans import Plan, Replica, Stage
from hwaware.records import rebuilt
from hwaware.workload import Shared


def test_zero_keeps_less_and_sends_as_much_until_level_three():
    kept = [zero_resident_bytes(4.0, 4.0, 8.0, 8, level) for level in (0, 1, 2, 3)]
    assert kept == [16, 9, 5.5, 2]
    sent = [zero_traffic_bytes(4.0, 4.0, 8, level) for level in (0, 1, 2, 3)]
    assert sent == [7, 7, 7, 10.5]
    # Three microbatches: gradients that no device keeps whole leave it three times.
    assert [zero_traffic_bytes(4.0, 4.0, 8, level, passes=3) for level in (0, 1, 2, 3)] == [7, 7, 14, 31.5]
    assert zero_resident_bytes(4.0, 4.0, 8.0, 1, 3) == 16
    with pytest.raises(UnusableInputError, match="ZeRO level 4"):
        zero_resident_bytes(1, 1, 1, 1, 4)


def test_a_stage_holds_once_what_its_layers_share():
    tied = {"parameter_bytes": 100.0, "gradient_bytes": 100.0, "optimizer_bytes": 200.0}
    layers = [layer(**tied), layer(parameter_bytes=50.0, gradient_bytes=0.0, optimizer_bytes=0.0), layer(**tied)]
    model = msgspec.structs.replace(
        workload(layers), shared=(Shared(layers=(0, 2), parameter_bytes=100.0, optimizer_bytes=200.0),)
    )

    def held(*cuts):
        stages = [Stage(layers=cut, replicas=(Replica(devices=(f"{k}:0",)),)) for k, cut in enumerate(cuts)]
        plan = Plan(num_microbatches=1, stages=tuple(stages))
        return [stage.memory_bytes for stage in evaluate(plan, model, cluster("012")).stages]

    assert held((0, 0), (1, 1), (2, 2)) == [400, 50, 400]  # the frozen layer in the middle has its weights alone
    assert held((0, 1), (2, 2)) == [450, 400]
    assert held((0, 2)) == [550]  # two accumulators, one weight with its state


@pytest.mark.parametrize(("update", "held"), [(None, 430), (30.0, 430), (500.0, 900)])
def test_the_update_runs_when_no_activations_are_left(update, held):
    model = workload([layer(parameter_bytes=100.0, activation_bytes=30.0, update_bytes=update)])
    plan = Plan(num_microbatches=1, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("a:0",)),)),))
    assert evaluate(plan, model, cluster("a")).stages[0].memory_bytes == held


@pytest.mark.parametrize(
    ("shared", "said"),
    [
        ({"layers": (0,)}, "expected at least two layers"),
        ({"layers": (1, 0)}, "expected ascending numbers"),
        ({"layers": (0, 5)}, "expected numbers from 0 to 1"),
        ({"layers": (0, 1), "parameter_bytes": 101.0}, "expected at most their own 100"),
        ({"layers": (0, 1), "update_bytes": 1.0}, "expected at most their own 0"),
    ],
)
def test_layers_share_no_more_than_they_have(shared, said):
    with pytest.raises(ValueError, match=said):
        rebuilt(workload(2, parameter_bytes=100.0), shared=(Shared(**shared),))


def test_frozen_weights_are_read_alone():
    machine = device("a:0", memory_bandwidth_bytes_per_s=1.0)
    frozen, trained = (layer(0, 1e9, parameter_bytes=10.0, gradient_bytes=size) for size in (0.0, 10.0))
    of_frozen, of_trained = (float(layer_times_s([each], machine, "float32")[1][0]) for each in (frozen, trained))
    assert (of_frozen, of_trained) == (1.0 + 10.0, 1.0 + 50.0)


def test_layers_whose_measured_memory_is_less_than_what_they_share():
    """The price and the search's table agree, and the plan can be written."""
    model = workload(2, parameter_bytes=1e9, measured=timed(1, 2, memory_bytes=1e6))
    model = rebuilt(model, shared=(Shared(layers=(0, 1), parameter_bytes=1e9, optimizer_bytes=2e9),))
    profile = cluster("a", memory_bytes=10_000)
    found = plan(model, profile, num_microbatches=2)
    assert [stage.memory_bytes for stage in found.stages] == [0.0]
