"""Compare two results, profiles or plans: ratios with intervals, and verdicts that tell differences from noise."""

from __future__ import annotations

import math
import statistics
from itertools import zip_longest
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.bench.statistics import Interval, is_significant, median_interval, starts_ratio_interval
from hwaware.cluster import ClusterProfile, Device, Link
from hwaware.costs.intervals import PROBABILITY, RECORDED
from hwaware.errors import UnusableInputError
from hwaware.formatting import BYTES, FLOPS, SECONDS, Quantity, counted, text
from hwaware.plans import RECEIVE_MEANS, LayerTimes, Plan, Stage
from hwaware.records import FileRecord, Record
from hwaware.reference_kernel import recorded_s
from hwaware.result import BenchmarkResult
from hwaware.result import Mapping as MeasuredMapping

# With fewer pairs even a sign test cannot reach 95 %: two-sided, 2 / 2^5 = 6 %, but 2 / 2^6 = 3 %.
FEWEST_POINTS = 6
# With fewer points only a change beyond every drift of a machine counts: its speed changed by up to 1.6 times within
# seconds.
SURE_RATIO = 2.0
# Ratios are shown with three decimals.
_SHOWN = 5e-4


class Difference(NamedTuple):
    """A mapping, device, link or stage that both files have.

    Attributes:
        what: Name of the mapping, of the device with a data type, of the directed link, or of a plan's figure.
        a_s, b_s: Its time in either file [s]: the median step, the largest product or message in common, or the
            predicted time.
        ratio: b over a with its 95 % interval; below 1, b is faster. A device or link with fewer than
            `FEWEST_POINTS` sizes has the ratio at the largest size, and its range.
        points: Number of measured pairs behind the interval.
        verdict: "faster", "slower", "same" (not significant), or "too few" (points, and the ratio is below
            `SURE_RATIO`). For two predictions also "too close". In profiles, "kept" means exactly the same times.
        sizes: Sizes with the smallest and the largest ratio of a range, with units; empty for an interval.
    """

    what: str
    a_s: float
    b_s: float
    ratio: Interval
    points: int
    verdict: str
    sizes: Tuple[str, ...] = ()


class Comparison(Record, frozen=True, kw_only=True):
    """Say how two results, profiles or plans differ. `print` shows one line for each difference.

    Attributes:
        schema: Schema of both.
        differences: A row for everything that both have.
        only_in_a, only_in_b: Names that one alone has.
        geometric_mean: Geometric mean of the ratios; None without any, and for plans. In profiles, rows with exactly
            the same times do not count: the profiler kept them.
        notes: Caveats for the reader, and the stages in which two plans differ.
        names: Names of the two, such as their files.

    Example:
        >>> from hwaware import Comparison
        >>> from hwaware.bench.differences import Difference
        >>> from hwaware.bench.statistics import Interval
        >>> row = Difference("hwaware", 2.0, 1.0, Interval(0.5, 0.4, 0.6), 20, "faster")
        >>> print(Comparison(schema="hwaware.benchmark", differences=(row,), only_in_a=("even",), only_in_b=(),
        ...                  geometric_mean=0.5, notes=()))
        hwaware: 2.000 s in A, 1.000 s in B, ratio 0.500 (0.400-0.600): faster
        Each ratio is the time in B divided by the time in A; "faster" and "slower" speak of B.
        Geometric mean of the ratios: 0.500.
        Only in A: even.
    """

    schema: str
    differences: Tuple[Difference, ...]
    only_in_a: Tuple[str, ...]
    only_in_b: Tuple[str, ...]
    geometric_mean: Optional[float]
    notes: Tuple[str, ...]
    names: Tuple[str, str] = ("A", "B")

    def __str__(self) -> str:
        return "\n".join([*map(self._sentence, self.differences), *self.remarks()])

    def _sentence(self, row: Difference) -> str:
        a, b = self.names
        interval = f"{row.ratio.median:.3f}"
        if row.ratio.low != row.ratio.high:
            interval += f" ({row.ratio.low:.3f}-{row.ratio.high:.3f})"
        times = f"{text(row.a_s, SECONDS)} in {a}, {text(row.b_s, SECONDS)} in {b}"
        return f"{row.what}: {times}, ratio {interval}: {VERDICTS[row.verdict]}"

    def remarks(self) -> List[str]:
        """Return everything beside the differences in words."""
        a, b = self.names
        said = ["The two files have no placement, device or link in common, so there is nothing to compare."]
        if self.differences:
            said = [f'Each ratio is the time in {b} divided by the time in {a}; "faster" and "slower" speak of {b}.']
        if self.geometric_mean is not None:
            said.append(f"Geometric mean of the ratios: {self.geometric_mean:.3f}.")
        for name, only in ((a, self.only_in_a), (b, self.only_in_b)):
            if only:
                said.append(f"Only in {name}: {', '.join(only)}.")
        return [*said, *self.notes]

    def document(self) -> Dict[str, Any]:
        """Return a JSON-ready document, in which a ratio to a time of 0 is None."""
        rows = [
            {
                **row._asdict(),
                "ratio": {key: end if math.isfinite(end) else None for key, end in row.ratio._asdict().items()},
            }
            for row in self.differences
        ]
        return {**{name: getattr(self, name) for name in self.__struct_fields__}, "differences": rows}


# How a verdict reads.
VERDICTS = {
    "faster": "faster", "slower": "slower", "same": "same", "too few": "too few points",
    "too close": "too close to call", "kept": "not measured again",
}  # fmt: skip


def compare(a: FileRecord, b: FileRecord, names: Tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two results mapping by mapping, two profiles device by device, or two plans stage by stage.

    Steps are divided by the reference kernel beside each, if both results have it. In a profile, every size of matrix
    product or message that both measured gives one ratio. The interval is that of their median. Plans are compared by
    the prices in their files, which have no noise.

    Args:
        a: A BenchmarkResult, a ClusterProfile or a Plan with its `predicted_step_s`.
        b: Another of the same type.
        names: Names of the two in texts.

    Raises:
        UnusableInputError: They are of two types, or a plan has no prices.

    Example:
        >>> from hwaware import ClusterProfile, compare
        >>> slow, fast = ClusterProfile.uniform(flops_per_s=1e12), ClusterProfile.uniform(flops_per_s=2e12)
        >>> [round(row.ratio.median, 6) for row in compare(slow, fast).differences]
        [0.5, 0.5, 1.0]
    """
    if isinstance(a, BenchmarkResult) and isinstance(b, BenchmarkResult):
        return _results(a, b, names)
    if isinstance(a, ClusterProfile) and isinstance(b, ClusterProfile):
        return _profiles(a, b, names)
    if isinstance(a, Plan) and isinstance(b, Plan):
        return _plans(a, b, names)
    raise UnusableInputError(
        f"A {_schema(a)} and a {_schema(b)} cannot be compared, expected two results, two profiles or two plans.",
        "give two hwaware.benchmark, two hwaware.cluster or two hwaware.plan files.",
        found=(_schema(a), _schema(b)),
    )


def _schema(record: object) -> str:
    return str(getattr(record, "SCHEMA", "") or type(record).__name__)


def _results(a: BenchmarkResult, b: BenchmarkResult, files: Tuple[str, str]) -> Comparison:
    ours, theirs = ({name: mapping for mapping in result.mappings for name in mapping.names} for result in (a, b))
    kernels = [result.environment.get("reference_kernel") for result in (a, b)]
    relative = kernels[0] == kernels[1] and all(m.reference_s for result in (a, b) for m in result.mappings)
    both: Dict[Tuple[str, str], str] = {}
    for name in (name for name in ours if name in theirs):  # two names of one mapping in both files are one row
        both.setdefault((ours[name].name, theirs[name].name), name)
    rows = [_mapping(name, ours[name], theirs[name], relative) for name in both.values()]
    notes = [
        f"{name} differs: {getattr(a, field)!r} and {getattr(b, field)!r}."
        for name, field in (("Scenario", "scenario"), ("Model", "model"), ("Microbatches", "num_microbatches"))
        if getattr(a, field) != getattr(b, field)
    ]
    if not relative:
        notes.append("Steps are compared in seconds: not every one has the same reference kernel beside it.")
    return _comparison(a, rows, list(ours), list(theirs), notes, files, rows)


def _mapping(name: str, a: MeasuredMapping, b: MeasuredMapping, relative: bool) -> Difference:
    before, after = (m.by_start(m.relative_steps if relative else m.step_s) for m in (a, b))
    ratio, points = starts_ratio_interval(after, before), min(len(a.step_s), len(b.step_s))
    return Difference(name, a.median_step_s, b.median_step_s, ratio, points, _verdict(ratio, points))


def _profiles(a: ClusterProfile, b: ClusterProfile, files: Tuple[str, str]) -> Comparison:
    ours, theirs = dict(_curves(a)), dict(_curves(b))
    rates = [{f"{link.source} -> {link.target}": _by_rate(link) for link in profile.links} for profile in (a, b)]
    notes, rows = [], []
    products = {name for device in a.devices for name, _ in _products(device)}
    for name in (name for name in ours if name in theirs):
        found = _curve(name, ours[name], theirs[name], FLOPS if name in products else BYTES)
        if not found:
            found = _curve(name, rates[0].get(name, {}), rates[1].get(name, {}), BYTES)
            computed = " So its times are computed from latency and rate, for 1 kB and 1 MB." * bool(found)
            notes.append(f"{name}: the two files have no size in common.{computed}")
        rows += found
    kinds = [{device.id: device.kind for device in profile.devices} for profile in (a, b)]
    unlike = [name for name in kinds[0] if kinds[1].get(name, kinds[0][name]) != kinds[0][name]]
    if unlike:
        one, other = (known[unlike[0]] for known in kinds)
        notes.append(
            f"The files may be of different clusters: the kind of {counted(len(unlike), 'device')} differs. "
            f"{unlike[0]} is {one} in {files[0]}, and {other} in {files[1]}."
        )
    before, after = (recorded_s(profile.environment) for profile in (a, b))
    if before and after and before != after:  # equal if --resume kept it
        one, other = files
        notes.append(
            f"The reference kernel took {after / before:.2f} times as long beside {other} as beside {one}. If a device "
            "differs by about this factor, the cause may be the machine's speed."
        )
    rows = [row._replace(verdict="kept", sizes=()) if ours[row.what] == theirs[row.what] else row for row in rows]
    measured = [row for row in rows if row.verdict != "kept"]
    if len(measured) < len(rows):
        notes.append(
            f"{len(rows) - len(measured)} of {len(rows)} rows have exactly the same times in both files, so nobody "
            "measured them again. The geometric mean leaves them out."
        )
    if any(row.points >= FEWEST_POINTS for row in measured):
        notes.append(
            f"Points are sizes in both files. With {FEWEST_POINTS} points or more, the ratio is the median over all "
            "sizes, with its 95 % interval. Times are of the largest size."
        )
    ends: Dict[Tuple[str, ...], List[str]] = {}
    for row in (row for row in rows if row.sizes):
        ends.setdefault(row.sizes if row.ratio.high - row.ratio.low > _SHOWN else (), []).append(row.what)
    if ends:
        notes.append(
            'A row marked "range" has the ratio of the largest size, and the range over all sizes. Such a row has '
            f"fewer than {FEWEST_POINTS} points, or its largest size differs by a factor of {SURE_RATIO:g} or more."
        )
    for at in filter(None, ends):
        notes.append(f"{', '.join(ends[at])}: smallest ratio of the range at {at[0]}, largest at {at[-1]}.")
    return _comparison(a, rows, list(ours), list(theirs), notes, files, measured)


def _plans(a: Plan, b: Plan, files: Tuple[str, str]) -> Comparison:
    for name, plan in zip(files, (a, b)):
        if plan.status == "infeasible":
            raise UnusableInputError(
                f"The plan {name} is infeasible. {(plan.reason or '').partition(' To fix:')[0]}".strip(),
                "compare plans that fit, or see all remedies by `hwaware show`.",
            )
        if plan.predicted_step_s is None:
            raise UnusableInputError(
                f"The plan {name} has no predicted_step_s, expected the step time that `hwaware plan` writes.",
                "price it by `hwaware evaluate CLUSTER WORKLOAD PLAN -o PRICED`, and compare PRICED.",
            )
    figures = [("predicted step", a.predicted_step_s, b.predicted_step_s)]
    of_step, unit = [plan.num_microbatches for plan in (a, b)], "microbatches"
    if a.microbatch_size != b.microbatch_size:  # 0 samples: the workload tells how many, and it is not here
        of_step, unit = [plan.num_microbatches * (plan.microbatch_size or 0) for plan in (a, b)], "samples"
    alike = of_step[0] == of_step[1]
    if not alike and min(of_step) > 0:  # a step of one trains fewer samples than a step of the other
        ours, theirs = ((plan.predicted_step_s or 0.0) / count for plan, count in zip((a, b), of_step))
        figures.append((f"predicted step / number of {unit}", ours, theirs))
    for index, (before, after) in enumerate(zip(a.stages, b.stages)):
        for field in ("compute_s", "receive_s", "gradient_sync_s"):
            name = f"stage {index} {field[:-2].replace('_', ' ')}"
            figures.append((name, getattr(before, field), getattr(after, field)))
    rows = [
        _predicted(name, x, y)
        for place, (name, x, y) in enumerate(figures)
        if x is not None and y is not None and (x > 0 or y > 0 or place == 0)  # the step's row comes first in any case
    ]
    notes = [
        f"{name} differs: {' and '.join(str(getattr(plan, field) or 'that of the workload') for plan in (a, b))}."
        for name, field in (
            ("Number of microbatches", "num_microbatches"),
            ("Microbatch size", "microbatch_size"),
            ("Schedule", "schedule"),
        )
        if getattr(a, field) != getattr(b, field)
    ]
    if any(name.endswith("receive") for name, *_ in figures):
        notes.append(RECEIVE_MEANS)
    shown = [[_placed(stage) for stage in plan.stages] for plan in (a, b)]
    for index, (one, other) in enumerate(zip_longest(*shown, fillvalue="no such stage")):
        if one != other:
            notes.append(f"Stage {index}: {one} in {files[0]}; {other} in {files[1]}.")
    if a.step_interval_s and b.step_interval_s:
        spans = [" to ".join(text(end, SECONDS) for end in plan.step_interval_s or ()) for plan in (a, b)]
        notes.append(f"These are predictions: 90 % of steps take {spans[0]} in {files[0]}, {spans[1]} in {files[1]}.")
    if alike:
        rows, said = _judged(rows, [plan.layer_times for plan in (a, b)])
        notes += said
    if shown[0] == shown[1]:
        notes.append(
            "Both plans have the same stages: the same layers on the same devices. So their prices differ by the "
            "profile, the workload or the options alone."
        )
    else:
        notes.append(
            "To see what a change of the cluster brings, price one plan on both profiles, by `hwaware evaluate`."
        )
    return Comparison(
        schema=a.SCHEMA, differences=tuple(rows), only_in_a=(), only_in_b=(), geometric_mean=None, notes=tuple(notes),
        names=files,
    )  # fmt: skip


def _predicted(name: str, a: float, b: float) -> Difference:
    ratio = b / a if a > 0 else 1.0 if a == b else math.inf
    verdict = "same" if abs(ratio - 1) < _SHOWN else "faster" if b < a else "slower"
    return Difference(name, a, b, Interval(ratio, ratio, ratio), 1, verdict)


def _judged(rows: List[Difference], sources: Sequence[Optional[LayerTimes]]) -> Tuple[List[Difference], List[str]]:
    """Return rows of two plans with the verdicts that predictions allow, and a note if the steps are close.

    The first row is that of the steps. A stage's row is no surer.

    Args:
        rows: Rows with verdicts that allow no error.
        sources: Source of each plan's layer times. Errors are larger if one of these is unknown or "model".
    """
    source: LayerTimes = "measured" if set(sources) == {"measured"} else "model"
    limit = math.expm1(RECORDED[source].difference)
    close = [row.verdict != "same" and abs(row.ratio.median - 1) <= limit for row in rows]
    notes = []
    if close[0]:
        times = {"measured": "measured layer times", "model": "layer times from formulas"}[source]
        known = "" if None in sources else ", as here"
        notes.append(
            f"The predicted steps differ by {100 * abs(rows[0].ratio.median - 1):.1f} %. This alone does not show "
            f"which one is faster. With {times}{known}, {100 * PROBABILITY:.0f} % of the "
            f"ratios of two predicted steps are off by up to {100 * limit:.0f} % from the ratios of the measured steps."
        )
        if None in sources:
            notes.append(
                "The files do not say if their layer times are measured. To fix: price both plans again, by `hwaware "
                "evaluate CLUSTER WORKLOAD PLAN -o PRICED`, and compare the priced plans."
            )
    return [row._replace(verdict="too close") if is_close else row for row, is_close in zip(rows, close)], notes


def _placed(stage: Stage) -> str:
    first, last = stage.layers
    layers = f"layer {first}" if first == last else f"layers {first}-{last}"
    return f"{layers} on {' | '.join(' + '.join(replica.devices) for replica in stage.replicas)}"


def _curves(profile: ClusterProfile) -> Iterator[Tuple[str, Dict[float, float]]]:
    for device in profile.devices:
        yield from _products(device)
    for link in profile.links:
        yield f"{link.source} -> {link.target}", _messages(link)
    for one in profile.collectives:
        yield f"{one.op} {'+'.join(one.devices)} {one.dtype}", {point.bytes: point.seconds for point in one.points}


def _products(device: Device) -> Iterator[Tuple[str, Dict[float, float]]]:
    for dtype, points in sorted(device.throughput.items()):
        yield f"{device.id} {dtype}", {point.flops: point.seconds for point in points}


def _messages(link: Link) -> Dict[float, float]:
    return {sample.bytes: sample.seconds for sample in link.samples} or _by_rate(link)


def _by_rate(link: Link) -> Dict[float, float]:
    """Return seconds by bytes, for two sizes, by the link's latency and bandwidth."""
    return {nbytes: link.latency_s + nbytes / link.bandwidth_bytes_per_s for nbytes in (1e3, 1e6)}


def _curve(name: str, a: Mapping[float, float], b: Mapping[float, float], quantity: Quantity) -> List[Difference]:
    sizes = sorted(set(a) & set(b))
    if not sizes:
        return []
    ratios = [b[size] / a[size] for size in sizes]
    ratio = median_interval(ratios)
    # The largest size tells most: small messages are all latency.
    if len(sizes) < FEWEST_POINTS or _is_sure(ratios[-1]):
        ends = min(zip(ratios, sizes)), max(zip(ratios, sizes))
        ratio = Interval(ratios[-1], ends[0][0], ends[1][0])
        named = tuple(text(size, quantity) for _, size in ends)
        return [Difference(name, a[sizes[-1]], b[sizes[-1]], ratio, len(sizes), _verdict(ratio, points=1), named)]
    return [Difference(name, a[sizes[-1]], b[sizes[-1]], ratio, len(sizes), _verdict(ratio, len(sizes)))]


def _is_sure(ratio: float) -> bool:
    """Return True if one ratio alone shows a difference."""
    return not 1 / SURE_RATIO < ratio < SURE_RATIO


def _verdict(ratio: Interval, points: int) -> str:
    if points < FEWEST_POINTS and not _is_sure(ratio.median):
        return "too few"
    if points >= FEWEST_POINTS and not is_significant(ratio):
        return "same"
    return "faster" if ratio.median < 1.0 else "slower"


def _comparison(
    record: FileRecord,
    rows: List[Difference],
    ours: Sequence[str],
    theirs: Sequence[str],
    notes: List[str],
    files: Tuple[str, str],
    measured: Sequence[Difference],
) -> Comparison:
    both = {*ours} & {*theirs}
    mean = math.exp(statistics.fmean(math.log(row.ratio.median) for row in measured)) if measured else None
    judged = sum(row.points >= FEWEST_POINTS and not row.sizes for row in measured)
    if judged > 1:
        notes.append(
            f"Even if nothing has changed, about one in twenty of these {judged} intervals excludes 1 by chance."
        )
    return Comparison(
        schema=record.SCHEMA,
        differences=tuple(rows),
        only_in_a=tuple(name for name in ours if name not in both),
        only_in_b=tuple(name for name in theirs if name not in both),
        geometric_mean=mean,
        notes=tuple(notes),
        names=files,
    )
