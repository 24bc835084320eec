"""Measure elapsed time, and check it: two clocks of the system must agree. Workers run this module."""

from __future__ import annotations

import time
from typing import Callable, List, Optional, Tuple

from hwaware.errors import MeasurementError

# Reading both clocks takes under a microsecond. A clock under adjustment runs at most 0.05 % fast or slow (adjtime(3)).
# If the clocks differ by more than the following limits, one has jumped.
_SLACK_S = 2e-3
_SLACK_SHARE = 0.01
_TRIES = 3


# A plain tuple, because Ray cannot ship classes made by NamedTuple by value.
#: The steady clock and the wall clock at one moment [s].
Reading = Tuple[float, float]


def read() -> Reading:
    """Return the current time of both clocks."""
    return time.perf_counter(), time.time()


class Watch:
    """Time work, and time it again if a clock jumped meanwhile.

    Attributes:
        jumps: Each disagreement of the clocks since the last `take_jumps` [s].
    """

    def __init__(self) -> None:
        self.jumps: List[float] = []

    def elapsed_s(self, start: Reading) -> Optional[float]:
        """Return the time since `start` [s], or None if a clock has jumped since."""
        now = read()
        steady_s, wall_s = now[0] - start[0], now[1] - start[1]
        if abs(steady_s - wall_s) <= _SLACK_S + _SLACK_SHARE * abs(wall_s) and steady_s >= 0:
            return steady_s
        self.jumps.append(wall_s - steady_s)
        return None

    def timed(self, work: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
        """Return the time that `work` takes [s]. If a clock jumps, run `work` again, at most twice.

        Args:
            work: The work to time.
            after: Work to run after each try, untimed.

        Raises:
            MeasurementError: A clock jumped every time.
        """
        for _ in range(_TRIES):
            start = read()
            work()
            seconds = self.elapsed_s(start)
            after()
            if seconds is not None:
                return seconds
        raise MeasurementError(
            f"The clocks of this host disagree by {self.jumps[-1]:+.3g} s, {_TRIES} times in a row.",
            "stop what sets its clock (a time service that steps, a migrating virtual machine).",
        )

    def take_jumps(self) -> List[float]:
        """Return the jumps since the last call [s], and forget them."""
        jumps, self.jumps = self.jumps, []
        return jumps
