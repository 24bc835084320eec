"""Run a command inside a host of a testbed: enter its namespaces and control group, then become the command.

python -m hwaware.bench.testbed.launcher [--pid PID] [--cgroup FILE] -- COMMAND...
"""

from __future__ import annotations

import os
import sys
from typing import List, Optional, Sequence

from hwaware.bench.testbed import namespaces


def command(argv: Sequence[str], pid: Optional[int] = None, cgroup: Optional[str] = None) -> List[str]:
    """Return the command line that runs `argv` inside a host.

    Args:
        argv: The command.
        pid: A process whose namespaces the command enters.
        cgroup: The cgroup.procs file of the group that it joins.
    """
    line = [sys.executable, "-m", "hwaware.bench.testbed.launcher"]
    if pid is not None:
        line += ["--pid", str(pid)]
    if cgroup is not None:
        line += ["--cgroup", cgroup]
    return [*line, "--", *argv]


def main(arguments: List[str]) -> None:
    """Join the group and enter the namespaces of the options, then become the command."""
    split = arguments.index("--")
    options = dict(zip(arguments[:split:2], arguments[1:split:2]))
    if "--cgroup" in options:  # first, so that no part of the command runs outside its group
        with open(options["--cgroup"], "w") as stream:
            stream.write(str(os.getpid()))
    if "--pid" in options:
        namespaces.enter(int(options["--pid"]), ("user", "net", "uts", "mnt"))
    argv = arguments[split + 1 :]
    os.execvp(argv[0], argv)


if __name__ == "__main__":
    main(sys.argv[1:])
