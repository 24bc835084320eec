"""Rates of devices under a CPU quota, on a clock that the test turns."""

from types import SimpleNamespace

import pytest

from hwaware.profiler import products

SHARE = 0.2
PERIOD_US, CALL_US = 20_000, 200
CALL_S = CALL_US / 1e6


class QuotaClock:
    """A processor that may run for `SHARE` of each period, and the time that work on it takes."""

    def __init__(self, phase_us):
        self.now_us = phase_us

    def now_s(self):
        return self.now_us / 1e6

    def work(self, amount_us):
        while amount_us:
            left_us = max(0, round(SHARE * PERIOD_US) - self.now_us % PERIOD_US)
            if not left_us:  # waits for the next period
                self.now_us += PERIOD_US - self.now_us % PERIOD_US
            run_us = min(amount_us, left_us)
            self.now_us += run_us
            amount_us -= run_us

    def call(self):
        self.work(CALL_US)
        return self

    def block_until_ready(self):
        return self


@pytest.mark.parametrize("phase_us", [0, 1000, 3500])
@pytest.mark.parametrize("minimum_s", [0.2, 0.205, 0.211, 0.217])
def test_a_rate_under_a_quota_is_that_of_whole_periods(monkeypatch, phase_us, minimum_s):
    clock = QuotaClock(phase_us)
    monkeypatch.setattr(products, "time", SimpleNamespace(perf_counter=clock.now_s))
    products.back_to_back(clock.call, products._LEAD_IN_S, CALL_S / SHARE)
    calls, laps = products.back_to_back(clock.call, minimum_s, CALL_S / SHARE)
    assert calls * CALL_S / sum(laps) == pytest.approx(SHARE, rel=0.03)
    assert minimum_s <= sum(laps) <= minimum_s + products._LONGEST_PERIOD_S + PERIOD_US / 1e6


def test_without_pauses_no_lap_is_added(monkeypatch):
    clock = QuotaClock(0)
    clock.work = lambda amount_us: setattr(clock, "now_us", clock.now_us + amount_us)
    monkeypatch.setattr(products, "time", SimpleNamespace(perf_counter=clock.now_s))
    calls, laps = products.back_to_back(clock.call, 0.2, CALL_S)
    assert 0.2 <= sum(laps) < 0.2 + 1.5 * products._BATCH_S
    assert calls * CALL_S == pytest.approx(sum(laps))
