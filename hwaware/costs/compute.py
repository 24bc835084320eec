"""Price computing: measured matrix products, memory traffic between them, and measured times of layers."""

from __future__ import annotations

import functools
import math
from statistics import NormalDist, fmean
from typing import Dict, Iterable, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import Device
from hwaware.costs.curves import FloatArray, log_log_interpolate, monotone_curve
from hwaware.errors import UnusableInputError
from hwaware.workload import Layer, MeasuredTime

# Passes over the activations that a layer keeps, beside its matrix products. Ten in all: `fit_iterations` finds them on
# profiling/recorded/a100_iterations.csv (memory traffic of twice the activations at 0.32 TB/s, where an A100 copies
# 1.56 TB/s). Forward writes, reads and has a temporary; the rest is backward. On one CPU core (2026-11, jax 0.4.30)
# GPT blocks took 1 to 4 passes forward and 11 to 27 backward, because backward matrix products are slow there.
FORWARD_PASSES, BACKWARD_PASSES = 3.0, 7.0
# Passes over a layer's parameters, whatever the microbatch's size: each direction reads them. Backward also writes
# their gradient and adds it to the accumulator, two reads and a write. Counted, not fitted.
WEIGHT_PASSES, GRADIENT_PASSES = 1.0, 4.0
# A share of a layer that was measured whole takes longer than analytic times say: small products are less efficient.
# In 80 % of the recorded results with measured shares, halves of layers took 1.02 to 1.13 times as long, and quarters
# 1.05 to 1.16 times. tests/unit/test_costs_compute.py computes these ranges.
UNMEASURED_SHARE = 1.1


def device_time_s(device: Device, dtype: str, flops: FloatArray) -> FloatArray:
    """Return the seconds of F FLOPs on a device, by its matrix products (F_k, t_k) of a data type.

        t(F) = log-log interpolation of (F_k, t_k)   for F_1 <= F <= F_n
        t(F) = F t_1 / F_1  below,  F t_n / F_n  above

    The curve is made monotone first. A constant rate beyond its ends is an assumption.

    Raises:
        UnusableInputError: The device was not measured with that data type.

    Example:
        >>> from hwaware.cluster import MatrixProduct
        >>> points = (MatrixProduct(flops=1e9, seconds=0.1), MatrixProduct(flops=4e9, seconds=0.2))
        >>> device = Device(id="a:0", host="a", kind="cpu", memory_bytes=1, throughput={"float32": points})
        >>> device_time_s(device, "float32", np.array([0.0, 5e8, 2e9, 8e9])).round(6).tolist()
        [0.0, 0.05, 0.141421, 0.4]
    """
    points = device.throughput.get(dtype)
    if points is None:
        raise UnusableInputError(
            f"device {device.id!r} has no throughput curve for {dtype}, only for {sorted(device.throughput)}.",
            f"measure it (hwaware profile --dtype {dtype}), or use a data type that was measured.",
        )
    sizes, seconds = monotone_curve((point.flops, point.seconds) for point in points)
    at = np.asarray(flops, dtype=np.float64)
    below = seconds[0] * (at / sizes[0])
    above = seconds[-1] * (at / sizes[-1])
    inside = log_log_interpolate(np.maximum(at, sizes[0]), sizes, seconds)
    return np.where(at <= sizes[0], below, np.where(at >= sizes[-1], above, inside))


def analytic_time_s(
    layers: Sequence[Layer], device: Device, dtype: str, parts: FloatArray, backward: bool, weights: FloatArray
) -> FloatArray:
    """Return the seconds of one direction of each layer without measured times.

        t_l = t_device(F_l x_l) + k y_l x_l / M + (p_l + q g_l) w_l / M

    The device has `parts` x of the layers, and `weights` w of their parameters. Memory-bound operators move the y bytes
    of kept activations k times. Both directions read p bytes of parameters, and backward moves g bytes of gradients q
    times. Without a measured memory bandwidth M, only the first term counts.

    Example:
        >>> from hwaware.cluster import ClusterProfile
        >>> from hwaware.workload import Workload
        >>> device = ClusterProfile.uniform(hosts=1, flops_per_s=1e10).devices[0]
        >>> layers, half = Workload.uniform().layers, np.array([0.5])
        >>> analytic_time_s(layers, device, "float32", half, backward=True, weights=half).tolist()
        [0.1]

    Source: roofline model (Williams, Waterman and Patterson, 2009). The terms add up because operators run one by one.
    """
    flops = np.array([layer.backward_flops if backward else layer.forward_flops for layer in layers], dtype=np.float64)
    seconds = device_time_s(device, dtype, flops * parts)
    rate = device.memory_bandwidth_bytes_per_s
    if rate is None:
        return seconds
    kept = np.array([layer.activation_bytes for layer in layers], dtype=np.float64)
    owned = WEIGHT_PASSES * np.array([layer.parameter_bytes for layer in layers], dtype=np.float64)
    if backward:
        owned = owned + GRADIENT_PASSES * np.array([layer.gradient_size_bytes for layer in layers], dtype=np.float64)
    moved = (BACKWARD_PASSES if backward else FORWARD_PASSES) * (kept * parts) / rate + owned * weights / rate
    # A layer that computes nothing in one direction moves nothing in it either.
    return seconds + np.where(flops > 0, moved, 0.0)


def is_split(layer: Layer) -> bool:
    """Return True if tensor parallelism divides the layer: the layer then says how many bytes it would all-reduce."""
    return layer.tensor_parallel_bytes is not None


def measured_time(layer: Layer, kind: str, replicas: int, group: int) -> Optional[MeasuredTime]:
    """Return a layer's measured times on that many replicas of `group` devices of a kind; None without any.

    Example:
        >>> from hwaware.workload import Workload
        >>> times = {"cpu": {"1,1": MeasuredTime(forward_s=0.1, backward_s=0.2)}}
        >>> layer = Workload.uniform(measured=times).layers[0]
        >>> measured_time(layer, "cpu", 1, 1).forward_s, measured_time(layer, "gpu", 1, 1)
        (0.1, None)
    """
    times = (layer.measured or {}).get(kind)
    return times.get(f"{replicas},{group}") if times else None


def layer_times_s(
    layers: Sequence[Layer], device: Device, dtype: str, share: float = 1.0, group: int = 1
) -> Tuple[FloatArray, FloatArray]:
    """Return the forward and backward seconds of each layer for one microbatch, on one device, without collectives.

    Layers without measured times on this kind take `analytic_time_s`. "DP,TP" measured a share 1 / DP on TP devices.
    Between two measured shares x < y, and below them,

        t(share) = max(t_x + (share - x) (t_y - t_x) / (y - x), t_x min(1, share / x))

    A measured time of the whole microbatch alone is scaled by analytic times, and by `UNMEASURED_SHARE`. The device is
    one of `group` TP devices that work on a `share` of the microbatch. Where no time of such a group tells the share,
    the time of one device counts. For a layer that `is_split`, the ratio of analytic times scales it.

    Raises:
        UnusableInputError: A layer was not measured and the device has no curve for the data type.

    Example:
        >>> from hwaware.cluster import ClusterProfile
        >>> device = ClusterProfile.uniform(hosts=1, flops_per_s=1e10).devices[0]
        >>> from hwaware.workload import Workload
        >>> [times.tolist() for times in layer_times_s(Workload.uniform().layers, device, "float32")]
        [[0.1], [0.2]]
    """
    owned = np.array([1 / (group if is_split(layer) else 1) for layer in layers])
    parts = share * owned
    if not any(layer.measured for layer in layers):
        forward_s, backward_s = (analytic_time_s(layers, device, dtype, parts, way, owned) for way in (False, True))
        return forward_s, backward_s
    curves = [_measured_shares(layer, device.kind, group) for layer in layers]
    results = []
    for backward, name in ((False, "forward_s"), (True, "backward_s")):
        measured = [_of_share_s(curve, share, name) for curve in curves]
        if None not in measured:  # the device needs no curve then
            results.append(np.array(measured, dtype=np.float64))
            continue
        seconds = analytic_time_s(layers, device, dtype, parts, backward, owned)
        if group > 1:
            alone_s = layer_times_s(layers, device, dtype, share)[backward]
            unsplit = np.ones(len(layers))
            unsplit_s = analytic_time_s(layers, device, dtype, share * unsplit, backward, unsplit)
        for index, (known, curve) in enumerate(zip(measured, curves)):
            if known is not None:
                seconds[index] = known
            elif 1.0 in curve:
                one = slice(index, index + 1)
                whole = analytic_time_s(layers[one], device, dtype, owned[one], backward, owned[one])[0]
                factor = seconds[index] / whole if whole > 0 else share
                seconds[index] = UNMEASURED_SHARE * factor * getattr(curve[1.0], name)
            elif group > 1 and _measured_shares(layers[index], device.kind, 1):
                factor = seconds[index] / unsplit_s[index] if unsplit_s[index] > 0 else owned[index]
                seconds[index] = alone_s[index] * (factor if is_split(layers[index]) else 1.0)
        results.append(seconds)
    return results[0], results[1]


def is_measured(layer: Layer, kind: str, share: float, group: int) -> bool:
    """Return True if measured times of such groups tell a layer's time for a share of the microbatch."""
    curve = _measured_shares(layer, kind, group)
    return 1.0 in curve or _of_share_s(curve, share, "forward_s") is not None


def _measured_shares(layer: Layer, kind: str, group: int) -> Dict[float, MeasuredTime]:
    """Return a layer's measured times on groups of that many devices of a kind, by share of the microbatch."""
    known = ((sharding.split(","), times) for sharding, times in (layer.measured or {}).get(kind, {}).items())
    return {1.0 / int(replicas): times for (replicas, devices), times in known if int(devices) == group}


def _of_share_s(curve: Dict[float, MeasuredTime], share: float, name: str) -> Optional[float]:
    """Return the time of a share between or below measured ones; None if they do not tell it."""
    shares = sorted(curve)
    known = next((one for one in shares if abs(one - share) < 1e-9), None)
    if known is not None:
        return float(getattr(curve[known], name))
    if len(shares) < 2 or share > shares[-1]:
        return None
    above = max(1, next(place for place, one in enumerate(shares) if one > share))
    (x, t), (y, u) = ((shares[place], float(getattr(curve[shares[place]], name))) for place in (above - 1, above))
    # Below the least share that was measured, a smaller one is no more efficient.
    return max(t + (share - x) * (u - t) / (y - x), min(1.0, share / x) * t)


def joint_deviation_s(deviations_s: Iterable[Optional[float]]) -> Optional[float]:
    """Return the root mean square [s] of the known deviations; None without any.

    Example:
        >>> joint_deviation_s([3.0, None, 4.0]) == 12.5**0.5, joint_deviation_s([None])
        (True, None)
    """
    squares = [one**2 for one in deviations_s if one is not None]
    return math.sqrt(fmean(squares)) if squares else None


@functools.lru_cache(maxsize=None)
def expected_maximum(count: int) -> float:
    """Return the expected largest of k independent standard normal numbers.

        e_k = integral from 0 to infinity of  1 - Phi(x)^k - Phi(-x)^k  dx

    Trapezoids are exact to the last digits, because the function is even.

    Example:
        >>> [round(expected_maximum(count), 3) for count in (1, 2, 3, 4)]
        [0.0, 0.564, 0.846, 1.029]

    Source: the mean of an order statistic (Tippett, 1925).
    """
    below = np.array([NormalDist().cdf(x) for x in np.arange(-10, 10.05, 0.1)]) ** count
    heights = (1.0 - below - below[::-1])[len(below) // 2 :]
    return float(0.1 * (heights.sum() - heights[0] / 2))


def slowest_s(seconds: Sequence[FloatArray], deviations_s: Sequence[float], replicas: int) -> FloatArray:
    """Return the expected time until the last replica ends a pass, where passes vary.

        max over k of  t_(k) + sigma e_k        t_(1) >= t_(2) >= ... the replicas' times

    sigma is `joint_deviation_s`, e_k is `expected_maximum`. The result is exact for equal replicas and where one is by
    far the slowest. Between these, it is too low, by at most 0.33 sigma for two replicas. If more `replicas` exist than
    are given, the others are like the first.

    Example:
        >>> one, other = np.array([1.0]), np.array([1.1])
        >>> slowest_s([one, other], [0.0, 0.0], 2), slowest_s([one, one], [0.1, 0.1], 2).round(4)
        (array([1.1]), array([1.0564]))

    Source: order statistics. Dean and Barroso, 2013: a synchronous step waits for its slowest worker.
    """
    slowest: FloatArray = np.max(np.stack(list(seconds)), axis=0)
    sigma = joint_deviation_s(deviations_s)
    if replicas == 1 or not sigma:
        return slowest
    ordered = -np.sort(-np.stack(list(seconds)), axis=0)
    like_first = replicas - len(seconds)
    for place, time in enumerate(ordered):
        slowest = np.maximum(slowest, time + sigma * expected_maximum(place + 1 + like_first))
    return slowest
