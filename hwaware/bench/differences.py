"""Compare two results or two profiles: ratios with intervals, and verdicts that tell differences from noise."""

from __future__ import annotations

import math
import statistics
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from hwaware.bench.statistics import Interval, is_significant, median_interval, starts_ratio_interval
from hwaware.cluster import ClusterProfile, Device, Link
from hwaware.errors import UnusableInputError
from hwaware.formatting import SECONDS, text
from hwaware.records import FileRecord, Record
from hwaware.reference_kernel import recorded_s
from hwaware.result import BenchmarkResult
from hwaware.result import Mapping as MeasuredMapping

# With fewer pairs even a sign test cannot reach 95 %: two-sided, 2 / 2^5 = 6 %, but 2 / 2^6 = 3 %.
FEWEST_POINTS = 6


class Difference(NamedTuple):
    """A mapping, device or link that both files measured.

    Attributes:
        what: Name of the mapping, of the device with a data type, or of the directed link.
        a_s, b_s: Its time in either file [s]: the median step, or the largest product or message in common.
        ratio: b over a with its 95 % interval; below 1, b is faster.
        points: Number of measured pairs behind the interval.
        verdict: "faster", "slower", "same" (not significant) or "too few" (points).
    """

    what: str
    a_s: float
    b_s: float
    ratio: Interval
    points: int
    verdict: str


class Comparison(Record, frozen=True, kw_only=True):
    """Say how two results or two profiles differ. `print` shows one line for each difference.

    Attributes:
        schema: Schema of both.
        differences: A row for everything that both measured.
        only_in_a, only_in_b: Names that one alone has.
        geometric_mean: Geometric mean of the ratios; None without any.
        notes: Caveats for the reader.

    Example:
        >>> row = Difference("hwaware", 2.0, 1.0, Interval(0.5, 0.4, 0.6), 20, "faster")
        >>> print(Comparison(schema="hwaware.benchmark", differences=(row,), only_in_a=("even",), only_in_b=(),
        ...                  geometric_mean=0.5, notes=()))
        hwaware: 2.000 s and 1.000 s, B / A 0.500 (0.400-0.600): B is faster.
        Geometric mean of the ratios: 0.500; below 1, B is faster.
        Only in A: even.
    """

    schema: str
    differences: Tuple[Difference, ...]
    only_in_a: Tuple[str, ...]
    only_in_b: Tuple[str, ...]
    geometric_mean: Optional[float]
    notes: Tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join([*map(_sentence, self.differences), *self.remarks()])

    def remarks(self) -> List[str]:
        """Return everything beside the differences in words."""
        said = [] if self.differences else ["The two files have no mapping, device or link in common."]
        if self.geometric_mean is not None:
            said.append(f"Geometric mean of the ratios: {self.geometric_mean:.3f}; below 1, B is faster.")
        for name, only in (("A", self.only_in_a), ("B", self.only_in_b)):
            if only:
                said.append(f"Only in {name}: {', '.join(only)}.")
        return [*said, *self.notes]

    def document(self) -> Dict[str, Any]:
        """Return a JSON-ready document."""
        rows = [{**row._asdict(), "ratio": row.ratio._asdict()} for row in self.differences]
        return {**{name: getattr(self, name) for name in self.__struct_fields__}, "differences": rows}


# How a verdict reads.
VERDICTS = {"faster": "B is faster", "slower": "B is slower", "same": "same", "too few": "too few points"}


def _sentence(row: Difference) -> str:
    times = f"{text(row.a_s, SECONDS)} and {text(row.b_s, SECONDS)}"
    interval = f"{row.ratio.median:.3f} ({row.ratio.low:.3f}-{row.ratio.high:.3f})"
    return f"{row.what}: {times}, B / A {interval}: {VERDICTS[row.verdict]}."


def compare(a: FileRecord, b: FileRecord) -> Comparison:
    """Compare two results mapping by mapping, or two profiles device by device and link by link.

    Steps are divided by the reference kernel beside each, if both results have it. In a profile, every size of matrix
    product or message that both measured gives one ratio. The interval is that of their median.

    Args:
        a: A BenchmarkResult or a ClusterProfile.
        b: Another of the same type.

    Raises:
        UnusableInputError: They are not two results or two profiles.

    Example:
        >>> slow, fast = ClusterProfile.uniform(flops_per_s=1e12), ClusterProfile.uniform(flops_per_s=2e12)
        >>> [round(row.ratio.median, 6) for row in compare(slow, fast).differences]
        [0.5, 0.5, 1.0]
    """
    if isinstance(a, BenchmarkResult) and isinstance(b, BenchmarkResult):
        return _results(a, b)
    if isinstance(a, ClusterProfile) and isinstance(b, ClusterProfile):
        return _profiles(a, b)
    raise UnusableInputError(
        f"A {_schema(a)} and a {_schema(b)} cannot be compared, expected two results or two profiles.",
        "give two hwaware.benchmark files, or two hwaware.cluster files.",
        found=(_schema(a), _schema(b)),
    )


def _schema(record: object) -> str:
    return str(getattr(record, "SCHEMA", "") or type(record).__name__)


def _results(a: BenchmarkResult, b: BenchmarkResult) -> Comparison:
    ours, theirs = ({mapping.name: mapping for mapping in result.mappings} for result in (a, b))
    kernels = [result.environment.get("reference_kernel") for result in (a, b)]
    relative = kernels[0] == kernels[1] and all(m.reference_s for result in (a, b) for m in result.mappings)
    rows = [_mapping(name, ours[name], theirs[name], relative) for name in ours if name in theirs]
    notes = [
        f"{name} differs: {getattr(a, field)!r} and {getattr(b, field)!r}."
        for name, field in (("Scenario", "scenario"), ("Model", "model"), ("Microbatches", "num_microbatches"))
        if getattr(a, field) != getattr(b, field)
    ]
    if not relative:
        notes.append("Steps are compared in seconds: not every one has the same reference kernel beside it.")
    return _comparison(a, rows, list(ours), list(theirs), notes)


def _mapping(name: str, a: MeasuredMapping, b: MeasuredMapping, relative: bool) -> Difference:
    before, after = (m.by_start(m.relative_steps if relative else m.step_s) for m in (a, b))
    ratio, points = starts_ratio_interval(after, before), min(len(a.step_s), len(b.step_s))
    return Difference(name, a.median_step_s, b.median_step_s, ratio, points, _verdict(ratio, points))


def _profiles(a: ClusterProfile, b: ClusterProfile) -> Comparison:
    ours, theirs = dict(_curves(a)), dict(_curves(b))
    rows = [row for name in ours if name in theirs for row in _curve(name, ours[name], theirs[name])]
    notes = []
    before, after = (recorded_s(profile.environment) for profile in (a, b))
    if before and after:
        notes.append(f"The reference kernel took {after / before:.2f} times as long beside B as beside A.")
    return _comparison(a, rows, list(ours), list(theirs), notes)


def _curves(profile: ClusterProfile) -> Iterator[Tuple[str, Dict[float, float]]]:
    for device in profile.devices:
        yield from _products(device)
    for link in profile.links:
        yield f"{link.source} -> {link.target}", _messages(link)


def _products(device: Device) -> Iterator[Tuple[str, Dict[float, float]]]:
    for dtype, points in sorted(device.throughput.items()):
        yield f"{device.id} {dtype}", {point.flops: point.seconds for point in points}


def _messages(link: Link) -> Dict[float, float]:
    """Return seconds by bytes; without samples, two sizes by the link's latency and bandwidth."""
    if link.samples:
        return {sample.bytes: sample.seconds for sample in link.samples}
    return {nbytes: link.latency_s + nbytes / link.bandwidth_bytes_per_s for nbytes in (1e3, 1e6)}


def _curve(name: str, a: Mapping[float, float], b: Mapping[float, float]) -> List[Difference]:
    sizes = sorted(set(a) & set(b))
    if not sizes:
        return []
    ratio = median_interval([b[size] / a[size] for size in sizes])
    return [Difference(name, a[sizes[-1]], b[sizes[-1]], ratio, len(sizes), _verdict(ratio, len(sizes)))]


def _verdict(ratio: Interval, points: int) -> str:
    if points < FEWEST_POINTS:
        return "too few"
    if not is_significant(ratio):
        return "same"
    return "faster" if ratio.median < 1.0 else "slower"


def _comparison(
    record: FileRecord, rows: List[Difference], ours: Sequence[str], theirs: Sequence[str], notes: List[str]
) -> Comparison:
    both: Set[str] = {row.what for row in rows}
    mean = math.exp(statistics.fmean(math.log(row.ratio.median) for row in rows)) if rows else None
    if len(rows) > 1:
        notes.append(f"{len(rows)} comparisons at 95 % each: about one in twenty is significant by chance alone.")
    return Comparison(
        schema=record.SCHEMA,
        differences=tuple(rows),
        only_in_a=tuple(name for name in ours if name not in both),
        only_in_b=tuple(name for name in theirs if name not in both),
        geometric_mean=mean,
        notes=tuple(notes),
    )
