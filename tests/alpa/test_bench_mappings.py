"""The mappings of a benchmark: Alpa's own in every order of the hosts, each different mapping once, the same shapes."""

import builders
import pytest

pytestmark = pytest.mark.alpa

HOSTS = "abcd"


@pytest.fixture(autouse=True)
def _alpa():
    from hwaware.patching import stock_jax

    stock_jax.install()


def cluster(seconds, devices=1, latency_s=1e-4, bandwidth_bytes_per_s=1e8):
    """Build hosts whose devices take these times for a GFLOP; `devices` is a number for all or one a host."""
    names = HOSTS[: len(seconds)]
    counts = [devices] * len(names) if isinstance(devices, int) else devices
    made = [
        builders.device(f"{name}:{k}", each) for name, each, count in zip(names, seconds, counts) for k in range(count)
    ]
    return builders.cluster(made, between=(bandwidth_bytes_per_s, latency_s))


def workload(layers=4, output_bytes=1e5, parameter_bytes=1e6):
    of_layers = {"parameter_bytes": parameter_bytes, "output_bytes": output_bytes, "activation_bytes": 1e5}
    return builders.workload(layers, 4, "mlp", **of_layers)


@pytest.mark.thorough
def test_every_order_of_unlike_hosts_is_a_mapping_of_its_own():
    from hwaware.bench.alpa_mapping import every_order

    found = every_order(workload(), cluster([0.1, 0.2, 0.3, 0.4]), 8, most_devices=1)
    assert len(found) == 24
    assert [one.predicted_step_s for one in found] == sorted(one.predicted_step_s for one in found)
    first = next(one for one in found if one.hosts == tuple("abcd"))
    assert [stage.devices for stage in first.plan.stages] == [("d:0",), ("c:0",), ("b:0",), ("a:0",)]


def test_with_cheap_gradients_alpa_takes_all_hosts_as_one_stage_in_any_order():
    from hwaware.bench.alpa_mapping import every_order

    found = every_order(workload(), cluster([0.1, 0.2, 0.3, 0.4], bandwidth_bytes_per_s=1e12), 8, most_devices=None)
    assert len(found) == 1
    (stage,) = found[0].plan.stages
    assert sorted(replica.devices for replica in stage.replicas) == [(f"{host}:0",) for host in HOSTS]


def test_shapes_are_those_that_alpa_offers_and_that_divide_the_samples():
    from hwaware.bench.alpa_mapping import submesh_shapes

    four, two_each = cluster([0.1] * 4), cluster([0.1] * 2, devices=2)
    assert submesh_shapes(four, 4) == ((1, 1), (2, 1), (4, 1))
    assert submesh_shapes(four, 2) == ((1, 1), (2, 1))
    assert submesh_shapes(four, 4, most_devices=1) == ((1, 1),)
    assert submesh_shapes(two_each, 4) == ((1, 1), (1, 2), (2, 2))
    # Alpa refuses unequal hosts.
    assert submesh_shapes(cluster([0.1] * 3, devices=[2, 1, 1]), 4) == ((1, 1),)


def test_hosts_of_two_devices_are_cut_as_alpa_cuts_them():
    from hwaware.bench.alpa_mapping import alpa_plan

    plan = alpa_plan(workload(), cluster([0.1, 0.1], devices=2), 8, ("a", "b"), most_devices=1)
    assert [stage.devices for stage in plan.stages] == [("b:1",), ("b:0",), ("a:1",), ("a:0",)]


def test_mappings_that_are_alike_are_measured_once():
    from hwaware.bench.mappings import Wanted, candidates

    names = ("hwaware", "alpa", "even", "proportional")
    found = candidates(workload(), cluster([0.1, 0.1]), 8, Wanted(names, orders=24, max_devices_per_stage=1))
    assert len(found.chosen) == 2
    first, second = found.chosen
    assert first.name == "hwaware"
    assert {"even", "proportional"} <= {first.name, *first.also, second.name, *second.also}
    assert {order.measured_as for order in found.orders} == {"alpa-1", "alpa-2"}
    assert found.bound_s == pytest.approx(first.predicted_step_s)


def test_some_of_the_orders_evenly_over_their_ranking():
    from hwaware.bench.mappings import Wanted, candidates

    found = candidates(
        workload(), cluster([0.1, 0.2, 0.3, 0.4]), 8, Wanted(("hwaware", "alpa"), orders=3, max_devices_per_stage=1)
    )
    assert [one.name for one in found.chosen] == ["hwaware", "alpa-1", "alpa-13", "alpa-24"]
    named = {order.measured_as: order.hosts for order in found.orders if order.measured_as}
    assert named == {one.name: one.hosts for one in found.chosen[1:]}
    assert len(found.orders) == 24


def test_on_unequal_hosts_neither_search_has_larger_stages():
    from hwaware.bench.mappings import Wanted, candidates

    cheap = cluster([0.1] * 3, devices=[2, 1, 1], bandwidth_bytes_per_s=1e12)
    found = candidates(workload(), cheap, 1, Wanted(("hwaware", "alpa"), orders=1))
    assert {len(stage.devices) for one in found.chosen for stage in one.plan.stages} == {1}


def test_too_few_layers_leave_alpa_without_a_mapping():
    from hwaware.bench.mappings import Wanted, candidates

    found = candidates(workload(2), cluster([0.1] * 3), 8, Wanted(("hwaware", "alpa"), 1, max_devices_per_stage=1))
    assert [one.name for one in found.chosen] == ["hwaware"]
    assert [(one.name, one.out_of_memory) for one in found.unmeasured] == [("alpa", False)]
    assert "finds no mapping of 2 layers onto all 3 devices" in found.unmeasured[0].reason


def test_a_model_that_fits_nowhere_is_out_of_memory():
    from hwaware.bench.mappings import Wanted, candidates

    found = candidates(workload(parameter_bytes=1e13), cluster([0.1] * 2), 8, Wanted(("hwaware", "even"), 1))
    assert [(one.name, one.out_of_memory) for one in found.unmeasured] == [("hwaware", True)]
    # What people would do by hand is tried all the same: the cluster says whether it fits.
    assert [one.name for one in found.chosen] == ["even"]


def test_submeshes_get_the_devices_that_alpa_gives_them():
    from alpa.device_mesh import VirtualPhysicalMesh
    from alpa.pipeline_parallel.stage_construction import get_sliced_virtual_submeshes

    from hwaware.costs import PreparedCosts
    from hwaware.placement.alpa_mapping import placed
    from hwaware.placement.problem import Problem

    problem = Problem(PreparedCosts(workload(), cluster([0.1] * 4, devices=2)), 8)
    mesh = VirtualPhysicalMesh(list(range(4)), [{"NodeManagerAddress": HOSTS[k]} for k in range(4)], 2)
    for shapes in ([(1, 1), (1, 2), (2, 2), (1, 1)], [(1, 2)] * 4, [(2, 2), (2, 2)], [(1, 1)] * 4 + [(1, 2)] * 2):
        stages = placed([((k, k), shape) for k, shape in enumerate(shapes)], problem).stages
        alpas = [
            tuple(f"{host['NodeManagerAddress']}:{k}" for host, own in zip(sub.host_info, sub.devices) for k in own)
            for sub in get_sliced_virtual_submeshes(mesh, list(shapes))
        ]
        assert [stage.devices for stage in stages] == alpas


def test_programs_compare_with_the_mapping_that_benchmarks_measure():
    from hwaware.bench.alpa_mapping import alpa_plan
    from hwaware.placement.alpa_mapping import alpas_plan

    for bandwidth in (1e6, 1e12):
        profile = cluster([0.1, 0.2, 0.3, 0.4], bandwidth_bytes_per_s=bandwidth)
        measured = alpa_plan(workload(), profile, 8, tuple(HOSTS), most_devices=None)
        compared = alpas_plan(workload(), profile, 8)
        assert [(one.layers, one.devices) for one in compared.stages] == [
            (one.layers, one.devices) for one in measured.stages
        ]
        assert len(compared.stages) == (4 if bandwidth == 1e6 else 1)
