"""The check that a device computes rightly, how long it is timed, and what it gains by waiting."""

import contextlib
import random
import statistics

import numpy
import pytest
from builders import seeds

from hwaware.dtypes import MEASURED
from hwaware.errors import MeasurementError
from hwaware.profiler import FULL, products, rest
from hwaware.profiler.products import _operand, _terms
from hwaware.profiler.rest import head_starts_s, rested_bursts


@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_terms_add_up_to_the_product_s_first_elements(lead):
    left, right = _operand((*lead, 4, 5), numpy.float32, 0), _operand((*lead, 5, 6), numpy.float32, 1)
    assert _terms(left, right).sum(axis=0) == pytest.approx((left @ right).ravel()[:6], rel=1e-5)


def operands(dtype, edge):
    """The first row and the first columns of the profiler's operands; the check reads no others."""
    dtype = pytest.importorskip("ml_dtypes").finfo(dtype).dtype
    numbers = _operand((products._NUMBERS,), dtype, 1)
    columns = numpy.add.outer(edge * numpy.arange(edge), numpy.arange(products._CANDIDATES))
    return _operand((1, edge), dtype, 0), numbers[columns % products._NUMBERS]


def rounded(left, right):
    return (left.astype(numpy.float64) @ right.astype(numpy.float64)).astype(left.dtype)


# The check must also suit types of 3 and of 2 bits.
TYPES = list(dict.fromkeys([*MEASURED, "float8_e4m3fn", "float8_e5m2"]))


@pytest.mark.parametrize("dtype", TYPES)
def test_an_exactly_rounded_product_passes_the_check(dtype):
    for edge in (edge for edge in FULL.sizes if edge <= 512):
        left, right = operands(dtype, edge)
        products._require_right(dtype, rounded(left, right), left, right)


@pytest.mark.parametrize("dtype", TYPES)
def test_the_check_accepts_the_largest_error_of_rounding_and_no_error_of_six_tenths(dtype):
    """A matrix of one column has one term, so that the sum of the absolute values is the element itself."""
    left, right = operands(dtype, 1)
    (exact,) = _terms(left, right).sum(axis=0)[:1]
    right = right[:, :1]
    bits = pytest.importorskip("ml_dtypes").finfo(dtype).nmant
    for error in (2.0 ** -(bits + 1), -(2.0 ** -(bits + 1))):
        products._require_right(dtype, numpy.array([exact * (1 + error)]), left, right)
    for error in (0.6, -0.6):
        with pytest.raises(MeasurementError, match=f"A product of {dtype} came out as "):
            products._require_right(dtype, numpy.array([exact * (1 + error)]), left, right)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("edge", FULL.sizes)
def test_zero_never_passes_the_check(dtype, edge):
    left, right = operands(dtype, edge)
    with pytest.raises(MeasurementError, match=f"A product of {dtype} came out as 0, expected "):
        products._require_right(dtype, numpy.zeros((1, products._CANDIDATES)), left, right)


@pytest.mark.parametrize(
    ("dtype", "fault"),
    [("float64", "a product of float64 in float32, expected float64"), ("int8", "int8 is no floating-point type")],
)
def test_a_data_type_that_the_check_cannot_judge_is_refused(dtype, fault):
    jax = pytest.importorskip("jax")
    compiler = products.Products(jax.devices("cpu")[0], contextlib.nullcontext)
    with pytest.raises(MeasurementError, match=fault):
        compiler.prepare_shape(dtype, products.square(256))


class Quota:
    """A process under a quota, with its clocks: `quota_s` of processor time in every `period_s`, `burst_s` saved up."""

    def __init__(self, quota_s, period_s, phase_s):
        self.quota_s, self.period_s, self.burst_s = quota_s, period_s, 1e-3
        self.now_s, self.processor_s, self.left_s = phase_s, 0.0, quota_s + self.burst_s

    def perf_counter(self):
        return self.now_s

    def process_time(self):
        return self.processor_s

    def work(self, seconds):
        """Compute for so long; without a quota left, wait for the next period."""
        while seconds > 1e-12:
            next_s = (int(self.now_s / self.period_s + 1e-9) + 1) * self.period_s
            part = min(seconds, self.left_s, next_s - self.now_s)
            self.now_s, self.processor_s = self.now_s + part, self.processor_s + part
            seconds, self.left_s = seconds - part, self.left_s - part
            if self.left_s <= 1e-12 or self.now_s >= next_s - 1e-12:
                self.now_s = next_s
                self.left_s = self.quota_s


class Done:
    def block_until_ready(self):
        pass


def seen_share(monkeypatch, quota_s, period_s, call_s, window_s, aligned):
    """Processor time over wall time of two hundred windows that begin anywhere in a period, after a rest."""
    rng = random.Random(1)
    processor_s = wall_s = 0.0
    for _ in range(200):
        clock = Quota(quota_s, period_s, rng.uniform(0, period_s))
        monkeypatch.setattr(products, "time", clock)

        def call(clock=clock):  # no two calls are alike
            clock.work(call_s * rng.uniform(0.5, 1.5))
            return Done()

        products.back_to_back(call, products._LEAD_IN_S, call_s * period_s / quota_s, aligned)
        before_s = clock.processor_s
        _, laps = products.back_to_back(call, window_s, call_s * period_s / quota_s, aligned)
        processor_s, wall_s = processor_s + clock.processor_s - before_s, wall_s + sum(laps)
    return processor_s / wall_s


@pytest.mark.parametrize(("quota_s", "period_s"), [(4e-3, 20e-3), (4e-3, 10e-3), (8e-3, 10e-3), (4e-3, 40e-3)])
@pytest.mark.parametrize("call_s", [1e-4, 1.3e-3, 3e-3, 11e-3])
def test_windows_hold_whole_periods_of_a_quota(monkeypatch, quota_s, period_s, call_s):
    share = quota_s / period_s
    assert seen_share(monkeypatch, quota_s, period_s, call_s, 0.12, True) == pytest.approx(share, rel=0.015)


def test_windows_that_end_anywhere_get_too_much(monkeypatch):
    assert seen_share(monkeypatch, 4e-3, 40e-3, 1.3e-3, 0.12, False) > 1.03 * 0.1


def test_without_a_quota_a_window_ends_soon(monkeypatch):
    clock = Quota(1.0, 1.0, 0.0)
    monkeypatch.setattr(products, "time", clock)
    calls, laps = products.back_to_back(lambda: clock.work(5e-3) or Done(), 0.12, 5e-3, True)
    assert sum(laps) <= 0.12 + products._LONGEST_PERIOD_S + 0.02
    assert calls == pytest.approx(sum(laps) / 5e-3)


class Sleeper(Quota):
    """A process under a quota that can sleep; it begins a new period's quota when it wakes in one."""

    def sleep(self, seconds):
        periods = int(self.now_s / self.period_s)
        self.now_s += seconds
        if int(self.now_s / self.period_s) > periods:
            self.left_s = self.quota_s + self.burst_s


def found_s(monkeypatch, quota_s, period_s, call_s, gain=lambda rested: 1.0):
    """The head start that forty bursts show; `gain` is by how much calls take longer, in the first 20 ms or not."""
    rng = random.Random(1)
    clock = Sleeper(quota_s, period_s, rng.uniform(0, period_s))
    monkeypatch.setattr(rest, "time", clock)
    woken_s = [0.0]

    def call():
        clock.work(call_s * rng.uniform(0.9, 1.1) * gain(clock.now_s - woken_s[0] < rest._UNIT_S / 2))
        return Done()

    slept = clock.sleep

    def sleep(seconds):
        slept(seconds * rng.uniform(1.0, 1.4))  # nobody wakes up in time
        woken_s[0] = clock.now_s

    clock.sleep = sleep
    bursts = rested_bursts(call, 40)
    return head_starts_s([("kind", bursts)]).get("kind")


@pytest.mark.parametrize(("quota_s", "period_s"), [(4e-3, 20e-3), (4e-3, 10e-3), (4.5e-3, 10e-3)])
@pytest.mark.parametrize("call_s", [1e-4, 1.3e-3])
def test_a_quota_gives_back_most_of_a_short_pause(monkeypatch, quota_s, period_s, call_s):
    """And a little more where the burst is saved up too, or work ends while a quota is left."""
    assert 0.4 * rest._PAUSE_S < found_s(monkeypatch, quota_s, period_s, call_s) < rest._PAUSE_S + period_s / 2


def test_without_a_quota_there_is_none(monkeypatch):
    assert found_s(monkeypatch, 1.0, 1.0, 1e-3) is None


def test_a_device_that_is_slower_after_a_pause_has_none(monkeypatch):
    assert found_s(monkeypatch, 1.0, 1.0, 1e-3, lambda rested: 1.2 if rested else 1.0) is None


def test_a_device_that_is_faster_after_a_pause_has_one(monkeypatch):
    ahead_s = found_s(monkeypatch, 1.0, 1.0, 1e-3, lambda rested: 0.9 if rested else 1.0)
    assert ahead_s == pytest.approx(2e-3 / 0.9, rel=0.15), "20 ms at 10 / 9 of the pace"


def test_noise_alone_is_hardly_ever_a_head_start():
    rng = random.Random(2)
    bursts = ([[rng.gauss(0.04, 0.002) for _ in range(3)] for _ in range(24)] for _ in seeds(2000))
    found = [head_starts_s([("kind", each)]) for each in bursts]
    assert statistics.mean("kind" in one for one in found) < 0.04


def test_devices_of_a_kind_count_together():
    bursts = [[0.034, 0.040, 0.040]] * 3, [[0.038, 0.040, 0.040]] * 7, [[0.020, 0.040, 0.040]] * 4
    found = head_starts_s(zip(("one", "one", "other"), bursts))
    assert found == pytest.approx({"one": (2 * 0.006 + 6 * 0.002) / 8, "other": 0.02}), "a tenth on either side is out"


def test_the_length_of_a_unit_hardly_matters(monkeypatch):
    """Calls of 0.4 to 3.4 ms end anywhere in a quota's period."""
    found = [found_s(monkeypatch, 4e-3, 13.3e-3, call_s) for call_s in numpy.arange(4, 36, 3) * 1e-4]
    assert statistics.pstdev(found) < 0.25 * statistics.mean(found)
