"""Medians of measured steps relative to the reference beside them, and intervals: over steps, or over starts."""

from __future__ import annotations

import functools
import math
import statistics
from typing import NamedTuple, Sequence

import numpy as np
import numpy.typing as npt

# The steps of each start of something's processes.
Starts = Sequence[Sequence[float]]
_RESAMPLES = 2000
_CONFIDENCE = 0.95
_SEED = 0
_T_DRAWS = 200_000


class Interval(NamedTuple):
    """A median with its 95 % interval."""

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


def starts_interval(values: Starts) -> Interval:
    """The step time of something that was measured in one or more starts of its processes: see `starts_ratio_interval`.

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
    """The ratio of two step times, each measured in one or more starts of its processes, not of both together.

    Two programs that do the same work differ by some per cent from one start to the next, which the steps of one start
    cannot tell: with several starts, what counts are their medians (Kalibera and Jones, "Rigorous benchmarking in
    reasonable time", 2013). The ratio is that of the medians' geometric means, its interval that of Student's t for
    two samples whose logarithms have one variance: that between the starts' medians, but no less than the scatter of
    the steps within a start gives them (what starts differ by beside it is then estimated as 0, as in an analysis of
    variance; Searle, Casella and McCulloch, "Variance Components", 1992, chapter 3). Few starts agree more closely
    than that only by chance. Where both have one start, this is `ratio_interval`.

    Args:
        values: The steps of each start.
        baseline: The same of what they are compared with.

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
    """`starts_ratio_interval` of two things that ran in turn in the same starts, so that what both share cancels.

    Starts are the blocks of a randomized block design (Fisher, "The Design of Experiments", 1935): with k things in n
    starts, what is left of the logarithms of the medians without the mean of each thing and of each start has (k - 1)
    (n - 1) degrees of freedom. Where the ratio's own starts scatter more than that, theirs counts: things need not
    scatter alike.

    Args:
        values: The steps of each start, of which there are several.
        baseline: The same of what they are compared with.
        beside: The same of what else ran in these starts: it says more of how much starts differ.

    Example:
        >>> found = same_starts_ratio_interval([[1.0], [1.1], [1.3]], [[2.0], [2.2], [2.6]], [[[4.0], [4.4], [5.3]]])
        >>> [round(one, 2) for one in found]
        [0.5, 0.49, 0.51]
    """
    logs = np.array([_log_medians(one) for one in (values, baseline, *beside)])
    things, starts = logs.shape
    freedom = (things - 1) * (starts - 1)
    left = logs - logs.mean(axis=0) - logs.mean(axis=1, keepdims=True) + logs.mean()
    ratios = logs[0] - logs[1]
    variance = max(
        2 * float(np.sum(left**2)) / freedom,
        float(np.var(ratios, ddof=1)),
        _variance_within(values) + _variance_within(baseline),
    )
    return _over_starts(float(ratios.mean()), variance / starts, freedom)


def _log_medians(values: Starts) -> npt.NDArray[np.float64]:
    logs: npt.NDArray[np.float64] = np.log([statistics.median(steps) for steps in values])
    return logs


def _variance_within(values: Starts) -> float:
    """The variance of the logarithm of one start's median by the scatter of its steps, the starts' mean.

    By the bootstrap, which makes it a fifth to a third too large for as few as ten steps.
    """
    return statistics.fmean(float(np.var(np.log(_resampled_medians(steps)))) for steps in values)


def _over_starts(log: float, variance: float, freedom: int) -> Interval:
    error = math.sqrt(variance) * _student_t(freedom)
    return Interval(math.exp(log), math.exp(log - error), math.exp(log + error))


@functools.lru_cache(maxsize=None)
def _student_t(freedom: int) -> float:
    """What 95 % of Student's t are below, without their sign; drawn, as SciPy may be missing. Good to a per cent."""
    draws = np.abs(np.random.default_rng(_SEED).standard_t(freedom, _T_DRAWS))
    return float(np.percentile(draws, 100 * _CONFIDENCE))


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
