"""Summarise results: speed-ups with intervals and verdicts, prediction errors, means over results."""

from __future__ import annotations

import math
import statistics
from typing import Any, Dict, Iterable, List, Optional, Sequence

from hwaware.bench.mappings import ALPA, BEST_MEASURED, OURS
from hwaware.bench.pace import LEAST_ROUNDS
from hwaware.bench.statistics import (
    Interval,
    is_significant,
    rank_correlation,
    same_starts_ratio_interval,
    starts_interval,
    starts_ratio_interval,
)
from hwaware.costs.speed import prediction_at_speed_s
from hwaware.result import BenchmarkResult, Mapping

# Largest relative difference of losses that agree; float32 rounding over microbatches stays below it.
LOSS_TOLERANCE = 1e-4
# A loss may be 0.
_LEAST_LOSS = 1e-30
BASELINES = (ALPA, "even", "proportional", BEST_MEASURED)
# Scenarios with equal hosts and links: reports list them apart, outside the means.
HOMOGENEOUS = ("four-equal",)
NOT_SIGNIFICANT = "not significant"


def summary(result: BenchmarkResult) -> Dict[str, Any]:
    """Return the figures of one result, ready for JSON.

    A speed-up divides a baseline's median step by hwaware's, each relative to its round's reference kernel.
    Its outcome is one of:

    - "faster" or "slower";
    - "not significant": the 95 % interval contains 1, or a single start has fewer than `LEAST_ROUNDS` steps;
    - "the same mapping";
    - "losses differ": the mappings did different work, so the speed-up means nothing;
    - "out of memory" or "could not run": the baseline has no speed-up;
    - "hwaware out of memory" or "hwaware could not run": hwaware's own mapping is missing.
    """
    ours = _find(result, OURS)
    difference = largest_loss_difference(result)
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
    found["rank_correlation"] = prediction_rank_correlation(result)
    return found


def step_ratio(result: BenchmarkResult, mapping: Mapping, baseline: Mapping) -> Interval:
    """Return the ratio of two mappings' step times, each relative to its round's reference.

    The interval is over steps for a single start, and over starts otherwise.
    """
    if mapping is baseline:
        return Interval(1.0, 1.0, 1.0)
    # Mappings of different groups share only some rounds; the reference times identify these.
    rounds = set(mapping.reference_s) & set(baseline.reference_s)
    ours, theirs = mapping.relative_starts_of(rounds), baseline.relative_starts_of(rounds)
    if len(ours) == 1 or set(mapping.starts) != set(baseline.starts):
        return starts_ratio_interval(ours, theirs)
    others = [one for one in result.mappings if one is not mapping and one is not baseline]
    beside = [one.relative_starts_of(rounds) for one in others if rounds <= set(one.reference_s)]
    return same_starts_ratio_interval(ours, theirs, [one for one in beside if len(one) == len(ours)])


def figures(mapping: Mapping, result: BenchmarkResult) -> Dict[str, Any]:
    """Return a mapping's measured step with its interval, its prediction and the prediction's error.

    Predictions leave out the time that the driver takes to start a step, so `Mapping.pipeline_s` is what they must
    match.
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
    """Return Alpa's mappings, fastest measured first, with those that carry Alpa's name as a second one."""
    found = [one for one in result.mappings if any(name.startswith(ALPA) for name in one.names)]
    return sorted(found, key=lambda mapping: mapping.typical(mapping.relative_steps))


def median_alpa(result: BenchmarkResult) -> Mapping:
    """Return Alpa's mapping for the median host order by relative step time.

    Raises:
        ValueError: The result has no mapping of Alpa's.
    """
    ranked = alpa_mappings(result)
    if not ranked:
        raise ValueError("the result has no mapping of Alpa's")
    return ranked[(len(ranked) - 1) // 2]


def largest_loss_difference(result: BenchmarkResult) -> Optional[float]:
    """Return the largest relative difference between a mapping's loss and that of a single device.

    The result is None if nothing can be compared.
    """
    differences = [
        abs(found - wanted) / max(abs(wanted), _LEAST_LOSS)
        for mapping in result.mappings
        for found, wanted in zip(mapping.loss, result.single_device_loss or ())
    ]
    return max(differences, default=None)


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
        # The bootstrap covers 0 %, 67 % and 90 % of the ratios of one, two and three steps, and 96 % with five.
        few = len(ours.relative_starts) == 1 and min(len(ours.step_s), len(baseline.step_s)) < LEAST_ROUNDS
        word = outcome(Interval(1.0, 0.0, math.inf) if few else interval, baseline is ours, losses_agree)
        found[name] = {**interval._asdict(), "outcome": word, "most": _most(result, baseline)}
    return found


def _without_ours(result: BenchmarkResult) -> Dict[str, Any]:
    """Return each baseline's outcome where hwaware's own mapping was not measured."""
    missing = next((one for one in result.unmeasured if OURS in one.names), None)
    if missing is None:
        return {}
    word = "hwaware out of memory" if missing.out_of_memory else "hwaware could not run"
    return {name: {"outcome": word} for name in BASELINES if _baseline(result, name) is not None}


def _is_shaped(result: BenchmarkResult) -> bool:
    """Return False for a testbed that shaped nothing: its hosts are all this machine's loopback."""
    shaped = (result.environment.get("testbed") or {}).get("shaped")
    return shaped is None or any(shaped.values())


def _baseline(result: BenchmarkResult, name: str) -> Optional[Mapping]:
    """Return the mapping of that name; for "alpa", the median of its host orders."""
    if name != ALPA:
        return _find(result, name)
    return median_alpa(result) if alpa_mappings(result) else None


def outcome(interval: Interval, same: bool, losses_agree: bool) -> str:
    """Return the verdict on a speed-up; `summary` lists the verdicts.

    Args:
        interval: The speed-up: the baseline's step over hwaware's.
        same: Both sides are the same mapping.
        losses_agree: All mappings trained alike.

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
    """Return the largest speed-up over a baseline that any plan could reach, by the cost model alone.

    Both steps are predictions. Kinds of devices drift apart while a benchmark runs, and the baseline's step with them.
    Where the harness timed the layers beside the steps, both predictions follow that drift. If every device took at
    least f < 1 times as long, no step falls below f times the ideal one. The small reference kernel
    is too coarse for this correction: bounds below measured speed-ups were seen with it.
    """
    if not result.ideal_step_s:
        return None
    if not baseline.slowdowns:
        return baseline.predicted_step_s / result.ideal_step_s
    quickest = min(1.0, *map(statistics.median, baseline.slowdowns.values()))
    return prediction_at_speed_s(baseline, result) / (quickest * result.ideal_step_s)


def _orders(result: BenchmarkResult, alpas: Sequence[Mapping], ours: Optional[Mapping]) -> Dict[str, Any]:
    """Return the range over host orders: predicted for all orders, measured for some."""
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


def prediction_rank_correlation(result: BenchmarkResult) -> Optional[float]:
    """Return the rank correlation of predicted and measured steps over all mappings; None for fewer than three."""
    mappings = {one.name: one for one in (*result.enumerated, *result.mappings)}.values()
    if len(mappings) < 3:
        return None
    predicted = [prediction_at_speed_s(one, result) for one in mappings]
    measured = [one.typical(one.predictable_s) for one in mappings]
    return rank_correlation(predicted, measured)


def overall(summaries: Iterable[Dict[str, Any]]) -> Dict[str, Any]:
    """Return figures over many results, from their `summary` documents.

    Geometric means of speed-ups cover heterogeneous and homogeneous clusters apart. They leave out speed-ups whose
    losses differ, but count them among the outcomes. Prediction errors cover all results.
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
