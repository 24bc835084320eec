"""Alpa's own mapping is kept where hwaware's is not faster, and one line gives the predicted times of both."""

import logging
import math

import pytest
from builders import cluster, device, script, workload

import hwaware
from hwaware.errors import InfeasibleError
from hwaware.patching.choosing import _better, best_plan
from hwaware.patching.stage_option import PlacementSettings
from hwaware.records import rebuilt
from hwaware.workload import MeasuredTime, Workload


class Mesh:
    """What the choice reads of Alpa's mesh."""

    def __init__(self, *addresses):
        self.num_hosts = len(addresses)
        self.host_info = [{"NodeManagerAddress": address} for address in addresses]


def hosts(**seconds):
    """Build hosts of one device each, with its time for 1 GFLOP."""
    devices = [device(f"{name}:0", each, memory_bytes=1 << 30) for name, each in seconds.items()]
    return cluster(devices, between=(1e9, 1e-5), addresses={name: name for name in seconds})


def even(layers=4, parameter_bytes=1e5, activation_bytes=1e5):
    return workload(layers, parameter_bytes=parameter_bytes, output_bytes=1e5, activation_bytes=activation_bytes)


@pytest.fixture
def choose(caplog):
    """(plan, the line that was said) for settings and the order in which Alpa lists the hosts."""
    caplog.set_level(logging.INFO, logger="hwaware")

    def choose(profile, *addresses, layers=4, schedule="1f1b", **settings):
        arguments = {"num_micro_batches": 8, "pipeline_schedule": schedule, "virtual_mesh": Mesh(*addresses)}
        caplog.clear()
        plan = best_plan(PlacementSettings(profile, **settings), profile, even(layers), arguments)
        (line,) = caplog.messages
        return plan, line

    return choose


def test_equal_devices_keep_alpas_mapping(choose):
    plan, line = choose(hosts(a=1.0, b=1.0), "a", "b")
    assert (plan.solver, plan.status) == ("alpa", "optimal")
    assert [stage.devices for stage in plan.stages] == [("b:0",), ("a:0",)]  # Alpa's reverse order
    assert "with Alpa's: Alpa's own mapping is kept. " in line
    assert line.endswith("Alpa's: layers 0-1 on b:0, 2-3 on a:0.")


def test_alpas_mapping_follows_the_order_in_which_alpa_lists_hosts(choose):
    plan, _ = choose(hosts(a=1.0, b=1.0), "b", "a")
    assert [stage.devices for stage in plan.stages] == [("a:0",), ("b:0",)]


def test_alpas_mapping_may_be_faster_than_the_bound_of_the_searched_ones():
    """It may have stages that the search leaves out."""
    model, profile = workload(2), cluster("ab")
    alpas = hwaware.plan(model, profile, num_microbatches=2, solver="alpa")
    times = dict.fromkeys(("objective_s", "bound_s", "predicted_step_s"), 1.004 * alpas.objective_s)
    found = rebuilt(alpas, solver="exact", status="optimal", **times)
    kept = _better(found, alpas, None, model, profile)
    assert (kept.stages, kept.status, kept.bound_s) == (alpas.stages, "feasible", None)
    as_fast = rebuilt(found, bound_s=alpas.objective_s)
    assert _better(as_fast, alpas, None, model, profile).bound_s == alpas.objective_s


def test_a_gain_below_the_error_of_predictions_keeps_alpas(choose):
    profile = hosts(a=1.0, b=1.0)
    best = hwaware.plan(even(13), profile, num_microbatches=8, target="alpa")
    plan, line = choose(profile, "a", "b", layers=13)
    assert 0.98 * plan.predicted_step_s < best.predicted_step_s < plan.predicted_step_s
    assert (plan.solver, plan.status) == ("alpa", "feasible")  # no longer "optimal": a better one is known
    assert plan.bound_s == pytest.approx(best.predicted_step_s)
    assert "is kept" in line


def test_a_gain_beyond_the_errors_of_differences_is_taken_and_a_smaller_one_is_not(choose):
    """Layers that nobody measured: 90 % of differences between two predictions are off by less than exp(0.159)."""
    for seconds, taken in ((1.1, False), (1.8, True)):
        profile = hosts(a=1.0, b=seconds)
        ours = hwaware.plan(even(12), profile, num_microbatches=8, target="alpa").predicted_step_s
        alpas = hwaware.plan(even(12), profile, num_microbatches=8, solver="alpa").predicted_step_s
        assert (alpas / ours > math.exp(0.159)) == taken
        plan, line = choose(profile, "a", "b", layers=12)
        assert (plan.solver == "exact") == taken
        assert line.count(" s (90 % of steps take ") == 2


def test_unequal_devices_get_a_faster_one(choose):
    plan, line = choose(hosts(a=1.0, b=3.0), "a", "b")
    assert plan.solver == "exact"
    ours, alpas = (float(part.split(" s (90 %")[0].split()[-1]) for part in line.split(". ")[0].split(", "))
    programs = script("programs")
    predicted, other = programs._PREDICTED.search(line), programs._ALPAS.search(line)
    assert (float(predicted.group(1)), float(other.group(1))) == (ours, alpas)
    # The line gives the likely step: half of recorded steps took more than exp(0.207) of their prediction.
    assert ours == pytest.approx(plan.predicted_step_s * math.exp(0.207), rel=1e-3)
    assert ours < alpas
    assert "kept" not in line


@pytest.mark.parametrize("schedule", ["1f1b_overlap_friendly", "gpipe", "inference"])
def test_every_schedule_of_alpa(choose, schedule):
    plan, _ = choose(hosts(a=1.0, b=1.0), "a", "b", schedule=schedule)
    assert plan.schedule == schedule.replace("_overlap_friendly", "")


def test_what_is_excluded_is_not_used_by_alpas_mapping_either(choose):
    plan, line = choose(hosts(a=1.0, b=1.0), "a", "b", exclude=("b",))
    assert ": hwaware's mapping is used, because exclude asks for it. " in line
    assert {device for stage in plan.stages for device in stage.devices} == {"a:0"}


@pytest.mark.parametrize("solver", ["exact", "even"])
def test_what_is_excluded_may_be_lost(solver):
    """A host is down at the start, or lost in the training: no search may stop at its name."""
    whole, left = hosts(a=1.0, b=1.0, c=1.0), hosts(a=1.0, b=1.0)
    settings = PlacementSettings(whole, exclude=("b", "c:0"), solver=solver)
    arguments = {"num_micro_batches": 8, "pipeline_schedule": "1f1b", "virtual_mesh": Mesh("a", "b")}
    plan = best_plan(settings, left, even(), arguments)
    assert {device for stage in plan.stages for device in stage.devices} == {"a:0"}


def test_programs_choose_by_the_likely_step():
    """Two devices have the lower price, and one of these always waits for the other."""

    def times(seconds):
        return {"1,1": MeasuredTime(forward_s=seconds, backward_s=seconds, deviation_s=0.1)}

    layers = Workload.uniform(layers=2, measured={"fast": times(0.05), "slow": times(0.095)})
    devices = [device("a:0", 1.0, kind="fast"), device("b:0", 2.0, kind="slow")]
    profile = cluster(devices, between=(1e9, 1e-5), addresses={name: name for name in "ab"})
    arguments = {"num_micro_batches": 8, "pipeline_schedule": "1f1b", "virtual_mesh": Mesh("a", "b")}
    assert len(hwaware.plan(layers, profile, num_microbatches=8).stages) == 2
    found = best_plan(PlacementSettings(profile), profile, layers, arguments)
    assert [stage.devices for stage in found.stages] == [("a:0",)]


def test_a_mapping_that_was_asked_for_is_what_one_gets(choose):
    plan, line = choose(hosts(a=1.0, b=3.0), "a", "b", solver="even")
    assert (plan.solver, [stage.layers for stage in plan.stages]) == ("even", [(0, 1), (2, 3)])
    assert ": the mapping of solver='even' is used, because solver='even' asks for it. " in line


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_solver_alpa_gives_alpas_own_mapping_in_either_order_of_hosts(choose, order):
    profile = hosts(a=1.0, b=3.0)
    plan, line = choose(profile, *order, solver="alpa")
    assert [stage.devices for stage in plan.stages] == [(f"{host}:0",) for host in reversed(order)]
    ours, theirs = line.split(". solver='alpa': ")[1].split("; Alpa's: ")
    assert theirs == f"{ours}."


@pytest.mark.parametrize("order", ["abc", "cba"])
def test_the_solver_alpa_places_on_what_is_not_excluded_as_alpa_does(choose, order):
    plan, line = choose(hosts(a=1.0, b=1.0, c=1.0), *order, solver="alpa", exclude=("b",))
    assert [stage.devices for stage in plan.stages] == [(f"{host}:0",) for host in reversed(order) if host != "b"]
    assert "solver='alpa' asks for it" in line


def test_the_solver_alpa_counts_gradient_sums_as_the_comparison_does(choose):
    """Two devices as replicas of one stage look best to Alpa's formula alone, and are slow by these links."""
    devices = [device(f"{name}:0", 1.0, memory_bytes=1 << 30) for name in "ab"]
    profile = cluster(devices, between=(1e5, 1e-5), addresses={name: name for name in "ab"})
    plan, line = choose(profile, "a", "b", solver="alpa", layers=3)
    _, usual = choose(profile, "a", "b", layers=3)
    assert line.split("; Alpa's: ")[1] == usual.split("; Alpa's: ")[1]
    assert all(len(stage.devices) == 1 for stage in plan.stages)


def test_alpa_finds_none(choose):
    plan, line = choose(hosts(a=1.0, b=1.0, c=1.0), "a", "b", "c", layers=2)
    assert len(plan.stages) <= 2
    assert line.endswith("Alpa finds none that fits.")


@pytest.mark.parametrize(
    ("size", "fix"),
    [("activation_bytes", "use smaller microbatches .*num_micro_batches"), ("parameter_bytes", "use more")],
)
def test_a_model_that_fits_nowhere(size, fix):
    arguments = {"num_micro_batches": 8, "pipeline_schedule": "1f1b", "virtual_mesh": Mesh("a")}
    profile = hosts(a=1.0)
    with pytest.raises(InfeasibleError, match=f"^The model fits on no placement: Memory: .* To fix: {fix}") as caught:
        best_plan(PlacementSettings(profile), profile, even(**{size: 1e12}), arguments)
    assert str(caught.value).count("To fix:") == 1
    assert "hwaware trace" not in str(caught.value)
