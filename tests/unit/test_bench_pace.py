"""Measuring within a time: rounds and starts that fit are taken, those that do not are left out, and that is said."""

from types import SimpleNamespace

import pytest

from hwaware.bench import pace as pace_module
from hwaware.bench.pace import LEAST_ROUNDS, Pace


class Clock:
    def __init__(self, monkeypatch):
        self.now_s = 100.0
        monkeypatch.setattr(pace_module, "time", SimpleNamespace(monotonic=lambda: self.now_s))


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def measured(clock, pace, set_up_s, round_s, most, groups=1, starts=1):
    """The rounds of each part, as `measure_groups` asks for them."""
    found = []
    for start in range(starts):
        if start and not pace.has_time_to_start():
            break
        for _ in range(groups):
            pace.begin()
            clock.now_s += set_up_s
            pace.ready()
            done = 0
            while done < most:
                clock.now_s += round_s
                done += 1
                if not pace.goes_on(done):
                    break
            found.append(done)
    return found


@pytest.mark.parametrize(
    ("limit_s", "expected"),
    [
        (None, [10, 10]),
        (1000, [10, 10]),
        (2 * (20 + 10 * 4), [10, 10]),  # it just fits
        (2 * (20 + 10 * 4) - 1, [9, 10]),  # what is left of a round is the last one's
        (2 * (20 + 5 * 4), [5, 5]),
        (2 * (20 + 5 * 4) - 1, [10]),  # no time for another start: this one gets all of it
        (20 + 7 * 4, [7]),
        (5, [LEAST_ROUNDS]),
    ],
)
def test_two_starts_share_the_time(clock, limit_s, expected):
    deadline_s = None if limit_s is None else clock.now_s + limit_s
    pace = Pace(deadline_s, starts=2, groups=1)
    assert measured(clock, pace, set_up_s=20, round_s=4, most=10, starts=2) == expected


@pytest.mark.parametrize(
    ("limit_s", "expected"),
    [
        (3 * 60, [10, 10, 10]),
        (3 * 60 - 1, [9, 10, 10]),
        (3 * 20 + 3 * 6 * 4, [6, 6, 6]),
        (30, [5, 5, 5]),  # every mapping is measured, however late it gets
    ],
)
def test_groups_of_one_start_share_the_time(clock, limit_s, expected):
    pace = Pace(clock.now_s + limit_s, starts=1, groups=3)
    assert measured(clock, pace, set_up_s=20, round_s=4, most=10, groups=3) == expected


def test_a_slower_second_start_takes_fewer_rounds(clock):
    start_s = clock.now_s
    pace = Pace(start_s + 2 * (20 + 10 * 4), starts=2, groups=1)
    pace.begin()
    clock.now_s += 20
    pace.ready()
    assert measured_rounds(clock, pace, 4, 10) == 10
    assert pace.has_time_to_start()
    pace.begin()
    clock.now_s += 30
    pace.ready()
    assert measured_rounds(clock, pace, 4, 10) == 7
    assert clock.now_s <= start_s + 120


def measured_rounds(clock, pace, round_s, most):
    for done in range(1, most + 1):
        clock.now_s += round_s
        if not pace.goes_on(done):
            return done
    return most
