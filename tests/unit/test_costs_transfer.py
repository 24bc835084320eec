"""Measured layer times on other kinds of devices: by their curves, and how surely."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwaware.cluster import ClusterProfile, Device, Host, MatrixProduct
from hwaware.costs import PreparedCosts, evaluate
from hwaware.costs.sureness import ANALYTIC_SPREAD, step_interval
from hwaware.costs.transfer import carried_over, transferred_times_s, unlikeness
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, MeasuredTime, Workload

SIZES = (1e6, 1e8, 1e10)


def device(kind, factor=1.0, bandwidth=1e10, bend=1.0):
    """A device whose every time is `factor` times the usual; `bend` more for the largest product alone."""
    seconds = [factor * size / 1e11 for size in SIZES]
    seconds[-1] *= bend
    points = tuple(MatrixProduct(flops=size, seconds=one) for size, one in zip(SIZES, seconds))
    rate = None if bandwidth is None else bandwidth / factor
    return Device(
        id=f"{kind}:0", host=kind, kind=kind, memory_bytes=1 << 40, throughput={"float32": points},
        memory_bandwidth_bytes_per_s=rate,
    )  # fmt: skip


def measured_layer(forward=0.3, backward=0.7, update=0.05, kind="old"):
    times = MeasuredTime(forward_s=forward, backward_s=backward, update_s=update)
    return Layer(
        name="l", forward_flops=1e9, backward_flops=2e9, parameter_bytes=1e6, output_bytes=0, activation_bytes=1e7,
        measured={kind: {"1,1": times}},
    )  # fmt: skip


def workload(*layers):
    return Workload(name="w", microbatch_size=4, dtype="float32", layers=layers)


def cluster(*devices):
    return ClusterProfile(hosts=tuple(Host(name=one.host) for one in devices[:1]), devices=devices[:1], links=())


@given(st.floats(0.1, 10), st.floats(1e-3, 10), st.floats(1e-3, 10))
def test_a_device_that_is_slower_by_one_factor_takes_that_much_longer_and_surely(factor, forward, backward):
    carried = transferred_times_s(
        measured_layer(forward, backward), device("old"), device("new", factor), dtype="float32"
    )
    assert carried.forward_s == pytest.approx(forward * factor)
    assert carried.backward_s == pytest.approx(backward * factor)
    assert carried.spread == pytest.approx(0, abs=1e-9)


def test_unlike_curves_make_it_less_sure_but_only_as_far_as_the_curve_does_not_explain_the_layer():
    old, new = device("old", bandwidth=None), device("new", bandwidth=None, bend=1.5)
    assert unlikeness(old, new, "float32") > 0.1
    unexplained = transferred_times_s(measured_layer(0.3, 0.7), old, new, "float32")
    explained = transferred_times_s(measured_layer(0.01, 0.02), old, new, "float32")
    assert unexplained.spread == pytest.approx(unlikeness(old, new, "float32"))
    assert explained.spread == pytest.approx(0, abs=1e-9)


def test_differences_within_the_noise_of_the_curves_are_not_believed():
    old = device("old", bandwidth=None)
    noisy = transferred_times_s(measured_layer(), old, device("new", 2.0, bandwidth=None, bend=1.1), "float32")
    truly = transferred_times_s(measured_layer(), old, device("new", 2.0, bandwidth=None, bend=8.0), "float32")
    assert noisy.forward_s == pytest.approx(0.3 * 2 * 1.1 ** (1 / 3))
    # The layer's size lies between the second and the third product; its own factor is 2 * sqrt(8).
    assert 0.3 * 2 * 8 ** (1 / 3) < truly.forward_s < 0.3 * 2 * 8**0.5
    assert truly.forward_s == pytest.approx(0.3 * 2 * 8**0.5, rel=0.02)


def test_a_layer_that_was_not_measured_there_is_refused():
    with pytest.raises(UnusableInputError, match="no measured time"):
        transferred_times_s(measured_layer(), device("new"), device("old"), "float32")


def test_every_kind_of_the_profile_gets_times_and_what_was_measured_stays():
    old, new = device("old"), device("new", 4.0)
    profile = ClusterProfile(hosts=(Host(name="a"),), devices=(move(old), move(new)), links=(inside("a"),))
    made = carried_over(workload(measured_layer()), profile)
    (layer,) = made.layers
    assert layer.measured["old"]["1,1"] == MeasuredTime(forward_s=0.3, backward_s=0.7, update_s=0.05)
    times = layer.measured["new"]["1,1"]
    assert (times.forward_s, times.backward_s, times.update_s) == pytest.approx((1.2, 2.8, 0.2))
    assert times.spread == pytest.approx(0, abs=1e-9)
    costs = PreparedCosts(made, profile)
    assert costs.sums(("new:0",)).forward_s[-1] == pytest.approx(1.2)
    assert costs.sums(("new:0",)).update_s[-1] == pytest.approx(0.2)
    assert carried_over(made, profile) == made


def test_a_replicas_share_is_carried_over_by_the_factor_of_the_whole():
    half = MeasuredTime(forward_s=0.2, backward_s=0.4, update_s=0.05)
    whole = measured_layer()
    measured = {"old": {**whole.measured["old"], "2,1": half, "1,2": half}}
    profile = ClusterProfile(
        hosts=(Host(name="a"),), devices=(move(device("old")), move(device("new", 4.0))), links=(inside("a"),)
    )
    (made,) = carried_over(workload(msgspec.structs.replace(whole, measured=measured)), profile).layers
    assert sorted(made.measured["new"]) == ["1,1", "2,1"]
    times = made.measured["new"]["2,1"]
    assert (times.forward_s, times.backward_s, times.update_s) == pytest.approx((0.8, 1.6, 0.2))
    none_backward = msgspec.structs.replace(half, backward_s=0.0)
    inference = msgspec.structs.replace(whole, measured={"old": {"1,1": none_backward}})
    (made,) = carried_over(workload(inference), profile).layers
    assert made.measured["new"]["1,1"].backward_s == 0.0


def test_the_most_like_kind_is_carried_over():
    near, far, new = device("near", 2.0), device("far", 1.0, bend=3.0), device("new", 4.0)
    layer = measured_layer(0.2, 0.2, kind="near")
    layer = msgspec.structs.replace(
        layer, measured={**layer.measured, "far": {"1,1": MeasuredTime(forward_s=9, backward_s=9)}}
    )
    devices = tuple(move(one) for one in (far, near, new))
    profile = ClusterProfile(hosts=(Host(name="a"),), devices=devices, links=(inside("a"),))
    (made,) = carried_over(workload(layer), profile).layers
    assert made.measured["new"]["1,1"].forward_s == pytest.approx(0.4)


def test_without_times_on_a_kind_of_the_profile_nothing_changes():
    given_workload = workload(measured_layer(kind="elsewhere"))
    assert carried_over(given_workload, cluster(device("new"))) == given_workload


def test_the_interval_knows_how_surely_times_were_carried_over():
    plan = Plan(num_microbatches=4, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("new:0",)),)),))
    profile = cluster(device("new"))
    widths = []
    for spread in (None, 0.1, 5.0):
        times = MeasuredTime(forward_s=0.3, backward_s=0.7, spread=spread)
        layer = msgspec.structs.replace(measured_layer(), measured={"new": {"1,1": times}})
        interval = step_interval(plan, workload(layer), profile)
        widths.append(interval.high_s / interval.low_s)
    assert widths[0] < widths[1] < widths[2]
    unmeasured = step_interval(plan, workload(msgspec.structs.replace(measured_layer(), measured=None)), profile)
    assert ANALYTIC_SPREAD > 0.1
    assert widths[2] == pytest.approx(unmeasured.high_s / unmeasured.low_s, rel=1e-6)


def test_every_pass_of_a_stage_costs_what_its_device_takes_beside_the_program():
    slow = msgspec.structs.replace(move(device("slow")), pass_s=0.5)
    devices = (move(device("old")), slow)
    profile = ClusterProfile(hosts=(Host(name="a"),), devices=devices, links=(inside("a"),))
    one = workload(measured_layer(), measured_layer(kind="slow"))
    stages = tuple(
        Stage(layers=(index, index), replicas=(Replica(devices=(name,)),))
        for index, name in enumerate(("old:0", "slow:0"))
    )
    first, second = evaluate(Plan(num_microbatches=4, stages=stages), one, profile).stages
    assert (first.forward_s, first.backward_s) == pytest.approx((0.3, 0.7))
    assert (second.forward_s, second.backward_s) == pytest.approx((0.8, 1.2))
    assert second.update_s == pytest.approx(0.05)
    both = Stage(layers=(0, 1), replicas=(Replica(devices=("slow:0",)),))
    (alone,) = evaluate(Plan(num_microbatches=4, stages=(both,)), one, profile).stages
    layers = PreparedCosts(one, profile).sums(("slow:0",))
    assert alone.forward_s == pytest.approx(layers.forward_s[-1] + 0.5)  # once a stage, not once a layer


def inside(host):
    from hwaware.cluster import Link

    return Link(source=host, target=host, latency_s=1e-5, bandwidth_bytes_per_s=1e9)


def move(one):
    """The device on host a."""
    return msgspec.structs.replace(one, host="a")
