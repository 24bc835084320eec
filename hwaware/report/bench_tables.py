"""Build a benchmark's tables: speed-ups by scenario, geometric means over all, the mappings of one result."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from rich.table import Table

from hwaware.formatting import MISSING, SECONDS, column, common_unit, counted, percent, ratio, text
from hwaware.plans import Plan
from hwaware.report.fitting import build_table
from hwaware.result import BenchmarkResult

# Baselines of hwaware's mapping, with their names in tables.
BASELINES = {"alpa": "Alpa", "even": "even", "proportional": "proportional", "best-measured": "best measured"}


_TITLES = {"hwaware-kept": "hwaware, plan kept", "even": "equal numbers of layers", "proportional": "layers by speed"}


def title_of(name: str) -> str:
    """Return a mapping's name in words, for pictures.

    Example:
        >>> title_of("alpa-9"), title_of("alpa-given"), title_of("even"), title_of("hwaware")
        ('Alpa, host order 9', 'Alpa, host order given', 'equal numbers of layers', 'hwaware')
    """
    method, _, order = name.partition("-")
    return f"Alpa, host order {order}" if method == "alpa" and order else _TITLES.get(name, BASELINES.get(name, name))


def speed_up_table(figures: Sequence[Dict[str, Any]]) -> Table:
    """Return a table with one row a result: hwaware's measured step, and its speed-up over each baseline."""
    ours = [_ours(one) for one in figures]
    label, steps = column([None if row is None else row["measured_step_s"]["median"] for row in ours], SECONDS)
    shown = [name for name in BASELINES if any(name in one["speed_ups"] for one in figures)]
    names = [("scenario", [one["scenario"] for one in figures]), ("model", [one["model"] for one in figures])]
    columns = [(f"hwaware [{label}]", steps)]
    columns += [
        (f"over {BASELINES[name]}", [speed_up(one["speed_ups"].get(name)) for one in figures]) for name in shown
    ]
    columns += [
        ("Alpa, all orders", [_orders(one) for one in figures]),
        ("at most", [ratio((one["speed_ups"].get("alpa") or {}).get("most")) for one in figures]),
        ("prediction", [percent(None if row is None else row["prediction_error"], signed=True) for row in ours]),
    ]
    caption = (
        "A speed-up is the other mapping's median step over hwaware's, each step divided by its round's reference. "
        "The 95 % intervals are over steps, or over starts if the benchmark started processes several times. Alpa's "
        "speed-up is the median over the measured orders of the hosts. At most: Alpa's predicted step over a lower "
        "bound on every plan's, by the profile and the cost model. Prediction: error of hwaware's predicted step."
    )
    return build_table("Speed-ups of hwaware's mapping, measured", names, columns, caption)


def overall_table(total: Dict[str, Any]) -> Table:
    """Return a table of geometric means over the results, with rows of their own for homogeneous clusters."""
    rows = [(words, total["speed_ups"].get(name)) for name, words in BASELINES.items()]
    rows += [(f"{words}, equal hosts", total["homogeneous"].get(name)) for name, words in BASELINES.items()]
    kept = [(words, row) for words, row in rows if row is not None]
    names = [("over", [words for words, _ in kept])]
    columns = [
        ("geometric mean", [ratio(row["geometric_mean"]) for _, row in kept]),
        ("least", [ratio(row["least"]) for _, row in kept]),
        ("largest", [ratio(row["largest"]) for _, row in kept]),
        ("at most", [ratio(row["most"]) for _, row in kept]),
        ("results", [str(row["results"]) for _, row in kept]),
    ]
    names.append(("outcomes", [", ".join(f"{n} {word}" for word, n in row["outcomes"].items()) for _, row in kept]))
    error = total["prediction_error"]
    caption = (
        f"Predictions err by {percent(error['median'])} in the median and {percent(error['worst'])} at worst, over all "
        f"mappings. Losses {'agree with' if total['losses_agree'] else 'DIFFER from'} training on a single device."
    )
    return build_table("Over all results, homogeneous clusters apart", names, columns, caption)


def mappings_table(result: BenchmarkResult, figures: Dict[str, Any]) -> Table:
    """Return a table with one row a mapping, failed ones included."""
    rows = [figures["mappings"][mapping.name] for mapping in result.mappings]
    measured = [row["measured_step_s"] for row in rows]
    blank: List[Optional[float]] = [None] * len(result.unmeasured)
    reasons = ["out of memory" if one.out_of_memory else one.reason for one in result.unmeasured]
    names = [
        (
            "mapping",
            [", ".join(one.names) for one in result.mappings] + [", ".join(x.names) for x in result.unmeasured],
        ),
        (
            "layers by device, in pipeline order",
            [describe_stages(one.plan) for one in result.mappings]
            + [describe_stages(one.plan) if one.plan else MISSING for one in result.unmeasured],
        ),
    ]
    times = [
        ("measured", [step["median"] for step in measured]),
        ("pipeline", [row["predictable_step_s"] for row in rows]),
        ("predicted", [row["corrected_prediction_s"] for row in rows]),
    ]
    unit = common_unit([value for _, values in times for value in values], SECONDS)
    medians, *predictions = [
        (f"{name} [{unit.label}]", [unit.text(value) for value in values + blank]) for name, values in times
    ]
    columns = [
        medians,
        ("95 % interval", [f"{unit.text(one['low'])}-{unit.text(one['high'])}" for one in measured] + reasons),
        *predictions,
        ("error", [percent(row["prediction_error"], signed=True) for row in rows] + [MISSING] * len(blank)),
        ("steps", [str(len(mapping.step_s)) for mapping in result.mappings] + ["0"] * len(blank)),
    ]
    ideal = "" if result.ideal_step_s is None else f"By the profile no plan takes less than {_seconds(result)}. "
    correlation = figures["rank_correlation"]
    ranked = "" if correlation is None else f"Ranks of predicted and measured steps correlate by {correlation:.2f}. "
    caption = (
        f"{ideal}{ranked}Pipeline: the measured step without the driver's start, which predictions leave out. "
        "Predictions are scaled to the machine's speed while the steps ran."
    )
    title = f"{result.model} on {result.scenario}: {counted(result.num_microbatches, 'microbatch')} a step"
    return build_table(title, names, columns, caption)


def describe_stages(plan: Plan) -> str:
    """Return a plan in one line, e.g. "h0:0 0-3, h1:0 4": devices, then layers, of each stage."""
    parts = []
    for stage in plan.stages:
        first, last = stage.layers
        parts.append(f"{'+'.join(stage.devices)} {first}" + (f"-{last}" if last > first else ""))
    return ", ".join(parts)


def _seconds(result: BenchmarkResult) -> str:
    return text(result.ideal_step_s, SECONDS)


def _ours(figures: Dict[str, Any]) -> Optional[Dict[str, Any]]:
    row: Optional[Dict[str, Any]] = figures["mappings"].get("hwaware")
    return row


def speed_up(row: Optional[Dict[str, Any]]) -> str:
    """Return a speed-up with its interval, and its outcome unless that is "faster"."""
    if row is None:
        return MISSING
    if "median" not in row:
        return str(row["outcome"])
    if row["outcome"] == "the same mapping":
        return "same mapping"
    words = "" if row["outcome"] == "faster" else f" {row['outcome']}"
    return f"{row['median']:.2f} ({row['low']:.2f}-{row['high']:.2f}){words}"


def _orders(figures: Dict[str, Any]) -> str:
    orders = figures.get("alpa_orders")
    if not orders or "least_speed_up" not in orders:
        return MISSING
    of = f" of {orders['distinct']}" if orders["distinct"] else ""
    return f"{orders['least_speed_up']:.2f}-{orders['largest_speed_up']:.2f} ({orders['measured']}{of})"
