"""How long messages and all-reduces take on measured, directed links."""

from __future__ import annotations

import math
from typing import Union

import numpy as np

from hwaware.cluster import Device, Link
from hwaware.costs.curves import FloatArray, log_log_interpolate, monotone_curve


def send_time_s(link: Link, nbytes: FloatArray) -> FloatArray:
    """Time of messages of n bytes over a directed link that carries nothing else.

    t(n) = log-log interpolation of the samples (n_k, t_k)     for n_1 <= n <= n_m
    t(n) = min(L + n / W, t_1)  below,   max(L + n / W, t_m)  above
    t(n) = L + n / W  without samples

    L is `latency_s` and W `bandwidth_bytes_per_s`. Samples are made monotone first, and the ends are held to them, so
    more bytes never take less time. t(0) = L unless a sampled message took less.

    Args:
        link: The link, in the direction of the message.
        nbytes: n, any number of values, each at least 0.

    Returns:
        Seconds, one for each n.

    Example:
        >>> from hwaware.cluster import LinkSample
        >>> link = Link(source="a", target="b", latency_s=1e-3, bandwidth_bytes_per_s=1e6)
        >>> send_time_s(link, np.array([0.0, 1e6])).tolist()
        [0.001, 1.001]
        >>> samples = (LinkSample(bytes=1e4, seconds=0.02), LinkSample(bytes=1e6, seconds=2.0))
        >>> sampled = Link(source="a", target="b", latency_s=1e-3, bandwidth_bytes_per_s=1e6, samples=samples)
        >>> send_time_s(sampled, np.array([1e2, 1e5, 1e7])).round(9).tolist()
        [0.0011, 0.2, 10.001]

    Source: interpolation between measured sizes is within 1 to 3 % on the recorded NCCL curves.
    """
    at = np.asarray(nbytes, dtype=np.float64)
    straight: FloatArray = link.latency_s + at / link.bandwidth_bytes_per_s
    samples = [(sample.bytes, sample.seconds) for sample in link.samples if sample.bytes > 0]
    if not samples:
        return straight
    sizes, seconds = monotone_curve(samples)
    inside = log_log_interpolate(np.maximum(at, sizes[0]), sizes, seconds)
    below = np.minimum(straight, seconds[0])
    above = np.maximum(straight, seconds[-1])
    result: FloatArray = np.where(at < sizes[0], below, np.where(at > sizes[-1], above, inside))
    return result


def exposed_time_s(
    link: Link, nbytes: FloatArray, source: Device, target: Device, next_pass_s: Union[float, FloatArray] = math.inf
) -> FloatArray:
    """What messages take of a step in which the target waits for them, where a device that has waited is ahead.

    t(n) = send(n) - min(p, max(0, h - n / R_s - n / R_t))

    send is `send_time_s`, h the target's `head_start_s`: by so much earlier its next pass ends, if it has waited for as
    long, for a message or for the pass before it. So t may be below 0: a pass that takes c alone ends at the later of
    c after the one before it and c - h after its message came. No pass takes less than nothing: p is what the
    target's next pass takes at least. Messages are work for both ends, which takes of that: R is the `sum_bytes_per_s`
    of source and target, the rate at which they hand on bytes. An end without R does no work, and without h,
    t(n) = send(n).

    Args:
        link: The link, in the direction of the message.
        nbytes: n, any number of values, each at least 0.
        source: The device that sends.
        target: The device that waits.
        next_pass_s: p, of each message or of all.

    Returns:
        Seconds, one for each n; more bytes never take less before the same pass.

    Example:
        >>> from hwaware.cluster import MatrixProduct
        >>> link = Link(source="a", target="b", latency_s=1e-3, bandwidth_bytes_per_s=1e6)
        >>> device = Device(id="b:0", host="b", kind="cpu", memory_bytes=1, head_start_s=8e-3, sum_bytes_per_s=1e7,
        ...                 throughput={"float32": (MatrixProduct(flops=1e9, seconds=0.1),)})
        >>> exposed_time_s(link, np.array([5e3, 2e4, 1e6]), device, device).round(6).tolist()
        [-0.001, 0.017, 1.001]
        >>> exposed_time_s(link, np.array([5e3]), device, device, next_pass_s=5e-3).round(6).tolist()
        [0.001]

    Source: a quota of processor time is a token bucket (Turner, Rao and Rao, "CPU bandwidth control for CFS", 2010).
    """
    seconds = send_time_s(link, nbytes)
    if not target.head_start_s:
        return seconds
    per_byte_s = sum(1.0 / end.sum_bytes_per_s for end in (source, target) if end.sum_bytes_per_s is not None)
    ahead = np.maximum(0.0, target.head_start_s - np.asarray(nbytes, dtype=np.float64) * per_byte_s)
    result: FloatArray = seconds - np.minimum(next_pass_s, ahead)
    return result
