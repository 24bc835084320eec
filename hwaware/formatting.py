"""Format SI numbers as text, by one rule for every table, picture and message.

Amounts are in bytes and rates in bytes per second, those of links too. Prefixes are decimal: 1 MB is 10^6 bytes. All
numbers of a column share one unit and one number of decimals.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Iterable, List, Optional, Tuple

MISSING = "-"


@dataclasses.dataclass(frozen=True)
class Quantity:
    """A kind of number, with its units in use as (label, size in SI units), smallest first."""

    units: Tuple[Tuple[str, float], ...]


def _prefixed(unit: str, prefixes: str) -> Quantity:
    factors = {"µ": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    names = [prefix.strip() for prefix in prefixes.split(",")]
    return Quantity(tuple((f"{name}{unit}", factors[name]) for name in names))


SECONDS = _prefixed("s", "µ, m, ")
BYTES = _prefixed("B", ", k, M, G, T")
BYTES_PER_S = _prefixed("B/s", ", k, M, G, T")
FLOPS = _prefixed("FLOP", ", k, M, G, T, P")
FLOPS_PER_S = _prefixed("FLOP/s", ", k, M, G, T, P")


_BINARY = {f"{prefix}iB": 2.0 ** (10 * (power + 1)) for power, prefix in enumerate("KMGT")}


def parse_bytes(written: str) -> float:
    """Return a number of bytes that a person wrote, in bytes or with a unit: 2GB is 2e9 bytes, 2GiB is 2^31.

    Example:
        >>> parse_bytes("2GB"), parse_bytes("1.5 GiB"), parse_bytes("1e6")
        (2000000000.0, 1610612736.0, 1000000.0)

    Raises:
        ValueError: The text is no such number.
    """
    units = {**{label.lower(): size for label, size in BYTES.units}, **{k.lower(): v for k, v in _BINARY.items()}}
    found = re.fullmatch(r"\s*((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", written)
    if found is None or found[2].lower() not in {"", *units}:
        raise ValueError(f"{written!r} is no number of bytes")
    return float(found[1]) * units.get(found[2].lower(), 1.0)


@dataclasses.dataclass(frozen=True)
class Unit:
    """A unit for a group of numbers.

    Attributes:
        label: Text for a table's header or an axis.
        size: One such unit in SI units.
        decimals: Digits after the point.
    """

    label: str
    size: float
    decimals: int

    def text(self, value: Optional[float]) -> str:
        """Return the number in this unit, without label; a dash for a missing or non-finite one."""
        if value is None or not math.isfinite(value):
            return MISSING
        return f"{value / self.size:.{self.decimals}f}"


def common_unit(values: Iterable[Optional[float]], quantity: Quantity) -> Unit:
    """Return the unit in which the largest value has one to three digits before the point.

    Example:
        >>> unit = common_unit([0.0225, 0.0004, None], SECONDS)
        >>> unit.label, [unit.text(value) for value in (0.0225, 0.0004, None)]
        ('ms', ['22.50', '0.40', '-'])
    """
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
    largest = max(sizes, default=0.0)
    label, size = quantity.units[0]
    if not largest:
        label, size = next((unit for unit in quantity.units if unit[1] == 1.0), quantity.units[0])
    for unit in quantity.units:
        # 999.95 would round to 1000.0 in the smaller unit.
        if largest >= 0.9995 * unit[1]:
            label, size = unit
    # A quantity without smaller units, such as bytes, needs no decimals in its base unit.
    whole = not largest or (size == 1.0 and quantity.units[0][1] == 1.0)
    return Unit(label, size, 0 if whole else _decimals(largest / size))


def _decimals(largest: float) -> int:
    """Give the largest value four significant digits and at least one decimal; smaller values get fewer."""
    return 1 if largest >= 99.95 else 2 if largest >= 9.995 else 3


def column(values: Iterable[Optional[float]], quantity: Quantity) -> Tuple[str, List[str]]:
    """Return the common unit's label, and each value's text in this unit.

    Example:
        >>> column([1.5e9, 25e6], BYTES)
        ('GB', ['1.500', '0.025'])
    """
    listed = list(values)
    unit = common_unit(listed, quantity)
    return unit.label, [unit.text(value) for value in listed]


def text(value: Optional[float], quantity: Quantity) -> str:
    """Return one number with its unit; a dash for a missing one.

    Example:
        >>> text(0.0123, SECONDS), text(6.5e10, FLOPS_PER_S), text(None, BYTES), text(12, BYTES)
        ('12.30 ms', '65.00 GFLOP/s', '-', '12 B')
    """
    unit = common_unit([value], quantity)
    number = unit.text(value)
    return number if number == MISSING else f"{number} {unit.label}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1.

    Example:
        >>> counted(1, "link"), counted(12000, "device"), counted(8, "microbatch")
        ('1 link', '12,000 devices', '8 microbatches')
    """
    ending = "" if number == 1 else "es" if noun.endswith(("ch", "s", "x")) else "s"
    return f"{number:,} {noun}{ending}"


def ratio(value: Optional[float]) -> str:
    """Return a quotient such as a speed-up, marked "x".

    Example:
        >>> ratio(1.5)
        '1.50x'
    """
    return MISSING if value is None or not math.isfinite(value) else f"{value:.2f}x"


def percent(value: Optional[float], signed: bool = False) -> str:
    """Return a part of one as a percentage.

    Example:
        >>> percent(0.0523), percent(-0.1, signed=True)
        ('5.2 %', '-10.0 %')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{100 * value:{'+' if signed else ''}.1f} %"
