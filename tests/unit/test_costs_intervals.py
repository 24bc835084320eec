"""Intervals of predicted steps: by hand, against all recorded steps, and where commands print them."""

import json
import math

import msgspec
import pytest
from builders import cluster, device, layer, plan, script, timed, workload
from click.testing import CliRunner

import hwaware
from hwaware.cli import main
from hwaware.costs import evaluate, step_interval, surely_better
from hwaware.costs.intervals import RECORDED
from hwaware.plans import Plan, Stage
from hwaware.records import rebuilt
from hwaware.report.page import save_page

TWO = cluster([device("a:0", 1.0), device("b:0", 1.5, kind="other")])


def alone(name="a:0"):
    return plan((0, 1, name))


def measured(*kinds, spread=None):
    times = {kind: timed(1.0, 2.0, kind, spread=spread)[kind] for kind in kinds}
    return workload([layer(measured=times), layer(measured=times)])


def test_measured_layer_times_make_the_interval_narrower():
    by_model, by_times = RECORDED["model"], RECORDED["measured"]
    found = step_interval(alone(), workload(2), TWO)
    step_s = evaluate(alone(), workload(2), TWO).step_s
    low, likely, high = (step_s * math.exp(one) for one in (by_model.low, by_model.middle, by_model.high))
    assert found == pytest.approx((low, step_s, likely, high, "model"))
    found = step_interval(alone(), measured("cpu"), TWO)
    assert found.high_s == pytest.approx(found.step_s * math.exp(by_times.high))
    assert found.source == "measured"


def test_one_kind_without_times_makes_all_of_the_plan_a_matter_of_the_model():
    model = measured("cpu")
    both = plan((0, 0, "a:0"), (1, 1, "b:0"))
    assert step_interval(both, model, TWO).source == "model"
    assert step_interval(alone("b:0"), model, TWO).source == "model"
    assert step_interval(both, measured("cpu", "other"), TWO).source == "measured"


def test_times_carried_over_from_another_kind_widen_it():
    widths = []
    for spread in (None, 0.05, 0.2):
        found = step_interval(alone(), measured("cpu", spread=spread), TWO)
        widths.append(math.log(found.high_s / found.step_s))
    high = RECORDED["measured"].high
    assert widths == pytest.approx([high, math.hypot(high, 1.645 * 0.05), math.hypot(high, 1.645 * 0.2)])


def test_a_plan_is_surely_better_beyond_the_difference_alone():
    needed = RECORDED["model"].difference
    for factor, sure in ((math.exp(needed) * 0.99, False), (math.exp(needed) * 1.01, True)):
        profile = cluster([device("a:0", 1.0), device("b:0", factor)])
        assert surely_better(alone(), alone("b:0"), workload(2), profile) == sure
        assert not surely_better(alone("b:0"), alone(), workload(2), profile)
    assert not surely_better(alone(), alone(), workload(2), TWO)


@pytest.fixture(scope="module")
def recorded():
    study = script("intervals")
    return study, {source: study.rows(source) for source in RECORDED}


@pytest.mark.parametrize("source", ["measured", "model"])
def test_intervals_hold_nine_in_ten_recorded_steps(recorded, source):
    study, rows = recorded
    assert len(rows[source]) > 300
    assert 0.85 <= study.coverage(rows[source], RECORDED[source]) <= 0.97
    # Also where the errors of a step's own scenario are left out.
    assert 0.85 <= study.left_out(rows[source])["all"] <= 0.97


@pytest.mark.parametrize("source", ["measured", "model"])
def test_the_errors_are_those_of_the_recorded_results(recorded, source):
    study, rows = recorded
    assert RECORDED[source] == pytest.approx(study.errors(rows[source]), abs=5e-4)


def test_every_solver_and_evaluate_give_the_same_interval(tmp_path):
    pytest.importorskip("matplotlib")
    model = workload(2, output_bytes=1e5, parameter_bytes=1e6, activation_bytes=1e6)
    for solver in ("exact", "even"):
        found = hwaware.plan(model, TWO, num_microbatches=4, solver=solver)
        interval = step_interval(found, model, TWO)
        assert found.step_interval_s == (interval.low_s, interval.high_s)
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").step_interval_s == found.step_interval_s
    save_page(found, tmp_path / "plan.html", "plan")
    assert "90 % of steps" in (tmp_path / "plan.html").read_text()
    model.save(tmp_path / "workload.json")
    TWO.save(tmp_path / "cluster.json")
    given = [str(tmp_path / f"{name}.json") for name in ("cluster", "workload", "plan")]
    priced = json.loads(CliRunner().invoke(main, ["evaluate", *given, "--json"]).stdout)
    assert tuple(priced["step_interval_s"]) == found.step_interval_s
    assert priced["layer_times"] == "model"
    # A plan by hand has no figures; the command writes them.
    by_hand = Plan(num_microbatches=4, stages=tuple(Stage(layers=x.layers, replicas=x.replicas) for x in found.stages))
    by_hand.save(tmp_path / "plan.json")
    assert CliRunner().invoke(main, ["evaluate", *given, "-o", str(tmp_path / "priced.json")]).exit_code == 0
    written = Plan.load(tmp_path / "priced.json")
    assert (written.stages, written.predicted_step_s) == (found.stages, found.predicted_step_s)
    assert written.step_interval_s == found.step_interval_s
    for arguments in (
        ["evaluate", *given],
        ["plan", *given[:2], "--microbatches", "4", "-o", str(tmp_path / "p.json")],
    ):
        told = CliRunner().invoke(main, arguments).stdout
        assert "90 % of steps: " in " ".join(told.split())


def test_intervals_of_plans_are_checked():
    with pytest.raises(ValueError, match="step_interval_s is from 2"):
        rebuilt(alone(), step_interval_s=(2.0, 1.0))
    with pytest.raises(ValueError, match="step_interval_s"):
        rebuilt(alone(), step_interval_s=(math.nan, 1.0))


def test_the_drivers_time_makes_the_whole_range_later_but_not_the_prediction():
    found = step_interval(alone(), workload(2), TWO)
    slower = msgspec.structs.replace(TWO, driver_s=0.25)
    later = step_interval(alone(), workload(2), slower)
    assert later.step_s == found.step_s
    for name in ("low_s", "likely_s", "high_s"):
        assert getattr(later, name) == pytest.approx(getattr(found, name) + 0.25)
    with pytest.raises(ValueError, match="driver_s"):
        rebuilt(TWO, driver_s=-1.0)
