"""Measured steps correct the prices."""

from __future__ import annotations

import msgspec
import pytest
from builders import card, cluster, device, link, plan, timed, with_devices, workload

from hwaware.cluster import Collective, LinkSample
from hwaware.costs import evaluate
from hwaware.costs.speed import Correction, refit
from hwaware.errors import UnusableInputError
from hwaware.workload import MeasuredTime


def box(name, kind, seconds):
    return device(name, seconds, kind=kind, memory_bandwidth_bytes_per_s=1e9)


SAMPLES = (LinkSample(bytes=1e9, seconds=1.0), LinkSample(bytes=1e9, seconds=1.2))
PROFILE = cluster(
    [box("a:0", "fast", 0.5), box("b:0", "slow", 1.0)],
    [link("a", "b", latency_s=0.1), link("b", "a", latency_s=0.1, samples=SAMPLES)],
)


def four(**more):
    return workload(4, 2, parameter_bytes=1e8, output_bytes=5e8, activation_bytes=1e8, **more)


def cut_at(cut, devices=("a:0", "b:0"), num_microbatches=6):
    parts = [(0, cut - 1), (cut, 3)] if cut < 4 else [(0, 3)]
    return plan(*((*part, name) for part, name in zip(parts, devices)), num_microbatches=num_microbatches)


PLANS = [
    cut_at(1),
    cut_at(2),
    cut_at(3),
    cut_at(4),
    cut_at(4, ("b:0",)),
    cut_at(2, ("b:0", "a:0")),
    cut_at(2, num_microbatches=1),
]


def test_found_factors_improve_what_was_not_measured():
    truth = Correction(compute={"fast": 1.6, "slow": 0.8}, communication=2.5)
    model = four()
    measured = [(p, evaluate(p, *truth.applied(model, PROFILE)).step_s) for p in PLANS]
    found = refit(measured, model, PROFILE, prior=0.01)
    assert found.compute == pytest.approx(truth.compute, rel=0.02)
    assert found.communication == pytest.approx(2.5, rel=0.05)
    few = refit(measured[:3], model, PROFILE)
    for p, seconds in measured[3:]:
        before = abs(evaluate(p, model, PROFILE).step_s / seconds - 1)
        after = abs(evaluate(p, *few.applied(model, PROFILE)).step_s / seconds - 1)
        assert after < max(before, 0.05)


def test_cards_are_corrected_as_links_are():
    slow = card("a:0", send=4e8, receive=6e8, concurrent={2: 2e8})
    profile = msgspec.structs.replace(PROFILE, shared_cards=(slow,))
    (found,) = Correction(compute={}, communication=2.0).applied(four(), profile)[1].shared_cards
    assert (found.send_bytes_per_s, found.receive_bytes_per_s, found.concurrent[0].bytes_per_s) == (2e8, 3e8, 1e8)


def test_right_predictions_stay():
    model = four()
    found = refit([(p, evaluate(p, model, PROFILE).step_s) for p in PLANS], model, PROFILE)
    assert [*found.compute.values(), found.communication] == pytest.approx([1, 1, 1], abs=1e-3)


def test_messages_are_corrected_and_what_waiting_gains_stays():
    ahead = with_devices(PROFILE, head_start_s=0.3, sum_bytes_per_s=2e10)
    correction = Correction(compute={"fast": 1.5, "slow": 0.5}, communication=2.0)
    without, before, after = (
        evaluate(cut_at(2), four(), profile).stages[1].receive_s
        for profile in (PROFILE, ahead, correction.applied(four(), ahead)[1])
    )
    # What both ends hand on takes a part of the head start.
    assert before == pytest.approx(without - (0.3 - 2 * 5e8 / 2e10))
    assert after == pytest.approx(2 * without - (0.3 - 2 * 2 * 5e8 / 2e10))


def test_measured_collectives_are_corrected_as_links_are():
    curve = Collective(op="all-reduce", devices=("a:0", "b:0"), dtype="float32", points=SAMPLES[:1])
    profile = msgspec.structs.replace(PROFILE, collectives=(curve,))
    (found,) = Correction(compute={}, communication=2.0).applied(four(), profile)[1].collectives
    assert found.points[0].seconds == 2.0


def test_measured_layer_times_are_corrected_too():
    times = timed(1.0, 2.0, "fast", update_s=0.5)
    corrected, _ = Correction(compute={"fast": 2.0}, communication=1.0).applied(four(measured=times), PROFILE)
    assert corrected.layers[0].measured["fast"]["1,1"] == MeasuredTime(forward_s=2.0, backward_s=4.0, update_s=1.0)


def test_times_of_single_devices_are_corrected_as_their_kind_is():
    times = {**timed(1.0, 2.0, "slow"), **timed(3.0, 4.0, "b:0")}
    corrected, _ = Correction(compute={"slow": 2.0}, communication=1.0).applied(four(measured=times), PROFILE)
    assert {name: each["1,1"].forward_s for name, each in corrected.layers[0].measured.items()} == {
        "slow": 2.0, "b:0": 6.0,
    }  # fmt: skip


def test_nothing_measured_is_refused():
    with pytest.raises(UnusableInputError, match="at least one"):
        refit([], four(), PROFILE)
