"""Turn raw samples into the records of a profile, by pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any, Dict, Iterable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from hwaware.cluster import Link, LinkSample, MatrixProduct


class ProductSample(NamedTuple):
    """Products of one size that ran back to back.

    Attributes:
        edge: Edge of the square matrices.
        calls: Number of products.
        seconds: Wall time of all products together.
        reference_s: The reference kernel's time on the same host, the mean of just before and just after.
        laps_s: The parts of `seconds` between two waits, with equal numbers of calls.
        round: Number of earlier samples of that size.
        processor_s: Processor time that the worker took of `seconds`.
    """

    edge: int
    calls: int
    seconds: float
    reference_s: float
    laps_s: Tuple[float, ...] = ()
    round: int = 0
    processor_s: float = 0.0

    @classmethod
    def of(cls, edge: int, result: Mapping[str, Any], round_number: int) -> ProductSample:
        """Return the sample that the result of a worker's `measure` gives."""
        laps = tuple(result.get("laps_s", ()))
        return cls(
            edge,
            result["calls"],
            result["seconds"],
            result["reference_s"],
            laps,
            round_number,
            result.get("processor_s", 0.0),
        )

    @property
    def call_s(self) -> float:
        """Return the time of one product [s]."""
        return self.seconds / self.calls

    def document(self) -> Dict[str, Any]:
        """Return the sample in the form of the profile's evidence."""
        return {**self._asdict(), "laps_s": short(self.laps_s)}


def short(values: Iterable[float]) -> List[float]:
    """Round values to four digits, so that raw samples make no large files.

    Example:
        >>> short([0.123456, 12345.6])
        [0.1235, 12350.0]
    """
    return [float(f"{value:.4g}") for value in values]


def spread(values: Sequence[float]) -> Dict[str, float]:
    """Return the median, 5th and 95th percentile, coefficient of variation and number of the values.

    Example:
        >>> spread([1.0, 2.0, 3.0])
        {'median': 2.0, 'p5': 1.1, 'p95': 2.9, 'cv': 0.5, 'n': 3}
    """
    ordered = sorted(values)
    mean = statistics.fmean(ordered)
    cv = statistics.stdev(ordered) / mean if len(ordered) > 1 and mean > 0 else 0.0
    figures = {"median": statistics.median(ordered), "p5": _quantile(ordered, 0.05), "p95": _quantile(ordered, 0.95)}
    return {**{name: float(f"{value:.6g}") for name, value in {**figures, "cv": cv}.items()}, "n": len(ordered)}


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def spread_of_products(samples: Sequence[ProductSample]) -> List[Dict[str, float]]:
    """Return the mean time of one product per size [s], and the spread of the laps of all rounds."""
    result = []
    for edge in sorted({sample.edge for sample in samples}):
        of_edge = [sample for sample in samples if sample.edge == edge]
        per_call = [lap * len(s.laps_s) / s.calls for s in of_edge for lap in s.laps_s] or [s.call_s for s in of_edge]
        total_s = sum(sample.seconds for sample in of_edge) / sum(sample.calls for sample in of_edge)
        result.append({"edge": edge, "seconds": total_s, **spread(per_call)})
    return result


# Another machine's work on the same core makes the reference kernel take up to 1.5 times as long, and products 1.15 to
# 1.45 times. Near the quietest time, dividing by the kernel's time corrects enough. Else the profiler repeats a sample.
DISTURBED = 1.15


def disturbed(sample: ProductSample, quietest_s: float) -> bool:
    """Return True if the machine was slower beside this sample than at its quietest."""
    return sample.reference_s > DISTURBED * quietest_s


def curve(samples: Sequence[ProductSample], reference_s: Optional[float] = None) -> Tuple[MatrixProduct, ...]:
    """Return the time of one product per size: all time over all products of that size, in any round.

    A median of calls would be too low: under a quota or changing clock, most calls beat the device's rate.
    The function leaves out disturbed samples, except the least disturbed one of a size that has no other.

    Args:
        samples: Samples of one device and type.
        reference_s: The reference kernel's time [s] at the machine speed for which the curve shall hold. The function
            scales each sample's time by this over the kernel's time beside it. None takes the times as they are.

    Example:
        >>> samples = [ProductSample(100, 3, 0.03, 0.02), ProductSample(100, 1, 0.05, 0.02)]
        >>> curve(samples)[0].flops, curve(samples)[0].seconds, curve(samples, 0.01)[0].seconds
        (2000000.0, 0.02, 0.01)
    """
    points = []
    for edge, used in undisturbed(samples).items():
        seconds = sum(s.seconds * (1.0 if reference_s is None else reference_s / s.reference_s) for s in used)
        points.append(MatrixProduct(flops=2.0 * edge**3, seconds=seconds / sum(sample.calls for sample in used)))
    return tuple(points)


def curve_of_share(
    samples: Sequence[ProductSample], beside: Sequence[ProductSample], reference_s: float
) -> Tuple[MatrixProduct, ...]:
    """Return the `curve` of a share of a processor: the processor time of one product over the share.

    A product takes the same processor time on each share, so the samples of all these devices count for it. The share
    is the processor time over the wall time of all of the device's own samples. Other work slowed a machine by up to
    half from one sample to the next. At worst, this function's shares came out 1 to 5 % off there, those of `curve` 9
    to 12 %. The caches of a small share are cold after each pause, and this function leaves that loss out. Products on
    0.2 of a core took 4 to 8 % more processor time than on 0.8.

    Args:
        samples: Samples of the device, of one type.
        beside: Samples of all devices that are shares of the same processor.
        reference_s: As in `curve`.

    Example:
        >>> half = [ProductSample(100, 1, 0.04, 0.02, processor_s=0.02)]
        >>> fifth = [ProductSample(100, 1, 0.1, 0.02, processor_s=0.02)]
        >>> [curve_of_share(own, half + fifth, 0.02)[0].seconds for own in (half, fifth)]
        [0.04, 0.1]
    """
    share = sum(sample.processor_s for sample in samples) / sum(sample.seconds for sample in samples)
    edges = {sample.edge for sample in samples}
    points = []
    for edge, used in undisturbed(beside).items():
        if edge in edges:
            processor_s = sum(s.processor_s * reference_s / s.reference_s for s in used)
            seconds = processor_s / sum(sample.calls for sample in used) / share
            points.append(MatrixProduct(flops=2.0 * edge**3, seconds=seconds))
    return tuple(points)


def reference_beside(samples: Iterable[ProductSample]) -> float:
    """Return the median of the reference kernel's times beside samples [s].

    Example:
        >>> reference_beside([ProductSample(100, 3, 0.03, 0.02), ProductSample(100, 1, 0.05, 0.03)])
        0.025
    """
    return statistics.median(sample.reference_s for sample in samples)


def undisturbed(samples: Sequence[ProductSample]) -> Dict[int, List[ProductSample]]:
    """Return the undisturbed samples of one device by size, or a size's least disturbed sample if it has none."""
    quietest_s = min(sample.reference_s for sample in samples)
    kept = {}
    for edge in sorted({sample.edge for sample in samples}):
        of_edge = sorted((sample for sample in samples if sample.edge == edge), key=lambda sample: sample.reference_s)
        kept[edge] = [sample for sample in of_edge if not disturbed(sample, quietest_s)] or of_edge[:1]
    return kept


def link(source: str, target: str, timing: Mapping[str, Any]) -> Link:
    """Return the link that a timing of messages shows.

    The latency is half the median round trip of one byte. The bandwidth is the median of bytes / (one-way time -
    latency) over the longest messages. The samples are the median one-way times of each size.

    Args:
        source: Host or device that sent.
        target: Host or device that answered.
        timing: Result of `LinkEnd.time_messages`.
    """
    latencies = [seconds / 2 for seconds in timing["tiny_s"]]
    latency_s = statistics.median(latencies)
    messages: Sequence[Tuple[int, List[float]]] = timing["messages"]
    medians = [(nbytes, statistics.median(seconds)) for nbytes, seconds in messages]
    rates = [messages[-1][0] / _without(seconds, latency_s) for seconds in messages[-1][1]]
    return Link(
        source=source,
        target=target,
        latency_s=latency_s,
        bandwidth_bytes_per_s=statistics.median_low(rates),
        samples=tuple(LinkSample(bytes=nbytes, seconds=seconds) for nbytes, seconds in medians),
        evidence={
            "latency_s": spread(latencies),
            "bytes_per_s": spread(rates),
            "tiny_s": short(timing["tiny_s"]),
            "messages": [[nbytes, short(seconds)] for nbytes, seconds in messages],
        },
    )


def _without(seconds: float, latency_s: float) -> float:
    """Return a message's time without the latency, but at least a tenth of it, because small messages scatter."""
    return max(seconds - latency_s, seconds / 10)


def host_names(nodes: Sequence[Tuple[str, str, str]]) -> Dict[str, str]:
    """Name each node by its hostname if unique, else by its address if unique, else by hostname and id.

    Args:
        nodes: Id, hostname and address of each node.

    Example:
        >>> host_names([("1f", "a", "10.0.0.1"), ("2f", "b", "10.0.0.2"), ("3f", "b", "10.0.0.3")])
        {'1f': 'a', '2f': '10.0.0.2', '3f': '10.0.0.3'}
    """
    hostnames = Counter(hostname for _, hostname, _ in nodes)
    addresses = Counter(address for _, _, address in nodes)
    names = {}
    for identifier, hostname, address in nodes:
        if hostnames[hostname] == 1:
            names[identifier] = hostname
        elif addresses[address] == 1:
            names[identifier] = address
        else:
            names[identifier] = f"{hostname}-{identifier[:8]}"
    return names
