"""Price sends and collectives: by measured curves, and by the groups' structure where nobody measured."""

from __future__ import annotations

import math
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import OPERATIONS
from hwaware.costs.curves import FloatArray, between_points, medians
from hwaware.costs.patterns import Groups, Shape, checked_groups, passes, shapes, traffic
from hwaware.errors import UnusableInputError

# Fewer sizes than this are not a curve of their own: they only correct what the other curves say.
OWN_CURVE_POINTS = 3
# A launch takes as long as 1.7 further devices: fitted to the smallest messages of 2, 4 and 8 devices (arena, V100).
LAUNCH_DEVICES = 1.7
# Part of the first pass's start that a second pass does not pay again: an all-reduce of 4 KiB across hosts takes 0.9 to
# 2 times, in the median 1.3 times, as long as the all-gather (both recorded NCCL files).
SHARED_START = 0.7
# How fast a curve's weight decays with its `_distance` from the `_Question`.
WEIGHT_DECAY = 3.0


class Curve(NamedTuple):
    """Hold one measured curve: sizes rise strictly, and groups is None if the source does not name them."""

    op: str
    dtype: str
    devices_per_host: int
    groups: Optional[Groups]
    shape: Shape
    sizes: FloatArray
    seconds: FloatArray

    def at(self, nbytes: float) -> float:
        """Return the seconds of n bytes."""
        return between_points(nbytes, self.sizes, self.seconds)


class _Question(NamedTuple):
    op: str
    dtype: str
    devices_per_host: int
    groups: Groups
    shape: Shape


def fit_collectives(curves: Iterable[Mapping[str, Any]]) -> CollectiveModel:
    """Fit the model of one cluster's communication to curves that were measured on it.

    Each curve is a mapping with `op`, `dtype`, `devices_per_host`, `replica_groups` and `points`: [[bytes, seconds],
    ...]. Bytes are of the full logical array. Fit curves of other kinds of devices and networks on their own.

    Raises:
        UnusableInputError: A curve is not usable, or none is given.

    Example:
        >>> points = [[1e4, 2e-4], [1e6, 1.1e-3], [1e8, 1.001e-1]]
        >>> model = fit_collectives([{"op": "all-gather", "dtype": "float32", "devices_per_host": 1,
        ...                           "replica_groups": [[0, 1]], "points": points}])
        >>> round(model.predict_s(op="all-gather", nbytes=1e6, dtype="float32", devices_per_host=1,
        ...                       replica_groups=[[0, 1]]), 6)
        0.0011
        >>> round(model.predict_s(op="all-reduce", nbytes=1e8, dtype="float32", devices_per_host=1,
        ...                       replica_groups=[[0, 1]]), 4)  # two passes, one start
        0.2001
    """
    groups: Dict[Tuple[Any, ...], List[Curve]] = {}
    for index, curve in enumerate(curves):
        one = _checked_curve(curve, index)
        groups.setdefault(_curve_key(one.op, one.dtype, one.devices_per_host, one.groups), []).append(one)
    if not groups:
        raise UnusableInputError(
            "there are no curves to fit.", "measure some (hwaware profile), or load a file of them."
        )
    merged = {}
    for key, same in groups.items():
        sizes, seconds = medians(point for curve in same for point in zip(curve.sizes, curve.seconds))
        merged[key] = same[0]._replace(sizes=sizes, seconds=seconds)
    return CollectiveModel(merged)


class CollectiveModel:
    """Predict sends and collectives on one cluster; made by `fit_collectives`."""

    def __init__(self, curves: Dict[Tuple[Any, ...], Curve]) -> None:
        self._own, self.curves = curves, tuple(curves.values())
        self._slopes = {level: _latency_slope(self.curves, level) for level in (False, True)}
        self._operand_all_to_all = _counts_operands(self.curves)
        self._shared_sends = any(curve.op == "send" and curve.shape.size > 2 for curve in self.curves)
        self._wire_s = self._wire_table()
        self._donors: Dict[_Question, List[Tuple[float, Curve]]] = {}

    def predict_s(
        self,
        *,
        op: str,
        nbytes: float,
        dtype: str,
        devices_per_host: int,
        replica_groups: Optional[Sequence[Sequence[int]]],
    ) -> float:
        """Return the seconds of one operation that all groups run at once, until the slowest group ends.

        `between_points` prices measured groups. For others, every curve c of the cluster says

            t(S) = p / p_c  t_c(S (F / p) / (F_c / p_c) r) + B (n - n_c)

        The same bytes through the same card take the same time, by `traffic` F and `passes` p. A second pass pays 0.3
        of the start again. Each further device costs B, the slope of measured latencies. Inside a host, r is the cost
        of a byte in groups of n over that in groups of n_c. Across hosts, r is 1, but rings are never faster than their
        part inside hosts. Answers are averaged as logarithms, weighted by exp(-3 d) for a distance d of operation, size
        and topology.

        Args:
            op: One of `hwaware.cluster.OPERATIONS`.
            nbytes: Bytes of the full logical array or message. For an all-gather, that is its output. For an
                all-to-all, it is the operand times the group's size.
            dtype: Curves of other data types serve too, by their bytes.
            devices_per_host: Rank r is on host r // devices_per_host.
            replica_groups: Groups of ranks; a send's are [source, target]. An unmeasured group of one takes 0.

        Raises:
            UnusableInputError: The operation or the groups make no sense.

        Source: Thakur et al., 2005, for the traffic; validated in benchmarks/predictions.py.
        """
        _check_operation(op, nbytes)
        own = self._measured(op, dtype, devices_per_host, replica_groups)
        if own is not None and len(own.sizes) >= OWN_CURVE_POINTS:
            return own.at(nbytes)
        if replica_groups is None:
            replica_groups = [[0, devices_per_host]]
        groups = checked_groups(replica_groups, devices_per_host)
        asked = [_Question(op, dtype, devices_per_host, groups, shape) for shape in shapes(groups, devices_per_host)]
        return max(self._shape_s(question, nbytes, own) for question in asked)

    def _measured(
        self, op: str, dtype: str, devices_per_host: int, replica_groups: Optional[Sequence[Sequence[int]]]
    ) -> Optional[Curve]:
        """Return the curve of these groups; of another data type if this one has none, because bytes travel."""
        asked = _curve_key(op, dtype, devices_per_host, replica_groups)
        if asked in self._own:
            return self._own[asked]
        same = [curve for key, curve in self._own.items() if (key[0], *key[2:]) == (asked[0], *asked[2:])]
        return max(same, key=lambda curve: len(curve.sizes)) if same else None

    def _shape_s(self, question: _Question, nbytes: float, own: Optional[Curve]) -> float:
        if question not in self._donors:
            self._donors[question] = _weighted_donors(self.curves, question)
        donors = self._donors[question]
        if not donors:
            return own.at(nbytes) if own is not None else 0.0
        logs = [math.log(max(1e-9, self._transferred_s(question, curve, nbytes))) for _, curve in donors]
        average = float(np.average(logs, weights=[weight for weight, _ in donors]))
        seconds = max(math.exp(average), self._inside_s(question, nbytes))
        if own is None:
            return seconds
        if len(own.sizes) > 1 and not any(_is_whole(curve, question) for _, curve in donors):
            return own.at(nbytes)
        # A point or two correct what the other curves say, by the same factor between and around them.
        factors = [
            math.log(t) - math.log(self._shape_s(question, size, None)) for size, t in zip(own.sizes, own.seconds)
        ]
        at = np.interp(math.log(max(nbytes, 1.0)), np.log(own.sizes), factors)
        return seconds * math.exp(float(at))

    def _transferred_s(self, question: _Question, curve: Curve, nbytes: float) -> float:
        """Return what one curve says of groups or an operation other than its own."""
        here, there = question.shape, curve.shape
        if here.size == 1:
            return curve.at(nbytes)
        wanted, known = passes(question.op, here), passes(curve.op, there)
        asked = nbytes * self._load(question.op, here, nbytes) / wanted
        # The share of an all-reduce's traffic depends on its size, so the size that moves as much is found twice.
        size = asked * known / self._load(curve.op, there, nbytes)
        size = asked * known / self._load(curve.op, there, size)
        if not (here.crossing or there.crossing):
            size *= _wire_ratio(self._wire_s.get(curve.op, {}), there.size, here.size)
        seconds, start = curve.at(size), curve.at(0.0)
        if wanted > known:  # the second pass shares part of the start
            seconds = 2 * seconds - SHARED_START * start
        elif wanted < known:
            seconds = (seconds + SHARED_START * start / (2 - SHARED_START)) / 2
        later = self._slopes[bool(here.crossing)] * (here.size - there.size) * wanted / known
        fewer = (here.size + LAUNCH_DEVICES) / (there.size + LAUNCH_DEVICES)
        return max(seconds + later, seconds * min(1.0, fewer))

    def _inside_s(self, question: _Question, nbytes: float) -> float:
        """Return what a ring's part inside the hosts takes at least, at the rate of measured groups inside a host."""
        shape = question.shape
        known = self._wire_s.get(question.op, {})
        if not shape.crossing or shape.layout[0] < 2 or not known or question.op in ("send", "all-to-all"):
            return 0.0
        nearest = min(known, key=lambda size: abs(size - shape.layout[0]))
        inside = shape._replace(layout=(shape.size,), crossing=0)
        return nbytes * traffic(question.op, inside, nbytes) * known[nearest]

    def _load(self, op: str, shape: Shape, nbytes: float) -> float:
        """Return `traffic`, but for operations that this source counts in a way of its own."""
        if op == "send" and self._shared_sends:
            return traffic("all-gather", shape, nbytes)
        operands = shape.size if op == "all-to-all" and self._operand_all_to_all else 1
        return traffic(op, shape, nbytes) * operands

    def _wire_table(self) -> Dict[str, Dict[int, float]]:
        """Return seconds per byte of traffic of long messages inside a host, by operation and group size."""
        found: Dict[str, Dict[int, List[Tuple[int, float]]]] = {}
        for curve in self.curves:
            few = len(curve.sizes) < OWN_CURVE_POINTS
            if curve.shape.crossing or curve.shape.size < 2 or curve.groups is None or few:
                continue
            size = float(curve.sizes[-1])
            wire = float(curve.seconds[-1]) / (size * self._load(curve.op, curve.shape, size))
            found.setdefault(curve.op, {}).setdefault(curve.shape.size, []).append((curve.shape.stride, wire))
        # Neighbours if measured: groups with gaps may have fewer wires.
        return {
            op: {
                size: float(np.median([wire for stride, wire in wires if stride == min(wires)[0]]))
                for size, wires in sizes.items()
            }
            for op, sizes in found.items()
        }


def _wire_ratio(known: Mapping[int, float], there: int, here: int) -> float:
    """Return the cost of a byte in groups of `here` devices over that in groups of `there` devices."""
    if there not in known or len(known) < 2:
        return 1.0
    sizes = sorted(known)
    at, logs = np.log2(sizes), np.log([known[size] for size in sizes])
    wanted = float(np.interp(math.log2(here), at, logs))
    if here > sizes[-1]:  # rings fill ever more of the wires: go on with half the slope, at most one step
        steps = min(1.0, (math.log2(here) - at[-1]) / (at[-1] - at[-2]))
        wanted += 0.5 * steps * float(logs[-1] - logs[-2])
    return math.exp(wanted - math.log(known[there]))


def _latency_slope(curves: Sequence[Curve], crossing: bool) -> float:
    """Return B: the seconds that one more device adds to the smallest messages, by Theil-Sen."""
    known = [c for c in curves if bool(c.shape.crossing) == crossing and c.shape.size > 1 and c.groups is not None]
    slopes = [
        (b.seconds[0] - a.seconds[0]) / (b.shape.size - a.shape.size)
        for a in known
        for b in known
        if a.op == b.op and a.shape.size < b.shape.size
    ]
    if slopes:
        return max(0.0, float(np.median(slopes)))
    # Groups of one size alone: their latency over n + 1.7.
    single = [float(c.seconds[0]) / (c.shape.size + LAUNCH_DEVICES) for c in known]
    return float(np.median(single)) if single else 0.0


# Ratio of an all-to-all's time to that of its traffic at the rate of an all-gather on the same groups. Beyond this
# ratio, the source counts only one device's operand. Seen on the recorded files: 1.5 to 2.2 counted right, 2.3 to 14
# by operand.
_SLOWEST_ALL_TO_ALL = 2.25


def _counts_operands(curves: Sequence[Curve]) -> bool:
    """Return True if the source counts an all-to-all by one device's operand instead of the full array."""
    # Groups across hosts decide if any were measured.
    ratios: Dict[bool, List[float]] = {False: [], True: []}
    for curve in curves:
        if curve.op != "all-to-all" or curve.groups is None or curve.shape.size < 2:
            continue
        for other in curves:
            if other.op not in ("all-gather", "reduce-scatter") or other.groups != curve.groups:
                continue
            size = float(min(curve.sizes[-1], other.sizes[-1]))
            expected = traffic(curve.op, curve.shape, size) / traffic(other.op, other.shape, size)
            ratios[bool(curve.shape.crossing)].append(curve.at(size) / other.at(size) / expected)
    decisive = ratios[True] or ratios[False]
    return bool(decisive) and float(np.median(decisive)) > _SLOWEST_ALL_TO_ALL


# Distances between operations, chosen on the recorded NCCL files; all-to-all is unlike all others.
FOREIGN = 1.8
_KINSHIP = {
    frozenset(("all-gather", "reduce-scatter")): 0.1,
    frozenset(("all-gather", "all-reduce")): 0.7,
    frozenset(("reduce-scatter", "all-reduce")): 0.7,
    frozenset(("all-gather", "send")): 0.3,
    frozenset(("reduce-scatter", "send")): 0.4,
    frozenset(("all-reduce", "send")): 0.7,
}


def _distance(question: _Question, curve: Curve) -> float:
    """Return how unlike a measured curve is to what is asked."""
    here, there = question.shape, curve.shape
    apart = 0.0 if question.op == curve.op else _KINSHIP.get(frozenset((question.op, curve.op)), FOREIGN)
    apart += 0.7 * abs(math.log2(here.size / there.size))
    if here.crossing and there.crossing:
        apart += 0.3 * abs(math.log2(here.crossing / there.crossing))
        # One flow alone does not fill every card, so groups alone and groups at once are unlike.
        apart += 0.7 if (here.crossing == 1) != (there.crossing == 1) else 0.0
    apart += 0.3 * abs(math.log2(here.stride / there.stride))
    apart += 0.05 if question.dtype != curve.dtype else 0.0
    return apart + (0.2 if question.devices_per_host != curve.devices_per_host else 0.0)


def _is_whole(curve: Curve, question: _Question) -> bool:
    """Return True if a curve has enough points and is of the same level (inside or across hosts)."""
    return len(curve.sizes) >= OWN_CURVE_POINTS and bool(curve.shape.crossing) == bool(question.shape.crossing)


def _weighted_donors(curves: Sequence[Curve], question: _Question) -> List[Tuple[float, Curve]]:
    """Return the curves that answer, best first: those of the same level (inside or across hosts) if any."""
    if question.shape.size == 1:
        usable = [c for c in curves if c.shape.size == 1]
    else:
        # A source that does not name its groups does not say either whether they cross hosts.
        several = [c for c in curves if c.shape.size > 1 and c.groups and len(c.sizes) > 1]
        same = [c for c in several if bool(c.shape.crossing) == bool(question.shape.crossing)]
        usable = [c for c in same if _is_whole(c, question)] or same or several
    distances = [(_distance(question, curve), curve) for curve in usable]
    nearest = min((distance for distance, _ in distances), default=0.0)
    weighted = [(math.exp(-WEIGHT_DECAY * (distance - nearest)), curve) for distance, curve in distances]
    return sorted((w for w in weighted if w[0] > 0.01), key=lambda w: -w[0])


# Short names of data types that some sources use.
_DTYPE_NAMES = {"f16": "float16", "bf16": "bfloat16", "f32": "float32", "f64": "float64"}


def _check_operation(op: str, nbytes: float) -> None:
    """Raise UnusableInputError for an unknown operation or an unusable size."""
    if op not in OPERATIONS:
        raise UnusableInputError(f"op is {op!r}, expected one of {', '.join(OPERATIONS)}.", "correct the operation.")
    if not (math.isfinite(nbytes) and nbytes >= 0):
        raise UnusableInputError(f"nbytes is {nbytes!r}, expected a finite number, at least 0.", "correct the size.")


def _curve_key(
    op: str, dtype: str, devices_per_host: int, groups: Optional[Sequence[Sequence[int]]]
) -> Tuple[Any, ...]:
    """Return the key of a curve: sorted groups; their ranks stay in order for a send alone."""
    dtype = _DTYPE_NAMES.get(dtype, dtype)
    if groups is None:
        return (op, dtype, devices_per_host, None)
    ranks = (tuple(group) if op == "send" else tuple(sorted(group)) for group in groups)
    return (op, dtype, devices_per_host, tuple(sorted(ranks)))


def _checked_curve(curve: Mapping[str, Any], index: int) -> Curve:
    """Return one curve as `fit_collectives` takes it, or raise UnusableInputError that names the curve by `index`."""
    missing = [name for name in ("op", "dtype", "devices_per_host", "replica_groups", "points") if name not in curve]
    if missing:
        raise UnusableInputError(
            f"curve {index} lacks {', '.join(missing)}.", "give op, dtype, devices_per_host, replica_groups and points."
        )
    op, per_host, given = curve["op"], int(curve["devices_per_host"]), curve["replica_groups"]
    _check_operation(op, 0.0)
    groups = None if given is None else checked_groups(given, per_host)
    values = [(float(size), float(t)) for size, t in curve["points"] if size > 0 and t is not None]
    if not values or not all(math.isfinite(size) and 0 < seconds < math.inf for size, seconds in values):
        raise UnusableInputError(
            f"curve {index} ({op}) has {len(values)} points above 0 bytes, expected at least one, and finite seconds "
            "above 0.",
            "leave out sizes that were not measured.",
        )
    sizes, seconds = medians(values)
    shape = shapes(groups or ((0, per_host),), per_host)[0]
    return Curve(op, _DTYPE_NAMES.get(curve["dtype"], str(curve["dtype"])), per_host, groups, shape, sizes, seconds)
