"""Replicas that work on parts of one microbatch: what follows waits for the one that takes longest."""

from __future__ import annotations

import functools
from statistics import NormalDist
from typing import Sequence

import numpy as np

from hwaware.costs.curves import FloatArray


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
