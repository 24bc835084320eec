"""Describe where a result comes from, and set the environment variables that a testbed's driver needs."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator

from hwaware._version import __version__
from hwaware.compat.packages import JAX_PACKAGES
from hwaware.reference_kernel import Reference


@contextlib.contextmanager
def running_environment(variables: Dict[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment(reference: Reference) -> Dict[str, Any]:
    """Return versions, machine and load for a result, and the reference that was timed beside its steps."""
    packages = ("alpa", *JAX_PACKAGES, "ray", "numpy")
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {"hwaware": __version__, **{name: metadata.version(name) for name in packages}},
        "load_average": list(os.getloadavg()),
        "reference_kernel": reference.name,
        "profile_reference_s": reference.usual_s,
    }
