"""Figures out of results: speed-ups with intervals and what they amount to, errors of predictions, geometric means."""

from __future__ import annotations

import math
import statistics
from typing import Any, Dict, Iterable, List, Optional, Sequence

import numpy as np

from hwaware.bench.mappings import ALPA, BEST_MEASURED, OURS
from hwaware.bench.statistics import (
    Interval,
    is_significant,
    same_starts_ratio_interval,
    starts_interval,
    starts_ratio_interval,
)
from hwaware.costs.speed import medians, prediction_at_speed_s
from hwaware.result import BenchmarkResult, Mapping

# Losses agree when they differ by less than this, relative: rounding of float32 over microbatches is smaller.
LOSS_TOLERANCE = 1e-4
BASELINES = (ALPA, "even", "proportional", BEST_MEASURED)
# Scenarios whose hosts and links are all alike: they are reported, and left out of the means.
HOMOGENEOUS = ("four-equal",)
NOT_SIGNIFICANT = "not significant"


def summary(result: BenchmarkResult) -> Dict[str, Any]:
    """The figures of one result, ready for JSON.

    A speed-up is a baseline's median step over hwaware's, each over its round's reference kernel. Its outcome is
    "faster", "slower", "not significant" (the 95 % interval holds 1), "the same mapping", or "losses differ": then the
    mappings did not do the same work, and the speed-up says nothing.
    """
    ours = _find(result, OURS)
    difference = largest_loss_difference(result) if result.single_device_loss else None
    found: Dict[str, Any] = {
        "scenario": result.scenario,
        "model": result.model,
        "heterogeneous": result.scenario not in HOMOGENEOUS and _is_shaped(result),
        "mappings": {mapping.name: figures(mapping, result) for mapping in result.mappings},
        "largest_relative_loss_difference": difference,
        "losses_agree": difference is None or difference <= LOSS_TOLERANCE,
        "ideal_step_s": result.ideal_step_s,
        "speed_ups": {},
    }
    alpas = alpa_mappings(result)
    if alpas:
        found["median_alpa"] = median_alpa(result).name
        found["alpa_orders"] = _orders(result, alpas, ours)
    if ours is not None:
        if alpas:
            found["step_ratio"] = step_ratio(result, ours, median_alpa(result))._asdict()
        found["speed_ups"] = _speed_ups(result, ours, found["losses_agree"])
    else:
        found["speed_ups"] = _without_ours(result)
    found["rank_correlation"] = rank_correlation(result)
    return found


def step_ratio(result: BenchmarkResult, mapping: Mapping, baseline: Mapping) -> Interval:
    """One mapping's step over another's, each over its round's reference, with the interval over steps or starts."""
    if mapping is baseline:
        return Interval(1.0, 1.0, 1.0)
    # Mappings measured in groups share only some rounds, which are known by the reference beside them.
    rounds = set(mapping.reference_s) & set(baseline.reference_s)
    ours, theirs = mapping.relative_starts_of(rounds), baseline.relative_starts_of(rounds)
    if len(ours) == 1 or set(mapping.starts) != set(baseline.starts):
        return starts_ratio_interval(ours, theirs)
    others = [one for one in result.mappings if one is not mapping and one is not baseline]
    beside = [one.relative_starts_of(rounds) for one in others if rounds <= set(one.reference_s)]
    return same_starts_ratio_interval(ours, theirs, [one for one in beside if len(one) == len(ours)])


def figures(mapping: Mapping, result: BenchmarkResult) -> Dict[str, Any]:
    """Of one mapping: its measured step with its interval, its prediction, and the prediction's error.

    Predictions are of a step without what the driver takes to start it (`Mapping.pipeline_s`), and compared with that.
    """
    predicted = prediction_at_speed_s(mapping, result)
    predictable_s = mapping.typical(mapping.predictable_s)
    return {
        "measured_step_s": starts_interval(mapping.by_start(mapping.step_s))._asdict(),
        "predictable_step_s": predictable_s,
        "predicted_step_s": mapping.predicted_step_s,
        "corrected_prediction_s": predicted,
        "prediction_error": predicted / predictable_s - 1,
    }


def alpa_mappings(result: BenchmarkResult) -> List[Mapping]:
    """Alpa's mappings, fastest measured first; those that another name stands first for are among them."""
    found = [one for one in result.mappings if any(name.startswith(ALPA) for name in one.names)]
    return sorted(found, key=lambda mapping: mapping.typical(mapping.relative_steps))


def median_alpa(result: BenchmarkResult) -> Mapping:
    """Alpa's mapping of the host order that is the median of those measured, by relative step time.

    Raises:
        ValueError: The result has no mapping of Alpa's.
    """
    ranked = alpa_mappings(result)
    if not ranked:
        raise ValueError("the result has no mapping of Alpa's")
    return ranked[(len(ranked) - 1) // 2]


def largest_loss_difference(result: BenchmarkResult) -> float:
    """The largest relative difference between any mapping's loss and that of training on a single device.

    Raises:
        ValueError: The result has no losses of a single device.
    """
    expected = result.single_device_loss
    if not expected:
        raise ValueError("the result has no losses of a single device")
    return max(
        abs(found - wanted) / abs(wanted)
        for mapping in result.mappings
        for found, wanted in zip(mapping.loss, expected)
    )


def _find(result: BenchmarkResult, name: str) -> Optional[Mapping]:
    return next((mapping for mapping in result.mappings if name in mapping.names), None)


def _speed_ups(result: BenchmarkResult, ours: Mapping, losses_agree: bool) -> Dict[str, Any]:
    found: Dict[str, Any] = {}
    for name in (*BASELINES, "hwaware-kept"):
        baseline = _baseline(result, name)
        if baseline is None:
            missing = next((one for one in result.unmeasured if name in one.names), None)
            if missing is not None:
                found[name] = {"outcome": "out of memory" if missing.out_of_memory else "could not run"}
            continue
        interval = step_ratio(result, baseline, ours)
        word = outcome(interval, baseline is ours, losses_agree)
        found[name] = {**interval._asdict(), "outcome": word, "most": _most(result, baseline)}
    return found


def _without_ours(result: BenchmarkResult) -> Dict[str, Any]:
    """What is said instead of speed-ups where hwaware's own mapping is the one that could not be measured."""
    missing = next((one for one in result.unmeasured if OURS in one.names), None)
    if missing is None:
        return {}
    word = "hwaware out of memory" if missing.out_of_memory else "hwaware could not run"
    return {name: {"outcome": word} for name in BASELINES if _baseline(result, name) is not None}


def _is_shaped(result: BenchmarkResult) -> bool:
    """Whether the hosts differ at all: without root, a testbed's may be nothing but this machine's loopback."""
    shaped = result.environment.get("testbed", {}).get("shaped")
    return shaped is None or any(shaped.values())


def _baseline(result: BenchmarkResult, name: str) -> Optional[Mapping]:
    """The mapping of that name; for Alpa the median of its orders."""
    if name != ALPA:
        return _find(result, name)
    return median_alpa(result) if alpa_mappings(result) else None


def outcome(interval: Interval, same: bool, losses_agree: bool) -> str:
    """The word for a speed-up.

    Example:
        >>> outcome(Interval(1.2, 0.9, 1.5), same=False, losses_agree=True)
        'not significant'
    """
    if not losses_agree:
        return "losses differ"
    if same:
        return "the same mapping"
    if not is_significant(interval):
        return NOT_SIGNIFICANT
    return "faster" if interval.median > 1.0 else "slower"


def _most(result: BenchmarkResult, baseline: Mapping) -> Optional[float]:
    """The largest speed-up over a baseline that any plan could have, by the cost model: both steps are its own.

    Where the layers were timed beside the steps, both are for the speed of that time: kinds of devices drift apart, and
    with them the baseline's step from the ideal one. No plan's step is less than what it was before, or than the f-th
    part of that where every device took at least f < 1 times as long. A small kernel does not tell the drift well
    enough for this: bounds below measured speed-ups were seen.
    """
    if not result.ideal_step_s:
        return None
    if not baseline.slowdowns:
        return baseline.predicted_step_s / result.ideal_step_s
    quickest = min(1.0, *medians(baseline.slowdowns).values())
    return prediction_at_speed_s(baseline, result) / (quickest * result.ideal_step_s)


def _orders(result: BenchmarkResult, alpas: Sequence[Mapping], ours: Optional[Mapping]) -> Dict[str, Any]:
    """The range over the host orders: of all by prediction, of some by measurement."""
    predicted = [order.predicted_step_s for order in result.alpa_orders]
    found: Dict[str, Any] = {
        "distinct": len(predicted) or None,
        "measured": len(alpas),
        "fastest_predicted_step_s": min(predicted, default=None),
        "slowest_predicted_step_s": max(predicted, default=None),
        "fastest_step_s": alpas[0].median_step_s,
        "slowest_step_s": alpas[-1].median_step_s,
    }
    if ours is not None:
        for key, mapping in (("least_speed_up", alpas[0]), ("largest_speed_up", alpas[-1])):
            found[key] = step_ratio(result, mapping, ours).median
    return found


def rank_correlation(result: BenchmarkResult) -> Optional[float]:
    """Spearman's rank correlation of predicted and measured steps over all mappings; None for fewer than three.

    Source: Spearman, "The proof and measurement of association between two things", 1904.
    """
    mappings = {one.name: one for one in (*result.enumerated, *result.mappings)}.values()
    if len(mappings) < 3:
        return None
    predicted = [prediction_at_speed_s(one, result) for one in mappings]
    measured = [one.typical(one.predictable_s) for one in mappings]
    ranks = [_ranks(values) for values in (predicted, measured)]
    if any(len(set(one)) == 1 for one in ranks):
        return None
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: Sequence[float]) -> List[float]:
    """The rank of each value; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def overall(summaries: Iterable[Dict[str, Any]]) -> Dict[str, Any]:
    """Figures over many results: geometric means of the speed-ups over heterogeneous clusters, errors over all.

    Speed-ups whose losses differ are left out, and counted.
    """
    listed = list(summaries)
    errors = [abs(row["prediction_error"]) for one in listed for row in one["mappings"].values()]
    return {
        "results": len(listed),
        "speed_ups": {name: _mean([one for one in listed if one["heterogeneous"]], name) for name in BASELINES},
        "homogeneous": {name: _mean([one for one in listed if not one["heterogeneous"]], name) for name in BASELINES},
        "prediction_error": {
            "median": statistics.median(errors) if errors else None,
            "worst": max(errors, default=None),
        },
        "losses_agree": all(one["losses_agree"] for one in listed),
    }


def _mean(listed: Sequence[Dict[str, Any]], name: str) -> Optional[Dict[str, Any]]:
    rows = [one["speed_ups"][name] for one in listed if name in one["speed_ups"]]
    usable = [row for row in rows if row.get("median") is not None and row["outcome"] != "losses differ"]
    if not usable:
        return None
    bounds = [row["most"] for row in usable if row.get("most")]
    words = [row["outcome"] for row in rows]
    return {
        "geometric_mean": _geometric_mean([row["median"] for row in usable]),
        "least": min(row["median"] for row in usable),
        "largest": max(row["median"] for row in usable),
        "most": _geometric_mean(bounds) if len(bounds) == len(usable) else None,
        "results": len(usable),
        "outcomes": {word: words.count(word) for word in sorted(set(words))},
    }


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))
