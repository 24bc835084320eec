"""Draw a step as a Gantt chart: each stage's passes, and below them the messages that it sends."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

from hwaware.formatting import SECONDS, Unit, common_unit, counted, text
from hwaware.report import canvas
from hwaware.timeline import Event, Timeline

_COLOURS = {
    "forward": "#4c78a8",
    "backward": "#9ecae9",
    "synchronisation": "#b279a2",
    "update": "#54a24b",
    "activation": "#f58518",
    "gradient": "#ffbf79",
}
_NAMES = {"activation": "activations sent", "gradient": "gradients sent", "synchronisation": "gradient sync"}
# Rows of a stage as (offset, height): messages each way, below the computation.
_ROWS = {"activation": (0.28, 0.14), "gradient": (0.44, 0.14)}
_COMPUTE_ROW = (-0.08, 0.5)
# Bars of at least this part of the step show their microbatch's number.
_WIDE_ENOUGH = 0.012
# Bars of at least this part of the step have white edges, some pixels apart. The edges of shorter bars would hide them.
_EDGED = 0.004


def draw_timeline(timeline: Timeline) -> Any:
    """Draw one row a stage, from the start of the step to its end."""
    figure, axis = canvas.pyplot().subplots(figsize=(13, _height(timeline)), layout="constrained")
    unit = common_unit([timeline.step_s], SECONDS)
    _draw_rows(axis, timeline, unit)
    axis.set_xlim(0, timeline.step_s / unit.size or 1.0)
    axis.set_xlabel(f"Time from the start of the step [{unit.label}]")
    axis.set_title(f"{timeline.title}: {_about(timeline)}", fontsize=11)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return figure


def draw_steps_of(steps: Sequence[Tuple[str, Timeline]], title: str) -> Any:
    """Draw several steps below each other on one time axis, each with a name such as "Measured"."""
    figure, axes = canvas.pyplot().subplots(
        len(steps), 1, figsize=(13, min(canvas.TALLEST, sum(_height(one) for _, one in steps))), sharex=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    longest = max(timeline.step_s for _, timeline in steps)
    unit = common_unit([longest], SECONDS)
    for axis, (name, timeline) in zip(axes[:, 0], steps):
        _draw_rows(axis, timeline, unit)
        axis.set_title(f"{name}: {_about(timeline)}", fontsize=11)
    kinds = {label: one for axis in axes[:, 0] for one, label in zip(*axis.get_legend_handles_labels())}
    axes[0, 0].legend(
        kinds.values(), kinds.keys(), fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False
    )
    axes[-1, 0].set_xlim(0, longest / unit.size or 1.0)
    axes[-1, 0].set_xlabel(f"Time from the start of the step [{unit.label}]")
    figure.suptitle(title)
    return figure


def _height(timeline: Timeline) -> float:
    return min(canvas.TALLEST, max(2.4, 1.6 + 0.75 * len(timeline.devices)))


def _about(timeline: Timeline) -> str:
    microbatches = f"{counted(timeline.num_microbatches, 'microbatch')}, {timeline.schedule}, {timeline.sends} sends"
    return f"{text(timeline.step_s, SECONDS)}; {microbatches}"


def _draw_rows(axis: Any, timeline: Timeline, unit: Unit) -> None:
    stages = len(timeline.devices)
    for kind, events in _by_kind(timeline).items():
        _draw_kind(axis, kind, events, unit, timeline.step_s)
    _number(axis, timeline, unit)
    busy = [timeline.busy_s(stage) / timeline.step_s if timeline.step_s else 0.0 for stage in range(stages)]
    labels = [f"stage {k}\n{_devices(timeline.devices[k])}\nbusy {busy[k]:.0%}" for k in range(stages)]
    canvas.name_rows(axis, labels)
    canvas.bare(axis)


def _devices(devices: Tuple[str, ...]) -> str:
    return ", ".join(devices) if len(devices) <= 2 else f"{devices[0]} and {len(devices) - 1} more"


def _by_kind(timeline: Timeline) -> Dict[str, List[Event]]:
    kinds: Dict[str, List[Event]] = {}
    for event in timeline.events:
        kinds.setdefault(event.kind, []).append(event)
    return {kind: kinds[kind] for kind in _COLOURS if kind in kinds}


def _draw_kind(axis: Any, kind: str, events: List[Event], unit: Unit, step_s: float) -> None:
    """Draw all bars of a kind as one collection a stage, which stays fast for thousands of bars."""
    middle, height = _ROWS.get(kind, _COMPUTE_ROW)
    label = _NAMES.get(kind, kind)
    for stage in sorted({event.stage for event in events}):
        spans = [
            (event.start_s / unit.size, (event.end_s - event.start_s) / unit.size)
            for event in events
            if event.stage == stage
        ]
        place = (stage + middle - height / 2, height)
        edges = [0.4 if width * unit.size >= _EDGED * step_s else 0.0 for _, width in spans]
        axis.broken_barh(spans, place, facecolors=_COLOURS[kind], edgecolor="white", linewidths=edges, label=label)
        label = "_"  # a label that matplotlib leaves out of the legend


def _number(axis: Any, timeline: Timeline, unit: Unit) -> None:
    """Write each pass's microbatch into its bar, if it fits."""
    centred = {"fontsize": 7, "ha": "center", "va": "center"}
    once = {(event.kind, event.stage, event.microbatch): event for event in timeline.events}  # one for all replicas
    for event in once.values():
        long_enough = event.end_s - event.start_s >= _WIDE_ENOUGH * timeline.step_s
        if event.kind in ("forward", "backward") and event.microbatch >= 0 and long_enough:
            middle = (event.start_s + event.end_s) / 2 / unit.size
            ink = "white" if event.kind == "forward" else "black"
            axis.text(middle, event.stage + _COMPUTE_ROW[0], str(event.microbatch), color=ink, **centred)
