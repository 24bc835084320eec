"""Measured layer times on other kinds of devices: by their curves, and how surely."""

from __future__ import annotations

import builders
import msgspec
import pytest
from builders import chain, cluster, layer, plan, timed
from hypothesis import given
from hypothesis import strategies as st

from hwaware.costs import PreparedCosts, evaluate
from hwaware.costs.own_times import carried_over, carried_to_devices, transferred_times, unlikeness
from hwaware.workload import MeasuredTime


def device(kind, factor=1.0, bandwidth=1e10, bend=1.0):
    """Build a device whose every time is `factor` times the usual; `bend` more for the largest product alone."""
    curve = {1e6: factor * 1e-5, 1e8: factor * 1e-3, 1e10: factor * bend * 0.1}
    rate = None if bandwidth is None else bandwidth / factor
    return builders.device(f"{kind}:0", curve, host="a", kind=kind, memory_bandwidth_bytes_per_s=rate)


def measured_layer(forward=0.3, backward=0.7, update=0.05, kind="old"):
    measured = timed(forward, backward, kind, update_s=update)
    return layer(parameter_bytes=1e6, activation_bytes=1e7, measured=measured)


def workload(*layers):
    return builders.workload(layers, microbatch_size=4)


@given(st.floats(0.1, 10), st.floats(1e-3, 10), st.floats(1e-3, 10))
def test_a_uniformly_slower_device_scales_times_exactly(factor, forward, backward):
    carried = transferred_times(measured_layer(forward, backward), device("old"), device("new", factor), "float32")[
        "1,1"
    ]
    assert carried.forward_s == pytest.approx(forward * factor)
    assert carried.backward_s == pytest.approx(backward * factor)
    assert carried.spread == pytest.approx(0, abs=1e-9)


def test_unlike_curves_add_spread_where_they_explain_nothing():
    old, new = device("old", bandwidth=None), device("new", bandwidth=None, bend=1.5)
    assert unlikeness(old, new, "float32") > 0.1
    unexplained = transferred_times(measured_layer(0.3, 0.7), old, new, "float32")["1,1"]
    explained = transferred_times(measured_layer(0.01, 0.02), old, new, "float32")["1,1"]
    assert unexplained.spread == pytest.approx(unlikeness(old, new, "float32"))
    assert explained.spread == pytest.approx(0, abs=1e-9)


def test_differences_within_noise_are_not_believed():
    old = device("old", bandwidth=None)
    noisy = transferred_times(measured_layer(), old, device("new", 2.0, bandwidth=None, bend=1.1), "float32")["1,1"]
    truly = transferred_times(measured_layer(), old, device("new", 2.0, bandwidth=None, bend=8.0), "float32")["1,1"]
    assert noisy.forward_s == pytest.approx(0.3 * 2 * 1.1 ** (1 / 3))
    # The layer's size lies between the second and the third product; its own factor is 2 * sqrt(8).
    assert 0.3 * 2 * 8 ** (1 / 3) < truly.forward_s < 0.3 * 2 * 8**0.5
    assert truly.forward_s == pytest.approx(0.3 * 2 * 8**0.5, rel=0.02)


def test_every_kind_gets_times_and_measured_ones_stay():
    old, new = device("old"), device("new", 4.0)
    profile = cluster([old, new])
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


def test_shares_are_carried_over_by_the_factor_of_the_whole():
    half = MeasuredTime(forward_s=0.2, backward_s=0.4, update_s=0.05)
    whole = measured_layer()
    measured = {"old": {**whole.measured["old"], "2,1": half, "1,2": half}}
    profile = cluster([device("old"), device("new", 4.0)])
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
    times = {**timed(0.2, 0.2, "near", update_s=0.05), **timed(9, 9, "far")}
    (made,) = carried_over(workload(layer(measured=times)), cluster([far, near, new])).layers
    assert made.measured["new"]["1,1"].forward_s == pytest.approx(0.4)


def test_without_times_on_a_kind_of_the_profile_nothing_changes():
    given_workload = workload(measured_layer(kind="elsewhere"))
    assert carried_over(given_workload, cluster([device("new")])) == given_workload


def test_every_pass_adds_its_devices_own_time():
    slow = msgspec.structs.replace(device("slow"), pass_s=0.5)
    profile, one = cluster([device("old"), slow]), workload(measured_layer(), measured_layer(kind="slow"))
    first, second = evaluate(chain("old:0", "slow:0"), one, profile).stages
    assert (first.forward_s, first.backward_s) == pytest.approx((0.3, 0.7))
    assert (second.forward_s, second.backward_s) == pytest.approx((0.8, 1.2))
    assert second.update_s == pytest.approx(0.05)
    (alone,) = evaluate(plan((0, 1, "slow:0")), one, profile).stages
    layers = PreparedCosts(one, profile).sums(("slow:0",))
    assert alone.forward_s == pytest.approx(layers.forward_s[-1] + 0.5)  # once a stage, not once a layer


def test_devices_of_the_measured_kind_with_other_speeds_get_times_of_their_own():
    fast, like, slow = (
        msgspec.structs.replace(device("old", factor), id=f"{host}:0", host=host)
        for host, factor in (("a", 1.0), ("b", 1.03), ("c", 2.0))
    )
    profile = cluster([fast, like, slow])
    (made,) = carried_to_devices(workload(measured_layer()), profile, "a:0").layers
    assert sorted(made.measured) == ["c:0", "old"]
    assert made.measured["old"]["1,1"] == MeasuredTime(forward_s=0.3, backward_s=0.7, update_s=0.05)
    assert made.measured["c:0"]["1,1"].forward_s == pytest.approx(0.6)
    # Measured on the slow one, the fast ones are faster than what was measured.
    (made,) = carried_to_devices(workload(measured_layer()), profile, "c:0").layers
    assert made.measured["c:0"]["1,1"].forward_s == 0.3
    assert made.measured["old"]["1,1"].forward_s == pytest.approx(0.15, rel=0.02)


def test_a_layer_that_was_not_measured_on_the_device_stays_as_it_is():
    profile = cluster([device("old"), device("new", 2.0)])
    elsewhere = measured_layer(kind="other")
    first, second, third = carried_to_devices(workload(measured_layer(), layer(), elsewhere), profile, "old:0").layers
    assert sorted(first.measured) == ["new", "old"]
    assert second.measured is None
    assert third.measured == elsewhere.measured
