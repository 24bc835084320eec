"""Put a Ray worker of a testbed under its host's CPU quota before it runs anything else.

The keeper moves workers too. But a move from outside waits for every fork on the machine, up to 3 s on a busy one. A
process with one thread that moves itself waits for nothing.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import os
import sys
from typing import List


def is_worker(arguments: List[str]) -> bool:
    """Return True if the command line is a Ray worker's; the raylet's only names the worker inside an option.

    Example:
        >>> is_worker(["python", "/ray/_private/workers/default_worker.py", "--node-ip-address=10.0.0.1"])
        True
        >>> is_worker(["/ray/raylet", "--python_worker_command=python default_worker.py"])
        False
    """
    if arguments and arguments[0].startswith("ray::"):
        return True
    return any(
        argument.endswith(("default_worker.py", "setup_worker.py")) and not argument.startswith("-")
        for argument in arguments
    )


def move_worker(devices: str) -> None:
    """Move this process to the start group that `devices` names, if it is a Ray worker.

    Args:
        devices: The value of HWAWARE_DEVICES.
    """
    with open("/proc/self/cmdline", "rb") as stream:
        arguments = stream.read().decode(errors="replace").split("\0")
    entries = json.loads(devices)
    group = entries[0].get("start_group") if entries else None
    if group is None or not is_worker(arguments):
        return
    tasks = os.path.join(os.path.dirname(group), "tasks")  # in version 1, moving one thread takes no global lock
    with open(tasks if os.path.exists(tasks) else group, "w") as stream:
        stream.write("0")


def run_shadowed() -> None:
    """Run the `sitecustomize` that this one hides, if any: that of a later folder, which may do the same."""
    paths = [os.path.abspath(path) for path in sys.path]
    here = os.path.dirname(os.path.abspath(__file__))
    later = [path for path in paths[paths.index(here) + 1 :] if path != here] if here in paths else paths
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", later)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if __name__ == "sitecustomize":
    try:
        if "HWAWARE_DEVICES" in os.environ:
            move_worker(os.environ["HWAWARE_DEVICES"])
    except (OSError, ValueError) as error:  # the worker must start all the same: the keeper moves it later
        print(f"hwaware testbed: this worker could not join its CPU quota: {error}", file=sys.stderr)
    run_shadowed()
