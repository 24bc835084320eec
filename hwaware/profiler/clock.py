"""Elapsed time that is checked: two clocks of the system must agree about it. Runs on the workers."""

from __future__ import annotations

import time
from typing import Callable, List, Optional, Tuple

from hwaware.errors import MeasurementError

# Reading both clocks takes under a microsecond, and a clock that is being adjusted runs at most 0.05 % fast or slow
# (adjtime(3)): what differs by more than this has jumped.
_SLACK_S = 2e-3
_SLACK_SHARE = 0.01
_TRIES = 3


# A tuple without a name: classes made by NamedTuple cannot be shipped by value.
#: The steady clock and the wall clock at one moment [s].
Reading = Tuple[float, float]


def read() -> Reading:
    """Both clocks now."""
    return time.perf_counter(), time.time()


class Watch:
    """Times work, and takes the time again where a clock jumped meanwhile.

    Attributes:
        jumps: By how many seconds the clocks disagreed, each time that they did.
    """

    def __init__(self) -> None:
        self.jumps: List[float] = []

    def elapsed_s(self, start: Reading) -> Optional[float]:
        """Seconds since `start`; None where a clock jumped since."""
        now = read()
        steady_s, wall_s = now[0] - start[0], now[1] - start[1]
        if abs(steady_s - wall_s) <= _SLACK_S + _SLACK_SHARE * abs(wall_s) and steady_s >= 0:
            return steady_s
        self.jumps.append(wall_s - steady_s)
        return None

    def timed(self, work: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
        """Seconds that `work` takes; taken again where a clock jumped, at most twice more.

        Args:
            work: What is timed.
            after: Follows each try of it, untimed.

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
        """Return the jumps since the last call."""
        jumps, self.jumps = self.jumps, []
        return jumps
