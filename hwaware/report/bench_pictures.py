"""Draw a benchmark: step times with intervals, measured and simulated steps, predictions, speed-ups."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from hwaware.costs.speed import prediction_at_speed_s
from hwaware.formatting import SECONDS, text
from hwaware.report import canvas
from hwaware.report.bench_tables import BASELINES, title_of
from hwaware.report.plots import draw_map
from hwaware.report.timeline_picture import draw_steps_of
from hwaware.result import BenchmarkResult, Mapping
from hwaware.simulator import simulate
from hwaware.timeline import Timeline

_OURS = "#4c78a8"
_OTHER = "#bab0ac"
_MAPS = 3
# Width of a label's first digits, in units of the speed-ups' axis.
_WORDS = 0.15


def shown_mappings(result: BenchmarkResult, figures: Dict[str, Any]) -> List[Mapping]:
    """Return the mappings to draw, at most three: hwaware's, the kept one, Alpa's median, the even one."""
    names = ["hwaware", "hwaware-kept", figures.get("median_alpa"), "even"]
    found: List[Mapping] = []
    for name in names:
        mapping = next((one for one in result.mappings if name in one.names), None)
        if mapping is not None and mapping not in found:
            found.append(mapping)
    return found[:_MAPS] or list(result.mappings[:1])


def draw_maps(result: BenchmarkResult, figures: Dict[str, Any]) -> Any:
    """Draw a map of each shown mapping: the stage on each device, and the links between stages."""
    shown = shown_mappings(result, figures)
    assert result.profile is not None
    figure, axes = canvas.subplots([4.3] * len(shown), 4.6, squeeze=False)
    for axis, mapping in zip(axes[0], shown):
        draw_map(axis, result.profile, mapping.plan)
        # Only one of Alpa's orders is shown: its number would say nothing.
        names = dict.fromkeys(title_of("alpa" if name.startswith("alpa-") else name) for name in mapping.names)
        axis.set_title(f"{' = '.join(names)}\n{text(mapping.median_step_s, SECONDS)} measured", fontsize=11)
    return figure


def draw_steps(result: BenchmarkResult, figures: Dict[str, Any]) -> Any:
    """Draw one row a mapping: every step, the median with its interval, the prediction, and the bound on all plans."""
    rows = [(mapping, figures["mappings"][mapping.name]) for mapping in result.mappings]
    height = max(2.6, 1.6 + 0.5 * (len(rows) + len(result.unmeasured)))
    figure, axis = canvas.pyplot().subplots(figsize=(11, height), layout="constrained")
    for place, (mapping, row) in enumerate(rows):
        _draw_row(axis, place, mapping, row)
    for place, one in enumerate(result.unmeasured, len(rows)):
        words = "out of memory" if one.out_of_memory else "could not run"
        axis.text(0.02, place, words, va="center", fontsize=9, color="#a03030", transform=axis.get_yaxis_transform())
    drift = _drift(result, figures)
    if result.ideal_step_s is not None and drift is not None:
        label = "by the profile, no plan is faster"
        axis.axvline(result.ideal_step_s * drift, color=canvas.INK, linestyle=":", linewidth=1.2, label=label)
    names = [_label(mapping) for mapping, _ in rows] + [
        ", ".join(map(title_of, one.names)) for one in result.unmeasured
    ]
    axis.set_yticks(range(len(names)), names, fontsize=9)
    axis.set_ylim(len(names) - 0.4, -0.6)
    slowest_s = max(max(mapping.step_s) for mapping, _ in rows)
    farthest_s = max(max(row["corrected_prediction_s"], row["measured_step_s"]["high"]) for _, row in rows)
    # A far-off prediction or interval must not squeeze the steps.
    axis.set_xlim(0, 1.08 * min(max(farthest_s, slowest_s), 2 * slowest_s))
    starts = max(len(mapping.relative_starts) for mapping in result.mappings)
    often = f" after each of {starts} starts" if starts > 1 else ""
    title = f"{result.model} on {result.scenario}: {result.repeats} steps of each mapping{often}, interleaved"
    return _finished(figure, axis, "Step time [s]", title=title)


def _draw_row(axis: Any, place: int, mapping: Mapping, row: Dict[str, Any]) -> None:
    step, first = row["measured_step_s"], place == 0
    colour = _OURS if "hwaware" in mapping.names else _OTHER
    spread = [place + 0.06 * (k % 5 - 2) for k in range(len(mapping.step_s))]
    axis.barh(place, step["median"], 0.62, color=colour, alpha=0.55)
    axis.scatter(mapping.step_s, spread, s=8, color="black", zorder=3, label="each step" if first else None)
    error = [[step["median"] - step["low"]], [step["high"] - step["median"]]]
    label = "median, 95 % interval" if first else None
    axis.errorbar(step["median"], place, xerr=error, color="#c03030", capsize=4, linewidth=1.8, zorder=4, label=label)
    if mapping.pipeline_s:
        label = "median without the driver's start" if first else None
        axis.scatter(row["predictable_step_s"], place, marker="|", s=330, color="#c03030", zorder=4, label=label)
    label = "predicted (without it)" if first else None
    axis.scatter(row["corrected_prediction_s"], place, marker="D", s=42, facecolor="white", edgecolor="#f58518",
                 linewidth=1.8, zorder=5, label=label)  # fmt: skip


def _drift(result: BenchmarkResult, figures: Dict[str, Any]) -> Optional[float]:
    """Return the factor that scales predictions to the machine's speed beside the steps, averaged over the mappings."""
    rows = [figures["mappings"][one.name] for one in result.mappings if one.profile_reference_s is None]
    factors = [row["corrected_prediction_s"] / row["predicted_step_s"] for row in rows]
    return sum(factors) / len(factors) if factors else None


def draw_timelines(result: BenchmarkResult, mapping: Mapping) -> Any:
    """Draw a measured step of a mapping above the simulated one, on the same time axis."""
    steps: List[Tuple[str, Timeline]] = []
    if mapping.timeline is not None:
        steps.append(("Measured", mapping.timeline))
    if result.profile is not None and result.workload is not None:
        steps.append(("Simulated", simulate(mapping.plan, result.workload, result.profile)))
    return draw_steps_of(steps, f"One step of {_label(mapping)} on {result.scenario}")


def draw_predictions(figures: Sequence[Dict[str, Any]]) -> Any:
    """Draw predicted against measured steps of all mappings, with dotted lines at 10 % error."""
    figure, axis = canvas.pyplot().subplots(figsize=(7.5, 6), layout="constrained")
    values: List[float] = []
    for index, one in enumerate(figures):
        rows = list(one["mappings"].values())
        measured = [row["predictable_step_s"] for row in rows]
        predicted = [row["corrected_prediction_s"] for row in rows]
        label = f"{one['scenario']}, {one['model']}"
        axis.scatter(measured, predicted, s=30, color=canvas.stage_colour(index), marker="osD^vP*X"[index // 8 % 8],
                     label=label, alpha=0.85)  # fmt: skip
        values += measured + predicted
    ends = [0.8 * min(values), 1.2 * max(values)]
    axis.plot(ends, ends, color=canvas.INK, linewidth=1)
    for factor in (0.9, 1.1):
        axis.plot(ends, [factor * end for end in ends], color=canvas.INK, linewidth=0.8, linestyle=":")
    axis.set_xscale("log")
    axis.set_yscale("log")
    _plain_ticks(axis)
    labels = "Measured step, without the driver's start [s]", "Predicted step [s]"
    return _finished(figure, axis, *labels, "Predicted against measured; dotted: 10 % off")


def draw_enumerated(result: BenchmarkResult) -> Any:
    """Draw every mapping's measured step, fastest first, with its prediction."""
    ranked = sorted(result.enumerated, key=lambda one: one.typical(one.predictable_s))
    measured = [one.typical(one.predictable_s) for one in ranked]
    predicted = [prediction_at_speed_s(one, result) for one in ranked]
    fewest, most = (count(len(one.step_s) for one in ranked) for count in (min, max))
    steps = f"{fewest} steps" + (" or more" if most > fewest else "")
    figure, axis = canvas.pyplot().subplots(figsize=(11, 4.5), layout="constrained")
    axis.bar(range(len(ranked)), measured, color=_OTHER, label=f"measured, median of {steps}")
    axis.scatter(range(len(ranked)), predicted, marker="D", s=16, color="#f58518", zorder=3, label="predicted")
    title = f"All {len(ranked)} mappings of {result.model} on {result.scenario}"
    return _finished(figure, axis, "Mappings, fastest measured first", "Step, without the driver's start [s]", title)


def compared_baselines(figures: Sequence[Dict[str, Any]]) -> List[str]:
    """Return the baselines over which some result has a measured speed-up."""
    return [name for name in BASELINES if any("median" in one["speed_ups"].get(name, {}) for one in figures)]


def draw_speed_ups(figures: Sequence[Dict[str, Any]]) -> Any:
    """Draw speed-ups over each baseline by scenario, with intervals and the bound on any plan's speed-up over Alpa.

    Call it only if `compared_baselines` returns some.
    """
    figure, axis = canvas.pyplot().subplots(figsize=(11, max(3.0, 1.6 + 0.75 * len(figures))), layout="constrained")
    shown = compared_baselines(figures)
    for index, name in enumerate(shown):
        offset = 0.24 * (index - (len(shown) - 1) / 2)
        given = [(place + offset, one["speed_ups"].get(name, {})) for place, one in enumerate(figures)]
        rows = [(place, row) for place, row in given if "median" in row]
        places = [place for place, _ in rows]
        medians = [row["median"] for _, row in rows]
        label = f"over {BASELINES[name]}" + " (median order)" * (name == "alpa")
        axis.barh(places, medians, 0.2, color=canvas.stage_colour(index), alpha=0.8, label=label)
        errors = [[abs(row[end] - row["median"]) for _, row in rows] for end in ("low", "high")]
        axis.errorbar(medians, places, xerr=errors, fmt="none", color=canvas.INK, capsize=3, linewidth=1.1)
        for place, row in rows:
            words = "" if row["outcome"] == "faster" else f" {row['outcome']}"
            bound = row.get("most") if name == "alpa" else None
            canvas.label(axis, _label_from(row, bound), place, f"{row['median']:.2f}{words}")
        if name == "alpa":
            most = [(place, row["most"]) for place, row in rows if row.get("most")]
            axis.scatter([value for _, value in most], [place for place, _ in most], marker="|", s=160, linewidth=2.2,
                         color="#c03030", zorder=5, label="at most, over Alpa (bound)")  # fmt: skip
    axis.axvline(1.0, color=canvas.INK, linewidth=1)
    axis.set_yticks(range(len(figures)), [f"{one['scenario']}\n{one['model']}" for one in figures], fontsize=9)
    axis.set_ylim(len(figures) - 0.4, -0.6)
    axis.set_xlim(left=0)
    return _finished(figure, axis, "Speed-up of hwaware's mapping (median step of the other over hwaware's)")


def _label_from(row: Dict[str, Any], bound: Optional[float]) -> float:
    """Return where a bar's words begin: past its interval, and past a bound that they would cover."""
    end: float = row["high"]
    return end if bound is None or not end < bound < end + _WORDS else bound


def _finished(figure: Any, axis: Any, x_label: str, y_label: str = "", title: str = "") -> Any:
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.set_title(title, fontsize=11)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    canvas.bare(axis)
    return figure


def _plain_ticks(axis: Any) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    for one in (axis.xaxis, axis.yaxis):
        one.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
        one.set_major_formatter(StrMethodFormatter("{x:g}"))
        one.set_minor_formatter(NullFormatter())


def _label(mapping: Mapping) -> str:
    return " = ".join(map(title_of, mapping.names))
