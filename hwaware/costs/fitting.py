"""Few positive parameters fitted to measured times."""

from __future__ import annotations

from typing import Callable

import numpy as np

from hwaware.costs.curves import FloatArray

# How hard the fit is pulled to where it started, beside relative errors: it only decides what the data leave open.
PRIOR_WEIGHT = 0.02
MAX_ROUNDS = 60


def fit_positive(
    predict: Callable[[FloatArray], FloatArray], measured: FloatArray, start: FloatArray, prior: float = PRIOR_WEIGHT
) -> FloatArray:
    """Positive parameters p that minimise the relative errors of a model (Levenberg-Marquardt on log p).

    minimise  (100 / m) sum_i (predict(p)_i / t_i - 1)^2 + w^2 sum_k (log p_k - log start_k)^2,   w = `prior`

    Args:
        predict: Times of all m measurements for parameters p.
        measured: t, more than 0.
        start: Where the search starts and what parameters without evidence keep; more than 0.
        prior: w.

    Returns:
        The parameters; never worse than `start` by the measure above.

    Example:
        >>> size = np.array([1.0, 10.0, 100.0])
        >>> fit_positive(lambda p: p[0] + p[1] * size, 3 + 2 * size, np.array([1.0, 1.0]), prior=1e-6).round(4).tolist()
        [3.0, 2.0]

    Source: Marquardt, "An algorithm for least-squares estimation of nonlinear parameters", 1963.
    """
    origin = np.log(start)

    def errors(logs: FloatArray) -> FloatArray:
        relative = (predict(np.exp(logs)) / measured - 1) * (10 / np.sqrt(len(measured)))
        return np.concatenate([relative, (logs - origin) * prior])

    logs, damping = origin.copy(), 1e-2
    now = errors(logs)
    for _ in range(MAX_ROUNDS):
        steps = 1e-5 * np.eye(len(logs))
        slopes = np.stack([(errors(logs + step) - now) / 1e-5 for step in steps], axis=1)
        curvature = slopes.T @ slopes
        damped = curvature + damping * np.diag(np.diag(curvature) + 1e-9)
        # A step of e in every parameter is as far as the linear picture can be trusted.
        tried = logs + np.clip(np.linalg.solve(damped, -slopes.T @ now), -1, 1)
        then = errors(tried)
        if np.all(np.isfinite(then)) and then @ then < now @ now:
            logs, now, damping = tried, then, max(damping / 3, 1e-9)
        else:
            damping *= 4
    result: FloatArray = np.exp(logs)
    return result
