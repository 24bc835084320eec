"""Find the folder in which hwaware keeps what the next start of a program need not measure or compile again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Optional

VARIABLE = "HWAWARE_CACHE"


def setting() -> Optional[str]:
    """Return the path that the user has set, empty to switch the cache off; None if the user has set nothing."""
    given = os.environ.get(VARIABLE)
    return os.path.abspath(given) if given else given  # workers have folders of their own


def folder(given: Optional[str] = None) -> Optional[Path]:
    """Return the folder of the cache on this host; None if the cache is switched off.

    Args:
        given: The setting of another process, which counts before this one's.

    Example:
        >>> folder("") is None
        True
    """
    chosen = setting() if given is None else given
    if chosen is not None:
        return Path(chosen) if chosen else None
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hwaware"
