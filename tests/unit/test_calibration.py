"""Devices of one kind with times of their own, and estimates of times that nobody measured."""

from __future__ import annotations

import math
import sys
import time
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from builders import cluster, device, links, plan, timed, with_devices, workload

import hwaware
from hwaware.calibration import timers
from hwaware.calibration.agreeing import Errors, agreed, errors_of
from hwaware.calibration.cache import KeptLayer, LayerCache
from hwaware.calibration.filling import filled, seconds_per_flop
from hwaware.calibration.layers import _chosen, _leaders
from hwaware.calibration.programs import LayerSource
from hwaware.calibration.timing import Timing
from hwaware.costs import evaluate
from hwaware.costs.own_times import with_device_times, with_own_kinds
from hwaware.errors import MeasurementError
from hwaware.workload import MeasuredTime


def three(*seconds):
    names = ("a", "b", "c")
    devices = [device(f"{name}:0", one) for name, one in zip(names, seconds or (1.0, 1.0, 1.0))]
    return cluster(devices, links(("ab", "bc", "ac")))


def passes(seconds):
    return {"1,1": MeasuredTime(forward_s=seconds, backward_s=2 * seconds)}


def test_own_times_are_priced_as_if_the_device_had_a_kind_of_its_own():
    profile = three()
    own = workload(4, measured={**timed(0.1, 0.2), **timed(0.3, 0.6, "b:0")})
    renamed = with_devices(profile, kind=lambda one: "x" if one.id == "b:0" else "cpu")
    kinds = workload(4, measured={**timed(0.1, 0.2), **timed(0.3, 0.6, "x")})
    made = plan((0, 1, "a:0"), (2, 2, "b:0"), (3, 3, "c:0"))
    cost = evaluate(made, own, profile)
    assert cost == evaluate(made, kinds, renamed)
    assert [stage.forward_s for stage in cost.stages] == pytest.approx([0.2, 0.3, 0.1])
    found = hwaware.plan(own, profile, num_microbatches=8)
    assert found.predicted_step_s == evaluate(found, own, profile).step_s
    assert found.predicted_step_s == hwaware.plan(kinds, renamed, num_microbatches=8).predicted_step_s
    # One replica on devices with unlike times is not one kind.
    assert {stage.devices for stage in found.stages}.isdisjoint({("a:0", "b:0"), ("b:0", "c:0")})


def test_a_profile_without_own_times_stays_the_same_object():
    profile, plain = three(), workload(2, measured=timed(0.1, 0.2))
    assert with_own_kinds(plain, profile) == (plain, profile)
    assert with_own_kinds(plain, profile)[1] is profile


def test_devices_of_equal_own_times_get_one_kind_and_lacking_layers_the_usual_time():
    profile = three()
    first, second = workload(2).layers
    usual, slow = timed(0.1, 0.2), timed(0.5, 1.0)["cpu"]
    layers = (
        msgspec.structs.replace(first, measured={**usual, "b:0": slow, "c:0": slow}),
        msgspec.structs.replace(second, measured=usual),
    )
    split, kinds = with_own_kinds(msgspec.structs.replace(workload(2), layers=layers), profile)
    assert [one.kind for one in kinds.devices] == ["cpu", "cpu like b:0", "cpu like b:0"]
    assert split.layers[0].measured == {**usual, "cpu like b:0": slow}
    assert split.layers[1].measured == {**usual, "cpu like b:0": usual["cpu"]}


def test_like_devices_share_their_mean_and_slower_ones_keep_their_own():
    times = {"a:0": [passes(0.100)], "b:0": [passes(0.104)], "c:0": [passes(0.2)]}
    (layer,) = with_device_times(workload(1), three(), times).layers
    assert layer.measured["cpu"]["1,1"].forward_s == pytest.approx(0.102)
    assert layer.measured["c:0"] == passes(0.2)
    assert sorted(layer.measured) == ["c:0", "cpu"]


def test_deviations_join_as_variances_and_only_common_shardings_stay():
    one = {"1,1": MeasuredTime(forward_s=1.0, backward_s=1.0, deviation_s=0.3, update_s=0.2), "2,1": passes(1)["1,1"]}
    other = {"1,1": MeasuredTime(forward_s=1.0, backward_s=1.0, deviation_s=0.4)}
    (layer,) = with_device_times(workload(1), three(), {"a:0": [one], "b:0": [other]}).layers
    assert sorted(layer.measured["cpu"]) == ["1,1"]
    assert layer.measured["cpu"]["1,1"].deviation_s == pytest.approx((0.125) ** 0.5)
    assert layer.measured["cpu"]["1,1"].update_s == 0.2


def test_the_data_type_of_the_workload_tells_which_device_is_fastest():
    slow, fast = device(seconds=2.0).throughput["float32"], device().throughput["float32"]
    one, other = {"bfloat16": fast, "float32": slow}, {"bfloat16": slow, "float32": fast}
    assert [1e9 * seconds_per_flop(device(throughput=one), dtype) for dtype in (*one, "float16")] == [1.0, 2.0, 1.0]
    many = [device(f"{k}:0", throughput=other if k == 70 else one) for k in range(71)]
    assert [_chosen(many, dtype)[0].host for dtype in one] == ["0", "70"]


def sources(*keys):
    return [LayerSource(key, None) for key in keys]


def test_a_layer_that_another_device_measured_is_scaled_by_the_common_layers():
    profile = three(1.0, 5.0, 1.0)
    found = {"a:0": {"x": passes(0.1), "y": passes(0.4)}, "b:0": {"x": passes(0.3)}}
    times = filled(found, sources("x", "y"), workload(2), profile.devices)
    assert times["b:0"]["y"]["1,1"].forward_s == pytest.approx(1.2)
    assert times["b:0"]["y"]["1,1"].spread > 0
    assert times["a:0"] == found["a:0"]
    # Nothing in common: by the largest product.
    assert times["c:0"]["y"]["1,1"].forward_s == pytest.approx(0.4)


def test_a_device_without_the_workloads_data_type_is_scaled_by_another_type():
    fast, slow = device("a:0", 1.0), device("b:0", 2.0)
    fast = msgspec.structs.replace(fast, throughput={**fast.throughput, "bfloat16": fast.throughput["float32"]})
    model = msgspec.structs.replace(workload(1), dtype="bfloat16")
    times = filled({"a:0": {"x": passes(0.1)}}, sources("x"), model, [fast, slow])
    assert times["b:0"]["x"]["1,1"].forward_s == pytest.approx(0.2)


def test_an_update_that_a_device_had_no_time_to_measure_is_scaled_by_the_layers_passes():
    """A device without would seem to update in next to no time, and get more layers than others."""
    quick = {"1,1": MeasuredTime(forward_s=0.1, backward_s=0.2, update_s=0.03)}
    slow = {name: MeasuredTime(forward_s=0.2, backward_s=0.4) for name in ("1,1", "2,1")}
    found = {"a:0": {"x": quick, "y": passes(0.1)}, "b:0": {"x": slow, "y": passes(0.2)}}
    times = filled(found, sources("x", "y"), workload(2), three().devices[:2])
    assert [times["b:0"]["x"][name].update_s for name in ("1,1", "2,1")] == pytest.approx([0.06, 0.06])
    assert times["b:0"]["x"]["1,1"].forward_s == 0.2
    assert times["a:0"] == found["a:0"]
    assert times["b:0"]["y"]["1,1"].update_s is None  # nobody measured it


def test_a_layer_that_nobody_measured_takes_its_computed_time_times_the_factor_of_the_others():
    profile = three()
    model = workload([1e9, 2e9])  # 1 s and 2 s forward, twice as long backward
    times = filled({"a:0": {"x": passes(1.5)}}, sources("x", "y"), model, profile.devices[:1])
    estimated = times["a:0"]["y"]["1,1"]
    assert (estimated.forward_s, estimated.backward_s) == pytest.approx((3.0, 6.0))


def test_kept_layers_without_times_on_one_device_are_refused():
    shares = {"2,1": MeasuredTime(forward_s=1.0, backward_s=1.0)}
    with pytest.raises(ValueError, match=r"times are of \['2,1'\], expected \"1,1\" among them"):
        KeptLayer(times=shares, limit_s=30.0)


def test_two_programs_that_time_layers_at_once_keep_the_times_of_both(tmp_path, monkeypatch):
    monkeypatch.setenv("HWAWARE_CACHE", str(tmp_path))
    cache, one = LayerCache("0.12.0"), device("a:0")
    for number, times in enumerate(({}, passes(1.0))):
        assert cache.keep(
            one, {"both": KeptLayer(times=times, limit_s=30.0), str(number): KeptLayer(times={}, limit_s=30.0)}
        )
    assert {key: bool(layer.times) for key, layer in cache.known(one).items()} == {"both": True, "0": False, "1": False}
    cache.path(one).write_text("damaged")
    assert cache.keep(one, {"2": KeptLayer(times={}, limit_s=30.0)})
    assert list(cache.known(one)) == ["2"]


def log_errors(found, true_s):
    """The log of each device's time over its true time, without what all devices have in common."""
    logs = np.log([found[name]["layer"]["1,1"].forward_s / seconds for name, seconds in true_s.items()])
    return logs - logs.mean()


def test_short_timings_of_shares_are_corrected_by_their_speeds_in_the_profile():
    shares = {"a:0": 0.7, "b:0": 0.35, "c:0": 0.3, "d:0": 0.2, "e:0": 0.1}
    true_s = {name: 1 / share for name, share in shares.items()}
    random, before, after = np.random.default_rng(3), [], []
    for _ in range(200):
        profile_s, timed_s = (
            {name: seconds * math.exp(random.normal(0, error)) for name, seconds in true_s.items()}
            for error in (0.01, 0.06)
        )
        found = {name: {"layer": passes(seconds)} for name, seconds in timed_s.items()}
        devices = [device(name, seconds) for name, seconds in profile_s.items()]
        better = agreed(found, dict.fromkeys(shares, Errors(0.06, 0.06)), devices, "float32")
        before.append(log_errors(found, true_s))
        after.append(log_errors(better, true_s))
    assert np.std(after) < 0.5 * np.std(before)


def test_sure_timings_and_unlike_devices_stay_as_they_were_timed():
    # The larger the product, the better the GPU.
    devices = [device("gpu", {1e6: 1e-4, 1e9: 2e-3}), device("cpu", {1e6: 1e-3, 1e9: 3e-1})]
    found = {"gpu": {"layer": passes(0.002)}, "cpu": {"layer": passes(0.2)}}
    for error, change in ((0.005, 1e-3), (0.05, 0.02)):
        both = agreed(found, dict.fromkeys(found, Errors(error, error)), devices, "float32")
        for name, known in found.items():
            seconds = both[name]["layer"]["1,1"].forward_s
            assert seconds == pytest.approx(known["layer"]["1,1"].forward_s, rel=change)


def test_a_device_that_the_profile_misjudges_keeps_its_times():
    devices = [device("a:0", 1.0), device("b:0", 2.0)]
    found = {name: {"layer": passes(0.1)} for name in ("a:0", "b:0")}
    for error, change in ((0.005, 0.003), (0.02, 0.03)):
        times = agreed(found, dict.fromkeys(found, Errors(error, error)), devices, "float32")["b:0"]["layer"]["1,1"]
        assert 0.1 < times.forward_s < 0.1 * (1 + change)


def test_times_of_one_device_or_without_a_common_layer_stay():
    devices = [device("a:0", 1.0), device("b:0", 2.0)]
    found = {"a:0": {"first": passes(0.5)}, "b:0": {"second": passes(0.1)}}
    errors = dict.fromkeys(found, Errors(0.1, 0.1))
    assert agreed(found, errors, devices, "float32") == found
    assert agreed({"a:0": found["a:0"]}, errors, devices[:1], "float32") == {"a:0": found["a:0"]}
    both = {name: {"first": passes(1.0)} for name in found}
    assert agreed(both, errors, devices, "bfloat16") == both  # no curve of that type


def test_the_error_of_one_program_and_of_all_programs_together():
    steady, drifting = Timing((1.0, 1.0, 1.0), 0.0), Timing((1.0, 2.0, 3.0), 0.0)
    assert errors_of([steady, None]) == Errors(0.0, 0.02)
    assert errors_of([steady, drifting]) == pytest.approx(
        Errors(0.5 / math.sqrt(3) / math.sqrt(2), 1 / 3 / math.sqrt(3))
    )
    # What a quota takes from one program it does not take from the other.
    assert errors_of([drifting, Timing((3.0, 2.0, 1.0), 0.0)]) == pytest.approx(Errors(0.5 / math.sqrt(3), 0.02))
    assert errors_of([steady, Timing((1.0,), 0.0)]) == errors_of([]) == Errors(0.1, 0.1)


def test_a_device_that_is_slower_at_all_programs_than_the_profile_says_keeps_its_level():
    """Each program alone is unsure, and takes the others' part of the whole."""
    random, shares, extra = np.random.default_rng(5), {"a:0": 1.0, "b:0": 0.5, "c:0": 0.25}, 1.15
    true_s = {key: 0.1 + 0.02 * number for number, key in enumerate("pqrst")}
    devices = [device(name, 1 / share) for name, share in shares.items()]
    levels, patterns = [], []

    def seconds(known):
        return np.array([times["1,1"].forward_s for times in known["c:0"].values()])

    for _ in range(50):
        found = {
            name: {
                key: passes(true / share * (extra if name == "c:0" else 1.0) * math.exp(random.normal(0, 0.1)))
                for key, true in true_s.items()
            }
            for name, share in shares.items()
        }
        both = [agreed(found, dict.fromkeys(shares, Errors(0.1, level)), devices, "float32") for level in (0.02, 0.1)]
        own, sure, blind = map(seconds, (found, *both))
        levels.append([abs(one.sum() / own.sum() - 1) for one in (sure, blind)])
        patterns.append([np.std(np.log(one / [*true_s.values()])) for one in (sure, own)])
    assert np.mean(levels, axis=0) == pytest.approx([0.03, 0.08], abs=0.015)
    better, before = np.mean(patterns, axis=0)
    assert better < 0.8 * before


def test_a_pass_that_one_device_timed_too_long_is_corrected_and_the_other_pass_is_not():
    shares = {"a:0": 1.0, "b:0": 0.5, "c:0": 0.25}
    found = {name: {"layer": passes(0.1 / share)} for name, share in shares.items()}
    (layer,) = found["c:0"].values()
    found["c:0"] = {"layer": {"1,1": msgspec.structs.replace(layer["1,1"], forward_s=0.5)}}  # instead of 0.4
    devices = [device(name, 1 / share) for name, share in shares.items()]
    times = agreed(found, dict.fromkeys(shares, Errors(0.1, 0.1)), devices, "float32")["c:0"]["layer"]["1,1"]
    assert 0.4 < times.forward_s < 0.45
    assert times.backward_s == pytest.approx(0.8, rel=0.002)


def test_a_layer_without_a_backward_pass_keeps_none():
    found = {
        name: {"frozen": {"1,1": MeasuredTime(forward_s=s, backward_s=0.0)}} for name, s in (("a:0", 1), ("b:0", 3))
    }
    devices = [device("a:0", 1.0), device("b:0", 2.0)]
    both = agreed(found, dict.fromkeys(found, Errors(0.1, 0.1)), devices, "float32")
    assert [known["frozen"]["1,1"].backward_s for known in both.values()] == [0.0, 0.0]
    assert both["b:0"]["frozen"]["1,1"].forward_s < 3


def test_devices_that_answer_late_one_after_the_other_share_one_limit(monkeypatch):
    class TooSlow(Exception):
        pass

    clock = [1000.0]

    def get(answer, timeout):
        clock[0] += min(timeout, 500.0)
        if timeout < 500.0:
            raise TooSlow("no answer")
        return answer

    errors = SimpleNamespace(RayError=TooSlow, RayTaskError=KeyError)
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=get, put=lambda one: one, exceptions=errors))
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    started = {f"h{k}:0": SimpleNamespace(start=SimpleNamespace(remote=list)) for k in range(9)}
    with pytest.raises(MeasurementError, match="not timed on device 'h1:0' within 600 s"):
        timers._ask(started, dict(zip(started, started)), math.inf, "start")
    assert clock[0] == 1600.0


def test_a_timer_that_fails_within_a_limit_leaves_the_others_their_times(monkeypatch, caplog):
    """Such as that of a device with too little memory for a layer."""

    def get(answer, timeout):
        if answer == "out of memory":
            raise KeyError(answer)
        return answer

    errors = SimpleNamespace(RayError=KeyError, RayTaskError=KeyError)
    ray = SimpleNamespace(wait=lambda answers, **_: (answers, []), get=get, exceptions=errors)
    monkeypatch.setitem(sys.modules, "ray", ray)
    answers = {"h0:0": 1.0, "h1:0": "out of memory", "h2:0": 3.0}
    started = {name: SimpleNamespace(turns=SimpleNamespace(remote=lambda s=s: s)) for name, s in answers.items()}
    hosts = dict(zip(started, started))
    end_s = time.monotonic() + 60.0
    assert [timers._ask(started, hosts, end_s, "turns") for _ in range(2)] == [[1.0, None, 3.0]] * 2
    (line,) = caplog.messages
    assert "not timed on device 'h1:0'" in line
    assert "out of memory" in line
    assert "Layer times of 1 device are estimated. To fix: look at" in line
    with pytest.raises(MeasurementError, match="not timed on device 'h1:0'"):
        timers._ask(started, {"h1:0": "h1"}, end_s, "turns")


@pytest.mark.parametrize(("first_s", "waits_s"), [(1.0, 11.0), (15.0, 17.0)])
def test_a_timer_that_starts_late_costs_the_others_half_of_the_limit(monkeypatch, first_s, waits_s):
    """If none has started by then, the first one to start is enough, and those that follow it soon."""
    clock = [0.0]

    def wait(answers, num_returns, timeout):
        in_time = sorted(one for one in answers if one <= clock[0] + timeout)
        clock[0] = max(clock[0], in_time[num_returns - 1]) if len(in_time) >= num_returns else clock[0] + timeout
        return in_time, [one for one in answers if one not in in_time]

    ray = SimpleNamespace(wait=wait, get=lambda answer, timeout: answer, exceptions=SimpleNamespace(RayError=KeyError))
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(timers, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    begun_s = {"h0:0": first_s, "h1:0": 99.0, "h2:0": first_s + 1.0}
    started = {name: SimpleNamespace(start=SimpleNamespace(remote=lambda s=s: s)) for name, s in begun_s.items()}
    hosts = dict(zip(started, started))
    assert [timers._ask(started, hosts, 20.0, "start") for _ in range(3)] == [[first_s, None, first_s + 1.0]] * 3
    assert clock[0] == waits_s
    assert list(hosts) == ["h0:0", "h2:0"]


def test_the_fastest_device_of_a_kind_that_has_started_times_all_layers():
    devices = [device("a:0", 2.0), device("b:0", 1.0), device("c:0", 3.0), device("d:0", 1.0, kind="gpu")]
    for has_started, leaders in (
        ([True] * 4, {"b:0", "d:0"}),
        ([True, None, True, None], {"a:0", "d:0"}),
        ([None] * 4, {"b:0", "d:0"}),
    ):
        assert _leaders(devices, "float32", has_started) == leaders
