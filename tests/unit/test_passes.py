"""What a pass takes beside its program, from a measured step of a pipeline that computes nothing."""

from __future__ import annotations

import pytest

from hwaware.bench import passes
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs.pipeline import one_f_one_b_s


def cluster(*seconds):
    """Devices whose largest product takes that long."""
    devices = tuple(
        Device(
            id=f"a:{index}", host="a", kind=str(one), memory_bytes=1,
            throughput={"float32": (MatrixProduct(flops=1e9, seconds=one),)},
        )
        for index, one in enumerate(seconds)
    )  # fmt: skip
    link = Link(source="a", target="a", latency_s=0, bandwidth_bytes_per_s=1e9)
    return ClusterProfile(hosts=(Host(name="a"),), devices=devices, links=(link,))


def test_slower_devices_take_longer_for_a_pass_so_that_the_step_comes_out_as_measured(monkeypatch):
    expected = (0.002, 0.008, 0.004)
    nothing = [0.0, 0.0]
    step = one_f_one_b_s(expected, expected, nothing, nothing, passes.NUM_MICROBATCHES) + expected[0]
    monkeypatch.setattr(passes, "_measured_step_s", lambda _: step)
    found = passes.with_passes(cluster(0.1, 0.4, 0.2))
    assert [device.pass_s for device in found.devices] == pytest.approx(expected)
