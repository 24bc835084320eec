"""The three ways to build a testbed, and which of them this user may use on this system."""

from __future__ import annotations

import importlib.util
import os
from typing import Callable, List

from hwaware.bench.testbed import namespaces
from hwaware.errors import UnusableInputError

KINDS = ("root", "user", "loopback")


def best_kind(wanted: str) -> str:
    """The first kind that works here, or `wanted` if it does.

    Raises:
        UnusableInputError: Ray is missing, or the wanted kind is unknown or does not work here.
    """
    if importlib.util.find_spec("ray") is None:
        raise UnusableInputError("Ray is not installed.", "pip install 'hwaware[ray]'.")
    if wanted != "auto" and wanted not in KINDS:
        raise UnusableInputError(f"There is no testbed of kind {wanted!r}.", f"give auto or one of {', '.join(KINDS)}.")
    for kind in KINDS if wanted == "auto" else (wanted,):
        if _works(kind):
            return kind
    raise UnusableInputError(
        f"This system does not let this user build a testbed of kind {wanted!r}.",
        "run as root on Linux, install pyroute2 (pip install 'hwaware[testbed]'), or leave --kind out.",
    )


def notes_for(kind: str, has_cpu_groups: bool) -> List[str]:
    """What a testbed of that kind does not shape, one line each."""
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
    if kind == "root":
        return os.geteuid() == 0 and _succeeds_in_child(_try_root)
    return _succeeds_in_child(namespaces.become_user_root)


def _try_root() -> None:
    namespaces.unshare(namespaces.CLONE_NEWNET | namespaces.CLONE_NEWUTS | namespaces.CLONE_NEWNS)


def _succeeds_in_child(function: Callable[[], None]) -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            function()
            os._exit(0)
        except OSError:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0
