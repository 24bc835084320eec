"""Choose a way to build a testbed that works for this user on this system."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import List

from hwaware.bench.testbed import gpu, namespaces
from hwaware.bench.testbed.state import GPU_KINDS
from hwaware.errors import TestbedError, UnusableInputError

# Kind "auto" tries these in this order; a GPU only serves a testbed that asks for it.
KINDS = ("root", "user", "loopback")
ALL_KINDS = (*KINDS, *GPU_KINDS)
# Code that succeeds where a kind works.
_NAMESPACES = "n.unshare(n.CLONE_NEWNET | n.CLONE_NEWUTS | n.CLONE_NEWNS)"
_TRIALS = {"root": _NAMESPACES, "user": "n.become_user_root()", "gpu": _NAMESPACES}
_LIMIT_S = 60.0


def best_kind(wanted: str, to_enter: bool = False) -> str:
    """Return `wanted` if it works here; for "auto", the first kind that works.

    Args:
        wanted: A kind, or "auto".
        to_enter: This process will enter the testbed itself. "user" then needs a process with one thread.

    Raises:
        UnusableInputError: Ray is missing, or the wanted kind is unknown or does not work here.
        TestbedError: A trial of a kind did not end.
    """
    if importlib.util.find_spec("ray") is None:
        raise UnusableInputError("Ray is not installed.", "pip install 'hwaware[ray]'.")
    if wanted != "auto" and wanted not in ALL_KINDS:
        known = ", ".join(ALL_KINDS)
        raise UnusableInputError(f"There is no testbed kind {wanted!r}.", f"give auto or one of {known}.")
    auto = [kind for kind in KINDS if kind != "user" or not to_enter or namespaces.has_one_thread()]
    for kind in auto if wanted == "auto" else (wanted,):
        if _works(kind):
            return kind
    raise UnusableInputError(
        f"This system does not let this user build a testbed of kind {wanted!r}.",
        "run as root on Linux, install pyroute2 (pip install 'hwaware[testbed]'; kind gpu also needs NVIDIA's driver), "
        "or leave --kind out.",
    )


def notes_for(kind: str, has_cpu_groups: bool, share_cores: float = 0.0) -> List[str]:
    """Return a note for each thing that a testbed of that kind does not shape, or this machine lacks.

    Args:
        kind: The kind.
        has_cpu_groups: True if control groups limit its devices.
        share_cores: Cores that all devices' shares add up to.
    """
    if kind in GPU_KINDS:
        part = "a part of this machine's GPU; all share its memory bandwidth and caches"
        turns = f"this machine's whole GPU, by turns with the others ({gpu.CONTROL} is not installed)"
        unlinked = ["Not shaped: links. All hosts are this machine's loopback at full speed."]
        return [
            f"Each device is {part if gpu.has_service() else turns}.",
            *(unlinked if kind.endswith("loopback") else []),
        ]
    if kind == "loopback":
        return [f"Not shaped: CPU shares and links{_why()}. All hosts are this machine's loopback at full speed."]
    if kind == "user":
        return ["Not shaped: CPU shares (no root). All hosts run at full speed; their links are shaped."]
    if not has_cpu_groups:
        return ["Not shaped: CPU shares (no CPU control group to use). All hosts run at full speed; links are shaped."]
    cores = len(os.sched_getaffinity(0))
    if share_cores > cores:
        return [
            f"The devices' shares add up to {share_cores:g} cores, and this machine has {cores}: devices that compute "
            "at the same time get less than their shares."
        ]
    return []


def _why() -> str:
    """Return what a better kind lacks here, as far as a look can tell."""
    if importlib.util.find_spec("pyroute2") is None:
        return " (pyroute2 is not installed)"
    return "" if os.geteuid() == 0 else " (no root)"


def _works(kind: str) -> bool:
    if kind in GPU_KINDS and not gpu.is_possible():
        return False
    if kind.endswith("loopback"):
        return True
    if importlib.util.find_spec("pyroute2") is None:
        return False
    return (kind == "user" or os.geteuid() == 0) and _succeeds(_TRIALS[kind])


def _succeeds(trial: str) -> bool:
    """Run a trial in a process of its own, whose namespaces end with it; a fork would break JAX's threads."""
    line = [sys.executable, "-c", f"from hwaware.bench.testbed import namespaces as n; {trial}"]
    try:
        done = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TestbedError(
            f"A trial of the system's namespaces did not end within {_LIMIT_S:g} s: {trial}",
            "check the machine's load, or choose --kind loopback, which needs no trial.",
        ) from error
    return done.returncode == 0
