"""Clean, interpolate and fit measured curves."""

from __future__ import annotations

import math
from typing import Callable, Dict, Iterable, List, Tuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def monotone_curve(points: Iterable[Tuple[float, float]]) -> Tuple[FloatArray, FloatArray]:
    """Return sizes, strictly rising, and seconds, which never fall, of measured (size, seconds) pairs.

    Take the median of equal sizes. Then raise each value to the largest before it: that more work takes less is noise.

    Example:
        >>> sizes, seconds = monotone_curve([(4, 2.0), (1, 1.0), (2, 3.0), (1, 1.5), (1, 1.4)])
        >>> sizes.tolist(), seconds.tolist()
        ([1.0, 2.0, 4.0], [1.4, 3.0, 3.0])
    """
    sizes, seconds = medians(points)
    return sizes, np.maximum.accumulate(seconds)


def medians(points: Iterable[Tuple[float, float]]) -> Tuple[FloatArray, FloatArray]:
    """Return the sizes of (size, seconds) pairs, strictly rising, and the median seconds of each.

    Example:
        >>> [column.tolist() for column in medians([(2, 5.0), (1, 1.0), (1, 3.0)])]
        [[1.0, 2.0], [2.0, 5.0]]
    """
    groups: Dict[float, List[float]] = {}
    for size, value in points:
        groups.setdefault(float(size), []).append(float(value))
    sizes = sorted(groups)
    # numpy's median takes longer than all the rest, and most sizes were measured once.
    middle = (groups[size][0] if len(groups[size]) == 1 else float(np.median(groups[size])) for size in sizes)
    return np.array(sizes, dtype=np.float64), np.array(list(middle), dtype=np.float64)


def log_log_interpolate(at: FloatArray, sizes: FloatArray, seconds: FloatArray) -> FloatArray:
    """Return seconds at some sizes, by straight lines between the points on logarithmic axes.

        log t = log t_k + (log x - log x_k) (log t_{k+1} - log t_k) / (log x_{k+1} - log x_k)

    Beyond the ends, the nearest value holds. All sizes and seconds are above 0.

    Source: half the points of 198 measured NCCL curves predict the others within 1.8 % (median). Straight lines through
    all points are 15 % off.

    Example:
        >>> log_log_interpolate(np.array([2.0]), np.array([1.0, 4.0]), np.array([1.0, 16.0])).round(12).tolist()
        [4.0]
    """
    return np.exp(np.interp(np.log(at), np.log(sizes), np.log(seconds)))


# Share of the straight line on logarithmic axes in `between_points`; the rest is the straight line on plain axes.
# Chosen on recorded NCCL curves: 12 sizes predict the others within 0.9 % (arena) and 2.2 % (OSDI'22), 4 sizes within
# 1.8 % and 4.8 %; logarithmic lines alone 1.05 and 2.9 %, 7.7 and 15 %.
LOGARITHMIC_SHARE = 0.1


def between_points(size: float, sizes: FloatArray, seconds: FloatArray) -> float:
    """Return the seconds of one message size, from a curve of measured points.

        t = exp((1 - w) log t_plain + w log t_log),   w = 0.1

    t_plain lies on the straight line between two points on plain axes, t_log on logarithmic ones. Below the first
    point, the first line goes on, to half of that point's time at least. Above the last one, the last line goes on, at
    half of that point's rate at least. A single point is constant below and proportional above.

    Example:
        >>> round(between_points(2.0, np.array([1.0, 3.0]), np.array([2.0, 4.0])), 3)
        3.01
        >>> between_points(6.0, np.array([1.0, 3.0]), np.array([2.0, 4.0]))
        7.0
        >>> between_points(1.0, np.array([2.0]), np.array([5.0])), between_points(4.0, np.array([2.0]), np.array([5.0]))
        (5.0, 10.0)
    """
    first, last = float(sizes[0]), float(sizes[-1])
    if len(sizes) == 1:
        return float(seconds[0]) * max(1.0, size / first)
    if size < first:
        slope = max(0.0, float((seconds[1] - seconds[0]) / (sizes[1] - sizes[0])))
        return max(float(seconds[0]) / 2, float(seconds[0]) - slope * (first - size))
    if size > last:
        slope = float((seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2]))
        return float(seconds[-1]) + (size - last) * max(slope, float(seconds[-1]) / last / 2)
    plain = float(np.interp(size, sizes, seconds))
    steep = float(np.interp(np.log(size), np.log(sizes), np.log(seconds)))
    return float(np.exp((1 - LOGARITHMIC_SHARE) * np.log(plain) + LOGARITHMIC_SHARE * steep))


# How hard a fit holds each parameter at its start, beside relative errors: it only decides what the data leave open.
PRIOR_WEIGHT = 0.02
# Parameters stay within this factor of their start.
MOST_FACTOR = 1e6


def fit_positive(
    predict: Callable[[FloatArray], FloatArray], measured: FloatArray, start: FloatArray, prior: float = PRIOR_WEIGHT
) -> FloatArray:
    """Fit positive parameters p to m measured times t by relative errors.

        minimise  (100 / m) sum_i (predict(p)_i / t_i - 1)^2 + w^2 sum_k log^2 (p_k / start_k)

    w is the `prior`. The search starts at `start`, above 0, and parameters without evidence keep it.

    Example:
        >>> size = np.array([1.0, 10.0, 100.0])
        >>> fit_positive(lambda p: p[0] + p[1] * size, 3 + 2 * size, np.array([1.0, 1.0]), prior=1e-6).round(4).tolist()
        [3.0, 2.0]

    Source: Branch, Coleman and Li, "A subspace, interior, and conjugate gradient method for large-scale
    bound-constrained minimization problems", 1999, by `scipy.optimize.least_squares`.
    """
    from scipy.optimize import least_squares  # takes a third of a second, and pricing plans needs no fit

    def errors(logs: FloatArray) -> FloatArray:
        relative = (predict(start * np.exp(logs)) / measured - 1) * (10 / np.sqrt(len(measured)))
        return np.concatenate([relative, logs * prior])

    bound = math.log(MOST_FACTOR)
    found: FloatArray = start * np.exp(least_squares(errors, np.zeros(len(start)), bounds=(-bound, bound)).x)
    return found
