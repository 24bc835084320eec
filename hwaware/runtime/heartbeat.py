"""Notice a worker whose process is stopped: it keeps its connections, computes nothing and answers nothing.

While the driver waits, it asks every worker now and then for a sign of life. A thread of the worker answers, also while
the worker compiles or computes. If a worker stays silent, Ray looks at its process from a process beside it. So a
worker that is only slow never counts as stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

# The driver looks every half a second. After so many looks, it asks a worker again, or has a silent worker's process
# looked at. These count looks, not seconds, because the driver itself may have been stopped in between.
ASK_AFTER = 8
LOOK_AFTER = 16
# If neither the worker nor a new process beside it does anything for so many looks, their whole host is frozen.
FROZEN_AFTER = 120
# The letter in /proc/PID/stat of a process that SIGSTOP, SIGTSTP or a job scheduler has stopped (man 5 proc).
STOPPED = "T"
GONE = ""


class Silence(NamedTuple):
    """A worker that will not answer any more.

    Attributes:
        number: Its place among the workers.
        is_stopped: True if its process is stopped; False if its whole host does nothing.
    """

    number: int
    is_stopped: bool


class Subject(NamedTuple):
    """A worker that the driver asks.

    Attributes:
        ask: Asks the worker for a sign of life, and returns Ray's reference to the answer.
        look: Calls `process_state` beside the worker, and returns Ray's reference to the result.
    """

    ask: Any
    look: Any


class Heartbeat:
    """The driver's questions to the workers of one program, and the answers so far.

    Args:
        subjects: The workers.
        is_done: Returns, for a list of Ray's references, those that have arrived.
        value: Returns the value of a reference that has arrived; None without a value.
    """

    def __init__(self, subjects: Sequence[Subject], is_done: Any, value: Any) -> None:
        self._subjects = list(subjects)
        self._is_done = is_done
        self._value = value
        self._questions: Dict[int, Any] = {}
        self._looks: Dict[int, Any] = {}
        self._waited: List[int] = [0] * len(self._subjects)
        # Looks at a worker that is alive and silent become rarer.
        self._look_after: List[int] = [LOOK_AFTER] * len(self._subjects)

    def beat(self) -> Optional[Silence]:
        """Look at all workers once, half a second after the last time; return one that will not answer any more."""
        answered = set(self._is_done(list(self._questions.values())))
        for number, subject in enumerate(self._subjects):
            self._waited[number] += 1
            question = self._questions.get(number)
            if question is None:
                if self._waited[number] >= ASK_AFTER:
                    self._questions[number] = subject.ask()
                    self._waited[number] = 0
            elif question in answered:
                self._forget(number)
                self._look_after[number] = LOOK_AFTER
            elif self._waited[number] >= self._look_after[number]:
                found = self._look(number)
                if found is not None:
                    return found
        return None

    def _forget(self, number: int) -> None:
        self._questions.pop(number, None)
        self._looks.pop(number, None)
        self._waited[number] = 0

    def _look(self, number: int) -> Optional[Silence]:
        look = self._looks.get(number)
        if look is None:
            self._looks[number] = self._subjects[number].look()
        elif self._is_done([look]):
            state = self._value(look)
            if state == STOPPED:
                return Silence(number, True)
            if state not in (None, GONE):  # it lives, and is busy
                self._look_after[number] *= 2
            self._forget(number)
        elif self._waited[number] >= self._look_after[number] + FROZEN_AFTER:
            return Silence(number, False)
        return None


def process_state(pid: int) -> str:
    """Return the letter of the process's state; empty if it has ended, or if this system has no /proc."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return stream.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return GONE


def end_process(pid: int) -> None:
    """Kill the process, which need not be able to run; do nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def on_host(address: str, function: Any, *arguments: Any) -> Any:
    """Let Ray call a function on the host with this address, in a process of its own; return Ray's reference."""
    import ray

    node = {f"node:{address}": 0.001}
    return ray.remote(num_cpus=0, max_retries=0, resources=node)(function).remote(*arguments)
