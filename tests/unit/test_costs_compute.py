"""Layer times: matrix products alone without memory bandwidth, memory traffic added with it, measured times first."""

from __future__ import annotations

import json
import statistics

import msgspec
import numpy as np
import pytest
from builders import ROOT, device, layer, timed
from hypothesis import given
from hypothesis import strategies as st

from hwaware.costs.compute import BACKWARD_PASSES, FORWARD_PASSES, UNMEASURED_SHARE, layer_times_s
from hwaware.result import BenchmarkResult
from hwaware.workload import MeasuredTime

CURVE = {1e6: 1e-3, 1e9: 0.1}


def box(bandwidth=None):
    return device(seconds=CURVE, memory_bandwidth_bytes_per_s=bandwidth)


def product(flops=1e9, activations=1e8, **more):
    return layer(flops, activation_bytes=activations, **more)


def times(one, where, **how):
    forward, backward = layer_times_s([one], where, "float32", **how)
    return float(forward[0]), float(backward[0])


def test_without_bandwidth_only_the_curve_counts():
    assert times(product(), box()) == pytest.approx((0.1, 0.2))


def test_memory_traffic_is_added():
    forward, backward = times(product(), box(1e10))
    assert forward == pytest.approx(0.1 + FORWARD_PASSES * 0.01)
    assert backward == pytest.approx(0.2 + BACKWARD_PASSES * 0.01)
    nothing = product(0)
    assert times(nothing, box(1e10)) == (0, 0)


def test_shares_and_groups_divide_the_traffic():
    split = product(tensor_parallel_bytes=1.0)
    whole, half = times(split, box(1e10)), times(split, box(1e10), share=0.5, group=1)
    assert half[0] - 0.5 * FORWARD_PASSES * 0.01 == pytest.approx(times(split, box(), share=0.5)[0])
    assert times(split, box(1e10), group=2)[0] == pytest.approx(half[0])
    assert half[0] < whole[0]


def test_weights_pass_through_memory_whatever_the_share():
    owned = layer(parameter_bytes=1e8)
    assert times(owned, box(1e10)) == pytest.approx((0.1 + 0.01, 0.2 + 0.05))
    half, curve = times(owned, box(1e10), share=0.5), times(owned, box(), share=0.5)
    assert [a - b for a, b in zip(half, curve)] == pytest.approx([0.01, 0.05])
    split = msgspec.structs.replace(owned, tensor_parallel_bytes=1.0)
    halved, curve = times(split, box(1e10), group=2), times(split, box(), group=2)
    assert [a - b for a, b in zip(halved, curve)] == pytest.approx([0.005, 0.025])
    measured = msgspec.structs.replace(owned, measured=timed(1.0, 1.0))
    assert times(measured, box(1e10), share=0.5)[1] == pytest.approx(UNMEASURED_SHARE * half[1] / 0.25)
    assert times(measured, box(1e10))[1] == 1.0


def test_measured_times_win_over_both():
    measured = timed(0.7, 0.9)
    assert times(product(measured=measured), box(1e10)) == (0.7, 0.9)
    half = times(product(measured=measured), box(1e10), share=0.5)
    plain = times(product(), box(1e10), share=0.5)[0] / times(product(), box(1e10))[0]
    assert half[0] == pytest.approx(UNMEASURED_SHARE * 0.7 * plain)


@pytest.mark.parametrize(("replicas", "low", "middle", "high"), [(2, 1.02, 1.07, 1.13), (4, 1.05, 1.09, 1.16)])
def test_the_factor_of_unmeasured_shares_is_that_of_recorded_results(replicas, low, middle, high):
    found = [
        statistics.fmean(ratios)
        for path in (ROOT / "benchmarks" / "results").glob("**/*.json")
        if json.loads(path.read_text()).get("schema") == BenchmarkResult.SCHEMA
        if (ratios := list(measured_over_unmeasured(BenchmarkResult.load(path), f"{replicas},1")))
    ]
    assert len(found) >= 10
    assert np.quantile(found, [0.1, 0.5, 0.9]) == pytest.approx([low, middle, high], abs=0.006)
    assert low < UNMEASURED_SHARE < high


def measured_over_unmeasured(result, sharding):
    """Yield for each kind how much longer its shares of layers took than analytic times scale whole layers."""
    for one in {each.kind: each for each in result.profile.devices}.values():
        known = [(layer.measured or {}).get(one.kind, {}) for layer in result.workload.layers]
        if all("1,1" in times and sharding in times for times in known):
            whole = [
                msgspec.structs.replace(layer, measured={one.kind: {"1,1": times["1,1"]}})
                for layer, times in zip(result.workload.layers, known)
            ]
            scaled = np.sum(layer_times_s(whole, one, result.workload.dtype, 1 / int(sharding[0]))) / UNMEASURED_SHARE
            yield sum(times[sharding].forward_s + times[sharding].backward_s for times in known) / scaled


def test_a_share_is_priced_between_measured_shares():
    whole, half = MeasuredTime(forward_s=0.9, backward_s=2.0), MeasuredTime(forward_s=0.6, backward_s=0.8)
    one = product(measured={"cpu": {"1,1": whole, "2,1": half, "1,2": MeasuredTime(forward_s=9.0, backward_s=9.0)}})
    assert times(one, box(), share=1.0) == (0.9, 2.0)
    assert times(one, box(), share=0.5) == (0.6, 0.8)
    assert times(one, box(), share=0.75) == pytest.approx((0.75, 1.4))
    # 0.3 s whatever the share; backward, half the samples took less than half the time, but fewer will not.
    assert times(one, box(), share=1 / 3) == pytest.approx((0.5, 0.8 * 2 / 3))
    assert times(one, box(), share=0.5, group=2)[0] > 9.0 * 0.5  # one sharding of that group: scaled
    only_half = product(measured={"cpu": {"2,1": half}})
    assert times(only_half, box(), share=0.5) == (0.6, 0.8)
    assert times(only_half, box()) == times(product(), box())
    assert times(only_half, box(), share=0.4) == times(product(), box(), share=0.4)


def test_a_group_without_measured_times_takes_those_of_one_device():
    whole, half = MeasuredTime(forward_s=0.9, backward_s=2.0), MeasuredTime(forward_s=0.6, backward_s=0.8)
    unsplit = product(measured={"cpu": {"1,1": whole, "2,1": half}})
    split = msgspec.structs.replace(unsplit, tensor_parallel_bytes=1.0)
    # Between 1e6 and 1e9 FLOPs, a product of half the FLOPs takes 2^(-2/3) of the time; above, half.
    assert times(unsplit, box(), group=2) == (0.9, 2.0)
    assert times(unsplit, box(), share=0.5, group=2) == (0.6, 0.8)
    assert times(split, box(), group=2) == pytest.approx((0.9 * 2 ** (-2 / 3), 1.0))
    assert times(split, box(), share=0.5, group=2) == pytest.approx((0.6 * 2 ** (-2 / 3), 0.8 * 2 ** (-2 / 3)))
    alone = msgspec.structs.replace(split, measured={"cpu": {"1,1": whole}})
    assert times(alone, box(), share=0.5, group=2)[0] == pytest.approx(UNMEASURED_SHARE * 0.9 * 4 ** (-2 / 3))
    own = msgspec.structs.replace(split, measured={"cpu": {"1,1": whole, "1,2": half}})
    assert times(own, box(), group=2) == (0.6, 0.8)
    assert times(split, device(seconds=CURVE, kind="gpu"), group=2) == times(
        product(tensor_parallel_bytes=1.0), box(), group=2
    )


def test_noise_makes_no_larger_share_faster_than_a_smaller_one():
    whole, half = MeasuredTime(forward_s=0.5, backward_s=0.5), MeasuredTime(forward_s=0.6, backward_s=0.5)
    one = product(measured={"cpu": {"1,1": whole, "2,1": half}})
    assert times(one, box(), share=0.75) == pytest.approx((0.6, 0.5))


@given(st.floats(0, 1e12), st.floats(0, 1e12), st.floats(0, 1e12), st.floats(1e6, 1e13))
def test_more_work_or_slower_memory_never_takes_less(flops, more, activations, bandwidth):
    a, b = product(flops, activations), product(flops + more, activations)
    assert times(b, box(bandwidth))[0] >= times(a, box(bandwidth))[0] * (1 - 1e-12)
    assert times(a, box(bandwidth / 2))[0] >= times(a, box(bandwidth))[0] * (1 - 1e-12)
    assert np.isfinite(times(a, box(bandwidth))).all()
