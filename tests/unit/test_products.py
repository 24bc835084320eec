"""The check that a device computes rightly, and how long it is timed."""

import random

import numpy
import pytest

from hwaware.profiler import products
from hwaware.profiler.products import _operand, _terms


@pytest.mark.parametrize("lead", [(), (3,)])
def test_the_terms_add_up_to_the_product_s_first_element(lead):
    left, right = _operand((*lead, 4, 5), numpy.float32, 0), _operand((*lead, 5, 6), numpy.float32, 1)
    assert _terms(left, right).sum() == pytest.approx((left @ right).ravel()[0], rel=1e-5)


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
