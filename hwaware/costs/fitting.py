"""Fit few positive parameters to measured times."""

from __future__ import annotations

import math
from typing import Callable

import numpy as np

from hwaware.costs.curves import FloatArray

# How hard a fit holds each parameter at its start, beside relative errors: it only decides what the data leave open.
PRIOR_WEIGHT = 0.02
# Parameters stay within this factor of their start.
MOST_FACTOR = 1e6


def fit_positive(
    predict: Callable[[FloatArray], FloatArray], measured: FloatArray, start: FloatArray, prior: float = PRIOR_WEIGHT
) -> FloatArray:
    """Fit positive parameters p to measured times by relative errors.

    minimise  (100 / m) sum_i (predict(p)_i / t_i - 1)^2 + w^2 sum_k log^2 (p_k / start_k),   w = `prior`

    Args:
        predict: Returns the times of all m measurements for parameters p.
        measured: t, above 0.
        start: Start of the search, above 0; parameters without evidence keep it.
        prior: w.

    Example:
        >>> size = np.array([1.0, 10.0, 100.0])
        >>> fit_positive(lambda p: p[0] + p[1] * size, 3 + 2 * size, np.array([1.0, 1.0]), prior=1e-6).round(4).tolist()
        [3.0, 2.0]

    References:
        Branch, Coleman and Li, "A subspace, interior, and conjugate gradient method for large-scale bound-constrained
        minimization problems", 1999, as `scipy.optimize.least_squares` has it.
    """
    from scipy.optimize import least_squares  # takes a third of a second, and pricing plans needs no fit

    def errors(logs: FloatArray) -> FloatArray:
        relative = (predict(start * np.exp(logs)) / measured - 1) * (10 / np.sqrt(len(measured)))
        return np.concatenate([relative, logs * prior])

    bound = math.log(MOST_FACTOR)
    found: FloatArray = start * np.exp(least_squares(errors, np.zeros(len(start)), bounds=(-bound, bound)).x)
    return found
