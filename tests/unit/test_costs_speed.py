"""Predictions for another minute: what computes is slower or faster, links are as they were."""

import builders
import pytest
from builders import chain, cluster, timed, with_devices

from hwaware.costs import evaluate
from hwaware.costs.speed import at_speed, prediction_at_speed_s
from hwaware.result import BenchmarkResult, Mapping

PROFILE = cluster("ab", between=(1e9, 0.5), seconds=0.1, pass_s=0.01)
TIMES = timed(0.2, 0.4, update_s=0.1)
PLAN = chain("a:0", "b:0", num_microbatches=1)


def workload(measured):
    return builders.workload(2, 4, output_bytes=8, measured=measured)


def result(mapping, **kept):
    return BenchmarkResult(
        environment={"profile_reference_s": 0.02}, scenario="s", model="m", num_microbatches=1, repeats=1,
        mappings=(mapping,), **kept,
    )  # fmt: skip


def mapping(predicted=10.0, reference_s=(0.03,), **more):
    return Mapping(
        name="hwaware", plan=PLAN, predicted_step_s=predicted, step_s=(1.0,) * len(reference_s or (1,)), loss=(),
        reference_s=reference_s, **more,
    )  # fmt: skip


@pytest.mark.parametrize("measured", [None, TIMES])
def test_computing_takes_longer_and_messages_do_not(measured):
    before = evaluate(PLAN, workload(measured), PROFILE).step_s
    now = evaluate(PLAN, *at_speed(workload(measured), PROFILE, 1.5)).step_s
    messages = 2 * 0.5  # there and back
    assert now - messages == pytest.approx(1.5 * (before - messages), rel=1e-6)


def test_a_prediction_is_made_again_for_the_speed_of_the_steps():
    kept = {"profile": PROFILE, "workload": workload(TIMES)}
    before = evaluate(PLAN, workload(TIMES), PROFILE).step_s
    share = 1.0 / before  # of the messages
    found = prediction_at_speed_s(mapping(), result(mapping(), **kept))
    assert found == pytest.approx(10.0 * (1.5 * (1 - share) + share), rel=1e-6)
    other = mapping(profile_reference_s=0.03)
    assert prediction_at_speed_s(other, result(other, **kept)) == pytest.approx(10.0)


def test_each_kind_of_device_has_its_own_speed():
    unlike = with_devices(PROFILE, kind=lambda each: {"a": "fast", "b": "slow"}[each.host])
    times = {**timed(0.2, 0.4, "fast"), **timed(0.2, 0.4, "slow")}
    steps = {
        "none": evaluate(PLAN, *at_speed(workload(times), unlike, 1.0)).step_s,
        "slow": evaluate(PLAN, *at_speed(workload(times), unlike, 1.0, {"slow": 2.0})).step_s,
        "others": evaluate(PLAN, *at_speed(workload(times), unlike, 2.0, {"slow": 1.0})).step_s,
    }
    assert steps["slow"] - steps["none"] == pytest.approx(0.6 + 2 * 0.01)  # one stage's forward and backward pass
    assert steps["others"] == pytest.approx(steps["slow"], rel=1e-6)  # of the other one
    kept = {"profile": unlike, "workload": workload(times)}
    one = mapping(
        predicted=steps["none"], reference_s=(0.03,) * 3, slowdowns={"slow": (9.0, 2.0, 1.0), "fast": (1.0,) * 3}
    )
    assert prediction_at_speed_s(one, result(one, **kept)) == pytest.approx(steps["slow"])


def test_without_the_workload_all_of_a_step_counts_as_computing():
    assert prediction_at_speed_s(mapping(), result(mapping())) == pytest.approx(15.0)


def test_without_a_reference_kernel_a_prediction_stays():
    alone = mapping(reference_s=())
    assert prediction_at_speed_s(alone, result(alone)) == 10.0
