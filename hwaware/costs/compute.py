"""How long a device computes: the measured matrix products, what passes through its memory between them, and a layer's
own measured times where there are some. Replicas that work on parts of one microbatch wait for the slowest."""

from __future__ import annotations

import functools
from statistics import NormalDist
from typing import Dict, Optional, Sequence, Tuple

import numpy as np

from hwaware.cluster import Device
from hwaware.costs.curves import FloatArray, log_log_interpolate, monotone_curve
from hwaware.errors import UnusableInputError
from hwaware.workload import Layer, MeasuredTime

# Passes over the activations that a layer keeps, beside its matrix products. Ten in all: what `fit_iterations` finds on
# profiling/recorded/a100_iterations.csv (memory traffic of twice the activations at 0.32 TB/s, where an A100 copies
# 1.56 TB/s), divided between forward (write, read, a temporary) and backward (reads, gradients, temporaries). On one
# CPU core (2026-11, jax 0.4.30) GPT blocks took 1 to 4 passes forward and 11 to 27 backward at the profiled bandwidth:
# there the backward matrix products themselves are slow, and only measured layer times price them well.
FORWARD_PASSES, BACKWARD_PASSES = 3.0, 7.0
# Passes over a layer's parameters, whatever the microbatch's size: each direction reads them. Backward also writes
# their gradient and adds that to the accumulator, two reads and a write; frozen parameters have none. Counted, not
# fitted. On one CPU core (2026-11, jax 0.4.30) half the samples took 0.53 to 0.57 of the backward time of one to four
# GPT blocks.
WEIGHT_PASSES, GRADIENT_PASSES = 1.0, 4.0
# A replica's share of a layer that was measured with whole microbatches takes longer than the analytic model scales it
# to: small products and convolutions are less efficient, and the replicas of a last stage wait for each other to
# exchange the loss. On shares of a processor (2026-11, jax 0.4.30) stages of two and three replicas took, in a step,
# 1.16 (dense layers), 1.17 (Wide-ResNet) and 1.28 (GPT) times as long.
UNMEASURED_SHARE = 1.2


def device_time_s(device: Device, dtype: str, flops: FloatArray) -> FloatArray:
    """Time of F FLOPs on a device, from its measured matrix products (F_k, t_k) of that data type.

    t(F) = log-log interpolation of (F_k, t_k)   for F_1 <= F <= F_n
    t(F) = F t_1 / F_1  below,  F t_n / F_n  above (the rate of the nearest point)

    The curve is made monotone first. t(0) = 0; a curve of one point is a constant rate.

    Args:
        device: Whose curve is used.
        dtype: Data type, a key of `device.throughput`.
        flops: F, any number of values, each at least 0.

    Returns:
        Seconds, one for each F.

    Raises:
        UnusableInputError: The device was not measured with that data type.

    Example:
        >>> from hwaware.cluster import MatrixProduct
        >>> points = (MatrixProduct(flops=1e9, seconds=0.1), MatrixProduct(flops=4e9, seconds=0.2))
        >>> device = Device(id="a:0", host="a", kind="cpu", memory_bytes=1, throughput={"float32": points})
        >>> device_time_s(device, "float32", np.array([0.0, 5e8, 2e9, 8e9])).round(6).tolist()
        [0.0, 0.05, 0.141421, 0.4]

    Source: measured curves; the constant rate outside them is an assumption.
    """
    points = device.throughput.get(dtype)
    if points is None:
        raise UnusableInputError(
            f"device {device.id!r} has no throughput curve for {dtype}, only for {sorted(device.throughput)}.",
            f"measure it (hwaware profile --dtype {dtype}), or trace the workload with a data type that was measured.",
        )
    sizes, seconds = monotone_curve((point.flops, point.seconds) for point in points)
    at = np.asarray(flops, dtype=np.float64)
    below = seconds[0] * (at / sizes[0])
    above = seconds[-1] * (at / sizes[-1])
    inside = log_log_interpolate(np.maximum(at, sizes[0]), sizes, seconds)
    result: FloatArray = np.where(at <= sizes[0], below, np.where(at >= sizes[-1], above, inside))
    return result


def memory_time_s(device: Device, nbytes: FloatArray, passes: float) -> FloatArray:
    """Time of moving bytes through a device's memory: what a layer's memory-bound operators take, or its weights.

    t = k y / M

    y bytes are moved k times; M is the rate of device memory with reads and writes counted. A device without measured
    memory bandwidth: 0, matrix products are then all that is priced.

    Args:
        device: Whose memory.
        nbytes: y, any number of values.
        passes: k.

    Example:
        >>> from hwaware.cluster import MatrixProduct
        >>> curve = {"float32": (MatrixProduct(flops=1e9, seconds=0.1),)}
        >>> device = Device(id="a:0", host="a", kind="cpu", memory_bytes=1, throughput=curve,
        ...                 memory_bandwidth_bytes_per_s=1e10)
        >>> memory_time_s(device, np.array([1e9]), 2).tolist()
        [0.2]

    Source: roofline model (Williams, Waterman and Patterson, 2009) for operators of few FLOPs a byte, added up because
    they run one after the other.
    """
    if device.memory_bandwidth_bytes_per_s is None:
        return np.zeros(len(nbytes))
    result: FloatArray = passes * nbytes / device.memory_bandwidth_bytes_per_s
    return result


def analytic_time_s(
    layers: Sequence[Layer],
    device: Device,
    dtype: str,
    parts: FloatArray,
    backward: bool,
    weights: Optional[FloatArray] = None,
) -> FloatArray:
    """Time of one direction of each layer without measured times: matrix products, memory-bound operators, weights.

    t_l = t_device(F_l x_l) + k y_l x_l / M + (p_l + q g_l) w_l / M

    y bytes of activations are kept for the backward pass (norms, activation functions, softmax and residuals move
    them, k times). Whatever the number of samples, p bytes of parameters are read, and backward moves g bytes of
    gradients q times.

    Args:
        layers: In order.
        device: The device that computes.
        dtype: Data type of the workload.
        parts: x, the part of each layer that falls to the device.
        backward: Backward instead of forward.
        weights: w, the part of each layer's parameters that the device has; all of them if left out.
    """
    flops = np.array([layer.backward_flops if backward else layer.forward_flops for layer in layers], dtype=np.float64)
    kept = np.array([layer.activation_bytes for layer in layers], dtype=np.float64)
    owned = WEIGHT_PASSES * np.array([layer.parameter_bytes for layer in layers], dtype=np.float64)
    if backward:
        owned = owned + GRADIENT_PASSES * np.array([layer.gradient_size_bytes for layer in layers], dtype=np.float64)
    moved = memory_time_s(device, kept * parts, BACKWARD_PASSES if backward else FORWARD_PASSES)
    moved = moved + memory_time_s(device, owned if weights is None else owned * weights, 1.0)
    # A layer that computes nothing in one direction moves nothing in it either.
    memory = np.where(flops > 0, moved, 0.0)
    result: FloatArray = device_time_s(device, dtype, flops * parts) + memory
    return result


def is_split(layer: Layer) -> bool:
    """Whether tensor parallelism divides the layer; it does if the layer says what it would all-reduce."""
    return layer.tensor_parallel_bytes is not None


def measured_time(layer: Layer, kind: str, replicas: int, group: int) -> Optional[MeasuredTime]:
    """The layer's measured times on `replicas` data-parallel groups of `group` devices of that kind, if there are any.

    Example:
        >>> from hwaware.workload import Workload
        >>> times = {"cpu": {"1,1": MeasuredTime(forward_s=0.1, backward_s=0.2)}}
        >>> layer = Workload.uniform(measured=times).layers[0]
        >>> measured_time(layer, "cpu", 1, 1).forward_s, measured_time(layer, "gpu", 1, 1)
        (0.1, None)
    """
    return (layer.measured or {}).get(kind, {}).get(f"{replicas},{group}")


def layer_times_s(
    layers: Sequence[Layer], device: Device, dtype: str, share: float = 1.0, group: int = 1
) -> Tuple[FloatArray, FloatArray]:
    """Forward and backward time of each layer, one microbatch, on one device of a replica; without collectives.

    forward_l = t(forward_flops_l share / TP) + (3 activation_bytes_l share + parameter_bytes_l) / TP / M,
    backward_l likewise with 7, and 4 gradient_bytes_l more; TP = 1 for a layer that is not split; without measured
    memory bandwidth M the second term is left out

    Measured times of this kind win: "DP,TP" is the time of a share 1 / DP on TP devices. Between two measured shares
    x < y, and below them,

    t(share) = max(t_x + (share - x) (t_y - t_x) / (y - x), t_x min(1, share / x))

    Where only the whole microbatch was measured ("1,TP"), the analytic time of the share is scaled by measured /
    analytic of the whole and by 1.2, what stages of replicas were seen to take longer than that.

    Args:
        layers: In order.
        device: The device that computes.
        dtype: Data type of the workload.
        share: Part of the microbatch that the replica works on.
        group: TP, the number of devices of the replica.

    Returns:
        Seconds forward and seconds backward, one for each layer.

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
        forward_s = analytic_time_s(layers, device, dtype, parts, False, owned)
        return forward_s, analytic_time_s(layers, device, dtype, parts, True, owned)
    curves = [_measured_shares(layer, device.kind, group) for layer in layers]
    results = []
    for direction in ("forward", "backward"):
        back = direction == "backward"
        found = [_of_share_s(curve, share, f"{direction}_s") for curve in curves]
        if None in found:
            analytic = analytic_time_s(layers, device, dtype, parts, back, owned)
        for index, (seconds, curve) in enumerate(zip(found, curves)):
            if seconds is None:
                found[index] = float(analytic[index])
                if 1.0 in curve:
                    here = slice(index, index + 1)
                    alone = analytic_time_s(layers[here], device, dtype, owned[here], back, owned[here])[0]
                    factor = analytic[index] / alone if alone > 0 else share
                    found[index] = UNMEASURED_SHARE * factor * getattr(curve[1.0], f"{direction}_s")
        results.append(np.array(found, dtype=np.float64))
    return results[0], results[1]


def _measured_shares(layer: Layer, kind: str, group: int) -> Dict[float, MeasuredTime]:
    """A layer's measured times on groups of so many devices of that kind, by the part of a microbatch they work on."""
    found = {}
    for sharding, times in (layer.measured or {}).get(kind, {}).items():
        replicas, devices = (int(part) for part in sharding.split(","))
        if devices == group:
            found[1.0 / replicas] = times
    return found


def _of_share_s(curve: Dict[float, MeasuredTime], share: float, name: str) -> Optional[float]:
    """The time of a share between or below measured ones, if that can be told from them."""
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


@functools.lru_cache(maxsize=None)
def expected_maximum(count: int) -> float:
    """The expected largest of so many independent standard normal numbers.

    e_k = integral from 0 to infinity of  1 - Phi(x)^k - Phi(-x)^k  dx,   by trapezoids: the function is even, so they
    are exact to the last digits

    Example:
        >>> [round(expected_maximum(count), 3) for count in (1, 2, 3, 4)]
        [0.0, 0.564, 0.846, 1.029]

    Source: the mean of an order statistic (Tippett, 1925).
    """
    below = np.array([NormalDist().cdf(x) for x in np.arange(-10, 10.05, 0.1)]) ** count
    heights = (1.0 - below - below[::-1])[len(below) // 2 :]
    return float(0.1 * (heights.sum() - heights[0] / 2))


def slowest_s(seconds: Sequence[FloatArray], deviations_s: Sequence[FloatArray], replicas: int) -> FloatArray:
    """The expected time until the last replica has done its pass, where passes vary from one to the next.

    max over k of  t_(k) + sigma e_k        t_(1) >= t_(2) >= ... the replicas' times

    sigma is the root mean square of their deviations, e_k `expected_maximum`. Exact for replicas that are equally fast
    and where one takes much longer than the others, and too low in between, by at most 0.33 sigma for two: that k
    replicas which take at least t_(k) are waited for as long as k which take just t_(k) is all that it says.

    Args:
        seconds: The mean time of each replica's pass, in arrays of one shape.
        deviations_s: The standard deviation of each, in the same shape.
        replicas: How many there are. If more than are given, the others are like the first.

    Example:
        >>> one, other, none = np.array([1.0]), np.array([1.1]), np.array([0.0])
        >>> slowest_s([one, other], [none, none], 2), slowest_s([one, one], [one / 10, one / 10], 2).round(4)
        (array([1.1]), array([1.0564]))

    Source: order statistics; that a synchronous step waits for its slowest worker: Dean and Barroso, 2013.
    """
    slowest: FloatArray = np.max(np.stack(list(seconds)), axis=0)
    if replicas == 1 or not any(np.any(deviation > 0) for deviation in deviations_s):
        return slowest
    sigma = np.sqrt(np.mean(np.square(np.stack(list(deviations_s))), axis=0))
    ordered = -np.sort(-np.stack(list(seconds)), axis=0)
    like_first = replicas - len(seconds)
    for place, time in enumerate(ordered):
        slowest = np.maximum(slowest, time + sigma * expected_maximum(place + 1 + like_first))
    return slowest
