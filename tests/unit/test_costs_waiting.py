"""Replicas of a stage wait for the one that takes longest, and passes vary from one to the next."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from builders import cluster, device, examples, layer, links, plan, timed, workload
from hypothesis import given
from hypothesis import strategies as st

from hwaware.costs import evaluate
from hwaware.costs.compute import UNMEASURED_SHARE, expected_maximum, slowest_s
from hwaware.costs.own_times import carried_over
from hwaware.costs.speed import Correction, at_speed
from hwaware.workload import MeasuredTime

TIMES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5)


def slowest(seconds, deviation):
    return float(slowest_s([np.array(each) for each in seconds], [deviation] * len(seconds), len(seconds)))


def drawn(seconds, deviation):
    """The mean of the largest of many draws."""
    draws = np.random.default_rng(7).normal(seconds, deviation, (200_000, len(seconds)))
    return float(draws.max(axis=1).mean())


@pytest.mark.parametrize("count", [2, 3, 4, 8, 64])
def test_equal_replicas_are_waited_for_as_draws_say(count):
    assert slowest([1.0] * count, 0.1) == pytest.approx(drawn([1.0] * count, 0.1), abs=5e-4)
    alike = slowest_s([np.array([1.0, 2.0])], [0.1], count)
    assert alike == pytest.approx([slowest([each] * count, 0.1) for each in (1.0, 2.0)])


@examples(60)
@given(seconds=TIMES, deviation=st.floats(0.0, 0.2))
def test_never_above_what_draws_say_nor_below_the_slowest_mean(seconds, deviation):
    found = slowest(seconds, deviation)
    assert max(seconds) <= found <= drawn(seconds, deviation) + 2e-3
    if len(seconds) == 2:
        assert found >= drawn(seconds, deviation) - 0.33 * deviation - 2e-3


@examples(200)
@given(seconds=TIMES, deviation=st.floats(0.0, 0.2), index=st.integers(0, 4), more=st.floats(0.0, 1.0))
def test_slower_or_unsteadier_replicas_never_shorten_a_wait(seconds, deviation, index, more):
    slower = list(seconds)
    slower[index % len(slower)] += more
    assert slowest(slower, deviation) >= slowest(seconds, deviation) - 1e-12
    assert slowest(seconds, deviation + more) >= slowest(seconds, deviation) - 1e-12
    assert slowest(seconds[::-1], deviation) == pytest.approx(slowest(seconds, deviation), rel=1e-12)


def two_kinds():
    devices = [device("a:0", 0.1, kind="x"), device("b:0", 0.1, kind="y"), device("c:0", 0.1, kind="y")]

    def made(of_y):
        measured = {**timed(1.0, 2.0, "x", deviation_s=0.3), **timed(1.0, 2.0, "y", deviation_s=0.4)}
        measured["y"]["2,1"] = MeasuredTime(forward_s=0.5, backward_s=1.0, deviation_s=of_y)
        return layer(measured=measured)

    return workload([made(0.0), made(0.1)], 4), cluster(devices, links(("ab", "ac", "bc")))


def price(*replicas, schedule="1f1b"):
    return evaluate(plan((0, 1, *replicas), num_microbatches=1, schedule=schedule), *two_kinds()).stages[0]


def test_a_stage_waits_for_its_slowest_replica_each_time():
    like = price("b:0", "c:0")
    y_squared = (0.0**2 + 0.1**2) / 2  # of all layers on the device
    assert like.forward_s == pytest.approx(2 * 0.5 + np.sqrt(y_squared) * expected_maximum(2))
    assert like.backward_s == pytest.approx(2 * 1.0 + np.sqrt(y_squared) * expected_maximum(2))
    # x was timed with whole microbatches alone, so its half counts UNMEASURED_SHARE times, and varies as much as the
    # whole: forward it takes longer than both together would if they were alike, backward as well.
    unlike = price("a:0", "b:0")
    together = np.sqrt((0.3**2 + y_squared) / 2) * expected_maximum(2)
    assert unlike.forward_s == pytest.approx(max(UNMEASURED_SHARE * 2 * 0.5, 2 * 0.5 + together))
    assert unlike.backward_s == pytest.approx(max(UNMEASURED_SHARE * 2 * 1.0, 2 * 1.0 + together))
    forward_only = price("b:0", "c:0", schedule="inference")
    assert (forward_only.forward_s, forward_only.backward_s) == (pytest.approx(like.forward_s), 0.0)


def test_a_single_replica_waits_for_nobody():
    assert (price("b:0").forward_s, price("a:0").backward_s) == (2.0, 4.0)


def test_slower_devices_vary_by_as_much_more():
    model, profile = two_kinds()
    slower, _ = at_speed(model, profile, 2.0, {"y": 3.0})
    corrected, _ = Correction(compute={"x": 2.0, "y": 3.0}, communication=1.0).applied(model, profile)
    for made in (slower, corrected):
        measured = made.layers[1].measured
        assert measured["x"]["1,1"].deviation_s == pytest.approx(0.6)
        assert measured["y"]["2,1"].deviation_s == pytest.approx(0.3)


def test_an_untimed_kind_is_as_unsteady_as_the_most_similar_one():
    model, profile = two_kinds()
    new = device("d:0", 0.2, host="a", kind="z")
    carried = carried_over(model, msgspec.structs.replace(profile, devices=(*profile.devices[1:], new)))
    assert carried.layers[1].measured["z"]["1,1"].deviation_s == pytest.approx(0.8)
    assert carried.layers[1].measured["z"]["2,1"].deviation_s == pytest.approx(0.2)
