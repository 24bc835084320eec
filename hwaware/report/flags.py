"""What the profiler noticed about its own measurements, and the commands that measure just that again."""

from __future__ import annotations

import shlex
from typing import Any, List, Optional

from rich.console import Console
from rich.text import Text

from hwaware.cluster import Flag

# The order in which they matter: what must not be trained on first.
_ORDER = ("failed", "corrupt", "clock", "slowed", "slow", "asymmetric", "unsteady", "non-monotone", "loaded")


def flag_lines(profile: Any, file: str) -> List[str]:
    """Two lines for each flag: what was noticed, and how to measure just that again.

    Args:
        profile: A ClusterProfile or a PartialProfile.
        file: Where it lies: the commands renew that file.
    """
    flags = sorted(profile.flags, key=lambda flag: _ORDER.index(flag.kind) if flag.kind in _ORDER else len(_ORDER))
    address = _address(profile.environment)
    lines: List[str] = []
    for flag in flags:
        lines.append(f"{flag.kind}: {' -> '.join(flag.subjects)}: {flag.what}")
        if flag.only:
            lines.append(f"    measure again: {remeasure(flag, file, address)}")
    return lines


def remeasure(flag: Flag, file: str, address: Optional[str] = None) -> str:
    """The command that measures just what the flag is about.

    Example:
        >>> remeasure(Flag(kind="slow", subjects=("a", "b"), what="", only=("a+b",)), "cluster.json")
        'hwaware profile --resume cluster.json --only a+b -o cluster.json'
    """
    words = ["hwaware", "profile"]
    if address is not None:
        words += ["--address", address]
    words += ["--resume", file]
    for only in flag.only:
        words += ["--only", only]
    output = file[: -len(".partial")] if file.endswith(".partial") else file
    return " ".join(shlex.quote(word) for word in [*words, "-o", output])


def show_flags(profile: Any, file: str, console: Optional[Console] = None) -> None:
    """Print the flags on standard output."""
    out = console or Console(soft_wrap=True)
    out.print(Text(f"To know before believing these numbers ({len(profile.flags)}):", style="bold"))
    for line in flag_lines(profile, file):
        out.print(Text(line))


def _address(environment: Any) -> Optional[str]:
    """The --address of the command that measured, where one was given."""
    command = environment.get("command") if isinstance(environment, dict) else None
    words = command if isinstance(command, list) else []
    for word, following in zip(words, [*words[1:], None]):
        if word == "--address" and following is not None:
            return str(following)
        if str(word).startswith("--address="):
            return str(word).partition("=")[2]
    return None
