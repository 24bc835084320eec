"""What holds of the exact search on any instance: one source of prices, never worse than a baseline, fast links."""

from __future__ import annotations

import random
import time

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hwaware
from hwaware.bench import instances
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.costs import PreparedCosts, evaluate
from hwaware.placement import Problem, exact
from hwaware.placement import search as placement_search
from hwaware.placement.arrays import prepare
from hwaware.placement.search import search
from hwaware.workload import Layer, MeasuredTime, Workload

BASELINES = ("alpa", "megatron", "even", "proportional")


def instance(seed, replicas):
    rng = random.Random(seed)
    return instances.replicated_stages(rng, 8, 6) if replicas else instances.single_device_stages(rng, 10, 6)


def timed_unsteadily(workload, profile, rng):
    """The workload as if its layers had been timed on every kind, each varying from pass to pass."""
    layers = []
    for layer in workload.layers:
        measured = {}
        for kind in {device.kind for device in profile.devices}:
            forward, backward = rng.uniform(0.1, 1.0), rng.uniform(0.1, 1.0)
            deviation = rng.choice([0.0, rng.uniform(0.0, 0.5)])
            measured[kind] = {"1,1": MeasuredTime(forward_s=forward, backward_s=backward, deviation_s=deviation)}
        layers.append(msgspec.structs.replace(layer, measured=measured))
    return msgspec.structs.replace(workload, layers=tuple(layers))


@settings(max_examples=60, derandomize=True)
@given(
    seed=st.integers(0, 10**6), replicas=st.booleans(), target=st.sampled_from(["alpa", "any"]),
    objective=st.sampled_from(["step", "step", "alpa", "per-device"]),
)  # fmt: skip
def test_never_worse_than_any_baseline(seed, replicas, target, objective):
    one = instance(seed, replicas)
    choices = {"num_microbatches": one.num_microbatches, "target": target, "objective": objective}
    found = hwaware.plan(one.workload, one.profile, time_limit_s=1, **choices)
    for solver in BASELINES:
        other = hwaware.plan(one.workload, one.profile, solver=solver, **choices)
        if other.status != "infeasible":
            assert found.status != "infeasible"
            assert found.objective_s <= other.objective_s * (1 + 1e-9)
            assert found.bound_s <= other.objective_s * (1 + 1e-9)


@settings(max_examples=80, derandomize=True)
@given(
    seed=st.integers(0, 10**6), replicas=st.booleans(), schedule=st.sampled_from(["1f1b", "gpipe", "inference"]),
    objective=st.sampled_from(["step", "alpa", "per-device"]), pass_s=st.sampled_from([None, 0.01, 1.0]),
    unsteady=st.booleans(), head_start_s=st.sampled_from([None, 0.05, 0.5]),
)  # fmt: skip
def test_the_search_and_evaluate_put_the_same_price_on_a_plan(
    seed, replicas, schedule, objective, pass_s, unsteady, head_start_s
):
    one = instance(seed, replicas)
    if unsteady:
        one = one._replace(workload=timed_unsteadily(one.workload, one.profile, random.Random(seed)))
    devices = tuple(
        msgspec.structs.replace(device, pass_s=pass_s, head_start_s=head_start_s) for device in one.profile.devices
    )
    one = one._replace(profile=msgspec.structs.replace(one.profile, devices=devices))
    costs = PreparedCosts(one.workload, one.profile, schedule)
    arrays = prepare(Problem(costs, one.num_microbatches, objective, target="any"))
    found = search(arrays, time.monotonic() + 0.2)
    assert found is not None  # so small a search does not look at the clock before it has a plan
    if found.stages is None:
        return
    cost = evaluate(arrays.plan(found.stages), one.workload, one.profile, costs)
    assert cost.objective_s(objective) == pytest.approx(found.objective_s, rel=1e-9)
    assert cost.fits
    for stage, (first, last, k) in zip(cost.stages, found.stages):
        tables = arrays.tables
        assert tables.forward_s[k, first, last + 1] == pytest.approx(stage.forward_s, rel=1e-9)
        assert tables.backward_s[k, first, last + 1] == pytest.approx(stage.backward_s, rel=1e-9)
        once_s = stage.gradient_sync_s + stage.update_s
        assert tables.per_step_s[k, first, last + 1] == pytest.approx(once_s, rel=1e-9, abs=1e-15)


def rows_of_hosts(inside, between, hosts=4, samples=1):
    """Hosts of two like devices, with links inside and between them, and layers that tensor parallelism divides."""
    curve = {"float32": (MatrixProduct(flops=1e9, seconds=0.05),)}
    boxes = tuple(
        Device(id=f"h{h}:{d}", host=f"h{h}", kind="cpu", memory_bytes=1 << 34, throughput=curve)
        for h in range(hosts)
        for d in range(2)
    )
    links = [
        Link(source=f"h{a}", target=f"h{b}", latency_s=1e-4, bandwidth_bytes_per_s=inside if a == b else between)
        for a in range(hosts)
        for b in range(a, hosts)
    ]
    layers = tuple(
        Layer(
            name=str(k), forward_flops=1e9, backward_flops=2e9, parameter_bytes=1e6, output_bytes=1e4,
            activation_bytes=1e4, tensor_parallel_bytes=1e5,
        )
        for k in range(3)
    )  # fmt: skip
    profile = ClusterProfile(hosts=tuple(Host(name=f"h{h}") for h in range(hosts)), devices=boxes, links=tuple(links))
    return Workload(name="rows", microbatch_size=samples, dtype="float32", layers=layers), profile


@pytest.mark.parametrize(("inside", "between", "across"), [(2e6, 1e9, True), (1e9, 2e6, False)])
def test_tensor_parallel_groups_stand_where_the_links_are_fast(inside, between, across):
    found = hwaware.plan(*rows_of_hosts(inside, between), num_microbatches=4, time_limit_s=3, target="any")
    groups = [replica.devices for stage in found.stages for replica in stage.replicas if len(replica.devices) > 1]
    assert groups
    for group in groups:
        hosts = [name.split(":")[0] for name in group]
        ring = zip(hosts, [*hosts[1:], hosts[0]])
        assert all((one != other) == across for one, other in ring)


def test_hosts_that_cannot_be_told_apart_are_one_class():
    workload, profile = rows_of_hosts(1e9, 1e9, hosts=12)
    # Told apart, twelve hosts would be too many to prove anything.
    assert hwaware.plan(workload, profile, num_microbatches=16, time_limit_s=20).status == "optimal"


def test_a_search_that_cannot_end_in_time_leaves_a_plan_that_is_no_worse_than_todays(monkeypatch):
    """Twelve devices, no two alike: what comes before the search itself takes longer than the limit."""
    monkeypatch.setattr(exact, "WARM_STATES", 0)
    monkeypatch.setattr(placement_search, "SHORT_RELAXATION", 0)
    one = instance(11, False)
    arrays = prepare(Problem(PreparedCosts(one.workload, one.profile), one.num_microbatches))
    assert search(arrays, time.monotonic() - 1) is None
    found, *todays = (
        hwaware.plan(one.workload, one.profile, num_microbatches=one.num_microbatches, solver=solver, time_limit_s=1e-3)
        for solver in ("exact", "alpa", "even", "proportional", "megatron")
    )
    assert found.status == "feasible"
    assert found.bound_s <= found.objective_s
    for other in todays:
        assert other.status == "infeasible" or found.objective_s <= other.objective_s * (1 + 1e-9)
