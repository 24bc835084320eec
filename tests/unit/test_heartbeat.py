"""Check when a silent worker counts as stopped: never while its process runs, always soon once it is stopped."""

import pytest

from hwaware.runtime import heartbeat
from hwaware.runtime.heartbeat import ASK_AFTER, FROZEN_AFTER, LOOK_AFTER, Heartbeat, Silence, Subject

POLL_S, LIMIT_S = 0.5, 30.0


class Worker:
    """A worker that answers so many looks after a question, or never; looks at its process find `state`."""

    def __init__(self, answers_after=0, state="R", look_takes=4):
        self.answers_after, self.state, self.look_takes = answers_after, state, look_takes
        self.questions = self.looks = 0

    def ask(self):
        self.questions += 1
        return self, "question", self.questions

    def look(self):
        self.looks += 1
        return self, "look", self.looks


class Time:
    """Counts looks since each reference was first asked for."""

    def __init__(self, *workers):
        self.seen = {}
        self.beating = Heartbeat([Subject(one.ask, one.look) for one in workers], self.done, lambda one: one[0].state)

    def done(self, references):
        for one in references:
            self.seen[one] = self.seen.get(one, -1) + 1
        return [one for one in references if self.seen[one] >= self.needed(one)]

    @staticmethod
    def needed(reference):
        worker, kind, _ = reference
        needed = worker.answers_after if kind == "question" else worker.look_takes
        return float("inf") if needed is None else needed

    def run(self, beats):
        """The first silence, and after how many beats."""
        for beat in range(1, beats + 1):
            found = self.beating.beat()
            if found is not None:
                return found, beat
        return None, beats


def test_a_stopped_process_is_named_in_time():
    time = Time(Worker(), Worker(answers_after=None, state="T", look_takes=10))
    silence, beats = time.run(200)
    assert silence == Silence(1, is_stopped=True)
    assert beats * POLL_S < LIMIT_S - 10, "the causes are asked for afterwards"


@pytest.mark.parametrize("state", ["R", "S", "D", "t", "", None])
def test_a_worker_that_computes_for_an_hour_without_an_answer_is_left_alone(state):
    """A long compilation that keeps the interpreter, a busy disk, a debugger, a host without /proc."""
    worker = Worker(answers_after=None, state=state)
    assert Time(worker).run(7200) == (None, 7200)
    assert worker.looks < (20 if state else 2000), "looks become rarer"


def test_a_slow_answer_is_an_answer():
    worker = Worker(answers_after=LOOK_AFTER - 2, state="T")
    assert Time(worker).run(1000) == (None, 1000)
    assert worker.looks == 0
    assert worker.questions > 20


def test_a_short_wait_asks_nothing():
    worker = Worker()
    Time(worker).run(ASK_AFTER - 1)
    assert worker.questions == 0


def test_a_host_on_which_nothing_runs_is_named_after_a_minute():
    silence, beats = Time(Worker(answers_after=None, look_takes=None)).run(1000)
    assert silence == Silence(0, is_stopped=False)
    assert FROZEN_AFTER <= beats <= FROZEN_AFTER + ASK_AFTER + LOOK_AFTER + 2


def test_a_process_is_seen_stopped_and_gone():
    import os
    import signal
    import subprocess
    import time

    from hwaware.runtime.heartbeat import GONE, STOPPED, end_process, process_state

    with subprocess.Popen(["sleep", "60"]) as process:
        os.kill(process.pid, signal.SIGSTOP)
        end_s = time.monotonic() + 10
        while process_state(process.pid) != STOPPED and time.monotonic() < end_s:
            time.sleep(0.01)
        assert process_state(process.pid) == STOPPED
        end_process(process.pid)  # though it cannot run
        process.wait(timeout=10)
    assert process_state(process.pid) == GONE
    end_process(process.pid)
    assert heartbeat.STOPPED == STOPPED
