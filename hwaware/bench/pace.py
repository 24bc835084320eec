"""Measuring within a time: how many rounds of steps, and how many starts of processes, fit before a deadline."""

from __future__ import annotations

import time
from typing import Optional

# Fewer say nothing about how a mapping's steps scatter: so many are measured however late it is.
LEAST_ROUNDS = 5


class Pace:
    """Divides the time until a deadline among parts, in each of which processes are set up and rounds are measured.

    Every part that there is time for gets as many rounds as this one. Starts come last: where there is no time for
    another one with the least rounds, those of this start get its time. A later start is taken to be set up as fast as
    this one, which may have found a run ready: it can end later by what that saved.

    Args:
        deadline_s: When everything shall have ended, by `time.monotonic`; None for no limit.
        starts: How often all processes are to be started.
        groups: Parts of each start: mappings that are measured a few at a time.

    Example:
        >>> pace = Pace(None, starts=2, groups=1)
        >>> pace.has_time_to_start(), pace.goes_on(1000)
        (True, True)
    """

    def __init__(self, deadline_s: Optional[float], starts: int, groups: int) -> None:
        self._deadline_s, self._groups = deadline_s, groups
        self._later = starts * groups
        self._began_s = self._measuring_s = time.monotonic()
        self._set_up_s = self._round_s = 0.0

    def begin(self) -> None:
        """The next part's processes are being set up from now on."""
        self._later -= 1
        self._began_s = time.monotonic()

    def ready(self) -> None:
        """They are ready: its rounds begin."""
        self._measuring_s = time.monotonic()
        self._set_up_s = self._measuring_s - self._began_s

    def has_time_to_start(self) -> bool:
        """Whether all parts of another start, with the least rounds, would end before the deadline."""
        if self._deadline_s is None:
            return True
        part_s = self._set_up_s + LEAST_ROUNDS * self._round_s
        return time.monotonic() + self._groups * part_s <= self._deadline_s

    def goes_on(self, done: int) -> bool:
        """Whether there is time for one more round than the `done` ones, here and in what is still to come."""
        if self._deadline_s is None:
            return True
        self._round_s = (time.monotonic() - self._measuring_s) / done
        if done < LEAST_ROUNDS:
            return True
        later = self._later
        while later >= self._groups and self._needed_s(LEAST_ROUNDS, later) > self._deadline_s - self._measuring_s:
            later -= self._groups  # one start less
        return self._needed_s(done + 1, later) <= self._deadline_s - self._measuring_s

    def _needed_s(self, rounds: int, later: int) -> float:
        """What so many rounds take, in this part and in so many later ones that are set up first."""
        return (later + 1) * rounds * self._round_s + later * self._set_up_s
