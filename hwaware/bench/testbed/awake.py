"""Keep one core from falling asleep, at the lowest priority.

    python awake.py CORE PROCS

A device with a fifth of a core leaves its core idle for four fifths of the time. A core that sleeps so often runs more
slowly when it wakes. Beside a share of 0.8, a share of 0.2 came out 5 to 13 % too low. This spinner brought it within
5 %.
The spinner runs only when nothing else wants the core (SCHED_IDLE, in an idle control group). It ends with its parent.
"""

from __future__ import annotations

import os
import sys

_TURNS = 1_000_000  # tens of milliseconds between two looks at the parent


def main(core: int, procs: str) -> None:
    """Spin on `core` until the parent ends; `procs` is the cgroup.procs file of the idle group."""
    parent = os.getppid()
    with open(procs, "w") as stream:
        stream.write(str(os.getpid()))
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    os.sched_setaffinity(0, {core})
    while os.getppid() == parent:
        for _ in range(_TURNS):
            pass


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
