"""How sure a predicted step is: an interval from the spread of what was measured, and comparisons that respect it."""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Sequence, Tuple

import numpy as np

from hwaware.cluster import ClusterProfile, Device, Link
from hwaware.costs.curves import FloatArray
from hwaware.costs.refit import scalable_step
from hwaware.plans import Plan
from hwaware.workload import Workload

# Least spread of log t: the closed form itself is 0.3 % off simulated steps in the mean and 6.6 % at worst
# (benchmarks/results/predictions.md).
LEAST_SPREAD = 0.01
# Spread of what was measured once only. Assumed: nothing in a profile tells it.
UNKNOWN_SPREAD = 0.05
# Spread of layer times that nobody measured, the same for all devices: on one CPU core GPT layers took 1.2 to 3.5 times
# their matrix products (2026-11, jax 0.4.30); the middle 90 % of a normal log t spans that range at 0.3.
ANALYTIC_SPREAD = 0.3
DRAWS = 400
_SEED = 2023


class Interval(NamedTuple):
    """A predicted step with the range that holds it with the given probability."""

    low_s: float
    step_s: float
    high_s: float


def step_interval(
    plan: Plan, workload: Workload, profile: ClusterProfile, probability: float = 0.9, draws: int = DRAWS
) -> Interval:
    """The range of a plan's step time.

    Every device kind's times are multiplied by exp(s_k z_k), all messages by exp(s_c z_c), with z standard normal and s
    the spreads of `spreads`. Layers without measured times share a further factor exp(0.3 z_a), because that error is
    the model's and hits all devices alike; times carried over from another kind have one of their own spread. The
    interval holds the middle `probability` of the resulting steps.

    Raises:
        PlanError: The plan does not fit the workload or the cluster.
    """
    steps = _drawn_steps([plan], workload, profile, draws)[0]
    low, high = np.quantile(steps, [(1 - probability) / 2, (1 + probability) / 2])
    kinds = sorted({device.kind for device in profile.devices})
    predicted = scalable_step(plan, workload, profile, kinds)(np.ones(len(kinds) + 1))
    return Interval(float(min(low, predicted)), predicted, float(max(high, predicted)))


def surely_better(
    plan: Plan, other: Plan, workload: Workload, profile: ClusterProfile, probability: float = 0.95
) -> bool:
    """Whether a plan is faster than another one in at least that part of all draws; both meet the same draws.

    Errors that both plans share (one device kind, one network, the model itself) cancel, so overlapping intervals can
    still be told apart.

    Raises:
        PlanError: A plan does not fit the workload or the cluster.
    """
    first, second = _drawn_steps([plan, other], workload, profile, DRAWS)
    return bool(np.mean(first < second) >= probability)


def spreads(profile: ClusterProfile) -> Tuple[Dict[str, float], float]:
    """Standard deviation of log t: for each device kind, from devices of that kind and repeated products; for links.

    Example:
        >>> spreads(ClusterProfile.uniform(hosts=1))
        ({'cpu': 0.05}, 0.05)
    """
    kinds: Dict[str, List[float]] = {}
    for device in profile.devices:
        kinds.setdefault(device.kind, []).extend(_product_residuals(device))
    links = [residual for link in profile.links for residual in _sample_residuals(link)]
    return {kind: _spread(residuals) for kind, residuals in kinds.items()}, _spread(links)


def _drawn_steps(plans: Sequence[Plan], workload: Workload, profile: ClusterProfile, draws: int) -> List[FloatArray]:
    per_kind, links = spreads(profile)
    kinds = sorted(per_kind)
    random = np.random.default_rng(_SEED)
    normal = random.standard_normal((draws, len(kinds) + 2))
    analytic = [_layer_spread(workload, kind) for kind in kinds]
    logs = normal[:, : len(kinds)] * np.array([per_kind[kind] for kind in kinds])
    logs += normal[:, -1:] * np.array(analytic)
    factors = np.exp(np.column_stack([logs, normal[:, len(kinds)] * links]))
    steps = [scalable_step(plan, workload, profile, kinds) for plan in plans]
    return [np.array([step(row) for row in factors]) for step in steps]


def _layer_spread(workload: Workload, kind: str) -> float:
    """What is not known of layer times on that kind: nothing where all were measured, the most where one was not."""
    if not all(layer.measured and kind in layer.measured for layer in workload.layers):
        return ANALYTIC_SPREAD
    found = [times.spread for layer in workload.layers for times in (layer.measured or {})[kind].values()]
    return min(ANALYTIC_SPREAD, max((spread for spread in found if spread is not None), default=0.0))


def _product_residuals(device: Device) -> List[float]:
    """log t of repeated products of one size, less their mean, where the profile kept them."""
    samples = device.samples if isinstance(device.samples, dict) else {}
    products = samples.get("products")
    sizes: Dict[Tuple[str, int], List[float]] = {}
    for dtype, found in products.items() if isinstance(products, dict) else ():
        for sample in found:
            sizes.setdefault((dtype, sample["edge"]), []).append(float(np.log(sample["seconds"] / sample["calls"])))
    return _residuals(list(sizes.values()))


def _sample_residuals(link: Link) -> List[float]:
    sizes: Dict[float, List[float]] = {}
    for sample in link.samples:
        sizes.setdefault(sample.bytes, []).append(float(np.log(sample.seconds)))
    return _residuals(list(sizes.values()))


def _residuals(groups: Sequence[Sequence[float]]) -> List[float]:
    repeated = [np.array(group) for group in groups if len(group) > 1]
    # Less than the mean of its own group is smaller than the truth by (n - 1) / n.
    return [float(v) for g in repeated for v in (g - g.mean()) * np.sqrt(len(g) / (len(g) - 1))]


def _spread(residuals: Sequence[float]) -> float:
    if not residuals:
        return UNKNOWN_SPREAD
    # 1.4826 median |r| is the standard deviation of normal values and ignores outliers.
    return max(LEAST_SPREAD, float(1.4826 * np.median(np.abs(residuals))))
