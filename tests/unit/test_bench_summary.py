"""What a benchmark's figures say: speed-ups, outcomes in words, bounds, ranges over orders, means over results."""

from pathlib import Path

import msgspec
import pytest
from builders import plan

from hwaware.bench.demo import require_both
from hwaware.bench.statistics import Interval
from hwaware.bench.summary import NOT_SIGNIFICANT, outcome, overall, prediction_rank_correlation, summary
from hwaware.errors import MeasurementError
from hwaware.result import BenchmarkResult, HostOrder, Mapping, Unmeasured

PLAN = plan((0, 0, "a:0"), num_microbatches=2)
STEPS = (0.99, 1.0, 1.0, 1.0, 1.01, 1.0)


def mapping(name, factor, predicted=1.0, **more):
    """A mapping whose steps take `factor` times the reference kernel, on a machine that is twice as slow as before."""
    return Mapping(
        name=name,
        plan=PLAN,
        predicted_step_s=predicted,
        step_s=tuple(2 * factor * step for step in STEPS),
        reference_s=(2.0,) * len(STEPS),
        loss=(3.0, 2.0),
        **more,
    )


def result(*mappings, scenario="fast-and-slow", loss=(3.0, 2.0), **more):
    return BenchmarkResult(
        environment={"profile_reference_s": 1.0},
        scenario=scenario,
        model="mlp",
        num_microbatches=2,
        repeats=len(STEPS),
        mappings=mappings,
        single_device_loss=loss,
        **more,
    )


def test_speed_ups_are_over_the_median_order_of_alpa():
    found = summary(
        result(
            mapping("hwaware", 1.0),
            mapping("alpa-1", 1.5),
            mapping("alpa-12", 2.0),
            mapping("alpa-24", 4.0),
            alpa_orders=tuple(HostOrder(hosts=("a",), predicted_step_s=value) for value in (1.4, 1.9, 3.0)),
        )
    )
    assert found["median_alpa"] == "alpa-12"
    assert found["speed_ups"]["alpa"]["median"] == pytest.approx(2.0)
    assert found["speed_ups"]["alpa"]["outcome"] == "faster"
    orders = found["alpa_orders"]
    assert (orders["distinct"], orders["measured"]) == (3, 3)
    assert (orders["least_speed_up"], orders["largest_speed_up"]) == pytest.approx((1.5, 4.0))
    assert (orders["fastest_predicted_step_s"], orders["slowest_predicted_step_s"]) == (1.4, 3.0)


def test_a_mapping_under_several_names_is_found_under_each():
    found = summary(result(mapping("hwaware", 1.0, also=("alpa-3", "even")), mapping("proportional", 1.2)))
    assert found["median_alpa"] == "hwaware"
    assert found["speed_ups"]["even"]["outcome"] == "the same mapping"
    assert found["speed_ups"]["alpa"]["median"] == 1.0
    assert found["speed_ups"]["proportional"]["outcome"] == "faster"


def test_a_result_of_an_older_version_still_says_what_it_said():
    """Written by the first version, with none of the fields that came later."""
    older = BenchmarkResult.load(Path(__file__).parent / "data" / "result-2026-11-20.json")
    said = summary(older)
    assert (older.scenario, len(older.mappings), older.unmeasured, older.enumerated) == ("fast-and-slow", 4, (), ())
    assert BenchmarkResult.from_json(older.to_json()) == older
    assert said["speed_ups"]["alpa"]["outcome"] == "faster"


@pytest.mark.parametrize(
    ("steps", "starts", "word"), [(1, 1, NOT_SIGNIFICANT), (4, 1, NOT_SIGNIFICANT), (5, 1, "faster"), (1, 3, "faster")]
)
def test_a_few_steps_show_no_difference(steps, starts, word):
    """One step has an interval of no width, and its ratio is never exactly 1."""

    def measured(name, factor):
        times = [factor * (1 + 0.001 * k) for k in range(starts) for _ in range(steps)]
        numbers = [start + 1 for start in range(starts) for _ in range(steps)]
        return Mapping(
            name=name, plan=PLAN, predicted_step_s=1.0, step_s=tuple(times), loss=(3.0, 2.0),
            starts=tuple(numbers) if starts > 1 else (),
        )  # fmt: skip

    found = summary(result(measured("hwaware", 1.0), measured("even", 1.1)))
    assert found["speed_ups"]["even"]["outcome"] == word


def test_what_does_not_fit_is_an_outcome_and_no_number():
    out = Unmeasured(name="even", reason="Out of memory: ...", out_of_memory=True, also=("alpa-1",))
    odd = Unmeasured(name="proportional", reason="no link")
    found = summary(result(mapping("hwaware", 1.0), unmeasured=(out, odd)))
    assert found["speed_ups"] == {
        "even": {"outcome": "out of memory"},
        "proportional": {"outcome": "could not run"},
    }
    assert overall([found])["speed_ups"]["even"] is None


def test_hwaware_itself_may_be_what_could_not_be_measured():
    out = Unmeasured(name="hwaware", reason="Out of memory: ...", out_of_memory=True)
    found = summary(result(mapping("alpa-1", 1.0), mapping("even", 1.2), unmeasured=(out,)))
    word = {"outcome": "hwaware out of memory"}
    assert found["speed_ups"] == {"alpa": word, "even": word}
    assert "step_ratio" not in found
    total = overall([found, summary(result(mapping("hwaware", 1.0), mapping("alpa-1", 1.5)))])["speed_ups"]["alpa"]
    assert (total["results"], total["outcomes"]) == (1, {"faster": 1, "hwaware out of memory": 1})


@pytest.mark.parametrize("name", ["hwaware", "alpa-given"])
def test_the_demo_says_why_there_is_nothing_to_compare(name):
    out = Unmeasured(name="other", reason="its worker was killed.")
    require_both(result(mapping("hwaware", 1.0), mapping("alpa-given", 1.0)))
    with pytest.raises(MeasurementError, match=r"other: its worker was killed.*To fix: "):
        require_both(result(mapping(name, 1.0), unmeasured=(out,)))


def test_groups_are_compared_over_the_rounds_that_they_share():
    """Groups take turns, hwaware in each; in the second one all are a tenth slower beyond the reference."""

    def measured(name, groups, starts):
        rounds = [(group, start, k) for group in groups for start in range(1, starts + 1) for k in range(4)]
        return Mapping(
            name=name, plan=PLAN, predicted_step_s=1.0, loss=(3.0, 2.0),
            step_s=tuple((1.1 if group == 2 else 1.0) * (1 + 0.01 * k) for group, _, k in rounds),
            reference_s=tuple(1 + 1e-9 * (100 * group + 10 * start + k) for group, start, k in rounds),
            starts=tuple(start for _, start, _ in rounds) if starts > 1 else (),
        )  # fmt: skip

    for starts in (1, 2):
        ours, first = measured("hwaware", (1, 2), starts), measured("even", (1,), starts)
        other = measured("proportional", (2,), starts)
        found = summary(result(ours, first, other))["speed_ups"]
        assert found["even"]["median"] == pytest.approx(1.0, abs=1e-6)
        assert found["proportional"]["median"] == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize(("links", "cpu", "counts"), [(True, True, True), (True, False, True), (False, False, False)])
def test_a_testbed_that_shapes_nothing_is_not_heterogeneous(links, cpu, counts):
    one = result(mapping("hwaware", 1.0), mapping("alpa-1", 1.5))
    about = {**one.environment, "testbed": {"kind": "loopback", "shaped": {"links": links, "cpu": cpu}}}
    assert summary(msgspec.structs.replace(one, environment=about))["heterogeneous"] == counts


@pytest.mark.parametrize(
    ("interval", "same", "agree", "word"),
    [
        (Interval(1.5, 1.2, 1.8), False, True, "faster"),
        (Interval(0.7, 0.5, 0.9), False, True, "slower"),
        (Interval(1.1, 0.9, 1.3), False, True, NOT_SIGNIFICANT),
        (Interval(1.5, 1.2, 1.8), False, False, "losses differ"),
        (Interval(1.0, 0.9, 1.1), True, True, "the same mapping"),
    ],
)
def test_outcomes(interval, same, agree, word):
    assert outcome(interval, same, agree) == word


def test_losses_that_differ_take_a_result_out_of_the_means():
    good = summary(result(mapping("hwaware", 1.0), mapping("even", 2.0)))
    bad = summary(result(mapping("hwaware", 1.0), mapping("even", 8.0), loss=(3.0, 2.1)))
    assert not bad["losses_agree"]
    found = overall([good, bad])
    assert found["speed_ups"]["even"]["geometric_mean"] == pytest.approx(2.0)
    assert found["speed_ups"]["even"]["outcomes"] == {"faster": 1, "losses differ": 1}
    assert not found["losses_agree"]


def test_equal_hosts_stay_out_of_the_heterogeneous_mean():
    listed = [
        summary(result(mapping("hwaware", 1.0), mapping("alpa-1", factor), scenario=scenario))
        for scenario, factor in (("two-racks", 2.0), ("directed", 4.5), ("four-equal", 1.0))
    ]
    found = overall(listed)
    assert found["speed_ups"]["alpa"]["geometric_mean"] == pytest.approx(3.0)
    assert (found["speed_ups"]["alpa"]["least"], found["speed_ups"]["alpa"]["largest"]) == pytest.approx((2.0, 4.5))
    assert found["homogeneous"]["alpa"]["geometric_mean"] == pytest.approx(1.0)
    assert found["homogeneous"]["alpa"]["outcomes"] == {NOT_SIGNIFICANT: 1}


def test_the_bound_is_between_two_figures_of_the_cost_model():
    """Whatever the machine did meanwhile: measured steps of 3 kernels say nothing of a plan predicted at 2 s."""
    found = summary(result(mapping("hwaware", 2.0), mapping("alpa-1", 3.0, predicted=2.0), ideal_step_s=1.6))
    assert found["speed_ups"]["alpa"]["most"] == pytest.approx(1.25)


@pytest.mark.parametrize(("quickest", "most"), [(1.5, 2.5), (0.5, 5.0)])
def test_the_bound_follows_layer_times_taken_beside_the_steps(quickest, most):
    """Predicted at 2 s, at half the speed 4 s; the ideal step may be shorter by as much as any kind got faster."""
    slowdowns = {"a": (2.0,) * len(STEPS), "b": (quickest,) * len(STEPS)}
    alpa = mapping("alpa-1", 3.0, predicted=2.0, slowdowns=slowdowns)
    found = summary(result(mapping("hwaware", 2.0), alpa, ideal_step_s=1.6))
    assert found["speed_ups"]["alpa"]["most"] == pytest.approx(most)


def test_a_prediction_is_corrected_by_its_own_profiles_kernel():
    found = summary(result(mapping("hwaware-before", 1.0, predicted=1.0, profile_reference_s=2.0)))
    row = found["mappings"]["hwaware-before"]
    assert row["corrected_prediction_s"] == pytest.approx(1.0)
    assert row["prediction_error"] == pytest.approx(-0.5)


def test_ranks_of_predictions():
    agreeing = [mapping("hwaware", 1.0, 0.1), mapping("a", 2.0, 0.2), mapping("b", 3.0, 9.0)]
    assert prediction_rank_correlation(result(*agreeing)) == pytest.approx(1.0)
    reversed_ = [mapping("hwaware", 3.0, 0.1), mapping("a", 2.0, 0.2), mapping("b", 1.0, 9.0)]
    assert prediction_rank_correlation(result(*reversed_)) == pytest.approx(-1.0)
    assert prediction_rank_correlation(result(*agreeing[:2])) is None
    assert prediction_rank_correlation(result(*agreeing[:1], enumerated=tuple(agreeing[1:]))) == pytest.approx(1.0)


def test_a_result_that_an_older_version_recorded_still_loads():
    recorded = Path(__file__).parents[2] / "benchmarks" / "results" / "demo" / "result.json"
    old = BenchmarkResult.from_json(recorded.read_bytes())
    found = summary(old)
    assert found["losses_agree"]
    assert found["speed_ups"]["alpa"]["median"] == pytest.approx(1 / found["step_ratio"]["median"], rel=1e-6)
    assert BenchmarkResult.from_json(old.to_json()) == old
