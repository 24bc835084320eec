"""Clusters as they are measured: no two devices, no two links are alike to the last digit."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

import hwaware
from hwaware.bench import instances
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs import PreparedCosts, evaluate
from hwaware.placement import kinds
from hwaware.placement.kinds import kinds_bound_s, likened
from hwaware.placement.problem import Problem
from hwaware.workload import Layer, Workload

SIZES = (1e8, 1e9, 1e10, 1e11, 1e12)


def cluster(hosts, per_host, kinds, noise, rng):
    """Hosts of several kinds with fast links inside; everything is off by up to `noise`."""

    def about(value):
        return value * rng.uniform(1 - noise, 1 + noise)

    def device(host, k):
        rate = about(1e13 / (1 + 0.6 * (host % kinds)))
        curve = tuple(MatrixProduct(flops=size, seconds=(size + 1e9) / rate) for size in SIZES)
        return Device(
            id=f"h{host}:{k}", host=f"h{host}", kind=f"gpu{host % kinds}", memory_bytes=16 << 30,
            memory_bandwidth_bytes_per_s=about(9e11), throughput={"float32": curve},
        )  # fmt: skip

    devices = tuple(device(host, k) for host in range(hosts) for k in range(per_host))
    links = tuple(
        Link(
            source=a.id,
            target=b.id,
            latency_s=1e-5,
            bandwidth_bytes_per_s=about(1e11 if a.host == b.host else 3e9),
        )
        for a in devices
        for b in devices
        if a is not b
    )
    return ClusterProfile(hosts=tuple(Host(name=f"h{h}") for h in range(hosts)), devices=devices, links=links)


def model(layers, rng):
    made = tuple(
        Layer(
            name=str(k), forward_flops=rng.uniform(0.5, 2) * 1e9, backward_flops=rng.uniform(1, 4) * 1e9,
            parameter_bytes=rng.uniform(0, 1e8), output_bytes=rng.uniform(0, 2e8), activation_bytes=rng.uniform(0, 1e8),
            tensor_parallel_bytes=rng.uniform(0, 1e8),
        )
        for k in range(layers)
    )  # fmt: skip
    return Workload(name="random", microbatch_size=16, dtype="float32", layers=made)


@pytest.mark.parametrize(("hosts", "per_host", "number_of_kinds"), [(2, 8, 1), (4, 4, 2)])
def test_a_per_cent_of_noise_takes_nothing_from_a_plan(hosts, per_host, number_of_kinds):
    """Without likening, plans of these clusters took 1.2 to 1.45 times as long."""
    workload = model(24, random.Random(5))
    exactly, measured = (cluster(hosts, per_host, number_of_kinds, noise, random.Random(3)) for noise in (0.0, 0.01))
    known = hwaware.plan(workload, exactly, num_microbatches=16)
    there = evaluate(known, workload, measured).step_s
    found = hwaware.plan(workload, measured, num_microbatches=16)
    assert found.objective_s <= there * 1.005
    # The known plan is one of those that the bound is about.
    assert found.bound_s <= there
    # It is not far off either: without kinds it is a third to three quarters of this.
    assert found.bound_s >= 0.7 * there


@pytest.mark.parametrize("seed", range(30))
def test_the_bound_of_kinds_is_below_every_plan(seed):
    rng = random.Random(seed)
    one = instances.replicated_stages(rng)
    devices = tuple(
        msgspec.structs.replace(
            device,
            memory_bandwidth_bytes_per_s=rng.choice([None, rng.uniform(1, 4) * 1e10]),
            throughput={
                dtype: tuple(
                    msgspec.structs.replace(point, seconds=point.seconds * rng.uniform(0.8, 1.2)) for point in points
                )
                for dtype, points in device.throughput.items()
            },
        )
        for device in one.profile.devices
    )
    one = one._replace(profile=msgspec.structs.replace(one.profile, devices=devices))
    best = instances.brute_force(one, instances.arrangements(one, "alpa"))
    problem = Problem(PreparedCosts(one.workload, one.profile), one.num_microbatches)
    bound = kinds_bound_s(problem, math.inf, 60.0)
    assert bound is not None
    assert bound <= best * (1 + 1e-12)


def test_the_bound_of_kinds_is_met_where_kinds_are_alike():
    """One device a host, links all alike: the better cluster is the cluster."""
    rng = random.Random(1)
    profile, workload = cluster(4, 1, 2, 0.0, rng), model(8, rng)
    links = tuple(msgspec.structs.replace(link, bandwidth_bytes_per_s=2e9) for link in profile.links)
    profile = msgspec.structs.replace(profile, links=links)
    found = hwaware.plan(workload, profile, num_microbatches=8)
    bound = kinds_bound_s(Problem(PreparedCosts(workload, profile), 8), math.inf, 60.0)
    assert found.status == "optimal"
    assert bound == pytest.approx(found.objective_s, rel=1e-9)


@pytest.mark.parametrize("limit", ["MAX_DEVICES", "MAX_STATES", "MAX_PAIRS"])
def test_more_than_allowed_is_not_searched(limit, monkeypatch):
    rng = random.Random(1)
    problem = Problem(PreparedCosts(model(8, rng), cluster(4, 4, 2, 0.01, rng)), 8)
    assert kinds_bound_s(problem, math.inf, 60.0) is not None
    monkeypatch.setattr(kinds, limit, 8)
    assert kinds_bound_s(problem, math.inf, 60.0) is None


def test_only_what_is_almost_alike_is_made_alike():
    rng = random.Random(2)
    profile, workload = cluster(2, 4, 1, 0.01, rng), model(6, rng)
    slow = msgspec.structs.replace(
        profile.devices[5],
        memory_bytes=1 << 30,
        throughput={"float32": tuple(MatrixProduct(flops=size, seconds=size / 5e12) for size in SIZES)},
    )
    profile = msgspec.structs.replace(profile, devices=(*profile.devices[:5], slow, *profile.devices[6:]))
    alike = likened(Problem(PreparedCosts(workload, profile), 8))
    devices = {device.id: device for device in alike.costs.profile.devices}
    assert devices["h1:1"] == slow
    others = {(d.throughput["float32"], d.memory_bytes) for name, d in devices.items() if name != "h1:1"}
    assert len(others) == 1
    assert others <= {(d.throughput["float32"], d.memory_bytes) for d in profile.devices}
    assert len({link.bandwidth_bytes_per_s for link in alike.costs.profile.links}) == 2  # inside hosts, between them
    assert [(link.source, link.target) for link in alike.costs.profile.links] == [
        (link.source, link.target) for link in profile.links
    ]
    assert likened(Problem(PreparedCosts(workload, cluster(2, 4, 1, 0.0, rng)), 8)) is None  # nothing to make alike
