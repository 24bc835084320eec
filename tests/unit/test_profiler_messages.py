"""Two ends of a link in one process: what is timed, when it stops, and that every wait ends."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from hwaware.errors import MeasurementError
from hwaware.profiler.messages import _enough
from hwaware.profiler.policy import FULL, MIB, QUICK

LIMIT_S = 10.0
# No time ends the repeats: on a busy machine they would be fewer.
POLICY = QUICK._replace(
    message_bytes=(1024, 65536), repeats=3, large_repeats=2, tiny_repeats=4, message_s=30.0, scattered_s=30.0
)


def both(ends, policy=POLICY, name="a>b"):
    source, target = ends
    with ThreadPoolExecutor(2) as pool:
        answered = pool.submit(target.answer, name, ("127.0.0.1", source.port), LIMIT_S)
        timing = source.time_messages(name, ("127.0.0.1", target.port), policy, LIMIT_S)
        return timing, answered.result(LIMIT_S)


def test_every_size_is_timed_and_every_message_answered(ends):
    timing, answered = both(ends)
    assert len(timing["tiny_s"]) == POLICY.tiny_repeats
    assert [nbytes for nbytes, _ in timing["messages"]] == [1024, 65536]
    timed = POLICY.tiny_repeats + sum(len(seconds) for _, seconds in timing["messages"])
    assert answered > timed, "warm-ups are answered too"
    assert all(second > 0 for _, seconds in timing["messages"] for second in seconds)


def test_no_message_is_faster_than_an_empty_one(ends):
    timing, _ = both(ends)
    latency_s = sorted(timing["tiny_s"])[0] / 2
    assert all(second >= latency_s for _, seconds in timing["messages"] for second in seconds)


def test_the_same_ends_time_again_under_another_name(ends):
    both(ends)
    timing, _ = both(ends[::-1], name="b>a")
    assert len(timing["messages"]) == 2


def test_a_source_that_never_sends_ends_the_answering(ends):
    source, target = ends
    with pytest.raises(MeasurementError, match=r"did not arrive within 0\.1 s"):
        target.answer("a>b", ("127.0.0.1", source.port), 0.1)


def test_a_target_that_never_answers_ends_the_timing(ends):
    source, target = ends
    with pytest.raises(MeasurementError, match=r"did not arrive within 0\.1 s"):
        source.time_messages("a>b", ("127.0.0.1", target.port), POLICY, 0.1)


def messages(rate_bytes_per_s, *sizes):
    return [(size, [size / rate_bytes_per_s]) for size in sizes]


@pytest.mark.parametrize(("mbit", "largest_mib"), [(30, 1), (50, 4), (200, 4), (800, 16)])
def test_messages_grow_until_slow_or_steady(mbit, largest_mib):
    rate = mbit * 1e6 / 8
    sizes = [1024, 65536, MIB, 4 * MIB, 16 * MIB]
    sent = sizes[:1]
    for size in sizes[1:]:
        if _enough(messages(rate, *sent), size, 0.0, FULL._replace(longest_message_s=0.8)):
            break
        sent.append(size)
    assert sent[-1] == largest_mib * MIB


def test_only_a_steady_rate_ends_the_timing():
    policy = FULL._replace(longest_message_s=60.0)
    steady = messages(1e7, MIB, 4 * MIB)
    assert _enough(steady, 16 * MIB, 0.0, policy)
    assert not _enough([steady[0], (4 * MIB, [0.5])], 16 * MIB, 0.0, policy)
    assert not _enough(messages(1e9, MIB, 4 * MIB), 16 * MIB, 0.0, policy), "too short to tell"


def test_a_stall_does_not_end_the_timing_of_small_messages():
    assert not _enough([(1024, [0.05])], 65536, 0.0001, QUICK), "whatever held up the first kilobyte, it was no rate"
    far = [(1024, [0.1]), (65536, [0.1 + 65536 / 1e9])]
    assert not _enough(far, 512 * 1024, 0.1, QUICK), "100 ms of latency do not grow with the message"
    assert _enough([far[0], (65536, [0.2])], 512 * 1024, 0.1, QUICK), "100 ms a 64 KiB do"


def test_only_the_largest_messages_are_repeated(ends, monkeypatch):
    monkeypatch.setattr("hwaware.profiler.messages._scattered", lambda times: True)
    timing, _ = both(ends)
    assert [len(seconds) for _, seconds in timing["messages"]] == [3, 40]


def test_an_end_listens_on_its_ports_and_restarts_on_another(ends):
    end, other = ends
    free = [other.reopen() for _ in range(2)]
    other.reopen()
    end.listen(free)
    assert end.port == free[0]
    assert end.reopen() == free[1]
    assert end.reopen() == free[0]
