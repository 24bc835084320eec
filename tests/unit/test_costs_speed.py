"""Predictions for another minute: what computes is slower or faster, links are as they were."""

import msgspec
import pytest

from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs import evaluate
from hwaware.costs.speed import at_speed, prediction_at_speed_s
from hwaware.plans import Plan, Replica, Stage
from hwaware.result import BenchmarkResult, Mapping
from hwaware.workload import Layer, MeasuredTime, Workload

CURVE = {"float32": (MatrixProduct(flops=1e9, seconds=0.1),)}
DEVICES = tuple(
    Device(id=f"{host}:0", host=host, kind="cpu", memory_bytes=1 << 30, throughput=CURVE, pass_s=0.01) for host in "ab"
)
PROFILE = ClusterProfile(
    hosts=(Host(name="a"), Host(name="b")),
    devices=DEVICES,
    links=(Link(source="a", target="b", latency_s=0.5, bandwidth_bytes_per_s=1e9),),
)
LAYER = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=0, output_bytes=8, activation_bytes=0)
TIMES = {"cpu": {"1,1": MeasuredTime(forward_s=0.2, backward_s=0.4, update_s=0.1)}}
PLAN = Plan(
    num_microbatches=1,
    stages=tuple(Stage(layers=(k, k), replicas=(Replica(devices=(DEVICES[k].id,)),)) for k in range(2)),
)


def workload(measured):
    layer = msgspec.structs.replace(LAYER, measured=measured)
    return Workload(name="two", microbatch_size=4, dtype="float32", layers=(layer, layer))


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
    devices = [msgspec.structs.replace(d, kind=kind) for d, kind in zip(DEVICES, ("fast", "slow"))]
    unlike = msgspec.structs.replace(PROFILE, devices=tuple(devices))
    times = {kind: {"1,1": MeasuredTime(forward_s=0.2, backward_s=0.4)} for kind in ("fast", "slow")}
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
