"""Measure, on a worker, how busy the other processes keep its host."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Dict, Optional

# Fields of /proc/PID/stat after the command's name, counted from 0: see proc(5).
_USER, _SYSTEM, _POLICY = 11, 12, 38
_SCHED_IDLE = 5
# A host is busy above this share. An idle host with Ray's daemons stays below a tenth (1.4 % of a core a node).
BUSY = 0.2


def busy_share(seconds: float) -> float:
    """Return the part of all processors' time that other processes use during the next `seconds`.

    SCHED_IDLE processes do not count, because they give way to all others. Without /proc the result is 0.

    Example:
        >>> 0 <= busy_share(0.02) <= 1
        True
    """
    before, start = _ticks(), time.monotonic()
    time.sleep(seconds)
    after, elapsed = _ticks(), time.monotonic() - start
    used = sum(max(0, ticks - before[pid]) for pid, ticks in after.items() if pid in before)
    # The kernel counts whole ticks, so that a short wait may seem to hold more than all of them.
    return min(1.0, used / os.sysconf("SC_CLK_TCK") / elapsed / (os.cpu_count() or 1))


def _ticks() -> Dict[int, int]:
    """Return the processor time of every other process so far, in clock ticks."""
    with contextlib.suppress(OSError):
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
        return {pid: ticks for pid in pids for ticks in [_ticks_of(pid)] if ticks is not None}
    return {}


def _ticks_of(pid: int) -> Optional[int]:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None  # it has just ended
    return None if int(fields[_POLICY]) == _SCHED_IDLE else int(fields[_USER]) + int(fields[_SYSTEM])
