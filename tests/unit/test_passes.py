"""What a pass takes beside its program, and a sum beside the network, from measured steps."""

from __future__ import annotations

import contextlib
import logging

import pytest
from builders import cluster, device, link, plan, with_devices, workload

from hwaware.bench.harness import StepTimes
from hwaware.calibration import runtime_part as passes
from hwaware.costs import evaluate
from hwaware.costs.pipeline import one_f_one_b_s
from hwaware.errors import MeasurementError
from hwaware.timeline import Event, Timeline


def on_one_host(*seconds):
    return cluster([device(f"a:{k}", one, kind=str(one)) for k, one in enumerate(seconds)])


class Stepping:
    """Stand for a program whose steps take given times."""

    def __init__(self, timed_step):
        self.timed_step = timed_step

    def wait_until_compiled(self):
        pass

    def close(self):
        pass


def test_passes_explain_the_measured_step_by_device_speed():
    pytest.importorskip("jax")
    expected = (0.002, 0.008, 0.004)
    nothing = [0.0, 0.0]
    step = one_f_one_b_s(expected, expected, nothing, nothing, passes.NUM_MICROBATCHES)[0] + expected[0]
    walls = iter((*(9.0 for _ in range(passes._WARMUP)), *(step + late for late in (0.01, 0.02, 0.9) * 3)))
    run = Stepping(lambda: StepTimes(next(walls), step))
    found = passes.with_passes(on_one_host(0.1, 0.4, 0.2), lambda *_: run)
    assert [device.pass_s for device in found.devices] == pytest.approx(expected)
    assert found.driver_s == pytest.approx(0.02)


def test_without_float32_another_type_that_all_devices_have_tells_their_speed():
    pytest.importorskip("jax")
    run = Stepping(lambda: StepTimes(1.0, 1.0))
    profile = with_devices(on_one_host(0.1, 0.3), throughput=lambda d: {"bfloat16": d.throughput["float32"]})
    first, second = passes.with_passes(profile, lambda *_: run).devices
    assert second.pass_s == pytest.approx(3 * first.pass_s)


def test_devices_without_a_common_type_are_refused():
    types = {"a:0": "float32", "a:1": "float16"}
    profile = with_devices(on_one_host(0.1, 0.2), throughput=lambda d: {types[d.id]: d.throughput["float32"]})
    with pytest.raises(MeasurementError, match=r"no data type in common: found float16, float32 on some.*To fix: "):
        passes.with_passes(profile, None)


def hosts(rates, **more):
    """Build one device on each of three hosts, the middle one half as fast; rates are those of each pair's link."""
    devices = [device(f"{host}:0", 0.2 if host == "b" else 0.1, kind=host, **more) for host in "abc"]
    return cluster(devices, [link(*pair, rate) for pair, rate in rates.items()])


def test_sums_are_measured_over_the_fastest_link_there_and_back(monkeypatch):
    pytest.importorskip("jax")  # which version decides whether anything can be summed
    asked = []

    def summed(_, pair, start):
        asked.append(pair)
        return 3e6, 0.03

    monkeypatch.setattr(passes, "_summed", summed)
    found = passes.with_sums(hosts({"ab": 1e8, "ac": 9e8, "ca": 1e7, "bc": 2e8}), None)
    assert asked == [("b:0", "c:0")]
    # 100 MB/s of the slower one of them: the other devices hand on twice as much.
    assert [device.sum_bytes_per_s for device in found.devices] == pytest.approx([2e8, 1e8, 2e8])


class Summing:
    """Stand for a program whose two replicas sum gradients for one second."""

    workload = workload(4, 2, parameter_bytes=4e6)

    def wait_until_compiled(self):
        pass

    def step(self):
        return 1.0

    @contextlib.contextmanager
    def recorded(self, timelines):
        yield
        event = Event(kind="update", stage=0, start_s=0.0, end_s=1.0)
        timelines.append(
            Timeline(step_s=1.0, schedule="1f1b", num_microbatches=2, devices=(("a:0",),), events=(event,))
        )

    def close(self):
        pass


def test_sums_are_measured_without_float32_too():
    pytest.importorskip("jax")
    profile = hosts({"ab": 1e8, "ac": 1e8, "bc": 1e8})
    short = with_devices(profile, throughput=lambda d: {"bfloat16": d.throughput["float32"]})
    found, expected = (passes._summed(one, ("a:0", "c:0"), lambda *_: Summing()) for one in (short, profile))
    assert found == expected


def test_sums_measured_again_for_a_new_device_come_out_alike():
    pytest.importorskip("jax")
    whole = passes.with_sums(hosts({"ab": 1e8, "ac": 1e8, "bc": 1e8}), lambda *_: Summing())
    resumed = with_devices(whole, sum_bytes_per_s=lambda d: None if d.id == "b:0" else d.sum_bytes_per_s)
    assert passes.with_sums(resumed, lambda *_: Summing()) == whole


def test_sums_are_left_out_where_the_network_hides_them(monkeypatch):
    pytest.importorskip("jax")
    one = on_one_host(0.1, 0.2)
    assert passes.with_sums(one, None) is one
    monkeypatch.setattr(passes, "_summed", lambda *_: (3e6, -0.001))
    three = hosts({"ab": 1e8, "ac": 1e8, "bc": 1e8})
    assert passes.with_sums(three, None) is three


def test_a_sum_adds_the_slower_replicas_time_to_the_network():
    def price(*rates):
        by_host = dict(zip("abc", rates))
        profile = hosts({"ab": 1e8, "ac": 1e8, "bc": 1e8})
        profile = with_devices(profile, sum_bytes_per_s=lambda each: by_host[each.host])
        found = evaluate(plan((0, 0, "a:0", "b:0", "c:0")), workload(1, 6, parameter_bytes=3e6), profile)
        return found.stages[0].gradient_sync_s

    ring_s = 4 * 1e6 / 1e8  # 2 (N - 1) rounds of a third of 3 MB
    assert price(None, None, None) == pytest.approx(ring_s)
    assert price(None, 1e8, 2e8) == pytest.approx(ring_s + 4 / 3 * 3e6 / 1e8)


def test_alpa_s_warning_of_few_operations_is_for_others(caplog):
    log = logging.getLogger("alpa.pipeline_parallel.layer_construction")
    before = log.level
    with passes._few_operations():
        log.warning("too few")
    log.warning("of somebody's model")
    assert caplog.messages == ["of somebody's model"]
    assert log.level == before
