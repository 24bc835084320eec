"""What a pass takes beside its program, and a sum beside the network, from measured steps."""

from __future__ import annotations

import logging

import msgspec
import pytest

from hwaware.bench import passes
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs import evaluate
from hwaware.costs.pipeline import one_f_one_b_s
from hwaware.plans import Plan, Replica, Stage
from hwaware.workload import Layer, Workload


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


def hosts(rates, **more):
    """One device on each of three hosts, the middle one half as fast; the rate of each pair's link."""
    devices = tuple(
        Device(
            id=f"{host}:0", host=host, kind=host, memory_bytes=1 << 30,
            throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.2 if host == "b" else 0.1),)}, **more,
        )
        for host in "abc"
    )  # fmt: skip
    links = tuple(
        Link(source=pair[0], target=pair[1], latency_s=0, bandwidth_bytes_per_s=rate) for pair, rate in rates.items()
    )
    return ClusterProfile(hosts=tuple(Host(name=name) for name in "abc"), devices=devices, links=links)


def test_sums_are_measured_over_the_fastest_link_there_and_back(monkeypatch):
    pytest.importorskip("jax")  # which version decides whether anything can be summed
    asked = []

    def summed(_, pair):
        asked.append(pair)
        return 3e6, 0.03

    monkeypatch.setattr(passes, "_summed", summed)
    found = passes.with_sums(hosts({"ab": 1e8, "ac": 9e8, "ca": 1e7, "bc": 2e8}))
    assert asked == [("b:0", "c:0")]
    # 100 MB/s of the slower one of them: the other devices hand on twice as much.
    assert [device.sum_bytes_per_s for device in found.devices] == pytest.approx([2e8, 1e8, 2e8])


def test_nothing_is_known_of_sums_on_one_host_or_where_they_take_no_longer_than_the_network(monkeypatch):
    pytest.importorskip("jax")
    one = cluster(0.1, 0.2)
    assert passes.with_sums(one) is one
    monkeypatch.setattr(passes, "_summed", lambda *_: (3e6, -0.001))
    three = hosts({"ab": 1e8, "ac": 1e8, "bc": 1e8})
    assert passes.with_sums(three) is three


def test_summing_costs_what_the_slower_replica_needs_for_it_beside_the_network():
    def price(*rates):
        profile = hosts({"ab": 1e8, "ac": 1e8, "bc": 1e8})
        devices = tuple(msgspec.structs.replace(d, sum_bytes_per_s=r) for d, r in zip(profile.devices, rates))
        layer = Layer(name="0", forward_flops=1e9, backward_flops=2e9, parameter_bytes=3e6, output_bytes=0,
                      activation_bytes=0)  # fmt: skip
        workload = Workload(name="one", microbatch_size=6, dtype="float32", layers=(layer,))
        replicas = tuple(Replica(devices=(f"{host}:0",)) for host in "abc")
        plan = Plan(num_microbatches=1, stages=(Stage(layers=(0, 0), replicas=replicas),))
        found = evaluate(plan, workload, msgspec.structs.replace(profile, devices=devices))
        return found.stages[0].gradient_sync_s

    ring_s = 4 * 1e6 / 1e8  # 2 (N - 1) rounds of a third of 3 MB
    assert price(None, None, None) == pytest.approx(ring_s)
    assert price(None, 1e8, 2e8) == pytest.approx(ring_s + 4 / 3 * 3e6 / 1e8)


def test_alpa_s_warning_of_few_operations_is_for_others(caplog):
    log = logging.getLogger("alpa.pipeline_parallel.layer_construction")
    before = log.level
    with passes._few_operations():
        log.warning("too few")
    log.warning("of somebody's model")
    assert caplog.messages == ["of somebody's model"]
    assert log.level == before
