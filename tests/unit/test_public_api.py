"""The public names: what they take, what they return, and the old calls that go on to work."""

from __future__ import annotations

import ast
import builtins
import doctest
import functools
import inspect
import re
from pathlib import Path

import pytest
from builders import chain, layer, workload

import hwaware
from hwaware import activation
from hwaware.cluster import LinkTable
from hwaware.deprecation import keyword_only
from hwaware.errors import AlpaError, UnusableInputError
from hwaware.patching.stage_option import PlacementSettings
from hwaware.survival import rescuer

ROOT = Path(__file__).parents[2]
MODEL = workload([layer(1e9, 2e9), layer(1e9, 2e9)])
PROFILE = hwaware.ClusterProfile.uniform(flops_per_s=1e10)
PLAN = chain("h0:0", "h1:0", num_microbatches=4)


@pytest.mark.parametrize("name", [name for name in hwaware.__all__ if name != "__version__"])
def test_every_public_name_has_an_example(name):
    assert "Example" in (getattr(hwaware, name).__doc__ or "")


@pytest.mark.parametrize("name", [name for name in hwaware.__all__ if name != "__version__"])
def test_an_example_imports_the_names_that_it_uses(name):
    """A reader of `help(hwaware.plan)` has imported only hwaware."""
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(hwaware, name)))
    nodes = [node for example in examples for node in ast.walk(ast.parse(example.source))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {node.id for node in names if not isinstance(node.ctx, ast.Load)} | {"hwaware", *dir(builtins)}
    known |= {
        getattr(node, "asname", None) or node.name for node in nodes if isinstance(node, (ast.alias, ast.FunctionDef))
    }
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    assert {node.id for node in names} <= known


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: hwaware.plan(MODEL, PROFILE, num_microbatches=4), hwaware.Plan),
        (lambda: hwaware.evaluate(PLAN, MODEL, PROFILE), hwaware.Cost),
        (lambda: hwaware.evaluate(PLAN, MODEL, PROFILE).stages[0], hwaware.StageCost),
        (lambda: hwaware.simulate(PLAN, MODEL, PROFILE), hwaware.Timeline),
        (lambda: hwaware.explain(PLAN, MODEL, PROFILE), hwaware.Explanation),
        (lambda: hwaware.compare(PROFILE, PROFILE), hwaware.Comparison),
    ],
)
def test_what_a_function_returns_is_public_too(call, kind):
    assert isinstance(call(), kind)


def keywords(function):
    found = inspect.signature(function).parameters.values()
    return [one.name for one in found if one.kind is inspect.Parameter.KEYWORD_ONLY]


@pytest.mark.parametrize(
    ("function", "some"),
    [
        (hwaware.plan, {"num_microbatches", "solver", "rule"}),
        (hwaware.explain, {"planner"}),
        (hwaware.profile, {"quick", "dtypes", "only", "resume", "symmetric"}),
        (
            hwaware.enable,
            {"plan", "solver", "exclude", "place_fixed_stages", "costs", "reserve_bytes", "calibration_s"},
        ),
        (
            hwaware.enabled,
            {"plan", "solver", "exclude", "place_fixed_stages", "costs", "reserve_bytes", "calibration_s"},
        ),
        (
            hwaware.runtime_settings,
            {"sends", "receive_limit_s", "step_limit_s", "enforce_memory", "message_digests", "encrypt"},
        ),
    ],
)
def test_options_are_keywords(function, some):
    assert some <= set(keywords(function))


def test_enable_and_enabled_take_the_same_options():
    assert keywords(hwaware.enable) == keywords(hwaware.enabled)


@pytest.mark.parametrize("function", [hwaware.enable, hwaware.enabled])
def test_an_unknown_option_is_named(function):
    with pytest.raises(TypeError, match="solvr"):
        function(PROFILE, solvr="exact")


def test_old_positional_options_work_with_a_warning():
    with pytest.warns(DeprecationWarning, match=r"plan\(\) .* write num_microbatches=4, solver='even'\.") as caught:
        old = hwaware.plan(MODEL, PROFILE, 4, "even")
    assert caught[0].filename == __file__
    new = hwaware.plan(MODEL, PROFILE, num_microbatches=4, solver="even")
    assert old.stages == new.stages
    with pytest.warns(DeprecationWarning, match=r"explain\(\) .* write planner="):
        hwaware.explain(PLAN, MODEL, PROFILE, functools.partial(hwaware.plan, num_microbatches=4))


def test_positional_calls_that_never_worked_still_fail():
    @keyword_only
    def function(first, *, second=0, third=0):
        return first, second, third

    for arguments, options in (((1, 2, 3, 4), {}), ((1, 2), {"second": 2}), ((), {})):
        with pytest.raises(TypeError):
            function(*arguments, **options)
    with pytest.warns(DeprecationWarning, match="write second=2"):
        assert function(1, 2, third=3) == (1, 2, 3)


def test_one_host_may_be_excluded_by_its_name():
    found = hwaware.plan(MODEL, PROFILE, num_microbatches=4, exclude="h1")
    assert {device for stage in found.stages for device in stage.devices} == {"h0:0"}


def test_an_explanation_prints_as_its_sentences():
    planner = functools.partial(hwaware.plan, num_microbatches=4)
    found = hwaware.explain(PLAN, MODEL, PROFILE, planner=planner)
    assert str(found).splitlines() == found.sentences()
    assert found.one_more is not None
    with pytest.raises(AttributeError):
        found.step_s = 1.0


def test_a_comparison_prints_a_line_for_each_difference():
    slow = hwaware.ClusterProfile.uniform(flops_per_s=5e9)
    found = hwaware.compare(PROFILE, slow)
    lines = str(found).splitlines()
    assert lines[0].startswith("h0:0 float32: ")
    assert "ratio 2.000: slower" in lines[0]
    assert lines[len(found.differences) :] == found.remarks()
    with pytest.raises(UnusableInputError, match="dict"):
        hwaware.compare({}, PROFILE)


def test_profile_refuses_an_unknown_data_type_and_reads_a_file_to_resume(tmp_path):
    with pytest.raises(UnusableInputError, match="float31"):
        hwaware.profile("local", dtypes="float31")
    with pytest.raises(UnusableInputError, match=r"none\.json"):
        hwaware.profile("local", resume=tmp_path / "none.json")
    with pytest.warns(DeprecationWarning, match="write quick=True"), pytest.raises(UnusableInputError):
        hwaware.profile("local", True, ())


def test_a_uniform_cluster():
    profile = hwaware.ClusterProfile.uniform(hosts=3, devices_per_host=2, latency_s=1e-5, kind="gpu")
    assert [device.id for device in profile.devices] == ["h0:0", "h0:1", "h1:0", "h1:1", "h2:0", "h2:1"]
    assert {device.kind for device in profile.devices} == {"gpu"}
    table = LinkTable(profile)
    pairs = [(a.id, b.id) for a in profile.devices for b in profile.devices if a is not b]
    assert {table.between(*pair).latency_s for pair in pairs} == {1e-5}
    assert hwaware.ClusterProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    "wrong",
    [{"hosts": 0}, {"devices_per_host": 0}, {"flops_per_s": (1e9,)}, {"flops_per_s": 0.0}, {"memory_bytes": -1}],
)
def test_a_uniform_cluster_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="expected"):
        hwaware.ClusterProfile.uniform(**wrong)


def test_speeds_of_hosts_give_kinds():
    profile = hwaware.ClusterProfile.uniform(hosts=3, flops_per_s=[1e12, 5e11, 1e12])
    first, second, third = profile.devices
    assert first.kind == third.kind != second.kind
    assert second.throughput["float32"][0].seconds == 2 * first.throughput["float32"][0].seconds


def test_a_stage_option_may_exclude_one_host_by_its_name():
    assert PlacementSettings(PROFILE, exclude="h1").exclude == ("h1",)


def test_a_misspelt_variable_gives_a_warning(monkeypatch, caplog):
    activation._warn_of_unknown_variables()
    assert caplog.messages == []
    misspelt = rescuer.VARIABLE[:-1]
    monkeypatch.setenv(misspelt, "1")
    activation._warn_of_unknown_variables()
    (line,) = caplog.messages
    assert line.startswith(f"hwaware does not read {misspelt}, only HWAWARE_ADAPT, ")


def test_all_variables_of_the_sources_are_known():
    found = set()
    for folder in (Path(hwaware.__file__).parent, *(ROOT / name for name in ("tests", "benchmarks", "examples"))):
        for path in folder.rglob("*.py"):
            found.update(re.findall(r"\bHWAWARE_[A-Z][A-Z_]*", path.read_text()))
    assert found == {*activation.VARIABLES, *activation.OF_TESTS}


@pytest.mark.parametrize("given", ["setting", "variable"])
def test_an_unknown_source_of_costs_is_named_as_it_was_given(monkeypatch, given):
    monkeypatch.setenv("HWAWARE_COSTS", "measure" if given == "variable" else "model")
    name, options = ("HWAWARE_COSTS", {}) if given == "variable" else ("costs", {"costs": "measure"})
    with pytest.raises(AlpaError, match=f"^{name}='measure': there is no such source"):
        PlacementSettings(PROFILE, **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"solver": "exat"}, "no solver 'exat'"),
        ({"exclude": ("h9",)}, "cannot exclude 'h9'"),
        ({"reserve_bytes": -1.0}, "reserve_bytes"),
    ],
)
def test_settings_refuse_at_once_what_does_not_exist(options, said):
    with pytest.raises(UnusableInputError, match=said):
        PlacementSettings(PROFILE, **options)
