"""Decide how many rounds of steps and how many starts of processes fit before a deadline."""

from __future__ import annotations

import time
from typing import Optional

# Fewer rounds cannot show how steps scatter, so these are measured even after the deadline.
LEAST_ROUNDS = 5


class Pace:
    """Divides the time until a deadline among parts; each part sets up processes and measures rounds.

    A start has one part for each group of mappings. All parts get equally many rounds. If another start would not
    fit with `LEAST_ROUNDS`, this start's rounds get its time. The estimate assumes that a later start sets up as fast
    as this one. If this one found a run ready, the measurement may end late by the time that saved.

    Args:
        deadline_s: Time by which all must end, in `time.monotonic`; None for no limit.
        starts: Wanted number of starts of all processes.
        groups: Number of groups of mappings in each start.

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
        """Note that the next part begins to set up its processes."""
        self._later -= 1
        self._began_s = time.monotonic()

    def ready(self) -> None:
        """Note that the processes are ready and rounds begin."""
        self._measuring_s = time.monotonic()
        self._set_up_s = self._measuring_s - self._began_s

    def has_time_to_start(self) -> bool:
        """Return True if another start with `LEAST_ROUNDS` rounds a part would end before the deadline."""
        if self._deadline_s is None:
            return True
        part_s = self._set_up_s + LEAST_ROUNDS * self._round_s
        return time.monotonic() + self._groups * part_s <= self._deadline_s

    def goes_on(self, done: int) -> bool:
        """Return True if this part and later ones can afford `done` + 1 rounds."""
        if self._deadline_s is None:
            return True
        self._round_s = (time.monotonic() - self._measuring_s) / done
        if done < LEAST_ROUNDS:
            return True
        later = self._later
        while later >= self._groups and self._needed_s(LEAST_ROUNDS, later) > self._deadline_s - self._measuring_s:
            later -= self._groups  # give up one start
        return self._needed_s(done + 1, later) <= self._deadline_s - self._measuring_s

    def _needed_s(self, rounds: int, later: int) -> float:
        """Return the time of `rounds` in this part and `later` ones, with the set-up of the later ones."""
        return (later + 1) * rounds * self._round_s + later * self._set_up_s
