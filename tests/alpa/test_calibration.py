"""Layers timed at the first start of a program, within a limit, and read from the disk at the next."""

import contextlib
import functools
import json
import math
import os
import subprocess
import sys

import builders
import msgspec
import pytest

pytestmark = pytest.mark.alpa


@pytest.fixture(autouse=True)
def _by_default(monkeypatch, tmp_path):
    from hwaware.activation import install_runtime

    install_runtime()
    monkeypatch.delenv("HWAWARE_COSTS")
    monkeypatch.setenv("HWAWARE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def no_timers(monkeypatch):
    """Start no timer, in tests that make up what timers find."""
    from hwaware.calibration import layers

    monkeypatch.setattr(layers, "timers", lambda *_: contextlib.nullcontext(lambda method: [True] * 3))


def compiled(model, profile, **options):
    """Compile the model under `hwaware.enable`'s defaults, and return the layers that were placed."""
    import alpa

    from hwaware.activation import HardwareAwareStageOption
    from hwaware.patching import meshes, stage_option

    mesh = meshes.cluster_mesh(meshes.device_counts(profile))
    method = alpa.PipeshardParallel(
        devices=mesh,
        num_micro_batches=4,
        layer_option=alpa.AutoLayerOption(layer_num=2),
        stage_option=HardwareAwareStageOption(profile, **options),
    )

    def train_step(state, batch):
        return model.train_step(state, batch, value_and_grad=alpa.value_and_grad)

    step = alpa.parallelize(train_step, method=method)
    step.get_executable(model.initial_state(0), model.batch(0, 32))
    mesh.launched_physical_mesh_group.shutdown()
    return stage_option.last_workload(), stage_option.last_plan()


def test_the_first_start_times_the_layers_and_the_next_reads_them(
    short_readings, model, profile, monkeypatch, caplog, tmp_path
):
    from hwaware.calibration import layers

    with caplog.at_level("INFO", "hwaware"):
        first, plan = compiled(model, profile, calibration_s=300)
    assert any("for at most 300 s" in line for line in caplog.messages)
    assert all(layer.measured["cpu"]["1,1"].forward_s > 0 for layer in first.layers)
    assert first.name == "train_step"
    files = sorted((tmp_path / "cache").glob("layers-*"))
    assert len(files) == 3  # one for each device

    def nobody(*_):
        raise AssertionError("the second start times nothing")

    monkeypatch.setattr(layers, "timers", nobody)
    caplog.clear()
    with caplog.at_level("INFO", "hwaware"):
        second, again = compiled(model, profile, calibration_s=300)
    assert second == first
    assert msgspec.structs.replace(again, search_s=plan.search_s) == plan
    assert not any("timing" in line for line in caplog.messages)
    # Another measured speed is another device.
    faster = builders.with_devices(profile, throughput=lambda d: {"float32": _faster(d.throughput["float32"])})
    with pytest.raises(AssertionError, match="times nothing"):
        compiled(model, faster)


def _faster(curve):
    return tuple(msgspec.structs.replace(point, seconds=point.seconds / 2) for point in curve)


def test_a_cache_that_cannot_be_used_costs_one_line(no_timers, model, profile, monkeypatch, caplog, tmp_path):
    from hwaware import cache_folder
    from hwaware.calibration import layers
    from hwaware.calibration.timing import Timed, Timing

    def timed(ask, programs, *_):
        # As fast as the profile says, so that the correction by the profile changes nothing.
        return Timed([[Timing((seconds, seconds), 0.0)] * len(programs) for seconds in (0.1, 0.2, 0.2)], [])

    monkeypatch.setattr(layers, "timed", timed)
    compiled(model, profile)
    for file in (tmp_path / "cache").glob("layers-*"):
        document = json.loads(file.read_text())
        document["layers"] = {key: {**one, "limit_s": -1} for key, one in document["layers"].items()}
        file.write_text(json.dumps(document))
    caplog.clear()
    workload, _ = compiled(model, profile)
    damaged = [line for line in caplog.messages if "are measured again" in line]
    assert len(damaged) == 3  # one for each device that is asked for
    assert "limit_s is -1" in damaged[0]
    assert workload.layers[0].measured["cpu"]["1,1"].forward_s == pytest.approx(0.1)
    monkeypatch.setenv(cache_folder.VARIABLE, os.devnull)
    caplog.clear()
    compiled(model, profile)
    assert any("times the layers again" in line and "cannot be written" in line for line in caplog.messages)


def test_what_time_ran_out_for_is_estimated_from_the_rest(no_timers, model, profile, monkeypatch, caplog):
    from hwaware.calibration import layers
    from hwaware.calibration.timing import Timed, Timing

    asked, told = [], []

    def timed(ask, programs, working_set_bytes, limit_s, counts, warned):
        asked.append(limit_s)
        told.append(list(warned))
        if len(asked) > 1:  # the parts of replicas
            return Timed([[None] * len(programs)] * 3, ["here"])
        assert counts == [len(programs), min(4, len(programs)), min(4, len(programs))]
        two = [Timing((1.0, 1.0), 0.0), Timing((2.0, 2.0), 0.0), *[None] * (len(programs) - 2)]
        of_devices = [two, [Timing((2.0, 2.0), 0.0), Timing((4.0, 4.0), 0.0), *two[2:]], [None] * len(programs)]
        return Timed(of_devices, ["here"])

    monkeypatch.setattr(layers, "timed", timed)
    workload, _ = compiled(model, profile, calibration_s=20)
    assert 0 < asked[0] <= 20
    fast, slow = (workload.layers[k].measured["cpu"]["1,1"] for k in (0, 1))
    known, estimated = (fast, slow) if fast.spread is None else (slow, fast)
    assert (known.forward_s, known.backward_s) == pytest.approx((1.0, 2.0))
    assert estimated.spread > 0
    # The layers are alike, so the untimed one takes as long by its analytic time.
    assert estimated.forward_s + estimated.backward_s == pytest.approx(3.0, rel=0.2)
    third = workload.layers[0].measured["here:2"]["1,1"]
    assert third.forward_s + third.backward_s == pytest.approx(6.0, rel=0.35)  # half as fast, by its products
    (line,) = [line for line in caplog.messages if "Time ran out" in line]
    assert "HWAWARE_CALIBRATION_S=80" in line
    assert told == [[], ["here"]]  # so that one warning names the busy host
    compiled(model, profile, calibration_s=20)
    assert len(told) == 2  # the next start times nothing, on the device without times neither
    (line,) = [line for line in caplog.messages if "an earlier start" in line]
    assert "set HWAWARE_CALIBRATION_S to more seconds than before" in line
    caplog.clear()
    compiled(model, profile, calibration_s=30)
    assert not any("an earlier start" in line for line in caplog.messages)


def test_without_the_device_that_timed_all_layers_another_one_times_them(model, profile, monkeypatch):
    """Else the layers that it alone timed have no times, and all layers no updates."""
    from hwaware.calibration import layers
    from hwaware.calibration.timing import Timed, Timing

    asked = []

    def timers(profile, devices, *_):
        asked.append([device.id for device in devices])
        return contextlib.nullcontext(lambda method: [True] * len(devices))

    def timed(ask, programs, working_set_bytes, limit_s, counts, warned):
        known = [[Timing((0.1, 0.1), 0.0)] * count + [None] * (len(programs) - count) for count in counts]
        return Timed(known, [])

    monkeypatch.setattr(layers, "timers", timers)
    monkeypatch.setattr(layers, "timed", timed)
    monkeypatch.setattr(layers, "_HEAVIEST", 1)
    compiled(model, profile)
    leader = asked[0][0]
    assert len(asked[0]) == 3
    compiled(model, profile)
    assert len(asked) == 1
    without, _ = compiled(model, profile, exclude=[leader])
    assert asked[1:] == [asked[0][1:2]]  # the fastest of those that are left
    for layer in without.layers:
        (times,) = layer.measured.values()
        assert (times["1,1"].forward_s, times["1,1"].update_s) == pytest.approx((0.1, 0.1))
    compiled(model, profile, exclude=[leader])
    assert len(asked) == 2


def test_a_program_trains_by_prices_of_the_profile_where_nothing_can_be_timed(
    no_timers, model, profile, monkeypatch, caplog
):
    from hwaware.calibration import layers
    from hwaware.errors import MeasurementError

    def timed(*_):
        raise MeasurementError("The layers were not timed on device 'here:0' within 3 s: lost.", "look.")

    monkeypatch.setattr(layers, "timed", timed)
    workload, plan = compiled(model, profile)
    assert all(layer.measured is None for layer in workload.layers)
    assert plan.predicted_step_s > 0
    assert any("not timed on device 'here:0'" in line for line in caplog.messages)
    assert any("prices follow from the profile alone" in line for line in caplog.messages)


def test_where_time_runs_out_before_all_layers_one_warning_says_so(no_timers, model, profile, monkeypatch, caplog):
    from hwaware.calibration import layers
    from hwaware.calibration.timing import Timed

    def timed(ask, programs, *_):
        return Timed([[None] * len(programs)] * 3, [])

    monkeypatch.setattr(layers, "timed", timed)
    compiled(model, profile, calibration_s=20)
    assert not any("Time ran out" in line for line in caplog.messages)
    (line,) = [line for line in caplog.messages if "No layer was timed" in line]
    assert line.endswith("To fix: give a longer limit, such as HWAWARE_CALIBRATION_S=80.")


_DIGEST = """
import jax, jax.numpy as jnp
from hwaware.tracing.digest import jaxpr_digest
def layer(size, power=2):
    block = jax.jit(lambda x: jax.nn.relu(x @ x) ** power, inline=False)
    function = lambda x: jax.lax.cond(x.sum() > 0, block, jnp.tanh, x)
    return jaxpr_digest(jax.make_jaxpr(function)(jnp.ones((size, size))).jaxpr)
print(layer(4), layer(5), layer(4, 3))
"""


def test_another_process_gives_a_layer_the_same_key():
    found = [subprocess.run([sys.executable, "-c", _DIGEST], capture_output=True, text=True) for _ in range(2)]
    assert [one.returncode for one in found] == [0, 0], found[0].stderr
    assert found[0].stdout == found[1].stdout
    assert len(set(found[0].stdout.split())) == 3  # shapes and parameters count


def test_axes_that_are_summed_differ_from_axes_that_are_kept():
    import jax
    import jax.numpy as jnp

    from hwaware.tracing.digest import jaxpr_digest

    def digest(axes):
        product = functools.partial(jax.lax.dot_general, dimension_numbers=axes)
        return jaxpr_digest(jax.make_jaxpr(product)(jnp.ones((4, 4)), jnp.ones((4, 4))).jaxpr)

    assert digest((((1, 0), (0, 1)), ((), ()))) != digest((((1,), (0,)), ((0,), (1,))))


@pytest.mark.parametrize("given", ["0", "-3", "soon", "nan", "inf", "1e9"])
def test_a_limit_that_is_no_time_is_refused(profile, monkeypatch, given):
    from hwaware.errors import UnusableInputError
    from hwaware.patching.stage_option import PlacementSettings

    monkeypatch.setenv("HWAWARE_CALIBRATION_S", given)
    with pytest.raises(UnusableInputError, match=r"time limit .* expected a number of seconds above 0"):
        PlacementSettings(profile)


def test_the_environment_names_the_source_of_costs(profile, monkeypatch):
    from hwaware.errors import AlpaError
    from hwaware.patching.stage_option import PlacementSettings

    assert PlacementSettings(profile).costs == "auto"
    monkeypatch.setenv("HWAWARE_COSTS", "measured")
    assert PlacementSettings(profile).costs == "measured"
    assert PlacementSettings(profile, costs="model").costs == "model"
    monkeypatch.setenv("HWAWARE_COSTS", "guess")
    with pytest.raises(AlpaError, match="HWAWARE_COSTS='guess'"):
        PlacementSettings(profile)


def test_a_second_timing_without_times_keeps_the_first_ones_and_its_own_limit():
    from hwaware.calibration.cache import KeptLayer, renewed
    from hwaware.workload import MeasuredTime

    timed = {"1,1": MeasuredTime(forward_s=1.0, backward_s=2.0)}
    known = {"busy": KeptLayer(times=timed, limit_s=20.0, busy=True), "out": KeptLayer(times={}, limit_s=20.0)}
    fresh = {key: KeptLayer(times={}, limit_s=40.0) for key in known}
    found = renewed(known, fresh)
    assert found["busy"] == known["busy"]
    assert found["out"].limit_s == 40.0  # so that the next start with this limit does not try again


def test_a_busy_host_is_named_once(caplog):
    from hwaware.calibration import timing

    assert timing._warn_of([{"here": 0.5, "there": 0.1}], []) == ["here"]
    assert timing._warn_of([{"here": 0.5, "there": 0.3}], ["here"]) == ["here", "there"]
    first, second = caplog.messages
    assert "here (50% busy)" in first
    assert "there (30% busy)" in second
    assert "here (50% busy)" not in second
    assert "To fix: start again while the cluster is idle." in first


@pytest.mark.parametrize(("limit_s", "readings"), [(20.0, 4), (10.0, 1)])
def test_programs_are_timed_within_a_limit(limit_s, readings):
    from hwaware.calibration.timing import timed

    asked = []

    def ask(method, *arguments, resting=None):
        asked.append((method, *arguments))
        busy = [("here", 0.0), ("there", 0.0), None]
        runs = [None if resting == 0 else [[1.0], [2.0]], [[4.0], []], None]
        return {"start": [None] * 3, "compile": [2, 1, None], "busy": busy, "turns": runs}[method]

    found = timed(ask, ["forward", "backward"], 100, limit_s)
    assert found.busy == []
    # The first device rests in one of four readings; the second had no time for a program; the third did not answer.
    mostly = max(1, readings - 1)
    assert [[one and one.readings_s for one in timings] for timings in found.timings] == [
        [(1.0,) * mostly, (2.0,) * mostly], [(4.0,) * readings, None], [None, None],
    ]  # fmt: skip
    limits = [arguments[-1] for method, *arguments in asked if method in ("compile", "turns")]
    assert all(0 < limit < limit_s for limit in limits)
    assert math.inf not in limits


def test_a_short_limit_leaves_a_round_of_short_readings():
    from hwaware.calibration.timing import RESTING, timed

    durations = []

    def ask(method, *arguments, resting=None):
        if method == "turns":
            durations.append(arguments[0])
        return {"start": [None], "compile": [1], "busy": [("here", 0.0)], "turns": [[[0.1]]]}[method]

    timed(ask, ["forward"], 100, 3.0)
    once, *readings = durations
    assert once == 0.0
    assert len(readings) == RESTING
    assert all(0.25 < one < 3.0 / RESTING for one in readings)
