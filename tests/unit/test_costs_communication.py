"""What a message takes of a step: its time on the link, less what a device that has waited for it catches up."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwaware.cluster import ClusterProfile, Device, Host, Link, LinkSample, MatrixProduct
from hwaware.costs import evaluate
from hwaware.costs.communication import exposed_time_s, send_time_s
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, MeasuredTime, Workload


def device(name, **more):
    curve = {"float32": (MatrixProduct(flops=1e9, seconds=0.1),)}
    return Device(id=f"{name}:0", host=name, kind="cpu", memory_bytes=1 << 30, throughput=curve, **more)


def exposed_s(nbytes, link, source=None, target=None, **more):
    (seconds,) = exposed_time_s(link, np.array([nbytes]), source or device("a"), target or device("b"), **more)
    return seconds


SAMPLES = LinkSample(bytes=1e3, seconds=2e-3), LinkSample(bytes=1e6, seconds=1)
LINK = Link(source="a", target="b", latency_s=0.001, bandwidth_bytes_per_s=1e6)


def test_only_what_is_longer_than_the_head_start_counts():
    ahead = device("b", head_start_s=0.005)
    assert exposed_s(4e3, LINK, target=ahead) == pytest.approx(0.0)
    assert exposed_s(9e3, LINK, target=ahead) == pytest.approx(0.005)


def test_a_pass_that_gains_more_than_the_message_takes_ends_before_it_would_without_one():
    ahead = device("b", head_start_s=0.005)
    assert exposed_s(1e3, LINK, target=ahead) == pytest.approx(0.002 - 0.005)
    assert exposed_s(1e3, LINK, target=ahead, next_pass_s=0.001) == pytest.approx(0.002 - 0.001), "no pass gains more"


def test_it_is_the_waiting_end_s_head_start_that_counts():
    assert exposed_s(9e3, LINK, source=device("a", head_start_s=0.005)) == pytest.approx(0.010)


def test_both_ends_work_takes_of_it():
    ahead = device("b", head_start_s=0.005, sum_bytes_per_s=9e6)  # 1 ms for 9 kB
    assert exposed_s(9e3, LINK, target=ahead) == pytest.approx(0.006)
    assert exposed_s(9e3, LINK, device("a", sum_bytes_per_s=3e6), ahead) == pytest.approx(0.009)
    assert exposed_s(90e3, LINK, target=ahead) == pytest.approx(0.091), "never longer than the message takes"


RATES = st.one_of(st.none(), st.floats(1e4, 1e9))


@given(
    sizes=st.lists(st.floats(0, 1e8), min_size=2, max_size=5), head_start_s=st.floats(0, 0.1), here=RATES, there=RATES,
    samples=st.booleans(), next_pass_s=st.floats(0, 0.2),
)  # fmt: skip
def test_more_bytes_never_take_less_and_never_more_than_on_the_link(
    sizes, head_start_s, here, there, samples, next_pass_s
):
    link = msgspec.structs.replace(LINK, samples=SAMPLES if samples else ())
    nbytes = np.array(sorted(sizes))
    source, target = device("a", sum_bytes_per_s=here), device("b", sum_bytes_per_s=there, head_start_s=head_start_s)
    found = exposed_time_s(link, nbytes, source, target, next_pass_s)
    on_link = send_time_s(link, nbytes)
    assert np.all(np.diff(found) >= -1e-12)
    assert np.all(found <= on_link)
    assert np.all(found >= on_link - min(next_pass_s, head_start_s) - 1e-12)


def chain(head_start_s):
    """Two equal stages, 0.1 s there and 0.1 s back, 10 kB between: 11 ms each way."""
    times = {"cpu": {"1,1": MeasuredTime(forward_s=0.1, backward_s=0.1)}}
    layer = Layer(
        name="0", forward_flops=1, backward_flops=1, parameter_bytes=0, output_bytes=1e4, activation_bytes=0,
        measured=times,
    )  # fmt: skip
    workload = Workload(name="two", microbatch_size=1, dtype="float32", layers=(layer, layer))
    devices = tuple(device(name, head_start_s=head_start_s) for name in "ab")
    profile = ClusterProfile(hosts=(Host(name="a"), Host(name="b")), devices=devices, links=(LINK,))
    stages = tuple(Stage(layers=(k, k), replicas=(Replica(devices=(f"{'ab'[k]}:0",)),)) for k in range(2))
    return evaluate(Plan(num_microbatches=5, stages=stages), workload, profile)


def test_a_step_is_shorter_by_what_its_devices_catch_up():
    """Five microbatches turn three times through both stages: 3 x (0.4 + 2 messages)."""
    assert chain(None).step_s == pytest.approx(3 * 0.4 + 6 * 0.011)
    assert chain(0.004).step_s == pytest.approx(3 * 0.4 + 6 * 0.007)
    assert chain(0.031).step_s == pytest.approx(0.4 - 2 * 0.02 + 4 * 0.2), "the second stage never waits again"
    assert chain(0.5).step_s == chain(0.1).step_s == pytest.approx(2 * 0.011 + 5 * 0.2), "no pass takes less than none"
