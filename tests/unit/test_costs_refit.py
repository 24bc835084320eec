"""Measured steps correct the prices; every price has an interval; ZeRO's formulas."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from hwaware.cluster import (
    ClusterProfile,
    ConcurrentRate,
    Device,
    Host,
    Link,
    LinkSample,
    MatrixProduct,
    SharedCard,
)
from hwaware.costs import evaluate
from hwaware.costs.memory import offload_traffic_s, zero_resident_bytes, zero_traffic_bytes
from hwaware.costs.refit import Correction, refit, scalable_step
from hwaware.costs.sureness import spreads, step_interval, surely_better
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, MeasuredTime, Workload


def device(name, kind, seconds):
    curve = {"float32": (MatrixProduct(flops=1e9, seconds=seconds),)}
    return Device(id=name, host=name[0], kind=kind, memory_bytes=10**12, throughput=curve,
                  memory_bandwidth_bytes_per_s=1e9)  # fmt: skip


PROFILE = ClusterProfile(
    hosts=(Host(name="a"), Host(name="b")),
    devices=(device("a0", "fast", 0.5), device("b0", "slow", 1.0)),
    links=(
        Link(source="a", target="b", latency_s=0.1, bandwidth_bytes_per_s=1e9),
        Link(source="b", target="a", latency_s=0.1, bandwidth_bytes_per_s=1e9,
             samples=(LinkSample(bytes=1e9, seconds=1.0), LinkSample(bytes=1e9, seconds=1.2))),
    ),
)  # fmt: skip


def workload(**more):
    layers = [
        Layer(name=str(k), forward_flops=1e9, backward_flops=2e9, parameter_bytes=1e8, output_bytes=5e8,
              activation_bytes=1e8, **more)
        for k in range(4)
    ]  # fmt: skip
    return Workload(name="m", microbatch_size=2, dtype="float32", layers=tuple(layers))


def plan(cut, devices=("a0", "b0"), microbatches=6):
    parts = [(0, cut - 1), (cut, 3)] if cut < 4 else [(0, 3)]
    stages = tuple(Stage(layers=p, replicas=(Replica(devices=(d,)),)) for p, d in zip(parts, devices))
    return Plan(num_microbatches=microbatches, stages=stages)


PLANS = [plan(1), plan(2), plan(3), plan(4), plan(4, ("b0",)), plan(2, ("b0", "a0")), plan(2, microbatches=1)]


def test_factors_are_found_again_and_improve_what_was_not_measured():
    truth = Correction(compute={"fast": 1.6, "slow": 0.8}, communication=2.5)
    model = workload()
    measured = [(p, evaluate(p, truth.workload(model), truth.profile(PROFILE)).step_s) for p in PLANS]
    found = refit(measured, model, PROFILE, prior=0.01)
    assert found.compute == pytest.approx(truth.compute, rel=0.02)
    assert found.communication == pytest.approx(2.5, rel=0.05)
    few = refit(measured[:3], model, PROFILE)
    for p, seconds in measured[3:]:
        before = abs(evaluate(p, model, PROFILE).step_s / seconds - 1)
        after = abs(evaluate(p, few.workload(model), few.profile(PROFILE)).step_s / seconds - 1)
        assert after < max(before, 0.05)


def test_cards_are_corrected_as_links_are():
    rates = (ConcurrentRate(k=2, bytes_per_s=2e8),)
    card = SharedCard(host="a", devices=("a0",), send_bytes_per_s=4e8, receive_bytes_per_s=6e8, concurrent=rates)
    profile = msgspec.structs.replace(PROFILE, shared_cards=(card,))
    (found,) = Correction(compute={}, communication=2.0).profile(profile).shared_cards
    assert (found.send_bytes_per_s, found.receive_bytes_per_s, found.concurrent[0].bytes_per_s) == (2e8, 3e8, 1e8)


def test_right_predictions_stay():
    model = workload()
    found = refit([(p, evaluate(p, model, PROFILE).step_s) for p in PLANS], model, PROFILE)
    assert [*found.compute.values(), found.communication] == pytest.approx([1, 1, 1], abs=1e-3)


def test_messages_are_corrected_and_what_waiting_gains_stays():
    ahead = msgspec.structs.replace(
        PROFILE,
        devices=tuple(msgspec.structs.replace(d, head_start_s=0.3, sum_bytes_per_s=2e10) for d in PROFILE.devices),
    )
    correction = Correction(compute={"fast": 1.5, "slow": 0.5}, communication=2.0)
    without, before, after = (
        evaluate(plan(2), workload(), profile).stages[1].receive_s
        for profile in (PROFILE, ahead, correction.profile(ahead))
    )
    # What both ends hand on takes a part of the head start.
    assert before == pytest.approx(without - (0.3 - 2 * 5e8 / 2e10))
    assert after == pytest.approx(2 * without - (0.3 - 2 * 2 * 5e8 / 2e10))


def test_a_plan_s_price_is_scaled_as_the_corrected_profile_prices_it():
    """Also where a pass has less to gain than its device has saved up, and where it gains more than messages take."""
    for head_start_s in (0.01, 50.0):
        devices = tuple(msgspec.structs.replace(d, head_start_s=head_start_s) for d in PROFILE.devices)
        profile = msgspec.structs.replace(PROFILE, devices=devices)
        step_s = scalable_step(plan(2), workload(), profile, ["fast", "slow"])
        for factor in (0.5, 1.0, 3.0):
            corrected = Correction(compute={}, communication=factor).profile(profile)
            expected = evaluate(plan(2), workload(), corrected).step_s
            assert step_s(np.array([1.0, 1.0, factor])) == pytest.approx(expected)


def test_measured_layer_times_are_corrected_too():
    times = {"fast": {"1,1": MeasuredTime(forward_s=1.0, backward_s=2.0, update_s=0.5)}}
    corrected = Correction(compute={"fast": 2.0}, communication=1.0).workload(workload(measured=times))
    assert corrected.layers[0].measured["fast"]["1,1"] == MeasuredTime(forward_s=2.0, backward_s=4.0, update_s=1.0)


def test_nothing_measured_is_refused():
    with pytest.raises(UnusableInputError, match="at least one"):
        refit([], workload(), PROFILE)


def test_intervals_hold_the_prediction_and_shrink_with_measured_layers():
    model = workload()
    interval = step_interval(plan(2), model, PROFILE)
    assert interval.low_s < interval.step_s < interval.high_s
    assert interval.step_s == pytest.approx(evaluate(plan(2), model, PROFILE).step_s)
    times = {kind: {"1,1": MeasuredTime(forward_s=1.0, backward_s=2.0)} for kind in ("fast", "slow")}
    known = step_interval(plan(2), workload(measured=times), PROFILE)
    assert known.high_s / known.low_s < interval.high_s / interval.low_s


def test_better_only_beyond_the_spread():
    model = workload()
    assert surely_better(plan(4), plan(4, ("b0",)), model, PROFILE)
    assert not surely_better(plan(4, ("b0",)), plan(4), model, PROFILE)
    assert not surely_better(plan(2), plan(2), model, PROFILE)
    nearly = msgspec.structs.replace(
        PROFILE, devices=(PROFILE.devices[0], msgspec.structs.replace(device("b0", "slow", 0.505)))
    )
    assert not surely_better(plan(4), plan(4, ("b0",)), model, nearly)


def test_spreads_come_from_repeated_samples():
    kinds, links = spreads(PROFILE)
    assert kinds == {"fast": 0.05, "slow": 0.05}
    assert 0.1 < links < 0.25


def test_zero_keeps_less_and_sends_as_much_until_level_three():
    kept = [zero_resident_bytes(4.0, 4.0, 8.0, 8, level) for level in (0, 1, 2, 3)]
    assert kept == [16, 9, 5.5, 2]
    sent = [zero_traffic_bytes(4.0, 4.0, 8, level) for level in (0, 1, 2, 3)]
    assert sent == [7, 7, 7, 10.5]
    assert zero_resident_bytes(4.0, 4.0, 8.0, 1, 3) == 16
    assert offload_traffic_s(1e9, 1e9, 2e9) == 1
    with pytest.raises(UnusableInputError, match="ZeRO level 4"):
        zero_resident_bytes(1, 1, 1, 1, 4)
