"""Pictures of records as PNG or SVG: every number in them comes out of the record."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple, Type

from hwaware.cluster import ClusterProfile, LinkTable
from hwaware.errors import UnusableInputError
from hwaware.plans import Plan
from hwaware.records import FileRecord, PathLike
from hwaware.result import BenchmarkResult, Mapping

_STAGE_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")
_IDLE = "#d8d8d8"
_MEGABIT = 1e6 / 8


def plot(record: FileRecord, path: PathLike) -> None:
    """Draw a record and write the picture to `path` (.png or .svg).

    Raises:
        UnusableInputError: There is no picture for this kind of record, or matplotlib is missing.
    """
    draw = _DRAWINGS.get(type(record))
    if draw is None:
        raise UnusableInputError(f"There is no picture of a {record.SCHEMA} yet.", "show it without --plot.")
    figure = draw(record)
    _save(figure, path)


def predictions_s(result: BenchmarkResult) -> Dict[str, float]:
    """Each mapping's prediction at the speed that the machine had while it ran, where the result says it."""
    reference = result.environment.get("profile_reference_s")
    return {
        mapping.name: mapping.corrected_prediction_s(reference) if reference else mapping.predicted_step_s
        for mapping in result.mappings
    }


def plot_comparison(
    result: BenchmarkResult, profile: ClusterProfile, mappings: Tuple[Mapping, ...], path: PathLike
) -> None:
    """Stage-to-host maps of some mappings with the measured links, and all step times predicted and measured."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, len(mappings) + 1, figsize=(5.2 * len(mappings) + 6, 5.4), layout="constrained")
    for axis, mapping in zip(axes, mappings):
        draw_map(axis, profile, mapping.plan)
        measured = f"{mapping.median_step_s:.2f} s measured, {predictions_s(result)[mapping.name]:.2f} s predicted"
        axis.set_title(f"{mapping.name}\n{measured}", fontsize=11)
    _draw_steps(axes[-1], result)
    figure.suptitle(f"{result.model} on {result.scenario}, {result.num_microbatches} microbatches a step", fontsize=12)
    _save(figure, path)


def draw_map(axis: Any, profile: ClusterProfile, plan: Plan) -> None:
    """Devices as a ring of circles, coloured by stage, and the links that the pipeline uses with their rates."""
    places = _ring([device.id for device in profile.devices])
    stage_of = {device: index for index, stage in enumerate(plan.stages) for device in stage.devices}
    table = LinkTable(profile)
    for before, after in zip(plan.stages, plan.stages[1:]):
        _draw_link(axis, places, table, before.devices[-1], after.devices[0])
    for device in profile.devices:
        _draw_device(axis, places[device.id], device, plan, stage_of.get(device.id))
    axis.set_xlim(-1.75, 1.75)
    axis.set_ylim(-1.6, 1.6)
    axis.set_aspect("equal")
    axis.axis("off")


def _ring(names: List[str]) -> Dict[str, Tuple[float, float]]:
    from math import cos, pi, sin

    start = pi * 3 / 4
    angles = {name: start - 2 * pi * index / len(names) for index, name in enumerate(names)}
    return {name: (1.15 * cos(angle), 1.0 * sin(angle)) for name, angle in angles.items()}


def _draw_device(axis: Any, place: Tuple[float, float], device: Any, plan: Plan, stage: Any) -> None:
    colour = _IDLE if stage is None else _STAGE_COLOURS[stage % len(_STAGE_COLOURS)]
    axis.scatter(*place, s=4200, color=colour, edgecolor="white", linewidth=2, zorder=3)
    layers = "idle"
    if stage is not None:
        first, last = plan.stages[stage].layers
        layers = f"stage {stage}\nlayers {first}-{last}" if first != last else f"stage {stage}\nlayer {first}"
    text = f"{device.id}\n{peak_flops_per_s(device) / 1e9:.0f} GFLOP/s\n{layers}"
    ink = "black" if stage is None else "white"
    axis.text(*place, text, ha="center", va="center", fontsize=8, color=ink, zorder=4)


def _draw_link(axis: Any, places: Dict[str, Tuple[float, float]], table: LinkTable, source: str, target: str) -> None:
    (x0, y0), (x1, y1) = places[source], places[target]
    arrow = {"arrowstyle": "-|>", "color": "#404040", "linewidth": 1.5, "shrinkA": 36, "shrinkB": 36}
    axis.annotate("", (x1, y1), (x0, y0), arrowprops=arrow, zorder=2)
    link = table.between(source, target)
    if link is not None:
        label = f"{link.bandwidth_bytes_per_s / _MEGABIT:.0f} Mbit/s"
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        axis.text((x0 + x1) / 2, (y0 + y1) / 2, label, ha="center", va="center", fontsize=8, bbox=box, zorder=5)


def peak_flops_per_s(device: Any) -> float:
    """The highest measured throughput of a device, over its data types and sizes."""
    return max(float(point.flops / point.seconds) for points in device.throughput.values() for point in points)


def _draw_steps(axis: Any, result: BenchmarkResult) -> None:
    """Every measured step as a dot, medians and predictions as bars, time from zero."""
    width, predicted = 0.38, predictions_s(result)
    places = range(len(result.mappings))
    heights = [predicted[mapping.name] for mapping in result.mappings]
    medians = [mapping.median_step_s for mapping in result.mappings]
    axis.bar([place - width / 2 for place in places], heights, width, color="#bab0ac", label="predicted")
    axis.bar([place + width / 2 for place in places], medians, width, color="#4c78a8", label="measured, median")
    for place, mapping in zip(places, result.mappings):
        spread = [place + width / 2 + 0.02 * (k % 5 - 2) for k in range(len(mapping.step_s))]
        label = "measured, each step" if place == 0 else None
        axis.scatter(spread, mapping.step_s, s=9, color="black", zorder=3, label=label)
        for offset, value in ((-width / 2, heights[place]), (width / 2, medians[place])):
            axis.text(place + offset, 0.02 * max(medians), f"{value:.2f}", ha="center", va="bottom", color="white")
    axis.set_xticks(list(places), [mapping.name.replace("-", "\n", 1) for mapping in result.mappings])
    axis.set_ylim(0, 1.2 * max(max(mapping.step_s) for mapping in result.mappings))
    axis.set_ylabel("Step time [s]")
    axis.legend(loc="upper left", fontsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _draw_result(result: BenchmarkResult) -> Any:
    figure, axis = _pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    _draw_steps(axis, result)
    median = statistics.median(mapping.median_step_s for mapping in result.mappings)
    axis.set_title(f"{result.model} on {result.scenario} (median of medians {median:.2f} s)", fontsize=11)
    return figure


def _draw_cluster(profile: ClusterProfile) -> Any:
    """The directed link matrix as a heat map with units."""
    pyplot = _pyplot()
    names = [device.id for device in profile.devices]
    table = LinkTable(profile)
    rates = [[_rate(table, source, target) for target in names] for source in names]
    side = 2.5 + 0.9 * len(names)
    figure, axis = pyplot.subplots(figsize=(side + 1.5, side), layout="constrained")
    picture = axis.imshow(rates, cmap="viridis", vmin=0)
    for row, values in enumerate(rates):
        for column, value in enumerate(values):
            if value == value:  # not NaN: there is a link
                axis.text(column, row, f"{value:.0f}", ha="center", va="center", color="white", fontsize=9)
    labels = [f"{device.id}\n{peak_flops_per_s(device) / 1e9:.0f} GFLOP/s" for device in profile.devices]
    axis.set_xticks(range(len(names)), names)
    axis.set_yticks(range(len(names)), labels)
    axis.set_xlabel("to")
    axis.set_ylabel("from (with measured throughput)")
    figure.colorbar(picture, label="Bandwidth [Mbit/s]")
    return figure


def _rate(table: LinkTable, source: str, target: str) -> float:
    link = None if source == target else table.between(source, target)
    return float("nan") if link is None else link.bandwidth_bytes_per_s / _MEGABIT


_DRAWINGS: Dict[Type[FileRecord], Callable[[Any], Any]] = {BenchmarkResult: _draw_result, ClusterProfile: _draw_cluster}


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise UnusableInputError("matplotlib is not installed, pictures need it.", "pip install matplotlib") from None
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text: it can be searched, and the file is small
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: PathLike) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:  # an ending that matplotlib does not know
        raise UnusableInputError(
            f"{path} cannot be written as a picture: {error}.", "end the name in .png or .svg."
        ) from error
    finally:
        _pyplot().close(figure)
