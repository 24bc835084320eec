"""The ways to build a testbed, and which of them this user may use on this system."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import List

from hwaware.bench.testbed import gpu, namespaces
from hwaware.errors import TestbedError, UnusableInputError

#: Tried in this order; the one of a GPU only where it is asked for.
KINDS = ("root", "user", "loopback")
ALL_KINDS = (*KINDS, gpu.KIND)
# What a kind needs, tried out.
_NAMESPACES = "n.unshare(n.CLONE_NEWNET | n.CLONE_NEWUTS | n.CLONE_NEWNS)"
_TRIALS = {"root": _NAMESPACES, "user": "n.become_user_root()", gpu.KIND: _NAMESPACES}
_LIMIT_S = 60.0


def best_kind(wanted: str, to_enter: bool = False) -> str:
    """The first kind that works here, or `wanted` if it does.

    Args:
        wanted: A kind, or "auto".
        to_enter: Whether this process is to enter the testbed itself, which "user" lets only those with one thread do.

    Raises:
        UnusableInputError: Ray is missing, or the wanted kind is unknown or does not work here.
        TestbedError: Trying a kind out did not end.
    """
    if importlib.util.find_spec("ray") is None:
        raise UnusableInputError("Ray is not installed.", "pip install 'hwaware[ray]'.")
    if wanted != "auto" and wanted not in ALL_KINDS:
        known = ", ".join(ALL_KINDS)
        raise UnusableInputError(f"There is no testbed of kind {wanted!r}.", f"give auto or one of {known}.")
    auto = [kind for kind in KINDS if kind != "user" or not to_enter or namespaces.has_one_thread()]
    for kind in auto if wanted == "auto" else (wanted,):
        if _works(kind):
            return kind
    raise UnusableInputError(
        f"This system does not let this user build a testbed of kind {wanted!r}.",
        "run as root on Linux, install pyroute2 (pip install 'hwaware[testbed]'; kind gpu also needs NVIDIA's driver "
        f"with {gpu.CONTROL}), or leave --kind out.",
    )


def notes_for(kind: str, has_cpu_groups: bool) -> List[str]:
    """What a testbed of that kind does not shape, one line each."""
    if kind == gpu.KIND:
        return ["Each host's device is a part of this machine's GPU; its memory's bandwidth and caches are shared."]
    if kind == "loopback":
        return ["Not shaped: CPU shares and links; all hosts are this machine's loopback at full speed (no root)."]
    if kind == "user":
        return ["Not shaped: CPU shares, all hosts run at full speed (no root); the links are."]
    if not has_cpu_groups:
        return ["Not shaped: CPU shares, all hosts run at full speed (no writable cpu control group); the links are."]
    return []


def _works(kind: str) -> bool:
    if kind == "loopback":
        return True
    if importlib.util.find_spec("pyroute2") is None:
        return False
    if kind == gpu.KIND and not gpu.is_possible():
        return False
    return (kind == "user" or os.geteuid() == 0) and _succeeds(_TRIALS[kind])


def _succeeds(trial: str) -> bool:
    """In a process of its own, whose namespaces end with it; not a fork, which JAX's threads would not survive."""
    line = [sys.executable, "-c", f"from hwaware.bench.testbed import namespaces as n; {trial}"]
    try:
        done = subprocess.run(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TestbedError(
            f"A trial of the system's namespaces did not end within {_LIMIT_S:g} s: {trial}",
            "look at the machine's load, or name the kind of testbed: --kind loopback needs no trial.",
        ) from error
    return done.returncode == 0
