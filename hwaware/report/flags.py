"""Print what the profiler found doubtful or slow, and commands that measure just this again."""

from __future__ import annotations

import os
import shlex
from itertools import combinations
from typing import Any, List, Sequence, Tuple

from msgspec.structs import replace
from rich.console import Console
from rich.text import Text

from hwaware.cluster import Flag
from hwaware.link_flags import reached_percent

# Most serious first: nobody should train on what failed or is corrupt.
_ORDER = (
    "failed", "corrupt", "clock", "slowed", "throttled", "slow", "asymmetric", "unsteady", "non-monotone", "loaded",
    "assumed",
)  # fmt: skip
# Loaded hosts whose links a command names, too.
_MOST_PAIRED = 4
# Options of `hwaware profile` that a command for a part needs too; one that goes on needs what chose the parts as well.
_SWITCHES = ("--quick", "--symmetric", "--no-runtime")
_AGAIN = ("--quick", "--no-runtime", "--address", "--dtype")
_GOING_ON = (*_AGAIN, "--only", "--symmetric")


def flag_lines(profile: Any, file: str) -> List[str]:
    """Return each doubt, and the command that measures its subjects again; then how to mend links, and how to copy.

    The most serious kind comes first, and inside a kind the smallest percentage.

    Args:
        profile: A ClusterProfile or a PartialProfile.
        file: Path of the profile, which the commands renew.
    """
    flags = sorted(profile.flags, key=_severity)
    options = _kept_options(profile.environment)
    loaded = [flag for flag in flags if flag.kind == "loaded"]
    lines: List[str] = []
    for flag in flags:
        # The ends of a link; or everything that one assumption or one load concerns.
        subjects = (", " if flag.kind in ("assumed", "loaded") else " -> ").join(flag.subjects)
        lines.append(f"{flag.kind}: {subjects}: {flag.what}")
        if flag.kind == "loaded" and flag is not loaded[-1]:
            continue  # one command for all: devices of two runs would differ by the machine's speed
        again = _all_loaded(loaded) if flag.kind == "loaded" else flag
        if flag.kind == "loaded" and {host.name for host in profile.hosts} == set(again.subjects):
            command = (
                f"    measure everything again: {_quoted(['hwaware', 'profile', *options, '-o', _output_of(file)])}"
            )
        else:
            command = f"    measure again: {remeasure(again, file, options)}"
        if again.only and command not in lines:  # both directions of a link have one command
            lines.append(command)
    if any(flag.kind in ("slow", "asymmetric") and len(set(flag.subjects)) > 1 for flag in flags):
        lines.append("If a link stays slow, check its cable, its network cards and its switch.")
    if any(flag.only for flag in flags) and _output_of(file) == file:
        copy = f"{file}.before"
        if os.path.exists(copy):
            lines.append(f"To compare {file} with its earlier copy: {_quoted(['hwaware', 'compare', copy, file])}")
        else:
            command = _quoted(["cp", file, copy])
            lines.append(f"Measuring again replaces values in {file}. To compare them afterwards, first run: {command}")
    return lines


def _severity(flag: Flag) -> Tuple[int, float]:
    """Return what to sort flags by: their kind, then the percentage that they name; other flags keep their order."""
    return _ORDER.index(flag.kind) if flag.kind in _ORDER else len(_ORDER), reached_percent(flag)


def _all_loaded(flags: Sequence[Flag]) -> Flag:
    """Return one flag for the hosts of all "loaded" flags; it also names their links if the hosts are few."""
    hosts = tuple(dict.fromkeys(host for flag in flags for host in flag.subjects))
    only = tuple(dict.fromkeys(one for flag in flags for one in flag.only))
    pairs = tuple(map("+".join, combinations(hosts, 2))) if only and len(hosts) <= _MOST_PAIRED else ()
    return replace(flags[-1], subjects=hosts, only=(*only, *pairs))


def flags_heading(profile: Any) -> str:
    """Return what the flags of a profile have in common, and their number."""
    assumed = any(flag.kind == "assumed" for flag in profile.flags)
    what = "These values are doubtful or assumed" if assumed else "These devices, links and measurements need a look"
    return f"{what} ({len(profile.flags)})"


def remeasure(flag: Flag, file: str, options: Sequence[str] = ()) -> str:
    """Return the command that measures just the flag's subjects again.

    Args:
        flag: The doubt.
        file: Path of the profile, which the command renews.
        options: Further options of the command.

    Example:
        >>> remeasure(Flag(kind="slow", subjects=("a", "b"), what="", only=("a+b",)), "cluster.json")
        'hwaware profile --resume cluster.json --only a+b -o cluster.json'
    """
    words = ["hwaware", "profile", *options, "--resume", file]
    for only in flag.only:
        words += ["--only", "+".join(sorted(only.split("+")))]
    return _quoted([*words, "-o", _output_of(file)])


def going_on(profile: Any, file: str) -> str:
    """Return the command that completes an unfinished profile, with the options of the command that began it.

    Args:
        profile: A PartialProfile.
        file: Path of the profile.

    Example:
        >>> from hwaware.cluster import PartialProfile
        >>> began = {"command": ["hwaware", "profile", "--address=local", "--only", "a", "-o", "cluster.json"]}
        >>> going_on(PartialProfile(environment=began), "cluster.json.partial")
        'hwaware profile --address local --only a --resume cluster.json.partial -o cluster.json'
    """
    options = _kept_options(profile.environment, _GOING_ON)
    return _quoted(["hwaware", "profile", *options, "--resume", file, "-o", _output_of(file)])


def _output_of(file: str) -> str:
    return file[: -len(".partial")] if file.endswith(".partial") else file


def _quoted(words: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def show_flags(profile: Any, file: str) -> None:
    """Print the flags on standard output."""
    out = Console(soft_wrap=True)
    out.print(Text(f"{flags_heading(profile)}:", style="bold"))
    for line in flag_lines(profile, file):
        out.print(Text(line))


def _kept_options(environment: Any, wanted: Sequence[str] = _AGAIN) -> List[str]:
    """Return the options of the command that measured which a second command needs too.

    A new measurement of a device replaces all its curves, so it has to cover the same data types.
    """
    command = environment.get("command") if isinstance(environment, dict) else None
    words = [str(word) for word in command] if isinstance(command, list) else []
    kept: List[str] = []
    for word, following in zip(words, [*words[1:], ""]):
        name, _, value = word.partition("=")
        if name not in wanted:
            continue
        if name in _SWITCHES:
            kept.append(name)
        elif value or following:
            kept += [name, value or following]
    return kept
