"""From raw samples to the records of a profile: pure functions."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

from hwaware.cluster import Link, LinkSample, MatrixProduct


class ProductSample(NamedTuple):
    """Products of one size that ran back to back.

    Attributes:
        edge: Edge of the square matrices.
        calls: How many products ran.
        seconds: Wall time of all of them together.
        reference_s: The reference kernel's time on the same host just before or after, whichever was slower.
    """

    edge: int
    calls: int
    seconds: float
    reference_s: float


# The reference kernel repeats within 8 % on the quiet two-core machine where this was written; other work on the same
# cores made it 1.2 to 10 times slower.
_DISTURBED = 1.15


def disturbed(sample: ProductSample, quietest_s: float) -> bool:
    """Whether the machine was slower beside this sample than at its quietest, so that the sample tells of that."""
    return sample.reference_s > _DISTURBED * quietest_s


def curve(samples: Sequence[ProductSample]) -> Tuple[MatrixProduct, ...]:
    """The time of one product per size: all time over all products of that size, in any round.

    Not a median of calls: under a CPU quota or a changing clock most calls are faster than the device is. Disturbed
    samples are left out, save the least disturbed of a size that has no other.

    Example:
        >>> [point] = curve([ProductSample(100, 3, 0.03, 0.02), ProductSample(100, 1, 0.05, 0.02)])
        >>> point.flops, point.seconds
        (2000000.0, 0.02)
    """
    quietest_s = min(sample.reference_s for sample in samples)
    points = []
    for edge in sorted({sample.edge for sample in samples}):
        of_edge = sorted((sample for sample in samples if sample.edge == edge), key=lambda sample: sample.reference_s)
        used = [sample for sample in of_edge if not disturbed(sample, quietest_s)] or of_edge[:1]
        one_s = sum(sample.seconds for sample in used) / sum(sample.calls for sample in used)
        points.append(MatrixProduct(flops=2.0 * edge**3, seconds=one_s))  # n^3 multiplications and as many additions
    return tuple(points)


def link(source: str, target: str, timing: Mapping[str, Any]) -> Link:
    """The link that a timing of messages shows.

    latency = median round trip of one byte / 2; bandwidth = bytes of the longest messages / (their median one-way
    time - latency); samples are the median one-way time of each size.

    Args:
        source: Host or device that sent.
        target: Host or device that answered.
        timing: What `LinkEnd.time_messages` returned.
    """
    latency_s = statistics.median(timing["tiny_s"]) / 2
    messages: Sequence[Tuple[int, List[float]]] = timing["messages"]
    medians = [(nbytes, statistics.median(seconds)) for nbytes, seconds in messages]
    longest_bytes, longest_s = medians[-1]
    return Link(
        source=source,
        target=target,
        latency_s=latency_s,
        bandwidth_bytes_per_s=longest_bytes / max(longest_s - latency_s, longest_s / 10),
        samples=tuple(LinkSample(bytes=nbytes, seconds=seconds) for nbytes, seconds in medians),
    )


def host_names(nodes: Sequence[Tuple[str, str, str]]) -> Dict[str, str]:
    """A name for each node: its hostname where that is unique, else its address, else both with the node's id.

    Args:
        nodes: Id, hostname and address of each.

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
