"""Estimate step times and their ratios, with 95 % intervals over steps or over process starts.

One start of a program's processes may be faster than the next; its own steps cannot show by how much.
With several starts, each start therefore counts as one observation, through the median of its steps.
"""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple, Optional, Sequence

import numpy as np
import numpy.typing as npt

# Step times, grouped by the start of the processes that took them.
Starts = Sequence[Sequence[float]]
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 0


class Interval(NamedTuple):
    """A median, or a ratio of medians, with the ends of its 95 % interval."""

    median: float
    low: float
    high: float


def median_interval(values: Sequence[float]) -> Interval:
    """Return the median and its percentile bootstrap interval.

    Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993.

    Example:
        >>> median_interval([1.0, 1.0, 1.0])
        Interval(median=1.0, low=1.0, high=1.0)
    """
    return _interval(_resampled_medians(values), statistics.median(values))


def ratio_interval(values: Sequence[float], baseline: Sequence[float]) -> Interval:
    """Return the ratio of two medians and its bootstrap interval.

    Args:
        values: The steps in the numerator.
        baseline: The steps in the denominator; the bootstrap resamples both independently.

    Example:
        >>> ratio_interval([1.0, 1.0], [2.0, 2.0])
        Interval(median=0.5, low=0.5, high=0.5)
    """
    ratio = statistics.median(values) / statistics.median(baseline)
    return _interval(_resampled_medians(values) / _resampled_medians(baseline, _SEED + 1), ratio)


def starts_interval(values: Starts) -> Interval:
    """Return the step time of one mapping, measured in one or more starts of its processes.

    One start gives `median_interval`. Several give Student's t interval of the log medians; `starts_ratio_interval`
    explains the variance.

    Example:
        >>> starts_interval([[1.0, 1.0]]), [round(one, 2) for one in starts_interval([[1.0], [1.02], [0.98]])]
        (Interval(median=1.0, low=1.0, high=1.0), [1.0, 0.95, 1.05])
    """
    if len(values) == 1:
        return median_interval(values[0])
    logs = _log_medians(values)
    variance = max(float(np.var(logs, ddof=1)), _variance_within(values))
    return _over_starts(float(logs.mean()), variance / len(logs), len(logs) - 1)


def starts_ratio_interval(values: Starts, baseline: Starts) -> Interval:
    """Return the ratio of two step times that were measured in independent starts.

    Two programs that do the same work differ by some per cent from one start to the next. The steps of one start
    cannot show that, so each start counts once, by its median (Kalibera and Jones, 2013).

    The ratio is the ratio of the geometric means of those medians. Its interval is Student's t interval for two
    samples of logarithms with a common variance. That variance is the one between starts, and never less than the
    scatter of the steps within a start implies. Few starts agree more closely than that only by chance. An analysis of
    variance would then estimate the variance between starts as 0 (Searle et al., chapter 3).

    Two single starts give `ratio_interval`.

    Args:
        values: The steps of each start.
        baseline: The steps of each start of the mapping in the denominator.

    References:
        Kalibera and Jones, "Rigorous benchmarking in reasonable time", 2013.
        Searle, Casella and McCulloch, "Variance Components", 1992.

    Example:
        >>> found = starts_ratio_interval([[1.0], [1.02], [0.98]], [[2.0], [2.02], [2.04]])
        >>> [round(one, 2) for one in found]
        [0.49, 0.48, 0.51]
    """
    if len(values) == len(baseline) == 1:
        return ratio_interval(values[0], baseline[0])
    logs, freedom = [_log_medians(one) for one in (values, baseline)], len(values) + len(baseline) - 2
    between = sum(float(np.sum((one - one.mean()) ** 2)) for one in logs) / freedom
    several = [steps for one in (values, baseline) if len(one) > 1 for steps in one]
    variance = max(between, _variance_within(several))
    log = float(logs[0].mean() - logs[1].mean())
    return _over_starts(log, variance * (1 / len(values) + 1 / len(baseline)), freedom)


def same_starts_ratio_interval(values: Starts, baseline: Starts, beside: Sequence[Starts] = ()) -> Interval:
    """Return the ratio of two step times that were measured in the same starts.

    The mappings took turns, so the effect that a start has on both cancels. Starts are the blocks of a randomized
    block design (Fisher, "The Design of Experiments", 1935). The residuals of the log medians of k mappings in n
    starts have (k - 1)(n - 1) degrees of freedom. The variance comes from all residuals. Where the ratio's own starts
    scatter more, it comes from these: mappings need not scatter alike.

    Args:
        values: The steps of each start; at least two starts.
        baseline: The steps of the mapping in the denominator, in the same starts.
        beside: The steps of further mappings in the same starts. They sharpen the estimate of the variance.

    Example:
        >>> found = same_starts_ratio_interval([[1.0], [1.1], [1.3]], [[2.0], [2.2], [2.6]], [[[4.0], [4.4], [5.3]]])
        >>> [round(one, 2) for one in found]
        [0.5, 0.49, 0.51]
    """
    logs = np.array([_log_medians(one) for one in (values, baseline, *beside)])
    mappings, starts = logs.shape
    freedom = (mappings - 1) * (starts - 1)
    residuals = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    ratios = logs[0] - logs[1]
    variance = max(
        2 * float(np.sum(residuals**2)) / freedom,
        float(np.var(ratios, ddof=1)),
        _variance_within(values) + _variance_within(baseline),
    )
    return _over_starts(float(ratios.mean()), variance / starts, freedom)


def _log_medians(values: Starts) -> npt.NDArray[np.float64]:
    logs: npt.NDArray[np.float64] = np.log([statistics.median(steps) for steps in values])
    return logs


def _variance_within(values: Starts) -> float:
    """Return the variance of a start's log median that the scatter of its steps implies, as the mean over starts.

    The bootstrap estimates it. With only ten steps the estimate is a fifth to a third too large.
    """
    return statistics.fmean(float(np.var(np.log(_resampled_medians(steps)))) for steps in values)


def _over_starts(log: float, variance: float, freedom: int) -> Interval:
    """Return Student's t interval around a mean of logarithms, as a ratio."""
    from scipy.stats import t as student_t  # slow to import, and results with one start need no t

    error = math.sqrt(variance) * float(student_t.ppf((1 + _CONFIDENCE) / 2, freedom))
    return Interval(math.exp(log), math.exp(log - error), math.exp(log + error))


def is_significant(interval: Interval) -> bool:
    """Return True if a ratio's interval excludes 1; otherwise neither side is faster.

    Example:
        >>> is_significant(Interval(1.2, 1.1, 1.3)), is_significant(Interval(1.2, 0.9, 1.5))
        (True, False)
    """
    return interval.high < 1.0 or interval.low > 1.0


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> Optional[float]:
    """Return Spearman's rank correlation, where ties share their mean rank.

    Return None where it is undefined: for fewer than two values, or if all values of one side are equal.

    Source: Spearman, "The proof and measurement of association between two things", 1904.

    Example:
        >>> rank_correlation([1, 2, 3], [10, 30, 20]), rank_correlation([1, 2], [5, 5])
        (0.5, None)
    """
    from scipy.stats import spearmanr

    if len(set(one)) < 2 or len(set(other)) < 2:
        return None
    return float(spearmanr(one, other)[0])


def _resampled_medians(values: Sequence[float], seed: int = _SEED) -> npt.NDArray[np.float64]:
    generator = np.random.default_rng(seed)
    draws = generator.choice(np.asarray(values, dtype=float), size=(_RESAMPLES, len(values)))
    medians: npt.NDArray[np.float64] = np.median(draws, axis=1)
    return medians


def _interval(resampled: npt.NDArray[np.float64], median: float) -> Interval:
    tail = 100 * (1 - _CONFIDENCE) / 2
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Interval(float(median), float(low), float(high))
