"""Medians of measured steps relative to the reference kernel beside them, with bootstrap intervals."""

from __future__ import annotations

import statistics
from typing import NamedTuple, Sequence

import numpy as np
import numpy.typing as npt

_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 0


class Interval(NamedTuple):
    """A median with its 95 % bootstrap interval."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """The median of `values` and the percentile bootstrap interval of it (Efron and Tibshirani, 1993).

    Example:
        >>> median_interval([1.0, 1.0, 1.0])
        Interval(median=1.0, low=1.0, high=1.0)
    """
    return _interval(_resampled_medians(values), statistics.median(values))


def ratio_interval(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """The ratio of two medians, and its bootstrap interval.

    Example:
        >>> ratio_interval([1.0, 1.0], [2.0, 2.0])
        Interval(median=0.5, low=0.5, high=0.5)
    """
    ratio = statistics.median(values) / statistics.median(baseline)
    return _interval(_resampled_medians(values) / _resampled_medians(baseline, _SEED + 1), ratio)


def is_significant(interval: Interval) -> bool:
    """Whether a ratio's interval leaves out 1: neither mapping can be called faster otherwise."""
    return interval.high < 1.0 or interval.low > 1.0


def _resampled_medians(values: Sequence[float], seed: int = _SEED) -> npt.NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    draws = generator.choice(np.asarray(values, dtype=float), size=(_RESAMPLES, len(values)))
    medians: npt.NDArray[np.float64] = np.median(draws, axis=1)
    return medians


def _interval(resampled: npt.NDArray[np.float64], median: float) -> Interval:
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(float(median), float(low), float(high))
