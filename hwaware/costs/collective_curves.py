"""Measured curves of sends and collectives: checked, one of each, and found by what they measured."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import OPERATIONS
from hwaware.costs.curves import FloatArray
from hwaware.costs.patterns import Groups, Shape, checked_groups, shapes
from hwaware.errors import UnusableInputError


class Curve(NamedTuple):
    """One measured curve.

    Attributes:
        op, dtype, devices_per_host, groups: What was measured; groups None if the source does not name them.
        shape: Of the groups (of the first one if they differ).
        sizes, seconds: Points, sizes strictly rising.
    """

    op: str
    dtype: str
    devices_per_host: int
    groups: Optional[Groups]
    shape: Shape
    sizes: FloatArray
    seconds: FloatArray


# Short names of data types that some sources use.
DTYPE_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}


def check_operation(op: str, nbytes: float) -> None:
    """Check that there is such an operation and that the size is one.

    Raises:
        UnusableInputError: There is not, or it is not.
    """
    if op not in OPERATIONS:
        raise UnusableInputError(f"op is {op!r}, expected one of {', '.join(OPERATIONS)}.", "correct the operation.")
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise UnusableInputError(f"nbytes is {nbytes!r}, expected a finite number, at least 0.", "correct the size.")


def curve_key(op: str, dtype: str, devices_per_host: int, groups: Optional[Sequence[Sequence[int]]]) -> Tuple[Any, ...]:
    """What one curve is found by: the order of groups does not matter, that of ranks only for a send."""
    dtype = DTYPE_NAMES.get(dtype, dtype)
    if groups is None:
        return (op, dtype, devices_per_host, None)
    ranks = (tuple(group) if op == "send" else tuple(sorted(group)) for group in groups)
    return (op, dtype, devices_per_host, tuple(sorted(ranks)))


def checked_curve(curve: Mapping[str, Any], index: int) -> Curve:
    """One curve as `fit_collectives` takes it; `index` is what error messages call it.

    Raises:
        UnusableInputError: A key is missing, or the operation, groups or points are not usable.
    """
    missing = [name for name in ("op", "dtype", "devices_per_host", "replica_groups", "points") if name not in curve]
    if missing:
        raise UnusableInputError(
            f"curve {index} lacks {', '.join(missing)}.", "give op, dtype, devices_per_host, replica_groups and points."
        )
    op, per_host, given = curve["op"], int(curve["devices_per_host"]), curve["replica_groups"]
    check_operation(op, 0.0)
    groups = None if given is None else checked_groups(given, per_host)
    values = [(float(size), float(t)) for size, t in curve["points"] if size > 0 and t is not None]
    if not values or not all(math.isfinite(size) and 0 < seconds < math.inf for size, seconds in values):
        raise UnusableInputError(
            f"curve {index} ({op}) has {len(values)} points above 0 bytes, expected at least one, and finite seconds "
            "above 0.",
            "leave out sizes that were not measured.",
        )
    sizes, seconds = _median_points(values)
    shape = shapes(groups or ((0, per_host),), per_host)[0]
    return Curve(op, DTYPE_NAMES.get(curve["dtype"], str(curve["dtype"])), per_host, groups, shape, sizes, seconds)


def _median_points(points: Iterable[Tuple[float, float]]) -> Tuple[FloatArray, FloatArray]:
    by_size: Dict[float, List[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    sizes = sorted(by_size)
    return np.array(sizes), np.array([float(np.median(by_size[size])) for size in sizes])


def merged_curves(curves: Sequence[Curve]) -> List[Curve]:
    """Curves of the same thing as one."""
    groups: Dict[Tuple[Any, ...], List[Curve]] = {}
    for curve in curves:
        groups.setdefault(curve_key(curve.op, curve.dtype, curve.devices_per_host, curve.groups), []).append(curve)
    made = []
    for same in groups.values():
        points = [point for curve in same for point in zip(curve.sizes.tolist(), curve.seconds.tolist())]
        sizes, seconds = _median_points(points)
        made.append(same[0]._replace(sizes=sizes, seconds=seconds))
    return made
