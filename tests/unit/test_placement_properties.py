"""What holds of the exact search on any instance: one source of prices, never worse than a baseline, fast links."""

from __future__ import annotations

import random
import time

import instances
import pytest
from builders import cluster, examples, timed, with_devices, with_layers, workload
from hypothesis import given
from hypothesis import strategies as st

import hwaware
from hwaware.costs import PreparedCosts, evaluate
from hwaware.placement import Problem, exact
from hwaware.placement import search as placement_search
from hwaware.placement.search import search
from hwaware.placement.ways import prepare

BASELINES = ("alpa", "megatron", "even", "proportional")


def instance(seed, replicas):
    rng = random.Random(seed)
    return instances.replicated_stages(rng, 8, 6) if replicas else instances.single_device_stages(rng, 10, 6)


def timed_unsteadily(one, rng):
    """Give each layer times on every kind that vary from pass to pass."""

    def measured(_):
        times = {}
        for kind in sorted({device.kind for device in one.profile.devices}):
            forward, backward = rng.uniform(0.1, 1.0), rng.uniform(0.1, 1.0)
            times.update(timed(forward, backward, kind, deviation_s=rng.choice([0.0, rng.uniform(0.0, 0.5)])))
        return times

    return one._replace(workload=with_layers(one.workload, measured=measured))


@examples(60)
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


@examples(80)
@given(
    seed=st.integers(0, 10**6), replicas=st.booleans(), schedule=st.sampled_from(["1f1b", "gpipe", "inference"]),
    objective=st.sampled_from(["step", "alpa", "per-device"]), pass_s=st.sampled_from([None, 0.01, 1.0]),
    unsteady=st.booleans(), head_start_s=st.sampled_from([None, 0.05, 0.5]), state=st.booleans(),
)  # fmt: skip
def test_the_search_and_evaluate_put_the_same_price_on_a_plan(
    seed, replicas, schedule, objective, pass_s, unsteady, head_start_s, state
):
    one = instance(seed, replicas)
    if state:
        one = instances.with_state(one, random.Random(seed))
    if unsteady:
        one = timed_unsteadily(one, random.Random(seed))
    one = one._replace(profile=with_devices(one.profile, pass_s=pass_s, head_start_s=head_start_s))
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


def rows_of_hosts(inside, between, hosts=4):
    """Build hosts of two like devices, and layers that tensor parallelism divides."""
    profile = cluster(
        {f"h{k}": 2 for k in range(hosts)}, inside=(inside, 1e-4), between=(between, 1e-4), seconds=0.05,
        memory_bytes=1 << 34,
    )  # fmt: skip
    of_layers = {"output_bytes": 1e4, "activation_bytes": 1e4, "tensor_parallel_bytes": 1e5}
    return workload(3, parameter_bytes=1e6, **of_layers), profile


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
    rows = rows_of_hosts(1e9, 1e9, hosts=12)
    # Told apart, twelve hosts would be too many to prove anything.
    assert hwaware.plan(*rows, num_microbatches=16, time_limit_s=200).status == "optimal"


def test_a_search_out_of_time_beats_or_equals_every_baseline(monkeypatch):
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
