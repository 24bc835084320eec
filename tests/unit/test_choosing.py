"""Alpa's own mapping is kept where hwaware's is not faster, and one line gives the predicted times of both."""

import logging

import pytest

import hwaware
from hwaware.cluster import ClusterProfile, Device, Host, Link, MatrixProduct
from hwaware.errors import InfeasibleError
from hwaware.patching.choosing import best_plan
from hwaware.patching.stage_option import PlacementSettings
from hwaware.workload import Layer, Workload


class Mesh:
    """What the choice reads of Alpa's mesh."""

    def __init__(self, *addresses):
        self.num_hosts = len(addresses)
        self.host_info = [{"NodeManagerAddress": address} for address in addresses]


def cluster(**seconds):
    curve = {name: {"float32": (MatrixProduct(flops=1e9, seconds=s),)} for name, s in seconds.items()}
    names = list(seconds)
    return ClusterProfile(
        hosts=tuple(Host(name=name, address=name) for name in names),
        devices=tuple(
            Device(id=f"{name}:0", host=name, kind="cpu", memory_bytes=1 << 30, throughput=curve[name])
            for name in names
        ),
        links=tuple(
            Link(source=a, target=b, latency_s=1e-5, bandwidth_bytes_per_s=1e9) for a in names for b in names if a != b
        ),
    )


def workload(layers=4, parameter_bytes=1e5):
    layer = Layer(
        name="", forward_flops=1e9, backward_flops=2e9, parameter_bytes=parameter_bytes, output_bytes=1e5,
        activation_bytes=1e5,
    )  # fmt: skip
    return Workload(name="even", microbatch_size=1, dtype="float32", layers=(layer,) * layers)


@pytest.fixture
def choose(caplog):
    """(plan, the line that was said) for settings and the order in which Alpa lists the hosts."""
    caplog.set_level(logging.INFO, logger="hwaware")

    def choose(profile, *addresses, layers=4, schedule="1f1b", **settings):
        arguments = {"num_micro_batches": 8, "pipeline_schedule": schedule, "virtual_mesh": Mesh(*addresses)}
        caplog.clear()
        plan = best_plan(PlacementSettings(profile, **settings), profile, workload(layers), arguments)
        (line,) = caplog.messages
        return plan, line

    return choose


def test_equal_devices_keep_alpas_mapping(choose):
    plan, line = choose(cluster(a=1.0, b=1.0), "a", "b")
    assert (plan.solver, plan.status) == ("alpa", "optimal")
    assert [stage.devices for stage in plan.stages] == [("b:0",), ("a:0",)]  # Alpa's reverse order
    assert "with Alpa's (predicted): Alpa's own mapping is kept. " in line
    assert line.endswith("Alpa's: layers 0-1 on b:0, 2-3 on a:0.")


def test_it_is_alpas_mapping_of_the_order_in_which_alpa_lists_the_hosts(choose):
    plan, _ = choose(cluster(a=1.0, b=1.0), "b", "a")
    assert [stage.devices for stage in plan.stages] == [("a:0",), ("b:0",)]


def test_a_gain_that_predictions_cannot_promise_keeps_alpas_mapping(choose):
    profile = cluster(a=1.0, b=1.0)
    best = hwaware.plan(workload(13), profile, num_microbatches=8, target="alpa")
    plan, line = choose(profile, "a", "b", layers=13)
    assert 0.98 * plan.predicted_step_s < best.predicted_step_s < plan.predicted_step_s
    assert (plan.solver, plan.status) == ("alpa", "feasible")  # no longer "optimal": a better one is known
    assert plan.bound_s == pytest.approx(best.predicted_step_s)
    assert "is kept" in line


def test_unequal_devices_get_a_faster_one(choose):
    plan, line = choose(cluster(a=1.0, b=3.0), "a", "b")
    assert plan.solver == "exact"
    ours, alpas = (float(part.split(" s with")[0].split()[-1]) for part in line.split(". ")[0].split(", "))
    assert ours == pytest.approx(plan.predicted_step_s, rel=1e-3)
    assert ours < alpas
    assert "kept" not in line


@pytest.mark.parametrize("schedule", ["1f1b_overlap_friendly", "gpipe", "inference"])
def test_every_schedule_of_alpa(choose, schedule):
    plan, _ = choose(cluster(a=1.0, b=1.0), "a", "b", schedule=schedule)
    assert plan.schedule == schedule.replace("_overlap_friendly", "")


def test_what_is_excluded_is_not_used_by_alpas_mapping_either(choose):
    plan, _ = choose(cluster(a=1.0, b=1.0), "a", "b", exclude=("b",))
    assert {device for stage in plan.stages for device in stage.devices} == {"a:0"}


def test_a_mapping_that_was_asked_for_is_what_one_gets(choose):
    plan, _ = choose(cluster(a=1.0, b=3.0), "a", "b", solver="even")
    assert (plan.solver, [stage.layers for stage in plan.stages]) == ("even", [(0, 1), (2, 3)])


def test_alpa_finds_none(choose):
    plan, line = choose(cluster(a=1.0, b=1.0, c=1.0), "a", "b", "c", layers=2)
    assert len(plan.stages) <= 2
    assert line.endswith("Alpa finds none that fits.")


def test_a_model_that_fits_nowhere():
    arguments = {"num_micro_batches": 8, "pipeline_schedule": "1f1b", "virtual_mesh": Mesh("a")}
    profile = cluster(a=1.0)
    with pytest.raises(InfeasibleError, match="To fix:"):
        best_plan(PlacementSettings(profile), profile, workload(parameter_bytes=1e12), arguments)
