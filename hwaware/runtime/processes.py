"""Look at a process of this host. Ray runs these functions on a worker's host, beside the worker."""

from __future__ import annotations

import contextlib
import os
import signal

# The letter in /proc/PID/stat of a process that SIGSTOP, SIGTSTP or a job scheduler has stopped (man 5 proc).
STOPPED = "T"
GONE = ""


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
