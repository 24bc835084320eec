"""Turn what the workers of a running training record into times of its devices and links, step by step."""

from __future__ import annotations

import bisect
import collections
import statistics
from typing import Any, DefaultDict, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from hwaware.runtime.recorder import Recording

# This part of the shortest pass counts with every message, so that noise of short messages, which cost nothing, is
# no change.
_OF_A_PASS = 0.1
# The first steps, in which passes take their usual time once workers have compiled.
_USUAL_STEPS = 3


class Watched(NamedTuple):
    """A worker whose times are watched.

    Attributes:
        subject: Ids of its devices, joined by "+".
        host: Name of its host.
        passes: Programs that it runs once a microbatch: forward and backward.
    """

    subject: str
    host: str
    passes: Tuple[Any, ...]


class StepTimes(NamedTuple):
    """Times of one step.

    Attributes:
        seconds: Subject of a worker -> time of its passes. "A<->B", two hosts -> median time of a message there, and of
            one back, and a fifth of the shortest pass.
        step_s: From the begin of this step's first pass to that of the next step's.
    """

    seconds: Dict[str, float]
    step_s: float


class Pace:
    """Collect recordings, and return the steps that they complete.

    A pass that runs as the n-th of its program belongs to step n // microbatches. A message belongs to the step that
    its sender was at, as stages may exchange several arrays for each microbatch. The clocks of two workers differ. In
    the time of a message there and one back, the difference cancels. So a link counts in both directions together.

    Args:
        workers: In pipeline order.
        num_microbatches: Per step.

    Example:
        >>> pace = Pace([Watched("a:0", "a", ("f", "b"))], num_microbatches=1)
        >>> for step in range(2):
        ...     programs = (("f", 4.0 * step, 4.0 * step + 1), ("b", 4.0 * step + 1, 4.0 * step + 3))
        ...     pace.add(0, Recording(programs, {}, {}))
        >>> pace.steps()
        [StepTimes(seconds={'a:0': 3.0}, step_s=4.0)]
    """

    def __init__(self, workers: Sequence[Watched], num_microbatches: int) -> None:
        self._workers, self._count = list(workers), num_microbatches
        # Per worker and program: duration of each pass of steps that were not returned yet.
        self._passes: List[Dict[Any, List[float]]] = [{one: [] for one in worker.passes} for worker in workers]
        # Per worker: begin of the first pass of each step that was not returned yet, and number of such passes.
        self._begins: List[List[float]] = [[] for _ in workers]
        self._firsts = [0] * len(workers)
        self._left: Dict[str, Tuple[int, float]] = {}
        self._arrived: Dict[str, Tuple[int, float]] = {}
        # Step -> two hosts -> times of the messages from one to the other, each by the clock of its end.
        self._messages: DefaultDict[int, DefaultDict[Tuple[str, str], List[float]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        self._returned = 0
        self._hidden_s = 0.0  # what counts with every message

    def add(self, worker: int, recording: Recording) -> None:
        """Take a recording.

        Args:
            worker: Its place among the workers.
            recording: Its programs and messages since the last time.
        """
        passes = self._passes[worker]
        for program, start_s, end_s in recording.programs:
            if program in passes:
                passes[program].append(end_s - start_s)
                if program == self._workers[worker].passes[0]:
                    if self._firsts[worker] % self._count == 0:
                        self._begins[worker].append(start_s)
                    self._firsts[worker] += 1
        self._left.update((key, (worker, start_s)) for key, (_, start_s) in recording.sends.items())
        self._arrived.update((key, (worker, end_s)) for key, (_, end_s) in recording.receives.items())
        self._join()

    def _join(self) -> None:
        for key in [key for key in self._left if key in self._arrived]:
            (source, left_s), (target, arrived_s) = self._left.pop(key), self._arrived.pop(key)
            ends = [self._workers[worker].host for worker in (source, target)]
            step = self._returned + bisect.bisect_right(self._begins[source], left_s) - 1
            if ends[0] != ends[1] and step >= self._returned:
                self._messages[step][ends[0], ends[1]].append(arrived_s - left_s)

    def steps(self) -> List[StepTimes]:
        """Return the steps that all workers have completed since the last time, and after which another has begun."""
        count = self._count
        complete = min(len(runs) for passes in self._passes for runs in passes.values()) // count
        found = []
        for _ in range(min(complete, len(self._begins[0]) - 1)):
            seconds = {
                worker.subject: sum(sum(runs[:count]) for runs in passes.values())
                for worker, passes in zip(self._workers, self._passes)
            }
            if self._returned < _USUAL_STEPS:  # later, a device that slows must slow no link
                self._hidden_s = 2 * _OF_A_PASS * min(seconds.values()) / count
            messages: Mapping[Tuple[str, str], List[float]] = self._messages.pop(self._returned, {})
            for source, target in (ends for ends in messages if ends < ends[::-1] and ends[::-1] in messages):
                both_s = sum(statistics.median(messages[ends]) for ends in ((source, target), (target, source)))
                seconds[f"{source}<->{target}"] = max(0.0, both_s) + self._hidden_s
            found.append(StepTimes(_positive(seconds), self._begins[0][1] - self._begins[0][0]))
            for begins in self._begins:
                del begins[0]
            for runs in (runs for passes in self._passes for runs in passes.values()):
                del runs[:count]
            self._returned += 1
        return found


def _positive(seconds: Mapping[str, float]) -> Dict[str, float]:
    return {name: time_s for name, time_s in seconds.items() if time_s > 0}
