"""Draw records as PNG or SVG; every number in a picture comes from the record."""

from __future__ import annotations

import statistics
from math import cos, hypot, pi, sin
from textwrap import fill
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Tuple

from hwaware.cluster import ClusterProfile, Link, LinkTable
from hwaware.costs.speed import prediction_at_speed_s
from hwaware.costs.stages import exchanging, located
from hwaware.errors import PlanError, UnusableInputError
from hwaware.formatting import BYTES_PER_S, FLOPS_PER_S, SECONDS, common_unit, counted, text
from hwaware.placement.sensitivity import explain
from hwaware.plans import Plan
from hwaware.records import FileRecord, PathLike
from hwaware.report import canvas
from hwaware.report.bench_tables import title_of
from hwaware.report.cluster_picture import draw_cluster, peak_flops_per_s
from hwaware.report.other_pictures import draw_sensitivity, draw_workload
from hwaware.report.plan_picture import draw_plan
from hwaware.report.timeline_picture import draw_timeline
from hwaware.result import BenchmarkResult, Mapping
from hwaware.simulator import simulate
from hwaware.timeline import Timeline
from hwaware.workload import Workload

# Parts of the way along a link where its label may stand, the preferred one first.
_LABEL_AT = (0.5, 0.42, 0.58, 0.35, 0.65, 0.28, 0.72)
# Radius of a device's circle on the axes of a map.
_CIRCLE = 0.33
_SHORT = 1.5
# Longer names of devices stand above their circles.
_MOST_IN_CIRCLE = 12
# With more devices, a map is larger. Very large pictures take too much memory: circles of more devices are smaller.
_MOST_ON_A_MAP, _MOST_ON_A_LARGE_MAP = 9, 60
# Height of a map's axes, and distance at which two circles do not touch, in inches.
_MAP_HEIGHT, _APART = 3.6, 0.97


class Context(NamedTuple):
    """Records that a plan's pictures need beside the plan: the cluster that runs it, and the workload."""

    profile: Optional[ClusterProfile] = None
    workload: Optional[Workload] = None


NO_CONTEXT = Context()
Point = Tuple[float, float]
# Draws its picture when called.
Drawing = Callable[[], Any]


def drawings(record: FileRecord, context: Context = NO_CONTEXT) -> Dict[str, Drawing]:
    """Return the pictures of a record by name, the usual one first; none for a plan without stages."""
    if isinstance(record, ClusterProfile):
        return {"cluster": lambda: draw_cluster(record)}
    if isinstance(record, Workload):
        return {"workload": lambda: draw_workload(record)}
    if isinstance(record, Timeline):
        return {"timeline": lambda: draw_timeline(record)}
    if isinstance(record, BenchmarkResult):
        return {"result": lambda: _draw_result(record)}
    return _plan_drawings(record, context) if isinstance(record, Plan) and record.stages else {}


def _plan_drawings(plan: Plan, context: Context) -> Dict[str, Drawing]:
    profile, workload = context
    if profile is not None:
        unknown = {device for stage in plan.stages for device in stage.devices} - {one.id for one in profile.devices}
        if unknown:
            raise PlanError(
                f"the plan runs on {', '.join(sorted(unknown))}, which the cluster does not have.",
                "give the cluster for which the plan was made.",
            )
    found: Dict[str, Drawing] = {"plan": lambda: draw_plan(plan, profile, workload)}
    if profile is not None:
        found["map"] = lambda: _draw_one_map(profile, plan)
    if profile is not None and workload is not None:
        found["timeline"] = lambda: draw_timeline(simulate(plan, workload, profile))
        found["sensitivity"] = lambda: draw_sensitivity(explain(plan, workload, profile))
    return found


def plot(record: FileRecord, path: PathLike, name: Optional[str] = None, context: Context = NO_CONTEXT) -> None:
    """Draw a record and write the picture to `path` (.png or .svg).

    Args:
        record: The record to draw.
        path: The file, whose ending names the format.
        name: A key of the record's `drawings`; the first one if left out.
        context: The records that a plan's timeline and sensitivity need.

    Raises:
        UnusableInputError: The record has no such picture, or matplotlib is missing.
        PlanError: The plan runs on devices that the context's profile lacks.
    """
    known = drawings(record, context)
    if not known:
        why = ": it has no stages" if isinstance(record, Plan) else ""
        raise UnusableInputError(f"There is no picture of this {record.SCHEMA}{why}.", "show it without --plot.")
    chosen = name or next(iter(known))
    if chosen not in known:
        raise UnusableInputError(
            f"There is no picture {chosen!r} of this {record.SCHEMA}, only {', '.join(known)}.",
            "for a plan's timeline or sensitivity give --cluster and --workload too, for its map --cluster.",
            found=chosen,
            expected=tuple(known),
        )
    canvas.save(known[chosen](), path)


def _draw_one_map(profile: ClusterProfile, plan: Plan) -> Any:
    devices, larger = profile.devices, 1.0
    if len(devices) > _MOST_ON_A_MAP:
        room = 2 if any(len(device.id) > _MOST_IN_CIRCLE for device in devices) else 1  # names above the circles
        larger = min(room * len(devices), _MOST_ON_A_LARGE_MAP) / _MOST_ON_A_MAP
    figure, axis = canvas.pyplot().subplots(figsize=(6 * larger, 5.4 * larger), layout="constrained")
    draw_map(axis, profile, plan)
    return figure


def predictions_s(result: BenchmarkResult) -> Dict[str, float]:
    """Return each mapping's predicted step, scaled to the machine's speed during its run if the result knows it."""
    return {mapping.name: prediction_at_speed_s(mapping, result) for mapping in result.mappings}


def plot_comparison(
    result: BenchmarkResult, profile: ClusterProfile, mappings: Tuple[Mapping, ...], path: PathLike
) -> None:
    """Draw maps of some mappings with their links, and all predicted and measured step times."""
    pyplot = canvas.pyplot()
    figure, axes = pyplot.subplots(1, len(mappings) + 1, figsize=(5.2 * len(mappings) + 6, 5.4), layout="constrained")
    predicted_s = predictions_s(result)
    for axis, mapping in zip(axes, mappings):
        draw_map(axis, profile, mapping.plan)
        measured, expected = (text(one, SECONDS) for one in (mapping.median_step_s, predicted_s[mapping.name]))
        measured = f"{measured} measured, {expected} predicted"
        axis.set_title(f"{title_of(mapping.name)}\n{measured}", fontsize=11)
    _draw_steps(axes[-1], result)
    microbatches = counted(result.num_microbatches, "microbatch")
    figure.suptitle(f"{result.model} on {result.scenario}, {microbatches} a step", fontsize=12)
    canvas.save(figure, path)


def draw_map(axis: Any, profile: ClusterProfile, plan: Plan) -> None:
    """Draw devices as a ring of circles, coloured by stage, and the rates of links that the pipeline uses."""
    places = _ring([device.id for device in profile.devices])
    stage_of = {device: index for index, stage in enumerate(plan.stages) for device in stage.devices}
    table = LinkTable(profile)
    stages = located(plan)
    pairs = [pair for one, other in zip(stages, stages[1:]) for pair in exchanging(one.replicas, other.replicas)]
    size = min(1.0, _spacing(len(places)) * axis.figure.get_figheight() / _MAP_HEIGHT / _APART)
    for source, target in pairs:
        others = [(places[s], places[t]) for s, t in pairs if (s, t) != (source, target)]
        _draw_link(axis, places, table.between(source, target), (source, target), others, size)
    for device in profile.devices:
        _draw_device(axis, places[device.id], device, plan, stage_of.get(device.id), size)
    axis.set_xlim(-1.75, 1.75)
    axis.set_ylim(-1.6, 1.6)
    axis.set_aspect("equal")
    axis.axis("off")


def _spacing(devices: int) -> float:
    """Return the distance of neighbours on the ring."""
    return 2 * sin(pi / max(2, devices))


def _ring(names: List[str]) -> Dict[str, Tuple[float, float]]:
    start = pi * 3 / 4
    angles = {name: start - 2 * pi * index / len(names) for index, name in enumerate(names)}
    return {name: (1.15 * cos(angle), 1.0 * sin(angle)) for name, angle in angles.items()}


def _draw_device(axis: Any, place: Tuple[float, float], device: Any, plan: Plan, stage: Any, size: float) -> None:
    colour = canvas.IDLE if stage is None else canvas.stage_colour(stage)
    axis.scatter(*place, s=4900 * size**2, color=colour, edgecolor="white", linewidth=2, zorder=3)
    layers = "idle"
    if stage is not None:
        first, last = plan.stages[stage].layers
        layers = f"stage {stage}\nlayers {first}-{last}" if first != last else f"stage {stage}\nlayer {first}"
    rate = peak_flops_per_s(device)
    unit = common_unit([rate], FLOPS_PER_S)
    words = f"{layers}\n{rate / unit.size:.3g} {unit.label}"  # a circle has no room for more digits
    if len(device.id) <= _MOST_IN_CIRCLE:
        words = f"{device.id}\n{words}"
    else:
        above = {"xytext": (0, 40 * size), "textcoords": "offset points"}
        axis.annotate(canvas.shortened(device.id), place, ha="center", fontsize=8 * size, zorder=4, **above)
    ink = "black" if stage is None else "white"
    axis.text(*place, words, ha="center", va="center", fontsize=8 * size, color=ink, zorder=4)


def _draw_link(
    axis: Any,
    places: Dict[str, Point],
    link: Optional[Link],
    ends: Tuple[str, str],
    others: List[Tuple[Point, Point]],
    size: float,
) -> None:
    (x0, y0), (x1, y1) = (places[end] for end in ends)
    arrow = {"arrowstyle": "-|>", "color": "#404040", "linewidth": 1.5, "shrinkA": 36 * size, "shrinkB": 36 * size}
    axis.annotate("", (x1, y1), (x0, y0), arrowprops=arrow, zorder=2)
    if link is not None:
        label = text(link.bandwidth_bytes_per_s, BYTES_PER_S)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
        points = [(x0 + part * (x1 - x0), y0 + part * (y1 - y0)) for part in _LABEL_AT]
        place = max(points, key=lambda point: round(_room(point, places.values(), others), 1))
        # A short arrow would vanish under its label, which stands outside the ring then: right or left, above or below.
        is_large = len(places) > _MOST_ON_A_MAP  # then neighbours are so near that labels must clear their circles
        is_short = hypot(x1 - x0, y1 - y0) < (1.5 * _spacing(len(places)) if is_large else _SHORT)
        right, up = (58 * size, 42 * size) if is_large else (31, 12)
        aside = (right * place[0] / hypot(*place), up * place[1] / hypot(*place)) if is_short else (0, 0)
        axis.annotate(label, place, aside, textcoords="offset points", ha="center", va="center", fontsize=8 * size,
                      bbox=None if is_short else box, zorder=5)  # fmt: skip


def _room(point: Point, circles: Iterable[Point], arrows: Iterable[Tuple[Point, Point]]) -> float:
    """Return how far a label at `point` is from the nearest circle or arrow of another link."""
    to_circles = [hypot(point[0] - x, point[1] - y) - _CIRCLE for x, y in circles]
    return min([*to_circles, *(_distance(point, *arrow) for arrow in arrows)])


def _distance(point: Point, start: Point, end: Point) -> float:
    """Return the distance of a point from the segment between two others."""
    along = (end[0] - start[0], end[1] - start[1])
    part = ((point[0] - start[0]) * along[0] + (point[1] - start[1]) * along[1]) / (along[0] ** 2 + along[1] ** 2)
    nearest = min(max(part, 0.0), 1.0)
    return hypot(point[0] - start[0] - nearest * along[0], point[1] - start[1] - nearest * along[1])


def _draw_steps(axis: Any, result: BenchmarkResult) -> None:
    """Draw every measured step as a dot, medians and predictions as bars."""
    width, predicted = 0.38, predictions_s(result)
    places = range(len(result.mappings))
    unit = common_unit([*predicted.values(), *(max(mapping.step_s) for mapping in result.mappings)], SECONDS)
    heights = [predicted[mapping.name] / unit.size for mapping in result.mappings]
    medians = [mapping.median_step_s / unit.size for mapping in result.mappings]
    axis.bar([place - width / 2 for place in places], heights, width, color="#bab0ac", label="predicted")
    axis.bar([place + width / 2 for place in places], medians, width, color="#4c78a8", label="measured, median")
    highest = max(heights)
    for place, mapping in zip(places, result.mappings):
        spread = [place + width / 2 + 0.02 * (k % 5 - 2) for k in range(len(mapping.step_s))]
        label = "measured, each step" if place == 0 else None
        steps = [step_s / unit.size for step_s in mapping.step_s]
        highest = max(highest, *steps)
        axis.scatter(spread, steps, s=9, color="black", zorder=3, label=label)
        for offset, value in ((-width / 2, heights[place]), (width / 2, medians[place])):
            axis.text(place + offset, 0.02 * max(medians), f"{value:.2f}", ha="center", va="bottom", color="white")
    axis.set_xticks(list(places), [fill(title_of(mapping.name), 12) for mapping in result.mappings])
    axis.set_ylim(0, 1.2 * highest)
    axis.set_ylabel(f"Step time [{unit.label}]")
    axis.legend(loc="upper left", fontsize=8)
    canvas.bare(axis)


def _draw_result(result: BenchmarkResult) -> Any:
    figure, axis = canvas.pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    _draw_steps(axis, result)
    median = statistics.median(mapping.median_step_s for mapping in result.mappings)
    axis.set_title(f"{result.model} on {result.scenario} (median of medians {text(median, SECONDS)})", fontsize=11)
    return figure
