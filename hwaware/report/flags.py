"""Print the measurements that the profiler doubts, and commands that measure just these again."""

from __future__ import annotations

import shlex
from typing import Any, List, Optional

from rich.console import Console
from rich.text import Text

from hwaware.cluster import Flag

# Most serious first: nobody should train on what failed or is corrupt.
_ORDER = ("failed", "corrupt", "clock", "slowed", "slow", "asymmetric", "unsteady", "non-monotone", "loaded")


def flag_lines(profile: Any, file: str) -> List[str]:
    """Return two lines for each flag: the doubt, and the command that measures its subject again.

    Args:
        profile: A ClusterProfile or a PartialProfile.
        file: Path of the profile, which the commands renew.
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
    """Return the command that measures just the flag's subjects again.

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
    """Print the flags on standard output, unless given another console."""
    out = console or Console(soft_wrap=True)
    out.print(Text(f"The profiler doubts these measurements ({len(profile.flags)}):", style="bold"))
    for line in flag_lines(profile, file):
        out.print(Text(line))


def _address(environment: Any) -> Optional[str]:
    """Return the --address of the command that measured, if it had one."""
    command = environment.get("command") if isinstance(environment, dict) else None
    words = command if isinstance(command, list) else []
    for word, following in zip(words, [*words[1:], None]):
        if word == "--address" and following is not None:
            return str(following)
        if str(word).startswith("--address="):
            return str(word).partition("=")[2]
    return None
