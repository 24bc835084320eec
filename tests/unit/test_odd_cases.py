"""Odd clusters, files and moments, each of which once gave a wrong number, a traceback or something left behind."""

import os
import random
from concurrent.futures import Future
from types import SimpleNamespace

import msgspec
import numpy
import pytest
from builders import device, link

import hwaware
import hwaware.models
from hwaware.adapting import following
from hwaware.adapting.drift import Drift
from hwaware.adapting.pace import Pace, Watched
from hwaware.bench import profiling, summary
from hwaware.bench.testbed import layout, manager
from hwaware.bench.testbed import state as records
from hwaware.bench.testbed.scenarios import Scenario
from hwaware.cluster import ClusterProfile, PartialProfile
from hwaware.errors import MeasurementError, ProfileMismatchError, RecordError, UnusableInputError
from hwaware.plans import Plan, Replica, Stage
from hwaware.profiler import measure
from hwaware.profiler.flags import all_flags
from hwaware.profiler.policy import QUICK
from hwaware.profiler.progress import Silent
from hwaware.profiler.rings import _factor
from hwaware.profiler.selection import Selection
from hwaware.result import BenchmarkResult, Mapping
from hwaware.runtime.recorder import Recording


def profiled(fakes, hosts, only=(), earlier=None, address=None):
    crew = fakes.crew([fakes.spec(host, 1e10) for host in hosts], lambda *_: 1e8)
    return measure(crew, QUICK, ["float32"], Silent(), Selection.of(only, earlier), earlier)


def test_a_device_that_is_measured_later_takes_its_own_place(fakes):
    second = profiled(fakes, "aab", only=["a:1"])
    whole = profiled(fakes, "aab", earlier=PartialProfile.of(second))
    assert [one.id for one in whole.devices if one.host == "a"] == ["a:0", "a:1"]


def test_a_host_of_another_name_is_not_taken_for_a_second_one(fakes):
    found = profiled(fakes, "ab")
    hosts = tuple(msgspec.structs.replace(one, name=f"{one.name}-before") for one in found.hosts)
    devices = tuple(
        msgspec.structs.replace(one, id=f"{one.host}-before:0", host=f"{one.host}-before") for one in found.devices
    )
    links = tuple(
        msgspec.structs.replace(one, source=f"{one.source}-before", target=f"{one.target}-before")
        for one in found.links
    )
    renamed = ClusterProfile(hosts=hosts, devices=devices, links=links)
    with pytest.raises(
        ProfileMismatchError, match=r"calls the host at .* 'a-before', .* calls it 'a'\. To fix: rename"
    ):
        profiled(fakes, "ab", earlier=PartialProfile.of(renamed))


def test_what_fails_while_the_runtime_is_timed_loses_no_measurement(fakes, monkeypatch):
    measured, said = profiled(fakes, "ab"), []

    def failing(profile, address):
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(profiling.profiler, "profile", lambda *_, **__: measured)
    monkeypatch.setattr(profiling, "_why_not", lambda *_: None)
    monkeypatch.setattr(profiling, "_with_runtime", failing)
    assert profiling.profile("h:1", say=said.append) is measured
    assert said[-1].endswith("RuntimeError: RESOURCE_EXHAUSTED: out of memory")


@pytest.mark.parametrize("error", [MeasurementError("JAX 0.4.28 cannot sum.", "update it."), ValueError("no sum.")])
def test_times_of_passes_stay_where_gradients_cannot_be_summed(monkeypatch, caplog, error):
    from hwaware.calibration import runtime_part

    def failing(profile, start):
        raise error

    monkeypatch.setattr(runtime_part, "with_passes", lambda profile, start: "with passes")
    monkeypatch.setattr(runtime_part, "with_sums", failing)
    assert runtime_part.with_runtime(None, None) == "with passes"
    assert str(error) in caplog.text


def test_links_between_devices_are_not_compared_with_links_between_hosts():
    devices = [device(f"{host}:{index}", host=host) for host in "abc" for index in range(2)]
    between = [link(one, other, 1e9) for one, other in ("ab", "ba", "ac", "ca", "bc", "cb")]
    inside = [link(f"{host}:0", f"{host}:1", 2e11) for host in "abc"]
    assert all_flags(devices, [*between, *inside], []) == []


@pytest.mark.parametrize("size", [2, 64, 512, 10_000])
def test_sums_of_a_collective_are_whole_numbers_that_float32_has(size):
    factors = [_factor(number) for number in range(size)]
    total = max(factors) * sum(factors)
    assert int(numpy.float32(total)) == total <= 1 << 24
    assert len(set(factors)) == min(size, 37)  # neighbours differ


def test_a_page_of_a_plan_without_stages_says_why(tmp_path):
    from click.testing import CliRunner

    from hwaware.cli import main

    large = hwaware.Workload.uniform(layers=2, parameter_bytes=1e18)
    plan = hwaware.plan(large, hwaware.ClusterProfile.uniform(hosts=2), num_microbatches=2)
    plan.save(tmp_path / "plan.json")
    done = CliRunner().invoke(main, ["show", str(tmp_path / "plan.json"), "--html", str(tmp_path / "plan.html")])
    assert done.exit_code == 0, done.output
    assert "Memory: " in (tmp_path / "plan.html").read_text()


def test_names_with_dollar_signs_are_no_formulas(tmp_path):
    pytest.importorskip("matplotlib")
    from hwaware.report import canvas

    figure = canvas.pyplot().figure()
    figure.text(0.5, 0.5, r"$\foo$ and a$b_c$")
    figure.savefig(tmp_path / "names.svg")
    assert r"$\foo$ and a$b_c$" in (tmp_path / "names.svg").read_text()


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_names_whose_characters_no_font_has_are_drawn_without_warnings(ending, tmp_path):
    pytest.importorskip("matplotlib")
    from hwaware.report import plots

    name = "主机\U0010fffd"  # Chinese, and a character that nobody has defined
    profile = hwaware.ClusterProfile.uniform(hosts=2)
    renamed = tuple(msgspec.structs.replace(one, kind=name) for one in profile.devices)
    plots.plot(msgspec.structs.replace(profile, devices=renamed), tmp_path / f"names.{ending}")
    assert ending != "svg" or name in (tmp_path / "names.svg").read_text("utf-8")


def test_pictures_fall_back_to_a_font_with_the_characters(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    from hwaware.report import canvas

    monkeypatch.setattr(canvas, "_EAST_ASIAN", ("A font that nobody has", "STIXGeneral"))
    with matplotlib.rc_context():
        figure = canvas.pyplot().figure()
        figure.text(0.5, 0.5, "\u1d81")  # STIX has it, DejaVu does not: matplotlib would warn
        figure.draw_without_rendering()
        canvas.pyplot().close(figure)


def test_a_page_of_a_file_whose_name_is_no_text(tmp_path):
    pytest.importorskip("matplotlib")
    from hwaware.report.page import save_page

    save_page(hwaware.ClusterProfile.uniform(hosts=1), tmp_path / "page.html", os.fsdecode(b"\xff.json"))
    assert "<title>?.json: hwaware.cluster" in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.parametrize("number", [numpy.int8, numpy.int64])
def test_sizes_of_models_may_be_integers_of_numpy(number):
    config = hwaware.models.GptConfig(hidden=number(64), heads=number(2))
    assert config == hwaware.models.GptConfig(hidden=64, heads=2)
    assert 4 * config.hidden == 256


@pytest.mark.parametrize("value", [True, numpy.True_, 2.0, numpy.float64(2), 0, numpy.int64(-1), "2"])
def test_sizes_of_models_are_whole_numbers(value):
    with pytest.raises(UnusableInputError, match="expected a whole number, at least 1"):
        hwaware.models.GptConfig(hidden=value)


@pytest.mark.parametrize("message_s", [5e-4, 5e-3])
def test_a_device_that_slows_slows_no_link(message_s):
    model, cluster = hwaware.Workload.uniform(layers=4), hwaware.ClusterProfile.uniform(hosts=2, flops_per_s=1e10)
    stages = [((0, 0), "h0:0"), ((1, 3), "h1:0")]
    plan = Plan(
        num_microbatches=1,
        stages=tuple(Stage(layers=layers, replicas=(Replica(devices=(name,)),)) for layers, name in stages),
    )
    follower = following.Follower(plan, model, cluster, lambda *_: Future(), switch_s=2.0)
    pace = Pace([Watched("h0:0", "h0", ("f0", "b0")), Watched("h1:0", "h1", ("f1", "b1"))], num_microbatches=1)
    rng, now = random.Random(0), 0.0
    for step in range(60):
        slower = 3.0 if step >= 30 else 1.0  # the first device alone
        times = [0.01 * slower, message_s, 0.03, 0.06, message_s, 0.02 * slower]
        ends = [now]
        for seconds in times:
            ends.append(ends[-1] + seconds * rng.gauss(1, 0.01))
        begin, forward, came, passed, back, returned, now = ends
        left, gone = {f"a{step}": (0, forward)}, {f"g{step}": (0, back)}
        pace.add(0, Recording((("f0", begin, forward), ("b0", returned, now)), left, {f"g{step}": (0, returned)}))
        pace.add(1, Recording((("f1", came, passed), ("b1", passed, back)), gone, {f"a{step}": (0, came)}))
        for one in pace.steps():
            follower.observe(one)
    assert follower.drift.links == {}
    assert follower.drift.devices.get("h0:0", 1.0) > 2


@pytest.mark.parametrize("factor", [1e-6, 1e-3, 2e4, 1e12])
def test_a_link_that_changes_beyond_all_bounds_ends_no_training(factor):
    found = following._combined(Drift(), {"a<->b": factor})
    assert set(found.links) == {"a->b", "b->a"}


def test_a_second_interrupt_leaves_no_testbed(monkeypatch):
    removed = []

    def remove(state):
        removed.append(state)
        if len(removed) == 1:
            raise KeyboardInterrupt

    def started(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(manager, "_reserve", lambda *_: SimpleNamespace(name="t"))
    monkeypatch.setattr(manager, "best_kind", lambda kind: kind)
    monkeypatch.setattr(manager, "_prepare", started)
    monkeypatch.setattr(manager, "_remove", remove)
    monkeypatch.setattr(manager, "down", remove)
    monkeypatch.setattr(manager.State, "load", classmethod(lambda cls, path: "state"))
    with pytest.raises(KeyboardInterrupt):
        manager.up("three-hosts", kind="root")
    assert removed == ["state", "t"]


@pytest.mark.parametrize("text", ["{", '{"schema": "hwaware.testbed", "schema_version": 1, "name": "one"}'])
def test_a_damaged_record_of_a_testbed_is_to_be_deleted(text, tmp_path, monkeypatch):
    """Nobody can make this file again, and every command reads it."""
    monkeypatch.setattr(records, "directory", lambda: tmp_path)
    (tmp_path / "one.json").write_text(text)
    with pytest.raises(RecordError, match=r"one\.json is not .*To fix: .*HWAWARE_TESTBED=one\..*delete this file"):
        records.all_states()


def test_a_record_that_is_removed_while_it_is_read_is_no_testbed(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "directory", lambda: tmp_path)
    (tmp_path / "gone.json").write_text("{}")

    def load(path):
        os.unlink(path)
        raise RecordError(f"{path} cannot be read.", "x")

    monkeypatch.setattr(records.State, "load", staticmethod(load))
    assert records.all_states() == []


def test_unequal_shares_are_unequal_kinds():
    scenario = Scenario(name="x", shares={"a": 0.8, "b": 0.014, "c": 0.01}, default_mbit=100)
    kinds = [layout.describe_devices(scenario, host, True)[0]["kind"] for host in scenario.shares]
    assert kinds[0].endswith("-0.80")
    assert len(set(kinds)) == 3


def a_result(loss=(0.5,), expected=(0.5,), environment=None):
    plan = Plan(num_microbatches=1, stages=(Stage(layers=(0, 0), replicas=(Replica(devices=("a:0",)),)),))
    one = Mapping(name="hwaware", plan=plan, predicted_step_s=1.0, step_s=(1.0,), loss=loss)
    return BenchmarkResult(
        environment=environment or {}, scenario="s", model="m", num_microbatches=1, repeats=1, mappings=(one,),
        single_device_loss=expected,
    )  # fmt: skip


def test_losses_that_are_zero_or_missing_have_a_summary():
    assert summary.largest_loss_difference(a_result((0.0,), (0.0,))) == 0.0
    assert summary.largest_loss_difference(a_result((0.1,), (0.0,))) > 1e20
    assert summary.largest_loss_difference(a_result(())) is None
    found = summary.summary(a_result(environment={"testbed": None}))
    assert (found["heterogeneous"], found["losses_agree"]) == (True, True)
