"""Record when a worker ran its programs, and when its messages left and arrived.

Recording is off by default, and cheap while it is on. A worker does not wait for the programs that it starts. So a
separate thread waits for each program's token, and notes the end. A device runs one program after another. So a program
begins when the worker started it or when the one before it ended, whichever is later.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

from hwaware.errors import MeasurementError

_DRAIN_LIMIT_S = 60.0
# The recorder keeps at most so many messages without a task, such as those of reductions.
_MOST_OPEN = 10_000


class Recording(NamedTuple):
    """All that one worker recorded; times [s] are of its own `time.monotonic`.

    Attributes:
        programs: (program's number, start_s, end_s) in the order in which the programs ran.
        sends: Message's key -> (task's number, when the message began to leave).
        receives: Message's key -> (task's number, when the last byte of the message arrived).
    """

    programs: Tuple[Tuple[Any, float, float], ...]
    sends: Dict[str, Tuple[int, float]]
    receives: Dict[str, Tuple[int, float]]


class Recorder:
    """Records programs and messages while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self._tokens: Optional[queue.SimpleQueue[Optional[Tuple[Any, float, Any]]]] = None
        self._thread: Optional[threading.Thread] = None
        self._programs: List[Tuple[Any, float, float]] = []
        self._tasks: Dict[str, int] = {}
        self._left: Dict[str, float] = {}
        self._arrived: Dict[str, float] = {}

    def start(self) -> None:
        """Forget what was recorded and record from now on."""
        if self._tokens is not None:
            self._tokens.put(None)  # the earlier thread ends
        self._programs, self._tasks, self._left, self._arrived = [], {}, {}, {}
        self._tokens = queue.SimpleQueue()  # in C, because its work takes from the device's share
        own = self._tokens, self._programs  # an earlier thread may still end
        self._thread = threading.Thread(target=self._watch, args=own, name="hwaware-record", daemon=True)
        self._thread.start()
        self.is_on = True

    def stop(self) -> Recording:
        """Stop recording and return what was recorded.

        Raises:
            MeasurementError: Recording was not on, or a program did not end within a minute.
        """
        if self._tokens is None or self._thread is None:
            raise MeasurementError("This worker was not recording.", "start the recording before the step.")
        self.is_on = False
        self._tokens.put(None)
        self._thread.join(_DRAIN_LIMIT_S)
        if self._thread.is_alive():
            raise MeasurementError(
                f"A program did not end within {_DRAIN_LIMIT_S:g} s.", "stop recording after the step has ended."
            )
        self._tokens = self._thread = None
        return Recording(tuple(self._programs), _joined(self._tasks, self._left), _joined(self._tasks, self._arrived))

    def take(self) -> Recording:
        """Return what was recorded since the last time, and forget it; recording goes on."""
        count = len(self._programs)  # the thread only appends
        programs = tuple(self._programs[:count])
        del self._programs[:count]
        return Recording(programs, self._taken(self._left), self._taken(self._arrived))

    def _taken(self, times: Dict[str, float]) -> Dict[str, Tuple[int, float]]:
        found = {key: (self._tasks.pop(key), times.pop(key)) for key in list(times) if key in self._tasks}
        for key in list(times)[:-_MOST_OPEN]:
            del times[key]
        return found

    def started(self, program: Any, start_s: float, token: Any) -> None:
        """Note that a program was started; `token.block_until_ready()` returns when the program has ended."""
        if self.is_on and self._tokens is not None:
            self._tokens.put((program, start_s, token))

    def task(self, key: str, task: int) -> None:
        """Note that the message `key` belongs to the send or receive task of that number."""
        if self.is_on:
            self._tasks[key] = task

    def sent(self, key: str, start_s: float) -> None:
        """Note that the message `key` began to leave at `start_s`."""
        if self.is_on:
            self._left[key] = start_s

    def arrived(self, key: str, end_s: float) -> None:
        """Note that the last byte of the message `key` arrived at `end_s`."""
        if self.is_on:
            self._arrived[key] = end_s

    def _watch(self, tokens: queue.SimpleQueue[Optional[Tuple[Any, float, Any]]], programs: List[Any]) -> None:
        last_end_s = 0.0
        while True:
            item = tokens.get()
            if item is None:
                return
            program, start_s, token = item
            token.block_until_ready()
            end_s = time.monotonic()
            programs.append((program, max(start_s, min(last_end_s, end_s)), end_s))
            last_end_s = end_s


def _joined(tasks: Dict[str, int], times: Dict[str, float]) -> Dict[str, Tuple[int, float]]:
    return {key: (tasks[key], time_s) for key, time_s in times.items() if key in tasks}
