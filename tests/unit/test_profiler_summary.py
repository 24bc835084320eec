"""From samples to records."""

from __future__ import annotations

import pytest

from hwaware.profiler.policy import FULL, QUICK, fits_after
from hwaware.profiler.summary import ProductSample, curve, host_names, link


def test_throughput_is_all_work_over_all_time():
    [point] = curve([ProductSample(10, 90, 0.9, 0.025), ProductSample(10, 10, 1.1, 0.025)])
    assert point.flops == 2000.0
    assert point.seconds == pytest.approx(2.0 / 100)


def test_a_curve_is_sorted_by_size():
    points = curve([ProductSample(20, 1, 0.2, 1), ProductSample(10, 1, 0.1, 1), ProductSample(30, 1, 0.3, 1)])
    assert [point.flops for point in points] == [2000.0, 16000.0, 54000.0]


def test_disturbed_samples_are_left_out():
    [point] = curve([ProductSample(10, 10, 1.0, 0.025), ProductSample(10, 10, 9.0, 0.041)])
    assert point.seconds == pytest.approx(0.1)


def test_times_hold_for_the_speed_that_is_asked_for():
    """A sample taken while the machine was slower counts like one that was not."""
    samples = [ProductSample(10, 10, 1.0, 0.025), ProductSample(10, 10, 1.1, 0.0275), ProductSample(20, 1, 2.2, 0.0275)]
    assert [point.seconds for point in curve(samples, 0.025)] == pytest.approx([0.1, 2.0])
    assert [point.seconds for point in curve(samples)] == pytest.approx([0.105, 2.2])


def test_the_least_disturbed_sample_stands_where_all_are():
    samples = [ProductSample(5, 1, 0.1, 0.02), ProductSample(10, 1, 3.0, 0.06), ProductSample(10, 1, 2.0, 0.05)]
    assert [point.seconds for point in curve(samples)] == [0.1, 2.0]


def timing(latency_s, bytes_per_s, sizes):
    return {
        "tiny_s": [2 * latency_s, 2 * latency_s, 90 * latency_s],
        "messages": [(n, [latency_s + n / bytes_per_s] * 3) for n in sizes],
    }


def test_a_link_shows_its_latency_and_its_rate():
    found = link("a", "b", timing(2e-3, 1e8, (1024, 1 << 20)))
    assert (found.source, found.target) == ("a", "b")
    assert found.latency_s == pytest.approx(2e-3)
    assert found.bandwidth_bytes_per_s == pytest.approx(1e8)
    assert [(s.bytes, s.seconds) for s in found.samples] == [
        (1024, pytest.approx(2e-3 + 1.024e-5)),
        (1 << 20, pytest.approx(2e-3 + (1 << 20) / 1e8)),
    ]


def test_a_hiccup_does_not_change_the_median():
    raw = timing(1e-4, 1e8, (1 << 20,))
    raw["messages"][0][1][1] = 5.0
    assert link("a", "b", raw).bandwidth_bytes_per_s == pytest.approx(1e8)


def test_messages_as_fast_as_an_empty_one_have_a_finite_rate():
    raw = {"tiny_s": [2e-3], "messages": [(1024, [1e-3])]}
    assert 0 < link("a", "b", raw).bandwidth_bytes_per_s < 1e9


def test_hosts_are_told_apart_whatever_they_share():
    assert host_names([("1", "a", "10.0.0.1"), ("2", "b", "10.0.0.2")]) == {"1": "a", "2": "b"}
    assert host_names([("1", "a", "10.0.0.1"), ("2", "a", "10.0.0.2")]) == {"1": "10.0.0.1", "2": "10.0.0.2"}
    names = host_names([("11112222333", "a", "127.0.0.1"), ("44445555666", "a", "127.0.0.1")])
    assert names == {"11112222333": "a-11112222", "44445555666": "a-44445555"}


@pytest.mark.parametrize(("edge", "seconds", "larger", "limit_s", "fits"), [
    (100, 0.01, 200, 0.08, True),
    (100, 0.01, 200, 0.079, False),
])  # fmt: skip
def test_a_product_twice_as_wide_takes_eight_times_as_long(edge, seconds, larger, limit_s, fits):
    assert fits_after(edge, seconds, larger, limit_s) is fits


def test_policies_span_what_they_promise():
    for policy in (FULL, QUICK):
        assert list(policy.sizes) == sorted(set(policy.sizes))
        assert list(policy.message_bytes) == sorted(set(policy.message_bytes))
        assert policy.product_s >= 6 * 0.02, "fewer than six quota periods of a share of 0.2"
    assert (1536 / FULL.sizes[0]) ** 3 > 10**2.5
    assert FULL.message_bytes[0] == 1024
    assert FULL.message_bytes[-1] == 256 << 20
    assert len(FULL.sizes) >= 12
