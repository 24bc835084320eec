"""What workers record becomes one timeline: programs one after another, messages from end to end, one clock."""

import threading
import time

import pytest

from hwaware.errors import MeasurementError
from hwaware.runtime.recorder import Recorder, Recording
from hwaware.runtime.step_recorder import Measured, message_events, program_events, program_kinds


class Token:
    """A program that ends when it is told to."""

    def __init__(self):
        self._event = threading.Event()

    def end(self):
        self._event.set()

    def block_until_ready(self):
        assert self._event.wait(10)


def test_a_program_begins_when_the_one_before_it_has_ended():
    recorder, tokens = Recorder(), (Token(), Token())
    recorder.start()
    for name, token in zip("ab", tokens):
        recorder.started(name, time.monotonic(), token)
    time.sleep(0.05)
    for token in tokens:
        token.end()
        time.sleep(0.05)
    (first, start_a, end_a), (second, start_b, end_b) = recorder.stop().programs
    assert (first, second) == ("a", "b")
    assert end_a - start_a >= 0.05
    assert start_b == end_a
    assert end_b - start_b >= 0.04


def test_a_second_start_forgets_programs_of_the_first():
    recorder, (early, late) = Recorder(), (Token(), Token())
    recorder.start()
    recorder.started("early", time.monotonic(), early)
    recorder.start()
    recorder.started("late", time.monotonic(), late)
    early.end()
    time.sleep(0.05)
    late.end()
    assert [name for name, _, _ in recorder.stop().programs] == ["late"]


def test_nothing_is_recorded_while_it_is_off():
    recorder = Recorder()
    recorder.started("a", 0.0, Token())  # would wait for ever
    recorder.task("k", 1)
    recorder.sent("k", 1.0)
    recorder.start()
    assert recorder.stop() == Recording((), {}, {})
    with pytest.raises(MeasurementError, match="was not recording"):
        recorder.stop()


def test_messages_without_a_task_are_not_the_schedules():
    recorder = Recorder()
    recorder.start()
    recorder.sent("known", 1.0)
    recorder.sent("reduction", 2.0)
    recorder.task("known", 7)
    assert recorder.stop().sends == {"known": (7, 1.0)}


def test_two_workers_on_one_clock():
    kinds = program_kinds(["f0", "f1", "b1", "b0"], 2)
    first = Recording((("f0", 1.0, 2.0), ("f0", 2.0, 3.0), ("zeros", 0.0, 1.0)), {"g|0.0>1.0#5": (9, 2.0)}, {})
    second = Recording((("f1", 12.5, 13.0),), {}, {"g|0.0>1.0#5": (9, 12.25)})
    measured = [Measured(0, first, 100.0), Measured(1, second, 90.0)]
    programs = list(program_events(measured, kinds))
    assert [(e.kind, e.stage, e.microbatch, e.start_s) for e in programs] == [
        ("forward", 0, 0, 101.0),
        ("forward", 0, 1, 102.0),
        ("forward", 1, 0, 102.5),
    ]
    (message,) = message_events(measured, num_microbatches=1)
    assert (message.kind, message.stage, message.microbatch) == ("activation", 0, 0)
    assert (message.start_s, message.end_s) == (102.0, 102.25)


def test_messages_are_numbered_by_channel_in_their_order():
    keys = [f"g|1.0>0.0#{number}" for number in (11, 9, 10)]
    sender = Recording((), {key: (4, float(key[-2:].strip("#"))) for key in keys}, {})
    receiver = Recording((), {}, dict.fromkeys(keys, (4, 20.0)))
    events = list(message_events([Measured(0, receiver, 0.0), Measured(1, sender, 0.0)], 3))
    assert [(e.kind, e.microbatch, e.start_s) for e in events] == [
        ("gradient", 0, 9.0),
        ("gradient", 1, 10.0),
        ("gradient", 2, 11.0),
    ]
