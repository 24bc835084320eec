"""Read scenarios, the TOML files that describe testbeds; hwaware/bench/scenarios has the shipped ones.

docs/laptop.md describes every key.
"""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import msgspec

from hwaware.errors import ScenarioError
from hwaware.records import PathLike, Record, converted, read_bytes, require, require_name

SHIPPED = Path(__file__).parent.parent / "scenarios"
MAX_HOSTS = 64
MAX_DEVICES = 16
DEFAULT_MEMORY_MIB = 2048
MIN_SHARE, MAX_SHARE = 0.01, 1.0
# HTB counts the time of a burst in 32 bits: less than 0.002 Mbit/s would need 33 bits for the 64 KiB of links.py.
MIN_MBIT, MAX_MBIT = 0.01, 1e6
_HOST = re.compile(r"[a-z][a-z0-9]{0,11}")  # serves as Ray resource, host name and part of a link's name
_TAKEN = ("localhost", "memory")  # by the system, and by Ray's resources
_LINK = re.compile(r"\s*([^\s>-]+)\s*(->|-)\s*([^\s>-]+)\s*")
_KEYS = "shares, default_mbit, mbit, devices, memory_mib, inside_mbit, later, name, description"
_FIX = f"correct the named key; the known keys are {_KEYS} (docs/laptop.md describes them)."


class Later(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change midway: after `after_steps` training steps, hosts get the CPU shares in `shares`."""

    after_steps: int
    shares: Dict[str, float]

    def __post_init__(self) -> None:
        require(self.after_steps >= 0, f"later.after_steps is {self.after_steps}, expected at least 0")


class Scenario(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hosts with CPU shares, and directed links with rates.

    Attributes:
        name: The scenario's name: the file's name without its ending.
        shares: Share of one core for each device of the host, by host; the order means nothing to a pipeline.
        default_mbit: Rate of payload in Mbit/s (10**6 bits) of every directed link that `mbit` does not name.
        mbit: Rates by "a-b" (both directions) or "a->b" (one direction, which wins over "a-b").
        devices: Number of devices by host; 1 if left out.
        memory_mib: Memory of each device in MiB, by host; 2048 if left out.
        inside_mbit: Rate in Mbit/s to each device from others of its host; None leaves it unshaped.
        later: A change midway, which the benchmark makes with `Testbed.set_share`.
        description: One line for people.
    """

    name: str
    shares: Dict[str, float]
    default_mbit: float
    mbit: Dict[str, float] = {}
    devices: Dict[str, int] = {}
    memory_mib: Dict[str, int] = {}
    inside_mbit: Optional[float] = None
    later: Optional[Later] = None
    description: str = ""

    def __post_init__(self) -> None:
        require_name("name", self.name)
        require(0 < len(self.shares) <= MAX_HOSTS, f"shares names {len(self.shares)} hosts, expected 1 to {MAX_HOSTS}")
        for host in self.shares:
            require(
                _HOST.fullmatch(host) is not None,
                f"host name {host!r} is not a lower-case letter and up to 11 lower-case letters or digits",
            )
            require(host not in _TAKEN, f"host name {host!r} means something else already, expected another")
        self._check_shares("shares", self.shares)
        _check_rate("default_mbit", self.default_mbit)
        if self.inside_mbit is not None:
            _check_rate("inside_mbit", self.inside_mbit)
        self._check_counts("devices", self.devices, MAX_DEVICES)
        self._check_counts("memory_mib", self.memory_mib, 1 << 30)
        self._check_links()
        if self.later is not None:
            self._check_shares("later.shares", self.later.shares)

    def _check_host(self, where: str, host: str) -> None:
        require(host in self.shares, f"{where} names host {host!r}, which is not in shares ({', '.join(self.shares)})")

    def _check_shares(self, where: str, shares: Dict[str, float]) -> None:
        for host, share in shares.items():
            self._check_host(where, host)
            require(
                MIN_SHARE <= share <= MAX_SHARE,
                f"{where}.{host} is {share!r}, expected a share of one core from {MIN_SHARE:g} to {MAX_SHARE:g}",
            )

    def _check_counts(self, where: str, counts: Dict[str, int], maximum: int) -> None:
        for host, count in counts.items():
            self._check_host(where, host)
            require(1 <= count <= maximum, f"{where}.{host} is {count!r}, expected a whole number from 1 to {maximum}")

    def _check_links(self) -> None:
        seen: Dict[Tuple[str, str, str], str] = {}
        for link, rate in self.mbit.items():
            source, arrow, target = parse_link(link)
            self._check_host(f"mbit {link!r}", source)
            self._check_host(f"mbit {link!r}", target)
            require(source != target, f"mbit {link!r} joins {source} to itself; that rate is inside_mbit")
            _check_rate(f"mbit {link!r}", rate)
            ends = (source, target) if arrow == "->" else (min(source, target), max(source, target))
            earlier = seen.setdefault((*ends, arrow), link)
            require(earlier == link, f"mbit names one link twice, as {earlier!r} and {link!r}")

    def hosts(self) -> Tuple[str, ...]:
        """Return the host names, in the file's order."""
        return tuple(self.shares)

    def devices_of(self, host: str) -> int:
        """Return the number of devices of `host`."""
        return self.devices.get(host, 1)

    @property
    def share_cores(self) -> float:
        """Return the cores that the shares of all devices add up to."""
        return round(sum(share * self.devices_of(host) for host, share in self.shares.items()), 6)

    def memory_bytes(self, host: str) -> int:
        """Return the memory of each device of `host` in bytes."""
        return self.memory_mib.get(host, DEFAULT_MEMORY_MIB) << 20

    def rate_mbit(self, source: str, target: str) -> float:
        """Return the rate from host `source` to host `target` in Mbit/s.

        Example:
            >>> scenario = Scenario(name="x", shares={"a": 0.5, "b": 0.5}, default_mbit=100, mbit={"a->b": 25})
            >>> scenario.rate_mbit("a", "b"), scenario.rate_mbit("b", "a")
            (25.0, 100.0)
        """
        both = self.default_mbit
        for link, rate in self.mbit.items():
            first, arrow, second = parse_link(link)
            if (first, second) == (source, target) and arrow == "->":
                return float(rate)
            if {first, second} == {source, target} and arrow == "-":
                both = rate
        return float(both)


def _check_rate(where: str, rate: float) -> None:
    require(MIN_MBIT <= rate <= MAX_MBIT, f"{where} is {rate!r}, expected a rate from {MIN_MBIT:g} to {MAX_MBIT:g}")


def parse_link(link: str) -> Tuple[str, str, str]:
    """Split a link's name.

    Raises:
        ValueError: The name has neither the form "a-b" nor "a->b".

    Example:
        >>> parse_link("h0->h1")
        ('h0', '->', 'h1')
    """
    match = _LINK.fullmatch(link)
    if match is None:
        raise ValueError(f'mbit {link!r} is not a link; expected "a-b" (both directions) or "a->b" (one)')
    return match.group(1), match.group(2), match.group(3)


def shipped_names() -> List[str]:
    """Return the names of the scenarios that come with hwaware."""
    return sorted(path.stem for path in SHIPPED.glob("*.toml"))


def load_scenario(scenario: PathLike) -> Scenario:
    """Return the shipped scenario of that name, or the one in the .toml file at that path.

    Raises:
        ScenarioError: No such scenario exists, or its file is not valid.
    """
    text = str(scenario)
    if text in shipped_names():
        return _read(SHIPPED / f"{text}.toml")
    if text.endswith(".toml"):
        return _read(Path(text))
    raise ScenarioError(
        f"There is no scenario {text!r}.",
        f"give one of {', '.join(shipped_names())}, or the path of a .toml file like those.",
    )


def _read(path: Path) -> Scenario:
    return scenario_from_toml(read_bytes(path), path.stem, str(path))


def scenario_from_toml(data: bytes, name: str, where: str) -> Scenario:
    """Return the scenario in a TOML document.

    Args:
        data: The document.
        name: The scenario's name, unless the document has one.
        where: The document's name in error messages.

    Raises:
        ScenarioError: The document is not TOML, or not a valid scenario.
    """
    try:
        document = _toml(data)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ScenarioError(
            f"{where} is not valid TOML: {error}.", "correct the syntax there; docs/laptop.md has an example."
        ) from error
    document.setdefault("name", name)
    try:
        return converted(document, Scenario)
    except msgspec.ValidationError as error:
        raise ScenarioError(f"{where} is not a valid scenario: {error}.", _FIX) from error


def _toml(data: bytes) -> Dict[str, Any]:
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    document: Dict[str, Any] = toml.loads(data.decode())
    return document
